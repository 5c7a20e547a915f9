"""StackedOptimizer: moves each member of a stack by its own optimizer settings, members that agree in one call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrec_ext.distributed.optim.config import Choice, OptimizerConfig
from torchrec_ext.distributed.optim.declared import has_kernel
from torchrec_ext.distributed.optim.hybrid import make_first_state
from torchrec_ext.distributed.optim.kinds import rows_with_gradient
from torchrec_ext.networks.skeleton import StackError, unlike_members
from torchrec_ext.networks.stack import Stack, dense_parameters, table_weights
from torchrec_ext.train.config import Schedule

# Schedules of the tables and of the dense layers, as in a TrainConfig.
Schedules = tuple[Schedule, Schedule]


class _Weights(NamedTuple):
    """Weights of all members and their gradient; member k's are the k-th of K equal parts of the first axis."""

    name: str
    value: Tensor
    grad: Tensor
    is_table: bool


class StackedWeights(NamedTuple):
    """One entry of an optimizer: the weights ``name`` of ``members``, adjacent in memory."""

    name: str
    members: tuple[str, ...]
    parameter: nn.Parameter
    is_table: bool


class _Rule(NamedTuple):
    """The optimizer of some weights, and the schedule of its rate over ``steps`` steps."""

    choice: Choice
    schedule: Schedule
    steps: int


