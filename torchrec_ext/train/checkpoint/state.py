"""What a checkpoint holds of a model and its optimizers, under names that no plan, no number of ranks and no path changes.

``tables.NAME.weight`` (rows, D) and ``tables.NAME.STATE`` are of a table wherever its collection stands; ``dense.PATH``
and ``dense.PATH@STATE`` of the rest. STATE is torch.optim's name for it: ``sum``, ``exp_avg``, ``exp_avg_sq``,
``step``.

Parts: a tensor of which this rank holds rectangles, saved and loaded by torch.distributed.checkpoint, however divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper

from torchrec_ext.distributed.optim.sharded import kernels_of
from torchrec_ext.distributed.tables import collections, local_shards, table_configs
from torchrec_ext.distributed.tower_parallel.lookups import unhosted

BLOCK_BYTES = 32 * 2**20  # a reader holds one saved block at a time, whatever it is asked for


class LocalShard(NamedTuple):
    """One rectangle: writing ``tensor`` writes the whole from ``offsets`` onwards."""

    tensor: Tensor
    offsets: tuple[int, ...]


class Parts:
    """A tensor by the rectangles that this rank holds; all ranks together hold each element once, or each alike.

    It follows the protocol by which torch.distributed.checkpoint takes tensors of other libraries
    (``torch.distributed._checkpointable``), so a table needs no ShardedTensor, which replicated tables and the row-wise
    state of an optimizer do not have.

    Args:
        shape: of the whole.
        parts: of this rank; may be none.
    """

    def __init__(self, shape: Sequence[int], parts: Sequence[LocalShard]) -> None:
        self.shape = torch.Size(shape)
        self.parts = [part for part in parts if part.tensor.numel()]

    def size(self) -> torch.Size:
        """Of the whole; torch.distributed.checkpoint compares it with what was saved."""
        return self.shape

    def map(self, function: Any) -> Parts:
        """The same rectangles of ``function(tensor, number)``."""
        return Parts(
            self.shape,
            [LocalShard(function(part.tensor, number), part.offsets) for number, part in enumerate(self.parts)],
        )

    def at(self, offsets: Sequence[int]) -> Tensor:
        """The block or part that begins there."""
        found = {tuple(part.offsets): part.tensor for part in self.parts} | {
            part.offsets: part.tensor for part in self._blocks()
        }
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

    def _blocks(self) -> Iterator[LocalShard]:
        """The parts in blocks of rows."""
        for tensor, (row, *rest) in self.parts:
            rows = max(BLOCK_BYTES // max(tensor[0].numel() * tensor.element_size(), 1), 1)
            for start in range(0, len(tensor), rows):
                yield LocalShard(tensor[start : start + rows], (row + start, *rest))


def _chunk(part: LocalShard) -> ChunkStorageMetadata:
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


@dataclass
class RowState:
    """A number per row that an optimizer keeps for each part into which the columns are split, such as row-wise Adagrad's sum.

    Args:
        widths: of the parts, in order of their columns.
        parts: (rows of this rank, 1) by their first row and the number of their part.
        rows: of the table.
    """

    widths: tuple[int, ...]
    rows: int
    parts: list[LocalShard] = field(default_factory=list)


@dataclass
class ModelState:
    """The tensors of a model and its optimizers; writing them writes the model.

    Args:
        tensors: by name; of a table only what this rank holds.
        row_states: by name, as the tensors.
        tables: (rows, D) and dtype by table name, on every rank alike.
        paths: of each table's weight in the unsharded model.
        kernels: by name of the steps that it counts, for Adam's bias correction, the kernel that holds the table.
    """

    tensors: State
    row_states: dict[str, RowState]
    tables: dict[str, tuple[int, int, str]]
    paths: dict[str, str]
    kernels: dict[str, Any]

    def everything(self) -> State:
        """The tensors with the row states, (rows, parts) each, and copies of what kernels count."""
        rows = {name: Parts((own.rows, len(own.widths)), own.parts) for name, own in self.row_states.items()}
        return {**self.tensors, **rows, **self.counted()}

    def counted(self) -> State:
        """The steps that kernels have counted: () as torch.optim keeps them."""
        return {name: kernel.iter.float().reshape(()).cpu() for name, kernel in self.kernels.items()}

    def count(self, steps: State) -> None:
        """Hands kernels their steps back."""
        for name, kernel in self.kernels.items():
            kernel.set_optimizer_step(int(steps[name]))  # type: ignore[arg-type]


def model_state(model: nn.Module, optimizer: KeyedOptimizer | None = None) -> ModelState:
    """Of a model that is sharded, or plain.

    Args:
        model: from :func:`hybrid_parallel`, or unsharded.
        optimizer: likewise; None for the weights alone. Where it has made no step yet, its state is made first.
    """
    configs = dict(_configs(model))
    tables: dict[str, tuple[int, int, str]] = {
        config.name: (config.num_embeddings, config.embedding_dim, config.data_type.value)
        for config in configs.values()
    }
    tensors: State = {}
    held: dict[str, list[LocalShard]] = {}
    for shard in local_shards(model):
        held.setdefault(shard.config.name, []).append(LocalShard(shard.tensor.detach(), (shard.row, shard.column)))
    for name, parts in held.items():
        tensors[f"tables.{name}.weight"] = Parts(tables[name][:2], parts)
    for key, value in get_unwrapped_module(model).state_dict().items():
        if key not in configs and isinstance(value, Tensor) and not isinstance(value, (ShardedTensor, DTensor)):
            tensors[f"dense.{key}"] = value.detach()
    rows: dict[str, RowState] = {}
    for each in _single(optimizer):
        _start(each)
        for key, parameter in each.params.items():
            for slot, value in _slots(each.state.get(parameter, {}), configs.get(key)).items():
                if key in configs:
                    _add_of_table(tensors, rows, configs[key], slot, value, parameter)
                else:
                    tensors[f"dense.{key}@{slot}"] = value
    moved = {name.split(".")[1] for name in tensors if name.endswith(".exp_avg")}
    kernels = {f"tables.{name}.step": kernel for name, kernel in _kernels(model) if name in moved}
    paths = {config.name: unhosted(get_unwrapped_module(model), path) for path, config in configs.items()}
    return ModelState(
        tensors, rows, tables, paths, {name: kernel for name, kernel in kernels.items() if name not in tensors}
    )


def _configs(model: nn.Module) -> Iterator[tuple[str, BaseEmbeddingConfig]]:
    """(path of its weight, config) of each table, whether this rank holds a part of it or not."""
    for path, collection in collections(model):
        configs = {config.name: config for config in table_configs(collection)}
        for key in collection.state_dict():
            yield (f"{path}.{key}" if path else key), configs[key.split(".")[1]]


def _single(optimizer: KeyedOptimizer | None) -> list[KeyedOptimizer]:
    """The optimizers that a combined one is made of; that of the kernels is itself combined, by which its keys are whole paths."""
    if isinstance(optimizer, CombinedOptimizer):
        return [own for _, own in optimizer._optims]
    return [] if optimizer is None else [optimizer]


def _start(optimizer: KeyedOptimizer) -> None:
    """Has a torch optimizer make the state that it would make at its first step: by a step at a rate of 0."""
    inner = getattr(optimizer, "_optimizer", None)
    if not isinstance(optimizer, KeyedOptimizerWrapper) or inner is None or inner.state:
        return
    groups = inner.param_groups
    kept = [(parameter, parameter.grad) for group in groups for parameter in group["params"]]
    rates = [group["lr"] for group in groups]
    for parameter, _ in kept:
        parameter.grad = torch.zeros_like(parameter)
    for group in groups:
        group["lr"] = 0.0
    inner.step()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in kept:
        parameter.grad = gradient
        if "step" in inner.state[parameter]:
            inner.state[parameter]["step"].zero_()


def _slots(state: Mapping[str, Any], table: BaseEmbeddingConfig | None) -> dict[str, Any]:
    """An optimizer's state by torch.optim's names; TorchRec's kernels call the first of a table ``TABLE.momentum1``."""
    slots = {name.removeprefix(f"{table.name}.") if table else name: value for name, value in state.items()}
    if "momentum1" in slots:
        slots["exp_avg" if "exp_avg_sq" in slots else "sum"] = slots.pop("momentum1")
    if table and "sum" in slots:
        slots.pop("step", None)  # Adagrad's, for a decay of its rate that nobody can ask for; kernels do not count it
    return slots


