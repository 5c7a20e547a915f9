"""What was trained is what is served: certified bundles, stored embeddings, indexes, and the scorer over them."""

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
