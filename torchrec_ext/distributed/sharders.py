"""ShardedBags: TorchRec's sharded EmbeddingBagCollection with the mean of every table, and with unequal batches on gloo."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import pad
from torchrec.distributed.comm_ops import reduce_scatter_v_pooled
from torchrec.distributed.dist_data import (
    PooledEmbeddingsAwaitable,
    PooledEmbeddingsReduceScatter,
    VariableBatchPooledEmbeddingsReduceScatter,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
    _apply_mean_pooling,
)
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

SUMMED_FIRST = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


class ShardedBags(ShardedEmbeddingBagCollection):
    """TorchRec's ShardedEmbeddingBagCollection, whose outputs and gradients are the unsharded collection's.

    TorchRec 1.8 sums the bags of row-wise tables pooled by MEAN and divides them afterwards, and with them every bag of the
    collection but those of row-wise SUM tables, of which it knows each feature's first occurrence alone; other sharding types have
    divided by then; and it cannot divide the bags of a rank without rows. Here a column of a row-wise MEAN table is divided by the
    lengths of its feature's bags, and no other column is.

    TorchRec's reduce-scatter of unequal batches gathers unequal parts in its backward, which gloo cannot
    (``ProcessGroupGloo::allgather: invalid tensor size``). On gloo the parts are padded to the largest; equal batches take
    TorchRec's own way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_mean_pooling_callback = False  # TorchRec's
        means = self._row_wise_means()
        self._means = [name in means for name in self._embedding_names]
        group = self._env.process_group
        if group is not None and dist.get_backend(group) == "gloo":
            for output_dist in self._output_dists:
                if isinstance(output_dist, RwPooledEmbeddingDist | TwRwPooledEmbeddingDist | GridPooledEmbeddingDist):
                    output_dist.register_forward_pre_hook(_take_unequal_batches)

    def _row_wise_means(self) -> set[str]:
        """The outputs that are sums and must be means."""
        configs = self._embedding_bag_configs
        return {
            name
            for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
            if config.pooling == PoolingType.MEAN and self.module_sharding_plan[config.name].sharding_type in SUMMED_FIRST
            for name in names
        }

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor | TensorDict
    ) -> Awaitable[Awaitable[KJTList]]:
        """See TorchRec's."""
        if any(self._means):
            features = maybe_td_to_kjt(features)
            ctx.divisor = self._divisor(features)
        return super().input_dist(ctx, features)

    @torch.no_grad()
    def _divisor(self, features: KeyedJaggedTensor) -> Tensor:
        """(B, sum of D) by what each output is divided: the lengths of its bags, or the sums of their weights; 1 for most."""
        lengths, weights = features.lengths(), features.weights_or_none()
        if weights is not None:
            lengths = torch.ops.fbgemm.segment_sum_csr(1, features.offsets().int(), weights)
        by_key = dict(zip(features.keys(), lengths.split(features.stride_per_key()), strict=True))
        if features.variable_stride_per_key():
            names, rows = features.inverse_indices()
            by_key = {name: by_key[name][row] for name, row in zip(names, rows, strict=True)}
        ones = torch.ones_like(next(iter(by_key.values())), dtype=torch.float32)
        # The least number keeps the 0 of an empty bag.
        columns = [
            by_key[name.split("@")[0]] + 1e-6 if mean else ones
            for name, mean in zip(self._embedding_names, self._means, strict=True)
        ]
        return torch.stack(columns, dim=1).repeat_interleave(self._dim_per_key, dim=1, output_size=sum(self._embedding_dims))

    def output_dist(self, ctx: EmbeddingBagCollectionContext, output: list[Tensor]) -> LazyAwaitable[KeyedTensor]:
        """See TorchRec's."""
        return self._divided(super().output_dist(ctx, output), ctx)

    def compute_and_output_dist(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:  # noqa: A002
        """See TorchRec's."""
        return self._divided(super().compute_and_output_dist(ctx, input), ctx)

    def _divided(self, sums: LazyAwaitable[KeyedTensor], ctx: EmbeddingBagCollectionContext) -> LazyAwaitable[KeyedTensor]:
        if ctx.divisor is not None:
            sums.callbacks.append(functools.partial(_apply_mean_pooling, divisor=ctx.divisor))
        return sums


class EqualReduceScatter(PooledEmbeddingsReduceScatter):
    """TorchRec's reduce-scatter of pooled bags, whose backward is of equal parts also where batches are unequal."""

    def forward(self, local_embs: Tensor, input_splits: list[int] | None = None) -> PooledEmbeddingsAwaitable:
        """Sums over the ranks, (B, D) on each.

        Args:
            local_embs: (sum over ranks of B, D).
            input_splits: B of each rank; equal where not given.
        """
        if not input_splits or len(set(input_splits)) == 1:
            return super().forward(local_embs, input_splits)
        return _padded(local_embs, input_splits, self._pg, self._codecs)


class EqualVariableReduceScatter(VariableBatchPooledEmbeddingsReduceScatter):
    """The same where each feature has a batch size of its own."""

    def forward(
        self, local_embs: Tensor, batch_size_per_rank_per_feature: list[list[int]], embedding_dims: list[int]
    ) -> PooledEmbeddingsAwaitable:
        """Sums over the ranks, (sum over features of B x D,) on each.

        Args:
            local_embs: (sum over ranks and features of B x D,).
            batch_size_per_rank_per_feature: B.
            embedding_dims: D of each feature.
        """
        splits = [
            sum(rows * width for rows, width in zip(sizes, embedding_dims, strict=True))
            for sizes in batch_size_per_rank_per_feature
        ]
        if len(set(splits)) < 2:
            return super().forward(local_embs, batch_size_per_rank_per_feature, embedding_dims)
        return _padded(local_embs, splits, self._pg, self._codecs)


def _padded(local: Tensor, splits: list[int], group: dist.ProcessGroup, codecs: Any) -> PooledEmbeddingsAwaitable:
    """Reduce-scatter of parts that are padded to the largest, and without the padding again."""
    most, own = max(splits), splits[dist.get_rank(group)]
    rows = [0, 0] * (local.dim() - 1)
    parts = [pad(part, (*rows, 0, most - len(part))) for part in torch.split(local, splits)]
    awaitable = PooledEmbeddingsAwaitable(reduce_scatter_v_pooled(torch.cat(parts), [most] * len(splits), group, codecs))
    awaitable.callbacks.append(lambda summed: summed[:own])
    return awaitable


def _take_unequal_batches(output_dist: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Replaces the reduce-scatters that TorchRec makes in the first forward of a row-wise output dist."""
    if not any(True for _ in output_dist.children()):
        row_wise = isinstance(output_dist, RwPooledEmbeddingDist)
        getattr(output_dist, "_create_output_dist_module" if row_wise else "_create_output_dist_modules")(inputs[1])
    for name, child in output_dist.named_children():
        if type(child) is PooledEmbeddingsReduceScatter:
            setattr(output_dist, name, EqualReduceScatter(child._pg, child._codecs))
        elif type(child) is VariableBatchPooledEmbeddingsReduceScatter:
            setattr(output_dist, name, EqualVariableReduceScatter(child._pg, child._codecs))
