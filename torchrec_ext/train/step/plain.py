"""PlainStep: the eager step of one rank, without what only several ranks need.

On one rank TorchRec's collections permute ids, exchange them with nobody and run inside three DistributedDataParallel modules: at
1,280 rows more than half of a small network's step. Here the same model runs with its replicated tables as plain matrices
(:mod:`lowering`): the optimizer, the look at each loss and everything that reads the model afterwards are those of the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.hybrid_optimizer import HybridOptimizer
from torchrec_ext.distributed.tables import local_shards, table_configs
from torchrec_ext.train.amp import Context
from torchrec_ext.train.finite import FiniteLoss
from torchrec_ext.train.fused_adam import FusedAdam
from torchrec_ext.train.loss_scaling import LossScaling
from torchrec_ext.train.lowering import CannotCaptureError, Pooled, lowered
from torchrec_ext.train.parameters import owners


class PlainStep:
    """Trains on a batch, op by op, as TorchRec's pipeline does: bit for bit but for the order of sums.

    Args:
        model: from :func:`hybrid_parallel`, on one rank.
        optimizer: likewise.
        forward: looks at each loss before its backward.
        context: of the forward.
        scaling: of the loss, where float16 needs it.

    Raises:
        CannotCaptureError: a table that is sharded, which a kernel moves inside the backward, or not fp32; a mean of weighted rows.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: HybridOptimizer,
        forward: FiniteLoss,
        *,
        context: Context = nullcontext,
        scaling: LossScaling | None = None,
    ) -> None:
        self._optimizer, self._forward, self._context, self._scaling = scaling or optimizer, forward, context, scaling
        replicated = {id(table) for table in optimizer.replicated_tables}
        own, tables = owners(optimizer), {}
        self._parameters: list[nn.Parameter] = []
        for shard in local_shards(model):  # never one that is read id by id: no plan replicates these on a CPU
            found = own.get(shard.fqn, [])
            if [id(table) in replicated for table in found] != [True] or shard.config.data_type != DataType.FP32:
                raise CannotCaptureError(f"table '{shard.config.name}' is sharded, or not fp32")
            tables[shard.config.name] = shard.tensor.detach().requires_grad_()
            self._parameters += found
        self._parameters += optimizer.dense_parameters
        self._leaves = [*tables.values(), *optimizer.dense_parameters]
        self._model = lowered(model, lambda path, collection: _plain(path, collection, tables))
        self._adam: FusedAdam | None = None

    def begin(self) -> None:
        """Before the first of some steps: forgets gradients and state of steps that others made."""
        self._optimizer.zero_grad()
        self._adam = None

    def __call__(self, batch: TowerBatch) -> Any:
        """What the model returns.

        Raises:
            TrainingDivergedError: see :meth:`FiniteLoss.look`; nothing was written then.
        """
        with self._context():
            loss, output = self._model(batch)
        self._forward.look(loss, batch)
        if self._scaling is not None:
            loss = self._scaling.scale(loss)
        # Not backward(), on which the hooks of DistributedDataParallel would wake up.
        self._move(torch.autograd.grad(loss, self._leaves, allow_unused=True))
        return output

    def _move(self, grads: Sequence[Tensor | None]) -> None:
        if self._adam is not None and self._adam.step(grads):
            return
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad
        self._optimizer.step()
        if isinstance(self._optimizer, HybridOptimizer) and FusedAdam.fits(self._optimizer, self._parameters):
            self._adam = FusedAdam(self._optimizer, self._parameters, self._leaves)


def _plain(path: str, collection: Any, weights: dict[str, Tensor]) -> nn.Module:
    tables = table_configs(collection)
    # torch has none, and FBGEMM's has the gradient of a sum.
    if collection._is_weighted and any(table.pooling == PoolingType.MEAN for table in tables):
        raise CannotCaptureError(f"'{path}' takes means of weighted rows")
    return _PlainBags(tables, weights)


class _PlainBags(nn.Module):
    """In the place of an EmbeddingBagCollection: its tables as matrices, which are others' memory."""

    def __init__(self, tables: Sequence[Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        names = get_embedding_names_by_table(list(tables))
        self._looked: list[tuple[str, str, EmbeddingBagConfig, Tensor]] = [
            (name, feature, table, weights[table.name])
            for table, own in zip(tables, names, strict=True)
            for feature, name in zip(table.feature_names, own, strict=True)
        ]

    def forward(self, features: KeyedJaggedTensor) -> Pooled:
        """The pooled bags, (B, D) each."""
        bags = _OneEach(features) if _one_each(features) else _Jagged(features)
        found = [bags.pooled(feature, table, weight) for _, feature, table, weight in self._looked]
        return Pooled([name for name, *_ in self._looked], found)


def _one_each(features: KeyedJaggedTensor) -> bool:
    lengths, weighted = features.lengths(), features.weights_or_none() is not None
    return not weighted and features.values().numel() == lengths.numel() and bool(lengths.eq(1).all())


class _OneEach:
    """Bags of one id each."""

    def __init__(self, features: KeyedJaggedTensor) -> None:
        self._ids = dict(zip(features.keys(), features.values().view(len(features.keys()), -1).unbind(), strict=True))

    def pooled(self, feature: str, table: BaseEmbeddingConfig, weight: Tensor) -> Tensor:
        return weight.index_select(0, self._ids[feature])  # of which the backward is faster than embedding()'s


class _Jagged:
    """Bags of any length."""

    def __init__(self, features: KeyedJaggedTensor) -> None:
        self._bags = features.to_dict()

    def pooled(self, feature: str, table: EmbeddingBagConfig, weight: Tensor) -> Tensor:
        bags = self._bags[feature]
        mode = "mean" if table.pooling == PoolingType.MEAN else "sum"
        weights = bags.weights_or_none()
        return embedding_bag(bags.values(), weight, bags.offsets(), mode=mode, per_sample_weights=weights, include_last_offset=True)
