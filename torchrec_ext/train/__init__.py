"""The training loop over TorchRec's pipelines, its figures and its run folder."""

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

from torchrec_ext.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
