"""CannotCaptureError: why a step stays as it is."""


class CannotCaptureError(ValueError):
    """A step cannot be captured; the message names the obstacle."""


class RareShapeError(CannotCaptureError):
    """A batch has a rare shape, and no step is captured for it yet."""
