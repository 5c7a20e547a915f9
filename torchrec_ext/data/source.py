"""ParquetSource and ArrowSource: files of any total size as row groups that can be read one at a time, checked before the first."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from torchrec_ext.data.arrow import ColumnRules, Kind, kind_of
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.files import DataFile, PathLike, find_files
from torchrec_ext.schema import DataError

_WHOLE_FOOTERS = 8  # footers read at a time: each waits for the disk or the network
_KEPT_FOOTERS = 64  # parsed footers held; a set of many files parses them anew for each row group rather than fill the memory
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """What is read at once: a row group of parquet, a record batch of Arrow IPC.

    Args:
        name: file and number, for messages.
        file: place of the file in the source.
        number: of the group in its file.
        rows: how many it has.
    """

    name: str
    file: int
    number: int
    rows: int


class Source(Protocol):
    """What the loader asks of the data. Nothing but metadata is read before :meth:`read`."""

    @property
    def groups(self) -> Sequence[RowGroup]:
        """All row groups that have rows, in the order of the files."""

    def require(self, columns: Mapping[str, Sequence[Kind]]) -> dict[str, Kind]:
        """The kinds of the columns; refuses, with a DataError, one that a file lacks or that has none of the kinds given for it."""

    def read(self, group: RowGroup, names: Sequence[str]) -> Chunk:
        """The columns ``names`` of one group, checked; views of Arrow's memory where the layout allows."""


