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
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    DataType,
)

from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.lowering import lowered, static_bags
from torchrec_ext.capture.sharded import owners
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.sync import means_over_ranks
from torchrec_ext.distributed.tables import local_shards
from torchrec_ext.train.step.precision import Context, LossScaling

# 4 MiB: DistributedDataParallel's first bucket is 1 MiB, and only larger gradients hide
# behind the backward.
MOST_WEIGHTS = 2**20


def mean_gradients(
    grads: Sequence[Tensor | None], weights: Sequence[Tensor]
) -> list[Tensor | None]:
    """Averages a step's gradients over the ranks in one all-reduce. Collective.

    DistributedDataParallel sends at least one message for each of its modules. If there are few weights, their
    number is what costs. A gradient that is missing on some ranks counts as 0 there; one that is missing on all stays
    missing.
    """
    sent = [
        torch.zeros_like(weight) if grad is None else grad
        for grad, weight in zip(grads, weights, strict=True)
    ]
    # Which gradients there are travels with them, as numbers.
    notes = torch.tensor([float(grad is not None) for grad in grads])
    *means, found = means_over_ranks([*sent, notes])
    return [
        mean if there else None
        for mean, there in zip(means, found.tolist(), strict=True)
    ]


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
            collection returns a row for each id; or ``together`` has too many weights.
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

        def read(table: str, rows: Tensor) -> Tensor:
            return tables[table].index_select(0, rows)

        self._model = lowered(model, static_bags(read, packed=False))
        self._together = together
        count = sum(leaf.numel() for leaf in self._leaves)
        is_small = count <= MOST_WEIGHTS and all(
            leaf.dtype == torch.float32 for leaf in self._leaves
        )
        if together and not is_small:
            raise CannotCaptureError(
                f"{count:,} weights are too many for one message, or not all fp32"
            )

    def begin(self) -> None:
        """Drops gradients of other steps, before the first of some plain steps."""
        self._optimizer.zero_grad()

    def __call__(self, batch: TowerBatch) -> Any:
        """Trains on a batch and returns the model's output."""
        with self._context():
            loss, output = self._model(batch)
        grads = self._gradients(loss)
        if self._together:
            grads = mean_gradients(grads, self._leaves)
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
