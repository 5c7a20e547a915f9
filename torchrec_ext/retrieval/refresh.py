"""refresh_store: a new version with some rows changed, appended or taken out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.ids import IdMap, Ids
from torchrec_ext.retrieval.quantized import Loss, LossMeter, decode, encode
from torchrec_ext.retrieval.snapshots import StoreError, new_version, publish
from torchrec_ext.retrieval.store import LIVE, ROWS, SCALES, EmbeddingStore


def refresh_store(
    folder: Path | str, ids: Ids, vectors: NDArray[Any] | Tensor, *, deleted: Ids = (), tower: str | None = None
) -> EmbeddingStore:
    """Writes a version in which ``ids`` have ``vectors`` and ``deleted`` are tombstones, and makes it the current one.

    Positions stay what they were: a known id keeps its row (a tombstone that comes back, too), new ids are appended, deleted ones
    keep a row that is not live. The cost is a copy of the rows, not the tower's run over them.

    Args:
        folder: of the store.
        ids: (N,) that changed or are new, none twice.
        vectors: (N, D).
        deleted: ids to take out.
        tower: digest of the tower that made ``vectors``, where it is known: it must be the store's.

    Raises:
        ValueError: an unknown or twice named id, an id in both, another width, a number that is not finite.
        StoreError: the store is damaged, the disk refuses, another process writes, or another tower made the vectors.
    """
    folder = Path(folder)
    with new_version(folder) as path:
        old = EmbeddingStore.open(folder)
        if tower is not None and tower != old.tower:
            raise StoreError(
                f"'{folder}' holds vectors of the tower {old.tower[:12] or 'unnamed'}, these are of {tower[:12]}: rows of two "
                "towers do not compare; embed the whole catalogue anew with write_store"
            )
        block = _checked(old, ids, vectors)
        kept, places = _placed(old.ids, ids)
        gone = _known(old.ids, deleted, kept, places)
        rows, scales = encode(block, old.dtype)
        _patched(old.folder / ROWS, path / ROWS, rows, places, len(kept))
        if scales is not None:
            _patched(old.folder / SCALES, path / SCALES, scales[:, None], places, len(kept))
        kept.save(path)
        live = np.concatenate([old.live, np.ones(len(kept) - len(old), np.bool_)])
        live[places], live[gone] = True, False
        np.save(path / LIVE, live)
        content = {key: old.manifest[key] for key in ("width", "dtype", "tower")}
        content |= {"rows": len(kept), "loss": _loss(old, block, decode(rows, scales))}
        return EmbeddingStore(publish(path, content, {}))


def _checked(old: EmbeddingStore, ids: Ids, vectors: NDArray[Any] | Tensor) -> Tensor:
    block = torch.as_tensor(vectors).detach().to("cpu", torch.float32)
    if not len(ids):
        block = block.reshape(0, old.width)
    if block.dim() != 2 or block.shape != (len(ids), old.width):
        raise ValueError(f"vectors: shape {tuple(block.shape)}; {len(ids)} ids of this store need ({len(ids)}, {old.width})")
    return block


def _placed(known: IdMap, ids: Ids) -> tuple[IdMap, NDArray[np.int64]]:
    """The map with the new ids at its end, and the row of each of ``ids``."""
    if not len(ids):
        return known, np.zeros(0, np.int64)
    IdMap.build(ids)  # refuses an id that is named twice
    new = known.positions(ids) < 0
    if new.any():
        known = known.extended(np.asarray(ids)[new])
    return known, known.positions(ids)


def _known(old: IdMap, deleted: Ids, kept: IdMap, written: NDArray[np.int64]) -> NDArray[np.int64]:
    gone = old.positions(deleted)
    for wrong, why in ((gone < 0, "is not in the store"), (np.isin(gone, written), "is also among the ids to write")):
        if wrong.any():
            raise ValueError(f"deleted: {np.asarray(deleted)[wrong][0]!s} {why}; leave it out")
    return gone


def _patched(source: Path, target: Path, rows: Tensor, places: NDArray[np.int64], count: int) -> None:
    """Copies the file and writes ``rows``, (N, W), to their ``places`` among ``count``."""
    shutil.copyfile(source, target)
    width = rows.shape[1] * rows.element_size()
    with target.open("r+b") as stream:
        stream.truncate(count * width)
    if len(rows):
        mapped = np.memmap(target, np.uint8, mode="r+", shape=(count, width))
        mapped[places] = rows.contiguous().numpy().view(np.uint8).reshape(len(rows), width)
        mapped.flush()


def _loss(old: EmbeddingStore, block: Tensor, stored: Tensor) -> dict[str, Any] | None:
    if not old.loss:
        return None
    meter = LossMeter()
    meter.add(block, stored)
    return Loss(**old.loss).with_more(meter.loss()).as_dict()
