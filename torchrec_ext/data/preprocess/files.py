"""scan(): parquet files as a preprocessor's input; every footer is checked before an engine starts.

Sink: parquet files as loaders read them best, with row groups of one size, page checksums and no missing value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchrec_ext.data.files.find import DataFile, PathLike
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.preprocess.columns import arrow_type, missing_column, raw_type
from torchrec_ext.data.preprocess.folders import disk_errors
from torchrec_ext.schema import DataError

Source = Any  # a path, several of them, or an ibis Table of the engine


class _LogSource(ParquetSource):
    """The parquet files of a log, which others wrote."""

    endings = (".parquet", ".pq")
    warns = False


@dataclass(frozen=True, kw_only=True)
class Files:
    """Parquet files with the same columns.

    Args:
        source: one file or more.
        schema: Arrow type of each column; hive partitions are strings.
    """

    source: ParquetSource
    schema: Mapping[str, pa.DataType]

    @property
    def files(self) -> Sequence[DataFile]:
        """The files."""
        return self.source.files

    @property
    def rows(self) -> int:
        """Number of rows of all files together."""
        return self.source.num_rows

    @property
    def where(self) -> str:
        """Name of the files in messages."""
        first = self.files[0].name
        return (
            first if len(self.files) == 1 else f"{first} and {len(self.files) - 1} more"
        )

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Names file, row group and column in an engine's error over damaged data."""
        try:
            yield
        except DataError:
            raise
        except Exception:
            # Engines differ in what they say of damage, so the files are read once
            # more: that fails at the damage.
            for group in self.source.groups:
                self.source.table(group, self.source.columns)
            raise


def scan(paths: PathLike | Sequence[PathLike]) -> Files:
    """Finds the files and reads their footers.

    Raises:
        DataError: a path names nothing; a file is not parquet, is cut short, has other columns than the first, or one
            that is also a hive partition; or there is no row at all.
    """
    source = _LogSource(paths)
    schema = {name: source.type_of(name) for name in source.columns}
    for number, file in enumerate(source.files):
        for name, dtype in schema.items():
            other = source.type_of(name, number)
            # Writers differ in how they lay texts out: string, large_string or a
            # dictionary.
            if other != dtype and not raw_type(dtype) == raw_type(other) == "string":
                raise DataError(
                    f"{file.name}: column '{name}' is {other}, in {source.files[0].name} it is {dtype}; give files "
                    "with the same types"
                )
    return Files(
        source=source,
        schema={**schema, **dict.fromkeys(source.files[0].partitions, pa.string())},
    )


def raw_types(
    where: str, schema: Mapping[str, pa.DataType], names: Collection[str]
) -> dict[str, str]:
    """Returns the raw types of some columns.

    Raises:
        DataError: a column is missing or has a type of which no feature can be made.
    """
    types = {}
    for name in names:
        if name not in schema:
            raise missing_column(where, name, schema.keys())
        for other in schema:
            if other != name and other.lower() == name.lower():
                raise DataError(
                    f"{where}: columns '{name}' and '{other}' differ in case alone, which no engine tells apart; "
                    "rename one where they are written"
                )
        kind = raw_type(schema[name])
        if kind is None:
            raise DataError(
                f"{where}: column '{name}' is {schema[name]}, must be bool, int64, float, string, "
                "timestamp or a list of these; convert it where it is written"
            )
        types[name] = kind
    return types


ROW_GROUP = 65_536
# 4 M rows.
GROUPS_PER_FILE = 64
Progress = Callable[[int], None]


