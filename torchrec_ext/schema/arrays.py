"""Array columns: a dense column with W numbers in each row, which a batch holds as W columns of one number."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

_ELEMENT = re.compile(r"(.+)\[(\d+)\]")


class Element(NamedTuple):
    """One of the numbers of an array column: the column, and which of its numbers."""

    column: str
    place: int


def dense_names(dense: Sequence[str] | Mapping[str, int]) -> tuple[str, ...]:
    """The dense columns of a tower by name, an array column as its elements.

    Args:
        dense: names of columns of one number; or by name the number of numbers in a row.

    Raises:
        ValueError: a width below 1.

    Example:
        >>> dense_names({"age": 1, "profile": 3})
        ('age', 'profile[0]', 'profile[1]', 'profile[2]')
        >>> dense_names(["age", "height"])
        ('age', 'height')
    """
    if not isinstance(dense, Mapping):
        return tuple(dense)
    names: list[str] = []
    for name, width in dense.items():
        if width < 1:
            raise ValueError(f"dense: {name}={width}: the column must have 1 number in each row or more")
        names += [name] if width == 1 else [f"{name}[{index}]" for index in range(width)]
    return tuple(names)


def element_of(name: str) -> Element | None:
    """Which element of which array column a name stands for; None for any other name.

    Example:
        >>> element_of("profile[2]"), element_of("age")
        (Element(column='profile', place=2), None)
    """
    found = _ELEMENT.fullmatch(name)
    return Element(found[1], int(found[2])) if found else None


def widths_of(names: Iterable[str], columns: Collection[str] = ()) -> dict[str, int]:
    """By array column how many elements of it are among ``names``; a name that is itself one of ``columns`` is none of them.

    Example:
        >>> widths_of(["age", "profile[0]", "profile[1]"])
        {'profile': 2}
    """
    widths: dict[str, int] = {}
    for element in (element_of(name) for name in names if name not in columns):
        if element is not None:
            widths[element.column] = max(widths.get(element.column, 0), element.place + 1)
    return widths


def columns_of(names: Iterable[str], columns: Collection[str] = ()) -> list[str]:
    """The columns of the data in which ``names`` stand: an array column for its elements.

    Example:
        >>> columns_of(["age", "profile[0]", "profile[1]"])
        ['age', 'profile']
    """
    found = [(name, element_of(name)) for name in names]
    return list(dict.fromkeys(name if element is None or name in columns else element.column for name, element in found))
