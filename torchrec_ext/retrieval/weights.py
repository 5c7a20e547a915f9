"""Weights of a live model, sharded or not, on rank 0: dense ones at once, tables block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
# Ranks wait while rank 0 writes, however long. The connections of a rank that dies end
# the wait of the others at once.
_PATIENCE = timedelta(days=1)


class _Piece(NamedTuple):
    """A rectangle of a table."""

    table: str
    row: int
    column: int
    rows: int
    columns: int


class Block(NamedTuple):
    """Numbers of a table: its name, the rows and columns that they have there, and the values (rows, columns)."""

    table: str
    rows: Any
    columns: slice
    values: Tensor


class LiveWeights:
    """Sends a model's tables to rank 0 block by block, because they may exceed the memory.

    Args:
        model: model from ``hybrid_parallel``, in any DistributedModelParallel, or unsharded. Every rank creates one and
            calls each method in the same order.
        rows: rows of a table that are exported, by table; all rows by default.

    Attributes:
        rank: number of this rank.
        tables: exported shape of each table by name, equal on every rank.
    """

    def __init__(
        self, model: nn.Module, rows: Mapping[str, Tensor] | None = None
    ) -> None:
        self.rank = 0
        self._size = 1
        self._group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self._size = dist.get_world_size()
            # A group of its own: gloo sends CPU tensors, and the default group's
            # timeout is too short.
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._model = model
        self._rows_of = dict(rows or {})
        self._shards: dict[_Piece, Tensor] = {}
        shapes = {}
        for shard in local_shards(model):
            config, tensor = shard.config, shard.tensor
            piece = _Piece(config.name, shard.row, shard.column, *tensor.shape)
            self._shards[piece] = tensor.detach()
            count = config.num_embeddings
            if config.name in self._rows_of:
                count = len(self._rows_of[config.name])
            shapes[config.name] = Shape((count, config.embedding_dim), tensor.dtype)
        self.tables: dict[str, Shape] = {}
        # Each piece is taken from the lowest rank that has it.
        self._holders: dict[_Piece, int] = {}
        found = self.gathered((list(self._shards), shapes))
        for rank, (pieces, of_rank) in enumerate(found):
            self.tables |= of_rank
            for piece in pieces:
                self._holders.setdefault(piece, rank)

    def gathered(self, value: Any) -> list[Any]:
        """Returns each rank's value, in rank order, on every rank."""
        return gather_objects(value, self._size, self._group)

    def dense(self) -> dict[str, Tensor]:
        """Returns all weights and buffers outside of tables, by their names in the unsharded model."""
        tables = {shard.fqn for shard in local_shards(self._model)}
        state = get_unwrapped_module(self._model).state_dict()
        return {
            name: value.detach().cpu().contiguous()
            for name, value in sorted(state.items())
            if name not in tables
            and isinstance(value, Tensor)
            and not isinstance(value, ShardedTensor)
        }

    def blocks(self, names: Iterable[str]) -> Iterator[Block]:
        """Yields every number of some tables, table by table; values are valid on rank 0 only."""
        for name in names:
            count = self.tables[name].size[0]
            step = max(_BLOCK_BYTES // max(self.tables[name].row_bytes, 1), 1)
            pieces = sorted(piece for piece in self._holders if piece.table == name)
            for start in range(0, count, step):
                stop = min(start + step, count)
                rows = torch.arange(start, stop)
                if name in self._rows_of:
                    rows = self._rows_of[name][start:stop]
                # Every rank goes through the pieces of all ranks, so that a sender and
                # rank 0 meet in one order.
                for piece in pieces:
                    end = piece.row + piece.rows
                    inside = ((rows >= piece.row) & (rows < end)).nonzero().squeeze(1)
                    if not len(inside):
                        continue
                    places: Any = slice(start, stop)
                    if len(inside) < len(rows):
                        places = (inside + start).numpy()
                    columns = slice(piece.column, piece.column + piece.columns)
                    values = self._moved(piece, rows[inside] - piece.row)
                    yield Block(name, places, columns, values)

    @torch.no_grad()
    def _moved(self, piece: _Piece, rows: Tensor) -> Tensor:
        """Sends rows of a piece from its holder to rank 0, and returns them there."""
        holder = self._holders[piece]
        dtype = self.tables[piece.table].dtype
        if self.rank == holder:
            shard = self._shards[piece]
            values = shard.index_select(0, rows.to(shard.device)).cpu()
            if holder:
                dist.send(values, dst=0, group=self._group)
            return values
        values = torch.empty(len(rows), piece.columns, dtype=dtype)
        if self.rank == 0:
            dist.recv(values, src=holder, group=self._group)
        return values
