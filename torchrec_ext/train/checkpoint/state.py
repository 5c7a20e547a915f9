"""ModelState: the tensors of a model and its optimizers, under names independent of plan, ranks and paths.

``tables.NAME.weight`` (rows, D) and ``tables.NAME.STATE`` belong to a table, at any path of its collection in the
model; ``dense.PATH`` and ``dense.PATH@STATE`` to the dense layers. STATE is torch.optim's name: ``sum``, ``exp_avg``,
``exp_avg_sq``, ``step``.

Parts: this rank's rectangles of a tensor, saved and loaded by torch.distributed.checkpoint under any division.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
)

from torchrec_ext.distributed.optim.hybrid import make_first_state
from torchrec_ext.distributed.optim.sharded import kernels_of
from torchrec_ext.distributed.tables import collections, local_shards, table_configs
from torchrec_ext.train.checkpoint.storage import CheckpointError

# A reader always has one complete saved block in memory, so blocks must be small.
_BLOCK_BYTES = 32 * 2**20


def table_in_name(name: str) -> str:
    """Returns the table of a name in a state; empty if the name is not of a table.

    Example:
        >>> table_in_name("tables.user_id.exp_avg"), table_in_name("dense.mlp.weight")
        ('user_id', '')
    """
    kind, _, rest = name.partition(".")
    if kind != "tables":
        return ""
    return rest.partition(".")[0]


class LocalShard(NamedTuple):
    """One rectangle of a larger tensor, beginning at ``offsets`` of it."""

    tensor: Tensor
    offsets: tuple[int, ...]


class Parts:
    """This rank's rectangles of a tensor; all ranks together have each element once, or equal copies.

    It follows torch.distributed.checkpoint's protocol for tensors of other libraries
    (``torch.distributed._checkpointable``), so a table needs no ShardedTensor: replicated tables and the row-wise state
    of an optimizer have none.

    Args:
        shape: shape of the whole tensor.
        parts: rectangles of this rank; may be empty.
        widths: of an optimizer's numbers per row, such as row-wise Adagrad's sum: how many of the table's columns each
            column here stands for; empty for other tensors.
    """

    def __init__(
        self,
        shape: Sequence[int],
        parts: Sequence[LocalShard],
        widths: Sequence[int] = (),
    ) -> None:
        self.shape = torch.Size(shape)
        self.parts = [shard for shard in parts if shard.tensor.numel()]
        self.widths = tuple(widths)

    def size(self) -> torch.Size:
        """The shape of the whole tensor; torch.distributed.checkpoint compares it with the saved one."""
        return self.shape

    def map(self, function: Any) -> Parts:
        """Returns the same rectangles with ``function(tensor, number)`` in place of each tensor."""
        shards = []
        for number, shard in enumerate(self.parts):
            shards.append(LocalShard(function(shard.tensor, number), shard.offsets))
        return Parts(self.shape, shards, self.widths)

    def rectangle(self, offsets: Sequence[int]) -> Tensor:
        """Returns the whole rectangle beginning at ``offsets``, to load into."""
        return _beginning_at(offsets, self.parts)

    def block(self, offsets: Sequence[int]) -> Tensor:
        """Returns the block beginning at ``offsets``, to save."""
        return _beginning_at(offsets, self._blocks())

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        items = []
        for block in self._blocks():
            properties = TensorProperties.create_from_tensor(block.tensor)
            data = TensorWriteData(
                chunk=_chunk(block), properties=properties, size=self.shape
            )
            index = MetadataIndex(fqn, torch.Size(block.offsets))
            items.append(
                WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)
            )
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(shard) for shard in self.parts]

    def _blocks(self) -> Iterator[LocalShard]:
        """Yields the rectangles, cut into blocks of rows."""
        for tensor, (row, *rest) in self.parts:
            # Cut by rows, so that the blocks of a contiguous rectangle are contiguous
            # too.
            rows = max(_BLOCK_BYTES // max(tensor[0].nbytes, 1), 1)
            for start in range(0, len(tensor), rows):
                yield LocalShard(tensor[start : start + rows], (row + start, *rest))


def _beginning_at(offsets: Sequence[int], shards: Iterable[LocalShard]) -> Tensor:
    return next(
        shard.tensor for shard in shards if tuple(shard.offsets) == tuple(offsets)
    )


def _chunk(shard: LocalShard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size(shard.offsets), sizes=shard.tensor.shape
    )


State = dict[str, Tensor | Parts]

# Beginning of the names of the tensors in a checkpoint's content.
CONTENT = "content."
# Key that stands for one of them in JSON; no content has such a key.
_TENSOR_KEY = "a tensor of the checkpoint"


def content_as_json(content: Mapping[str, Any], tensors: State) -> dict[str, Any]:
    """Returns a copy of a checkpoint's content, JSON values alone: its tensors are added to ``tensors``.

    Raises:
        TypeError: a value is neither a tensor nor one that JSON holds.
    """

    def moved(tensor: Any) -> dict[str, str]:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"content: a {type(tensor).__name__}, must be what JSON holds, or a tensor"
            )
        name = f"{CONTENT}{len(tensors)}"
        tensors[name] = tensor
        return {_TENSOR_KEY: name}

    return json.loads(json.dumps(content, default=moved))  # type: ignore[no-any-return]


def content_of_json(content: Any, tensors: State) -> dict[str, Any]:
    """Returns the content of :func:`content_as_json` with its tensors in it."""

    def put_back(values: dict[str, Any]) -> Any:
        return tensors[values[_TENSOR_KEY]] if _TENSOR_KEY in values else values

    return json.loads(json.dumps(content), object_hook=put_back)  # type: ignore[no-any-return]


class SavePlanner(DefaultSavePlanner):
    """Saves a flat state of finite tensors and :class:`Parts` under its names."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the tensor to write.

        Raises:
            CheckpointError: it is not finite: a run goes on from its checkpoints, so none may hold such a number.
        """
        value = self.state_dict[index.fqn]
        if isinstance(value, Parts):
            value = value.block(index.offset or ())
        if value.is_floating_point() and not _is_finite(value):
            remedy = ", with lower learning rates or optimizer.clip_norm; of a mask set persistent=False"
            if index.fqn.startswith(CONTENT):
                remedy = ""
            raise CheckpointError(
                f"{index.fqn} is not finite, and is not saved; go on from the checkpoint before{remedy}"
            )
        return _own_storage(value)


class LoadPlanner(DefaultLoadPlanner):
    """Loads saved tensors into a flat state, reading no more than it needs."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: Any,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Uses the state unchanged, without flattening it or allocating tensors."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Returns the tensor to load into."""
        value = self.state_dict[index.fqn]
        # A read item counts its offsets from the rectangle's, even if they lie in a
        # later block.
        if isinstance(value, Parts):
            value = value.rectangle(index.offset or ())
        return value


def _is_finite(value: Tensor) -> bool:
    """Looks at the sum first, in one pass: a finite sum has only finite parts, any other may have overflowed."""
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())


def _own_storage(block: Tensor) -> Tensor:
    """Wraps a block of rows in a storage of its own, with the same memory, so that torch writes it without a copy.

    A copy is as large as the block and needs new pages: it took longer than the hash.
    """
    if (
        block.untyped_storage().size() == block.nbytes
        or not block.is_cpu
        or not block.is_contiguous()
        or not block.dim()
    ):
        return block
    return torch.from_numpy(block.view(torch.uint8).numpy()).view(block.dtype)


@dataclass
class ModelState:
    """The tensors of a model and its optimizers, as views: writing them changes the model.

    Args:
        tensors: tensors by name; of tables this rank's rows.
        tables: (rows, D) by table name, on every rank alike.
        paths: path of each table's weight in the unsharded model.
        kernels: kernels that count steps for Adam's bias correction, by the name of their count.
    """

    tensors: State
    tables: dict[str, tuple[int, int]]
    paths: dict[str, str]
    kernels: dict[str, Any]

    def everything(self) -> State:
        """Returns the tensors, and copies of the kernels' step counts."""
        return self.tensors | self.counted()

    def counted(self) -> State:
        """Returns the kernels' step counts, () float32 each, as in torch.optim."""
        return {
            name: kernel.iter.float().reshape(()).cpu()
            for name, kernel in self.kernels.items()
        }

    def count(self, steps: State) -> None:
        """Sets the kernels' step counts."""
        for name, kernel in self.kernels.items():
            kernel.set_optimizer_step(int(steps[name]))  # type: ignore[arg-type]