class FileSource(ABC):
    """Files of one format. See :class:`ParquetSource`."""

    endings: tuple[str, ...]

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        fill: Mapping[str, Any] | None = None,
        max_length: Mapping[str, int] | None = None,
    ) -> None:
        self.files = find_files(paths, self.endings)
        self.rules = ColumnRules(fill=fill or {}, max_length=max_length or {})
        with ThreadPoolExecutor(_WHOLE_FOOTERS) as pool:
            opened = list(pool.map(self._open, self.files))
        self._schemas = [schema for schema, _ in opened]
        self._partitions = _partition_types(self.files)
        self.groups: Sequence[RowGroup] = tuple(
            RowGroup(name=f"{file.name}: row group {number}", file=at, number=number, rows=rows)
            for at, (file, (_, counts)) in enumerate(zip(self.files, opened, strict=True))
            for number, rows in enumerate(counts)
            if rows
        )
        if not self.groups:
            raise DataError(f"{self.files[0].name}: zero rows, as in all {len(self.files)} files; write at least one")

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(group.rows for group in self.groups)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.files)} files, {len(self.groups)} row groups, {self.num_rows} rows)"

    @abstractmethod
    def _open(self, file: DataFile) -> tuple[pa.Schema, list[int]]:
        """The file's schema and the rows of each of its groups."""

    @abstractmethod
    def _read(self, group: RowGroup, names: list[str]) -> pa.Table | pa.RecordBatch:
        """Columns of one group."""

    def require(self, columns: Mapping[str, Sequence[Kind]]) -> dict[str, Kind]:
        """See :meth:`Source.require`; a column must also have the same type in all files."""
        return {name: self._require(name, kinds) for name, kinds in columns.items()}

    def _require(self, name: str, kinds: Sequence[Kind]) -> Kind:
        types = [self._type(at, name) for at in range(len(self.files))]
        found = kind_of(types[0])
        if found is None or found not in kinds:
            raise DataError(
                f"{self.files[0].name}: column '{name}' is {types[0]}, must be {' or '.join(kinds)}; convert it where it is written"
            )
        other = next((at for at, dtype in enumerate(types) if dtype != types[0]), None)
        if other is not None:
            raise DataError(
                f"{self.files[other].name}: column '{name}' is {types[other]}, in {self.files[0].name} it is {types[0]}; "
                "give files with the same types"
            )
        return found

    def _type(self, at: int, name: str) -> pa.DataType:
        if name in self._partitions:
            return self._partitions[name]
        schema = self._schemas[at]
        if name in schema.names:
            return schema.field(name).type
        near = difflib.get_close_matches(name, schema.names, n=1)
        elsewhere = next((file.name for file, other in zip(self.files, self._schemas, strict=True) if name in other.names), None)
        hint = f"{elsewhere} has it" if elsewhere else f"did you mean '{near[0]}'?" if near else "rename the column, or write it"
        raise DataError(f"{self.files[at].name}: column '{name}' is missing, the file has {schema.names}; {hint}")

    def read(self, group: RowGroup, names: Sequence[str]) -> Chunk:
        """See :meth:`Source.read`.

        Raises:
            DataError: the file is gone, changed or damaged, or a value breaks a rule: named by file, row group, column and row.
        """
        file = self.files[group.file]
        file.check_unchanged()
        stored = [name for name in names if name not in self._partitions]
        try:
            table = self._read(group, stored)
        except Exception as error:  # of Arrow, the disk, or any fsspec file system
            file.check_unchanged()
            if isinstance(error, DataError):
                raise
            column = next((name for name in stored if not self._readable(group, name)), None)
            where = group.name + (f", column '{column}'" if column else "")
            raise DataError(f"{where} cannot be read: the file is damaged or cut; copy or write it again ({error})") from error
        columns = {name: self.rules.column(group.name, name, table.column(name)) for name in stored}
        return Chunk(columns | {name: self._partition(group, name) for name in names if name in self._partitions})

    def _readable(self, group: RowGroup, name: str) -> bool:
        try:
            self._read(group, [name])
        except Exception:
            return False
        return True

    def _partition(self, group: RowGroup, name: str) -> Column:
        text = self.files[group.file].partitions[name]
        if text == _NULL_PARTITION:
            return self.rules.column(group.name, name, pa.nulls(group.rows, self._partitions[name]))
        whole = pa.types.is_integer(self._partitions[name])
        return Column(np.full(group.rows, int(text)) if whole else np.full(group.rows, text, dtype=object))


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
        torchrec_ext.schema.DataError: clicks/part-0.parquet: no such file; check the path
    """

    endings = (".parquet", ".parq", ".pq")

    def __init__(self, paths: PathLike | Sequence[PathLike], **options: Any) -> None:
        self._footers: dict[str, pq.FileMetaData] = {}
        super().__init__(paths, **options)

    def _open(self, file: DataFile) -> tuple[pa.Schema, list[int]]:
        metadata = self._file(file).metadata
        if len(self.files) <= _KEPT_FOOTERS:
            self._footers[file.path] = metadata
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        return metadata.schema.to_arrow_schema(), rows

    def _file(self, file: DataFile) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(
                file.open() if file.remote else file.path,
                metadata=self._footers.get(file.path),
                page_checksum_verification=True,
                pre_buffer=file.remote is not None,  # fewer and larger requests
            )
        except Exception as error:
            raise _unreadable(file, b"PAR1", "parquet", error) from error

    def _read(self, group: RowGroup, names: list[str]) -> pa.Table:
        with self._file(self.files[group.file]) as file:
            return file.read_row_group(group.number, columns=names, use_threads=False)


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

    def __init__(self, paths: PathLike | Sequence[PathLike], *, memory_map: bool = True, **options: Any) -> None:
        self._map = pa.memory_map if memory_map else pa.OSFile
        super().__init__(paths, **options)

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
            return reader.get_batch(group.number)


def _partition_types(files: Sequence[DataFile]) -> dict[str, pa.DataType]:
    for file in files:
        if file.partitions.keys() != files[0].partitions.keys():
            raise DataError(
                f"{file.name}: has the hive partitions {sorted(file.partitions)}, {files[0].name} has "
                f"{sorted(files[0].partitions)}; give files of one layout"
            )
    values = {name: {file.partitions[name] for file in files} - {_NULL_PARTITION} for name in files[0].partitions}
    return {name: pa.int64() if all(map(_is_whole, texts)) else pa.string() for name, texts in values.items()}


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


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
