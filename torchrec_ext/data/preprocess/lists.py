"""Lists: prepares a list column, or a text with separators, for Categorify or HashBucket."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.preprocess.columns import Cells, Types
from torchrec_ext.data.preprocess.step import ColumnStep, StepContext, StepState, Table
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import check_choice, check_least

TooLong = Literal["recent", "error"]
_TYPES = frozenset({"list<int64>", "list<float64>", "list<string>"})


@dataclass(frozen=True, kw_only=True)
class Lists(ColumnStep):
    """Drops null elements and keeps the last ``max_length`` of the others; a null list is empty.

    Args:
        column: name of a list column, oldest element first; or of a column of strings, with ``separator``.
        max_length: greatest number of elements in a row; no limit by default.
        too_long: what happens to longer rows: ``recent`` keeps the last elements, ``error`` refuses the row.
        separator: text that separates the elements of a string; empty ones are dropped.
        output: name of the result; ``column`` by default.
    """

    column: str
    max_length: int | None = None
    too_long: TooLong = "recent"
    separator: str | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        check_least(f"Lists('{self.column}'): max_length", self.max_length)
        check_choice(
            f"Lists('{self.column}'): too_long", self.too_long, get_args(TooLong)
        )
        if self.separator == "":
            raise ValueError(
                f"Lists('{self.column}'): separator='': must be one character or more"
            )

    def types(self, types: Types) -> Mapping[str, str]:
        """Returns a list of the same elements."""
        if self.separator is not None:
            types.need(
                self,
                self.column,
                {"string"},
                "leave separator out for a column that is a list already",
            )
            return {self.writes[0]: "list<string>"}
        return {
            self.writes[0]: types.need(
                self, self.column, _TYPES, "give separator to split a string"
            )
        }

    def transform(
        self, table: Table, types: Types, state: StepState, run: StepContext
    ) -> Table:
        """Splits, filters and cuts."""
        table = table.mutate({self.writes[0]: self._uncut(table)})
        if self.max_length is None:
            return table
        import ibis

        values = table[self.writes[0]]
        first = ibis.greatest(values.length() - self.max_length, 0)
        return table.mutate({self.writes[0]: values[first:]})

    def _uncut(self, table: Table) -> Any:
        import ibis

        column = table[self.column]
        if self.separator is None:
            return column.filter(lambda value: value.notnull())
        # A pattern, since Spark knows no other way to split.
        elements = column.re_split(re.escape(self.separator)).filter(
            lambda element: element != ""
        )
        return ibis.coalesce(elements, ibis.literal([], type="array<string>"))

    def problems(self, table: Table, types: Types) -> list[tuple[Any, str, str]]:
        """Returns the condition of rows that are too long, if these are refused."""
        if self.too_long == "recent" or self.max_length is None:
            return []
        return [
            (self._uncut(table).length() > self.max_length, self.column, self._rule())
        ]

    def _rule(self) -> str:
        return f"a list longer than max_length={self.max_length}; cut it where it is written, or set too_long='recent'"

    def online(
        self, cells: Mapping[str, Cells], types: Types, state: StepState
    ) -> Mapping[str, Cells]:
        """Computes the same in numpy."""
        lists = (
            cells[self.column]
            if self.separator is None
            else self._split(cells[self.column])
        )
        assert lists.lengths is not None
        # The row of each element that is not null, and the number of these in each row.
        row = np.repeat(np.arange(len(lists.lengths)), lists.lengths)[lists.valid]
        lengths = np.bincount(row, minlength=len(lists.lengths)).astype(np.int64)
        kept_lengths = self._cut_lengths(lengths)
        values = lists.values[lists.valid]
        if int(kept_lengths.sum()) < len(values):
            # 1 for the last element of a row: the last ones are kept.
            from_end = np.cumsum(lengths)[row] - np.arange(len(values))
            values = values[from_end <= kept_lengths[row]]
        return {self.writes[0]: Cells.full(values, kept_lengths)}

    def _split(self, cells: Cells) -> Cells:
        elements: list[str] = []
        lengths = np.zeros(len(cells.values), dtype=np.int64)
        # The text of a null cell means nothing.
        for row in np.flatnonzero(cells.valid):
            texts = [text for text in cells.values[row].split(self.separator) if text]
            elements += texts
            lengths[row] = len(texts)
        return Cells.full(np.array(elements, dtype=object), lengths)

    def _cut_lengths(self, lengths: Int64) -> Int64:
        if self.max_length is None:
            return lengths
        if (
            self.too_long == "error"
            and len(lengths)
            and lengths.max() > self.max_length
        ):
            row = int((lengths > self.max_length).argmax())
            raise DataError(
                f"column '{self.column}', row {row}: {lengths[row]} elements, {self._rule()}"
            )
        return np.minimum(lengths, self.max_length)
