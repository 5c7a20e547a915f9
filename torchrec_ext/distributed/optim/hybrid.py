"""HybridOptimizer: combines the optimizers of sharded tables, replicated tables and dense layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torchrec.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
)

from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.distributed.optim.sharded import OneBackward


class HybridOptimizer(CombinedOptimizer):
    """TorchRec's CombinedOptimizer with a step that first clips the gradient's norm.

    All gradients that it sees have been averaged over the ranks, so their norm is the norm over all ranks without
    another exchange. While ranks are apart (:class:`LocalSGD`) each clips by the norm of its own gradient.

    Args:
        fused: optimizer of the sharded tables, which the backward has updated already; a step hands their learning
            rates to the kernels.
        tables: named optimizers of the tables that every rank holds whole.
        dense: named optimizers of the dense layers.
        one_backward: refuses a second backward of sharded tables before a step.
        clip_norm: greatest norm of the gradient of ``tables`` and ``dense`` together; 0 for no limit.
        table_choices: optimizer of each table, by name, for a captured step, which follows the same rules.
        layer_choices: optimizer of each dense parameter, by name, for a captured step.

    Attributes:
        dense_groups: parameter groups of the dense layers.
        table_groups: parameter groups of all tables.
        replicated_tables: tables that every rank holds whole.
        dense_parameters: parameters of the dense layers.
        apart: whether ranks take local steps.
        after_step: functions called after each step.
    """

    def __init__(
        self,
        fused: KeyedOptimizer,
        tables: list[tuple[str, KeyedOptimizer]],
        dense: list[tuple[str, KeyedOptimizer]],
        *,
        one_backward: OneBackward,
        clip_norm: float,
        table_choices: Mapping[str, Choice],
        layer_choices: Mapping[str, Choice],
    ) -> None:
        super().__init__([fused, *tables, *dense])
        self._one_backward = one_backward
        self.clip_norm = clip_norm
        self.table_choices = table_choices
        self.layer_choices = layer_choices
        self.replicated_tables: list[Any] = _joined(
            keyed.params.values() for _, keyed in tables
        )
        self.dense_parameters: list[Any] = _joined(
            keyed.params.values() for _, keyed in dense
        )
        self._unfused = [*self.replicated_tables, *self.dense_parameters]
        self.dense_groups = _joined(keyed.param_groups for _, keyed in dense)
        # By identity, because two groups may have equal settings.
        dense_ids = set(map(id, self.dense_groups))
        self.table_groups: list[dict[str, Any]] = [
            group for group in self.param_groups if id(group) not in dense_ids
        ]
        self.apart = False
        # Not torch's step hooks: with super().step() they would be called twice.
        self.after_step: list[Callable[[], None]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Updates replicated tables and dense layers; the kernels of sharded tables get their learning rates."""
        self._one_backward.begin()
        if self.clip_norm:
            clip_grad_norm_(self._unfused, self.clip_norm)
        super().step(closure)
        for call in self.after_step:
            call()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients; sharded tables keep what the backward made of theirs."""
        self._one_backward.begin()
        super().zero_grad(set_to_none)


def _joined(parts: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(parts))


@torch.no_grad()
def make_first_state(optimizer: torch.optim.Optimizer) -> None:
    """Creates an optimizer's state before its first step, by a step at a rate of 0."""
    groups = optimizer.param_groups
    gradients = []
    rates = []
    for group in groups:
        for parameter in group["params"]:
            gradients.append((parameter, parameter.grad))
            parameter.grad = torch.zeros_like(parameter)
        rates.append(group["lr"])
        # With a gradient of 0 this leaves the weights as they are, whatever the weight
        # decay.
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in gradients:
        parameter.grad = gradient
        # The step at a rate of 0 was counted, but trained nothing.
        if "step" in optimizer.state[parameter]:
            optimizer.state[parameter]["step"].zero_()


def keyed_optimizers(
    name: str, parameters: Mapping[str, nn.Parameter], choices: Mapping[str, Choice]
) -> list[tuple[str, KeyedOptimizer]]:
    """Builds one torch optimizer for each kind, with a group of parameters for each setting of it.

    Args:
        name: prefix of the optimizers' names, ``{name}_{kind}``, under which their state is saved.
        parameters: parameters by name.
        choices: optimizer of each parameter, by the same name.
    """
    by_kind: dict[str, dict[str, nn.Parameter]] = {}
    for key, parameter in parameters.items():
        by_kind.setdefault(choices[key].kind, {})[key] = parameter
    optimizers = []
    for kind, members in by_kind.items():
        groups = _groups(members, choices)
        factory = choices[next(iter(members))].unfused()[0]
        # As defaults, because a lambda would read the variables of the last round.
        keyed = KeyedOptimizerWrapper(
            members, lambda _, make=factory, groups=groups: _optimizer(make, groups)
        )
        optimizers.append((f"{name}_{kind}", keyed))
    return optimizers


def _optimizer(
    factory: type[torch.optim.Optimizer], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    # fused: one kernel for all parameters; on a CPU torch would else run ten for each.
    if factory is torch.optim.Adam:
        return torch.optim.Adam(groups, fused=True)
    return factory(groups)  # type: ignore[call-arg]


def _groups(
    parameters: Mapping[str, nn.Parameter], choices: Mapping[str, Choice]
) -> list[dict[str, Any]]:
    groups: dict[Choice, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        choice = choices[name]
        group = groups.setdefault(choice, {"params": [], **choice.unfused()[1]})
        group["params"].append(parameter)
    return list(groups.values())
