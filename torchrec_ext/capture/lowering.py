"""lowered(): turns a sharded model's tables, on one rank, into plain matrices, for captured and plain steps.

TorchRec's collections read their offsets while they run, so a graph breaks at each of them. A LoweredBags reads rows of
matrices at fixed offsets instead: one index_select for a feature with one id per bag. The matrices are the sharded
model's own memory, so its state dict, checkpoints and evaluations include the captured steps.

Packer: packs a TowerBatch into a flat list of tensors with shapes independent of its bags, and back. The inputs of a
captured step must keep their shapes. A feature with one id in each bag is unchanged. The ids of any other feature are
padded to a capacity, so its part of the KeyedJaggedTensor is longer than its bags; the lengths of the bags stay true. A
part with equally many ids and bags means one id in each bag, so a capacity is never the number of bags.

Capacities only grow, and at least to twice the number of ids that outgrew them. Lists that grow over a run therefore
make few layouts, and an outgrown layout never returns.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_ext.batch import SharedRows, TowerBatch
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.distributed.tables import collections, table_configs

Read = Callable[[str, Tensor], Tensor]  # (name of a table, (n,) rows) -> (n, D)
# (path of a collection, the collection) -> its replacement
Lower = Callable[[str, nn.Module], nn.Module]


class Pooled(KeyedTensor):
    """A KeyedTensor over separate tensors; only ``values()`` concatenates them."""

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        # The fields of a KeyedTensor, whose own constructor takes one concatenated
        # tensor.
        self._by_name = dict(zip(names, tensors, strict=True))
        self._keys = list(names)
        self._length_per_key = [tensor.shape[1] for tensor in tensors]
        self._key_dim = 1
        self._offset_per_key = None
        self._index_per_key = None

    @property
    def _values(self) -> Tensor:
        return torch.cat(list(self._by_name.values()), dim=1)

    def to_dict(self) -> dict[str, Tensor]:
        """Returns the tensors by name, (B, D) each."""
        return dict(self._by_name)

    def __getitem__(self, key: str) -> Tensor:
        return self._by_name[key]


class LoweredBags(nn.Module):
    """An EmbeddingBagCollection with a function for reading the rows of its tables.

    Args:
        tables: configs of the collection's tables.
        read: takes the name of a table and rows (n,), and returns the vectors (n, D).
        packed: whether :class:`Packer` packs the batches, so that as many ids as bags means one id in each.
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], read: Read, *, packed: bool
    ) -> None:
        super().__init__()
        self._tables = list(tables)
        self._names = get_embedding_names_by_table(self._tables)
        self._read = read
        self._packed = packed

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Returns the pooled bags, (B, sum of D), of a KeyedJaggedTensor that :class:`Packer` may have padded."""
        pooled = []
        names = []
        for table, table_names in zip(self._tables, self._names, strict=True):
            for feature, name in zip(table.feature_names, table_names, strict=True):
                pooled.append(self._pooled(table, features, feature))
                names.append(name)
        return Pooled(names, pooled)

    def _pooled(
        self, table: EmbeddingBagConfig, features: KeyedJaggedTensor, feature: str
    ) -> Tensor:
        stride = features.stride()
        parts = features.length_per_key()
        index = features.keys().index(feature)
        count = parts[index]
        start = sum(parts[:index])
        ids = features.values()[start : start + count]
        rows = self._read(table.name, ids)
        # With one id in each bag there is nothing to pool.
        if count == stride and self._packed:
            return rows
        lengths = features.lengths()[index * stride : (index + 1) * stride].long()
        if count == stride and bool((lengths == 1).all()):
            return rows
        # The bag of each id. Ids after the last bag are padding: they go into an extra
        # bag, which is cut off.
        bag = torch.searchsorted(
            lengths.cumsum(0), torch.arange(count, device=ids.device), right=True
        )
        pooled = rows.new_zeros(stride + 1, rows.shape[1]).index_add(0, bag, rows)[
            :stride
        ]
        if table.pooling == PoolingType.MEAN:
            pooled = pooled / lengths.clamp(min=1)[:, None]
        return pooled


def lowered(model: nn.Module, lower: Lower) -> nn.Module:
    """Copies the unwrapped ``model``, with other modules for its collections and shared dense parameters."""
    plain: nn.Module = get_unwrapped_module(model)
    for path, collection in collections(model):
        plain = _replace_submodule(plain, path, lower(path, collection))
    return plain


def static_bags(read: Read, *, packed: bool = True) -> Lower:
    """Returns a function that lowers collections of bags; their shapes do not depend on the batch's ids.

    Raises:
        CannotCaptureError: the function was called with another collection, or one of weighted bags.
    """

    def lower(path: str, collection: nn.Module) -> nn.Module:
        kinds = (EmbeddingBagCollection, ShardedEmbeddingBagCollection)
        if not isinstance(collection, kinds):
            raise CannotCaptureError(
                f"the {type(collection).__name__} '{path}' returns a row for each id, so its shapes depend on the batch"
            )
        if collection._is_weighted:
            raise CannotCaptureError(
                f"'{path}' reads weights of ids, which a captured step does not take"
            )
        return LoweredBags(table_configs(collection), read, packed=packed)

    return lower


def _replace_submodule(module: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """Replaces the module at ``path`` in a shallow copy of ``module``; copies every module on the way."""
    if not path:
        return new
    head, _, rest = path.partition(".")
    # Shallow: the sharded model keeps its own modules, and both share their parameters.
    module_copy: nn.Module = copy.copy(module)
    child = module.get_submodule(head)
    module_copy._modules = {
        **module._modules,
        head: _replace_submodule(child, rest, new),
    }
    return module_copy


_HEADROOM = 1.25  # first capacity / ids of the first batch with lists
_GROWTH = 2.0  # new capacity / ids of the batch that outgrew the old one: growing lists make few layouts
_ROUND_TO = (
    64  # capacities are multiples, so that batches of almost equal lists share a layout
)


@dataclass(frozen=True)
class KeyedLayout:
    """A KeyedJaggedTensor without its tensors: S bags for each key, and the number of ids in each key's part."""

    keys: tuple[str, ...]
    stride: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class BatchLayout:
    """A batch without its tensors: for each field its kind, with shape and dtype of tensors."""

    fields: tuple[tuple[str, Any], ...]

    @property
    def sizes(self) -> BatchLayout:
        """The layout without the numbers of ids: equal for two batches if one only has longer lists."""
        return BatchLayout(
            tuple((name, _without_counts(kind)) for name, kind in self.fields)
        )

    def batch(self, tensors: list[Tensor]) -> TowerBatch:
        """Builds the batch from the tensors of :meth:`Packer.pack` with this layout."""
        remaining = iter(tensors)
        return TowerBatch(
            **{name: _unpack(kind, remaining) for name, kind in self.fields}
        )


