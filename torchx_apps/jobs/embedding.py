"""Runs towers of a bundle over rows, on all ranks: writes a whole store, refreshes one, or fills a Redis.

The Redis holds users' vectors under the keys that `rec.serve.http --redis` reads. The rows are those of
parquet files, or the users of the bundle, an equal share on each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.data.datasets import movielens
from torchrec_ext.data.files.find import DataFile, PathLike, find_files
from torchrec_ext.data.loader.epochs import Share
from torchrec_ext.data.preprocess.columns import missing_column
from torchrec_ext.data.preprocess.folders import hidden_folder
from torchrec_ext.distributed.runtime import Runtime, gather_objects
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.bundle.encoder import (
    open_encoder,
    open_preprocessor,
    tower_digest,
)
from torchrec_ext.retrieval.bundle.tables import UserTable
from torchrec_ext.retrieval.store.ids import IdMap, KnownIds
from torchrec_ext.retrieval.store.redis import RedisStore
from torchrec_ext.retrieval.store.row_formats import Dtype
from torchrec_ext.retrieval.store.store import EmbeddingStore, refresh_store
from torchrec_ext.retrieval.store.versions import StoreError, versions
from torchrec_ext.retrieval.store.writer import embed
from torchrec_ext.schema import DataError
from torchx_apps.jobs.report import StageProgress

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


# By the name of the data set that a bundle was trained on; files of all other sets have
# the columns that requests name.
PUBLISHED = {
    "ml-100k": Derived(
        makes=("release_year", "genres"),
        reads=movielens.ITEM_COLUMNS,
        make=movielens.features_of_items,
    )
}


class _FileBlock(NamedTuple):
    file: int
    row_group: int
    number: int  # within the row group
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
        blocks = list(
            chain.from_iterable(map(self._blocks_of, range(len(self._files))))
        )
        self._local_blocks = blocks[
            Share(rank=rank, world_size=world_size).part(len(blocks))
        ]
        self.rows = sum(block.rows for block in self._local_blocks)

    def _blocks_of(self, index: int) -> Iterator[_FileBlock]:
        """Yields the blocks of a file; refuses a file without the columns before any block of it is read."""
        file = self._files[index]
        with self._opened(file) as parquet:
            self._names_in(file, parquet.schema_arrow.names)
            for group in range(parquet.num_row_groups):
                rows = parquet.metadata.row_group(group).num_rows
                for number, start in enumerate(range(0, rows, BLOCK_ROWS)):
                    yield _FileBlock(
                        index, group, number, min(BLOCK_ROWS, rows - start)
                    )

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
            blocks_by_group.setdefault((block.file, block.row_group), set()).add(
                block.number
            )
        for (index, group), numbers in blocks_by_group.items():
            file = self._files[index]
            # The blocks were counted in the constructor, perhaps long ago.
            file.check_unchanged()
            with self._opened(file) as parquet:
                for number, rows in enumerate(self._read(file, parquet, group)):
                    if number in numbers:
                        yield self._block(
                            f"{file.name}: row group {group}, rows from {number * BLOCK_ROWS} on",
                            rows,
                        )
                    if number == max(numbers):
                        break

    def _read(
        self, file: DataFile, parquet: pq.ParquetFile, group: int
    ) -> Iterator[pa.RecordBatch]:
        names = self._names_in(file, parquet.schema_arrow.names)
        try:
            yield from parquet.iter_batches(
                batch_size=BLOCK_ROWS, row_groups=[group], columns=names
            )
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{file.name}: row group {group} cannot be read ({error}); copy or write the file again"
            ) from error

    def _block(self, where: str, rows: pa.RecordBatch) -> RowBlock:
        ids = rows.column(self._key)
        if ids.null_count:
            row = ids.is_null().index(True).as_py()
            raise DataError(
                f"{where}: column '{self._key}' is null {row} rows later; give every row an id"
            )
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        if self._derived is not None and _lacks(self._derived, list(columns)):
            columns |= self._derived.make(columns)
        columns = {name: columns[name] for name in self._columns}
        return RowBlock(
            where=where, ids=_plain_ids(where, self._key, ids), columns=columns
        )

    def _opened(self, file: DataFile) -> pq.ParquetFile:
        source: Any = file.path if file.remote is None else file.open()
        # With page checksums a flipped bit is an error, and not another value.
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
        self._part = Share(rank=rank, world_size=world_size).part(len(users))
        self.rows = self._part.stop - self._part.start

    def __iter__(self) -> Iterator[RowBlock]:
        """Yields the blocks of this rank."""
        for start in range(self._part.start, self._part.stop, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, self._part.stop)
            rows = self._users.block(start, stop)
            columns = {name: rows.column(name) for name in rows.schema.names}
            ids = pa.array(self._users.ids.ids(range(start, stop)))
            yield RowBlock(
                where=f"the bundle's users from place {start} on",
                ids=ids,
                columns=columns,
            )


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


# A server that answers requests waits 50 ms; a job that writes all vectors can wait
# longer.
_REDIS_TIMEOUT_S = 5.0


class TowerGroup:
    """Towers of a bundle with the same input rows, and this rank's share of those rows.

    Args:
        bundle: bundle that has the towers.
        names: names of the towers; their outputs are concatenated.
        runtime: this rank's runtime.
        catalogue: parquet files, folders or patterns, with the towers' raw columns; ``known`` for the users that the
            bundle knows, read by its query towers; None where ids are deleted and no rows are read.
        key: name of the column with the ids.

    Attributes:
        digest: digest of the towers.
        encoder: turns raw rows into the towers' vectors.
        rows: number of rows of this rank.

    Raises:
        DataError: there is no file, none is parquet, or one lacks a column.
    """

    def __init__(
        self,
        bundle: Bundle,
        names: Sequence[str],
        runtime: Runtime,
        catalogue: Sequence[str] | Literal["known"] | None,
        key: str,
    ) -> None:
        self.names = list(names)
        self.runtime = runtime
        self.catalogue = catalogue
        self.key = key
        self.digest = tower_digest(
            bundle.architecture, self.names, bundle.manifest.content["files"]
        )
        self.encoder = open_encoder(
            bundle.folder,
            bundle.architecture,
            self.names,
            open_preprocessor(bundle.folder),
        )
        self._files: CatalogueFiles | KnownUsers | None = None
        rank = runtime.rank
        world_size = runtime.world_size
        if catalogue == "known":
            self._users = _known_users(bundle, self.names)
            # One row says the columns of all.
            user_columns = self._users.block(0, 1).schema.names
            absent = ", ".join(
                f"'{name}'"
                for name in self.encoder.request_columns
                if name not in user_columns
            )
            if absent:
                raise ValueError(
                    f"--catalogue: name the parquet files with the rows; the bundle knows its users, and not {absent}, "
                    "which each request gives"
                )
            self._files = KnownUsers(self._users, rank=rank, world_size=world_size)
        elif catalogue is not None:
            columns = list(self.encoder.request_columns)
            derived = PUBLISHED.get(bundle.manifest.certificate.get("data", ""))
            self._files = CatalogueFiles(
                catalogue,
                columns,
                key,
                derived=derived,
                rank=rank,
                world_size=world_size,
            )
        self.rows = self._files.rows if self._files else 0
        self._unknown: Counter[str] = Counter()

    @property
    def description(self) -> str:
        """The towers' names and the beginning of their digest."""
        towers = "towers" if len(self.names) > 1 else "tower"
        return f"{towers} {', '.join(self.names)} ({self.digest[:12]})"

    def blocks(self) -> Iterator[tuple[NDArray[Any], RowBlock]]:
        """Yields the ids and the rows of each block, and shows the number of rows read."""
        rows_read = 0
        with StageProgress(self.runtime, "embed") as progress:
            for block in self._files or ():
                yield block.ids.to_numpy(zero_copy_only=False), block
                rows_read += len(block.ids)
                progress("rows of rank 0", rows_read, self.rows)

    def ids(self) -> NDArray[Any]:
        """Returns the ids of all ranks' rows, (N,) int64 or str, in the order of the files."""
        if self.catalogue == "known":
            return self._users.ids.ids(range(len(self._users)))
        return ids_in(self.catalogue or (), self.key)

    def vectors(self, block: RowBlock) -> Tensor:
        """Returns the towers' outputs for a block of rows, (N, D).

        Raises:
            DataError: a value cannot be taken; the message names its file and row.
        """
        try:
            encoded = self.encoder.read(block.columns)
        except DataError as error:
            raise DataError(f"{block.where}: {error}") from None
        for name, rows in encoded.unknown.items():
            self._unknown[name] += int(rows.sum())
        return self.encoder.vectors(encoded)

    def unknown(self) -> Counter[str]:
        """Counts, by column, the rows of all ranks with a value unknown to training. Collective."""
        shares = gather_objects(self._unknown, self.runtime.world_size)
        return sum(shares, Counter())