def model_state(
    model: nn.Module, optimizer: KeyedOptimizer | None = None
) -> ModelState:
    """Returns the state of a model, sharded or not, and of its optimizer.

    Args:
        model: model from :func:`hybrid_parallel`, or unsharded.
        optimizer: the model's optimizer; None for the weights alone. Its state is created if it has made no step.
    """
    configs = dict(_configs_by_path(model))
    tables: dict[str, tuple[int, int]] = {}
    for config in configs.values():
        tables[config.name] = (config.num_embeddings, config.embedding_dim)
    tensors: State = {}
    shards_by_table: dict[str, list[LocalShard]] = {}
    for shard in local_shards(model):
        shards_by_table.setdefault(shard.config.name, []).append(
            LocalShard(shard.tensor.detach(), (shard.row, shard.column))
        )
    for name, parts in shards_by_table.items():
        tensors[f"tables.{name}.weight"] = Parts(tables[name], parts)
    for key, value in get_unwrapped_module(model).state_dict().items():
        if (
            key not in configs
            and isinstance(value, Tensor)
            and not isinstance(value, ShardedTensor)
        ):
            tensors[f"dense.{key}"] = value.detach()
    for single in _split_combined(optimizer):
        torch_optimizer = getattr(single, "_optimizer", None)
        # A load fills tensors in place, so the state must be there before the first
        # step.
        if (
            isinstance(single, KeyedOptimizerWrapper)
            and torch_optimizer is not None
            and not torch_optimizer.state
        ):
            make_first_state(torch_optimizer)
        for key, parameter in single.params.items():
            for slot, value in _slots(
                single.state.get(parameter, {}), configs.get(key)
            ).items():
                if key in configs:
                    name = f"tables.{configs[key].name}.{slot}"
                    if slot != "step":
                        value = _table_state(configs[key], value, parameter)
                    tensors[name] = value
                else:
                    tensors[f"dense.{key}@{slot}"] = value
    kernels = {}
    for table, kernel in _kernels(model):
        step = f"tables.{table}.step"
        # A count that is among the tensors already is torch's own, and needs no copy of
        # the kernel's.
        if f"tables.{table}.exp_avg" in tensors and step not in tensors:
            kernels[step] = kernel
    paths = {config.name: path for path, config in configs.items()}
    return ModelState(tensors, tables, paths, kernels)


