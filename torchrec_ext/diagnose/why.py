"""why_slow: says what a training step's time goes to, and what changes to it gain: both measured on the step itself."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dis import get_instructions
from functools import partial
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
    Between,
    Facts,
    LineFacts,
    LoaderFacts,
    RankWaits,
    Round,
    in_ms,
)
from torchrec_ext.diagnose.loop import (
    StepFunction,
    TrainingLoop,
    Variant,
    attempt,
    data_alone,
    in_rounds,
    sampled,
    steps_of_turn,
    warm_up,
)
from torchrec_ext.diagnose.ops import Counted, OpsOfLine, count_ops
from torchrec_ext.diagnose.report import Compare, Diagnosis
from torchrec_ext.diagnose.variants import (
    IDLE,
    SmallTables,
    variants,
    why_no_worker,
    worker_turns,
)
from torchrec_ext.observe.clock import ThreadClock, busy_elsewhere
from torchrec_ext.observe.files import FilesWritten
from torchrec_ext.observe.machine import compiled_graphs, device_spans, device_use
from torchrec_ext.observe.put_back import copy_mapping
from torchrec_ext.observe.reached import content_of
from torchrec_ext.observe.state_copy import StateCopy
from torchrec_ext.observe.user_lines import described

# Seconds in which others are watched before anything runs.
LISTEN_S = 0.3
# Seconds of the loop in which it is sampled at which lines it is: 500 samples.
SAMPLE_S = 1.5
_CAPTURED_S = 10.0  # seconds of the wall clock in which a captured step is measured
# A table is small with so many rows for each id that a step reads, and is made so for
# the experiment.
_SMALL_TABLE = 5
# Times the usual batch, and seconds, from which on the longest one is named.
_BURST, _BURST_S = (10, 0.05)
_LINES = 20  # that are kept
_RANK_STEPS = 16  # iterations of several ranks
_Between = Mapping[str, tuple[Callable[[], object], int]]


class _WhySlow:
    """Diagnoses slow training: its causes, what to do about them, and what each change gains, measured on the step.

    Called with a model, its optimizer, ``loss(*batch)``, which returns the mean loss or a pair with it first, and the
    batches: an iterable such as a DataLoader. :meth:`step` takes any step function instead.

    Several ranks call it in the same place. It then runs their own loop, and says from its waits whether they wait for
    one of them.

    All that the step changes is put back bit for bit, see :class:`StateCopy`. The rounds take ``budget_s``
    seconds, the first four up to three times as long: without them there is no verdict. Some more are taken to count
    ops and to try a worker.

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
        between: _Between | None = None,
        capture: bool = False,
    ) -> Diagnosis:
        """Diagnoses the usual step: zero_grad, loss, backward, step.

        Args:
            model: the model, on its device.
            optimizer: its optimizer, or several.
            loss: loss of a batch, called with the entries of a batch that is a tuple or list, else with the batch.
            batches: batches, such as a DataLoader.
            budget_s: seconds of the wall clock for the rounds; the first four may take three times as long.
            between: what else runs between steps, by name: a function, and the number of steps from a call to the next.
            capture: also measure the step that :func:`adopt` captures, which takes 10 to 60 s more.

        Raises:
            ValueError: there is no batch, or no memory for a copy of the state.
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

        captured = partial(adopt, model, optimizers, loss, compile="require")
        return _diagnosed(
            step,
            batches,
            (loss, model, *optimizers),
            budget_s,
            between or {},
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
        between: _Between | None = None,
    ) -> Diagnosis:
        """Diagnoses any step function.

        Args:
            fn: trains on a batch, of which it takes the entries, or the batch whole if it has one parameter.
            batches: batches, such as a DataLoader.
            model: the model, if it cannot be reached from ``fn`` through closures, globals and attributes.
            optimizer: its optimizers, in the same case.
            budget_s: seconds of the wall clock for the rounds; the first four may take three times as long.
            between: what else runs between steps, by name: a function, and the number of steps from a call to the next.

        Raises:
            ValueError: there is no batch, or no memory for a copy of the state; or ``fn`` calls an adopted step.
        """
        _check_eager(fn)
        roots: list[Any] = [fn, *_listed(optimizer)]
        if model is not None:
            roots.append(model)
        return _diagnosed(fn, batches, tuple(roots), budget_s, between or {}, None)


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
    between: _Between,
    captured: Callable[[], AdoptedStep] | None,
) -> Diagnosis:
    """Measures a step, and puts back what that changes.

    Args:
        fn: step function.
        batches: its batches.
        roots: objects from which all that a step changes is reached.
        budget_s: seconds of the wall clock for the rounds.
        between: what else runs between steps.
        captured: makes the captured step; None if it is not tried.
    """
    if not budget_s > 0:
        raise ValueError(f"budget_s={budget_s}: must be a number of seconds above 0")
    for name, (_, steps) in between.items():
        if steps < 1:
            raise ValueError(
                f"between[{name!r}]: steps={steps} from a call to the next; must be at least 1"
            )
    roots = (*roots, *(function for function, _ in between.values()))
    # A list has no position in an epoch that would have to be put back.
    loader = None if isinstance(batches, list | tuple) else batches
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if captured is not None and num_ranks > 1:
        raise ValueError(
            f"capture=True on {num_ranks} ranks: adopt captures the step of one process; leave it out, or run one rank"
        )
    files = FilesWritten()
    with ExitStack() as stack:
        note = stack.enter_context(_threads_beside_others()) if num_ranks == 1 else ""
        state = StateCopy(*roots, loader=loader)
        stack.callback(state.restore)
        clock = stack.enter_context(ThreadClock())
        stack.enter_context(files)
        loop = TrainingLoop(fn, batches, state, clock)
        loop.notes += filter(None, [note])
        if num_ranks > 1:
            facts = Facts(ranks=_rank_waits(loop), notes=loop.notes)
        else:
            facts = _measure(loop, budget_s, between, files)
    notes = [*facts.notes, *filter(None, [files.note()]), *state.changed_data()]
    facts = dataclasses.replace(facts, notes=notes)
    compare: Compare | None = partial(
        _compare,
        fn,
        loop.source.again(),
        (*roots, loader),
        between_s=facts.mean_between(),
    )
    if captured is not None and compare is not None:
        facts = _with_captured(facts, captured, state, compare)
    if num_ranks > 1:
        compare = None
    rank = dist.get_rank() if num_ranks > 1 else 0
    diagnosis = Diagnosis(facts, compare, rank)
    diagnosis.batches = loop.source.handed_back()
    loop.source.close()
    return diagnosis


@contextmanager
def _threads_beside_others() -> Iterator[str]:
    """Takes one thread meanwhile if other processes want the cores, and yields a note that says so.

    Threads that wait for a core make a step many times slower, which says nothing about the step. More threads than
    cores are the program's own.
    """
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    if not 1 < threads <= cores:
        yield ""
        return
    busy = busy_elsewhere()
    time.sleep(LISTEN_S)
    others = busy() or 0.0
    if cores - others >= threads - IDLE:
        yield ""
        return
    torch.set_num_threads(1)
    try:
        yield (
            f"others keep {others:.1f} of {cores} cores busy, so all was measured on 1 thread, not on {threads}; ask "
            "again on an idle machine for other numbers of threads"
        )
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
        except CannotAdopt as error:
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


def _rank_waits(loop: TrainingLoop) -> list[RankWaits]:
    """Runs the ranks' own loop, and returns the waits of each."""
    if loop.cuda:
        raise ValueError(
            "why_slow on several ranks with CUDA: kernels wait there, and no thread; use torch.profiler on each rank"
        )
    loop.iterate()
    loop.iterate()
    data = []
    blocked = []
    computed = []
    for _ in range(_RANK_STEPS):
        cpu_s = time.thread_time()
        parts = loop.iterate()
        # What the thread computed in a batch is that batch's.
        cpu_s = time.thread_time() - cpu_s - (parts["data"] - parts["sleep"])
        compute_s = min(parts["step"], max(0.0, cpu_s))
        data.append(parts["data"])
        computed.append(compute_s)
        blocked.append(parts["step"] - compute_s)
    own = RankWaits(
        rank=dist.get_rank(),
        data_s=statistics.median(data),
        blocked_s=statistics.median(blocked),
        compute_s=statistics.median(computed),
    )
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


