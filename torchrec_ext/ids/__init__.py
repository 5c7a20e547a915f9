"""Raw 64-bit ids to rows of embedding tables of fixed capacity: which ids get a row, and which lose theirs."""

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