def _known_users(bundle: Bundle, names: Sequence[str]) -> UserTable:
    users = bundle.users
    if users is not None and list(names) == list(bundle.query):
        return users
    rows = "no rows" if users is None else "rows for --tower query alone"
    raise ValueError(
        f"--catalogue: name the parquet files with the rows of {', '.join(names)}; the bundle keeps {rows}"
    )


def embed_files(rows: TowerGroup, out: Path, dtype: Dtype) -> EmbeddingStore:
    """Writes a version of the store with these rows alone to ``out``, a folder visible to all ranks.

    Raises:
        ValueError: a file, a column or a value cannot be taken, or an id occurs twice.
        StoreError: the disk refuses.
    """
    with _scratch_folder(rows, out) as shares:
        return embed(
            rows.vectors,
            rows.blocks(),
            out,
            digest=rows.digest,
            dtype=dtype,
            barrier=dist.barrier,
            shares=shares,
            rank=rows.runtime.rank,
            world_size=rows.runtime.world_size,
        )


@contextmanager
def _scratch_folder(rows: TowerGroup, out: Path) -> Iterator[Path]:
    """Makes a folder beside ``out`` for this run alone, visible to all ranks; other runs may write the same store."""
    with (
        hidden_folder(out.absolute())
        if rows.runtime.is_main
        else nullcontext() as folder
    ):
        # Only rank 0's name, the one that is sent, is that of a folder.
        names = [str(folder)]
        dist.broadcast_object_list(names)
        yield Path(names[0])


