"""FileSource: files of one format as row groups, checked before the first is read, with every fault named by its place."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from torchrec_ext.data.array_columns import with_elements
from torchrec_ext.data.arrow import ColumnRules, Kind, kind_of
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.files import DataFile, PathLike, find_files
from torchrec_ext.data.row_groups import RowGroup
from torchrec_ext.schema import DataError
from torchrec_ext.schema.arrays import element_of

ARRAYS: tuple[Kind, ...] = ("floats", "ints")
_WHOLE_FOOTERS = 8  # footers read at a time: each waits for the disk or the network
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
HEAVY = 256 << 20  # bytes that reading a part may hold before it is told; a group of a million rows of 41 columns holds 80 MB


class FileSource(ABC):
    """Files of one format. See :class:`ParquetSource`.

    Args:
        paths: files, folders, patterns, or addresses.
        fill: by column, the value that stands for null, see :class:`ColumnRules`.
        max_length: by list column, the most values of a row.
    """

    endings: tuple[str, ...]
    remedy: str  # how to write files of which a part can be read by itself

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

    @abstractmethod
    def _parts(self, group: RowGroup, names: list[str], start: int, size: int) -> Iterator[pa.Table | pa.RecordBatch]:
        """The same from row ``start`` on, in parts that end at multiples of ``size``."""

    def require(self, columns: Mapping[str, Sequence[Kind]]) -> dict[str, Kind]:
        """See :meth:`Source.require`; a column must also have the same type in all files."""
        return {name: self._require(name, kinds) for name, kinds in columns.items()}

    def _require(self, name: str, kinds: Sequence[Kind]) -> Kind:
        if self._column(name) != name:
            self._require(self._column(name), ARRAYS)
            return "float"
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

    def _column(self, name: str) -> str:
        """The column in which ``name`` stands: an array column for its elements."""
        element = element_of(name)
        known = element is None or name in self._partitions or name in self._schemas[0].names
        return name if known or element is None else element.column

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
        return self._chunk(group, names, lambda stored: self._read(group, stored))

    def parts(self, group: RowGroup, names: Sequence[str], start: int, size: int) -> Iterator[Chunk]:
        """See :meth:`Source.parts`; warns where the file is so written that a part needs much of the group in memory.

        Raises:
            DataError: see :meth:`read`.
        """
        stored, before = self._stored(names), pa.total_allocated_bytes()
        tables = self._parts(group, stored, start, size)
        for first in [start, *range((start // size + 1) * size, group.rows, size)]:
            rows = min((first // size + 1) * size, group.rows) - first
            part = dataclasses.replace(group, first=first, rows=rows)
            made = [self._chunk(part, names, lambda _: next(tables))]
            if first == start:
                self._warn_if_heavy(group, size, pa.total_allocated_bytes() - before)
            yield made.pop()  # the caller's alone: in this frame it would live on, one for each lane

    def _warn_if_heavy(self, group: RowGroup, size: int, held: int) -> None:
        if held > HEAVY:
            warnings.warn(
                f"{group.name}: {group.rows:,} rows, of which {size:,} at a time are read, but with them {held / 2**20:,.0f} MB of "
                f"the row group are held; {self.remedy.format(size=size)}",
                stacklevel=2,
            )

    def _stored(self, names: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(self._column(name) for name in names if name not in self._partitions))

    def _chunk(self, part: RowGroup, names: Sequence[str], read: Callable[[list[str]], pa.Table | pa.RecordBatch]) -> Chunk:
        file, stored = self.files[part.file], self._stored(names)
        file.check_unchanged()
        try:
            table = read(stored) if stored else None
        except Exception as error:  # of Arrow, the disk, or any fsspec file system
            file.check_unchanged()
            if isinstance(error, DataError):
                raise
            column = next((name for name in stored if not self._readable(part, name)), None)
            where = part.name + (f", column '{column}'" if column else "")
            raise DataError(f"{where} cannot be read: the file is damaged or cut; copy or write it again ({error})") from error
        columns = {name: self.rules.column(part.name, name, table.column(name), part.first) for name in stored if table is not None}
        chunk = Chunk(columns | {name: self._partition(part, name) for name in names if name in self._partitions})
        return with_elements(chunk, names, part.name, part.first)

    def _readable(self, group: RowGroup, name: str) -> bool:
        try:
            self._read(group, [name])
        except Exception:
            return False
        return True

    def _partition(self, group: RowGroup, name: str) -> Column:
        text = self.files[group.file].partitions[name]
        if text == _NULL_PARTITION:
            return self.rules.column(group.name, name, pa.nulls(group.rows, self._partitions[name]), group.first)
        whole = pa.types.is_integer(self._partitions[name])
        return Column(np.full(group.rows, int(text)) if whole else np.full(group.rows, text, dtype=object))


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
