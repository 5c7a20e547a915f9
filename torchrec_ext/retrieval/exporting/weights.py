"""The weights of a live model, sharded over ranks or not, on rank 0: tables block by block, so that none need fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_ext.distributed.tables import Shard, collections, local_shards
from torchrec_ext.tensor_file import Shape

BLOCK_BYTES = 32 * 2**20
_PATIENCE = timedelta(hours=6)  # rank 0 writes a whole bundle meanwhile


class _Piece(NamedTuple):
    """A rectangle of a table, held by ``rank``."""

    rank: int
    row: int
    column: int
    rows: int
    columns: int


class ExportRanks:
    """What the ranks of an export learn from each other; without a process group there is one.

    Every rank makes one and calls each method alike.
    """

    def __init__(self) -> None:
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)
        self.group = dist.new_group(backend="gloo", timeout=_PATIENCE) if many else None

    def gathered(self, value: Any) -> list[Any]:
        """The value of each rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def moved(self, tensor: Tensor, source: int) -> Tensor:
        """A tensor of ``source`` on rank 0; the others give one of the same shape, or are not asked."""
        if source == 0 or self.rank not in (0, source):
            return tensor
        if self.rank == 0:
            dist.recv(tensor, src=source, group=self.group)
        else:
            dist.send(tensor, dst=0, group=self.group)
        return tensor


class LiveWeights:
    """The tables and dense weights of a model, whatever plan it has.

    Args:
        model: from ``hybrid_parallel``, any DistributedModelParallel, or unsharded.
        ranks: every rank makes one and iterates alike.

    Attributes:
        tables: by name their whole shape, on every rank alike.
    """

    def __init__(self, model: nn.Module, ranks: ExportRanks) -> None:
        self._ranks = ranks
        self._shards: dict[str, list[Shard]] = {}
        for shard in local_shards(model):
            self._shards.setdefault(shard.config.name, []).append(shard)
        own = {name: [_piece(ranks.rank, shard) for shard in shards] for name, shards in self._shards.items()}
        kinds = {
            name: Shape((shards[0].config.num_embeddings, shards[0].config.embedding_dim), shards[0].tensor.dtype)
            for name, shards in self._shards.items()
        }
        everyone = ranks.gathered((own, kinds))
        self.tables: dict[str, Shape] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        for pieces, shapes in everyone:
            self.tables |= {name: shape for name, shape in shapes.items() if name not in self.tables}
            for name, found in pieces.items():
                self._pieces.setdefault(name, []).extend(found)
        self.tables = dict(sorted(self.tables.items()))
        self._pieces = {name: _once(name, found, self.tables[name]) for name, found in self._pieces.items()}
        self._dense = _dense_of(model)

    def blocks(self, names: Iterable[str]) -> Iterator[tuple[str, int, Tensor]]:
        """(table, first row, whole rows), one table and block after the other; on other ranks than 0 the rows mean nothing."""
        for name in names:
            for row, rows in self._rows(name):
                yield name, row, rows

    @torch.no_grad()
    def _rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        size, width = self.tables[name].size
        step = max(BLOCK_BYTES // max(self.tables[name].row_bytes, 1), 1)
        for start in range(0, size, step):
            stop = min(start + step, size)
            block = torch.empty(stop - start, width, dtype=self.tables[name].dtype)
            for piece in self._pieces[name]:
                first, last = max(start, piece.row), min(stop, piece.row + piece.rows)
                if first < last:
                    part = self._ranks.moved(self._part(name, piece, first, last), piece.rank)
                    if self._ranks.rank == 0:
                        block[first - start : last - start, piece.column : piece.column + piece.columns] = part
            yield start, block

    def dense(self) -> dict[str, Tensor]:
        """On rank 0 all weights and buffers that are in no table, by their names in the unsharded model; other ranks' too."""
        known = self._ranks.gathered(sorted(self._dense))
        missing = {name for names in known for name in names} - set(known[0])
        holder = {name: next(rank for rank, names in enumerate(known) if name in names) for name in missing}
        sent = {name: self._dense[name] for name, rank in holder.items() if rank == self._ranks.rank}
        found = self._ranks.gathered(sent)
        return dict(sorted({**self._dense, **{name: value for each in found for name, value in each.items()}}.items()))

    def _part(self, name: str, piece: _Piece, first: int, last: int) -> Tensor:
        if piece.rank != self._ranks.rank:
            return torch.empty(last - first, piece.columns, dtype=self.tables[name].dtype)
        own = next(shard for shard in self._shards[name] if _piece(piece.rank, shard) == piece)
        return own.tensor[first - piece.row : last - piece.row].detach().cpu().contiguous()


def _piece(rank: int, shard: Shard) -> _Piece:
    rows, columns = shard.tensor.shape
    return _Piece(rank, shard.row, shard.column, rows, columns)


def _once(name: str, pieces: list[_Piece], shape: Shape) -> list[_Piece]:
    """Each rectangle from the lowest rank that holds it."""
    chosen: dict[tuple[int, ...], _Piece] = {}
    for piece in sorted(pieces):
        if piece.rows and piece.columns:
            chosen.setdefault(piece[1:], piece)
    held = sum(piece.rows * piece.columns for piece in chosen.values())
    assert held == torch.Size(shape.size).numel(), f"table '{name}': {held} numbers of {shape.size} are held"
    return sorted(chosen.values(), key=lambda piece: piece[1:])


def _dense_of(model: nn.Module) -> dict[str, Tensor]:
    unwrapped = get_unwrapped_module(model)
    tables = {
        f"{path}.{key}" if path else key for path, collection in collections(model) for key in collection.state_dict()
    }
    return {
        name: value.detach().cpu().contiguous()
        for name, value in unwrapped.state_dict().items()
        if name not in tables and isinstance(value, Tensor) and not isinstance(value, ShardedTensor)
    }
