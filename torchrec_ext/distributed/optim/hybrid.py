"""HybridOptimizer: the optimizers of sharded tables, replicated tables and dense layers as one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper

from torchrec_ext.distributed.optim.config import Choice, rows_with_gradient
from torchrec_ext.distributed.optim.sharded import ShardedAdam


class GradientNotFiniteError(ValueError):
    """A gradient is NaN or infinite; nothing was written by it. Raised on every rank alike.

    Args:
        message: which, and where known on which rank.
        step: at which step, counted from 1; 0 for the one that raises it.
        in_time: whether it was found before sharded tables were moved, too.
    """

    def __init__(self, message: str, step: int = 0, *, in_time: bool = False) -> None:
        super().__init__(message)
        self.step, self.in_time = step, in_time


@dataclass(frozen=True, eq=False)
class _Looked:
    """Gradients that were looked at before the step, and their norm: the step need not take it again."""

    gradients: list[Tensor]
    versions: list[int]
    norm: Tensor

    @classmethod
    def at(cls, gradients: list[Tensor]) -> _Looked:
        return cls(gradients, [gradient._version for gradient in gradients], get_total_norm(gradients))

    def still(self, gradients: list[Tensor]) -> bool:
        """Whether these are they, and nobody has written to them since."""
        same = len(gradients) == len(self.gradients) and all(map(operator.is_, gradients, self.gradients))
        return same and self.versions == [gradient._version for gradient in gradients]


class HybridOptimizer(CombinedOptimizer):
    """TorchRec's CombinedOptimizer, whose step first looks at the gradient, limits its norm and decays weights.

    All gradients that it sees have been averaged over the ranks, so their norm is the norm over all ranks without
    another exchange; where ranks hold different towers, one number more is exchanged in each step. While ranks are
    apart (:class:`LocalSGD`) each sees its own gradient: it clips by its own norm, and what it finds is told when the
    ranks meet again.

    Args:
        fused: of the sharded tables, which the backward has moved already; a step hands their learning rates to the
            kernels.
        tables: of the tables that every rank holds whole.
        dense: of the dense layers.
        sharded: of the sharded tables that no kernel moves.
        clip_norm: greatest norm of the gradient of ``tables`` and ``dense`` together; 0 for no limit.
        table_choices: what moves each table, by its name, and
        layer_choices: each dense parameter, by its name: for a captured step, which moves them by the same rules.
        holders: where ranks hold different towers, by name of a parameter how many ranks hold it; None where all ranks
            hold all.
        device: of this rank; the CPU where not given.
    """

    def __init__(
        self,
        fused: KeyedOptimizer,
        tables: list[tuple[str, KeyedOptimizer]],
        dense: list[tuple[str, KeyedOptimizer]],
        *,
        sharded: Sequence[ShardedAdam] = (),
        clip_norm: float = 0.0,
        table_choices: Mapping[str, Choice] | None = None,
        layer_choices: Mapping[str, Choice] | None = None,
        holders: Mapping[str, int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__([fused, *tables, *dense, *(("sharded_adam", adam) for adam in sharded)])
        self._sharded, self._holders, self._device = sharded, holders, device
        self.clip_norm, self.table_choices, self.layer_choices = clip_norm, table_choices or {}, layer_choices or {}
        self._names = {parameter: name for _, keyed in (*tables, *dense) for name, parameter in keyed.params.items()}
        self.dense_groups: list[dict[str, Any]] = [group for _, keyed in dense for group in keyed.param_groups]
        own = {id(group) for group in self.dense_groups}
        self.table_groups: list[dict[str, Any]] = [group for group in self.param_groups if id(group) not in own]
        self._tables = {parameter for _, keyed in tables for parameter in keyed.params.values()}
        self.replicated_tables: list[nn.Parameter] = [
            parameter for parameter in self._names if parameter in self._tables
        ]
        self.dense_parameters: list[nn.Parameter] = [
            parameter for parameter in self._names if parameter not in self._tables
        ]
        self._own_groups = [group for _, keyed in (*tables, *dense) for group in keyed.param_groups]
        self.gradient_norm: Tensor | None = None
        self._looked: _Looked | None = None
        self.apart = False
        self.fault: str | None = None
        self.leave_out = False
        # Not torch's step hooks: with super().step() they would be called twice.
        self.after_step: list[Callable[[], None]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Moves replicated tables and dense layers, and hands the kernels the learning rates of the sharded tables.

        A step that :attr:`leave_out` asks for, because no backward preceded it, moves nothing. While :attr:`apart` a
        gradient that is not finite is kept as :attr:`fault` and moves nothing: the other ranks do not know of it yet,
        and would wait for one that left.

        Raises:
            GradientNotFiniteError: on the CPU, where looking costs no wait; elsewhere :attr:`gradient_norm` says it.
        """
        if self.leave_out:
            self.leave_out = False
            return
        for adam in self._sharded:
            adam.take()
        if self._gradient_is_good():
            self._decay()
            super().step(closure)
        for call in self.after_step:
            call()

    def _gradient_is_good(self) -> bool:
        """Looks at the gradient and limits its norm."""
        parameters: list[Any] = [parameter for parameter in self._names if parameter.grad is not None]
        if not parameters and self._holders is None:
            return True
        self.gradient_norm = self._norm(parameters)
        if self.gradient_norm.device.type == "cpu" and not torch.isfinite(self.gradient_norm):
            if not self.apart:
                raise GradientNotFiniteError(self.explain_gradient())
            self.fault = self.fault or self.explain_gradient()
            return False
        if self.clip_norm:
            clip_grads_with_norm_(parameters, self.clip_norm, self.gradient_norm)
        return True

    def _norm(self, parameters: list[Any]) -> Tensor:
        """Of the gradient of the whole model, the same on every rank."""
        looked, self._looked = self._looked, None
        if self._holders is None:
            gradients = [parameter.grad for parameter in parameters]
            return looked.norm if looked is not None and looked.still(gradients) else get_total_norm(gradients)
        square = torch.zeros((), device=self._device)
        by_count: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            by_count.setdefault(self._holders[self._names[parameter]], []).append(parameter.grad)
        for count, gradients in by_count.items():
            square += get_total_norm(gradients).square() / count
        dist.all_reduce(square)
        return square.sqrt()

    def _decay(self) -> None:
        for group in self._own_groups:
            left = 1 - group["lr"] * group["decay"]
            for parameter in group["params"] if group["decay"] else ():
                if parameter.grad is None:
                    continue
                if parameter in self._tables:
                    rows = rows_with_gradient(parameter.grad)
                    parameter.index_copy_(0, rows, parameter[rows] * left)
                else:
                    parameter.mul_(left)

    def bad_gradients(self) -> list[str]:
        """Parameters of this rank whose gradient is not finite."""
        gradients = {name: parameter.grad for parameter, name in self._names.items() if parameter.grad is not None}
        self._looked = _Looked.at(list(gradients.values()))
        if torch.isfinite(self._looked.norm):
            return []
        return [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()] or list(gradients)

    def explain_gradient(self) -> str:
        """Which gradients are not finite; where ranks hold different towers, all ranks call it."""
        grads = {name: parameter.grad for parameter, name in self._names.items() if parameter.grad is not None}
        bad = [name for name, grad in grads.items() if not torch.isfinite(grad).all()]
        if self._holders is not None:
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, bad)
            bad = list(dict.fromkeys(name for names in ranks for name in names))
        bad = bad or list(grads)
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        return f"the gradient of {', '.join(bad[:3])}{more} is not finite"


