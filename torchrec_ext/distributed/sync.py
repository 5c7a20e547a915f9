"""The sync modes: how often ranks make what each holds whole equal, as context managers around any loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torchrec_ext.needs_torch import loaded_class

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self, TypeIs

from torchrec_ext.distributed.runtime import refuse_differences
from torchrec_ext.distributed.sync_config import SyncConfig as SyncConfig
from torchrec_ext.distributed.sync_config import check_local_steps

# A module that is not sharded needs no TorchRec.
if TYPE_CHECKING:
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from torchrec_ext.distributed.optim.hybrid import HybridOptimizer


def _is_sharded(model: nn.Module | None) -> TypeIs[DistributedModelParallel]:
    path = "torchrec.distributed.model_parallel:DistributedModelParallel"
    return isinstance(model, loaded_class(path))


def _is_hybrid(optimizer: object) -> TypeIs[HybridOptimizer]:
    path = "torchrec_ext.distributed.optim.hybrid:HybridOptimizer"
    return isinstance(optimizer, loaded_class(path))


# Of the weights that some LocalSGD averages now, their ids.
_AVERAGED: set[int] = set()
# Smaller tables are sent whole: 256 KiB travel in the time of one more message.
WHOLE_WEIGHTS = 2**16


class Averager:
    """Averages tensors over the ranks in one or two collectives; all were equal when last marked.

    Of a large table only the rows that some rank has changed since are sent; the others are still equal. For that it
    keeps a copy of each large table. torch's own `model_averaging` replaces ``parameter.data`` with a view of its
    buffer instead of writing into it, which FBGEMM's kernels, whose tables are slices of one tensor, would not see.

    Args:
        tables: (rows, D) each; most rows may stay unchanged between two averages.
        others: tensors that change in every step.

    Attributes:
        sent: number of weights that this rank sent for the last average.
    """

    def __init__(self, tables: Iterable[Tensor], others: Iterable[Tensor]) -> None:
        self._large: list[Tensor] = []
        self._whole: list[Tensor] = []
        for table in tables:
            if table.numel() > WHOLE_WEIGHTS:
                self._large.append(table)
            else:
                self._whole.append(table)
        self._whole += others
        self._marked = [table.detach().clone() for table in self._large]
        self.sent = 0

    @torch.no_grad()
    def mark(self) -> None:
        """Marks the tensors, now equal on every rank: rows that differ from here on count as changed."""
        for table, marked in zip(self._large, self._marked, strict=True):
            marked.copy_(table)

    @torch.no_grad()
    def average(self) -> None:
        """Writes the mean over the ranks into every tensor, and marks the result. Collective."""
        # Most rows of a large table are unchanged, and equal on all ranks already.
        rows = self._changed_rows()
        slices = [table[index] for table, index in zip(self._large, rows, strict=True)]
        means = means_over_ranks([*slices, *self._whole])
        for table, marked, index in zip(self._large, self._marked, rows, strict=True):
            mean = next(means).to(table.dtype)
            table.index_copy_(0, index, mean)
            marked.index_copy_(0, index, mean)
        for tensor, mean in zip(self._whole, means, strict=True):
            tensor.copy_(mean)
        self.sent = sum(tensor.numel() for tensor in (*slices, *self._whole))

    def _changed_rows(self) -> list[Tensor]:
        """Returns for each large table the rows changed by any rank, the same on every rank."""
        if not self._large:
            return []
        local = [
            (table != marked).any(dim=1)
            for table, marked in zip(self._large, self._marked, strict=True)
        ]
        changed = torch.cat(local).to(torch.uint8)
        dist.all_reduce(changed, dist.ReduceOp.MAX)
        masks = torch.split(changed, [len(table) for table in self._large])
        return [mask.nonzero().squeeze(1) for mask in masks]


def means_over_ranks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Returns the mean of each tensor over the ranks, in float32, all in one all-reduce."""
    if not tensors:
        return iter(())
    flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
    # A sum, divided afterwards, because gloo has no mean.
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return (
        piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)
    )


