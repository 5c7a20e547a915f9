"""StepMemory: the named tensors that stay from one captured step to the next: weights, state, rates, steps of rows.

They are the memory of a model and of its optimizer, which others can therefore read as usual. A table is moved in one
of two ways:

- whole: the gradient is a matrix as large as the table and the rule sweeps all of it, as torch's optimizers do;
- row by row, where few of many rows are read: only those are moved. Adam's other rows slide on meanwhile; they catch up
  when they are next read (:mod:`update_rules`), and all of them in :meth:`StepMemory.settle`, so that the result is
  that of dense Adam.

TableRows: one table inside one captured step: the rows that were read, and how they are moved.

UpdatedParameter: a table or dense parameter as plain tensors, with its state, its rule and its learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.functional import embedding
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import DataType

from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.tables import Shard, collections, kernels_by_table, local_shards
from torchrec_ext.train.step.lowering import CannotCaptureError
from torchrec_ext.train.step.update_rules import (
    SLIDES,
    UPDATES,
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


@dataclass
class Clock:
    """The () float32 ``step``, a count that includes this step, and the learning rate ``lr``, (), of a parameter."""

    step: Tensor
    lr: Tensor


@dataclass
class WholeTable:
    """A table that is moved as a whole.

    Args:
        weight: the table's rows, (rows, D), written.
        state: optimizer state of all rows, written.
        choice: the update rule and its numbers.
        clock: count and learning rate of this step.
    """

    weight: Tensor
    state: list[Tensor]
    choice: Choice
    clock: Clock
    leaf: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.leaf = self.weight.detach().requires_grad_()

    def read(self, ids: Tensor) -> Tensor:
        """Returns the vectors (n, D) of the ids (n,)."""
        return embedding(ids, self.leaf)

    def leaves(self) -> list[Tensor]:
        """Returns the tensors whose gradients :meth:`move` needs."""
        return [self.leaf]

    def move(self, grads: Sequence[Tensor | None]) -> None:
        """Writes the step; ``grads`` are those of :meth:`leaves`."""
        if grads[0] is None:
            return
        new = stepped(self.weight, grads[0], self.state, self.clock.step, self.clock.lr, self.choice, table=True)
        _write([self.weight, *self.state], [new[0], *new[1]])


def _write(targets: list[Tensor], values: list[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


@dataclass
class RowTable:
    """A table of which a step moves only the rows that it reads.

    Args:
        weight: the table's rows, (rows, D), written where they are read.
        state: optimizer state of all rows, written likewise.
        rows: the clock of its rows, written.
        choice: the update rule and its numbers.
        clock: count and learning rate of this step.
    """

    weight: Tensor
    state: list[Tensor]
    rows: RowClock
    choice: Choice
    clock: Clock
    _reads: list[tuple[Tensor, Tensor, list[Tensor]]] = field(default_factory=list)

    def read(self, ids: Tensor) -> Tensor:
        """Returns the vectors (n, D) of the ids (n,), as they are after the step before."""
        rows = self.weight.index_select(0, ids)
        state = [tensor.index_select(0, ids) for tensor in self.state]
        if lags(self.choice):
            since, before = self.rows.since.index_select(0, ids), (self.clock.step - 1).int()
            rows, *state = caught_up(rows, state, since, before, self.rows, self.choice)
        leaf = rows.detach().requires_grad_()
        self._reads.append((ids, leaf, state))
        return leaf

    def leaves(self) -> list[Tensor]:
        """Returns the tensors whose gradients :meth:`move` needs, one for each read."""
        return [leaf for _, leaf, _ in self._reads]

    def move(self, grads: Sequence[Tensor | None]) -> None:
        """Writes the step; ``grads`` are those of :meth:`leaves`."""
        decay = decay_of(self.choice)
        if self.choice.kind == "adam":  # all rows have been read by now
            slide_on(self.rows.slides, self.rows.powers, self.clock.step, self.clock.lr, self.choice.betas, decay)
        if decay:
            decay_on(self.rows.decays, self.clock.step, self.clock.lr, decay)
        if not self._reads:
            return
        ids = torch.cat([ids for ids, _, _ in self._reads])
        rows = torch.cat([leaf.detach() for _, leaf, _ in self._reads])
        state = [torch.cat(parts) for parts in zip(*(of_read for _, _, of_read in self._reads), strict=True)]
        grad, _ = self.gradients(grads)
        new = stepped(rows, grad, state, self.clock.step, self.clock.lr, self.choice, table=True)
        # A row that was read twice is written twice, with the same values.
        for target, value in zip([self.weight, *self.state], [new[0], *new[1]], strict=True):
            target.index_put_((ids,), value)
        if lags(self.choice):
            self.rows.since.index_put_((ids,), self.clock.step.int().expand(len(ids)))

    def gradients(self, grads: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Sums the gradients of all look-ups of a row; ``grads`` are those of :meth:`leaves`.

        Returns:
            The sum at each look-up, (n, D), and whether a look-up stands for its row, (n, 1): one of each row does.

        This needs neither sorting nor a number of rows that depends on the batch: each look-up writes its index at its
        row, one of them stays, and all gradients of the row are added up there.
        """
        ids = torch.cat([ids for ids, _, _ in self._reads])
        pairs = zip(grads, self.leaves(), strict=True)
        each = torch.cat([torch.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs])
        places = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        self.rows.leader.index_put_((ids,), places)
        leader = self.rows.leader.index_select(0, ids)
        leader_index = leader.long()
        return torch.zeros_like(each).index_add(0, leader_index, each).index_select(0, leader_index), (
            leader == places
        )[:, None]


