"""What is said of a bundle that is damaged, or of parts that do not belong together."""

from __future__ import annotations


class BundleError(ValueError):
    """A bundle cannot be written, or must not be served: the message names the file, what is wrong with it, and the remedy."""
