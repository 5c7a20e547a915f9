"""Columns: a request's raw columns as those that the model reads, in numpy, exactly as for the training files.

Axis letters: B rows, L list length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchrec_ext.data.columns import Column
from torchrec_ext.data.preprocess.columns import (
    element,
    missing_column,
)
from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.data.preprocess.history import History
from torchrec_ext.schema.validation import DataError, listed

_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class ModelColumn:
    """A column that the model reads, as in the manifest.

    Args:
        type: its raw type, such as ``int64`` or ``list<float32>``.
        rows: rows of the smallest table that it looks up; None for a column of numbers.
        oov: row for ids outside of the table; None refuses them.
        longest: most entries of a list that are read; None for any number.
        exact: whether all lists have this length; else the latest entries of a longer one are read.
        fill: row of the table that fills shorter lists up to ``longest``, at their end; None leaves them short.
    """

    type: str
    rows: int | None = None
    oov: int | None = None
    longest: int | None = None
    exact: bool = False
    fill: int | None = None

    @property
    def width(self) -> int | None:
        """Length of each list, if all have one."""
        return self.longest if self.exact and self.fill is None else None

    def takes(self, lengths: Any) -> Any:
        """Whether lists of some length, or lengths (B,), are read as they are."""
        if not self.exact:
            return True
        return lengths == self.longest if self.fill is None else lengths <= self.longest


def padded(column: Column, size: int, fill: int = 0) -> NDArray[Any]:
    """Returns (B, size) entries of lists, with ``fill`` behind those of shorter ones."""
    entries, lengths = column.values, column.lengths
    if len(entries) == size * len(lengths):
        return entries.reshape(-1, size)
    matrix = np.full((len(lengths), size), fill, entries.dtype)
    matrix[np.arange(size) < lengths[:, None]] = entries
    return matrix


def _filled(column: ModelColumn, sent: Column) -> Column:
    """Returns lists as long as the model's, if it has a row to fill them up."""
    if column.fill is None or column.longest is None:
        return sent
    return Column(padded(sent, column.longest, column.fill))


def _check_lengths(name: str, column: ModelColumn, sent: Column) -> None:
    """Refuses lists of other lengths than the model reads."""
    fits = column.takes(sent.lengths)
    if fits is True or fits.all():
        return
    row = int(fits.argmin())
    fewer = " or fewer" if column.width is None else ""
    raise DataError(
        f"column '{name}', row {row}: a list of {sent.lengths[row]}, must be one of {column.longest}{fewer}; send what "
        "training would take, padded as there"
    )


class Read(NamedTuple):
    """B rows of the model's columns; ``unknown`` has for each column of ids (B,) whether any id of a row is unknown."""

    columns: dict[str, Column]
    unknown: dict[str, NDArray[np.bool_]]