class AnyStep(Protocol):
    """A training step with functions to call after it, such as a step from ``torchrec_ext.adopt.adopt``.

    Attributes:
        optimizers: optimizers that it steps.
        after_step: functions that it calls after each step.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    after_step: list[Callable[[], None]]


class LocalOptimizers:
    """The optimizers of a replicated module, with the attributes of HybridOptimizer for :class:`LocalSGD`.

    Args:
        model: module that is not sharded.
        step: step that trains it.

    Attributes:
        apart: whether ranks take local steps.
        after_step: functions that the step calls after each step.
        replicated_tables: tables, of whose rows a step changes few.
        dense_parameters: all other parameters that the optimizers move.

    Raises:
        ValueError: ``step`` is an optimizer, the module is in DistributedDataParallel or has none of the step's
            parameters, or there is no process group.
    """

    def __init__(self, model: nn.Module, step: AnyStep) -> None:
        if not hasattr(step, "after_step"):
            raise ValueError(
                f"optimizer: a {type(step).__name__}; give the step that adopt() returns, or take torch's "
                "PostLocalSGDOptimizer"
            )
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                "model: DistributedDataParallel averages gradients in every step; give its .module"
            )
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "there is no process group; start the script by torchrun, inside Runtime.start()"
            )
        self.apart = False
        self.after_step = step.after_step
        tables = set()
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                tables.add(id(module.weight))
        self.replicated_tables: list[Any] = []
        self.dense_parameters: list[Any] = []
        # Several optimizers may move one weight, which is averaged once.
        trainable: dict[int, Any] = {}
        for each in step.optimizers:
            for group in each.param_groups:
                trainable |= {
                    id(weight): weight
                    for weight in group["params"]
                    if weight.requires_grad
                }
        if trainable.keys().isdisjoint(map(id, model.parameters())):
            raise ValueError(
                f"optimizer: it moves no parameter of the model, a {type(model).__name__}; give the one made of "
                "model.parameters()"
            )
        for key, weight in trainable.items():
            if key in tables:
                self.replicated_tables.append(weight)
            else:
                self.dense_parameters.append(weight)


@torch.no_grad()
def _begin_as_rank_0(model: nn.Module) -> None:
    """Gives all ranks the weights of rank 0."""
    tensors = model.state_dict()
    # A broadcast between unequal shapes fails or hangs without naming a tensor.
    shapes = {f"model, {name}": tuple(each.shape) for name, each in tensors.items()}
    refuse_differences(shapes, dist.get_world_size())
    for tensor in tensors.values():
        dist.broadcast(tensor, 0)


class UnevenStepsError(ValueError):
    """Ranks took unequal numbers of steps. Raised on every rank alike."""


class EveryStep:
    """DDP under TorchRec's DMP: dense gradients, and those of data_parallel tables, are averaged in every backward.

    Attributes:
        takes_local_steps: whether ranks may differ, in what each holds whole, between two calls of :meth:`settle`. Then
            no step can be left out on all ranks, no loss be scaled, and no tower run on ranks of its own.
        checks: functions called on every rank before ranks are made equal; what one raises, it must raise on all.
    """

    takes_local_steps: ClassVar[bool] = False

    def __init__(self) -> None:
        self.checks: list[Callable[[], None]] = []

    @property
    def silent(self) -> bool:
        """Whether no rank waits for another in the next step."""
        return False

    def settle(self) -> None:
        """Makes every rank equal now, before an evaluation or a checkpoint. Collective, after equally many steps."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # After an error the other ranks may be elsewhere, so a collective here could
        # hang.
        if error[0] is None:
            self.settle()


