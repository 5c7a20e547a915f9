"""StepMemory: the named tensors that captured steps share: weights, state, rates, steps of rows.

They are the memory of a model and of its optimizer, so others can read these as usual. A table is updated in one of two
ways:

- whole: the gradient is a matrix as large as the table and the rule updates all of it, as torch's optimizers do;
- row by row, if few of many rows are read: only these are updated. Adam's other rows are updated when they are next
  read (:mod:`update_rules`), and all of them in :meth:`StepMemory.settle`, so that the result is that of dense Adam.

RowTable: a table of the second kind inside one captured step: its rows read so far, and their update.

UpdatedParameter: a table or dense parameter as plain tensors, with its state, its rule and its learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.update_rules import (
    SLIDES,
    RowClock,
    caught_up,
    decay_of,
    decay_on,
    lags,
    row_clock,
    slide_on,
    stepped,
    without_closed_form,
)
from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.distributed.row_rule import ROWS_PER_LOOKUP, WEIGHTS_ON_GPU
from torchrec_ext.schema.validation import listed


@dataclass
class Clock:
    """The step count of a parameter, this step included, () float32, and its learning rate, ()."""

    step: Tensor
    lr: Tensor

    def stepped(
        self,
        values: Tensor,
        grad: Tensor,
        state: list[Tensor],
        choice: Choice,
    ) -> list[Tensor]:
        """Returns values and state after this step, see :func:`~torchrec_ext.capture.update_rules.stepped`."""
        updated, state = stepped(values, grad, state, self.step, self.lr, choice)
        return [updated, *state]


# Reads a table inside one step: returns the vectors (n, D) of the ids (n,).
Read = Callable[[Tensor], Tensor]


@dataclass
class RowTable:
    """A table with an update of only the rows read in the step.

    Args:
        weight: the table's rows, (rows, D); those read are written.
        state: optimizer state of all rows, written likewise.
        rows: the clock of its rows, written.
        choice: the update rule and its numbers.
        clock: count and learning rate of this step.
        zero: 0 with a gradient, (), whose sum with the rows is then their leaf: Dynamo lets nothing out of a graph that
            depends on ``requires_grad_()`` of a tensor inside, and a user's forward may keep what it computes.
    """

    weight: Tensor
    state: list[Tensor]
    rows: RowClock
    choice: Choice
    clock: Clock
    zero: Tensor | None = None
    _reads: list[tuple[Tensor, Tensor, list[Tensor]]] = field(default_factory=list)

    def read(self, ids: Tensor) -> Tensor:
        """Returns the vectors (n, D) of the ids (n,), up to date after the previous step."""
        rows = self.weight.index_select(0, ids)
        state = [tensor.index_select(0, ids) for tensor in self.state]
        if lags(self.choice):
            since = self.rows.since.index_select(0, ids)
            before = (self.clock.step - 1).int()
            rows, *state = caught_up(rows, state, since, before, self.rows, self.choice)
        leaf = rows.detach()
        leaf = leaf.requires_grad_() if self.zero is None else leaf + self.zero
        self._reads.append((ids, leaf, state))
        return leaf

    def leaves(self) -> list[Tensor]:
        """Returns the tensors to differentiate for :meth:`move`, one for each read."""
        return [leaf for _, leaf, _ in self._reads]

    def move(self, grads: Sequence[Tensor | None]) -> None:
        """Writes the step; ``grads`` are those of :meth:`leaves`."""
        decay = decay_of(self.choice)
        step = self.clock.step
        lr = self.clock.lr
        # The sums go on only now, when all rows of the step have been read as of the
        # step before.
        if self.choice.kind == "adam":
            slide_on(
                self.rows.slides,
                self.rows.powers,
                step,
                lr,
                self.choice.betas,
                decay,
            )
        if decay:
            decay_on(self.rows.decays, step, lr, decay)
        if not self._reads:
            return
        all_ids, leaves, states = zip(*self._reads, strict=True)
        ids = torch.cat(all_ids)
        rows = torch.cat([leaf.detach() for leaf in leaves])
        state = [torch.cat(parts) for parts in zip(*states, strict=True)]
        grad, _ = self.gradients(grads)
        new = self.clock.stepped(rows, grad, state, self.choice)
        # A row that was read twice is written twice, but with the same values.
        for target, value in zip([self.weight, *self.state], new, strict=True):
            target.index_put_((ids,), value)
        if lags(self.choice):
            self.rows.since.index_put_((ids,), self.clock.step.int().expand(len(ids)))

    def gradients(self, grads: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Sums the gradients of all look-ups of a row; ``grads`` are those of :meth:`leaves`.

        Returns:
            The sum at each look-up, (n, D), and whether a look-up represents its row, (n, 1): one of each row does.

        This needs neither sorting nor a number of rows that depends on the batch. Each look-up writes its index at its
        row, one of these stays, and all gradients of the row are summed there.
        """
        ids = torch.cat([ids for ids, _, _ in self._reads])
        pairs = zip(grads, self.leaves(), strict=True)
        flat_grads = torch.cat(
            [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs]
        )
        places = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        self.rows.leader.index_put_((ids,), places)
        leader = self.rows.leader.index_select(0, ids)
        leader_index = leader.long()
        sums = torch.zeros_like(flat_grads).index_add(0, leader_index, flat_grads)
        return sums.index_select(0, leader_index), (leader == places)[:, None]


