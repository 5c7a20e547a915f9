"""CapturedUpdate: the captured steps that update the same parameters in the same way, and their memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrec_ext.adopt.checks import STATES, Rules, StateTensor
from torchrec_ext.adopt.lag import Lag
from torchrec_ext.adopt.reads import ConstantMask
from torchrec_ext.adopt.user_step import UserStep
from torchrec_ext.capture.compiled import CompiledCall
from torchrec_ext.capture.memory import StepMemory, UpdatedParameter
from torchrec_ext.drawn import Resident


class GroupSettings:
    """A group of an optimizer's settings by its index: load_state_dict puts other dicts in their place."""

    def __init__(self, optimizer: Optimizer, index: int) -> None:
        self._optimizer = optimizer
        self._index = index

    def __getitem__(self, name: str) -> Any:
        return self._optimizer.param_groups[self._index][name]


@dataclass(eq=False)
class CapturedUpdate:
    """The captured steps that update the same parameters in the same way.

    Args:
        memory: the tensors of the steps.
        weights: the user's parameters that are updated, by name.
        state: the optimizers' state.
        dense_tables: why a table is updated as a dense layer, by its name.
        lag: weights and state that are updated later.
        unmoved: names of parameters that no eager step has moved.
        masks: the model's masks.
        calls: the step as Dynamo calls it, by the rows that it makes batches of, or None for given batches.
        runs: what is called in place of a graph, by its number.
        waiting: calls of a graph that were refused so far, by its number.
        unverified: number of further steps of a graph to compare with eager ones, by its number.
        allowed: names of parameters that a graph may read without a memory.
    """

    memory: StepMemory
    weights: dict[str, nn.Parameter]
    state: list[StateTensor]
    dense_tables: dict[str, str]
    lag: Lag
    unmoved: set[str]
    masks: list[ConstantMask]
    calls: dict[Resident | None, CompiledCall] = field(default_factory=dict)
    runs: dict[int, Callable[..., Sequence[Any]]] = field(default_factory=dict)
    waiting: Counter[int] = field(default_factory=Counter)
    unverified: dict[int, int] = field(default_factory=dict)
    allowed: set[str] = field(default_factory=set)

    def describe(self, since: int) -> str:
        """Describes how each table is updated, from the step with the number ``since`` on."""
        ways = [f"captured since step {since:,}", self.memory.describe()]
        for name, why in self.dense_tables.items():
            ways.append(f"as a dense layer: {name} ({why})")
        return "; ".join(filter(None, ways))


def updated_parameters(
    rules: Rules,
    names: Collection[str],
    tables: Collection[str],
    user_step: UserStep,
) -> tuple[list[UpdatedParameter], list[StateTensor], set[str]]:
    """Returns the parameters that a step updates, the optimizers' state of these, and the names without one.

    Args:
        rules: how optimizers move each parameter.
        names: the parameters' names.
        tables: those that may be updated row by row.
        user_step: the optimizers.
    """
    parameters = []
    state = []
    unmoved = set()
    # One for all parameters of a group, which share a rate.
    groups: dict[tuple[int, int], GroupSettings] = {}
    for name, (number, index, parameter, choice) in rules.items():
        if name not in names:
            continue
        optimizer = user_step.optimizers[number]
        values = optimizer.state.get(parameter, {})
        tensors = []
        steps = []
        for key in STATES[choice.kind]:
            if key not in values:
                unmoved.add(name)
                tensors.append(torch.zeros_like(parameter).detach())
                continue
            state.append(StateTensor(number, parameter, key, values[key]))
            tensors.append(values[key].detach())
        # SGD counts no steps.
        if "step" in values:
            state.append(StateTensor(number, parameter, "step", values["step"]))
            steps.append(values["step"].detach())
        group = groups.setdefault((number, index), GroupSettings(optimizer, index))
        weight = parameter.detach()
        parameters.append(
            UpdatedParameter(
                name, name in tables, False, weight, tensors, steps, group, choice
            )
        )
    return parameters, state, unmoved


def lag_of(
    memory: StepMemory,
    weights: Mapping[str, nn.Parameter],
    state: Sequence[StateTensor],
) -> Lag:
    """Returns the tables updated row by row, with the other weights of the same lag."""
    tables = {name: weights[name] for name in memory.row_tables}
    table_ids = set(map(id, tables.values()))
    late = []
    for each in state:
        # The memory counts the steps; the optimizers' own counts are written when
        # rows are updated.
        if each.name == "step" or id(each.parameter) in table_ids:
            late.append(each.tensor)
    return Lag(memory, tables, late)
