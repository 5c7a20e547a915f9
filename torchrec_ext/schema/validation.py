"""DataError, which every check of the data raises, and OutOfRange, what a batch does with an id outside its table.

This module imports no torch: settings name what it defines.
"""

from __future__ import annotations

from typing import Literal

OutOfRange = Literal["error", "oov"]


class DataError(ValueError):
    """Input that breaks a rule: the message names the feature, the table, the value, the row and the remedy."""