def refresh_files(
    rows: TowerGroup, folder: Path, deleted: KnownIds
) -> tuple[EmbeddingStore, str]:
    """Writes a version of the store in ``folder`` with these rows changed or added, and ``deleted`` removed.

    The towers run on all ranks, each on its share; rank 0 then copies the store.

    Returns:
        The store, and a text that says what was done.

    Raises:
        ValueError: there is no store, its vectors come from other towers, an id occurs twice or is both written and
            deleted, or an id to delete is not in the store.
        StoreError: the disk refuses, or another process writes.
    """
    old = _store_of(rows, folder)
    deleted_keys = of_kind(deleted, old.ids.kind)
    with _scratch_folder(rows, folder) as scratch:
        changed = embed_files(rows, scratch / "rows", "fp32")
        # Rank 0 is about to remove the store, so wait until every rank has opened it.
        dist.barrier()
        if rows.runtime.is_main:
            refresh_store(
                folder,
                changed.ids.ids(),
                changed.matrix(),
                deleted=deleted_keys,
                tower=rows.digest,
            )
    dist.barrier()
    store = EmbeddingStore.open(folder)
    new = len(store) - len(old)
    return (
        store,
        f"{len(changed) - new:,} changed, {new:,} new, {len(set(deleted_keys)):,} deleted",
    )


def _store_of(rows: TowerGroup, folder: Path) -> EmbeddingStore:
    if not versions(folder):
        raise ValueError(
            f"--refresh {folder}: there is no store; write one of the whole catalogue first, with --out {folder}"
        )
    store = EmbeddingStore.open(folder)
    # Vectors of two trainings do not compare.
    if store.tower != rows.digest:
        raise ValueError(
            f"--refresh {folder}: its vectors are by tower {store.tower[:12] or '(none)'}, "
            f"{', '.join(rows.names)} of this bundle is {rows.digest[:12]}; embed the whole catalogue "
            f"anew, with --out {folder}"
        )
    return store


