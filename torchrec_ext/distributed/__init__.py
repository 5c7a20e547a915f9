"""Sharding, towers on ranks and runtime for any module that holds TorchRec collections."""

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
