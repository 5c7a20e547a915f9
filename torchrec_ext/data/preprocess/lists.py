"""Lists: prepares a list column, or a text with separators, for Categorify or HashBucket."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.data.preprocess.columns import (
    FLOAT64,
    INT64,
    STRING,
    Arrays,
    Types,
    lengths_of,
    list_array,
    need,
    valid_of,
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

    def apply(self, columns: Arrays, state: StepState) -> Arrays:
        """Splits, drops nulls and cuts."""
        lists = columns[self.column]
        if self.separator is not None:
            # Empty elements are dropped, so an empty text is an empty list.
            lists = pc.split_pattern(lists.fill_null(""), self.separator)
        values = lists.values
        is_kept = valid_of(values)
        if self.separator is not None:
            is_kept = pc.not_equal(values, "").to_numpy(zero_copy_only=False)
        lengths = lengths_of(lists)
        # The row of each element that is kept, and the number of these in each row.
        row = np.repeat(np.arange(len(lengths)), lengths)[is_kept]
        lengths = np.bincount(row, minlength=len(lengths))
        if not is_kept.all():
            values = values.filter(pa.array(is_kept))
        if self.max_length is not None and (lengths > self.max_length).any():
            # 1 for the last element of a row: the last ones are kept.
            from_end = np.cumsum(lengths)[row] - np.arange(len(row))
            values = values.filter(pa.array(from_end <= self.max_length))
            lengths = np.minimum(lengths, self.max_length)
        return {self.writes[0]: list_array(values, lengths)}
