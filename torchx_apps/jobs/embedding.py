"""Rows of parquet files through towers of a bundle, on all ranks together: into a whole store, or into the store there is.

Users' vectors into a Redis, by all ranks together, under the keys that `rec.serve.http --redis` reads.

CatalogueFiles: the rows of parquet files as they stream by, an equal share for each rank; KnownUsers: those of a
bundle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.data.datasets import movielens
from torchrec_ext.data.files.find import DataFile, PathLike, find_files
from torchrec_ext.data.preprocess.columns import missing_column
from torchrec_ext.data.preprocess.folders import hidden_folder
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.bundle.sides import open_preprocessor, open_side, tower_digest
from torchrec_ext.retrieval.bundle.tables import UserTable
from torchrec_ext.retrieval.store.ids import IdMap, Ids
from torchrec_ext.retrieval.store.quantized import Dtype
from torchrec_ext.retrieval.store.redis import RedisStore
from torchrec_ext.retrieval.store.store import EmbeddingStore, refresh_store
from torchrec_ext.retrieval.store.versions import StoreError, versions
from torchrec_ext.retrieval.store.writer import embed
from torchrec_ext.schema import DataError
from torchx_apps.cli.embedding_ids import ids_in, of_kind
from torchx_apps.jobs.report import Progress

BLOCK_ROWS = 4096  # see torchrec_ext.retrieval.store.writer


@dataclass(frozen=True, kw_only=True)
class RowBlock:
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
PUBLISHED = {
    "ml-100k": Derived(makes=("release_year", "genres"), reads=movielens.ITEM_COLUMNS, make=movielens.features_of_items)
}


class CatalogueFiles:
    """Blocks at places that do not depend on the number of ranks, of which each rank reads its part, one after the other.

    Args:
        paths: files, folders, patterns or addresses; see :func:`torchrec_ext.data.files.find.find_files`.
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
            wanted = list(
                dict.fromkeys([*(name for name in wanted if name not in self._derived.makes), *self._derived.reads])
            )
        for name in wanted:
            if name not in names:
                raise missing_column(file.name, name, names)
        return wanted

    def _is_published(self, names: Sequence[str]) -> bool:
        own = self._derived
        return own is not None and {*own.reads} <= {*names} and not {*own.makes} <= {*names}

    def __iter__(self) -> Iterator[RowBlock]:
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
            raise DataError(
                f"{file.name}: row group {group} cannot be read ({error}); copy or write the file again"
            ) from error

    def _block(self, where: str, rows: pa.RecordBatch) -> RowBlock:
        ids = rows.column(self._key)
        if ids.null_count:
            row = ids.is_null().index(True).as_py()
            raise DataError(f"{where}: column '{self._key}' is null {row} rows later; give every row an id")
        held = dict(zip(rows.schema.names, rows.columns, strict=True))
        if self._is_published(list(held)):
            held |= self._derived.make(held)
        return RowBlock(
            where=where, ids=_plain_ids(where, self._key, ids), columns={name: held[name] for name in self._columns}
        )

    def _opened(self, file: DataFile) -> pq.ParquetFile:
        source: Any = file.path if file.remote is None else file.open()
        try:
            return pq.ParquetFile(source, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{file.name}: is not parquet, or was cut short; copy or write it again ({error})"
            ) from error


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

    def __iter__(self) -> Iterator[RowBlock]:
        """The blocks of this rank."""
        for start in range(self._first, self._last, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, self._last)
            rows = self._users.block(start, stop)
            columns = {name: rows.column(name) for name in rows.schema.names}
            ids = pa.array(self._users.ids.ids(range(start, stop)))
            yield RowBlock(where=f"the bundle's users from place {start} on", ids=ids, columns=columns)


def _plain_ids(where: str, name: str, ids: pa.Array) -> pa.Array:
    """Int64, or strings."""
    if pa.types.is_dictionary(ids.type):
        ids = ids.dictionary_decode()
    if pa.types.is_integer(ids.type):
        return ids.cast(pa.int64())
    if pa.types.is_string(ids.type) or pa.types.is_large_string(ids.type):
        return ids.cast(pa.large_string())
    raise DataError(
        f"{where}: column '{name}' is {ids.type}; ids are whole numbers or strings: name another column with --id"
    )