def _configs_by_path(model: nn.Module) -> Iterator[tuple[str, BaseEmbeddingConfig]]:
    """Yields the path of the weight and the config of each table, with or without a shard on this rank."""
    for path, collection in collections(model):
        configs = {config.name: config for config in table_configs(collection)}
        for key in collection.state_dict():
            # A model may be a collection itself, at the empty path.
            yield f"{path}.{key}".lstrip("."), configs[key.split(".")[1]]


def _split_combined(optimizer: KeyedOptimizer | None) -> list[KeyedOptimizer]:
    """Splits a combined optimizer; the kernels' one stays combined, because its keys are full paths."""
    if optimizer is None:
        return []
    if isinstance(optimizer, CombinedOptimizer):
        return [single for _, single in optimizer._optims]
    return [optimizer]


def _slots(
    state: Mapping[str, Any], table: BaseEmbeddingConfig | None
) -> dict[str, Any]:
    """Renames an optimizer's state to torch.optim's names; TorchRec's kernels use ``TABLE.momentum1`` for the first."""
    prefix = f"{table.name}." if table else ""
    slots = {name.removeprefix(prefix): value for name, value in state.items()}
    if "momentum1" in slots:
        name = "sum"
        # Adam's kernels have a second moment, Adagrad's none.
        if "exp_avg_sq" in slots:
            name = "exp_avg"
        slots[name] = slots.pop("momentum1")
    if table and "sum" in slots:
        # torch's Adagrad counts steps for a decay of its rate, which no setting offers;
        # kernels do not count.
        slots.pop("step", None)
    return slots


def _table_state(config: BaseEmbeddingConfig, value: Any, weight: Any) -> Parts:
    """Returns the state of a table's optimizer: a number per weight, (rows, D), or per row and part of the columns."""
    shape = (config.num_embeddings, config.embedding_dim)
    if not isinstance(value, ShardedTensor):
        if value.shape == shape:
            return Parts(shape, [LocalShard(value, (0, 0))])
        column = LocalShard(value.view(-1, 1), (0, 0))
        return Parts((shape[0], 1), [column], widths=shape[1:])
    # By the offsets of the weights, because a number per row has no columns.
    shards = [
        LocalShard(piece.tensor, tuple(of_weight.metadata.shard_offsets))
        for piece, of_weight in zip(
            value.local_shards(), weight.local_shards(), strict=True
        )
    ]
    if value.size() == weight.size():
        return Parts(shape, shards)
    widths = column_widths(
        (shard.shard_offsets, shard.shard_sizes)
        for shard in weight.metadata().shards_metadata
    )
    starts = list(widths)
    parts = [
        LocalShard(tensor.view(-1, 1), (row, starts.index(column)))
        for tensor, (row, column) in shards
        if tensor.numel()
    ]
    return Parts((shape[0], len(widths)), parts, widths=tuple(widths.values()))


def column_widths(
    shards: Iterable[tuple[Sequence[int], Sequence[int]]],
) -> dict[int, int]:
    """Returns the width of each part of a table's columns by its first column, in order.

    Args:
        shards: (row, column) where each shard begins, and its (rows, columns).

    Example:
        >>> column_widths([((0, 4), (9, 8)), ((0, 0), (9, 4))])
        {0: 4, 4: 8}
    """
    # A rank may have a shard without rows, whose columns are no part.
    widths = {start[1]: size[1] for start, size in shards if size[0]}
    return dict(sorted(widths.items()))


def _kernels(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the table and the kernel of each shard of this rank."""
    for _, collection in collections(model):
        for module in kernels_of(collection):
            for table in module.config.embedding_tables:
                yield table.name, module.emb_module
