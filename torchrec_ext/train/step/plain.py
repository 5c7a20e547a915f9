"""PlainStep: the eager step of a rank that waits for no other, without the overhead for several ranks.

Also there TorchRec's collections permute and exchange ids, and run inside three DistributedDataParallel modules: at
1,280 rows more than half of a small network's step. Here the same model runs with its replicated tables as plain
matrices (:mod:`lowering`). The optimizer and all readers of the model are the pipeline's.

FusedAdam: the step of an optimizer with Adam everywhere, in one kernel per group of settings. torch.optim, TorchRec's
wrappers and HybridOptimizer are six calls deep with a profiler's mark at each, a quarter of a small network's step at
1,280 rows. FusedAdam writes into the same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.lowering import Pooled, check_pools, lowered
from torchrec_ext.capture.sharded import owners
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.tables import local_shards, table_configs
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
        """Takes one step by the parameters' gradients; returns False without a step if one is missing or not finite."""
        # Once a step: comprehensions stay, because a loop of statements takes longer.
        present_grads = [grad for grad in grads if grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(present_grads)))
        if len(present_grads) < len(grads) or not torch.isfinite(norm):
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
        read = _LastRead()
        self._model = lowered(
            model, lambda path, collection: _lower_bags(path, collection, tables, read)
        )
        self._adam: FusedAdam | None = None
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
        """Drops gradients and cached state of other steps, before the first of some plain steps."""
        self._optimizer.zero_grad()
        self._adam = None

    def __call__(self, batch: TowerBatch) -> Any:
        """Trains on a batch and returns the model's output."""
        with self._context():
            loss, output = self._model(batch)
        grads = self._gradients(loss)
        self._update(grads if self._mean is None else self._mean(grads))
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
        # handles missing and bad gradients.
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad
        self._optimizer.step()
        if isinstance(self._optimizer, HybridOptimizer) and FusedAdam.fits(
            self._optimizer, self._parameters
        ):
            self._adam = FusedAdam(self._optimizer, self._parameters, self._leaves)


def _lower_bags(
    path: str, collection: Any, weights: dict[str, Tensor], read: _LastRead
) -> nn.Module:
    check_pools(path, collection)
    tables = table_configs(collection)
    if collection._is_weighted:
        raise CannotCaptureError(f"'{path}' weights its rows")
    return _PlainBags(tables, weights, read)


class _PlainBags(nn.Module):
    """Stand-in for an EmbeddingBagCollection, with its tables as matrices in the sharded model's memory."""

    def __init__(
        self, tables: Sequence[Any], weights: dict[str, Tensor], read: _LastRead
    ) -> None:
        super().__init__()
        self._read = read
        names = get_embedding_names_by_table(list(tables))
        self._names: list[str] = []
        self._look_ups: list[tuple[str, EmbeddingBagConfig, Tensor]] = []
        for table, table_names in zip(tables, names, strict=True):
            self._names += table_names
            for feature in table.feature_names:
                self._look_ups.append((feature, table, weights[table.name]))

    def forward(self, features: KeyedJaggedTensor) -> Pooled:
        """Returns the pooled bags, (B, D) each."""
        bags = self._read(features)
        pooled = [
            bags.pooled(feature, table, weight)
            for feature, table, weight in self._look_ups
        ]
        return Pooled(self._names, pooled)


class _LastRead:
    """The bags of the last KeyedJaggedTensor, since all towers of a model read the same one."""

    def __init__(self) -> None:
        self._features: KeyedJaggedTensor | None = None
        self._bags: _OneEach | _Jagged

    def __call__(self, features: KeyedJaggedTensor) -> _OneEach | _Jagged:
        if features is not self._features:
            self._features = features
            if _one_each(features):
                self._bags = _OneEach(features)
            else:
                self._bags = _Jagged(features)
        return self._bags


def _one_each(features: KeyedJaggedTensor) -> bool:
    lengths = features.lengths()
    if features.values().numel() != lengths.numel():
        return False
    # There are equally many ids and bags: if no bag has more than one id, none has
    # fewer.
    return not lengths.numel() or int(lengths.max()) == 1


class _OneEach:
    """Bags of one id each."""

    def __init__(self, features: KeyedJaggedTensor) -> None:
        keys = features.keys()
        # Ids are stored feature by feature, so with one id a bag they are a matrix with
        # a row for each feature.
        ids_by_feature = features.values().view(len(keys), -1).unbind()
        self._ids = dict(zip(keys, ids_by_feature, strict=True))

    def pooled(
        self, feature: str, table: BaseEmbeddingConfig, weight: Tensor
    ) -> Tensor:
        # Its backward is faster than that of embedding().
        return weight.index_select(0, self._ids[feature])


class _Jagged:
    """Bags of any length."""

    def __init__(self, features: KeyedJaggedTensor) -> None:
        self._bags = features.to_dict()

    def pooled(self, feature: str, table: EmbeddingBagConfig, weight: Tensor) -> Tensor:
        bags = self._bags[feature]
        mode = "sum"
        if table.pooling == PoolingType.MEAN:
            mode = "mean"
        return embedding_bag(
            bags.values(), weight, bags.offsets(), mode=mode, include_last_offset=True
        )