class TowerGroup:
    """Towers that read the same rows, and this rank's share of the rows.

    Args:
        bundle: with the towers.
        names: of the towers, whose outputs stand side by side.
        runtime: of this rank.
        catalogue: parquet files, folders or patterns, with the towers' raw columns; ``known`` for the users that the
            bundle knows, by its query towers; None where rows are only taken out.
        key: the column with the ids.

    Attributes:
        digest: of the towers.
        rows: of this rank.

    Raises:
        DataError: no file, none of parquet, or one that lacks a column.
    """

    def __init__(
        self,
        bundle: Bundle,
        names: Sequence[str],
        runtime: Runtime,
        catalogue: Sequence[str] | Literal["known"] | None,
        key: str,
    ) -> None:
        self.names, self.runtime, self.catalogue, self.key = list(names), runtime, catalogue, key
        self.digest = tower_digest(bundle.architecture, self.names, bundle.manifest.content["files"])
        self.side = open_side(bundle.folder, bundle.architecture, self.names, open_preprocessor(bundle.folder))
        self.rank = {"rank": runtime.rank, "world_size": runtime.world_size}
        self._files: CatalogueFiles | KnownUsers | None = None
        if catalogue == "known":
            self._users = _known(bundle, self.names)
            self._files = KnownUsers(self._users, **self.rank)
        elif catalogue is not None:
            derived = PUBLISHED.get(bundle.manifest.certificate.get("data", ""))
            self._files = CatalogueFiles(catalogue, list(self.side.request_columns), key, derived=derived, **self.rank)
        self.rows = self._files.rows if self._files else 0
        self._unknown: Counter[str] = Counter()

    def blocks(self) -> Iterator[tuple[NDArray[Any], RowBlock]]:
        """The ids and the rows of each block, whose number is shown as they stream by."""
        done = 0
        with Progress(self.runtime, "embed") as progress:
            for block in self._files or ():
                yield block.ids.to_numpy(zero_copy_only=False), block
                done += len(block.ids)
                progress("rows of rank 0", done, self.rows)

    def ids(self) -> NDArray[Any]:
        """(N,) of all ranks, int64 or str, as they come."""
        if self.catalogue == "known":
            return self._users.ids.ids(range(len(self._users)))
        return ids_in(self.catalogue or (), self.key)

    def vectors(self, block: RowBlock) -> Tensor:
        """(N, D).

        Raises:
            DataError: a value that cannot be taken, with its file and row.
        """
        try:
            read = self.side.read(block.columns)
        except DataError as error:
            raise DataError(f"{block.where}: {error}") from None
        self._unknown.update({name: int(rows.sum()) for name, rows in read.unknown.items() if rows.any()})
        return self.side.vectors(read)

    def unknown(self) -> Counter[str]:
        """By column the rows of all ranks with a value that training never saw; all ranks call it together."""
        shares: list[Any] = [None] * self.runtime.world_size
        dist.all_gather_object(shares, self._unknown)
        return sum(shares, Counter())


def _known(bundle: Bundle, names: Sequence[str]) -> UserTable:
    if bundle.users is None or list(names) != list(bundle.query):
        known = "it knows no users" if bundle.users is None else f"{', '.join(names)} reads others than its users"
        raise ValueError(f"--catalogue: name the parquet files with the rows; the bundle has none for this: {known}")
    return bundle.users


def embed_files(rows: TowerGroup, out: Path, dtype: Dtype) -> EmbeddingStore:
    """Writes a version of the store in ``out``, a folder that all ranks see, with these rows and no others.

    Raises:
        ValueError: a file, a column or a value that cannot be taken, or an id twice.
        StoreError: the disk refuses.
    """
    with _meanwhile(rows, out) as shares:
        return embed(
            rows.vectors,
            rows.blocks(),
            out,
            digest=rows.digest,
            dtype=dtype,
            barrier=dist.barrier,
            shares=shares,
            **rows.rank,
        )


@contextmanager
def _meanwhile(rows: TowerGroup, out: Path) -> Iterator[Path]:
    """A folder of this run alone, which all ranks see: another run may write the same store at the same time."""
    with ExitStack() as first:
        named = [str(first.enter_context(hidden_folder(out.absolute()))) if rows.runtime.is_main else ""]
        dist.broadcast_object_list(named)
        yield Path(named[0])