def fill_redis(
    rows: TowerGroup, url: str, expiry_s: float | None, deleted: KnownIds
) -> str:
    """Writes each row's vector to a Redis, pipelined, and deletes ``deleted``; each rank writes its own share.

    Args:
        rows: query towers with the users' rows.
        url: address of the Redis.
        expiry_s: seconds after which the Redis forgets a vector, or None for never.
        deleted: ids to delete.

    Returns:
        A text that says what was done.

    Raises:
        ValueError: the address is malformed, an id occurs twice or is both written and deleted, a value cannot be
            taken, or the Redis is not there, went away or refuses; the message says what was written.
    """
    store = RedisStore(
        url, tower=rows.digest, expiry_s=expiry_s, timeout_s=_REDIS_TIMEOUT_S
    )
    runtime = rows.runtime
    row_count = 0
    removed = 0
    try:
        # Check before the towers run, which may take long.
        store.check()
        # One rank reads the ids, because an id may be twice in the files of two ranks.
        if runtime.is_main:
            _check_ids(rows, deleted)
        # No rank writes before the ids are checked.
        dist.barrier()
        for ids, block in rows.blocks():
            with torch.inference_mode():
                vectors = rows.vectors(block)
            store.put(ids.tolist(), vectors)
            row_count += len(ids)
        if runtime.is_main:
            removed = store.delete([str(key) for key in deleted])
        dist.barrier()
    except StoreError as error:
        raise ValueError(f"{error} ({_progress_text(rows, row_count)})") from None
    finally:
        store.close()
    shares = gather_objects(row_count, runtime.world_size)
    lifetime = "for ever" if expiry_s is None else f"for {expiry_s:,.12g} s"
    summary = f"{sum(shares):,} x {rows.encoder.width} of {rows.description} written, kept {lifetime}"
    if len(deleted):
        summary += f"; {removed:,} of {len(deleted):,} deleted"
    return f"redis: {store.where} ({summary})"


def ids_in(paths: Sequence[str], key: str) -> NDArray[Any]:
    """Reads the column ``key`` of parquet files, (N,) int64 or str."""
    blocks = [
        block.ids.to_numpy(zero_copy_only=False)
        for block in CatalogueFiles(paths, [], key)
    ]
    return np.concatenate(blocks or [np.zeros(0, np.int64)])


def of_kind(deleted: KnownIds, kind: str) -> NDArray[Any]:
    """Converts ids to delete to the kind of a store's ids, ``int64`` or ``str``.

    Raises:
        ValueError: an id is text and the store's ids are whole numbers.
    """
    if kind == "str":
        return np.asarray([str(key) for key in deleted], dtype=object)
    try:
        return np.asarray([int(key) for key in deleted], np.int64)
    except (ValueError, OverflowError):
        examples = ", ".join(map(str, deleted[:5]))
        raise ValueError(
            f"--delete: ids must be whole numbers like those of the store; got {examples}"
        ) from None


def _check_ids(rows: TowerGroup, deleted: KnownIds) -> None:
    """Refuses duplicate ids: a Redis would silently keep either row."""
    if not rows.catalogue:
        return
    ids = IdMap.build(rows.ids())
    deleted_keys = of_kind(deleted, ids.kind)
    both = ids.positions(deleted_keys) >= 0
    if both.any():
        raise ValueError(
            f"--delete: {deleted_keys[both][0]!s} is also among the ids to write; leave it out"
        )


def _progress_text(rows: TowerGroup, row_count: int) -> str:
    of_rank = f" of rank {rows.runtime.rank}" if rows.runtime.world_size > 1 else ""
    state = f"no row{of_rank} is known to be written"
    if row_count:
        state = (
            f"{row_count:,} of {rows.rows:,} rows{of_rank} were written, or a few more"
        )
    return f"{state}: run the same command again, which writes them all"
