"""ParquetSource and ArrowSource: files of any total size as row groups that can be read one at a time, or in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from torchrec_ext.data.checksums import warn_of_arrow, warn_of_parquet
from torchrec_ext.data.file_source import FileSource
from torchrec_ext.data.files import DataFile, PathLike
from torchrec_ext.data.row_groups import RowGroup as RowGroup
from torchrec_ext.data.row_groups import Source as Source
from torchrec_ext.schema import DataError

_KEPT_FOOTERS = 64  # parsed footers held; a set of many files parses them anew for each row group rather than fill the memory
# Where a row group is read in parts:
_AHEAD, _AHEAD_REMOTE = 1 << 16, 1 << 20  # bytes of each column read at a time
_PIECE = 16_384  # rows decoded at a time; Arrow keeps the last ones, 22 MB for 65,536 of 41 columns


class ParquetSource(FileSource):
    """Parquet files.

    Page checksums are verified where the files have them (write with ``write_page_checksum=True``: 0.06 % of size).

    Args:
        paths: files, folders, patterns, or addresses such as ``s3://bucket/clicks/day=*/`` (through fsspec, with its driver
            installed). Hive partitions (``day=3/``) are columns, integers if all their values are.
        fill: by column, the value that stands for null, see :class:`ColumnRules`.
        max_length: by list column, the most values of a row.

    Raises:
        DataError: a path names nothing, a file is not parquet or cut short, or there are no rows.

    Example:
        >>> ParquetSource("clicks/part-0.parquet")
        Traceback (most recent call last):
        torchrec_ext.schema.checks.DataError: clicks/part-0.parquet: no such file; check the path
    """

    endings = (".parquet", ".parq", ".pq")
    remedy = "write smaller row groups and pages: pq.write_table(table, path, row_group_size={size})"

    def __init__(self, paths: PathLike | Sequence[PathLike], **options: Any) -> None:
        self._footers: dict[str, pq.FileMetaData] = {}
        super().__init__(paths, **options)
        for file in self.files if self._footers else self.files[:1]:
            if file.remote is None:
                warn_of_parquet(file.name, file.path, self._footers.get(file.path) or self._file(file).metadata)

    def _open(self, file: DataFile) -> tuple[pa.Schema, list[int]]:
        metadata = self._file(file).metadata
        if len(self.files) <= _KEPT_FOOTERS:
            self._footers[file.path] = metadata
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        return metadata.schema.to_arrow_schema(), rows

    def _file(self, file: DataFile, *, in_parts: bool = False) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(
                file.open() if file.remote else file.path,
                metadata=self._footers.get(file.path),
                page_checksum_verification=True,
                pre_buffer=file.remote is not None and not in_parts,  # fewer and larger requests
                buffer_size=(_AHEAD_REMOTE if file.remote else _AHEAD) if in_parts else 0,  # 0 reads a column's bytes at once
            )
        except Exception as error:
            raise _unreadable(file, b"PAR1", "parquet", error) from error

    def _read(self, group: RowGroup, names: list[str]) -> pa.Table:
        with self._file(self.files[group.file]) as file:
            return file.read_row_group(group.number, columns=names, use_threads=False)

    def _parts(self, group: RowGroup, names: list[str], start: int, size: int) -> Iterator[pa.Table]:
        with self._file(self.files[group.file], in_parts=True) as file:
            batches = file.iter_batches(_piece(size), row_groups=[group.number], columns=names, use_threads=False)
            for first in range(0, group.rows, size):
                rows = min(size, group.rows - first)
                if first + rows > start:  # no name for the table: it would live on in this frame, one for each lane
                    yield _joined(batches, rows).slice(max(start - first, 0))
                else:  # pyarrow cannot skip pages: they are decoded for nothing
                    _joined(batches, rows)


class ArrowSource(FileSource):
    """Arrow IPC files (also called Feather), memory-mapped: without a shuffle nothing is copied before the batch.

    Takes what :class:`ParquetSource` takes; a record batch is a row group. Files behind an address are read and not mapped.

    Args:
        paths: see :class:`ParquetSource`.
        memory_map: the operating system kills a process (SIGBUS) that reads a mapped file while another cuts it in place. Files
            that are only ever deleted or replaced as a whole are safe; set False, and pay a copy, for those that are not.
        options: see :class:`ParquetSource`.
    """

    endings = (".arrow", ".feather", ".ipc")
    remedy = (
        "write smaller record batches, writer.write_table(table, max_chunksize={size}), or local files without compression, which "
        "are mapped"
    )

    def __init__(self, paths: PathLike | Sequence[PathLike], *, memory_map: bool = True, **options: Any) -> None:
        self._map = pa.memory_map if memory_map else pa.OSFile
        super().__init__(paths, **options)
        warn_of_arrow(self.files[0].name)

    def _open(self, file: DataFile) -> tuple[pa.Schema, list[int]]:
        with self._reader(file) as reader:
            return reader.schema, [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]

    def _reader(self, file: DataFile, names: Sequence[str] | None = None, schema: pa.Schema | None = None) -> Any:
        try:
            places = None if names is None or schema is None else sorted(schema.get_field_index(name) for name in names)
            options = pa.ipc.IpcReadOptions(included_fields=places, use_threads=False)
            return pa.ipc.open_file(file.open() if file.remote else self._map(file.path), options=options)
        except Exception as error:
            raise _unreadable(file, b"ARROW1", "Arrow IPC", error) from error

    def _read(self, group: RowGroup, names: list[str]) -> pa.RecordBatch:
        with self._reader(self.files[group.file], names, self._schemas[group.file]) as reader:
            batch = reader.get_batch(group.number)
        batch.validate(full=True)  # an offset that is damaged would be followed out of the file's memory
        return batch

    def _parts(self, group: RowGroup, names: list[str], start: int, size: int) -> Iterator[pa.RecordBatch]:
        batch = self._read(group, names)
        for first in [start, *range((start // size + 1) * size, group.rows, size)]:
            yield batch.slice(first, (first // size + 1) * size - first)


def _piece(size: int) -> int:
    """Rows to decode at a time for parts of ``size``: the greatest divisor that is neither large nor small, if there is one."""
    return next((rows for rows in range(min(size, _PIECE), _PIECE // 4, -1) if size % rows == 0), size)


def _joined(batches: Iterator[pa.RecordBatch], rows: int) -> pa.Table:
    held: list[pa.RecordBatch] = []
    while sum(map(len, held)) < rows:
        held.append(next(batches))
    return pa.Table.from_batches(held)


def _unreadable(file: DataFile, magic: bytes, form: str, error: Exception) -> DataError:
    try:
        with file.open() if file.remote else open(file.path, "rb") as stream:
            begun = stream.read(len(magic)) == magic
            size = stream.seek(0, 2)
    except Exception as cause:
        return DataError(f"{file.name}: cannot be read ({type(cause).__name__}: {cause}); check the path, rights and network")
    if not size:
        return DataError(f"{file.name}: is empty (0 bytes); copy or write it again")
    rule = f"starts as {form}, but its footer is missing or damaged ({size} bytes): it was cut short" if begun else f"is not {form}"
    return DataError(f"{file.name}: {rule}; copy or write it again ({error})")
