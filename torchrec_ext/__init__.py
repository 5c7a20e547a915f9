"""Recommender sub-networks declared as towers, trained hybrid-parallel on TorchRec, and served as they were trained.

Importing the package loads no torch: the names in ``__init__.pyi`` are imported when first used, after a check of the
installed stack. Each subpackage exports its own names alike: ``from torchrec_ext.modules import Tower, TopMLP``.
"""

import importlib
from typing import Any

import lazy_loader

# `train` is not a name here: it would be the function or the subpackage, whichever was imported last.
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    importlib.import_module("torchrec_ext.needs_torch")
    return _load(name)