class Sink:
    """The folder and the format of an engine's output.

    Args:
        folder: empty folder.
        columns: type of each result by name: ``int64``, ``float32``, ``list<int64>``, ...
        remedies: what helps against a missing value in each column.
        progress: function that is called with the number of rows written so far.
    """

    def __init__(
        self,
        folder: Path,
        columns: Mapping[str, str],
        remedies: Mapping[str, str],
        progress: Progress | None = None,
    ) -> None:
        self.folder = folder
        self.columns = dict(columns)
        self.remedies = remedies
        self.rows = 0
        self._progress = progress
        self._schema = pa.schema(
            [(name, arrow_type(kind)) for name, kind in columns.items()]
        )

    @contextmanager
    def writer(self) -> Iterator[Callable[[pa.RecordBatch], None]]:
        """Opens a writer: a function for batches of any size, in order."""
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._groups = 0
        self._writer: pq.ParquetWriter | None = None
        try:
            yield self._add
            self._flush(self._pending_rows)
        finally:
            with disk_errors(self.folder):
                self._close()

    def missing(self, name: str, row: int | None, count: int) -> DataError:
        """Returns the error for a result without a value."""
        # Spark writes by itself, and counts such rows afterwards.
        where = "" if row is None else f" of row {row}"
        return DataError(
            f"column '{name}': the result{where} is missing: null, NaN or beyond float32 ({count:,} such rows so far); "
            f"{self.remedies.get(name, 'fill it where it is written')}"
        )

    def _add(self, batch: pa.RecordBatch) -> None:
        # An engine may return a small literal as int32 although its Ibis type is int64.
        if batch.schema != self._schema:
            batch = batch.cast(self._schema)
        for name in self.columns:
            bad = _missing(batch.column(name))
            if bad is not None:
                raise self.missing(name, self.rows + int(bad.argmax()), int(bad.sum()))
        self._pending.append(batch)
        self._pending_rows += batch.num_rows
        self.rows += batch.num_rows
        if self._pending_rows >= ROW_GROUP:
            self._flush(self._pending_rows - self._pending_rows % ROW_GROUP)
        if self._progress:
            self._progress(self.rows)

    def _flush(self, rows: int) -> None:
        if not rows:
            return
        # Whole row groups; the rest waits for the next batches, or for the end.
        table = pa.Table.from_batches(self._pending)
        rest = table.slice(rows)
        self._pending = rest.to_batches()
        self._pending_rows = rest.num_rows
        table = table.slice(0, rows)
        with disk_errors(self.folder):
            for start in range(0, rows, ROW_GROUP):
                self._writer_of_group(table.schema).write_table(
                    table.slice(start, ROW_GROUP), row_group_size=ROW_GROUP
                )

    def _writer_of_group(self, schema: pa.Schema) -> pq.ParquetWriter:
        if self._writer is None or self._groups % GROUPS_PER_FILE == 0:
            self._close()
            path = self.folder / f"part-{self._groups // GROUPS_PER_FILE:05}.parquet"
            self._writer = pq.ParquetWriter(path, schema, **_encoding(schema))
        self._groups += 1
        return self._writer

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _encoding(schema: pa.Schema) -> dict[str, Any]:
    """Encodes ids as differences: smaller and faster, to write and read, than dictionaries of mostly distinct ids."""
    texts = []
    packed = {}
    for field in schema:
        if pa.types.is_string(field.type):
            texts.append(field.name)
        elif pa.types.is_integer(field.type):
            packed[field.name] = "DELTA_BINARY_PACKED"
        elif pa.types.is_list(field.type) and pa.types.is_integer(
            field.type.value_type
        ):
            # Parquet's own name of the elements of a list.
            packed[f"{field.name}.list.element"] = "DELTA_BINARY_PACKED"
    return {
        "write_page_checksum": True,
        "use_dictionary": texts,
        "column_encoding": packed or None,
        "compression": "snappy",
    }


def _missing(column: pa.Array) -> np.ndarray[Any, Any] | None:
    """Returns the mask of a column's missing values, or None if there are none."""
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
    # The row of each missing element.
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    rows = np.zeros(len(column), dtype=bool)
    rows[np.repeat(np.arange(len(column)), lengths)[inside]] = True
    return rows