def refresh_files(rows: TowerGroup, folder: Path, deleted: Ids) -> tuple[EmbeddingStore, str]:
    """Writes a version of the store in ``folder`` in which these rows are changed or new and ``deleted`` are gone.

    The towers run on all ranks, each on its share; the first then copies the store.

    Returns:
        The store, and what was done in words.

    Raises:
        ValueError: there is no store, it is of another tower, an id twice or in both, or one to delete that is not
            there.
        StoreError: the disk refuses, or another process writes.
    """
    old = _store_of(rows, folder)
    gone = of_kind(deleted, old.ids.kind)
    with _meanwhile(rows, folder) as made:
        changed = embed_files(rows, made / "rows", "fp32")
        dist.barrier()  # every rank has opened what the first is to remove
        if rows.runtime.is_main:
            refresh_store(folder, changed.ids.ids(), changed.matrix(), deleted=gone, tower=rows.digest)
    dist.barrier()
    store = EmbeddingStore.open(folder)
    new = len(store) - len(old)
    return store, f"{len(changed) - new:,} changed, {new:,} new, {len(set(gone)):,} deleted"


def _store_of(rows: TowerGroup, folder: Path) -> EmbeddingStore:
    if not versions(folder):
        raise ValueError(
            f"--refresh {folder}: there is no store; write one of the whole catalogue first, with --out {folder}"
        )
    store = EmbeddingStore.open(folder)
    if store.tower != rows.digest:
        raise ValueError(
            f"--refresh {folder}: its vectors are by tower {store.tower[:12] or '(none)'}, {', '.join(rows.names)} of "
            "this bundle "
            f"is {rows.digest[:12]}, and rows of two towers do not compare; embed the whole catalogue anew, with --out "
            f"{folder}"
        )
    return store


_TIMEOUT_S = 5.0  # a server that answers requests waits 50 ms; who writes them all can wait


def fill_redis(rows: TowerGroup, url: str, expiry_s: float | None, deleted: Ids) -> str:
    """Writes each row's vector, pipelined, and takes ``deleted`` out; each rank writes its own share.

    Args:
        rows: of the query towers.
        url: of the Redis.
        expiry_s: after which a vector is forgotten, or None for never.
        deleted: ids.

    Returns:
        What was done, in words.

    Raises:
        ValueError: no address, an id twice or in both, a value that cannot be taken; or the Redis is not there, went
            away or refuses, with what was written.
    """
    store, runtime = RedisStore(url, tower=rows.digest, expiry_s=expiry_s, timeout_s=_TIMEOUT_S), rows.runtime
    written = gone = 0
    try:
        store.current_tower()  # is it there? the towers may run for long
        if runtime.is_main:
            _check_ids(rows, deleted)
        dist.barrier()
        for ids, block in rows.blocks():
            with torch.inference_mode():
                vectors = rows.vectors(block)
            store.put(ids.tolist(), vectors)
            written += len(ids)
        if runtime.is_main:
            gone = store.delete([str(one) for one in deleted])
        dist.barrier()
        if runtime.is_main and rows.catalogue:
            store.make_current()
    except StoreError as error:
        raise ValueError(f"{error} ({_written(rows, written)})") from None
    finally:
        store.close()
    shares = [0] * runtime.world_size
    dist.all_gather_object(shares, written)
    kept = "for ever" if expiry_s is None else f"for {expiry_s:,.12g} s"
    towers = f"tower{'s' if len(rows.names) > 1 else ''} {', '.join(rows.names)} ({rows.digest[:12]})"
    told = f"redis: {store.where} ({sum(shares):,} x {rows.side.width} of {towers} written, kept {kept}"
    return f"{told}; {gone:,} of {len(deleted):,} deleted)" if len(deleted) else f"{told})"


def _check_ids(rows: TowerGroup, deleted: Ids) -> None:
    """A Redis takes an id twice without a word, and then the vector of either row."""
    if not rows.catalogue:
        return
    ids = IdMap.build(rows.ids())
    gone = of_kind(deleted, ids.kind)
    if (both := ids.positions(gone) >= 0).any():
        raise ValueError(f"--delete: {gone[both][0]!s} is also among the ids to write; leave it out")


def _written(rows: TowerGroup, written: int) -> str:
    whose = f" of rank {rows.runtime.rank}" if rows.runtime.world_size > 1 else ""
    done = (
        f"{written:,} of {rows.rows:,} rows{whose} were written, or a few more"
        if written
        else f"no row{whose} is known to be written"
    )
    return f"{done}: run the same command again, which writes them all"
