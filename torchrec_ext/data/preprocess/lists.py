"""Lists: prepares a list column, or a text with separators, for Categorify or HashBucket."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from torchrec_ext.data.columns import Column, Int64, Windows, offsets_of
from torchrec_ext.data.preprocess.columns import (
    FLOAT64,
    INT64,
    STRING,
    Cells,
    Columns,
    Mask,
    Types,
    need,
    words,
)
from torchrec_ext.data.preprocess.step import ColumnStep, StepState
from torchrec_ext.schema.validation import check_least

_TYPES = frozenset(map(pa.list_, (INT64, FLOAT64, STRING)))


@dataclass(frozen=True, kw_only=True)
class Lists(ColumnStep):
    """Drops null elements and keeps the last ``max_length`` of the others; a null list is empty.

    Args:
        column: name of a list column, oldest element first; or of a column of strings, with ``separator``.
        max_length: greatest number of elements in a row; no limit by default.
        separator: text that separates the elements of a string; empty ones are dropped.
        output: name of the result; ``column`` by default.
    """

    column: str
    max_length: int | None = None
    separator: str | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        check_least(f"Lists('{self.column}'): max_length", self.max_length)
        if self.separator == "":
            raise ValueError(
                f"Lists('{self.column}'): separator='': must be one character or more"
            )

    def types(self, types: Types) -> Types:
        """Returns a list of the same elements."""
        if self.separator is None:
            remedy = "give separator to split a string"
            return {self.writes[0]: need(types, self, self.column, _TYPES, remedy)}
        remedy = "leave separator out for a column that is a list already"
        need(types, self, self.column, {STRING}, remedy)
        return {self.writes[0]: pa.list_(STRING)}

    def apply(self, columns: Columns, state: StepState) -> Columns:
        """Splits, drops nulls and cuts."""
        column = columns[self.column]
        if self.separator is not None:
            column = _split(column, self.separator)
        if column.valid is not None:
            column = only(column, column.valid)
        lengths = column.lengths
        if self.max_length is not None and (lengths > self.max_length).any():
            # 1 for the last element of a row: the last ones are kept.
            from_end = lengths.cumsum()[_rows(lengths)] - np.arange(lengths.sum())
            column = only(column, from_end <= self.max_length)
        return {self.writes[0]: column}


def _rows(lengths: Int64) -> Int64:
    """Returns the row of each element."""
    return np.arange(len(lengths)).repeat(lengths)


def only(column: Cells, is_kept: Mask) -> Cells:
    """Returns lists of some of the elements (V,); none of them is null."""
    rows = _rows(column.lengths)[is_kept]
    lengths = np.bincount(rows, minlength=column.rows)
    return Cells(
        column.values[is_kept], offsets=offsets_of(lengths), texts=column.texts
    )


def _split(column: Cells, separator: str) -> Cells:
    """Splits texts into lists of their parts without the empty ones; null is an empty list."""
    # Each different text of a file once, however many rows have it. The place of null is
    # -1: that of the empty list at the end.
    lists = [list(filter(None, text.split(separator))) for text in words(column.texts)]
    lists.append([])
    places: dict[str, int] = {}
    parts = [places.setdefault(part, len(places)) for each in lists for part in each]
    offsets = offsets_of([len(each) for each in lists])
    windows = Windows(offsets[:-1].take(column.values), offsets[1:].take(column.values))
    rows = Column.from_windows(np.array(parts, np.int64), windows)
    return Cells(rows.values, offsets=offsets_of(rows.lengths), texts=list(places))