# ------------------------------------------------------------------------- experiments


def _measure(
    loop: TrainingLoop, budget_s: float, between: _Between, files: FilesWritten
) -> Facts:
    """Makes all experiments of one process."""
    began = time.perf_counter()
    busy_cores = busy_elsewhere()
    busy: float | None = None
    if not loop.state.optimizers:
        loop.notes.append(
            "no optimizer can be reached from the step, so what it changes is not put back; pass model= and "
            "optimizer="
        )
    counted = Counted()
    rounds: Sequence[Round] = []
    lines: Sequence[LineFacts] = ()
    sampled_s = 0.0
    tables: list[tuple[Any, Any]] = []
    moved = _parameters_of(loop.state.optimizers)
    numbers = sum(each.size().numel() for each in moved.values())

    def changes(step_s: float) -> Iterator[Variant]:
        nonlocal busy
        busy = busy_cores()
        small = None
        if tables:
            reads = [(module, table.read) for table, module in tables]
            small = SmallTables(loop.state, reads, _SMALL_TABLE)
        yield from variants(loop, counted, small, step_s, busy)

    if warm_up(loop):
        counted = _counted(loop)
        for table, module in counted.tables(loop.state.modules):
            if module.sparse:
                # Neither the optimizer nor its traffic touches the other rows.
                numbers -= max(0, table.rows - table.read) * table.dim
            elif table.rows > _SMALL_TABLE * table.read and id(module.weight) in moved:
                tables.append((table, module))
        graphs = compiled_graphs()
        rounds = in_rounds(loop, changes, budget_s)
        graphs = compiled_graphs() - graphs
        if graphs:
            loop.notes.append(
                f"torch.compile made {graphs} graphs during steps whose batches have one shape; drop_last=True and "
                "dynamic=True keep it from that"
            )
        lines, sampled_s = _sample_lines(loop, counted, files)
    else:
        rounds = data_alone(loop, budget_s)
    loop.notes += _burst_notes(loop.source.seconds, rounds)
    worker = _time_worker(loop, rounds)
    runs = _time_between(loop, between)
    kernels, device_busy = _watch_device(loop, rounds)
    facts = Facts(
        rounds=rounds,
        worker=worker,
        rows=row_count(loop.pool[0]) if loop.pool else 0,
        ops=counted.ops,
        bare_ops=counted.bare,
        op_lines=counted.lines.most_common(5),
        syncs=sum(counted.syncs.values()),
        sync_lines=counted.syncs.most_common(5),
        sync_ops=sum(ops.feeding for ops in counted.by_line.values()),
        lines=lines,
        sampled_s=sampled_s,
        modes=sorted(counted.modes),
        autocast_line=counted.autocast_line,
        tables=[table for table, _ in tables],
        parameters=numbers,
        optimizers=[type(each).__name__ for each in loop.state.optimizers],
        loader=_loader_facts(loop),
        kernels=kernels,
        device_busy=device_busy,
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)),
        busy=busy if busy is not None else busy_cores(),
        between=runs,
        seconds=time.perf_counter() - began,
        not_measured=loop.not_measured,
        notes=loop.notes,
    )
    # On a GPU an op returns before its kernel runs, so its seconds say nothing.
    return facts if loop.cuda else _with_seconds_of_ops(facts, loop, counted)