class LocalSGD(EveryStep):
    """Local SGD (Stich 2019): each rank steps by its own gradient, and every k steps weights are averaged.

    Dense layers and data_parallel tables are averaged. Sharded tables exist once; their gradients are exchanged in
    every step as ever. Where no table is sharded, ranks exchange nothing at all between two averages (but for a loss
    that does, as a softmax over the candidates of all ranks): batch normalisation over ranks then normalises over the
    rank's own rows, and its running statistics are averaged with the weights.

    With SGD without momentum, weight decay and clipping, k = 1 equals every step. With any other optimizer it does not:
    the mean of Adam's steps is not Adam's step by the mean gradient. The first step is always taken together, because
    DDP records its graph in it. Of a sharded model k is counted from the end of that step, of any model also from each
    :meth:`settle`.

    Optimizer state (moments, sums of squares) belongs to a rank's own path and stays there, as in torch's
    PostLocalSGDOptimizer and DiLoCo.

    With an outer rate other than 1 or an outer momentum it is DiLoCo (Douillard et al. 2023): at each average an outer
    Nesterov SGD steps by the mean change of the ranks, which is the weights before the local steps minus the mean of
    the ranks' weights after them. Every rank then holds two more copies of what it holds whole: the weights of the last
    outer step, and the outer momentum.

    A module that is not sharded, with an adopted step, takes the place of DistributedDataParallel in a script of one's
    own: the weights of rank 0 are everybody's at the beginning, and every step is local.

    Args:
        model: sharded model from :func:`hybrid_parallel`, or any module that every rank holds whole.
        optimizer: optimizer from :func:`hybrid_parallel`; or of such a module the step that
            ``torchrec_ext.adopt.adopt`` returned.
        every: k, steps between two averages.
        outer_lr: learning rate of the outer SGD; DiLoCo takes .7.
        outer_momentum: its momentum; DiLoCo takes .9.

    Raises:
        ValueError: ``every`` is not a whole number of one step or more; a module that is not
            sharded is in DistributedDataParallel, has none of the optimizer's parameters, is not the same on all ranks,
            or has no process group; inside the context, the model is in another one, or ranks have other
            settings.

    Example::

        # after model, optimizer = hybrid_parallel(...)
        with LocalSGD(model, optimizer, every=32) as ranks:
            for batch in loader:  # any loop that calls optimizer.step(), a pipeline's too
                ...
            ranks.settle()  # equal, for an evaluation
    """

    takes_local_steps = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: HybridOptimizer | AnyStep,
        *,
        every: int,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
    ) -> None:
        super().__init__()
        check_local_steps(every, outer_lr, outer_momentum)
        self._model = model
        self._optimizer: HybridOptimizer | LocalOptimizers
        if _is_hybrid(optimizer):
            moved = map(id, optimizer.dense_parameters)
            if not set(moved) <= set(map(id, model.parameters())):
                raise ValueError(
                    "LocalSGD: the optimizer moves another model's layers; give model and optimizer of one "
                    "hybrid_parallel()"
                )
            self._optimizer = optimizer
        else:
            self._optimizer = LocalOptimizers(model, optimizer)
        self._every = every
        self._shards_tables = False
        if _is_sharded(model):
            from torchrec_ext.distributed.tables import table_shardings

            shardings = table_shardings(model.plan).values()
            self._shards_tables = any(
                sharding.sharding_type != "data_parallel" for sharding in shardings
            )
        self._averager: Averager | None = None
        self._rule = {
            "lr": outer_lr,
            "momentum": outer_momentum,
            "nesterov": outer_momentum > 0,
        }
        self._outer: torch.optim.SGD | None = None
        self._anchors: list[Tensor] = []
        self._steps = self._since = 0
        self._leave = ExitStack()

    @property
    def silent(self) -> bool:
        """Whether no rank waits for another in the next step."""
        return self._optimizer.apart and not self._shards_tables

    @property
    def every(self) -> int:
        """Steps between two averages; another number is another ``with LocalSGD(...)``, after this one."""
        return self._every

    def __enter__(self) -> Self:
        try:
            self._claim()
            self._agree()
            self._optimizer.after_step.append(self._after_step)
            self._leave.callback(self._optimizer.after_step.remove, self._after_step)
            if isinstance(self._optimizer, LocalOptimizers):
                _begin_as_rank_0(self._model)
                self.start_local_steps()
        except BaseException:
            # What a refusal leaves behind would be in the way of a second try.
            self._leave.close()
            raise
        return self

    def _claim(self) -> None:
        """Refuses a model inside the block of another LocalSGD."""
        weights = set(map(id, self._model.parameters()))
        if not _AVERAGED.isdisjoint(weights):
            raise ValueError(
                f"model: its {type(self._model).__name__} is inside of another LocalSGD; leave that one before"
            )
        _AVERAGED.update(weights)
        self._leave.callback(_AVERAGED.difference_update, weights)

    def _agree(self) -> None:
        """Refuses, on every rank alike, ranks with other settings. Collective."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        settings: dict[str, Any] = {"every": self._every}
        for name in ("lr", "momentum"):
            settings[f"outer_{name}"] = float(self._rule[name])
        refuse_differences(settings, dist.get_world_size())

    def __exit__(self, *error: object) -> None:
        with self._leave:
            super().__exit__(*error)

    def settle(self) -> None:
        """Makes every rank equal now.

        Raises:
            UnevenStepsError: ranks have taken unequal numbers of steps; on every rank.
        """
        if self._optimizer.apart:
            self._sync()
        super().settle()

    def _after_step(self) -> None:
        self._steps += 1
        if not self._optimizer.apart:
            self.start_local_steps()
            return
        self._since += 1
        if self._since == self._every:
            self._sync()

    def start_local_steps(self) -> None:
        """Starts local steps: gradients are no longer all-reduced."""
        if _is_sharded(self._model):
            # Outside no_sync() DDP would go on averaging gradients in each backward.
            for ddp in data_parallel_modules(self._model):
                self._leave.enter_context(ddp.no_sync())
        self._optimizer.apart = True
        self._leave.callback(setattr, self._optimizer, "apart", False)
        statistics = self._normalise_apart()
        # Made now, because its copies of large tables count as equal on all ranks, and
        # the next step is local.
        self._averager = Averager(
            self._optimizer.replicated_tables,
            [*self._optimizer.dense_parameters, *statistics],
        )
        parameters = _parameters(self._optimizer)
        # torch's optimizers refuse an empty list.
        if parameters and (self._rule["lr"] != 1 or self._rule["momentum"]):
            self._anchors = [parameter.detach().clone() for parameter in parameters]
            self._outer = torch.optim.SGD(self._anchors, **self._rule)  # type: ignore[arg-type]

    def _normalise_apart(self) -> list[Tensor]:
        """Lets batch normalisation see this rank's rows alone; returns its running statistics, (D,) each."""
        layers = [
            module for module in self._model.modules() if isinstance(module, _BatchNorm)
        ]
        over_ranks = [layer for layer in layers if hasattr(layer, "process_group")]
        if over_ranks:
            # Their group becomes one of this rank alone, or each forward would wait for
            # the other ranks' steps.
            alone = dist.new_subgroups(1)[0]  # type: ignore[no-untyped-call]
            for layer in over_ranks:
                self._leave.callback(
                    setattr, layer, "process_group", layer.process_group
                )
                layer.process_group = alone
        statistics: list[Any] = []
        for layer in layers:
            # A layer without running statistics has None in place of each.
            if layer.running_mean is not None:
                statistics += [layer.running_mean, layer.running_var]
        return statistics

    def _sync(self) -> None:
        for check in self.checks:
            check()
        self._check_steps()
        if self._since and self._averager is not None:
            self._averager.average()
            if self._outer is not None:
                self._step_outside(self._outer, self._averager)
        self._since = 0

    @torch.no_grad()
    def _step_outside(self, outer: torch.optim.SGD, averager: Averager) -> None:
        """Takes the outer optimizer's step from the anchors towards the average."""
        parameters = _parameters(self._optimizer)
        for anchor, parameter in zip(self._anchors, parameters, strict=True):
            anchor.grad = anchor - parameter
        outer.step()
        for anchor, parameter in zip(self._anchors, parameters, strict=True):
            parameter.copy_(anchor)
            anchor.grad = None
        # The outer step moved the weights away from the average, which the averager has
        # marked.
        averager.mark()

    def _check_steps(self) -> None:
        """Refuses to average over ranks that have taken unequal numbers of steps. Collective."""
        device = next(
            (parameter.device for parameter in self._model.parameters()),
            torch.device("cpu"),
        )
        own = torch.tensor([self._steps], device=device)
        gathered = own.new_empty(dist.get_world_size())
        dist.all_gather_into_tensor(gathered, own)
        counts = gathered.tolist()
        if len(set(counts)) > 1:
            steps = ", ".join(
                f"rank {rank}: {count}" for rank, count in enumerate(counts)
            )
            raise UnevenStepsError(
                f"ranks have taken unequal numbers of steps, {steps}: every rank's loader must give as many batches"
            )


