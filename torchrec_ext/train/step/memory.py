"""StepMemory: what stays from one captured step to the next, as named tensors: weights, state, rates, and how far each row is.

It is the memory of the sharded model and of its optimizer, which therefore stay what they are to everybody else. A table is moved
in one of two ways:

- whole: the gradient is a matrix as large as the table and the rule sweeps all of it, as torch's optimizers do;
- row by row, where few of many rows are read: only those are moved. Adam's other rows slide on meanwhile; they catch up when they
  are next read (:mod:`catch_up`), and all of them in :meth:`StepMemory.settle`, so that the result is that of dense Adam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from torchrec_ext.distributed.hybrid_optimizer import HybridOptimizer
from torchrec_ext.train.catch_up import caught_up, has_closed_form, reach, slides
from torchrec_ext.train.lowering import CannotCaptureError
from torchrec_ext.train.parameters import Moved, moved_parameters
from torchrec_ext.train.table_rows import Clock, RowTable, TableRows, WholeTable

BLOCK_ROWS = 1 << 14  # of a table that are brought up to date at once: six temporaries of so many rows
_ROWS = ("since", "place", "slides", "powers")


class StepMemory:
    """The tensors that a captured step reads and writes.

    Args:
        model: from :func:`hybrid_parallel`, each table on this rank alone or on every rank.
        optimizer: likewise, after its first step, which makes its state.
        fixed: further tensors of the model by name, which no optimizer moves.

    Raises:
        CannotCaptureError: an optimizer that has no captured form.
    """

    def __init__(self, model: nn.Module, optimizer: HybridOptimizer, fixed: Mapping[str, Tensor]) -> None:
        self.moved: list[Moved] = moved_parameters(model, optimizer)
        self.fixed = dict(fixed)
        self._clips = bool(optimizer.clip_norm)
        self._groups = list({id(moved.group): moved.group for moved in self.moved}.values())
        self.device = self.moved[0].weight.device
        self._step = torch.zeros((), device=self.device)
        self._rates = [torch.zeros((), device=self.device) for _ in self._groups]
        self._known_rates = [float("nan")] * len(self._groups)
        self._since: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._unsettled, self._most = 0, math.inf  # steps since every row was brought up to date, and before it must be again
        self.reload()

    @property
    def tables(self) -> dict[str, Moved]:
        """By name."""
        return {moved.name: moved for moved in self.moved if moved.table}

    @property
    def row_tables(self) -> list[str]:
        """Names of the tables that are moved row by row."""
        return list(self._since)

    def reload(self) -> None:
        """Takes over the number of steps that the optimizer has made, where somebody else has made the last ones.

        Raises:
            CannotCaptureError: the parameters have not made as many.
        """
        counts = {float(step) for moved in self.moved for step in moved.steps}
        if len(counts) > 1:
            raise CannotCaptureError(f"some parameters have made {min(counts):.0f} steps and others {max(counts):.0f}")
        self._step.fill_(max(counts, default=0.0))
        for name in self._since:
            self._all_made(name)

    @torch.no_grad()
    def settle(self) -> None:
        """Brings model and optimizer to where as many steps of their own would have brought them."""
        for moved in self.moved:
            for step in moved.steps:
                step.copy_(self._step)
            if moved.name in self._since and self._unsettled:
                if moved.choice.kind == "adam":
                    self._catch_up(moved)
                self._all_made(moved.name)
        self._unsettled = 0

    def _catch_up(self, moved: Moved) -> None:
        """Every row of a table, a block of rows at a time."""
        since, _, sums, _ = self._since[moved.name]
        (first, second), now = moved.state, self._step.int()
        for start in range(0, len(since), BLOCK_ROWS):
            rows, m, v, last = (part[start : start + BLOCK_ROWS] for part in (moved.weight, first, second, since))
            new = caught_up(rows, m, v, last, now, sums, betas=moved.choice.betas, eps=moved.choice.eps)
            for target, value in zip((rows, m, v), new, strict=True):
                target.copy_(value)

    def _all_made(self, name: str) -> None:
        """Every row of a table has made the last step."""
        since, _, sums, _ = self._since[name]
        now = int(self._step)
        since.fill_(now)
        sums[now % len(sums)] = 0.0

    def begin(self) -> None:
        """Before each step: the learning rates of now; every row is brought up to date where one may lag too far behind."""
        if self._unsettled >= self._most:
            self.settle()
        for at, group in enumerate(self._groups):
            if group["lr"] != self._known_rates[at]:
                self._known_rates[at] = group["lr"]
                self._rates[at].fill_(group["lr"])
        self._unsettled += 1

    def choose(self, lookups: Mapping[str, int], rule: Callable[[int, int], bool]) -> None:
        """Decides how each table is moved, by how many look-ups a step makes of it."""
        for name, moved in self.tables.items():
            if self._by_row(moved, lookups[name], rule):
                since = torch.full((len(moved.weight),), int(self._step), dtype=torch.int32, device=self.device)
                sums, powers = torch.zeros(1), torch.zeros(1)
                if moved.choice.kind == "adam":
                    sums, powers = slides(), reach(moved.choice.betas)
                    self._most = min(self._most, len(sums) - 1)
                self._since[name] = since, torch.zeros_like(since), sums.to(self.device), powers.to(self.device)

    def _by_row(self, moved: Moved, lookups: int, rule: Callable[[int, int], bool]) -> bool:
        if moved.choice.kind == "adam" and not has_closed_form(moved.choice.betas):
            return False
        if moved.choice.l2:
            return False  # it draws at every row in every step
        if self._clips and not moved.sharded:
            return False  # its gradient counts for the norm, once for each row
        return rule(len(moved.weight), lookups)

    def describe(self) -> str:
        """How each table is moved, in a line."""
        ways = {"moved whole": [name for name in self.tables if name not in self._since], "moved row by row": self.row_tables}
        return "; ".join(f"{way}: {', '.join(names)}" for way, names in ways.items() if names)

    def tensors(self) -> dict[str, Tensor]:
        """All, by name."""
        memory = {"step": self._step, **{f"rate {at}": rate for at, rate in enumerate(self._rates)}, **self.fixed}
        for moved in self.moved:
            memory[moved.name] = moved.weight
            memory |= {f"{moved.name}/{at}": part for at, part in enumerate(moved.state)}
            if moved.name in self._since:
                memory |= {f"{moved.name}/{part}": tensor for part, tensor in zip(_ROWS, self._since[moved.name], strict=True)}
        return memory

    def table(self, moved: Moved, tensors: Mapping[str, Tensor]) -> TableRows:
        """A table in one step on ``tensors``, which stand for those of :meth:`tensors`."""
        state, clock = self.state(moved, tensors), self.clock(moved, tensors)
        if moved.name not in self._since:
            return WholeTable(tensors[moved.name], state, moved.choice, clock)
        since, place, sums, powers = (tensors[f"{moved.name}/{part}"] for part in _ROWS)
        return RowTable(tensors[moved.name], state, since, place, sums, powers, moved.choice, clock)

    def state(self, moved: Moved, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The optimizer's state of a parameter."""
        return [tensors[f"{moved.name}/{at}"] for at in range(len(moved.state))]

    def clock(self, moved: Moved, tensors: Mapping[str, Tensor]) -> Clock:
        """Steps and learning rate of a parameter."""
        return Clock(tensors["step"], tensors[f"rate {next(at for at, g in enumerate(self._groups) if g is moved.group)}"])