def _add_of_table(
    tensors: State, rows: dict[str, RowState], config: BaseEmbeddingConfig, slot: str, value: Any, weight: Any
) -> None:
    name, shape = f"tables.{config.name}.{slot}", (config.num_embeddings, config.embedding_dim)
    if slot == "step":
        tensors[name] = value
    elif isinstance(value, (ShardedTensor, DTensor)):
        # Of a table with copies the state is a DTensor, its weight a ShardedTensor of one copy all the same.
        places, own = [at for _, at in _pieces(weight)], [tensor for tensor, _ in _pieces(value)]
        if value.size() == weight.size():
            tensors[name] = Parts(shape, [LocalShard(tensor, at) for tensor, at in zip(own, places, strict=True)])
        else:
            rows[name] = _row_state(config, weight, zip(own, places, strict=True))
    elif value.shape == shape:
        tensors[name] = Parts(shape, [LocalShard(value, (0, 0))])
    else:
        rows[name] = RowState((config.embedding_dim,), config.num_embeddings, [LocalShard(value.view(-1, 1), (0, 0))])


def _pieces(held: ShardedTensor | DTensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    """(tensor, where it begins) of what this rank holds."""
    if isinstance(held, ShardedTensor):
        return [(shard.tensor, tuple(shard.metadata.shard_offsets)) for shard in held.local_shards()]
    local: Any = held.to_local()  # TorchRec's LocalShardsWrapper; a rank without a shard has one offset all the same
    return [(tensor, tuple(at)) for tensor, at in zip(local.local_shards(), local.local_offsets(), strict=False)]


def _row_state(
    config: BaseEmbeddingConfig, weight: ShardedTensor, shards: Iterable[tuple[Tensor, tuple[int, ...]]]
) -> RowState:
    widths = {
        shard.shard_offsets[1]: shard.shard_sizes[1]
        for shard in weight.metadata().shards_metadata
        if shard.shard_sizes[0]
    }
    places = sorted(widths)
    parts = [LocalShard(own.view(-1, 1), (at[0], places.index(at[1]))) for own, at in shards if own.numel()]
    return RowState(tuple(widths[place] for place in places), config.num_embeddings, parts)


def _kernels(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(table, kernel) of the shards of this rank."""
    for _, collection in collections(model):
        for module in kernels_of(collection):
            yield from ((table.name, module.emb_module) for table in module.config.embedding_tables)
