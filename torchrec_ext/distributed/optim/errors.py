"""GradientNotFiniteError: a gradient that no optimizer may use."""

from __future__ import annotations

from collections.abc import Sequence


class GradientNotFiniteError(ValueError):
    """A gradient is NaN or infinite; nothing was written by it. Raised on every rank alike.

    Args:
        message: names of the gradients, and their ranks where known.
        step: step of the gradient, counted from 1; 0 for the step that raises.
    """

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


def first_few(texts: Sequence[str], separator: str = ", ") -> str:
    """Joins the first three texts for a message, and counts the others.

    Example:
        >>> first_few(["a", "b"]), first_few(["a", "b", "c", "d", "e"])
        ('a, b', 'a, b, c and 2 more')
    """
    text = separator.join(texts[:3])
    if len(texts) > 3:
        text += f" and {len(texts) - 3} more"
    return text
