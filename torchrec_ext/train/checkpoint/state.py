"""ModelState: the tensors of a model and its optimizers, under names that no plan, number of ranks or path changes.

``tables.NAME.weight`` (rows, D) and ``tables.NAME.STATE`` belong to a table, wherever its collection stands in the
model; ``dense.PATH`` and ``dense.PATH@STATE`` to the dense layers. STATE is torch.optim's name: ``sum``, ``exp_avg``,
``exp_avg_sq``, ``step``.

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
    """One rectangle of a tensor, which begins at ``offsets`` of the whole; writing ``tensor`` writes the whole."""

    tensor: Tensor
    offsets: tuple[int, ...]


class Parts:
    """The rectangles of a tensor that this rank holds; all ranks together hold each element once, or equal copies.

    It follows the protocol by which torch.distributed.checkpoint takes tensors of other libraries
    (``torch.distributed._checkpointable``), so a table needs no ShardedTensor, which replicated tables and the row-wise
    state of an optimizer do not have.

    Args:
        shape: shape of the whole tensor.
        parts: rectangles of this rank; may be empty.
    """

    def __init__(self, shape: Sequence[int], parts: Sequence[LocalShard]) -> None:
        self.shape = torch.Size(shape)
        self.parts = [shard for shard in parts if shard.tensor.numel()]

    def size(self) -> torch.Size:
        """The shape of the whole, which torch.distributed.checkpoint compares with what was saved."""
        return self.shape

    def map(self, function: Any) -> Parts:
        """Returns the same rectangles with ``function(tensor, number)`` in place of each tensor."""
        return Parts(
            self.shape,
            [LocalShard(function(shard.tensor, number), shard.offsets) for number, shard in enumerate(self.parts)],
        )

    def at(self, offsets: Sequence[int]) -> Tensor:
        """Returns the block or rectangle that begins at ``offsets``."""
        blocks = {tuple(shard.offsets): shard.tensor for shard in self.parts} | {
            shard.offsets: shard.tensor for shard in self._blocks()
        }
        return blocks[tuple(offsets)]

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
        return [_chunk(shard) for shard in self.parts]

    def _blocks(self) -> Iterator[LocalShard]:
        """Yields the rectangles, cut into blocks of rows."""
        for tensor, (row, *rest) in self.parts:
            rows = max(BLOCK_BYTES // max(tensor[0].numel() * tensor.element_size(), 1), 1)
            for start in range(0, len(tensor), rows):
                yield LocalShard(tensor[start : start + rows], (row + start, *rest))


def _chunk(shard: LocalShard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(shard.offsets), sizes=shard.tensor.shape)


State = dict[str, Tensor | Parts]


class SavePlanner(DefaultSavePlanner):
    """Saves a flat state of tensors and :class:`Parts` under its names."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the tensor to be written."""
        return _with_its_own_storage(_look_up(self.state_dict, index))


class LoadPlanner(DefaultLoadPlanner):
    """Writes what was saved into the tensors of a flat state, reading no more than they need."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Keeps the state as it is: nothing is flattened, and no tensor is allocated."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Returns the tensor to be filled."""
        return _look_up(self.state_dict, index)


def _with_its_own_storage(block: Tensor) -> Tensor:
    """Returns a block of rows as a tensor that torch does not copy to write it: one whose storage holds nothing else.

    The memory is that of ``block``. A copy would be as large, and its pages new ones: it took longer than the hash.
    """
    if (
        block.untyped_storage().size() == block.nbytes
        or not block.is_cpu
        or not block.is_contiguous()
        or not block.dim()
    ):
        return block
    return torch.from_numpy(block.view(torch.uint8).numpy()).view(block.dtype)


def _look_up(state: Mapping[str, Any], index: MetadataIndex) -> Tensor:
    held = state[index.fqn]
    return held.at(index.offset or ()) if isinstance(held, Parts) else held


@dataclass
class RowState:
    """An optimizer's number per row for each part into which columns are split, such as row-wise Adagrad's sum.

    Args:
        widths: number of columns of each part, in order.
        parts: this rank's numbers, (rows, 1), by their first row and the index of their part.
        rows: number of rows of the table.
    """

    widths: tuple[int, ...]
    rows: int
    parts: list[LocalShard] = field(default_factory=list)