class Columns:
    """Reads raw rows into the columns of one side of a model.

    Args:
        columns: the model's columns by name.
        preprocessor: computes the model's columns from raw ones; without it, the request's are the model's.

    Attributes:
        raw: raw types of the request's columns, by name.
        histories: the columns of each history in a request: lists of the events, which belong together, and last the
            row's time.

    Raises:
        DataError: a column is computed by no step of the preprocessor.
    """

    def __init__(
        self,
        columns: Mapping[str, ModelColumn],
        preprocessor: FittedPreprocessor | None = None,
    ) -> None:
        self.columns = dict(columns)
        if preprocessor is None:
            types = {name: column.type for name, column in columns.items()}
            preprocessor = FittedPreprocessor([], types, list(types))
        for name in self.columns:
            if name not in preprocessor.outputs:
                raise missing_column("the bundle's rows", name, preprocessor.outputs)
        self._steps = steps = preprocessor.only(self.columns)
        self.raw = {
            **steps.request_columns,
            **{name: steps.raw[name] for name in steps.keep},
        }
        self.histories = [
            (*step.sent, step.time) for step in steps.steps if isinstance(step, History)
        ]
        # Steps by which lists hold what others leave out of them.
        self._whole = {
            name: steps.only([name]).keeping_unknown()
            for step in steps.steps
            for name in getattr(step, "skip", ())
            if name in self.columns
        }
        self._plain: list[tuple[str, ModelColumn, str]] | None = None
        if not steps.steps and set(self.raw.values()) <= _PLAIN.keys():
            self._plain = [
                (name, column, self.raw[name]) for name, column in self.columns.items()
            ]

    def read(self, rows: pa.Table | Sequence[Mapping[str, Any]]) -> Read:
        """Reads B raw rows.

        Args:
            rows: an Arrow table, or B rows, each with a value of each column in ``raw``: None for null, a list for a
                list column. Further columns are ignored.

        Raises:
            DataError: a column is missing or has another length; a value is missing, of another type, NaN or infinite.
        """
        by_column = self._by_column(rows)
        for name in self.raw:
            if name not in by_column:
                raise missing_column("the request", name, by_column.keys())
        columns = self._model_columns(by_column)
        unknown = {}
        for name, column in self.columns.items():
            _check_lengths(name, column, columns[name])
            if column.rows is not None:
                columns[name], unknown[name] = self._ids(name, column, columns[name])
            elif not (np.abs(columns[name].values) <= _FLOAT32_MAX).all():
                raise DataError(
                    f"column '{name}': a value is beyond float32; send a smaller number"
                )
            columns[name] = _filled(column, columns[name])
        for name, whole in self._whole.items():
            ids = whole.online(by_column)[name]
            unknown[name][ids.owners[ids.values == 0]] = True
        return Read(columns, unknown)

    def read_row(self, row: Mapping[str, Any]) -> Read:
        """Reads one raw row, a value by column; see :meth:`read`.

        Plain numbers and known ids, as in most requests, take a third of the time.
        """
        read = Read({}, {})
        for name, column, kind in self._plain or ():
            values = _plain_value(row.get(name), kind, column)
            if values is None:
                return self.read([row])
            read.columns[name] = values
            if column.rows is not None:
                read.unknown[name] = _KNOWN
        return self.read([row]) if self._plain is None else read

    def _by_column(
        self, rows: pa.Table | Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        if isinstance(rows, pa.Table):
            return {
                name: rows[name].combine_chunks()
                for name in rows.column_names
                if name in self.raw
            }
        names = [name for name in self.raw if all(name in row for row in rows)]
        return {name: [row[name] for row in rows] for name in names}

    def _model_columns(self, rows: Mapping[str, Any]) -> dict[str, Column]:
        try:
            return dict(self._steps.online(rows))
        except DataError as error:
            raise self._of_raw(rows, error) from None

    def _of_raw(self, rows: Mapping[str, Any], error: DataError) -> DataError:
        """Returns the error of a row with the request's own columns in it, if it names a computed one."""
        if any(f"column '{name}'" in str(error) for name in self.raw):
            return error
        for name in self.columns:
            try:
                self._steps.only([name]).online(rows)
            except DataError as again:
                sources = sorted(sources_of(self._steps, name))
                return DataError(f"column {listed(sources)}: {again}")
        return error

    def _ids(
        self, name: str, column: ModelColumn, sent: Column
    ) -> tuple[Column, NDArray[np.bool_]]:
        """Returns ids as rows of the table, and for each row of the request whether one of its ids is unknown."""
        assert column.rows is not None
        ids = sent.values.astype(np.int64, copy=False)
        # As unsigned numbers, negative ids are the greatest.
        strange = ids.view(np.uint64) >= column.rows
        some = bool(np.count_nonzero(strange))
        if some and column.oov is None:
            raise DataError(
                f"column '{name}': {ids[strange][0]} is no row of its table, which has the rows 0 to "
                f"{column.rows - 1}; send another id, or export the model with oov_ids={{'{name}': ROW}}"
            )
        if some and column.oov is not None:
            ids = np.where(strange, column.oov, ids)
        if ids is not sent.values:
            sent = Column(ids, sent.offsets)
        unknown = strange
        if column.oov is not None and not (sent.ragged and name in self._steps.keep):
            # The row alone stands for an unknown id, but a list may be padded with it.
            unknown = ids == column.oov
        if not sent.ragged:
            return sent, unknown
        of_row = np.zeros(len(sent), np.bool_)
        of_row[sent.owners[unknown]] = True
        return sent, of_row

    def unknown_row(self) -> dict[str, Column]:
        """Returns one row of which nothing is known: out-of-vocabulary ids, zeros, and lists as short as may be.

        Raises:
            DataError: a column of ids has no out-of-vocabulary row.
        """
        row = {}
        for name, column in self.columns.items():
            is_list = column.type.startswith("list<")
            if column.rows is not None and column.oov is None:
                raise DataError(
                    f"column '{name}': the model has no row for unknown ids; leave this one out, or export the model "
                    f"with oov_ids={{'{name}': ROW}}"
                )
            shape = (1, column.width or 0) if is_list else (1,)
            unknown = Column(np.full(shape, column.oov or 0, np.int64))
            row[name] = _filled(column, unknown)
        return row


def sources_of(steps: FittedPreprocessor, name: str) -> set[str]:
    """Returns the raw columns that a column of the model is computed from."""
    narrowed = steps.only([name])
    return {*narrowed.request_columns, *narrowed.keep}


# Types of Python's own values that stand for a column's without conversion.
_PLAIN: Mapping[str | None, set[type]] = {
    "int64": {int},
    "list<int64>": {int},
    "float32": {float, int},
    "float64": {float, int},
}
_KNOWN = np.zeros(1, np.bool_)


def _plain_value(value: Any, kind: str, column: ModelColumn) -> Column | None:
    """Returns one row's numbers, or ids that are all known; None for anything else."""
    listed = kind.startswith("list<")
    numbers = value if listed else [value]
    # Exact types: a bool is an int to isinstance.
    if type(numbers) is not list or set(map(type, numbers)) - _PLAIN[kind]:
        return None
    if listed and not column.takes(len(numbers)):
        return None
    if column.rows is not None:
        least = min(numbers, default=0)
        most = max(numbers, default=0)
        if least < 0 or most >= column.rows or column.oov in numbers:
            return None
    elif element(kind) == "int64" or not abs(value) <= _FLOAT32_MAX:
        return None
    values = np.array(numbers, np.int64 if column.rows else np.float64)
    return Column.of_row(values) if listed else Column(values)
