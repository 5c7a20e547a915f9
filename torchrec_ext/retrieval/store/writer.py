"""write_store: blocks of ids and vectors to a new version of a store, streamed.

embed: one tower over a whole catalogue, into a store in the order of the ids.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.store.ids import IdMap, Ids, checked_ids
from torchrec_ext.retrieval.store.row_formats import ROW_FORMATS, Dtype, LossMeter, decode, encode, row_format, some_of
from torchrec_ext.retrieval.store.store import LIVE, ROWS, SCALES, EmbeddingStore
from torchrec_ext.retrieval.store.versions import new_version, publish_version

Block = tuple[Ids, "NDArray[Any] | Tensor"]


def write_store(
    folder: Path | str,
    blocks: Iterable[Block],
    *,
    dtype: Dtype = "fp32",
    tower: str = "",
    queries: Tensor | None = None,
) -> EmbeddingStore:
    """Writes a new version below ``folder`` and makes it the current one; readers of the one before it keep theirs.

    Positions are in the order of the blocks. One block is in memory at a time, besides all ids.

    Args:
        folder: made where it is not there.
        blocks: (ids, vectors): (N,) int64 or str, and (N, D) numbers.
        dtype: of the rows on disk.
        tower: digest of the tower that made the vectors.
        queries: (Q, D) with which fp16's and int8's recall is measured; rows of the first block where not given.

    Raises:
        ValueError: an id twice, blocks of different widths, a number that is not finite; no version is made.
        StoreError: the disk refuses, or another process is writing.
    """
    row_format(dtype)
    folder = Path(folder)
    with new_version(folder) as path:
        with RowWriter(path, dtype, queries) as writer:
            for ids, vectors in blocks:
                writer.add(ids, vectors)
        kept = IdMap.build(writer.ids)
        kept.save(path)
        np.save(path / LIVE, np.ones(len(kept), np.bool_))
        loss = None if writer.meter is None else writer.meter.loss().as_dict()
        content = {"rows": len(kept), "width": writer.width, "dtype": dtype, "tower": tower, "loss": loss}
        return EmbeddingStore(publish_version(path, content, writer.digests))


class RowWriter:
    """Encodes blocks and appends them to the files of a version, digesting as it writes.

    Attributes:
        width: D; 0 before the first block.
        meter: of what fp16 and int8 lose; None for fp32.
    """

    def __init__(self, folder: Path, dtype: Dtype, queries: Tensor | None = None) -> None:
        self.dtype, self.width, self._queries = dtype, 0, queries
        self.meter: LossMeter | None = None
        self._ids: list[Any] = []
        names = [ROWS, SCALES] if ROW_FORMATS[dtype].scaled else [ROWS]
        self._files: dict[str, IO[bytes]] = {name: (folder / name).open("wb") for name in names}
        self._sha = {name: hashlib.sha256() for name in names}
        self._rows = 0

    def add(self, ids: Ids, vectors: NDArray[Any] | Tensor) -> None:
        """Appends a block.

        Raises:
            ValueError: see :func:`write_store`; rows are counted from the first block.
        """
        block = self._checked(vectors, len(ids))
        if len(ids):
            self._ids.append(
                checked_ids(ids if isinstance(ids, pa.Array) else np.array(ids))
            )  # a copy: blocks may be reused
        try:
            rows, scales = encode(block, self.dtype)
        except ValueError as error:
            raise ValueError(f"{error} (of the block whose first row is row {self._rows})") from None
        if not ROW_FORMATS[self.dtype].exact:
            self.meter = self.meter or LossMeter(some_of(block) if self._queries is None else self._queries)
            self.meter.add(block, decode(rows, scales))
        self._write(ROWS, rows)
        if scales is not None:
            self._write(SCALES, scales)
        self._rows += len(block)

    def _checked(self, vectors: NDArray[Any] | Tensor, count: int) -> Tensor:
        block = torch.as_tensor(vectors).detach().to("cpu", torch.float32)
        if block.dim() != 2 or len(block) != count:
            raise ValueError(f"vectors: shape {tuple(block.shape)} for {count} ids; must be ({count}, D)")
        if self.width and block.shape[1] != self.width:
            raise ValueError(
                f"vectors: {block.shape[1]} wide from row {self._rows} on, {self.width} before; one tower has one width"
            )
        self.width = block.shape[1]
        return block.contiguous()

    def _write(self, name: str, part: Tensor) -> None:
        data = part.contiguous().view(torch.uint8).numpy().data if part.numel() else b""
        self._files[name].write(data)
        self._sha[name].update(data)

    @property
    def ids(self) -> NDArray[Any] | pa.Array:
        """Of all rows so far.

        Raises:
            ValueError: blocks of integers and blocks of strings.
        """
        strings = [isinstance(part, pa.Array) for part in self._ids]
        if any(strings) and not all(strings):
            raise ValueError("ids: some blocks have int64 ids and others str; all ids of a catalogue are of one type")
        if any(strings):
            return pa.concat_arrays(self._ids)
        return np.concatenate([*self._ids, np.zeros(0, np.int64)])

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 by file."""
        return {name: sha.hexdigest() for name, sha in self._sha.items()}

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._files.values():
            stream.close()


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

    Each rank is given its own share of the catalogue, whichever; the store is the same for any number of ranks and any
    shares. One block is in memory at a time, besides all ids.

    Args:
        tower: from the rows of a block, such as a ``TowerBatch``, to (N, D); in evaluation mode.
        blocks: (ids, rows) of this rank's share, best some thousands of rows each: what the layers of a tower make of
            more leaves the cache, and is fresh memory each time (4,096 rows took two thirds of the time of 16,384).
        folder: of the store; all ranks must see it.
        digest: of the tower.
        dtype: of the rows on disk.
        rank: of this process.
        world_size: how many processes share the catalogue.
        barrier: waits for all of them, such as ``torch.distributed.barrier``.
        shares: folder for the shares of several ranks meanwhile, which all of them must see; beside ``folder`` where
            not given.

    Raises:
        ValueError: an id twice, in whatever shares; a number that is not finite; several ranks without a barrier.
        StoreError: the disk refuses.
    """
    folder = Path(folder)
    if not 0 <= rank < world_size or (world_size > 1 and barrier is None):
        raise ValueError(
            f"rank={rank}, world_size={world_size}: rank is 0 to world_size - 1, and several ranks need a barrier"
        )
    embedded = _embedded(tower, blocks)
    if world_size == 1 and row_format(dtype).exact:  # shorter numbers are made once, of the tower's own
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