def synchronised(
    model: nn.Module, optimizer: HybridOptimizer, config: SyncConfig
) -> EveryStep:
    """Returns the context manager of ``config.mode`` for a model and its optimizer.

    Args:
        model: sharded model from :func:`hybrid_parallel`.
        optimizer: optimizer from :func:`hybrid_parallel`.
        config: mode and its settings.
    """
    if not config.takes_local_steps:
        return EveryStep()
    return LocalSGD(
        model,
        optimizer,
        every=config.every,
        outer_lr=config.outer_lr,
        outer_momentum=config.outer_momentum,
    )


def data_parallel_modules(
    model: DistributedModelParallel,
) -> Iterator[DistributedDataParallel]:
    """Yields every DDP of ``model``: the one around it, and those of data_parallel tables, which modules() hides."""
    from torchrec_ext.distributed.tables import collections

    if isinstance(model._dmp_wrapped_module, DistributedDataParallel):
        yield model._dmp_wrapped_module
    for _, collection in collections(model):
        for lookup in getattr(collection, "_lookups", ()):
            if isinstance(lookup, DistributedDataParallel):
                yield lookup


def _parameters(optimizer: HybridOptimizer | LocalOptimizers) -> list[nn.Parameter]:
    return [*optimizer.replicated_tables, *optimizer.dense_parameters]
