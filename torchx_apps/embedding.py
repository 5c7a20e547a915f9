"""Rows of parquet files through towers of a bundle, on all ranks together: into a whole store, or into the store there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.data.preprocess.folders import hidden_folder
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.embed import embed
from torchrec_ext.retrieval.ids import Ids
from torchrec_ext.retrieval.quantized import Dtype
from torchrec_ext.retrieval.refresh import refresh_store
from torchrec_ext.retrieval.sides import open_preprocessor, open_side, tower_digest
from torchrec_ext.retrieval.snapshots import versions
from torchrec_ext.retrieval.store import EmbeddingStore
from torchrec_ext.retrieval.tables import UserTable
from torchrec_ext.schema import DataError
from torchx_apps.catalogue import PUBLISHED, Block, CatalogueFiles, KnownUsers
from torchx_apps.embedding_ids import ids_in, of_kind
from torchx_apps.progress import Progress


class TowerRows:
    """Towers that read the same rows, and this rank's share of the rows.

    Args:
        bundle: with the towers.
        names: of the towers, whose outputs stand side by side.
        runtime: of this rank.
        catalogue: parquet files, folders or patterns, with the towers' raw columns; ``known`` for the users that the bundle knows,
            by its query towers; None where rows are only taken out.
        key: the column with the ids.

    Attributes:
        digest: of the towers.
        rows: of this rank.

    Raises:
        DataError: no file, none of parquet, or one that lacks a column.
    """

    def __init__(
        self, bundle: Bundle, names: Sequence[str], runtime: Runtime, catalogue: Sequence[str] | Literal["known"] | None, key: str
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

    def blocks(self) -> Iterator[tuple[NDArray[Any], Block]]:
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

    def vectors(self, block: Block) -> Tensor:
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


def embed_files(rows: TowerRows, out: Path, dtype: Dtype) -> EmbeddingStore:
    """Writes a version of the store in ``out``, a folder that all ranks see, with these rows and no others.

    Raises:
        ValueError: a file, a column or a value that cannot be taken, or an id twice.
        StoreError: the disk refuses.
    """
    with _meanwhile(rows, out) as shares:
        return embed(
            rows.vectors, rows.blocks(), out, digest=rows.digest, dtype=dtype, barrier=dist.barrier, shares=shares, **rows.rank
        )


@contextmanager
def _meanwhile(rows: TowerRows, out: Path) -> Iterator[Path]:
    """A folder of this run alone, which all ranks see: another run may write the same store at the same time."""
    with ExitStack() as first:
        named = [str(first.enter_context(hidden_folder(out.absolute()))) if rows.runtime.is_main else ""]
        dist.broadcast_object_list(named)
        yield Path(named[0])


def refresh_files(rows: TowerRows, folder: Path, deleted: Ids) -> tuple[EmbeddingStore, str]:
    """Writes a version of the store in ``folder`` in which these rows are changed or new and ``deleted`` are gone.

    The towers run on all ranks, each on its share; the first then copies the store.

    Returns:
        The store, and what was done in words.

    Raises:
        ValueError: there is no store, it is of another tower, an id twice or in both, or one to delete that is not there.
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


def _store_of(rows: TowerRows, folder: Path) -> EmbeddingStore:
    if not versions(folder):
        raise ValueError(f"--refresh {folder}: there is no store; write one of the whole catalogue first, with --out {folder}")
    store = EmbeddingStore.open(folder)
    if store.tower != rows.digest:
        raise ValueError(
            f"--refresh {folder}: its vectors are by tower {store.tower[:12] or '(none)'}, {', '.join(rows.names)} of this bundle "
            f"is {rows.digest[:12]}, and rows of two towers do not compare; embed the whole catalogue anew, with --out {folder}"
        )
    return store
