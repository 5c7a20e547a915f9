"""write_store(): blocks of ids and vectors into a new version of a store; embed(): a tower over a catalogue."""

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

from torchrec_ext.retrieval.store.ids import IdMap, KnownIds, checked_ids
from torchrec_ext.retrieval.store.row_formats import (
    ROW_FORMATS,
    Dtype,
    LossMeter,
    decode,
    encode,
    row_format,
    some_of,
)
from torchrec_ext.retrieval.store.store import LIVE, ROWS, SCALES, EmbeddingStore
from torchrec_ext.retrieval.store.versions import new_version, publish_version

Block = tuple[KnownIds, "NDArray[Any] | Tensor"]


def write_store(
    folder: Path | str,
    blocks: Iterable[Block],
    *,
    dtype: Dtype = "fp32",
    tower: str = "",
    queries: Tensor | None = None,
) -> EmbeddingStore:
    """Writes a new current version below ``folder``. Readers of an earlier version keep theirs.

    Positions follow the order of the blocks. Only one block is in memory at a time, plus all ids.

    Args:
        folder: folder of the store; created if missing.
        blocks: (ids, vectors): (N,) int64 or str, and (N, D) numbers.
        dtype: row format on disk.
        tower: digest of the tower that made the vectors.
        queries: (Q, D) to measure the recall of fp16 and int8; by default rows of the first block.

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
        # Only now, because an id and its duplicate may be in any two blocks.
        id_map = IdMap.build(writer.ids)
        id_map.save(path)
        np.save(path / LIVE, np.ones(len(id_map), np.bool_))
        content = {
            "rows": len(id_map),
            "width": writer.width,
            "dtype": dtype,
            "tower": tower,
            "loss": None,
        }
        if writer.meter is not None:
            content["loss"] = writer.meter.loss().as_dict()
        return EmbeddingStore(publish_version(path, content, writer.digests))


class RowWriter:
    """Encodes blocks, appends them to the files of a version, and computes the files' digests.

    Attributes:
        width: D; 0 before the first block.
        meter: measures the rounding loss of fp16 and int8; None for fp32.
    """

    def __init__(
        self, folder: Path, dtype: Dtype, queries: Tensor | None = None
    ) -> None:
        self.dtype = dtype
        self.width = 0
        self._queries = queries
        self.meter: LossMeter | None = None
        self._ids: list[Any] = []
        self._files: dict[str, IO[bytes]] = {}
        # Digests are computed on the way: publishing would read a catalogue's rows
        # again, about 1 s for each GB.
        self._sha = {}
        for name in (ROWS, SCALES) if ROW_FORMATS[dtype].scaled else (ROWS,):
            self._files[name] = (folder / name).open("wb")
            self._sha[name] = hashlib.sha256()
        self._rows = 0

    def add(self, ids: KnownIds, vectors: NDArray[Any] | Tensor) -> None:
        """Appends a block.

        Raises:
            ValueError: see :func:`write_store`; rows are counted from the first block.
        """
        block = self._as_block(vectors, len(ids))
        if len(ids):
            # A copy, since the caller may reuse the block's memory.
            self._ids.append(
                checked_ids(ids if isinstance(ids, pa.Array) else np.array(ids))
            )
        try:
            rows, scales = encode(block, self.dtype)
        except ValueError as error:
            raise ValueError(
                f"{error} (of the block whose first row is row {self._rows})"
            ) from None
        if not ROW_FORMATS[self.dtype].exact:
            if self.meter is None:
                # Rows of the block stand in for queries, which only an export has.
                self.meter = LossMeter(
                    some_of(block) if self._queries is None else self._queries
                )
            self.meter.add(block, decode(rows, scales))
        self._write(ROWS, rows)
        if scales is not None:
            self._write(SCALES, scales)
        self._rows += len(block)

    def _as_block(self, vectors: NDArray[Any] | Tensor, count: int) -> Tensor:
        block = torch.as_tensor(vectors).detach().to("cpu", torch.float32)
        if block.dim() != 2 or len(block) != count:
            raise ValueError(
                f"vectors: shape {tuple(block.shape)} for {count} ids; must be ({count}, D)"
            )
        if self.width and block.shape[1] != self.width:
            raise ValueError(
                f"vectors: {block.shape[1]} wide from row {self._rows} on, {self.width} before; one tower has one width"
            )
        self.width = block.shape[1]
        return block.contiguous()

    def _write(self, name: str, rows: Tensor) -> None:
        if rows.numel():  # an empty tensor has no bytes to view
            data = rows.contiguous().view(torch.uint8).numpy().data
            self._files[name].write(data)
            self._sha[name].update(data)

    @property
    def ids(self) -> NDArray[Any] | pa.Array:
        """Ids of all rows so far.

        Raises:
            ValueError: some blocks have integers and others strings.
        """
        kinds = {isinstance(block, pa.Array) for block in self._ids}
        if len(kinds) > 1:
            raise ValueError(
                "ids: some blocks have int64 ids and others str; all ids of a catalogue are of one type"
            )
        if kinds == {True}:
            return pa.concat_arrays(self._ids)
        return np.concatenate([*self._ids, np.zeros(0, np.int64)])

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each file by its name."""
        return {name: sha.hexdigest() for name, sha in self._sha.items()}

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in self._files.values():
            stream.close()


