"""Weights of a live model, sharded or not, gathered on rank 0: dense ones at once, tables block by block."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_ext.distributed.runtime import gather_objects
from torchrec_ext.distributed.tables import local_shards
from torchrec_ext.tensor_file import Shape

# Larger blocks get new pages from the system each time, which takes longer than to
# gather and to write them.
_BLOCK_BYTES = 8 * 2**20
_PATIENCE = timedelta(minutes=5)  # timeout of a collective
_BEAT_S = 5.0  # seconds between two signs of life of rank 0


class _Piece(NamedTuple):
    """A rectangle of a table, held by ``rank``."""

    rank: int
    row: int
    column: int
    rows: int
    columns: int


class ExportRanks:
    """The ranks of an export, with a process group of their own; one rank without ``torch.distributed``.

    Every rank creates one and calls each method in the same order.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            # A group of its own: gloo sends CPU tensors, and the default group's
            # timeout is too short.
            self.group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lets the other ranks wait for rank 0, however long it writes, as long as it lives."""
        if self.size == 1:
            yield
            return
        if self.rank != 0:
            yield
            while self._beat(False):
                pass
            return
        written = threading.Event()

        def beat() -> None:
            while not written.wait(_BEAT_S):
                self._beat(True)

        # A thread, because a rank that is killed sends nothing, and its peers then wait
        # no longer than the timeout.
        sender = threading.Thread(target=beat, daemon=True)
        sender.start()
        try:
            yield
        finally:
            written.set()
            sender.join()
            self._beat(False)

    def _beat(self, alive: bool) -> bool:
        sign = torch.tensor(int(alive))
        dist.broadcast(sign, src=0, group=self.group)
        return bool(sign)

    def gathered(self, value: Any) -> list[Any]:
        """Returns each rank's value, in rank order, on every rank."""
        return gather_objects(value, self.size, self.group)

    def moved(self, tensor: Tensor, source: int) -> Tensor:
        """Sends a tensor from rank ``source`` to rank 0; rank 0 passes a buffer of its shape and returns it filled."""
        if source == 0 or self.rank not in (0, source):
            return tensor
        if self.rank == 0:
            dist.recv(tensor, src=source, group=self.group)
        else:
            dist.send(tensor, dst=0, group=self.group)
        return tensor


class LiveWeights:
    """Gathers a model's dense weights on rank 0, and its tables block by block, because they may exceed the memory.

    Args:
        model: model from ``hybrid_parallel``, in any DistributedModelParallel, or unsharded.
        ranks: ranks of the export; all of them create one and iterate alike.
        rows: rows of a table that are exported, by table; all rows by default.

    Attributes:
        tables: exported shape of each table by name, equal on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: ExportRanks,
        rows: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._ranks = ranks
        self._rows_of = dict(rows or {})
        self._shards: dict[tuple[str, _Piece], Tensor] = {}
        found: list[tuple[str, Shape, _Piece]] = []
        tables = set()
        for shard in local_shards(model):
            config, tensor = shard.config, shard.tensor
            piece = _Piece(ranks.rank, shard.row, shard.column, *tensor.shape)
            self._shards[config.name, piece] = tensor
            size = (config.num_embeddings, config.embedding_dim)
            found.append((config.name, Shape(size, tensor.dtype), piece))
            tables.add(shard.fqn)
        wholes: dict[str, Shape] = {}
        pieces: dict[str, list[_Piece]] = {}
        for of_rank in ranks.gathered(found):
            for name, shape, piece in of_rank:
                wholes[name] = shape
                pieces.setdefault(name, []).append(piece)
        self.tables: dict[str, Shape] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        for name, whole in sorted(wholes.items()):
            self._pieces[name] = _choose_pieces(name, pieces[name], whole)
            held = self._rows_of.get(name)
            count = whole.size[0] if held is None else len(held)
            self.tables[name] = Shape((count, whole.size[1]), whole.dtype)
        self._dense = {
            name: value.detach().cpu().contiguous()
            for name, value in get_unwrapped_module(model).state_dict().items()
            if name not in tables
            and isinstance(value, Tensor)
            and not isinstance(value, ShardedTensor)
        }

    def blocks(self, names: Iterable[str]) -> Iterator[tuple[str, int, Tensor]]:
        """Yields (table, first row, full rows), table by table and block by block; rows are valid on rank 0 only."""
        for name in names:
            for row, rows in self._rows(name):
                yield name, row, rows

    @torch.no_grad()
    def _rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        size, width = self.tables[name].size
        step = max(_BLOCK_BYTES // max(self.tables[name].row_bytes, 1), 1)
        for start in range(0, size, step):
            stop = min(start + step, size)
            rows = torch.arange(start, stop)
            if name in self._rows_of:
                rows = self._rows_of[name][start:stop]
            block = torch.empty(stop - start, width, dtype=self.tables[name].dtype)
            # Every rank goes through the pieces of all ranks, so that a sender and rank
            # 0 meet in one order.
            for piece in self._pieces[name]:
                places = (
                    ((rows >= piece.row) & (rows < piece.row + piece.rows))
                    .nonzero()
                    .squeeze(1)
                )
                if len(places):
                    values = self._ranks.moved(
                        self._values(name, piece, rows[places]), piece.rank
                    )
                    if self._ranks.rank == 0:
                        block[places, piece.column : piece.column + piece.columns] = (
                            values
                        )
            yield start, block

    def dense(self) -> dict[str, Tensor]:
        """Returns, on rank 0, all weights and buffers outside of tables, by their names in the unsharded model."""
        names = set(self._ranks.gathered(sorted(self._dense))[0])
        lacking = {
            name: value for name, value in self._dense.items() if name not in names
        }
        weights = dict(self._dense)
        for found in self._ranks.gathered(lacking):
            weights = {**found, **weights}
        return dict(sorted(weights.items()))

    def _values(self, name: str, piece: _Piece, rows: Tensor) -> Tensor:
        if piece.rank != self._ranks.rank:
            return torch.empty(len(rows), piece.columns, dtype=self.tables[name].dtype)
        shard = self._shards[name, piece]
        local = (rows - piece.row).to(shard.device)
        return shard.detach().index_select(0, local).cpu()


def _choose_pieces(name: str, pieces: list[_Piece], shape: Shape) -> list[_Piece]:
    """Chooses one holder for each rectangle of a table: the lowest rank."""
    first_holders: dict[tuple[int, ...], _Piece] = {}
    for piece in sorted(pieces):
        if piece.rows and piece.columns:
            first_holders.setdefault(piece[1:], piece)
    numbers = sum(piece.rows * piece.columns for piece in first_holders.values())
    assert numbers == torch.Size(shape.size).numel(), (
        f"table '{name}': {numbers} numbers of {shape.size} are held"
    )
    return sorted(first_holders.values(), key=lambda piece: piece[1:])
