"""A user's own nn.Module, optimizer and Dataset, unchanged, at the speed of the package's own models."""

import sys

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.exports import CallableModule, attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
sys.modules[__name__].__class__ = CallableModule
