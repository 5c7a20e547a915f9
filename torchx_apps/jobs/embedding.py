"""Runs towers of a bundle over rows, on all ranks: writes a whole store, refreshes one, or fills a Redis.

The Redis holds users' vectors under the keys that `rec.serve.http --redis` reads. The rows are those of
:mod:`torchx_apps.jobs.embedding_rows`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.data.preprocess.folders import hidden_folder
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.bundle.encoder import open_encoder, open_preprocessor, tower_digest
from torchrec_ext.retrieval.bundle.tables import UserTable
from torchrec_ext.retrieval.store.ids import IdMap, Ids
from torchrec_ext.retrieval.store.redis import RedisStore
from torchrec_ext.retrieval.store.row_formats import Dtype
from torchrec_ext.retrieval.store.store import EmbeddingStore, refresh_store
from torchrec_ext.retrieval.store.versions import StoreError, versions
from torchrec_ext.retrieval.store.writer import embed
from torchrec_ext.schema import DataError
from torchx_apps.cli.embedding_ids import ids_in, of_kind
from torchx_apps.jobs.embedding_rows import PUBLISHED, CatalogueFiles, KnownUsers, RowBlock
from torchx_apps.jobs.report import StageProgress

# A server that answers requests waits 50 ms; a job that writes all vectors can wait longer.
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
        self.digest = tower_digest(bundle.architecture, self.names, bundle.manifest.content["files"])
        self.encoder = open_encoder(bundle.folder, bundle.architecture, self.names, open_preprocessor(bundle.folder))
        self._files: CatalogueFiles | KnownUsers | None = None
        rank = runtime.rank
        world_size = runtime.world_size
        if catalogue == "known":
            self._users = _known_users(bundle, self.names)
            user_columns = self._users.block(0, 1).schema.names
            absent = ", ".join(f"'{name}'" for name in self.encoder.request_columns if name not in user_columns)
            if absent:
                raise ValueError(
                    f"--catalogue: name the parquet files with the rows; the bundle knows its users, and not {absent}, "
                    "which each request gives"
                )
            self._files = KnownUsers(self._users, rank=rank, world_size=world_size)
        elif catalogue is not None:
            columns = list(self.encoder.request_columns)
            derived = PUBLISHED.get(bundle.manifest.certificate.get("data", ""))
            self._files = CatalogueFiles(catalogue, columns, key, derived=derived, rank=rank, world_size=world_size)
        self.rows = self._files.rows if self._files else 0
        self._unknown: Counter[str] = Counter()

    @property
    def description(self) -> str:
        """The towers' names and the beginning of their digest."""
        return f"tower{'s' if len(self.names) > 1 else ''} {', '.join(self.names)} ({self.digest[:12]})"

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
        self._unknown.update({name: int(rows.sum()) for name, rows in encoded.unknown.items() if rows.any()})
        return self.encoder.vectors(encoded)

    def unknown(self) -> Counter[str]:
        """Counts, by column, the rows of all ranks with a value unknown to training. Collective."""
        shares: list[Any] = [None] * self.runtime.world_size
        dist.all_gather_object(shares, self._unknown)
        return sum(shares, Counter())


def _known_users(bundle: Bundle, names: Sequence[str]) -> UserTable:
    if bundle.users is None or list(names) != list(bundle.query):
        reason = "it knows no users" if bundle.users is None else f"{', '.join(names)} reads others than its users"
        raise ValueError(f"--catalogue: name the parquet files with the rows; the bundle has none for this: {reason}")
    return bundle.users


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
    with hidden_folder(out.absolute()) if rows.runtime.is_main else nullcontext() as folder:
        names = [str(folder)]
        dist.broadcast_object_list(names)
        yield Path(names[0])


def refresh_files(rows: TowerGroup, folder: Path, deleted: Ids) -> tuple[EmbeddingStore, str]:
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
            refresh_store(folder, changed.ids.ids(), changed.matrix(), deleted=deleted_keys, tower=rows.digest)
    dist.barrier()
    store = EmbeddingStore.open(folder)
    new = len(store) - len(old)
    return store, f"{len(changed) - new:,} changed, {new:,} new, {len(set(deleted_keys)):,} deleted"


def _store_of(rows: TowerGroup, folder: Path) -> EmbeddingStore:
    if not versions(folder):
        raise ValueError(
            f"--refresh {folder}: there is no store; write one of the whole catalogue first, with --out {folder}"
        )
    store = EmbeddingStore.open(folder)
    if store.tower != rows.digest:
        raise ValueError(
            f"--refresh {folder}: its vectors are by tower {store.tower[:12] or '(none)'}, {', '.join(rows.names)} of "
            f"this bundle is {rows.digest[:12]}, and rows of two towers do not compare; embed the whole catalogue "
            f"anew, with --out {folder}"
        )
    return store


def fill_redis(rows: TowerGroup, url: str, expiry_s: float | None, deleted: Ids) -> str:
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
    store = RedisStore(url, tower=rows.digest, expiry_s=expiry_s, timeout_s=_REDIS_TIMEOUT_S)
    runtime = rows.runtime
    row_count = removed = 0
    try:
        # Check before the towers run, which may take long.
        store.check()
        if runtime.is_main:
            _check_ids(rows, deleted)
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
    shares = [0] * runtime.world_size
    dist.all_gather_object(shares, row_count)
    lifetime = "for ever" if expiry_s is None else f"for {expiry_s:,.12g} s"
    summary = f"{sum(shares):,} x {rows.encoder.width} of {rows.description} written, kept {lifetime}"
    if len(deleted):
        summary += f"; {removed:,} of {len(deleted):,} deleted"
    return f"redis: {store.where} ({summary})"


def _check_ids(rows: TowerGroup, deleted: Ids) -> None:
    """Refuses duplicate ids: a Redis would silently keep either row."""
    if not rows.catalogue:
        return
    ids = IdMap.build(rows.ids())
    deleted_keys = of_kind(deleted, ids.kind)
    both = ids.positions(deleted_keys) >= 0
    if both.any():
        raise ValueError(f"--delete: {deleted_keys[both][0]!s} is also among the ids to write; leave it out")


def _progress_text(rows: TowerGroup, row_count: int) -> str:
    of_rank = f" of rank {rows.runtime.rank}" if rows.runtime.world_size > 1 else ""
    state = f"no row{of_rank} is known to be written"
    if row_count:
        state = f"{row_count:,} of {rows.rows:,} rows{of_rank} were written, or a few more"
    return f"{state}: run the same command again, which writes them all"