def _counted(loop: TrainingLoop) -> Counted:
    """Counts the ops of a step; none if it cannot be counted."""
    counted = Counted()

    def count() -> Round:
        nonlocal counted
        counted = count_ops(lambda: loop.call(loop.several(1)[0]), loop.state.modules)
        return {}

    attempt(loop, Variant("ops", count))
    return counted


def _factor(facts: Facts, counted: Counted) -> float:
    """Returns what makes the seconds of all ops no longer than a step: others may have run while they were timed."""
    if not counted.seconds or not facts.has("step"):
        return 1.0
    return min(1.0, facts.median("step") / counted.seconds)


def _with_seconds_of_ops(facts: Facts, loop: TrainingLoop, counted: Counted) -> Facts:
    factor = _factor(facts, counted)
    rows = set()
    for module in loop.state.modules:
        rows |= {each.shape[0] for each in module.parameters() if each.dim() > 1}
    double = counted.sizes.double
    return dataclasses.replace(
        facts,
        op_s=factor * counted.seconds,
        work_s=factor * counted.sizes.work(),
        product_s=factor * counted.product_s,
        whole_tables=counted.sizes.whole_tables(rows, factor),
        all_items=counted.sizes.all_items(factor),
        double_s=factor * sum(double.values()),
        double_line=max(double, key=double.__getitem__, default=""),
        lines=[
            dataclasses.replace(line, op_s=factor * line.op_s) for line in facts.lines
        ],
    )


