"""why_slow: says what a training step's time goes to, what will help and what will not."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dis import get_instructions
from functools import partial, wraps
from itertools import chain
from types import FunctionType
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from torchrec_ext.adopt import AdoptedStep, adopt
from torchrec_ext.diagnose.experiments.batches import (
    BatchSource,
    called_with,
    loader_with,
    row_count,
)
from torchrec_ext.diagnose.experiments.collectives import Ranks, agreed
from torchrec_ext.diagnose.experiments.loop import (
    StepFunction,
    TrainingLoop,
    steps_of_turn,
)
from torchrec_ext.diagnose.experiments.measure import Experiments
from torchrec_ext.diagnose.findings import Action, Remedy
from torchrec_ext.diagnose.report import Diagnosis, apply_in_turn
from torchrec_ext.observe.clock import ThreadClock
from torchrec_ext.observe.files import FilesWritten
from torchrec_ext.observe.put_back import copy_mapping
from torchrec_ext.observe.reached import content_of
from torchrec_ext.observe.state_copy import StateCopy

_PROOF_S = 10.0  # seconds of the wall clock in which a remedy is measured
_Loss = Callable[..., Any]


class _WhySlow:
    """Diagnoses slow training: its causes, remedies and their gains, all measured on the step itself.

    Called with a model, its optimizer, ``loss(*batch)``, which returns the mean loss or a pair with it first, and the
    batches: an iterable such as a DataLoader. :meth:`step` takes any step function instead.

    On several ranks each of them calls it, in the same place; they measure together, and rank 0's page is that of all.

    All that the step changes is put back bit for bit, see :class:`StateCopy`. The rounds take ``budget_s``
    seconds, the first four up to three times as long: without them there is no verdict. Some more are taken to count
    ops and to try a worker.

    Example:
        >>> import torch
        >>> model = nn.Linear(4, 1)
        >>> optimizer, batches = torch.optim.SGD(model.parameters()), [(torch.ones(8, 4), torch.ones(8, 1))] * 3
        >>> diagnosis = why_slow(model, optimizer, lambda x, y: (model(x) - y).square().mean(), batches, budget_s=1)
        >>> [answer.name for answer in diagnosis.answers][:2]
        ['loader workers', 'other thread numbers']
    """

    __name__ = "why_slow"

    def __call__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loss: _Loss,
        batches: Iterable[Any],
        *,
        budget_s: float = 25.0,
        between: Mapping[str, tuple[Callable[[], object], int]] | None = None,
        apply: bool = False,
    ) -> Diagnosis:
        """Diagnoses the usual step: zero_grad, loss, backward, step.

        Args:
            model: the model, on its device.
            optimizer: its optimizer, or several.
            loss: loss of a batch, called with the entries of a batch that is a tuple or list, else with the batch.
            batches: batches, such as a DataLoader.
            budget_s: seconds of the wall clock for the rounds; the first four may take three times as long.
            between: what else runs between steps, by name: a function, and the number of steps from a call to the next.
            apply: apply the remedies that keep the mathematics and need nobody to write them, one after the other, and
                measure what they gain, see :attr:`Diagnosis.proof`; what they train is put back too. They are
                other thread numbers, a worker, and :func:`adopt`.

        Raises:
            ValueError: there is no batch, or no memory for a copy of the state, on this rank or another one.
        """
        optimizers = _listed(optimizer)

        def step(*batch: Any) -> None:
            for each in optimizers:
                each.zero_grad()
            value = loss(*batch)
            if isinstance(value, tuple):
                value = value[0]
            value.backward()
            for each in optimizers:
                each.step()

        request = _Request(
            roots=(loss, model, *optimizers),
            budget_s=budget_s,
            between=dict(between or {}),
        )
        adopted = partial(adopt, model, optimizers, loss, compile="require")
        return request.run(step, batches, apply, adopted)

    def step(
        self,
        fn: StepFunction,
        batches: Iterable[Any],
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        budget_s: float = 25.0,
        between: Mapping[str, tuple[Callable[[], object], int]] | None = None,
        apply: bool = False,
    ) -> Diagnosis:
        """Diagnoses any step function.

        Args:
            fn: trains on a batch, of which it takes the entries, or the batch whole if it has one parameter.
            batches: batches, such as a DataLoader.
            model: the model, if it cannot be reached from ``fn`` through closures, globals and attributes.
            optimizer: its optimizers, in the same case.
            budget_s: seconds of the wall clock for the rounds; the first four may take three times as long.
            between: what else runs between steps, by name: a function, and the number of steps from a call to the next.
            apply: apply the remedies that keep the mathematics and need nobody to write them, one after the other, and
                measure what they gain, see :attr:`Diagnosis.proof`; what they train is put back too. They are
                other thread numbers and a worker.

        Raises:
            ValueError: there is no batch, or no memory for a copy of the state, on this rank or another one; or ``fn``
                calls an adopted step.
        """
        _check_eager(fn)
        roots: list[Any] = [fn]
        if model is not None:
            roots.append(model)
        roots += _listed(optimizer)
        request = _Request(
            roots=tuple(roots), budget_s=budget_s, between=dict(between or {})
        )
        return request.run(fn, batches, apply)


def _listed(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """A user's request for a diagnosis.

    Args:
        roots: objects from which all that a step changes is reached.
        budget_s: seconds of the wall clock for the rounds; the first four may take three times as long.
        between: what else runs between steps, by name: a function, and the number of steps from a call to the next.
    """

    roots: tuple[Any, ...]
    budget_s: float
    between: Mapping[str, tuple[Callable[[], object], int]]

    def run(
        self,
        fn: StepFunction,
        batches: Iterable[Any],
        apply: bool,
        adopted: Callable[[], AdoptedStep] | None = None,
    ) -> Diagnosis:
        """Diagnoses a step, and applies remedies on request; ``adopted`` makes the captured step."""
        if apply and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"apply=True on {dist.get_world_size()} ranks: it changes one process alone; leave it "
                "out, or run one rank"
            )
        diagnosis = self.diagnose(fn, batches)
        # An iterator's batches are used up by the diagnosis, and a step that fails has
        # nothing to gain.
        if (
            apply
            and diagnosis.verdict not in ("step failed", "loop failed")
            and not isinstance(batches, Iterator)
        ):
            # Gains are predicted of iterations with what runs between steps, so the
            # proof has it too.
            between_s = diagnosis.facts.mean_between()
            state = StateCopy(*self.roots, batches)
            # An adopted step adds hooks to the optimizers' state_dict, which StateCopy
            # does not know.
            hooks = list(
                map(copy_mapping, chain.from_iterable(map(_hooks, state.optimizers)))
            )
            try:
                apply_in_turn(
                    diagnosis,
                    (fn, batches),
                    partial(_with_remedy, adopted=adopted),
                    lambda before, after: _compare(
                        *before, self.roots, *after, _PROOF_S, between_s
                    ),
                    lambda training: self.diagnose(*training),
                )
            finally:
                state.restore()
                for put_back in hooks:
                    put_back()
        return diagnosis

    def diagnose(self, fn: StepFunction, batches: Iterable[Any]) -> Diagnosis:
        """Diagnoses a step, on all ranks together if there are several."""
        ranks = Ranks() if dist.is_initialized() and dist.get_world_size() > 1 else None
        try:
            roots = (*self.roots, *(function for function, _ in self.between.values()))
            # A list has no position in an epoch that would have to be put back.
            loader = None if isinstance(batches, list | tuple) else batches
            # Each stretch in which one rank alone may fail ends by agreement, so that
            # the others do not wait for it.
            with agreed(ranks):
                _check(self.budget_s, self.between)
                state = StateCopy(*roots, loader=loader)
            files = FilesWritten()
            try:
                with ThreadClock() as clock, files:
                    with agreed(ranks):
                        loop = TrainingLoop(fn, batches, state, clock)
                        experiments = Experiments(loop, self.budget_s, ranks)
                    facts = experiments.facts(self.between)
            finally:
                state.restore()
            # torch.save opens its file in C++, of which Python's audit hook hears
            # nothing.
            files.paths |= experiments.saved_files
            notes = [*facts.notes]
            if note := files.note():
                notes.append(note)
            facts = dataclasses.replace(facts, notes=[*notes, *state.changed_data()])
            if ranks is None:
                compare = partial(
                    _compare,
                    fn,
                    loop.source.again(),
                    (*roots, loader),
                    between_s=facts.mean_between(),
                )
                diagnosis = Diagnosis(facts, compare)
            else:
                diagnosis = Diagnosis(facts, _not_on_ranks, ranks.rank)
            diagnosis.batches = loop.source.handed_back()
            loop.source.close()
            return diagnosis
        finally:
            if ranks is not None:
                ranks.close()


def _hooks(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """Returns the hooks of an optimizer."""
    return [
        value
        for name, value in vars(optimizer).items()
        if name.endswith("_hooks") and isinstance(value, dict)
    ]


def _with_remedy(
    training: tuple[StepFunction, Iterable[Any]],
    remedy: Remedy,
    adopted: Callable[[], AdoptedStep] | None,
) -> tuple[tuple[StepFunction, Iterable[Any]], str] | None:
    """Returns a step and its batches with a remedy, and its lines; None if a person must write it."""
    fn, batches = training
    lines = "\n".join(remedy.lines)
    if remedy.action is Action.THREADS:
        return (_on_threads(fn, remedy.count), batches), remedy.lines[0]
    if remedy.action is Action.WORKERS and isinstance(batches, DataLoader):
        return (
            fn,
            loader_with(batches, num_workers=remedy.count, prefetch_factor=2),
        ), lines
    if remedy.action is Action.CAPTURE and adopted is not None:
        return (adopted(), batches), lines
    return None


def _on_threads(fn: StepFunction, threads: int) -> StepFunction:
    @wraps(fn)
    def step(*batch: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return fn(*batch)
        finally:
            torch.set_num_threads(before)

    return step


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


def _check(
    budget_s: float, between: Mapping[str, tuple[Callable[[], object], int]]
) -> None:
    if not budget_s > 0:
        raise ValueError(f"budget_s={budget_s}: must be a number of seconds above 0")
    for name, (_, steps) in between.items():
        if steps < 1:
            raise ValueError(
                f"between[{name!r}]: steps={steps} from a call to the next; must be at least 1"
            )


def _not_on_ranks(*_: Any) -> list[tuple[float, float]]:
    raise ValueError(
        "realised: turns of two steps are not taken on several ranks; diagnose again with the remedy in place, and "
        "compare the iterations of both pages"
    )


def _compare(
    fn: StepFunction,
    batches: Iterable[Any],
    roots: tuple[Any, ...],
    step: StepFunction | Iterator[Any],
    with_batches: Any,
    seconds: float,
    between_s: float = 0.0,
) -> list[tuple[float, float]]:
    """Returns seconds of a row, or of an iteration if rows are not known, as it was and with the remedy, by turn.

    What is as it was is put back after each turn; the remedy's steps are real ones. Worker processes are seen by the
    wall clock alone, so if there are some it times both. ``between_s`` is what runs between steps, seconds of one:
    both have it for as many rows.
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
                turns.append(
                    (
                        (old + between_s) / old_rows,
                        new / new_rows + between_s / old_rows,
                    )
                )
            else:
                turns.append((old + between_s, new + between_s))
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
