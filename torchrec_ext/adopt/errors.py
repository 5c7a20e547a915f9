"""CannotAdopt: what the package refuses to take over from a user's code, by name, with the line and the remedy.

The other errors end a captured step, and are not shown to users.
"""

from torchrec_ext.capture.errors import CannotCaptureError


class CannotAdopt(CannotCaptureError):  # noqa: N818 - the name says what happened, as CannotCaptureError's does
    """A module, an optimizer, a loss or a Dataset cannot be adopted; the message names what, why and the remedy."""


class BadIdError(Exception):
    """A batch has an id outside of its table, and nothing was written; the message names both."""


class EndOfCaptureError(CannotAdopt):
    """No batch is captured any more: the first captured step failed and was taken back, or each step is another one."""


class HalfStepError(Exception):
    """A captured step failed half way, so that weights are lost; see ``__cause__``."""


class TensorChangedError(Exception):
    """A tensor that a captured step reads is not the one of the capture; the message names it."""
