"""PlainStep: the eager step of a rank that waits for no other, without the overhead for several ranks.

Also there TorchRec's collections permute and exchange ids, and run inside three DistributedDataParallel modules: at
1,280 rows more than half of a small network's step. Here the same model runs with its replicated tables as plain
matrices (:mod:`lowering`). The optimizer and all readers of the model are the pipeline's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

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


class _Group(NamedTuple):
    """A group of settings with its tensors; ``places`` are their indices among the parameters."""

    settings: dict[str, Any]
    places: list[int]
    weights: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]


class FusedAdam:
    """Updates ``parameters`` exactly as ``optimizer`` does.

    Args:
        optimizer: optimizer that :meth:`fits`, after its first step, which creates its state.
        parameters: all parameters of the optimizer.
        weights: memory of these parameters.
    """

    def __init__(
        self,
        optimizer: HybridOptimizer,
        parameters: Sequence[nn.Parameter],
        weights: Sequence[Tensor],
    ) -> None:
        self._optimizer = optimizer
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        # Read once: a combined optimizer makes it anew each time.
        state = optimizer.state
        self._groups = []
        for settings in optimizer.param_groups:
            group = _Group(settings, [], [], [], [], [])
            for parameter in settings["params"]:
                index = index_of[id(parameter)]
                group.places.append(index)
                group.weights.append(weights[index].detach())
                group.first.append(state[parameter]["exp_avg"])
                group.second.append(state[parameter]["exp_avg_sq"])
                group.steps.append(state[parameter]["step"])
            self._groups.append(group)

    @staticmethod
    def fits(optimizer: HybridOptimizer, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether an optimizer is plain Adam everywhere, without norm limit or weight decay, and has all states."""
        choices = [*optimizer.table_choices.values(), *optimizer.layer_choices.values()]
        state = optimizer.state
        is_plain_adam = all(
            choice.kind == "adam" and not choice.weight_decay for choice in choices
        )
        return (
            is_plain_adam
            and not optimizer.clip_norm
            and all(state.get(parameter) for parameter in parameters)
        )

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None]) -> bool:
        """Takes one step by the parameters' gradients; returns False without a step if one is missing."""
        # Once a step: comprehensions stay, because a loop of statements takes longer.
        present_grads = [grad for grad in grads if grad is not None]
        if len(present_grads) < len(grads):
            return False
        for settings, places, weights, first, second, steps in self._groups:
            beta1, beta2 = settings["betas"]
            torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                *(
                    weights,
                    [present_grads[index] for index in places],
                    first,
                    second,
                    [],
                    steps,
                ),
                lr=settings["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=settings["weight_decay"],
                eps=settings["eps"],
                amsgrad=False,
                maximize=False,
            )
        for call in self._optimizer.after_step:
            call()
        return True


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
        self._adam: FusedAdam | None = None
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
        """Drops gradients and cached state of other steps, before the first of some plain steps."""
        self._optimizer.zero_grad()
        self._adam = None

    def __call__(self, batch: TowerBatch) -> Any:
        """Trains on a batch and returns the model's output."""
        with self._context():
            loss, output = self._model(batch)
        grads = self._gradients(loss)
        if self._together:
            grads = mean_gradients(grads, self._leaves)
        self._update(grads)
        return output

    def _gradients(self, loss: Tensor) -> Sequence[Tensor | None]:
        if self._scaling is not None:
            loss = self._scaling.scale(loss)
        # Not backward(), because that would run the hooks of DistributedDataParallel.
        return torch.autograd.grad(loss, self._leaves, allow_unused=True)

    def _update(self, grads: Sequence[Tensor | None]) -> None:
        if self._adam is not None and self._adam.step(grads):
            return
        # The optimizer itself makes the first step, which creates its state, and
        # handles missing gradients.
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        if isinstance(self._optimizer, HybridOptimizer) and FusedAdam.fits(
            self._optimizer, self._parameters
        ):
            self._adam = FusedAdam(self._optimizer, self._parameters, self._leaves)