class StackedOptimizer:
    """The optimizers of a stack's members, each with its own learning rates, decays and limit of the gradient's norm.

    Each member learns what it would learn alone on one rank under :func:`hybrid_parallel`. All weights of members with
    one setting move in one fused call; K settings are K calls.

    Args:
        stack: the stack whose weights move.
        configs: optimizer settings of each member.
        schedules: schedules of each member's tables and dense layers; constant rates by default.
        steps: number of steps of each member's whole run, for the schedules.

    Raises:
        StackError: members have different kinds of optimizer for the same weights, or a member has no config.
    """

    def __init__(
        self,
        stack: Stack,
        configs: Mapping[str, OptimizerConfig],
        *,
        schedules: Mapping[str, Schedules] | None = None,
        steps: Mapping[str, int] | None = None,
    ) -> None:
        if missing := [name for name in stack.members if name not in configs]:
            raise StackError(
                f"no OptimizerConfig for {missing}: give one for each of {stack.members}"
            )
        self._stack = stack
        # The settings are kept for the optimizer of a smaller stack, see kept().
        self._configs = dict(configs)
        self._schedules = dict(schedules or {})
        self._steps = dict(steps or {})
        self._step = 0
        choices = {name: _choices(stack, name, configs[name]) for name in stack.members}
        self._clipped_weights = self._weights_in_norm(choices)
        self._moved: list[tuple[dict[str, Any], StackedWeights]] = []
        self._owners: dict[nn.Parameter, torch.optim.Optimizer] = {}
        # One optimizer of torch for each kind; members agree on the kind of a weight,
        # as _optimizer() ensures.
        kinds = dict.fromkeys(
            choice.kind for choice in choices[stack.members[0]].values()
        )
        self._optimizers = [self._optimizer(kind, choices) for kind in kinds]

    def _optimizer(
        self, kind: str, choices: Mapping[str, Mapping[str, Choice]]
    ) -> torch.optim.Optimizer:
        groups: dict[Any, dict[str, Any]] = {}
        first = choices[self._stack.members[0]]
        for weights in _weights(self._stack, choices):
            if first[weights.name].kind != kind:
                continue
            rules = {}
            kinds = {}
            for member, member_choices in choices.items():
                choice = member_choices[weights.name]
                kinds[member] = choice.kind
                rules[member] = self._rule(member, choice, weights.is_table)
            if (unlike := unlike_members(kinds)) is not None:
                first_member, other = unlike
                raise StackError(
                    f"'{weights.name}' is moved by {kinds[first_member]} in '{first_member}' and by {kinds[other]} in "
                    f"'{other}', but by one kind in a stack; give both the same optimizer.tables and optimizer.dense, "
                    "or do not stack them"
                )
            for entry, rule in _runs(weights, rules):
                # Entries with one rule share a group, and so one fused call.
                settings = {"params": [], **rule.choice.unfused()[1], **rule._asdict()}
                group = groups.setdefault((rule, entry.is_table), settings)
                group["params"].append(entry.parameter)
                self._moved.append((group, entry))
        optimizer_type = next(
            choice for choice in first.values() if choice.kind == kind
        ).unfused()[0]
        fused_types: list[Any] = [torch.optim.Adam, torch.optim.SGD]
        if self._stack.device.type == "cpu":
            # torch has a fused Adagrad for a CPU alone.
            fused_types.append(torch.optim.Adagrad)
        options = {}
        if optimizer_type in fused_types:
            options["fused"] = True
        optimizer = optimizer_type(list(groups.values()), **options)  # type: ignore[arg-type]
        for group in groups.values():
            self._owners |= dict.fromkeys(group["params"], optimizer)
        return optimizer

    def _rule(self, member: str, choice: Choice, is_table: bool) -> _Rule:
        of_tables, schedule = self._schedules.get(member, (Schedule(), Schedule()))
        if is_table:
            schedule = of_tables
        steps = 0
        # A constant rate needs no number of steps: members that differ in it alone
        # still share a rule.
        if schedule.changes:
            steps = self._steps.get(member, 0)
        return _Rule(choice, schedule, steps)

    def _weights_in_norm(
        self, choices: Mapping[str, Mapping[str, Choice]]
    ) -> list[_Weights]:
        """Returns the weights to clip; as in a single run, without the tables updated inside the backward."""
        # All members have the same kinds of optimizer, see _optimizer().
        first = choices[self._stack.members[0]]
        device = self._stack.device.type
        in_norm = []
        for weights in _all_weights(self._stack):
            if not weights.is_table or not has_kernel(first[weights.name].kind, device):
                in_norm.append(weights)
        return in_norm

    @torch.no_grad()
    def step(self) -> None:
        """Moves every member by the gradients of :meth:`Stack.backward`."""
        self.begin_step()
        if self.clips:
            limits = self._stack.dense.matrix.new_tensor(self.limits)
            grads = [
                weights.grad.view(len(limits), -1) for weights in self._clipped_weights
            ]
            factors = clip_factors(grads, limits)
            for grad in grads:
                grad.mul_(factors)
        # Decay apart from the optimizers: of a table only the rows with a gradient
        # decay.
        for group, entry in self._moved:
            if group["choice"].weight_decay:
                _decay(entry, 1 - group["lr"] * group["choice"].weight_decay)
        for optimizer in self._optimizers:
            optimizer.step()
        self.end_step()

    def begin_step(self) -> None:
        """Sets the learning rates of the next step by the schedules."""
        for group, _ in self._moved:
            if group["schedule"].changes:
                group["lr"] = group["choice"].lr * group["schedule"].factor(
                    self._step, group["steps"]
                )

    def end_step(self) -> None:
        """Counts a step for the schedules."""
        self._step += 1

    def begin(self) -> None:
        """Creates the state for a checkpoint to fill, as the first step would, by a step without gradients."""
        for optimizer in self._optimizers:
            make_first_state(optimizer)

    def go_on(self, steps: int) -> None:
        """Continues the schedules after so many steps."""
        self._step = steps

    def entries(self) -> list[tuple[dict[str, Any], StackedWeights, dict[str, Tensor]]]:
        """Returns each group of settings with its weights and their state."""
        entries = []
        for group, entry in self._moved:
            entries.append(
                (group, entry, self._owners[entry.parameter].state[entry.parameter])
            )
        return entries

    @property
    def begun(self) -> bool:
        """Whether the optimizers have made their state."""
        return any(optimizer.state for optimizer in self._optimizers)

    @property
    def limits(self) -> list[float]:
        """The greatest gradient norm of each member; infinite for no limit."""
        return [
            self._configs[member].clip_norm or math.inf
            for member in self._stack.members
        ]

    @property
    def clips(self) -> bool:
        """Whether the norm of any member's gradient has a limit."""
        return any(map(math.isfinite, self.limits))

    @property
    def limited_tables(self) -> list[str]:
        """The tables in the clipped norm, as ``PATH.TABLE``; dense layers always count."""
        return [weights.name for weights in self._clipped_weights if weights.is_table]

    def rates(self, member: str) -> dict[str, float]:
        """Returns the current learning rates of one member, for a record."""
        rates: dict[str, float] = {}
        for name, is_table in (("tables_lr", True), ("dense_lr", False)):
            for group, entry in self._moved:
                if member in entry.members and entry.is_table == is_table:
                    rates.setdefault(name, group["lr"])
        return rates

    def kept(self, stack: Stack) -> StackedOptimizer:
        """Returns an optimizer for a stack of some of the members, with their state and position."""
        configs = {member: self._configs[member] for member in stack.members}
        optimizer = StackedOptimizer(
            stack, configs, schedules=self._schedules, steps=self._steps
        )
        optimizer._step = self._step
        states: dict[tuple[str, str], dict[str, Tensor]] = {}
        for _, entry in self._moved:
            for member, state_of_one in self.states(entry).items():
                states[entry.name, member] = state_of_one
        for _, entry in optimizer._moved:
            parts = [states[entry.name, member] for member in entry.members]
            state = {}
            for name in parts[0]:
                state[name] = _join([state_of_one[name] for state_of_one in parts])
            # An optimizer without a step has no state, and none is made for it.
            if state:
                optimizer._owners[entry.parameter].state[entry.parameter] = state
        return optimizer

    def states(self, entry: StackedWeights) -> dict[str, dict[str, Tensor]]:
        """Returns the state of each member's part of an entry, by member."""
        count = len(entry.members)
        parts: dict[str, dict[str, Tensor]] = {member: {} for member in entry.members}
        for name, value in self._owners[entry.parameter].state[entry.parameter].items():
            # A scalar, such as a count of steps, is the same for all members of the
            # entry.
            chunks: Sequence[Tensor] = [value] * count
            if value.dim():
                chunks = value.chunk(count)
            for state_of_one, chunk in zip(parts.values(), chunks, strict=True):
                state_of_one[name] = chunk
        return parts


