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
from torchrec_ext.diagnose.batches import row_count
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
    seconds, or what four of them take: without them there is no verdict. Some more are taken to count ops.

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
            loss: loss of a batch, called with the entries of a tuple or list if it takes so many, else with the batch.
            batches: batches, such as a DataLoader.
            budget_s: seconds of the wall clock for the rounds, of which there are four at least.
            capture: also measure the step that :func:`adopt` captures, which takes 10 to 60 s more.

        Raises:
            ValueError: there is no batch, or no memory for a copy of the state.
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
            fn: trains on a batch, called with the entries of a tuple or list if it takes so many, else with the batch.
            batches: batches, such as a DataLoader.
            model: the model, if it cannot be reached from ``fn`` through closures, globals and attributes.
            optimizer: its optimizers, in the same case.
            budget_s: seconds of the wall clock for the rounds, of which there are four at least.

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
    """Measures a step, and restores the state from before it.

    Args:
        fn: step function.
        batches: its batches.
        roots: objects from which all that a step changes is reached.
        budget_s: seconds of the wall clock for the rounds.
        captured: makes the captured step; None if it is not tried.
    """
    if not budget_s > 0:
        raise ValueError(f"budget_s={budget_s}: must be a number of seconds above 0")
    if torch.is_anomaly_enabled():
        raise ValueError(
            "why_slow: anomaly mode is on, and makes each op several times as slow; call "
            "torch.autograd.set_detect_anomaly(False), and ask again"
        )
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
        loop = TrainingLoop(fn, batches, state.modules, clock, state.restore_step)
        loop.notes[:0] = filter(None, [clock.note, *dict.fromkeys(state.notes)])
        facts = measure(loop, state, budget_s)
    # By now the program has its own number of threads again.
    facts = dataclasses.replace(facts, own_threads=torch.get_num_threads())
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
        threads = torch.get_num_threads()
        try:
            turns = compare(captured(), None, _CAPTURED_S)
        except (CannotAdopt, ValueError) as error:
            why = described(error)
        finally:
            state.restore()
            # The copy was made on the threads of the experiments.
            torch.set_num_threads(threads)
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
    if with_batches is None:
        with_batches = batches
    # An adopted step has late updates to complete, other steps have none.
    settle: Callable[[], object] = getattr(step, "settle", lambda: None)
    call: StepFunction
    if isinstance(step, Iterator):
        iterator = step
        call = lambda: next(iterator)  # noqa: E731
        with_batches = [()]
    else:
        call = step
    # Of these a worker has some ready before it must be waited for.
    ahead = 0
    for each in (batches, with_batches):
        workers = getattr(each, "num_workers", 0)
        ahead = max(ahead, workers * (getattr(each, "prefetch_factor", 0) or 0))
    turns: list[tuple[float, float]] = []
    with ThreadClock() as clock:
        timer = time.perf_counter if ahead else clock
        new = TrainingLoop(call, with_batches, StateCopy(*roots).modules, timer)

        def as_it_was(count: int) -> tuple[float, float]:
            # The remedy's late updates write weights, which the old step must read as
            # they are.
            settle()
            state = StateCopy(*roots)
            try:
                old = TrainingLoop(fn, batches, state.modules, timer)
                _mean_iteration(old, 1 + ahead)
                return _mean_iteration(old, count)
            finally:
                state.restore()

        # A captured step takes two eager steps before its capture, which may take a
        # minute: none of them is timed.
        _mean_iteration(new, 3)
        new_count = steps_of_turn(_mean_iteration(new, 3)[0])
        old_count = steps_of_turn(as_it_was(3)[0])
        end = time.perf_counter() + seconds
        while len(turns) < 5 or (time.perf_counter() < end and len(turns) < 15):
            old_s, old_rows = as_it_was(old_count)
            _mean_iteration(new, 1 + ahead)
            new_s, new_rows = _mean_iteration(new, new_count)
            if old_rows and new_rows:
                # A remedy may change the batch size: then only seconds of a row can be
                # compared.
                turns.append((old_s / old_rows, new_s / new_rows))
            else:
                turns.append((old_s, new_s))
        settle()
    return turns


def _mean_iteration(loop: TrainingLoop, count: int) -> tuple[float, float]:
    """Returns the mean seconds of so many iterations, and the mean of their rows; 0 if unknown."""
    seconds = 0.0
    rows = 0
    for _ in range(count):
        parts = loop.iterate()
        seconds += parts["data"] + parts["step"]
        rows += row_count(loop.pool[-1])
    return seconds / count, rows / count


why_slow = _WhySlow()