@dataclass
class ModelState:
    """The tensors of a model and its optimizers; writing them writes the model.

    Args:
        tensors: tensors by name; tables as the rows that this rank holds.
        row_states: numbers per row by name.
        tables: (rows, D) and dtype by table name, on every rank alike.
        paths: path of each table's weight in the unsharded model.
        kernels: kernels that count steps for Adam's bias correction, by the name of that count.
    """

    tensors: State
    row_states: dict[str, RowState]
    tables: dict[str, tuple[int, int, str]]
    paths: dict[str, str]
    kernels: dict[str, Any]

    def everything(self) -> State:
        """Returns the tensors, the row states, (rows, parts) each, and copies of what kernels count."""
        rows = {
            name: Parts((row_state.rows, len(row_state.widths)), row_state.parts)
            for name, row_state in self.row_states.items()
        }
        return {**self.tensors, **rows, **self.counted()}

    def counted(self) -> State:
        """Returns the steps that kernels have counted, () float32 each, as torch.optim keeps them."""
        return {name: kernel.iter.float().reshape(()).cpu() for name, kernel in self.kernels.items()}

    def count(self, steps: State) -> None:
        """Sets the kernels' counts of steps."""
        for name, kernel in self.kernels.items():
            kernel.set_optimizer_step(int(steps[name]))  # type: ignore[arg-type]


def model_state(model: nn.Module, optimizer: KeyedOptimizer | None = None) -> ModelState:
    """Returns the state of a model, sharded or not, and of its optimizer.

    Args:
        model: model from :func:`hybrid_parallel`, or unsharded.
        optimizer: the model's optimizer; None for the weights alone. If it has made no step, its state is made first.
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
    """Yields the path of the weight and the config of each table, whether or not this rank holds a shard of it."""
    for path, collection in collections(model):
        configs = {config.name: config for config in table_configs(collection)}
        for key in collection.state_dict():
            yield (f"{path}.{key}" if path else key), configs[key.split(".")[1]]


def _single(optimizer: KeyedOptimizer | None) -> list[KeyedOptimizer]:
    """The optimizers that a combined one is made of; the kernels' stays combined, its keys being whole paths."""
    if isinstance(optimizer, CombinedOptimizer):
        return [single for _, single in optimizer._optims]
    return [] if optimizer is None else [optimizer]


def _start(optimizer: KeyedOptimizer) -> None:
    """Makes the state that a torch optimizer would make at its first step, by a step at a rate of 0."""
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
    """An optimizer's state by torch.optim's names; TorchRec's kernels name the first one ``TABLE.momentum1``."""
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
        places, shards = [begin for _, begin in _pieces(weight)], [tensor for tensor, _ in _pieces(value)]
        if value.size() == weight.size():
            tensors[name] = Parts(
                shape, [LocalShard(tensor, begin) for tensor, begin in zip(shards, places, strict=True)]
            )
        else:
            rows[name] = _row_state(config, weight, zip(shards, places, strict=True))
    elif value.shape == shape:
        tensors[name] = Parts(shape, [LocalShard(value, (0, 0))])
    else:
        rows[name] = RowState((config.embedding_dim,), config.num_embeddings, [LocalShard(value.view(-1, 1), (0, 0))])


def _pieces(held: ShardedTensor | DTensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    """The tensors that this rank holds, each with the offsets at which it begins."""
    if isinstance(held, ShardedTensor):
        return [(shard.tensor, tuple(shard.metadata.shard_offsets)) for shard in held.local_shards()]
    local: Any = held.to_local()  # TorchRec's LocalShardsWrapper; a rank without a shard has one offset all the same
    return [(tensor, tuple(begin)) for tensor, begin in zip(local.local_shards(), local.local_offsets(), strict=False)]


def _row_state(
    config: BaseEmbeddingConfig, weight: ShardedTensor, shards: Iterable[tuple[Tensor, tuple[int, ...]]]
) -> RowState:
    widths = {
        shard.shard_offsets[1]: shard.shard_sizes[1]
        for shard in weight.metadata().shards_metadata
        if shard.shard_sizes[0]
    }
    places = sorted(widths)
    parts = [
        LocalShard(tensor.view(-1, 1), (begin[0], places.index(begin[1]))) for tensor, begin in shards if tensor.numel()
    ]
    return RowState(tuple(widths[column] for column in places), config.num_embeddings, parts)


def _kernels(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the table and the kernel of each shard of this rank."""
    for _, collection in collections(model):
        for module in kernels_of(collection):
            yield from ((table.name, module.emb_module) for table in module.config.embedding_tables)