# Takes rows, look-ups of a step, width and device of a table, and returns whether to
# update it row by row.
RowRule = Callable[[int, int, int, str], bool]


# State tensors of each rule besides the step count: moments, or sums of squares.
STATE_COUNTS = {
    "adam": 2,
    "lazy_adam": 2,
    "adagrad": 1,
    "row_wise_adagrad": 1,
    "sgd": 0,
}


class Group(Protocol):
    """The settings of a group of an optimizer's parameters, by their name."""

    def __getitem__(self, name: str, /) -> Any: ...


@dataclass
class UpdatedParameter:
    """One parameter and the inputs of its update; the tensors are the optimizer's and the model's own memory.

    Args:
        name: name of a table, or path of a dense parameter in the unwrapped model.
        table: whether it is a table, (rows, D).
        sharded: whether TorchRec shards it, so that the limit on the gradient's norm leaves it out.
        weight: values of the parameter.
        state: optimizer state, in the order of its rule in :data:`UPDATES`.
        steps: the optimizer's counters of steps.
        group: the optimizer's group, with its ``lr``.
        choice: the update rule and its numbers.
    """

    name: str
    table: bool
    sharded: bool
    weight: Tensor
    state: list[Tensor]
    steps: list[Tensor]
    group: Group
    choice: Choice


