"""DataError, which every check of the data raises, OutOfRange, and names listed for a message.

check_choice(), check_least(): the two checks that most settings need. did_you_mean(): the remedy for a wrong name.

This module imports no torch, because settings use its names.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable
from typing import Literal

OutOfRange = Literal["error", "oov"]


class DataError(ValueError):
    """Invalid input; the message names the feature, the table, the value, the row and the remedy."""


def listed(names: Iterable[str]) -> str:
    """Joins names by commas for a message, and leaves out those beyond 100 characters.

    Example:
        >>> listed(["user", "item"]), listed(["x" * 60, "y" * 60])[58:], listed(["x" * 120])[94:]
        ('user, item', 'xx, ...', 'xx ...')
    """
    text = ", ".join(names)
    short = textwrap.shorten(text, 100, placeholder=" ...")
    # Of a first name that is too long nothing would be left.
    return f"{text[:96]} ..." if short == "..." else short


def did_you_mean(
    name: str, names: Iterable[str], otherwise: str, *, cutoff: float = 0.6
) -> str:
    """Returns a question with the nearest of ``names`` for a message, or the words ``otherwise`` if none is near.

    Example:
        >>> did_you_mean("yaer", ["user", "year"], "there are user, year"), did_you_mean("x", ["year"], "there is year")
        ("did you mean 'year'?", 'there is year')
    """
    there = list(names)
    same = [each for each in there if each.lower() == name.lower()]
    match = same or difflib.get_close_matches(name, there, n=1, cutoff=cutoff)
    return f"did you mean {match[0]!r}?" if match else otherwise


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuses a value that is no choice of a setting.

    Raises:
        ValueError: naming the choices.

    Example:
        >>> check_choice("mode", "maximum", ["max", "min"])
        Traceback (most recent call last):
        ...
        ValueError: mode='maximum': must be one of max, min
    """
    names = list(choices)
    if value not in names:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(names)}")


def check_least(name: str, value: float | None, least: int = 1) -> None:
    """Refuses a number below ``least``; None stands for no number.

    Raises:
        ValueError: the number is below it.

    Example:
        >>> check_least("steps", 0)
        Traceback (most recent call last):
        ...
        ValueError: steps=0: must be 1 or more
    """
    if value is not None and value < least:
        raise ValueError(f"{name}={value}: must be {least} or more")
