"""Tables of a sharded model, on one rank, as plain matrices: what a captured or a plain step computes with in TorchRec's place.

TorchRec's collections read their offsets while they run, so a graph over them breaks at every one. Here a collection is a
LoweredBags that reads rows of matrices at offsets known beforehand: one index_select for a feature with one id per bag. The
matrices are the sharded model's own memory, so whatever it is asked for later (state dict, checkpoint, evaluation) is what the
captured step learned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_ext.distributed.tables import collections, table_configs

Read = Callable[[str, Tensor], Tensor]  # (name of a table, (n,) rows) -> (n, D)
Lower = Callable[[str, nn.Module], nn.Module]  # (path of a collection, the collection) -> what stands in its place


class CannotCaptureError(ValueError):
    """A step cannot be captured; the message names what stands in the way."""


class Pooled(KeyedTensor):
    """TorchRec's KeyedTensor over tensors that lie apart: side by side only for who asks for that."""

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self._by_name = dict(zip(names, tensors, strict=True))
        self._keys, self._length_per_key = list(names), [tensor.shape[1] for tensor in tensors]
        self._key_dim, self._offset_per_key, self._index_per_key = 1, None, None

    @property
    def _values(self) -> Tensor:
        return torch.cat(list(self._by_name.values()), dim=1)

    def to_dict(self) -> dict[str, Tensor]:
        """By name, (B, D) each."""
        return dict(self._by_name)

    def __getitem__(self, key: str) -> Tensor:
        return self._by_name[key]


class LoweredBags(nn.Module):
    """An EmbeddingBagCollection that reads the rows of its tables by a function.

    Args:
        tables: the collection's.
        read: gives rows of a table.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig], read: Read) -> None:
        super().__init__()
        self._tables = list(tables)
        self._names = get_embedding_names_by_table(self._tables)
        self._read = read

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """The pooled bags, (B, sum of D), of a KeyedJaggedTensor whose parts are as :mod:`packing` says."""
        pooled, names = [], []
        for table, own in zip(self._tables, self._names, strict=True):
            for feature, name in zip(table.feature_names, own, strict=True):
                pooled.append(_pooled(table, features, feature, self._read))
                names.append(name)
        return Pooled(names, pooled)


def _pooled(table: EmbeddingBagConfig, features: KeyedJaggedTensor, feature: str, read: Read) -> Tensor:
    stride, parts = features.stride(), features.length_per_key()
    place = features.keys().index(feature)
    start = sum(parts[:place])
    ids, weights = features.values()[start : start + parts[place]], features.weights_or_none()
    rows = read(table.name, ids)
    if weights is not None:
        rows = rows * weights[start : start + parts[place], None].to(rows.dtype)
    if parts[place] == stride:
        return rows
    lengths = features.lengths()[place * stride : (place + 1) * stride].long()
    # The bag of each id; those behind the last bag are padding, and fall into one bag more that is cut off.
    bag = torch.searchsorted(lengths.cumsum(0), torch.arange(parts[place], device=ids.device), right=True)
    pooled = rows.new_zeros(stride + 1, rows.shape[1]).index_add(0, bag, rows)[:stride]
    return pooled / lengths.clamp(min=1)[:, None] if table.pooling == PoolingType.MEAN else pooled


def lowered(model: nn.Module, lower: Lower) -> nn.Module:
    """A copy of the unwrapped ``model`` with other modules for its collections; it shares every parameter that is no table."""
    plain: nn.Module = get_unwrapped_module(model)
    for path, collection in collections(model):
        plain = _with(plain, path, lower(path, collection))
    return plain


def static_bags(read: Read) -> Lower:
    """LoweredBags for collections whose shapes do not depend on the batch's ids.

    Raises:
        CannotCaptureError: when called with any other.
    """

    def lower(path: str, collection: nn.Module) -> nn.Module:
        if not isinstance(collection, (EmbeddingBagCollection, ShardedEmbeddingBagCollection)):
            raise CannotCaptureError(
                f"the {type(collection).__name__} '{path}' returns a row for each id, so its shapes depend on the batch"
            )
        tables: list[EmbeddingBagConfig] = table_configs(collection)
        return LoweredBags(tables, read)

    return lower


def _with(module: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """A shallow copy of ``module`` with another module at ``path``, and so of every module on the way to it."""
    if not path:
        return new
    head, _, rest = path.partition(".")
    made: nn.Module = copy.copy(module)
    child = module.get_submodule(head)
    made._modules = {**module._modules, head: _with(child, rest, new)}
    return made
