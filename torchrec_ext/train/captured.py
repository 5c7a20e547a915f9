"""CapturedStep: forward, backward, optimizers and zeroing of a whole training step as one function of tensors, to be captured.

It works on the memory of the sharded model and of its optimizer, which therefore stay what they are to everybody else. Tables are
read and moved in one of two ways, by :func:`row_by_row`:

- whole: the gradient is a matrix as large as the table and the rule sweeps all of it, as torch's optimizers do;
- row by row, where few of many rows are read: only those are moved. Adam's other rows slide on meanwhile; they catch up when they
  are next read (:mod:`catch_up`), and all of them in :meth:`CapturedStep.settle`, so that the result is that of dense Adam.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from torchrec_ext.batch import DrawnStep, TowerBatch
from torchrec_ext.distributed.hybrid_optimizer import HybridOptimizer
from torchrec_ext.distributed.sweep import row_by_row
from torchrec_ext.train.catch_up import caught_up, has_closed_form, tails
from torchrec_ext.train.engines import Engine, first_line, line_of
from torchrec_ext.train.lowering import CannotCaptureError, lowered
from torchrec_ext.train.packing import Packer
from torchrec_ext.train.parameters import Moved, moved_parameters
from torchrec_ext.train.table_rows import Clock, RowTable, TableRows, WholeTable
from torchrec_ext.train.updates import stepped

MOST_GRAPHS = 4  # shapes of batches that are captured; each costs a compilation
_ROW_RULES = ("adam", "lazy_adam", "adagrad", "row_wise_adagrad", "sgd")


class CapturedStep:
    """One rank's training step, captured once for each shape of a batch.

    Args:
        model: from :func:`hybrid_parallel`, each table on this rank alone or on every rank.
        optimizer: likewise, after its first step, which makes its state.
        engine: turns the step into something faster; see :mod:`engines`.
        autocast: the context of the forward.
        rule: from (rows of a table, look-ups of a step) to whether it is moved row by row.
        take_time: called before a capture, which may take minutes.

    Raises:
        CannotCaptureError: a model or an optimizer that has no captured form.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: HybridOptimizer,
        engine: Engine,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        rule: Callable[[int, int], bool] = row_by_row,
        take_time: Callable[[], None] = lambda: None,
    ) -> None:
        self._optimizer, self._engine, self._autocast, self._rule = optimizer, engine, autocast, rule
        self._take_time = take_time
        self._reading: dict[str, TableRows] = {}
        self._model = lowered(model, lambda name, ids: self._reading[name].read(ids))
        self._moved = moved_parameters(model, optimizer)
        self._groups = list({id(moved.group): moved.group for moved in self._moved}.values())
        self._fixed = dict(self._model.named_buffers()) | {
            name: parameter.detach() for name, parameter in self._model.named_parameters() if not parameter.requires_grad
        }
        device = self._moved[0].weight.device
        self._step = torch.zeros((), device=device)
        self._rates = [torch.zeros((), device=device) for _ in self._groups]
        self._known_rates = [float("nan")] * len(self._groups)
        self._since: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self._rows_moved = False
        self._packer = Packer()
        self._calls: dict[Any, _Call] = {}
        self.reload()

    def reload(self) -> None:
        """Takes over the number of steps that the optimizer has made, where somebody else has made the last ones.

        Raises:
            CannotCaptureError: the parameters have not made as many.
        """
        counts = {float(step) for moved in self._moved for step in moved.steps}
        if len(counts) > 1:
            raise CannotCaptureError(f"some parameters have made {min(counts):.0f} steps and others {max(counts):.0f}")
        self._step.fill_(max(counts, default=0.0))
        for since, _, _ in self._since.values():
            since.fill_(int(self._step))

    @torch.no_grad()
    def settle(self) -> None:
        """Brings model and optimizer to where as many steps of their own would have brought them."""
        for moved in self._moved:
            for step in moved.steps:
                step.copy_(self._step)
            if moved.name in self._since and moved.choice.kind == "adam" and self._rows_moved:
                since, _, tail = self._since[moved.name]
                numbers: Any = {"lr": moved.group["lr"], "betas": moved.choice.betas, "eps": moved.choice.eps}
                new = caught_up(moved.weight, moved.state[0], moved.state[1], since, self._step.int(), tail, **numbers)
                for target, value in zip([moved.weight, *moved.state], new, strict=True):
                    target.copy_(value)
                since.fill_(int(self._step))
        self._rows_moved = False

    def __call__(self, item: TowerBatch | DrawnStep) -> tuple[Tensor, Any]:
        """Trains on one batch: the loss, (), and the model's output.

        Raises:
            CannotCaptureError: the engine cannot take the model, or this is one shape too many; nothing was trained then.
        """
        key, inputs, make = self._inputs(item)
        call = self._calls.get(key)
        if call is None:
            try:
                call = self._calls[key] = self._captured(inputs, item, make)
            except CannotCaptureError:
                raise
            except Exception as error:  # of a model that runs as it is, so nothing that a user did wrong
                raise CannotCaptureError(f"{type(error).__name__} at {line_of(error)}: {first_line(error)}") from error
        for at, group in enumerate(self._groups):
            if group["lr"] != self._known_rates[at]:
                self._known_rates[at] = group["lr"]
                self._rates[at].fill_(group["lr"])
        self._rows_moved = True
        loss, *output = call.run(inputs)
        return loss, pytree.tree_unflatten(output, call.spec)

    def _inputs(
        self, item: TowerBatch | DrawnStep
    ) -> tuple[Any, Sequence[Tensor], Callable[[Sequence[Tensor], Sequence[Tensor]], TowerBatch]]:
        if isinstance(item, DrawnStep):
            return tuple(part.shape for part in item.tensors), item.tensors, item.source.assemble
        layout, tensors = self._packer.pack(item)
        return layout, tensors, lambda _, parts: layout.batch(list(parts))

    def _captured(self, inputs: Sequence[Tensor], item: TowerBatch | DrawnStep, make: Any) -> _Call:
        if len(self._calls) >= MOST_GRAPHS:
            raise CannotCaptureError(f"batches of more than {MOST_GRAPHS} shapes; give them one batch_size")
        self._take_time()
        resident = item.source.tensors if isinstance(item, DrawnStep) else ()
        self._choose(lambda: make(resident, inputs))
        memory = {**self._memory(), **{f"resident {at}": tensor for at, tensor in enumerate(resident)}}
        names, count = list(memory), len(memory)

        def step(*tensors: Tensor) -> list[Tensor]:
            named = dict(zip(names, tensors, strict=False))
            loss, output = self._trained(named, lambda: make(tensors[count - len(resident) : count], tensors[count:]))
            found, call.spec = pytree.tree_flatten(output)
            return [loss, *found]

        call = _Call()
        call.run = self._engine(step, list(memory.values()), list(inputs))
        return call

    def _choose(self, make: Callable[[], TowerBatch]) -> None:
        """Decides for each table how it is moved, by what a batch reads of it; it stays so for all later shapes."""
        if self._since or self._calls:
            return
        counts = dict.fromkeys((moved.name for moved in self._moved if moved.table), 0)
        tables = {moved.name: moved for moved in self._moved if moved.table}

        def count(name: str, ids: Tensor) -> Tensor:
            counts[name] += len(ids)
            return tables[name].weight.index_select(0, ids)

        with torch.no_grad(), torch.random.fork_rng():
            fixed = {name: tensor.clone() for name, tensor in self._fixed.items()}
            self._reading = {name: _Counting(name, count) for name in tables}  # type: ignore[misc]
            functional_call(self._model, fixed, (make(),))
        for name, moved in tables.items():
            if self._moves_rows(moved, counts[name]):
                tail = tails(moved.choice.betas).to(moved.weight.device) if moved.choice.kind == "adam" else torch.zeros(1)
                since = torch.full((len(moved.weight),), int(self._step), dtype=torch.int32, device=moved.weight.device)
                self._since[name] = since, torch.zeros_like(since), tail

    def _moves_rows(self, moved: Moved, lookups: int) -> bool:
        if moved.choice.kind == "adam" and not has_closed_form(moved.choice.betas):
            return False
        if self._optimizer.clip_norm and not moved.sharded:
            return False  # its gradient counts for the norm, once for each row
        return self._rule(len(moved.weight), lookups)

    @property
    def row_tables(self) -> list[str]:
        """Names of the tables that are moved row by row; known after the first step."""
        return list(self._since)

    @property
    def shapes(self) -> int:
        """How many shapes of batches are captured."""
        return len(self._calls)

    def describe(self) -> str:
        """How each table is moved, in a line."""
        whole = [moved.name for moved in self._moved if moved.table and moved.name not in self._since]
        ways = {"moved whole": whole, "moved row by row": self.row_tables}
        return "; ".join(f"{way}: {', '.join(names)}" for way, names in ways.items() if names)

    def _memory(self) -> dict[str, Tensor]:
        """What stays from step to step, by name."""
        memory = {"step": self._step, **{f"rate {at}": rate for at, rate in enumerate(self._rates)}, **self._fixed}
        for moved in self._moved:
            memory[moved.name] = moved.weight
            memory |= {f"{moved.name}/{at}": part for at, part in enumerate(moved.state)}
            if moved.name in self._since:
                memory |= {f"{moved.name}/{part}": tensor for part, tensor in zip(_ROWS, self._since[moved.name], strict=True)}
        return memory

    def _trained(self, memory: dict[str, Tensor], make: Callable[[], TowerBatch]) -> tuple[Tensor, Any]:
        """One step on ``memory``: the loss and the model's output."""
        with torch.no_grad():
            memory["step"].add_(1)
        self._reading = {moved.name: self._table(moved, memory) for moved in self._moved if moved.table}
        dense = {moved.name: memory[moved.name].detach().requires_grad_() for moved in self._moved if not moved.table}
        with torch.enable_grad():
            with self._autocast():
                loss, output = functional_call(self._model, {**dense, **{name: memory[name] for name in self._fixed}}, (make(),))
            leaves = {**{name: [leaf] for name, leaf in dense.items()}, **{n: t.leaves() for n, t in self._reading.items()}}
            flat = torch.autograd.grad(loss, [leaf for own in leaves.values() for leaf in own], allow_unused=True)
        grads: dict[str, list[Tensor | None]] = {}
        rest = list(flat)
        for name, own in leaves.items():
            grads[name] = list(rest[: len(own)])
            rest = rest[len(own) :]
        with torch.no_grad():
            self._limit(grads)
            for moved in self._moved:
                if moved.table:
                    self._reading[moved.name].move(grads[moved.name])
                elif grads[moved.name][0] is not None:
                    self._move(moved, memory, grads[moved.name][0])
        return loss.detach(), output

    def _table(self, moved: Moved, memory: dict[str, Tensor]) -> TableRows:
        state = [memory[f"{moved.name}/{at}"] for at in range(len(moved.state))]
        if moved.name not in self._since:
            return WholeTable(memory[moved.name], state, moved.choice, self._clock(moved, memory))
        since, place, tail = (memory[f"{moved.name}/{part}"] for part in _ROWS)
        return RowTable(memory[moved.name], state, since, place, tail, moved.choice, self._clock(moved, memory))

    def _clock(self, moved: Moved, memory: dict[str, Tensor]) -> Clock:
        return Clock(memory["step"], memory[f"rate {next(at for at, g in enumerate(self._groups) if g is moved.group)}"])

    def _limit(self, grads: dict[str, list[Tensor | None]]) -> None:
        """Scales the gradients of dense layers and of tables that every rank holds, as :class:`HybridOptimizer` does."""
        limited = [moved.name for moved in self._moved if not moved.sharded]
        if not self._optimizer.clip_norm:
            return
        norm = torch.stack([grad.square().sum() for name in limited for grad in grads[name] if grad is not None]).sum().sqrt()
        factor = (self._optimizer.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for name in limited:
            grads[name] = [None if grad is None else grad * factor for grad in grads[name]]

    def _move(self, moved: Moved, memory: dict[str, Tensor], grad: Tensor | None) -> None:
        assert grad is not None
        clock, state = self._clock(moved, memory), [memory[f"{moved.name}/{at}"] for at in range(len(moved.state))]
        values, new = stepped(memory[moved.name], grad, state, clock.step, clock.lr, moved.choice, table=False)
        for target, value in zip([memory[moved.name], *state], [values, *new], strict=True):
            target.copy_(value)


_ROWS = ("since", "place", "tail")


class _Call:
    """What an engine made of the step for one shape, and how its output is put together."""

    run: Callable[[Sequence[Tensor]], list[Tensor]]
    spec: Any


@dataclass
class _Counting:
    """A table that counts its look-ups."""

    name: str
    count: Callable[[str, Tensor], Tensor]

    def read(self, ids: Tensor) -> Tensor:
        return self.count(self.name, ids)
