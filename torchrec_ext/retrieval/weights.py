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
from torchrec.modules.embedding_configs import data_type_to_dtype

from torchrec_ext.distributed.runtime import gather_objects
from torchrec_ext.distributed.tables import Shard, local_shards, tables_of
from torchrec_ext.tensor_file import Shape

# Larger blocks get new pages from the system each time, which takes longer than to
# gather and to write them.
_BLOCK_BYTES = 8 * 2**20
# Ranks wait while rank 0 writes, however long. The connections of a rank that dies end
# the wait of the others at once.
_PATIENCE = timedelta(days=1)


class Block(NamedTuple):
    """Rows of a table from ``start`` on, (rows, D)."""

    table: str
    start: int
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
        self.tables: dict[str, Shape] = {}
        for config in tables_of(model):
            rows_of = self._rows_of.get(config.name, range(config.num_embeddings))
            size = len(rows_of), config.embedding_dim
            self.tables[config.name] = Shape(size, data_type_to_dtype(config.data_type))
        shards = {
            (shard.config.name, shard.row, shard.column): shard
            for shard in local_shards(model)
        }
        # What several ranks hold is sent by the lowest of them.
        for places in self.gathered(list(shards))[: self.rank]:
            for place in places:
                shards.pop(place, None)
        self._shards = list(shards.values())

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

    @torch.no_grad()
    def blocks(self, names: Iterable[str]) -> Iterator[Block]:
        """Yields every number of some tables, table by table; values are valid on rank 0 only."""
        for name in names:
            (count, width), dtype = self.tables[name].size, self.tables[name].dtype
            step = max(_BLOCK_BYTES // max(self.tables[name].row_bytes, 1), 1)
            for start in range(0, count, step):
                rows = torch.arange(start, min(start + step, count))
                if name in self._rows_of:
                    rows = self._rows_of[name][start : start + step]
                values = torch.zeros(len(rows), width, dtype=dtype)
                for shard in self._shards:
                    if shard.config.name == name:
                        _copy(shard, rows, values)
                if self._group is not None:
                    # One rank has each number and the others 0: as bytes, since a sum of numbers loses the sign of 0.
                    dist.reduce(values.view(torch.uint8), 0, group=self._group)
                yield Block(name, start, values)


def _copy(shard: Shard, rows: Tensor, values: Tensor) -> None:
    """Copies what a shard has of rows of its table to their (rows, D) values."""
    height, width = shard.tensor.shape
    inside = (rows >= shard.row) & (rows < shard.row + height)
    places = (rows[inside] - shard.row).to(shard.tensor.device)
    columns = slice(shard.column, shard.column + width)
    values[inside, columns] = shard.tensor.index_select(0, places).to(values)
