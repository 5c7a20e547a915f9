"""CannotAdopt: what the package refuses to take over from a user's code, by name, with the line and the remedy."""

from torchrec_ext.capture.lowering import CannotCaptureError


class CannotAdopt(CannotCaptureError):  # noqa: N818 - the name says what happened, as CannotCaptureError's does
    """A module, an optimizer, a loss or a Dataset cannot be adopted; the message names what, why and the remedy."""
