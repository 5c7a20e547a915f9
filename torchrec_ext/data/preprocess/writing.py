"""Parquet files as the loader likes them: row groups of one size, page checksums, no value missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchrec_ext.data.preprocess.column_types import arrow_type
from torchrec_ext.data.preprocess.folders import disk_errors
from torchrec_ext.schema import DataError

ROW_GROUP = 65_536
_GROUPS_PER_FILE = 64
Progress = Callable[[int], None]


class Sink:
    """Where an engine writes its rows.

    Args:
        folder: that exists and is empty.
        columns: by name, the type of each result: ``int64``, ``float32``, ``list<int64>``, ...
        remedies: by column, what helps against a missing value in it.
        progress: is called with the rows written so far.
    """

    def __init__(
        self, folder: Path, columns: Mapping[str, str], remedies: Mapping[str, str], progress: Progress | None = None
    ) -> None:
        self.folder = folder
        self.columns = dict(columns)
        self.remedies = remedies
        self.rows = 0
        self._progress = progress
        self._schema = pa.schema([(name, arrow_type(kind)) for name, kind in columns.items()])

    @contextmanager
    def writer(self) -> Iterator[Callable[[pa.RecordBatch], None]]:
        """A function that takes batches of any size, in order."""
        self._pending: list[pa.RecordBatch] = []
        self._held, self._groups = 0, 0
        self._writer: pq.ParquetWriter | None = None
        try:
            yield self._take
            self._flush(self._held)
        finally:
            with disk_errors(self.folder):
                self._close()

    def missing(self, name: str, row: int | None, count: int) -> DataError:
        """The error for a result without a value."""
        where = "" if row is None else f" of row {row}"
        return DataError(
            f"column '{name}': the result{where} is missing: null, NaN or beyond float32 ({count:,} such rows so far); "
            f"{self.remedies.get(name, 'fill it where it is written')}"
        )

    def _take(self, batch: pa.RecordBatch) -> None:
        # An engine may hold a small literal as int32 where Ibis believes in int64.
        batch = batch.cast(self._schema) if batch.schema != self._schema else batch
        self._check(batch)
        self._pending.append(batch)
        self._held += batch.num_rows
        self.rows += batch.num_rows
        if self._held >= ROW_GROUP:
            self._flush(self._held - self._held % ROW_GROUP)
        if self._progress:
            self._progress(self.rows)

    def _check(self, batch: pa.RecordBatch) -> None:
        for name in self.columns:
            bad = _missing(batch.column(name))
            if bad is not None:
                raise self.missing(name, self.rows + int(bad.argmax()), int(bad.sum()))

    def _flush(self, rows: int) -> None:
        if not rows:
            return
        table = pa.Table.from_batches(self._pending)
        rest = table.slice(rows)
        self._pending, self._held = rest.to_batches(), rest.num_rows
        table = table.slice(0, rows)
        with disk_errors(self.folder):
            for start in range(0, rows, ROW_GROUP):
                self._part(table.schema).write_table(table.slice(start, ROW_GROUP), row_group_size=ROW_GROUP)

    def _part(self, schema: pa.Schema) -> pq.ParquetWriter:
        if self._writer is None or self._groups % _GROUPS_PER_FILE == 0:
            self._close()
            path = self.folder / f"part-{self._groups // _GROUPS_PER_FILE:05}.parquet"
            self._writer = pq.ParquetWriter(path, schema, **_encoding(schema))
        self._groups += 1
        return self._writer

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _encoding(schema: pa.Schema) -> dict[str, Any]:
    """Ids as differences: smaller and faster, to write and to read, than dictionaries of mostly distinct ids."""
    leaves = {field.name: field.type for field in schema}
    texts = [name for name, dtype in leaves.items() if pa.types.is_string(dtype)]
    packed = {
        f"{name}.list.element" if pa.types.is_list(dtype) else name: "DELTA_BINARY_PACKED"
        for name, dtype in leaves.items()
        if pa.types.is_integer(getattr(dtype, "value_type", dtype))
    }
    return {"write_page_checksum": True, "use_dictionary": texts, "column_encoding": packed or None, "compression": "snappy"}


def _missing(column: pa.Array) -> np.ndarray[Any, Any] | None:
    """Where the values of a column are missing, or None where none is."""
    if column.null_count:
        return np.asarray(column.is_null().to_numpy(zero_copy_only=False))
    if pa.types.is_floating(column.type):
        finite = pc.is_finite(column).to_numpy(zero_copy_only=False)
        return None if finite.all() else ~finite
    if not pa.types.is_list(column.type):
        return None
    inside = _missing(column.flatten())
    if inside is None:
        return None
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    rows = np.zeros(len(column), dtype=bool)
    rows[np.repeat(np.arange(len(column)), lengths)[inside]] = True
    return rows
