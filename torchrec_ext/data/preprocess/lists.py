"""Lists: prepares a list column, or a text with separators, for Categorify or HashBucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa

from torchrec_ext.data.columns import Column
from torchrec_ext.data.preprocess.columns import Cells, Types
from torchrec_ext.data.preprocess.step import ColumnStep, StepState
from torchrec_ext.schema.validation import check_least

_TYPES = frozenset({"list<int64>", "list<float64>", "list<string>"})


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

    def apply(
        self, cells: Mapping[str, Cells], types: Types, state: StepState
    ) -> Mapping[str, Cells]:
        """Splits, drops nulls and cuts."""
        lists = cells[self.column]
        if self.separator is not None:
            lists = _split(lists, self.separator)
        assert lists.lengths is not None
        # The row of each element that is not null, and the number of these in each row.
        row = np.repeat(np.arange(len(lists.lengths)), lists.lengths)[lists.valid]
        lengths = np.bincount(row, minlength=len(lists.lengths)).astype(np.int64)
        kept_lengths = lengths
        if self.max_length is not None:
            kept_lengths = np.minimum(lengths, self.max_length)
        values = lists.values[lists.valid]
        if int(kept_lengths.sum()) < len(values):
            # 1 for the last element of a row: the last ones are kept.
            from_end = np.cumsum(lengths)[row] - np.arange(len(values))
            values = values[from_end <= kept_lengths[row]]
        kept = Cells.full(values, kept_lengths)
        return {self.writes[0]: dataclasses.replace(kept, words=lists.words)}


def _split(texts: Cells, separator: str) -> Cells:
    """Splits each different text once; null is an empty list."""
    assert texts.words is not None
    encoded = texts.words.dictionary_encode()
    elements: dict[str, int] = {}
    parts: list[list[int]] = []
    for text in encoded.dictionary.to_pylist():
        words = [word for word in text.split(separator) if word]
        parts.append([elements.setdefault(word, len(elements)) for word in words])
    # The last list is that of null.
    parts.append([])
    places = encoded.indices.to_numpy()[texts.values]
    rows = np.where(texts.valid, places, len(parts) - 1)
    lengths_of = np.array([len(part) for part in parts], dtype=np.int64)
    codes = np.array(list(chain.from_iterable(parts)), dtype=np.int64)
    column = Column.from_lengths(codes, lengths_of).take(rows)
    return Cells(
        values=column.values,
        valid=np.ones(len(column.values), dtype=bool),
        lengths=column.lengths,
        words=pa.array(list(elements), pa.string()),
    )
