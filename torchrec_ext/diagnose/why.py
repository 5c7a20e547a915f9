"""why_slow: says what a training step's time goes to, and what changes to it gain: both measured on the step itself."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dis import get_instructions
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchrec_ext.adopt import AdoptedStep, CannotAdopt, adopt
from torchrec_ext.diagnose.batches import BatchSource, called_with, row_count
from torchrec_ext.diagnose.findings import (
    Facts,
)
from torchrec_ext.diagnose.loop import (
    StepFunction,
    TrainingLoop,
    steps_of_turn,
)
from torchrec_ext.diagnose.measure import measure
from torchrec_ext.diagnose.report import Compare, Diagnosis
from torchrec_ext.diagnose.variants import (
    IDLE,
)
from torchrec_ext.observe.clock import ThreadClock, busy_elsewhere
from torchrec_ext.observe.put_back import copy_mapping
from torchrec_ext.observe.reached import content_of
from torchrec_ext.observe.state_copy import StateCopy
from torchrec_ext.observe.user_lines import described

# Seconds in which others are watched before anything runs.
LISTEN_S = 0.3
_CAPTURED_S = 10.0  # seconds of the wall clock in which a captured step is measured


class _WhySlow:
    """Diagnoses slow training: its causes, what to do about them, and what each change gains, measured on the step.

    Called with a model, its optimizer, ``loss(*batch)``, which returns the mean loss or a pair with it first, and the
    batches: an iterable such as a DataLoader. :meth:`step` takes any step function instead.

    All that the step changes is put back bit for bit, see :class:`StateCopy`. The rounds take ``budget_s``
    seconds, the first four up to three times as long: without them there is no verdict. Some more are taken to count
    ops.

    Example:
        >>> import torch
        >>> model = nn.Linear(4, 1)
        >>> optimizer, batches = torch.optim.SGD(model.parameters()), [(torch.ones(8, 4), torch.ones(8, 1))] * 3
        >>> diagnosis = why_slow(model, optimizer, lambda x, y: (model(x) - y).square().mean(), batches, budget_s=1)
        >>> [trial.name for trial in diagnosis.trials if trial.name.endswith("batch")]
        ['4 times the batch']
    """

    __name__ = "why_slow"

    def __call__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loss: Callable[..., Any],
        batches: Iterable[Any],
        *,
        budget_s: float = 25.0,
        capture: bool = False,
    ) -> Diagnosis:
        """Diagnoses the usual step: zero_grad, loss, backward, step.

        Args:
            model: the model, on its device.
            optimizer: its optimizer, or several.
            loss: loss of a batch, called with the entries of a batch that is a tuple or list, else with the batch.
            batches: batches, such as a DataLoader.
            budget_s: seconds of the wall clock for the rounds; the first four may take three times as long.
            capture: also measure the step that :func:`adopt` captures, which takes 10 to 60 s more.

        Raises:
            ValueError: there is no batch, no memory for a copy of the state, or ``loss`` does not take a batch.
        """
        optimizers = _listed(optimizer)

        # With the signature of the loss, by which a batch is given whole or by entries.
        @wraps(loss, updated=())
        def step(*batch: Any) -> None:
            for each in optimizers:
                each.zero_grad()
            value = loss(*batch)
            if isinstance(value, tuple):
                value = value[0]
            value.backward()
            for each in optimizers:
                each.step()

        captured = partial(adopt, model, optimizers, loss, compile="require")
        return _diagnosed(
            step,
            batches,
            (loss, model, *optimizers),
            budget_s,
            captured if capture else None,
        )

    def step(
        self,
        fn: StepFunction,
        batches: Iterable[Any],
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        budget_s: float = 25.0,
    ) -> Diagnosis:
        """Diagnoses any step function.

        Args:
            fn: trains on a batch, of which it takes the entries, or the batch whole if it has one parameter.
            batches: batches, such as a DataLoader.
            model: the model, if it cannot be reached from ``fn`` through closures, globals and attributes.
            optimizer: its optimizers, in the same case.
            budget_s: seconds of the wall clock for the rounds; the first four may take three times as long.

        Raises:
            ValueError: there is no batch, or no memory for a copy of the state; or ``fn`` calls an adopted step.
        """
        _check_eager(fn)
        roots: list[Any] = [fn, *_listed(optimizer)]
        if model is not None:
            roots.append(model)
        return _diagnosed(fn, batches, tuple(roots), budget_s, None)


def _listed(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _check_eager(fn: StepFunction) -> None:
    """Refuses an adopted step, or a function around it: experiments hook into optimizers, and hooks end captures."""
    values: list[Any] = [fn]
    if isinstance(fn, FunctionType):
        values += map(content_of, fn.__closure__ or ())
        # Not co_names, which has attributes too: `optimizer.step()` does not call a
        # global `step`.
        for instruction in get_instructions(fn):
            if instruction.opname == "LOAD_GLOBAL":
                values.append(fn.__globals__.get(instruction.argval))
    if any(isinstance(each, AdoptedStep) for each in values):
        raise ValueError(
            "why_slow.step: this step is adopted, and experiments need the eager one; diagnose before adopt, and "
            "measure what it gained by diagnosis.realised(step)"
        )


def _diagnosed(
    fn: StepFunction,
    batches: Iterable[Any],
    roots: tuple[Any, ...],
    budget_s: float,
    captured: Callable[[], AdoptedStep] | None,
) -> Diagnosis:
    """Measures a step, and puts back what that changes.

    Args:
        fn: step function.
        batches: its batches.
        roots: objects from which all that a step changes is reached.
        budget_s: seconds of the wall clock for the rounds.
        captured: makes the captured step; None if it is not tried.
    """
    if not budget_s > 0:
        raise ValueError(f"budget_s={budget_s}: must be a number of seconds above 0")
    # A list has no position in an epoch that would have to be put back.
    loader = None if isinstance(batches, list | tuple) else batches
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"why_slow on {dist.get_world_size()} ranks: it diagnoses the step of one process; run one rank, and "
            "read `ranks_wait` of a recipe's records, or take torch.profiler"
        )
    with ExitStack() as stack:
        stack.enter_context(_threads_beside_others())
        state = StateCopy(*roots, loader=loader)
        stack.callback(state.restore)
        clock = stack.enter_context(ThreadClock())
        loop = TrainingLoop(fn, batches, state, clock)
        facts = measure(loop, budget_s)
    notes = [*facts.notes, *state.changed_data()]
    # By now the program has its own number of threads again.
    own_threads = torch.get_num_threads()
    facts = dataclasses.replace(facts, notes=notes, own_threads=own_threads)
    compare: Compare = partial(
        _compare,
        fn,
        batches,
        (*roots, loader),
    )
    if captured is not None:
        facts = _with_captured(facts, captured, state, compare)
    diagnosis = Diagnosis(facts, compare)
    loop.source.close()
    return diagnosis


@contextmanager
def _threads_beside_others() -> Iterator[None]:
    """Takes one thread meanwhile if other processes want the cores; the page says so.

    Threads that wait for a core make a step many times slower, which says nothing about the step. More threads than
    cores are the program's own.
    """
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    if 1 < threads <= cores:
        busy = busy_elsewhere()
        time.sleep(LISTEN_S)
        if cores - (busy() or 0.0) < threads - IDLE:
            torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _with_captured(
    facts: Facts,
    captured: Callable[[], AdoptedStep],
    state: StateCopy,
    compare: Callable[..., list[tuple[float, float]]],
) -> Facts:
    """Returns the facts with the turns of the captured step, if it can be captured."""
    why = ""
    turns: list[tuple[float, float]] = []
    if {"step", "loop"} & set(facts.not_measured):
        why = "the step does not run"
    else:
        # An adopted step adds hooks to the optimizers' state_dict, which StateCopy does
        # not know.
        hooks = []
        for optimizer in state.optimizers:
            for name, value in vars(optimizer).items():
                if name.endswith("_hooks") and isinstance(value, dict):
                    hooks.append(copy_mapping(value))
        threads = torch.get_num_threads()
        try:
            turns = compare(captured(), None, _CAPTURED_S)
        # The latter if batches are an iterator that ends.
        except (CannotAdopt, ValueError, StopIteration) as error:
            why = described(error)
        finally:
            state.restore()
            # The copy was made on the threads of the experiments.
            torch.set_num_threads(threads)
            for put_back in hooks:
                put_back()
    missing = dict(facts.not_measured)
    if why:
        missing["captured"] = why
    return dataclasses.replace(facts, captured=turns, not_measured=missing)


def _compare(
    fn: StepFunction,
    batches: Iterable[Any],
    roots: tuple[Any, ...],
    step: StepFunction | Iterator[Any],
    with_batches: Any,
    seconds: float,
) -> list[tuple[float, float]]:
    """Returns seconds of a row, or of an iteration if rows are not known, as it was and with the remedy, by turn.

    What is as it was is put back after each turn; the remedy's steps are real ones. Worker processes are seen by the
    wall clock alone, so if there are some it times both.
    """
    has_workers = getattr(batches, "num_workers", 0) or getattr(
        with_batches, "num_workers", 0
    )
    if with_batches is None:
        with_batches = batches
    turns: list[tuple[float, float]] = []
    with ThreadClock() as clock:
        timer = time.perf_counter if has_workers else clock
        iterations = _Iterations(step, with_batches)

        def as_it_was(count: int) -> tuple[float, float]:
            # The remedy's late updates write weights, which the old step must read as
            # they are.
            iterations.settle()
            state = StateCopy(*roots)
            try:
                before = _Iterations(fn, batches)
                before.warm_up(timer)
                return before.run(count, timer)
            finally:
                state.restore()

        # A captured step takes two eager steps before its capture, which may take a
        # minute: none of them is timed.
        iterations.run(3, timer)
        new, _ = iterations.run(3, timer)
        old, _ = as_it_was(3)
        new_count = steps_of_turn(new)
        old_count = steps_of_turn(old)
        end = time.perf_counter() + seconds
        while len(turns) < 5 or (time.perf_counter() < end and len(turns) < 15):
            old, old_rows = as_it_was(old_count)
            iterations.warm_up(timer)
            new, new_rows = iterations.run(new_count, timer)
            if old_rows and new_rows:
                # A remedy may change the batch size: then only seconds of a row can be
                # compared.
                turns.append((old / old_rows, new / new_rows))
            else:
                turns.append((old, new))
        iterations.settle()
    return turns


class _Iterations:
    """Iterations of a training loop, each a batch and its step.

    Args:
        step: a step function; or an iterator, of which each entry is an iteration.
        batches: batches of the step function.
    """

    def __init__(
        self, step: StepFunction | Iterator[Any], batches: Iterable[Any]
    ) -> None:
        # An adopted step has late updates to complete, other steps have none.
        self.settle: Callable[[], object] = getattr(step, "settle", lambda: None)
        self._iterator: Iterator[Any] | None = None
        self._ahead = (getattr(batches, "num_workers", 0) or 0) * (
            getattr(batches, "prefetch_factor", 0) or 0
        )
        if isinstance(step, Iterator):
            self._iterator = step
        else:
            self._source = BatchSource(batches)
            self._call = called_with(step, self._source.first)

    def warm_up(self, timer: Callable[[], float]) -> None:
        """Runs an iteration to warm up memory and threads, and uses up the prefetched batches of workers."""
        self.run(1 + self._ahead, timer)

    def run(self, count: int, timer: Callable[[], float]) -> tuple[float, float]:
        """Returns the mean seconds of so many iterations, and the mean of their rows; 0 if unknown."""
        if self._iterator is not None:
            start = timer()
            for _ in range(count):
                next(self._iterator)
            return (timer() - start) / count, 0
        spent = 0.0
        rows = 0
        for _ in range(count):
            batch, seconds, _ = self._source.take(timer)
            start = timer()
            self._call(batch)
            spent += seconds + timer() - start
            rows += row_count(batch)
        return spent / count, rows / count


why_slow = _WhySlow()