TableRows = WholeTable | RowTable


_STATES = {"adam": 2, "lazy_adam": 2, "adagrad": 1, "row_wise_adagrad": 1, "sgd": 0}


@dataclass
class UpdatedParameter:
    """One parameter with what its update needs; the tensors are the optimizer's and the model's own memory.

    Args:
        name: name of a table, or path of a dense parameter in the unwrapped model.
        table: whether it is a table, (rows, D).
        sharded: whether TorchRec shards it, so that the limit on the gradient's norm leaves it out.
        weight: values of the parameter.
        state: optimizer state, in the order of its rule in :data:`UPDATES`.
        steps: the optimizer's counters of steps.
        group: the optimizer's group, which holds ``lr``.
        choice: the update rule and its numbers.
    """

    name: str
    table: bool
    sharded: bool
    weight: Tensor
    state: list[Tensor]
    steps: list[Tensor]
    group: Mapping[str, Any]
    choice: Choice


def moved_parameters(model: nn.Module, optimizer: HybridOptimizer) -> list[UpdatedParameter]:
    """Returns every parameter that ``optimizer`` moves on this one rank, after its first step, which makes its state.

    Raises:
        CannotCaptureError: a table is split, not fp32, off the GPU, or moved by a rule that is not in :data:`UPDATES`.
    """
    for name, kernel in (pair for _, held in collections(model) for pair in kernels_by_table(held).items()):
        if kernel not in ("dense", "fused"):
            raise CannotCaptureError(f"table '{name}' has kernel={kernel}, whose rows a captured step does not reach")
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    by_name = owners(optimizer)
    shards = list(local_shards(model))
    result = []
    for name, weight, choice, config in _named(model, optimizer, shards):
        fqn = config.fqn if config else name
        if choice.kind not in UPDATES:
            raise CannotCaptureError(
                f"'{name}' is moved by {choice.kind}, which has no captured form; those with one: {list(UPDATES)}"
            )
        parameters = by_name.get(fqn, [])
        group = next((groups[id(parameter)] for parameter in parameters if id(parameter) in groups), None)
        if group is None:
            raise CannotCaptureError(f"no optimizer moves '{fqn}'")
        values = [optimizer.state.get(parameter, {}) for parameter in parameters]
        # Of two, the kernel's and that of ShardedAdam on top of it, the last has the state.
        state, steps = state_tensors(values[-1])
        if len(state) != _STATES[choice.kind]:
            raise CannotCaptureError(
                f"'{fqn}' has {len(state)} tensors of {choice.kind} state, not {_STATES[choice.kind]}: run a step"
            )
        sharded = config is not None and isinstance(parameters[0], ShardedTensor)
        result.append(UpdatedParameter(name, config is not None, sharded, weight.detach(), state, steps, group, choice))
    return result


def owners(optimizer: HybridOptimizer) -> dict[str, list[Any]]:
    """Maps names in the unwrapped model to the parameters that ``optimizer`` moves; of two, the kernel's is first."""
    result: dict[str, list[Any]] = {}
    prefixes = {name for name, _ in optimizer.optimizers if name}
    for key, parameter in optimizer.params.items():
        first, _, rest = key.partition(
            "."
        )  # TorchRec puts the name of an optimizer among several before that of a parameter
        result.setdefault(rest if first in prefixes else key, []).append(parameter)
    return result


