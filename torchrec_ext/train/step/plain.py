"""PlainStep: the eager step of a rank that waits for no other, without the overhead for several ranks.

Also there TorchRec's collections permute and exchange ids, and run inside three DistributedDataParallel modules: at
1,280 rows more than half of a small network's step. Here the same model runs with its replicated tables as plain
matrices (:mod:`lowering`). The optimizer and all readers of the model are the pipeline's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.lowering import Pooled, check_pools, lowered
from torchrec_ext.capture.sharded import owners
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.tables import local_shards, table_configs
from torchrec_ext.train.step.precision import Context, LossScaling


class GradientMean:
    """Averages a step's gradients over the ranks in one all-reduce.

    DistributedDataParallel sends at least one message for each of its modules. Where there are few weights, their
    number is what costs.

    Args:
        weights: weights of the gradients.
    """

    # 4 MiB: DistributedDataParallel's first bucket is 1 MiB, and only larger gradients
    # hide behind the backward.
    MOST_WEIGHTS = 2**20

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        self._sizes = [weight.numel() for weight in weights]

    def __call__(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns the mean gradients. Collective.

        A gradient that is missing on some ranks counts as 0 there; one that is missing on all stays missing.
        """
        pieces = []
        for grad, weight in zip(grads, self._weights, strict=True):
            if grad is None:
                grad = torch.zeros_like(weight)
            pieces.append(grad.reshape(-1))
        # Which gradients there are travels with them, as numbers: a sum of 0 means none
        # on any rank.
        notes = torch.tensor([float(grad is not None) for grad in grads])
        flat = torch.cat([*pieces, notes])
        dist.all_reduce(flat)
        *values, notes = torch.split(flat, [*self._sizes, len(notes)])
        numbers = notes.tolist()
        flat /= dist.get_world_size()
        means: list[Tensor | None] = []
        for value, weight, holders in zip(values, self._weights, numbers, strict=True):
            means.append(value.view(weight.shape) if holders else None)
        return means


class PlainStep:
    """Trains on a batch, op by op: equals TorchRec's pipeline bit for bit, except for the order of sums.

    Args:
        model: model from :func:`hybrid_parallel`.
        optimizer: the model's optimizer.
        context: makes the context of the forward.
        scaling: scales the loss for float16.
        together: whether ranks average their gradients; else this rank steps by its own.

    Raises:
        CannotCaptureError: a table is sharded, so that a kernel updates it inside the backward, or not fp32; a
            collection weights its rows, or returns a row for each id; or ``together`` has too many weights.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: HybridOptimizer,
        *,
        context: Context = nullcontext,
        scaling: LossScaling | None = None,
        together: bool = False,
    ) -> None:
        self._optimizer = scaling or optimizer
        self._context = context
        self._scaling = scaling
        replicated = set(map(id, optimizer.replicated_tables))
        by_name = owners(optimizer)
        tables = {}
        self._parameters: list[nn.Parameter] = []
        # There is never a table read id by id, because no plan replicates these on a
        # CPU.
        for shard in local_shards(model):
            parameters_of_shard = by_name.get(shard.fqn, [])
            is_replicated = (
                len(parameters_of_shard) == 1
                and id(parameters_of_shard[0]) in replicated
            )
            if not is_replicated or shard.config.data_type != DataType.FP32:
                raise CannotCaptureError(
                    f"table '{shard.config.name}' is sharded, or not fp32"
                )
            tables[shard.config.name] = shard.tensor.detach().requires_grad_()
            self._parameters += parameters_of_shard
        self._parameters += optimizer.dense_parameters
        self._leaves = [*tables.values(), *optimizer.dense_parameters]
        self._model = lowered(
            model, lambda path, collection: _lower_bags(path, collection, tables)
        )
        self._mean: GradientMean | None = None
        if together:
            count = sum(leaf.numel() for leaf in self._leaves)
            if count > GradientMean.MOST_WEIGHTS or any(
                leaf.dtype != torch.float32 for leaf in self._leaves
            ):
                raise CannotCaptureError(
                    f"{count:,} weights are too many for one message, or not all fp32"
                )
            self._mean = GradientMean(self._leaves)

    def begin(self) -> None:
        """Drops gradients of other steps, before the first of some plain steps."""
        self._optimizer.zero_grad()

    def __call__(self, batch: TowerBatch) -> Any:
        """Trains on a batch and returns the model's output."""
        with self._context():
            loss, output = self._model(batch)
        grads = self._gradients(loss)
        if self._mean is not None:
            grads = self._mean(grads)
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        return output

    def _gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        if self._scaling is not None:
            loss = self._scaling.scale(loss)
        # Not backward(), because that would run the hooks of DistributedDataParallel.
        return torch.autograd.grad(loss, self._leaves, allow_unused=True)


def _lower_bags(path: str, collection: Any, weights: dict[str, Tensor]) -> nn.Module:
    check_pools(path, collection)
    tables = table_configs(collection)
    if collection._is_weighted:
        raise CannotCaptureError(f"'{path}' weights its rows")
    return _PlainBags(tables, weights)


class _PlainBags(nn.Module):
    """Stand-in for an EmbeddingBagCollection, with its tables as matrices in the sharded model's memory."""

    def __init__(self, tables: Sequence[Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        names = get_embedding_names_by_table(list(tables))
        self._names: list[str] = []
        self._look_ups: list[tuple[str, EmbeddingBagConfig, Tensor]] = []
        for table, table_names in zip(tables, names, strict=True):
            self._names += table_names
            for feature in table.feature_names:
                self._look_ups.append((feature, table, weights[table.name]))

    def forward(self, features: KeyedJaggedTensor) -> Pooled:
        """Returns the pooled bags, (B, D) each."""
        bags = features.to_dict()
        pooled = [
            _pooled(bags[feature], table, weight)
            for feature, table, weight in self._look_ups
        ]
        return Pooled(self._names, pooled)


def _pooled(bag: JaggedTensor, table: EmbeddingBagConfig, weight: Tensor) -> Tensor:
    ids = bag.values()
    lengths = bag.lengths()
    # Of one id in each bag this backward takes half the time of embedding_bag's.
    if len(ids) == len(lengths) and bool((lengths == 1).all()):
        return weight.index_select(0, ids)
    mode = "mean" if table.pooling == PoolingType.MEAN else "sum"
    return embedding_bag(
        ids, weight, bag.offsets(), mode=mode, include_last_offset=True
    )
