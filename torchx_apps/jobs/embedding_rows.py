"""The rows that `rec.embed` reads, an equal share on each rank: those of parquet files, or a bundle's users."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_ext.data.datasets import movielens
from torchrec_ext.data.files.find import DataFile, PathLike, find_files
from torchrec_ext.data.preprocess.columns import missing_column
from torchrec_ext.retrieval.bundle.tables import UserTable
from torchrec_ext.schema import DataError

# Rows of a block, see torchrec_ext.retrieval.store.writer.
BLOCK_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Consecutive rows, with their ids.

    Args:
        where: file and row numbers, for messages.
        ids: (N,) integers or strings.
        columns: arrays of (N,) values by column name.
    """

    where: str
    ids: pa.Array
    columns: Mapping[str, pa.Array]


@dataclass(frozen=True, kw_only=True)
class Derived:
    """Columns derived in training from other columns of a published file.

    Args:
        makes: names of the derived columns.
        reads: names of the file's columns, all of them text.
        make: computes the derived columns, (N,) each, from the file's columns, (N,) each.
    """

    makes: Sequence[str]
    reads: Sequence[str]
    make: Callable[[Mapping[str, pa.Array]], Mapping[str, pa.Array]]


# By the name of the data set that a bundle was trained on; files of all other sets have the columns that requests name.
PUBLISHED = {
    "ml-100k": Derived(makes=("release_year", "genres"), reads=movielens.ITEM_COLUMNS, make=movielens.features_of_items)
}


@dataclass(frozen=True, kw_only=True)
class _FileBlock:
    file: int
    row_group: int
    block: int
    rows: int


class CatalogueFiles:
    """Reads one rank's share of the rows of parquet files, in blocks with bounds independent of the number of ranks.

    Args:
        paths: files, folders, patterns or addresses; see :func:`torchrec_ext.data.files.find.find_files`.
        columns: names of the columns to read.
        key: name of the column with the ids.
        derived: how to compute columns that a file lacks from those that it has.
        rank: rank of this process.
        world_size: number of ranks that share the rows.

    Attributes:
        rows: number of rows of this rank.

    Raises:
        DataError: there is no file, none is parquet, or one lacks a column.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        columns: Sequence[str],
        key: str,
        *,
        derived: Derived | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._columns = list(columns)
        self._key = key
        self._derived = derived
        self._names = list(dict.fromkeys([key, *columns]))
        self._files = find_files(paths, (".parquet",))
        blocks = [block for index in range(len(self._files)) for block in self._blocks_of(index)]
        first, last = (len(blocks) * share // world_size for share in (rank, rank + 1))
        self._local_blocks = blocks[first:last]
        self.rows = sum(block.rows for block in self._local_blocks)

    def _blocks_of(self, index: int) -> list[_FileBlock]:
        file = self._files[index]
        with self._opened(file) as parquet:
            self._names_in(file, parquet.schema_arrow.names)
            sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        return [
            _FileBlock(file=index, row_group=group, block=block, rows=min(BLOCK_ROWS, rows - block * BLOCK_ROWS))
            for group, rows in enumerate(sizes)
            for block in range(ceil(rows / BLOCK_ROWS))
        ]

    def _names_in(self, file: DataFile, names: Sequence[str]) -> list[str]:
        """Returns the columns to read from a file with the columns ``names``."""
        needs = self._names
        if self._derived is not None and _lacks(self._derived, names):
            direct = [name for name in needs if name not in self._derived.makes]
            needs = list(dict.fromkeys([*direct, *self._derived.reads]))
        for name in needs:
            if name not in names:
                raise missing_column(file.name, name, names)
        return needs

    def __iter__(self) -> Iterator[RowBlock]:
        """Yields the blocks of this rank.

        Raises:
            DataError: a file is damaged or was changed, or a row has no id.
        """
        blocks_by_group: dict[tuple[int, int], set[int]] = {}
        for block in self._local_blocks:
            blocks_by_group.setdefault((block.file, block.row_group), set()).add(block.block)
        for (index, group), numbers in blocks_by_group.items():
            file = self._files[index]
            file.check_unchanged()
            with self._opened(file) as parquet:
                for number, rows in enumerate(self._read(file, parquet, group)):
                    if number in numbers:
                        yield self._block(f"{file.name}: row group {group}, rows from {number * BLOCK_ROWS} on", rows)
                    if number == max(numbers):
                        break

    def _read(self, file: DataFile, parquet: pq.ParquetFile, group: int) -> Iterator[pa.RecordBatch]:
        names = self._names_in(file, parquet.schema_arrow.names)
        try:
            yield from parquet.iter_batches(batch_size=BLOCK_ROWS, row_groups=[group], columns=names)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{file.name}: row group {group} cannot be read ({error}); copy or write the file again"
            ) from error

    def _block(self, where: str, rows: pa.RecordBatch) -> RowBlock:
        ids = rows.column(self._key)
        if ids.null_count:
            row = ids.is_null().index(True).as_py()
            raise DataError(f"{where}: column '{self._key}' is null {row} rows later; give every row an id")
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        if self._derived is not None and _lacks(self._derived, list(columns)):
            columns |= self._derived.make(columns)
        values = {name: columns[name] for name in self._columns}
        return RowBlock(where=where, ids=_plain_ids(where, self._key, ids), columns=values)

    def _opened(self, file: DataFile) -> pq.ParquetFile:
        source: Any = file.path if file.remote is None else file.open()
        try:
            return pq.ParquetFile(source, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{file.name}: is not parquet, or was cut short; copy or write it again ({error})"
            ) from error


def _lacks(derived: Derived, names: Sequence[str]) -> bool:
    """Whether a file with the columns ``names`` has the columns to derive from, and not all derived ones."""
    return set(derived.reads) <= set(names) and not set(derived.makes) <= set(names)


class KnownUsers:
    """Yields one rank's share of a bundle's users, in blocks like those of :class:`CatalogueFiles`.

    Args:
        users: the bundle's users.
        rank: rank of this process.
        world_size: number of ranks that share the users.

    Attributes:
        rows: number of users of this rank.
    """

    def __init__(self, users: UserTable, *, rank: int = 0, world_size: int = 1) -> None:
        self._users = users
        self._first, self._last = (len(users) * share // world_size for share in (rank, rank + 1))
        self.rows = self._last - self._first

    def __iter__(self) -> Iterator[RowBlock]:
        """Yields the blocks of this rank."""
        for start in range(self._first, self._last, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, self._last)
            rows = self._users.block(start, stop)
            columns = {name: rows.column(name) for name in rows.schema.names}
            ids = pa.array(self._users.ids.ids(range(start, stop)))
            yield RowBlock(where=f"the bundle's users from place {start} on", ids=ids, columns=columns)


def _plain_ids(where: str, name: str, ids: pa.Array) -> pa.Array:
    """Returns the ids as int64 or as strings."""
    if pa.types.is_dictionary(ids.type):
        ids = ids.dictionary_decode()
    if pa.types.is_integer(ids.type):
        return ids.cast(pa.int64())
    if pa.types.is_string(ids.type) or pa.types.is_large_string(ids.type):
        return ids.cast(pa.large_string())
    raise DataError(
        f"{where}: column '{name}' is {ids.type}; ids are whole numbers or strings: name another column with --id"
    )
