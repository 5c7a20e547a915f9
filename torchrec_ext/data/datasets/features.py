"""RowContext: context of rows (hour, device, price) and what is known of users and items, the same in files and in requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.data.arrow import as_int64
from torchrec_ext.data.columns import Array, Chunk, Column
from torchrec_ext.data.parquet import read_parquet
from torchrec_ext.data.preprocess.vocabulary import Vocabulary
from torchrec_ext.schema import DataError

UNKNOWN = "unknown"  # stands in a list for a value that is in no vocabulary


@dataclass(frozen=True, kw_only=True)
class RowContext:
    """How columns become ids and numbers: those of context, fitted on training rows, or of users and items, on all there are.

    Args:
        vocabularies: by column of text or whole numbers, the values from row 1 on; a value that is not among them is row 0.
        scales: by column of fractions, mean and standard deviation.
        separators: by column of texts that hold lists, what stands between two values.
        types: by column its raw type, where it is not that of the values; see ``data.preprocess.column_types``.

    Example:
        >>> rows = Chunk({"device": Column(np.array(["tv", "phone"], dtype=object)), "price": Column(np.array([1.0, 3.0]))})
        >>> context = RowContext.fit(rows)
        >>> {name: column.values.tolist() for name, column in context.transform(rows).items()}
        {'device': [2, 1], 'price': [-1.0, 1.0]}
    """

    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    separators: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def fit(cls, rows: Chunk) -> RowContext:
        """Of the columns of ``rows``, as :func:`read_context` gives them."""
        dense = {name: column.values for name, column in rows.items() if column.values.dtype.kind == "f"}
        found = {name: np.unique(column.values, return_counts=True) for name, column in rows.items() if name not in dense}
        return cls(
            vocabularies={name: Vocabulary(pa.array(values), pa.array(counts)) for name, (values, counts) in found.items()},
            scales={name: (float(values.mean()), float(values.std()) or 1.0) for name, values in dense.items()},
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All columns."""
        return (*self.vocabularies, *self.scales)

    @property
    def vocab(self) -> dict[str, int]:
        """Rows that the table of each column of ids needs."""
        return {name: len(values) for name, values in self.vocabularies.items()}

    def transform(self, rows: Chunk) -> dict[str, Column]:
        """Ids (B,) int64 from 1, and numbers (B,) float32 of mean 0 and deviation 1."""
        known = np.ones(rows.num_rows, dtype=bool)
        ids = {name: Column(values.ids(rows[name].values, known)) for name, values in self.vocabularies.items()}
        return ids | {name: Column(self._scaled(name, rows[name].values)) for name in self.scales}

    def _scaled(self, name: str, values: Any) -> Any:
        mean, deviation = self.scales[name]
        return ((values.astype(np.float64) - mean) / deviation).astype(np.float32)

    def raw(self, rows: Chunk) -> dict[str, pa.Array]:
        """Columns of ids and numbers as a file or a request would say them; null for the unknown."""
        said = {name: self._words(name, rows[name]) for name in self.vocabularies if name in rows}
        for name, (mean, deviation) in self.scales.items():
            if name in rows:
                said[name] = pa.array(rows[name].values.astype(np.float64) * deviation + mean)
        return said

    def raw_type(self, name: str) -> str:
        """The type in which a file or a request has it."""
        if name in self.scales:
            return "float64"
        return self.types.get(name) or ("string" if name in self.separators else str(self.vocabularies[name].values.type))

    def joined(self, other: RowContext) -> RowContext:
        """Both, of different columns."""
        return RowContext(**{part: {**own, **getattr(other, part)} for part, own in vars(self).items()})

    def _words(self, name: str, column: Column) -> pa.Array:
        ids = column.values
        words = self.vocabularies[name].values.take(pa.array(ids - 1, mask=ids == 0))
        if name not in self.separators:
            return words.cast(pa.bool_()) if self.types.get(name) == "bool" else words
        ends = np.cumsum(column.lengths)
        lists = pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends]).astype(np.int32)), words.fill_null(UNKNOWN))
        return pc.binary_join(lists, self.separators[name])


def read_context(path: Path, names: Sequence[str], ids: Sequence[str]) -> Chunk:
    """Columns of one value per row: text, whole numbers, or fractions.

    Args:
        path: a parquet file.
        names: of the columns.
        ids: names that mean something else.

    Raises:
        DataError: a column is missing, is one of ``ids``, holds lists, nulls or a value that is no number.
    """
    if taken := [name for name in names if name in ids]:
        raise DataError(
            f"data.context names {taken}: {', '.join(ids)} have a meaning of their own; name other columns of {path.name}"
        )
    chunk = read_parquet(path, list(names))
    made = {}
    for name, column in chunk.items():
        values = column.values
        if column.ragged:
            raise DataError(f"{path}: column '{name}' holds lists; context is one value per row: name another in data.context")
        check_finite(path, name, values)
        made[name] = Column(as_int64(str(path), name, column)) if values.dtype.kind in "iub" else column
    return Chunk(made)


def check_finite(path: Path, name: str, values: Array) -> None:
    """Refuses NaN and infinity in a column of fractions, and what is infinite as float32.

    Raises:
        DataError: naming file, column, row and value.
    """
    if values.dtype.kind != "f":
        return
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(values.astype(np.float32, copy=False))
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"{path}: column '{name}', row {row}: {values[row]}; must be a finite number of 32 bits ({int(bad.sum()):,} rows are "
            "not): fill it, drop the row, or leave the column out"
        )
