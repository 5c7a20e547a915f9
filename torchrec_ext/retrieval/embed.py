"""embed: one tower over a whole catalogue, into a store in the order of the ids."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.retrieval.ids import IdMap, Ids
from torchrec_ext.retrieval.quantized import Dtype
from torchrec_ext.retrieval.store import EmbeddingStore
from torchrec_ext.retrieval.writer import Block, write_store

Rows = TypeVar("Rows")
_ROWS = 65_536  # copied at a time when shares are joined


def embed(
    tower: Callable[[Rows], Tensor],
    blocks: Iterable[tuple[Ids, Rows]],
    folder: Path | str,
    *,
    digest: str = "",
    dtype: Dtype = "fp32",
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], object] | None = None,
    shares: Path | None = None,
) -> EmbeddingStore:
    """Runs ``tower`` over a catalogue as it streams by and writes its outputs to a store, whose positions ascend with the ids.

    Each rank is given its own share of the catalogue, whichever; the store is the same for any number of ranks and any shares.
    One block is in memory at a time, besides all ids.

    Args:
        tower: from the rows of a block, such as a ``TowerBatch``, to (N, D); in evaluation mode.
        blocks: (ids, rows) of this rank's share, best some thousands of rows each: what the layers of a tower make of more leaves
            the cache, and is fresh memory each time (4,096 rows took two thirds of the time of 16,384).
        folder: of the store; all ranks must see it.
        digest: of the tower.
        dtype: of the rows on disk.
        rank: of this process.
        world_size: how many processes share the catalogue.
        barrier: waits for all of them, such as ``torch.distributed.barrier``.
        shares: folder for the shares of several ranks meanwhile, which all of them must see; beside ``folder`` where not given.

    Raises:
        ValueError: an id twice, in whatever shares; a number that is not finite; several ranks without a barrier.
        StoreError: the disk refuses.
    """
    folder = Path(folder)
    if not 0 <= rank < world_size or (world_size > 1 and barrier is None):
        raise ValueError(f"rank={rank}, world_size={world_size}: rank is 0 to world_size - 1, and several ranks need a barrier")
    embedded = _embedded(tower, blocks)
    if world_size == 1 and dtype == "fp32":  # shorter numbers are made once, of the tower's own
        store = write_store(folder, embedded, tower=digest)
        return store if _ascend(store.ids) else _joined([store], folder, dtype, digest)
    parts = [(shares or folder.parent) / f"{folder.name}.share{each}" for each in range(world_size)]
    write_store(parts[rank], embedded, tower=digest)
    wait = barrier or (lambda: None)
    wait()
    if rank == 0:
        _joined([EmbeddingStore.open(part) for part in parts], folder, dtype, digest)
        for part in parts:
            shutil.rmtree(part)
    wait()
    return EmbeddingStore.open(folder)


def _embedded(tower: Callable[[Rows], Tensor], blocks: Iterable[tuple[Ids, Rows]]) -> Iterator[Block]:
    for ids, rows in blocks:
        with torch.inference_mode():
            yield ids, tower(rows)


def _ascend(ids: IdMap) -> bool:
    named = ids.ids()
    return bool(np.all(named[1:] > named[:-1]))


def _joined(shares: Sequence[EmbeddingStore], folder: Path, dtype: Dtype, digest: str) -> EmbeddingStore:
    """The rows of all shares in one store, by id; read where they lie, so that memory does not grow with them."""
    filled = [share for share in shares if len(share)]
    ids = np.concatenate([share.ids.ids() for share in filled] or [np.zeros(0, np.int64)])
    order = np.argsort(ids, kind="stable")
    ends = np.cumsum([len(share) for share in filled])

    def rows(places: np.ndarray) -> Tensor:
        owner = np.searchsorted(ends, places, side="right")
        found = torch.empty(len(places), filled[0].width)
        for number, share in enumerate(filled):
            own = np.flatnonzero(owner == number)
            found[torch.from_numpy(own)] = share.rows(torch.from_numpy(places[own] - (ends[number] - len(share))))
        return found

    parts = (order[start : start + _ROWS] for start in range(0, len(order), _ROWS))
    return write_store(folder, ((ids[places], rows(places)) for places in parts), dtype=dtype, tower=digest)