def keyed_optimizers(
    name: str, parameters: Mapping[str, nn.Parameter], choices: Mapping[str, Choice]
) -> list[tuple[str, KeyedOptimizer]]:
    """One torch optimizer for each kind, with a group of parameters for each setting of it.

    Args:
        name: under which the state of the first kind is kept; that of another has its name behind.
        parameters: by name.
        choices: the optimizer of each, by the same name.
    """
    kinds = list(dict.fromkeys(choices[key].kind for key in parameters))
    made = []
    for kind in kinds:
        own = {key: value for key, value in parameters.items() if choices[key].kind == kind}
        groups = _groups(own, choices)
        factory = choices[next(iter(own))].unfused()[0]
        made.append(
            (f"{name}_{kind}", KeyedOptimizerWrapper(own, lambda _, make=factory, groups=groups: _made(make, groups)))
        )
    return made


def _made(factory: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    # One kernel for all parameters: on a CPU torch would take each of them through ten.
    return factory(groups, fused=True) if factory is torch.optim.Adam else factory(groups)  # type: ignore[call-arg]


def _groups(parameters: Mapping[str, nn.Parameter], choices: Mapping[str, Choice]) -> list[dict[str, Any]]:
    groups: dict[Choice, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        choice = choices[name]
        group = groups.setdefault(choice, {"params": [], **choice.unfused()[1], "decay": choice.weight_decay})
        group["params"].append(parameter)
    return list(groups.values())