def _without_counts(kind: Any) -> Any:
    if isinstance(kind, KeyedLayout):
        return dataclasses.replace(kind, parts=())
    return kind.sizes if isinstance(kind, BatchLayout) else kind


def _unpack(kind: Any, remaining: Any) -> Any:
    if kind is None or isinstance(kind, int):
        return kind
    if isinstance(kind, KeyedLayout):
        return KeyedJaggedTensor(
            keys=list(kind.keys),
            values=next(remaining),
            lengths=next(remaining),
            stride=kind.stride,
            length_per_key=list(kind.parts),
        )
    if isinstance(kind, BatchLayout):
        return SharedRows(
            **{
                name: _unpack(kind_of_field, remaining)
                for name, kind_of_field in kind.fields
            }
        )
    return next(remaining)


class Packer:
    """Packs batches, with remembered capacities, so that batches of one size get one layout.

    If a batch has more ids than a capacity, the capacity grows, and this and all later batches get a new layout.
    """

    def __init__(self) -> None:
        self._capacities: dict[tuple[str, str, int], int] = {}

    def pack(self, batch: TowerBatch) -> tuple[BatchLayout, list[Tensor]]:
        """Returns the layout of a batch and its tensors."""
        tensors: list[Tensor] = []
        return self._pack_fields("batch", batch, tensors, batch.lists), tensors

    def _pack_fields(
        self,
        where: str,
        rows: Any,
        tensors: list[Tensor],
        lists: tuple[str, ...] | None,
    ) -> BatchLayout:
        kinds = []
        for field in dataclasses.fields(rows):
            value = getattr(rows, field.name)
            kind: Any = None
            if isinstance(value, KeyedJaggedTensor):
                kind = self._pack_bags(f"{where}.{field.name}", value, tensors, lists)
            elif isinstance(value, SharedRows):
                kind = self._pack_fields(f"{where}.{field.name}", value, tensors, lists)
            elif isinstance(value, int):
                kind = value
            elif isinstance(value, Tensor):
                kind = (tuple(value.shape), value.dtype)
                tensors.append(value)
            kinds.append((field.name, kind))
        return BatchLayout(tuple(kinds))

    def _pack_bags(
        self,
        where: str,
        bags: KeyedJaggedTensor,
        tensors: list[Tensor],
        lists: tuple[str, ...] | None,
    ) -> KeyedLayout:
        stride = bags.stride()
        counts = dict(zip(bags.keys(), bags.length_per_key(), strict=True))
        values = bags.values()
        are_lists = self._are_lists(where, bags, lists)
        parts = list(counts.values())
        # A feature with one id per bag is never padded: its values go as they are,
        # without a copy.
        if any(are_lists):
            padded = {key: counts[key] for key in compress(counts, are_lists)}
            self._make_room(where, stride, padded)
            parts = [
                self._capacities[where, key, stride] if key in padded else counts[key]
                for key in counts
            ]
            values = _padded(values, counts.values(), parts)
        tensors += [values, bags.lengths()]
        return KeyedLayout(tuple(counts), stride, tuple(parts))

    def _are_lists(
        self, where: str, bags: KeyedJaggedTensor, lists: tuple[str, ...] | None
    ) -> list[bool]:
        """Returns for each key whether its bags may hold any number of ids; a key that had lists once has them."""
        stride = bags.stride()
        keys = bags.keys()
        are_lists = [
            (where, key, stride) in self._capacities or key in (lists or ())
            for key in keys
        ]
        if lists is not None or not stride or not keys:
            return are_lists
        lengths = bags.lengths()
        # The counts are compared first: they are on the host, the lengths may be on a
        # GPU.
        has_single_counts = bags.length_per_key() == [stride] * len(keys)
        if not any(are_lists) and has_single_counts and bool(lengths.eq(1).all()):
            return are_lists
        are_single = lengths.view(len(keys), stride).eq(1).all(dim=1).tolist()
        return [
            is_list or not is_single
            for is_list, is_single in zip(are_lists, are_single, strict=True)
        ]

    def _make_room(self, where: str, stride: int, counts: Mapping[str, int]) -> None:
        """Sets capacities for ``counts`` ids; if one is outgrown all grow, because lists often grow together."""
        capacities = self._capacities
        outgrown = any(
            count > capacities.get((where, key, stride), count)
            for key, count in counts.items()
        )
        for key, count in counts.items():
            current = capacities.get((where, key, stride), 0)
            if outgrown or not current:
                growth = _GROWTH if current else _HEADROOM
                blocks = math.ceil(int(count * growth) / _ROUND_TO)
                new_capacity = max(1, blocks) * _ROUND_TO
                # Never the stride: a part with as many ids as bags would be read as one
                # id in each bag.
                if new_capacity == stride:
                    new_capacity += 1
                capacities[where, key, stride] = max(current, new_capacity)


def _padded(values: Tensor, counts: Collection[int], parts: Sequence[int]) -> Tensor:
    """Pads each key's part of the values with zeros."""
    padded = values.new_zeros(sum(parts))
    start = 0
    for part, capacity in zip(torch.split(values, list(counts)), parts, strict=True):
        padded[start : start + len(part)] = part
        start += capacity
    return padded
