"""Rows on disk to batches in memory."""

from torchrec_ext.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