def clip_factors(grads: Sequence[Tensor], limits: Tensor) -> Tensor:
    """Returns the factors (K, 1) that limit the norm of each member's gradients, (K, n) each, to ``limits``, (K,)."""
    squares = [grad.square().sum(dim=1) for grad in grads]
    norms = torch.stack(squares).sum(dim=0).sqrt()
    # torch's clip_grad_norm_ adds 1e-6 to the norm too, and a member must learn as it
    # would alone.
    return (limits / (norms + 1e-6)).clamp(max=1)[:, None]


def _choices(stack: Stack, member: str, config: OptimizerConfig) -> dict[str, Choice]:
    """Returns the optimizer of each table and dense parameter, by the stack's names."""
    network = stack.networks[member]
    by_table = config.for_tables(network)
    by_layer = config.for_layers(list(dense_parameters(network)))
    choices = {name: by_table[name.rpartition(".")[2]] for name in table_weights(stack)}
    return choices | dict(zip(stack.dense.weights, by_layer.values(), strict=True))


def _all_weights(stack: Stack) -> list[_Weights]:
    weights = []
    for name, weight in table_weights(stack).items():
        weights.append(_Weights(name, weight.detach(), weight.grad, True))  # type: ignore[arg-type]
    weights.append(_Weights("", stack.dense.matrix, stack.dense.grad, False))
    return weights


def _weights(
    stack: Stack, choices: Mapping[str, Mapping[str, Choice]]
) -> list[_Weights]:
    """Returns the tables, and the dense weights: as one if each member has one setting for them, else one by one."""
    *tables, dense = _all_weights(stack)
    names = list(stack.dense.weights)
    most_settings = 1
    for member in stack.members:
        settings = {choices[member][name] for name in names}
        most_settings = max(most_settings, len(settings))
    if most_settings == 1:
        return [*tables, dense._replace(name=names[0])]
    for name, value in stack.dense.weights.items():
        tables.append(_Weights(name, value.detach(), stack.dense.grads[name], False))
    return tables


def _runs(
    weights: _Weights, rules: Mapping[str, _Rule]
) -> list[tuple[StackedWeights, _Rule]]:
    """Returns one entry for all members if they agree and are adjacent in memory, else one for each."""
    members = tuple(rules)
    if len(set(rules.values())) == 1 and weights.value.is_contiguous():
        return [
            (_entry(weights, members, weights.value, weights.grad), rules[members[0]])
        ]
    parts = zip(
        members,
        weights.value.chunk(len(members)),
        weights.grad.chunk(len(members)),
        strict=True,
    )
    runs = []
    for member, value, grad in parts:
        runs.append((_entry(weights, (member,), value, grad), rules[member]))
    return runs


def _entry(
    weights: _Weights, members: tuple[str, ...], value: Tensor, grad: Tensor
) -> StackedWeights:
    # It shares the memory of the stack's weights and of their gradients.
    parameter = nn.Parameter(value)
    parameter.grad = grad
    return StackedWeights(weights.name, members, parameter, weights.is_table)


def _decay(entry: StackedWeights, factor: float) -> None:
    if not entry.is_table:
        entry.parameter.mul_(factor)
        return
    rows = rows_with_gradient(entry.parameter.grad)  # type: ignore[arg-type]
    entry.parameter.index_copy_(0, rows, entry.parameter[rows] * factor)


def _join(parts: Sequence[Tensor]) -> Tensor:
    # A count of steps is the same for all members.
    if not parts[0].dim():
        return parts[0].clone()
    return torch.cat(list(parts))
