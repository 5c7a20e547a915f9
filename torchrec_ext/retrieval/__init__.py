"""What was trained is what is served: certified bundles, search, and the scorer over them. Serving imports no torch."""

from torchrec_ext.exports import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    without_torch={"bundle", "catalogue", "manifest", "scorer", "search", "store"},
)