def state_tensors(state: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the tensors of a parameter's optimizer state, in the order of its rule, and its counters of steps."""
    tensors = []
    steps = []
    for name, value in state.items():
        if isinstance(value, ShardedTensor):
            value = value.local_shards()[0].tensor
        # TorchRec's kernels put the table's name before that of a state.
        if name.split(".")[-1] == "step":
            steps.append(
                value if isinstance(value, Tensor) else torch.tensor(float(value))
            )
        elif isinstance(value, Tensor):
            tensors.append(value)
    return tensors, steps


# rows of a table to update at once: this takes six temporaries of as many rows
_BLOCK_ROWS = 1 << 14


class StepMemory:
    """The tensors read and written by a captured step.

    Args:
        parameters: parameters to update, one or more, such as those of :func:`.sharded.moved_parameters`.
        fixed: further tensors of the model by name, without an optimizer.

    Attributes:
        zero: 0 with a gradient, (), see :class:`RowTable`.
        unsettled: steps since all rows were brought up to date.

    Raises:
        CannotCaptureError: the parameters have made different numbers of steps.
    """

    def __init__(
        self,
        parameters: Sequence[UpdatedParameter],
        fixed: Mapping[str, Tensor],
    ) -> None:
        self.parameters = list(parameters)
        self.fixed = dict(fixed)
        # By identity: each group has a rate of its own, and two groups may be equal.
        self._groups = list(
            {
                id(parameter.group): parameter.group for parameter in self.parameters
            }.values()
        )
        self.device = self.parameters[0].weight.device
        self._step = torch.zeros((), device=self.device)
        self.zero = torch.zeros((), device=self.device, requires_grad=True)
        self._rates = [torch.zeros((), device=self.device) for _ in self._groups]
        self._last_rates = [float("nan")] * len(self._rates)
        self._rows: dict[str, RowClock] = {}
        self.unsettled = 0
        # At so many unsettled steps all rows must be updated, because a clock knows no
        # earlier ones.
        self._max_unsettled = math.inf
        self.reload()

    @property
    def tables(self) -> dict[str, UpdatedParameter]:
        """The tables by name."""
        return {
            parameter.name: parameter
            for parameter in self.parameters
            if parameter.table
        }

    @property
    def row_tables(self) -> list[str]:
        """Names of the tables with updates row by row."""
        return list(self._rows)

    def reload(self) -> None:
        """Reads the optimizer's number of steps again, after eager steps in between.

        Raises:
            CannotCaptureError: the parameters have made different numbers of steps.
        """
        counts: dict[float, str] = {}
        made = 0.0
        for parameter in self.parameters:
            for steps in parameter.steps:
                made = max(made, float(steps))
                # No other rule reads its count, and a checkpoint has none of a table
                # under Adagrad.
                if parameter.choice.kind in ("adam", "lazy_adam"):
                    counts[float(steps)] = parameter.name
        if len(counts) > 1:
            least = min(counts)
            most = max(counts)
            raise CannotCaptureError(
                f"'{counts[least]}' has made {least:.0f} steps and '{counts[most]}' {most:.0f}; read all in each "
                "step; make a new optimizer after unfreezing, load a state after an interrupted step"
            )
        self._step.fill_(made)
        for name in self._rows:
            self._mark_current(name)

    @torch.no_grad()
    def settle(self) -> None:
        """Completes deferred updates: model and optimizer then equal those after the same number of eager steps."""
        for parameter in self.parameters:
            for step in parameter.steps:
                step.copy_(self._step)
            if parameter.name in self._rows and self.unsettled:
                if lags(parameter.choice):
                    self._catch_up(parameter)
                self._mark_current(parameter.name)
        self.unsettled = 0

    def _catch_up(self, parameter: UpdatedParameter) -> None:
        """Brings every row of a table up to date, a block of rows at a time."""
        clock = self._rows[parameter.name]
        now = self._step.int()
        for start in range(0, len(clock.since), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            last = clock.since[block]
            rows = parameter.weight[block]
            state = [tensor[block] for tensor in parameter.state]
            new = caught_up(rows, state, last, now, clock, parameter.choice)
            # One call, because after an interrupt between two calls the rows would be
            # updated once more.
            torch._foreach_copy_([rows, *state, last], [*new, now.expand(len(last))])

    def mark_rows_current(self, name: str, rows: Tensor) -> None:
        """Marks rows of a table as up to date, (n,) int64, after somebody else has written them and their state."""
        if name in self._rows:
            self._rows[name].since[rows.to(self.device)] = self._step.int()

    def _mark_current(self, name: str) -> None:
        """Marks every row of a table as up to date."""
        self._rows[name].restart(int(self._step))

    def begin(self) -> None:
        """Begins a step: sets its learning rates, and first updates all rows if one may lag too far behind."""
        rates = [group["lr"] for group in self._groups]
        if self.unsettled >= self._max_unsettled:
            self.settle()
        for index, rate in enumerate(rates):
            # Filling a tensor on a GPU costs a kernel, so it is filled only if the rate
            # has changed.
            if rate != self._last_rates[index]:
                self._last_rates[index] = rate
                self._rates[index].fill_(rate)
        self.unsettled += 1

    @property
    def count(self) -> Tensor:
        """The number of steps so far, (), as steps read and raise it."""
        return self._step

    def choose(self, lookups: Mapping[str, int], rule: RowRule) -> None:
        """Chooses the update of each table by the number of its look-ups in a step."""
        for name, parameter in self.tables.items():
            if without_closed_form(parameter.choice):
                continue
            rows, width = parameter.weight.shape
            if rule(rows, lookups[name], width, self.device.type):
                self._rows[name] = row_clock(
                    rows, int(self._step), parameter.choice, self.device
                )
                if lags(parameter.choice):
                    self._max_unsettled = min(self._max_unsettled, SLIDES - 1)

    def describe(self) -> str:
        """Describes in a line how each table is updated."""
        ways: dict[str, list[str]] = {}
        few = f"at most {ROWS_PER_LOOKUP} rows per look-up"
        if self.device.type == "cuda":
            few += f", or fewer than {WEIGHTS_ON_GPU:,} weights"
        for name, parameter in self.tables.items():
            reason = without_closed_form(parameter.choice) or few
            way = f"moved whole ({reason})"
            if name in self._rows:
                way = "moved row by row"
            ways.setdefault(way, []).append(name)
        sorted_ways = sorted(ways.items(), reverse=True)
        return "; ".join(f"{way}: {listed(names)}" for way, names in sorted_ways)

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors by name."""
        memory = {"step": self._step}
        for index, rate in enumerate(self._rates):
            memory[f"rate {index}"] = rate
        memory |= self.fixed
        for parameter in self.parameters:
            memory[parameter.name] = parameter.weight
            for index, value in enumerate(parameter.state):
                memory[f"{parameter.name}/{index}"] = value
            if parameter.name in self._rows:
                for name, tensor in self._rows[parameter.name]._asdict().items():
                    memory[f"{parameter.name}/{name}"] = tensor
        return memory

    def clock(self, group: Group, tensors: Mapping[str, Tensor]) -> Clock:
        """Returns the step count of a step on ``tensors``, and the learning rate of a group."""
        # By identity, because two groups may be equal.
        index = [each is group for each in self._groups].index(True)
        return Clock(tensors["step"], tensors[f"rate {index}"])
