"""K networks of one shape that train in one process, by batched operations."""

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
