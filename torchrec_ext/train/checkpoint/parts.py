"""Parts: a tensor of which this rank holds rectangles, saved and loaded by torch.distributed.checkpoint, however divided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

BLOCK_BYTES = 32 * 2**20  # a reader holds one saved block at a time, whatever it is asked for


class Part(NamedTuple):
    """One rectangle: writing ``tensor`` writes the whole from ``offsets`` onwards."""

    tensor: Tensor
    offsets: tuple[int, ...]


class Parts:
    """A tensor by the rectangles that this rank holds; all ranks together hold each element once, or each alike.

    It follows the protocol by which torch.distributed.checkpoint takes tensors of other libraries
    (``torch.distributed._checkpointable``), so a table needs no ShardedTensor, which replicated tables and the row-wise state of
    an optimizer do not have.

    Args:
        shape: of the whole.
        parts: of this rank; may be none.
    """

    def __init__(self, shape: Sequence[int], parts: Sequence[Part]) -> None:
        self.shape = torch.Size(shape)
        self.parts = [part for part in parts if part.tensor.numel()]

    def size(self) -> torch.Size:
        """Of the whole; torch.distributed.checkpoint compares it with what was saved."""
        return self.shape

    def map(self, function: Any) -> Parts:
        """The same rectangles of ``function(tensor, number)``."""
        return Parts(self.shape, [Part(function(part.tensor, number), part.offsets) for number, part in enumerate(self.parts)])

    def at(self, offsets: Sequence[int]) -> Tensor:
        """The block or part that begins there."""
        found = {tuple(part.offsets): part.tensor for part in self.parts} | {part.offsets: part.tensor for part in self._blocks()}
        return found[tuple(offsets)]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(block.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(block), properties=TensorProperties.create_from_tensor(block.tensor), size=self.shape
                ),
            )
            for block in self._blocks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(part) for part in self.parts]

    def _blocks(self) -> Iterator[Part]:
        """The parts in blocks of rows."""
        for tensor, (row, *rest) in self.parts:
            rows = max(BLOCK_BYTES // max(tensor[0].numel() * tensor.element_size(), 1), 1)
            for start in range(0, len(tensor), rows):
                yield Part(tensor[start : start + rows], (row + start, *rest))


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=part.tensor.shape)


State = dict[str, Tensor | Parts]


class SavePlanner(DefaultSavePlanner):
    """Takes a flat state of tensors and :class:`Parts` as it is."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor to be written."""
        return _look_up(self.state_dict, index)


class LoadPlanner(DefaultLoadPlanner):
    """Writes what was saved into the tensors of a flat state, reading no more than they need."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Nothing to flatten and no tensor to allocate."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor to be filled."""
        return _look_up(self.state_dict, index)


def _look_up(state: Mapping[str, Any], index: MetadataIndex) -> Tensor:
    held = state[index.fqn]
    return held.at(index.offset or ()) if isinstance(held, Parts) else held
