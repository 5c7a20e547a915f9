"""Array columns: dense columns with W numbers in each row, which a batch holds as W columns of one number. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

# The last brackets alone: the name of a column may have others.
_ELEMENT = re.compile(r"(.+)\[(\d+)\]")


class Element(NamedTuple):
    """One number of an array column: the column's name, and the number's index in each row."""

    column: str
    position: int


def dense_names(dense: Sequence[str] | Mapping[str, int]) -> tuple[str, ...]:
    """Returns the names of a tower's dense columns, an array column as the names of its elements.

    Args:
        dense: names of columns of one number; or a mapping from names to how many numbers a row of the column has.

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
            raise ValueError(
                f"dense: {name}={width}: the column must have 1 number in each row or more"
            )
        # A column of one number keeps its name.
        if width == 1:
            names.append(name)
        else:
            names += [f"{name}[{index}]" for index in range(width)]
    return tuple(names)


def element_of(name: str) -> Element | None:
    """Parses the name of an element of an array column; returns None for any other name.

    Example:
        >>> element_of("profile[2]"), element_of("age")
        (Element(column='profile', position=2), None)
    """
    match = _ELEMENT.fullmatch(name)
    return Element(match[1], int(match[2])) if match else None


def widths_of(names: Iterable[str], columns: Collection[str] = ()) -> dict[str, int]:
    """Maps each array column to its width, the greatest index among ``names`` plus 1; names in ``columns`` stay whole.

    Example:
        >>> widths_of(["age", "profile[0]", "profile[1]"])
        {'profile': 2}
    """
    widths: dict[str, int] = {}
    for name in names:
        element = element_of(name)
        if element is not None and name not in columns:
            widths[element.column] = max(
                widths.get(element.column, 0), element.position + 1
            )
    return widths


def source_columns(names: Iterable[str], columns: Collection[str] = ()) -> list[str]:
    """Returns the data's columns behind ``names``: an array column for its elements.

    Example:
        >>> source_columns(["age", "profile[0]", "profile[1]"])
        ['age', 'profile']
    """
    sources: dict[str, None] = {}
    for name in names:
        element = element_of(name)
        if element is not None and name not in columns:
            name = element.column
        sources[name] = None
    return list(sources)
