"""CannotCaptureError: why a step stays as it is."""


class CannotCaptureError(ValueError):
    """A step cannot be captured; the message names the obstacle."""