def _sample_lines(
    loop: TrainingLoop, counted: Counted, files: FilesWritten
) -> tuple[Sequence[LineFacts], float]:
    """Returns the user's lines with the most time, and the seconds of an iteration."""
    missing = loop.not_measured
    if loop.cuda or loop.compiled:
        missing["lines"] = "sampled only for eager steps on a CPU, whose ops are timed"
        return (), 0.0
    if not SAMPLE_S or "step" in missing or "loop" in missing:
        return (), 0.0
    lines: list[LineFacts] = []
    seconds = 0.0

    def sample() -> Round:
        nonlocal seconds
        samples, iterations = sampled(loop, SAMPLE_S)
        # torch.save opens its file in C++, of which Python's audit hook hears nothing.
        files.paths |= samples.saved
        seconds = sum(samples.seconds.values()) / iterations
        for (phase, line), spent in samples.seconds.items():
            # A line without a text is none of the user's, such as that of garbage
            # collections.
            if line.text:
                ops = counted.by_line.get(line, OpsOfLine())
                of_line = LineFacts(
                    name=line.name,
                    text=line.text,
                    phase=phase,
                    seconds=spent / iterations,
                    ops=ops.ops,
                    op_s=ops.seconds,
                    sync_ops=ops.feeding,
                )
                lines.append(of_line)
        return {}

    attempt(loop, Variant("lines", sample))
    lines.sort(key=lambda each: -each.seconds)
    return lines[:_LINES], seconds


def _watch_device(
    loop: TrainingLoop, rounds: Sequence[Round]
) -> tuple[int, float | None]:
    """Returns the number of kernels of a step on a CUDA device, and their share of its time."""
    if not loop.cuda or not rounds or "step" in loop.not_measured:
        return 0, None
    batches = loop.steps(least=4)
    try:
        spans = device_spans(lambda: [loop.call(batch) for batch in batches])
    except Exception as error:
        loop.not_measured["device"] = described(error)
        return 0, None
    if not spans:
        loop.not_measured["device"] = (
            "torch.profiler saw no kernel; it needs permission for the GPU's counters"
        )
        return 0, None
    return round(len(spans) / len(batches)), device_use(spans)


def _time_worker(
    loop: TrainingLoop, rounds: Sequence[Round]
) -> Sequence[tuple[float, float]]:
    """Times a real worker by turns with the loader as it is."""
    if why := why_no_worker(loop, rounds):
        loop.not_measured["worker"] = why
        return ()
    loader: Any = loop.source.batches
    turns: list[tuple[float, float]] = []

    def measure() -> Round:
        turns.extend(worker_turns(loader, loop.call))
        return {}

    attempt(loop, Variant("worker", measure))
    return turns


def _time_between(loop: TrainingLoop, between: _Between) -> Sequence[Between]:
    """Times the calls between steps once."""
    runs: list[Between] = []
    for name, (function, steps) in between.items():
        start = loop.clock()
        try:
            function()
        except Exception as error:
            loop.not_measured[name] = described(error)
            continue
        runs.append(Between(name=name, seconds=loop.clock() - start, steps=steps))
    return runs


def _loader_facts(loop: TrainingLoop) -> LoaderFacts:
    try:
        return loop.source.facts(loop.clock.host)
    except Exception as error:
        loop.not_measured["rows"] = described(error)
        return LoaderFacts(kind=loop.source.kind)


def _parameters_of(optimizers: Sequence[Optimizer]) -> dict[int, Any]:
    """Returns the parameters of all optimizers by id."""
    parameters: dict[int, Any] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters |= {id(parameter): parameter for parameter in group["params"]}
    return parameters


def _burst_notes(seconds: Sequence[float], rounds: Sequence[Round]) -> list[str]:
    """Notes a batch that took many times the usual one: a loader that reads ahead also fills up between rounds."""
    usual = statistics.median([each.get("data", 0.0) for each in rounds] or [0.0])
    longest = max(seconds, default=0.0)
    if longest <= max(_BURST * usual, _BURST_S):
        return []
    return [
        f"the longest of {len(seconds):,} batches took {in_ms(longest)}, their mean is "
        f"{in_ms(statistics.fmean(seconds))}: the loader works in bursts, of which rounds see a part; "
        "time a whole epoch too"
    ]


# ---------------------------------------------------------------------------- realised


def _compare(
    fn: StepFunction,
    batches: Iterable[Any],
    roots: tuple[Any, ...],
    step: StepFunction | Iterator[Any],
    with_batches: Any,
    seconds: float,
    *,
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