_Rows = TypeVar("_Rows")
_ROWS = 65_536  # rows copied at a time when joining shares


def embed(
    tower: Callable[[_Rows], Tensor],
    blocks: Iterable[tuple[KnownIds, _Rows]],
    folder: Path | str,
    *,
    digest: str = "",
    dtype: Dtype = "fp32",
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], object] | None = None,
    shares: Path | None = None,
) -> EmbeddingStore:
    """Runs a tower over a streamed catalogue and writes its outputs to a store, in ascending order of ids.

    Each rank gets any share of the catalogue. The store is the same for any number of ranks and any shares. Only one
    block is in memory at a time, plus all ids.

    Args:
        tower: function from a block's rows, such as a ``TowerBatch``, to (N, D); in evaluation mode.
        blocks: (ids, rows) of this rank's share, best some thousands of rows each: the activations of more leave the
            cache, and are fresh memory each time (4,096 rows took two thirds of the time of 16,384).
        folder: folder of the store, which all ranks must see.
        digest: digest of the tower.
        dtype: row format on disk.
        rank: rank of this process.
        world_size: number of processes that share the catalogue.
        barrier: waits for all processes, such as ``torch.distributed.barrier``.
        shares: folder for the shares of several ranks meanwhile, which all of them must see; beside ``folder`` where
            not given.

    Raises:
        ValueError: an id occurs twice, in whatever shares; a number is not finite; several ranks without a barrier.
        StoreError: the disk refuses.
    """
    folder = Path(folder)
    if not 0 <= rank < world_size or (world_size > 1 and barrier is None):
        raise ValueError(
            f"rank={rank}, world_size={world_size}: rank is 0 to world_size - 1, and several ranks need a barrier"
        )
    embedded_blocks = _embed_blocks(tower, blocks)
    # Other formats go through fp32 shares, so that rows are rounded once.
    if world_size == 1 and row_format(dtype).exact:
        store = write_store(folder, embedded_blocks, tower=digest)
        # In order already, so the rows need not be written again.
        if _ascend(store.ids):
            return store
        return _join_shares([store], folder, dtype, digest)
    shares = shares or folder.parent
    folders = [shares / f"{folder.name}.share{number}" for number in range(world_size)]
    write_store(folders[rank], embedded_blocks, tower=digest)
    wait = barrier or (lambda: None)
    wait()  # until every share is complete
    if rank == 0:
        _join_shares(
            [EmbeddingStore.open(share) for share in folders], folder, dtype, digest
        )
        for share in folders:
            shutil.rmtree(share)
    wait()  # until the store is there
    return EmbeddingStore.open(folder)


def _embed_blocks(
    tower: Callable[[_Rows], Tensor], blocks: Iterable[tuple[KnownIds, _Rows]]
) -> Iterator[Block]:
    for ids, rows in blocks:
        with torch.inference_mode():
            yield ids, tower(rows)


def _ascend(ids: IdMap) -> bool:
    id_values = ids.ids()
    return bool(np.all(id_values[1:] > id_values[:-1]))


def _join_shares(
    shares: Sequence[EmbeddingStore], folder: Path, dtype: Dtype, digest: str
) -> EmbeddingStore:
    """Merges all shares into one store, in ascending order of ids; reads them block by block."""
    return write_store(folder, _sorted_blocks(shares), dtype=dtype, tower=digest)


def _sorted_blocks(shares: Sequence[EmbeddingStore]) -> Iterator[Block]:
    # An empty share has no width, and its ids are int64 even if those of the others are
    # strings.
    filled_shares = [share for share in shares if len(share)]
    if not filled_shares:
        return
    ids = np.concatenate([share.ids.ids() for share in filled_shares])
    order = np.argsort(ids, kind="stable")
    ends = np.cumsum(list(map(len, filled_shares)))
    for start in range(0, len(order), _ROWS):
        # Positions among the rows of all shares, one share after the other.
        positions = order[start : start + _ROWS]
        owner = np.searchsorted(ends, positions, side="right")
        vectors = torch.empty(len(positions), filled_shares[0].width)
        for number, share in enumerate(filled_shares):
            indices = np.flatnonzero(owner == number)
            first = ends[number] - len(share)
            vectors[torch.from_numpy(indices)] = share.rows(
                torch.from_numpy(positions[indices] - first)
            )
        yield ids[positions], vectors
