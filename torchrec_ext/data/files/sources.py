"""ParquetSource and ArrowSource: files of any total size as row groups that can be read one at a time, or in parts.

FileSource: files of one format as row groups, checked before the first is read; faults are named by file and row.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as fs
import pyarrow.ipc
import pyarrow.parquet as pq

from torchrec_ext.data.columns import Chunk, Column, with_elements
from torchrec_ext.data.files.arrow import ColumnRules, Kind, kind_of
from torchrec_ext.data.files.arrow import RowGroup as RowGroup
from torchrec_ext.data.files.arrow import Source as Source
from torchrec_ext.data.files.find import (
    NULL_PARTITION,
    DataFile,
    PathLike,
    check_partitions,
    find_files,
)
from torchrec_ext.schema import DataError
from torchrec_ext.schema.array_columns import element_of
from torchrec_ext.schema.validation import did_you_mean, listed

ARRAYS: tuple[Kind, ...] = ("floats", "ints")
# Footers that are read at a time: each waits for the disk or the network.
_FOOTERS_AT_ONCE = 8
# Bytes that reading a part may hold without a warning. A group of a million rows of 41
# columns holds 80 MB.
HEAVY = 256 << 20


class _Opening(NamedTuple):
    """A file's schema, its groups' numbers of rows, and a digest of its metadata, empty if there is none."""

    schema: pa.Schema
    rows: list[int]
    evidence: bytes


class FileSource(ABC):
    """Files of one format; see :class:`ParquetSource`.

    Args:
        paths: files, folders, patterns, or addresses.
        fill: maps a column to the value that stands for null, see :class:`ColumnRules`.
        max_length: maps a list column to the greatest number of values in a row.
    """

    endings: tuple[str, ...]
    # How to write files so that a part can be read by itself.
    remedy: str

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        fill: Mapping[str, Any] | None = None,
        max_length: Mapping[str, int] | None = None,
    ) -> None:
        self.files = find_files(paths, self.endings)
        self.rules = ColumnRules(fill=fill or {}, max_length=max_length or {})
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            self._openings = list(pool.map(self.open_file, self.files))
        groups = []
        for index, (file, opening) in enumerate(
            zip(self.files, self._openings, strict=True)
        ):
            check_partitions(file, opening.schema.names)
            for number, rows in enumerate(opening.rows):
                if rows:
                    name = f"{file.name}: row group {number}"
                    groups.append(
                        RowGroup(name=name, file=index, number=number, rows=rows)
                    )
        self._partitions = _partition_types(self.files)
        self._name_partial_columns()
        self.groups: Sequence[RowGroup] = tuple(groups)
        if not self.groups:
            raise DataError(
                f"{self.files[0].name}: zero rows, as in all {len(self.files)} files; write at least one"
            )

    def _name_partial_columns(self) -> None:
        """Warns of columns that some files have and others lack."""
        counts: Counter[str] = Counter()
        for opening in self._openings:
            counts.update(set(opening.schema.names))
        partial = [name for name in counts if counts[name] < len(self.files)]
        if not partial or os.environ.get("RANK", "0") != "0":
            return
        name = min(partial)
        file = next(
            file
            for file, opening in zip(self.files, self._openings, strict=True)
            if name in opening.schema.names
        )
        warnings.warn(
            f"{file.name}: column '{name}' is in {counts[name]:,} of {len(self.files):,} files, so it cannot be read "
            f"({len(partial):,} such columns); write it to all files, or leave it out",
            stacklevel=4,
        )

    def digest(self) -> str:
        """See :meth:`Source.digest`; from footers, and from blocks of local files."""
        digest = hashlib.sha256()
        for file, opening in zip(self.files, self._openings, strict=True):
            digest.update(opening.evidence)
            digest.update(hashlib.sha256(file.sample()).digest())
        return digest.hexdigest()[:16]

    @property
    def num_rows(self) -> int:
        """Number of rows of all files."""
        return sum(group.rows for group in self.groups)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.files)} files, {len(self.groups)} row groups, {self.num_rows} rows)"

    @abstractmethod
    def open_file(self, file: DataFile) -> _Opening:
        """Reads the file's metadata."""

    @abstractmethod
    def read_group(
        self, group: RowGroup, names: list[str]
    ) -> pa.Table | pa.RecordBatch:
        """Reads columns of one group."""

    @abstractmethod
    def read_parts(
        self, group: RowGroup, names: list[str], start: int, size: int
    ) -> Iterator[pa.Table | pa.RecordBatch]:
        """Reads columns of a group from row ``start`` on, in parts ending at multiples of ``size``."""

    @property
    def columns(self) -> list[str]:
        """Names of the first file's columns, without hive partitions."""
        return list(self._openings[0].schema.names)

    def type_of(self, name: str, file: int = 0) -> pa.DataType:
        """Returns the type of a column in one of the files.

        Raises:
            DataError: the file has no such column.
        """
        if name in self._partitions:
            return self._partitions[name]
        schema = self._openings[file].schema
        if name in schema.names:
            return schema.field(name).type
        hint = did_you_mean(name, schema.names, "rename the column, or write it")
        for other, opening in zip(self.files, self._openings, strict=True):
            if name in opening.schema.names:
                hint = f"{other.name} has it"
                break
        raise DataError(
            f"{self.files[file].name}: column '{name}' is missing, the file has {schema.names}; {hint}"
        )

    def require(self, columns: Mapping[str, Sequence[Kind]]) -> dict[str, Kind]:
        """See :meth:`Source.require`; a column must also have the same type in all files."""
        return {name: self._require(name, kinds) for name, kinds in columns.items()}

    def _require(self, name: str, kinds: Sequence[Kind]) -> Kind:
        if self._column(name) != name:
            self._require(self._column(name), ARRAYS)
            return "float"
        types = [self.type_of(name, index) for index in range(len(self.files))]
        kind = kind_of(types[0])
        if kind is None or kind not in kinds:
            raise DataError(
                f"{self.files[0].name}: column '{name}' is {types[0]}, must be {' or '.join(kinds)}; convert it where "
                "it is written"
            )
        for file, dtype in zip(self.files, types, strict=True):
            if dtype != types[0]:
                raise DataError(
                    f"{file.name}: column '{name}' is {dtype}, in {self.files[0].name} it is {types[0]}; give files "
                    "with the same types"
                )
        return kind

    def _column(self, name: str) -> str:
        """Returns the file's column for ``name``: an array column for its elements."""
        element = element_of(name)
        # A column may have the name of an element, since parquet allows any.
        if element is None or name in self._partitions or name in self.columns:
            return name
        return element.column

    def read(self, group: RowGroup, names: Sequence[str]) -> Chunk:
        """See :meth:`Source.read`.

        Raises:
            DataError: the file is gone, changed or damaged, or a value breaks a rule; the message names file, row
                group, column and row.
        """
        return self._chunk(group, names, lambda stored: self.read_group(group, stored))

    def table(self, group: RowGroup, names: Sequence[str]) -> pa.Table | pa.RecordBatch:
        """Reads the columns ``names`` of one group as they stand, with their nulls.

        Raises:
            DataError: the file is gone, changed or damaged; the message names file, row group and column.
        """
        return self._table(
            group, list(names), lambda stored: self.read_group(group, stored)
        )

    def parts(
        self, group: RowGroup, names: Sequence[str], start: int, size: int
    ) -> Iterator[Chunk]:
        """See :meth:`Source.parts`; warns if the file's layout keeps much of a group in memory for a part.

        Raises:
            DataError: see :meth:`read`.
        """
        stored = self._stored(names)
        before = pa.total_allocated_bytes()
        tables = self.read_parts(group, stored, start, size)
        for first in [start, *range((start // size + 1) * size, group.rows, size)]:
            rows = min((first // size + 1) * size, group.rows) - first
            part = dataclasses.replace(group, first=first, rows=rows)
            chunk_slot = [self._chunk(part, names, lambda _: next(tables))]
            if first == start:
                held_bytes = pa.total_allocated_bytes() - before
                if held_bytes > HEAVY:
                    warnings.warn(
                        f"{group.name}: {group.rows:,} rows, of which {size:,} at a time are read, but with them "
                        f"{held_bytes / 2**20:,.0f} MB of the row group are held; {self.remedy.format(size=size)}",
                        stacklevel=2,
                    )
            # The caller's alone. A name in this frame would keep the chunk alive, one
            # for each lane.
            yield chunk_slot.pop()

    def _stored(self, names: Sequence[str]) -> list[str]:
        return list(
            dict.fromkeys(
                self._column(name) for name in names if name not in self._partitions
            )
        )

    def _chunk(
        self,
        part: RowGroup,
        names: Sequence[str],
        read_table: Callable[[list[str]], pa.Table | pa.RecordBatch],
    ) -> Chunk:
        stored = self._stored(names)
        table = self._table(part, stored, read_table)
        columns = {
            name: self.rules.column(part.name, name, table.column(name), part.first)
            for name in stored
        }
        for name in names:
            if name in self._partitions:
                columns[name] = self._partition(part, name)
        return with_elements(Chunk(columns), names, part.name, part.first)

    def _table(
        self,
        part: RowGroup,
        names: list[str],
        read_table: Callable[[list[str]], pa.Table | pa.RecordBatch],
    ) -> pa.Table | pa.RecordBatch:
        """Reads columns of a group or a part of it, and blames the damaged column where this fails."""
        file = self.files[part.file]
        file.check_unchanged()
        try:
            return read_table(names) if names else pa.table({})
        # Of Arrow, the disk or the network.
        except Exception as error:
            # A file that was cut or replaced meanwhile fails in many ways, so the cause
            # is told instead.
            file.check_unchanged()
            if isinstance(error, DataError):
                raise
            where = part.name
            for name in names:
                if not self._readable(part, name):
                    where += f", column '{name}'"
                    break
            raise DataError(
                f"{where} cannot be read: the file is damaged or cut; copy or write it again ({error})"
            ) from error

    def _readable(self, group: RowGroup, name: str) -> bool:
        try:
            self.read_group(group, [name])
        except Exception:
            return False
        return True

    def _partition(self, group: RowGroup, name: str) -> Column:
        text = self.files[group.file].partitions[name]
        if text == NULL_PARTITION:
            return self.rules.column(
                group.name,
                name,
                pa.nulls(group.rows, self._partitions[name]),
                group.first,
            )
        if pa.types.is_integer(self._partitions[name]):
            return Column(np.full(group.rows, int(text)))
        return Column(np.full(group.rows, text, dtype=object))


def _partition_types(files: Sequence[DataFile]) -> dict[str, pa.DataType]:
    for file in files:
        if file.partitions.keys() != files[0].partitions.keys():
            raise DataError(
                f"{file.name}: has the hive partitions {listed(sorted(file.partitions))}, {files[0].name} has "
                f"{listed(sorted(files[0].partitions))}; give files of one layout"
            )
    types = {}
    for name in files[0].partitions:
        texts = {file.partitions[name] for file in files} - {NULL_PARTITION}
        types[name] = pa.int64() if all(map(_is_integer, texts)) else pa.string()
    return types


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


# Parsed footers that are held. A set of more files parses them anew for each row group
# rather than fill the memory.
_FOOTER_LIMIT = 64
# Bytes of each column that are read at a time if a row group is read in parts. A remote
# request takes longer to answer.
_AHEAD = 1 << 16
_AHEAD_REMOTE = 1 << 20
# Rows that are decoded at a time. Arrow keeps the last ones: 22 MB for 65,536 of 41
# columns.
_PIECE = 16_384


class ParquetSource(FileSource):
    """Rows of parquet files, read a row group at a time.

    Page checksums are verified if the files have them (write with ``write_page_checksum=True``: 0.06 % of size).

    Args:
        paths: files, folders, patterns, or addresses such as ``s3://bucket/clicks/day=*/``, see
            :mod:`pyarrow.fs`. Hive partitions (``day=3/``) below a named folder, or from the first wildcard of a
            pattern on, are columns, integers if all their values are.
        fill: maps a column to the value that stands for null, see :class:`ColumnRules`.
        max_length: maps a list column to the greatest number of values in a row.

    Raises:
        DataError: a path names nothing, a file is not parquet or cut short, or there are no rows.

    Example:
        >>> ParquetSource("clicks/part-0.parquet")
        Traceback (most recent call last):
        torchrec_ext.schema.validation.DataError: clicks/part-0.parquet: no such file; check the path
    """

    endings: tuple[str, ...] = (".parquet", ".parq", ".pq")
    remedy = "write smaller row groups and pages: pq.write_table(table, path, row_group_size={size})"

    def __init__(self, paths: PathLike | Sequence[PathLike], **options: Any) -> None:
        self._footers: dict[str, pq.FileMetaData] = {}
        super().__init__(paths, **options)

    @cached_property
    def dataset(self) -> ds.Dataset:
        """All files for Arrow and DuckDB to scan; hive partitions are texts."""
        first = self._openings[0].schema
        form = ds.ParquetFileFormat(
            default_fragment_scan_options=ds.ParquetFragmentScanOptions(
                page_checksum_verification=True
            ),
        )
        fields = [pa.field(name, pa.string()) for name in self._partitions]
        schema = pa.schema([*first, *fields])
        parts = []
        for remote, files in groupby(self.files, lambda file: file.remote):
            found = list(files)
            parts.append(
                ds.FileSystemDataset.from_paths(
                    [file.path for file in found],
                    schema=schema,
                    format=form,
                    filesystem=remote or fs.LocalFileSystem(),
                    partitions=[_partition_of(file) for file in found],
                )
            )
        return parts[0] if len(parts) == 1 else ds.UnionDataset(schema, parts)

    def open_file(self, file: DataFile) -> _Opening:
        """See :meth:`FileSource.open_file`."""
        metadata = self._file(file).metadata
        if len(self.files) <= _FOOTER_LIMIT:
            self._footers[file.path] = metadata
        rows = [
            metadata.row_group(number).num_rows
            for number in range(metadata.num_row_groups)
        ]
        stream = pa.BufferOutputStream()
        # The footer has sizes and statistics of all columns, so its digest stands for
        # the content.
        metadata.write_metadata_file(stream)
        return _Opening(
            metadata.schema.to_arrow_schema(),
            rows,
            hashlib.sha256(stream.getvalue()).digest(),
        )

    def _file(self, file: DataFile, *, in_parts: bool = False) -> pq.ParquetFile:
        # 0 reads all bytes of a column at once.
        buffer_size = 0
        if in_parts:
            buffer_size = _AHEAD_REMOTE if file.remote else _AHEAD
        try:
            return pq.ParquetFile(
                file.open() if file.remote else file.path,
                metadata=self._footers.get(file.path),
                page_checksum_verification=True,
                # Fewer and larger requests.
                pre_buffer=file.remote is not None and not in_parts,
                buffer_size=buffer_size,
            )
        except Exception as error:
            raise _unreadable(file, b"PAR1", "parquet", error) from error

    def read_group(self, group: RowGroup, names: list[str]) -> pa.Table:
        """See :meth:`FileSource.read_group`."""
        with self._file(self.files[group.file]) as file:
            return file.read_row_group(group.number, columns=names, use_threads=False)

    def read_parts(
        self, group: RowGroup, names: list[str], start: int, size: int
    ) -> Iterator[pa.Table]:
        """See :meth:`FileSource.read_parts`."""
        with self._file(self.files[group.file], in_parts=True) as file:
            batches = file.iter_batches(
                _piece(size),
                row_groups=[group.number],
                columns=names,
                use_threads=False,
            )
            for first in range(0, group.rows, size):
                rows = min(size, group.rows - first)
                # The table gets no name, since it would live on in this frame, one for
                # each lane.
                if first + rows > start:
                    yield _joined(batches, rows).slice(max(start - first, 0))
                else:
                    # pyarrow cannot skip pages, so they are decoded for nothing.
                    _joined(batches, rows)


def _partition_of(file: DataFile) -> ds.Expression:
    """Returns the values of a file's hive partitions as a condition that all of its rows fulfil."""
    condition = ds.scalar(True)
    for name, text in file.partitions.items():
        field = ds.field(name)
        condition &= field.is_null() if text == NULL_PARTITION else field == text
    return condition


class ArrowSource(FileSource):
    """Rows of Arrow IPC files (Feather), memory-mapped: without a shuffle nothing is copied before the batch.

    Arguments are those of :class:`ParquetSource`; a record batch is a row group. Files behind an address are read and
    not mapped.

    Args:
        paths: see :class:`ParquetSource`.
        memory_map: map the files. The operating system kills a process (SIGBUS) that reads a mapped file while another
            cuts it in place. Files that are only ever deleted or replaced as a whole are safe; set False, and pay a
            copy, for those that are not.
        options: see :class:`ParquetSource`.
    """

    endings = (".arrow", ".feather", ".ipc")
    remedy = (
        "write smaller record batches, writer.write_table(table, max_chunksize={size}), or local files without "
        "compression, which are mapped"
    )

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        memory_map: bool = True,
        **options: Any,
    ) -> None:
        self._map = pa.memory_map if memory_map else pa.OSFile
        super().__init__(paths, **options)

    def open_file(self, file: DataFile) -> _Opening:
        """See :meth:`FileSource.open_file`."""
        with self._reader(file) as reader:
            rows = [
                reader.get_batch(number).num_rows
                for number in range(reader.num_record_batches)
            ]
            return _Opening(reader.schema, rows, b"")

    def _reader(self, file: DataFile, indices: list[int] | None = None) -> Any:
        """Opens a file for reading some of its columns, all by default."""
        try:
            options = pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
            stream = file.open() if file.remote else self._map(file.path)
            return pa.ipc.open_file(stream, options=options)
        except Exception as error:
            raise _unreadable(file, b"ARROW1", "Arrow IPC", error) from error

    def read_group(self, group: RowGroup, names: list[str]) -> pa.RecordBatch:
        """See :meth:`FileSource.read_group`."""
        schema = self._openings[group.file].schema
        indices = sorted(map(schema.get_field_index, names))
        with self._reader(self.files[group.file], indices) as reader:
            batch = reader.get_batch(group.number)
        # A damaged offset would otherwise lead out of the file's memory.
        batch.validate(full=True)
        return batch

    def read_parts(
        self, group: RowGroup, names: list[str], start: int, size: int
    ) -> Iterator[pa.RecordBatch]:
        """See :meth:`FileSource.read_parts`."""
        batch = self.read_group(group, names)
        for first in [start, *range((start // size + 1) * size, group.rows, size)]:
            yield batch.slice(first, (first // size + 1) * size - first)


def _piece(size: int) -> int:
    """Returns the number of rows to decode at a time for parts of ``size``: its greatest moderate divisor, if any."""
    return next(
        (
            rows
            for rows in range(min(size, _PIECE), _PIECE // 4, -1)
            if size % rows == 0
        ),
        size,
    )


def _joined(batches: Iterator[pa.RecordBatch], rows: int) -> pa.Table:
    batch_list: list[pa.RecordBatch] = []
    while sum(map(len, batch_list)) < rows:
        batch_list.append(next(batches))
    return pa.Table.from_batches(batch_list)


def _unreadable(file: DataFile, magic: bytes, form: str, error: Exception) -> DataError:
    try:
        with file.open() if file.remote else open(file.path, "rb") as stream:
            has_magic = stream.read(len(magic)) == magic
            size = stream.seek(0, 2)
    except Exception as cause:
        return DataError(
            f"{file.name}: cannot be read ({type(cause).__name__}: {cause}); check the path, rights and network"
        )
    if not size:
        return DataError(f"{file.name}: is empty (0 bytes); copy or write it again")
    if has_magic:
        rule = f"starts as {form}, but its footer is missing or damaged ({size} bytes): it was cut short"
    else:
        rule = f"is not {form}"
    return DataError(f"{file.name}: {rule}; copy or write it again ({error})")
