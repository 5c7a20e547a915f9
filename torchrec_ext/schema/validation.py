"""DataError, which every check of the data raises, OutOfRange, and names listed for a message.

This module imports no torch, because settings use its names.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Literal

OutOfRange = Literal["error", "oov"]


class DataError(ValueError):
    """Invalid input; the message names the feature, the table, the value, the row and the remedy."""


def listed(names: Iterable[str]) -> str:
    """Joins names by commas for a message, and leaves out those beyond 100 characters.

    Example:
        >>> listed(["user", "item"]), listed(["x" * 60, "y" * 60])[58:]
        ('user, item', 'xx, ...')
    """
    return textwrap.shorten(", ".join(names), 100, placeholder=" ...")
