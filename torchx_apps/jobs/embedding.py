"""CatalogueFiles: the rows of parquet files as they stream by, an equal share for each rank; KnownUsers: those of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_ext.data import movielens
from torchrec_ext.data.files import DataFile, PathLike, find_files
from torchrec_ext.data.preprocess.column_types import missing_column
from torchrec_ext.retrieval.tables import UserTable
from torchrec_ext.schema import DataError

BLOCK_ROWS = 4096  # see torchrec_ext.retrieval.embed


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows that lie together.

    Args:
        where: file and rows, for messages.
        ids: (N,) integers or strings.
        columns: (N,) by name.
    """

    where: str
    ids: pa.Array
    columns: Mapping[str, pa.Array]


@dataclass(frozen=True, kw_only=True)
class Derived:
    """Columns that training derives from others of a published file.

    Args:
        makes: the columns.
        reads: the columns of the file, all texts.
        make: from (N,) of those to (N,) of these.
    """

    makes: Sequence[str]
    reads: Sequence[str]
    make: Callable[[Mapping[str, pa.Array]], Mapping[str, pa.Array]]


# By the set that a bundle was trained on; the files of all other sets have the columns that requests name.
PUBLISHED = {"ml-100k": Derived(makes=("release_year", "genres"), reads=movielens.ITEM_COLUMNS, make=movielens.features_of_items)}


class CatalogueFiles:
    """Blocks at places that do not depend on the number of ranks, of which each rank reads its part, one after the other.

    Args:
        paths: files, folders, patterns or addresses; see :func:`torchrec_ext.data.files.find_files`.
        columns: to read.
        key: the column with the ids.
        derived: how columns that a file lacks are made of those that it has.
        rank: of this process.
        world_size: how many share the rows.

    Raises:
        DataError: no file, none of parquet, or one that lacks a column.
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
        self._columns, self._key, self._derived = list(columns), key, derived
        self._names = list(dict.fromkeys([key, *columns]))
        self._files = find_files(paths, (".parquet",))
        places = [place for file in range(len(self._files)) for place in self._places(file)]
        first, last = (len(places) * share // world_size for share in (rank, rank + 1))
        self._places_here = places[first:last]
        self.rows = sum(rows for *_, rows in self._places_here)

    def _places(self, at: int) -> list[tuple[int, int, int, int]]:
        """File, row group, block and rows of each block of a file."""
        file = self._files[at]
        with self._opened(file) as parquet:
            self._names_in(file, parquet.schema_arrow.names)
            sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        return [
            (at, group, block, min(BLOCK_ROWS, rows - block * BLOCK_ROWS))
            for group, rows in enumerate(sizes)
            for block in range(ceil(rows / BLOCK_ROWS))
        ]

    def _names_in(self, file: DataFile, names: Sequence[str]) -> list[str]:
        """The columns to read of a file with columns ``names``."""
        wanted = self._names
        if self._is_published(names):
            wanted = list(dict.fromkeys([*(name for name in wanted if name not in self._derived.makes), *self._derived.reads]))
        for name in wanted:
            if name not in names:
                raise missing_column(file.name, name, names)
        return wanted

    def _is_published(self, names: Sequence[str]) -> bool:
        own = self._derived
        return own is not None and {*own.reads} <= {*names} and not {*own.makes} <= {*names}

    def __iter__(self) -> Iterator[Block]:
        """The blocks of this rank.

        Raises:
            DataError: a file is damaged or was changed, or a row has no id.
        """
        wanted: dict[tuple[int, int], set[int]] = {}
        for at, group, block, _ in self._places_here:
            wanted.setdefault((at, group), set()).add(block)
        for (at, group), blocks in wanted.items():
            file = self._files[at]
            file.check_unchanged()
            with self._opened(file) as parquet:
                for block, rows in enumerate(self._read(file, parquet, group)):
                    if block in blocks:
                        yield self._block(f"{file.name}: row group {group}, rows from {block * BLOCK_ROWS} on", rows)
                    if block == max(blocks):
                        break

    def _read(self, file: DataFile, parquet: pq.ParquetFile, group: int) -> Iterator[pa.RecordBatch]:
        names = self._names_in(file, parquet.schema_arrow.names)
        try:
            yield from parquet.iter_batches(batch_size=BLOCK_ROWS, row_groups=[group], columns=names)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file.name}: row group {group} cannot be read ({error}); copy or write the file again") from error

    def _block(self, where: str, rows: pa.RecordBatch) -> Block:
        ids = rows.column(self._key)
        if ids.null_count:
            row = ids.is_null().index(True).as_py()
            raise DataError(f"{where}: column '{self._key}' is null {row} rows later; give every row an id")
        held = dict(zip(rows.schema.names, rows.columns, strict=True))
        if self._is_published(list(held)):
            held |= self._derived.make(held)
        return Block(where=where, ids=_plain_ids(where, self._key, ids), columns={name: held[name] for name in self._columns})

    def _opened(self, file: DataFile) -> pq.ParquetFile:
        source: Any = file.path if file.remote is None else file.open()
        try:
            return pq.ParquetFile(source, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file.name}: is not parquet, or was cut short; copy or write it again ({error})") from error


class KnownUsers:
    """The users that a bundle knows, as :class:`CatalogueFiles` gives rows; arguments as there.

    Args:
        users: of the bundle.
        rank: of this process.
        world_size: how many share the rows.
    """

    def __init__(self, users: UserTable, *, rank: int = 0, world_size: int = 1) -> None:
        self._users = users
        self._first, self._last = (len(users) * share // world_size for share in (rank, rank + 1))
        self.rows = self._last - self._first

    def __iter__(self) -> Iterator[Block]:
        """The blocks of this rank."""
        for start in range(self._first, self._last, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, self._last)
            rows = self._users.block(start, stop)
            columns = {name: rows.column(name) for name in rows.schema.names}
            ids = pa.array(self._users.ids.ids(range(start, stop)))
            yield Block(where=f"the bundle's users from place {start} on", ids=ids, columns=columns)


def _plain_ids(where: str, name: str, ids: pa.Array) -> pa.Array:
    """Int64, or strings."""
    if pa.types.is_dictionary(ids.type):
        ids = ids.dictionary_decode()
    if pa.types.is_integer(ids.type):
        return ids.cast(pa.int64())
    if pa.types.is_string(ids.type) or pa.types.is_large_string(ids.type):
        return ids.cast(pa.large_string())
    raise DataError(f"{where}: column '{name}' is {ids.type}; ids are whole numbers or strings: name another column with --id")
