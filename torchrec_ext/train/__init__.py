"""The training loop over TorchRec's pipelines, its figures and its run folder."""

import torchrec_ext.needs_torch  # noqa: F401

import lazy_loader

# The names are in __init__.pyi, and imported when first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