def _named(
    model: nn.Module, optimizer: HybridOptimizer, shards: list[Shard]
) -> Iterator[tuple[str, Tensor, Choice, Shard | None]]:
    for shard in shards:
        config = shard.config
        if shard.tensor.shape != (config.num_embeddings, config.embedding_dim):
            raise CannotCaptureError(
                f"table '{config.name}' is split: this rank holds {tuple(shard.tensor.shape)} of it"
            )
        if config.data_type != DataType.FP32:
            raise CannotCaptureError(
                f"table '{config.name}' is {config.data_type.value}; a captured step moves fp32 tables alone"
            )
        yield config.name, shard.tensor, optimizer.table_choices[config.name], shard
    tables = {shard.fqn for shard in shards}
    for name, parameter in get_unwrapped_module(model).named_parameters():
        if name not in tables and parameter.requires_grad:
            yield name, parameter, optimizer.layer_choices[name], None


def state_tensors(state: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the tensors of a parameter's optimizer state, in the order of its rule, and its counters of steps."""
    tensors, steps = [], []
    for name, value in state.items():
        value = value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value
        if name.split(".")[-1] == "step":
            steps.append(value if isinstance(value, Tensor) else torch.tensor(float(value)))
        elif isinstance(value, Tensor):
            tensors.append(value)
    return tensors, steps


BLOCK_ROWS = 1 << 14  # of a table that are brought up to date at once: six temporaries of so many rows


class StepMemory:
    """The tensors that a captured step reads and writes.

    Args:
        moved: parameters that the step moves, one at least, such as :func:`moved_parameters`.
        fixed: further tensors of the model by name, which no optimizer moves.
        clips: whether the norm of all gradients is limited, and the gradients of tables must be whole for it.

    Attributes:
        unsettled: steps since all rows were brought up to date.

    Raises:
        CannotCaptureError: the parameters have made different numbers of steps.
    """

    def __init__(self, moved: Sequence[UpdatedParameter], fixed: Mapping[str, Tensor], *, clips: bool = False) -> None:
        self.moved, self.fixed, self._clips = list(moved), dict(fixed), clips
        self._groups = list({id(moved.group): moved.group for moved in self.moved}.values())
        self.device = self.moved[0].weight.device
        self._step = torch.zeros((), device=self.device)
        self._rates = [torch.zeros((), device=self.device) for _ in self._groups]
        self._known_rates = [float("nan")] * len(self._groups)
        self._rows: dict[str, RowClock] = {}
        self.unsettled, self._most = 0, math.inf  # and the most before all rows must be brought up to date
        self.reload()

    @property
    def tables(self) -> dict[str, UpdatedParameter]:
        """The tables by name."""
        return {moved.name: moved for moved in self.moved if moved.table}

    @property
    def row_tables(self) -> list[str]:
        """Names of the tables that are moved row by row."""
        return list(self._rows)

    def reload(self) -> None:
        """Reads the number of steps that the optimizer has made, after eager steps in between.

        Raises:
            CannotCaptureError: the parameters have made different numbers of steps.
        """
        counts = {float(step) for moved in self.moved for step in moved.steps}
        if len(counts) > 1:
            raise CannotCaptureError(f"some parameters have made {min(counts):.0f} steps and others {max(counts):.0f}")
        self._step.fill_(max(counts, default=0.0))
        for name in self._rows:
            self._all_made(name)

    @torch.no_grad()
    def settle(self) -> None:
        """Completes deferred updates, so that model and optimizer are as after the same number of eager steps."""
        for moved in self.moved:
            for step in moved.steps:
                step.copy_(self._step)
            if moved.name in self._rows and self.unsettled:
                if lags(moved.choice):
                    self._catch_up(moved)
                self._all_made(moved.name)
        self.unsettled = 0

    def _catch_up(self, moved: UpdatedParameter) -> None:
        """Brings every row of a table up to date, a block of rows at a time."""
        clock, now = self._rows[moved.name], self._step.int()
        for start in range(0, len(clock.since), BLOCK_ROWS):
            last, rows, *state = (
                tensor[start : start + BLOCK_ROWS] for tensor in (clock.since, moved.weight, *moved.state)
            )
            new = caught_up(rows, state, last, now, clock, moved.choice)
            # One call: after an interrupt between two, the rows would be updated once more.
            torch._foreach_copy_([rows, *state, last], [*new, now.expand(len(last))])

    @torch.no_grad()
    def write_rows(self, name: str, rows: Tensor, value: Any) -> None:
        """Brings some rows of a table up to date, and writes their values as ``weight[rows] = value`` does."""
        moved = self.tables[name]
        clock, now = self._rows[name], self._step.int()
        if lags(moved.choice):
            state = [tensor[rows] for tensor in moved.state]
            new = caught_up(moved.weight[rows], state, clock.since[rows], now, clock, moved.choice)
            for target, values in zip((moved.weight, *moved.state), new, strict=True):
                target[rows] = values
        clock.since[rows] = now
        moved.weight[rows] = value

    def _all_made(self, name: str) -> None:
        """Notes that every row of a table has made the last step."""
        clock, now = self._rows[name], int(self._step)
        clock.since.fill_(now)
        for sums in (clock.slides, clock.decays):
            sums[now % len(sums)] = 0.0

    def begin(self) -> None:
        """Begins a step: sets its learning rates, and brings all rows up to date where one may lag too far behind."""
        if self.unsettled >= self._most:
            self.settle()
        for index, group in enumerate(self._groups):
            if group["lr"] != self._known_rates[index]:
                self._known_rates[index] = group["lr"]
                self._rates[index].fill_(group["lr"])
        self.unsettled += 1

    @property
    def steps_made(self) -> int:
        """Number of steps that were made."""
        return int(self._step)

    def take_back(self, steps_made: int) -> None:
        """Takes back the count of a step that ended before anything else was written."""
        self._step.fill_(steps_made)

    def choose(self, lookups: Mapping[str, int], rule: Callable[[int, int], bool]) -> None:
        """Decides how each table is moved, by how many look-ups a step makes of it."""
        for name, moved in self.tables.items():
            if self._by_row(moved, lookups[name], rule):
                self._rows[name] = row_clock(len(moved.weight), int(self._step), moved.choice, self.device)
                if lags(moved.choice):
                    self._most = min(self._most, SLIDES - 1)

    def _by_row(self, moved: UpdatedParameter, lookups: int, rule: Callable[[int, int], bool]) -> bool:
        if without_closed_form(moved.choice):
            return False
        if self._clips and not moved.sharded:
            return False  # its gradient counts for the norm, once for each row
        return rule(len(moved.weight), lookups)

    def describe(self) -> str:
        """Returns a line that says how each table is moved."""
        ways: dict[str, list[str]] = {}
        for name, moved in self.tables.items():
            reason = without_closed_form(moved.choice)
            way = "moved row by row" if name in self._rows else f"moved whole{f' ({reason})' if reason else ''}"
            ways.setdefault(way, []).append(name)
        whole_first = sorted(ways.items(), reverse=True)
        return "; ".join(f"{way}: {', '.join(names)}" for way, names in whole_first)

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors by name."""
        memory = {"step": self._step, **{f"rate {index}": rate for index, rate in enumerate(self._rates)}, **self.fixed}
        for moved in self.moved:
            memory[moved.name] = moved.weight
            memory |= {f"{moved.name}/{index}": value for index, value in enumerate(moved.state)}
            if moved.name in self._rows:
                clock = self._rows[moved.name]
                memory |= {f"{moved.name}/{name}": tensor for name, tensor in clock._asdict().items()}
        return memory

    def table(self, moved: UpdatedParameter, tensors: Mapping[str, Tensor]) -> TableRows:
        """Returns a table for one step on ``tensors``, which stand for those of :meth:`tensors`."""
        state, clock = self.state(moved, tensors), self.clock(moved, tensors)
        if moved.name not in self._rows:
            return WholeTable(tensors[moved.name], state, moved.choice, clock)
        rows = RowClock(*(tensors[f"{moved.name}/{name}"] for name in RowClock._fields))
        return RowTable(tensors[moved.name], state, rows, moved.choice, clock)

    def state(self, moved: UpdatedParameter, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns the optimizer's state of a parameter."""
        return [tensors[f"{moved.name}/{index}"] for index in range(len(moved.state))]

    def clock(self, moved: UpdatedParameter, tensors: Mapping[str, Tensor]) -> Clock:
        """Returns steps and learning rate of a parameter."""
        return Clock(
            tensors["step"], tensors[f"rate {next(index for index, g in enumerate(self._groups) if g is moved.group)}"]
        )
