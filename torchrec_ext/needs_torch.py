"""Importing this module checks torch's version: the first import of every module that imports torch.

``from torchrec_ext.needs_torch import and_torchrec`` also checks TorchRec and FBGEMM: the first import of every module
that imports them. A mixed triple then says what is wrong and which line repairs it, instead of `undefined symbol`. Both
are imports and not calls, so that they can stand above `import torch` (ruff's isort keeps the section `guard` there).
They cost 10 ms, once per process.
"""

from __future__ import annotations

import sys
from typing import Any

from torchrec_ext import stack

stack.require_torch()


def __getattr__(name: str) -> None:
    if name != "and_torchrec":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stack.require()
    # The next import finds it, without another check.
    globals()[name] = None


def loaded_class(path: str) -> Any:
    """Returns a class for ``isinstance`` by ``module:name``, such as TorchRec's, without importing it.

    If nothing has imported the class, no object can be of it: then it is the empty tuple.

    Example:
        >>> isinstance(3, loaded_class("builtins:int")), isinstance(3, loaded_class("no_such_module:Int"))
        (True, False)
    """
    module, _, name = path.partition(":")
    return getattr(sys.modules.get(module), name, ())
