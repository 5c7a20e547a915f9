"""Recommender sub-networks declared as towers, trained hybrid-parallel on TorchRec, and served as they were trained.

Importing the package loads no torch: the names in ``__init__.pyi`` are imported when first used, after a check of the
installed stack. Each subpackage exports its own names alike: ``from torchrec_ext.modules import Tower, TopMLP``.
"""

from torchrec_ext.exports import attach

__version__ = "0.2.0"
# `train` is not a name here: it would be the function or the subpackage, whichever was
# imported last.
__getattr__, __dir__, __all__ = attach(
    __name__, __file__, without_torch={"retrieval.bundle", "retrieval.scorer"}
)
