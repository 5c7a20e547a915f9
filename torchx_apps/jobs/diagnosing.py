"""Diagnoses a recipe's training: its own loader, step and evaluation under experiments, on all ranks, and a verdict.

Remedies that keep the mathematics are applied on request, one after the other, and measured beside the step without.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture.lowering import CannotCaptureError
from torchrec_ext.data.loader.epochs import BuiltAhead
from torchrec_ext.diagnose import Diagnosis, StateCopy, ThreadClock
from torchrec_ext.diagnose.experiments.collectives import Collectives, Ranks, RanksFailedError
from torchrec_ext.diagnose.experiments.loop import TrainingLoop
from torchrec_ext.diagnose.experiments.measure import Experiments
from torchrec_ext.diagnose.facts import LoaderFacts
from torchrec_ext.diagnose.findings import Remedy
from torchrec_ext.diagnose.report import apply_in_turn
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import synchronised
from torchrec_ext.train.guards.amp import forward_context
from torchrec_ext.train.guards.finite import FiniteLoss
from torchrec_ext.train.step.choose import Steps, StepsConfig
from torchrec_ext.train.step.pipeline import make_pipeline
from torchrec_ext.train.step.plain import PlainStep
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.jobs.setup import evaluator_of, load_task, quieten_libraries, set_up, shard_job
from torchx_apps.tasks.job import Job

# Least and most turns to measure a remedy.
_TURNS = 5, 15
_TURN_S = 0.25
_PROOF_S = 10.0
_LEAST_STEPS = 4
# Iterations of each variant for capture and warm-up.
_WARM_STEPS = 20


def run_diagnosis(
    job: Job,
    *,
    budget_s: float = 25.0,
    as_json: bool = False,
    out: Path | None = None,
    html: Path | None = None,
    trace: Path | None = None,
    apply: bool = False,
) -> int:
    """Diagnoses a job's training on all ranks; rank 0 prints the page, and writes it to files.

    Args:
        job: the job.
        budget_s: seconds that the rounds of experiments may take.
        as_json: print JSON instead.
        out: folder for ``diagnosis.txt``, ``diagnosis.json`` and ``diagnosis.html``.
        html: file for the page with pictures.
        trace: file for the Chrome trace.
        apply: apply the remedies that keep the mathematics, and measure what they gain.

    Returns:
        0.

    Raises:
        ValueError: a file cannot be written.
    """
    quieten_libraries()
    with Runtime.start(job.device, threads=job.threads, collectives=job.collectives) as runtime:
        diagnosis = diagnose_job(job, runtime, budget_s)
        if apply:
            apply_remedies(job, diagnosis, runtime, budget_s)
        if runtime.is_main:
            print(diagnosis.to_json() if as_json else diagnosis)
            if out is not None:
                _write(diagnosis, out)
            for file, write in ((html, diagnosis.html), (trace, diagnosis.trace)):
                if file is not None:
                    write(file)
                    print(f"written to {file}", file=sys.stderr)
    return 0


class _Built(NamedTuple):
    """The parts of a job's training: its task, their schema, loader, sharded model and optimizer."""

    task: Any
    schema: Any
    loader: Any
    model: Any
    optimizer: HybridOptimizer


def _build(job: Job, runtime: Runtime) -> _Built:
    job = dataclasses.replace(job, loader=dataclasses.replace(job.loader, prefetch=_ahead(job)))
    task = load_task(job, runtime)
    parts = set_up(job, task, runtime, tries_placements=False)
    parallel, optimizer = shard_job(parts, runtime)
    return _Built(task, parts.schema, parts.loader, parallel, optimizer)


def _ahead(job: Job) -> int:
    """Returns how many batches are built ahead: a choice in the middle of the rounds would change what they compare."""
    return BuiltAhead.DEPTH if job.loader.prefetch is None else job.loader.prefetch


def diagnose_job(job: Job, runtime: Runtime, budget_s: float) -> Diagnosis:
    """Returns the diagnosis of a job's eager steps, its loader and its evaluation; the model is not kept."""
    task, schema, loader, parallel, optimizer = _build(job, runtime)
    evaluator = evaluator_of(task, schema, loader, parallel, runtime)
    loader.set_epoch(0)
    between: dict[str, tuple[Callable[[], object], int]] = {}
    if task.validates:
        between["the evaluation"] = evaluator.validate, max(1, len(loader) * job.train.eval_every)
    step = eager_step(job, parallel, optimizer, runtime, len(loader))
    ranks = Ranks() if runtime.world_size > 1 else None
    try:
        with ThreadClock() as clock:
            loop = TrainingLoop(step, loader, StateCopy(), clock, recipe=True, modules=[parallel])
            facts = Experiments(loop, budget_s, ranks).facts(between)
            loop.source.close()
        facts = dataclasses.replace(
            facts,
            rows=job.loader.batch_size * (1 + job.loader.negatives),
            parameters=sum(parameter.numel() for parameter in parallel.parameters()),
            optimizers=(f"{job.optimizer.tables} of the tables", f"{job.optimizer.dense} of the layers"),
            loader=LoaderFacts(kind="loader", dataset=type(loader).__name__),
            towers_apart=job.plan.towers != "data_parallel",
            notes=[*facts.notes, *_unlike_training(job, runtime)],
        )
        if ranks is not None:
            # All ranks take rank 0's facts, to draw the same conclusions.
            facts = ranks.gather(facts)[0]
    finally:
        if ranks is not None:
            ranks.close()
    return Diagnosis(facts, rank=runtime.rank)


def _unlike_training(job: Job, runtime: Runtime) -> Generator[str, None, None]:
    """Yields differences between the diagnosed steps and the job's training."""
    if runtime.world_size > 1 and job.sync.mode != "every_step":
        yield (
            f"the steps exchange as under sync.mode=every_step; with this job's sync.mode={job.sync.mode} the exchange "
            "takes less of a training"
        )


def eager_step(
    job: Job, model: nn.Module, optimizer: HybridOptimizer, runtime: Runtime, steps: int
) -> Callable[[TowerBatch], Any]:
    """Returns the step of a training without graph capture, as a function of a batch."""
    context = lambda: forward_context(job.train.amp, runtime.device)()  # noqa: E731
    forward = FiniteLoss(model, runtime, steps, context=context)
    # PlainStep does not call DistributedDataParallel, so it is for one process on a CPU.
    if runtime.device.type == "cpu" and runtime.world_size == 1:
        try:
            plain = PlainStep(model, optimizer, forward, context=context)
        except CannotCaptureError:
            pass
        else:
            plain.begin()
            return plain

    def step(batch: TowerBatch) -> Any:
        optimizer.zero_grad()
        loss, output = forward(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return output

    return step


def apply_remedies(job: Job, diagnosis: Diagnosis, runtime: Runtime, budget_s: float) -> None:
    """Applies remedies that are settings of the job, see :func:`apply_in_turn`.

    Args:
        job: the job as it was diagnosed.
        diagnosis: diagnosis of the job, to which proof, kept lines and notes are added.
        runtime: this process's rank.
        budget_s: seconds that the rounds of each further diagnosis may take.
    """
    ranks = Ranks() if runtime.world_size > 1 else None

    def change(current: Job, remedy: Remedy) -> tuple[Job, str] | None:
        settings = job_settings(remedy)
        if not settings:
            return None
        return apply_overrides(current, settings), " ".join(f"--set {setting}" for setting in settings)

    # Gains are predicted as shares of iterations that include evaluations and checkpoints.
    between = diagnosis.facts.mean_between()
    try:
        apply_in_turn(
            diagnosis,
            job,
            change,
            lambda before, after: [
                (old + between, new + between) for old, new in _turns(before, after, runtime, ranks)
            ],
            lambda changed: diagnose_job(changed, runtime, budget_s),
        )
    except RanksFailedError as error:
        notes = [*diagnosis.facts.notes, f"no further remedy was applied: {error}"]
        diagnosis.facts = dataclasses.replace(diagnosis.facts, notes=notes)
    finally:
        if ranks is not None:
            ranks.close()


def job_settings(remedy: Remedy) -> list[str]:
    """Returns a remedy as ``key=value`` texts of a job; empty if it is no setting, or its value is left to the user.

    Example:
        >>> from torchrec_ext.diagnose.findings import Change
        >>> lines = "--set loader.prefetch=8 --set loader.read_ahead=2", "--threads 2  # with torchx run"
        >>> job_settings(Remedy(name="", lines=lines, gain=None, changes=Change.EXACT, basis=""))
        ['loader.prefetch=8', 'loader.read_ahead=2', 'threads=2']
    """
    words = []
    for line in remedy.lines:
        command, _, _ = line.partition("  #")
        words += command.split()
    flags = {"--set": "", "--threads": "threads="}
    settings = [flags[flag] + value for flag, value in itertools.pairwise(words) if flag in flags]
    return [] if any(setting.endswith("...") for setting in settings) else settings


def _turns(before: Job, after: Job, runtime: Runtime, ranks: Ranks | None) -> list[tuple[float, float]]:
    """Times iterations of two jobs by turns, with equal results on all ranks; sends their output to stderr.

    All ranks make as many iterations. An iteration takes what it takes on the rank that counts least: one that stood in
    the run queue does not see that itself, and the others waited for it.

    Raises:
        ValueError: a job has no captured step, and must have one.
        RanksFailedError: a job failed on a rank for which others waited.
    """
    with ExitStack() as stack, ThreadClock() as clock, redirect_stdout(sys.stderr):
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        pair = [_Iterated(job, runtime, stack, ranks) for job in (before, after)]
        for each in pair:
            each.warm_up(clock)
        turns: list[tuple[float, float]] = []
        end = time.perf_counter() + _PROOF_S
        while len(turns) < _TURNS[0] or (len(turns) < _TURNS[1] and _first(ranks, time.perf_counter() < end)):
            order = pair if len(turns) % 2 == 0 else pair[::-1]
            seconds = {id(each): each.turn(clock) for each in order}
            turns.append((seconds[id(pair[0])], seconds[id(pair[1])]))
        if ranks is None:
            return turns
        by_rank = ranks.gather(turns)
        fastest = []
        for turn in zip(*by_rank, strict=True):
            old, new = zip(*turn, strict=True)
            fastest.append((min(old), min(new)))
        return fastest


def _first(ranks: Ranks | None, value: Any) -> Any:
    """Returns the value of rank 0."""
    return value if ranks is None else ranks.gather(value)[0]


class _Iterated:
    """Iterations of a job's training loop, epoch after epoch."""

    def __init__(self, job: Job, runtime: Runtime, stack: ExitStack, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._threads = job.threads or runtime.threads
        # Iterations to use up the batches prepared during the other variant's turn, before its own turn is timed.
        self._ahead = _ahead(job) + 2
        self._iterations = self._endless(job, runtime, stack)
        stack.callback(self._iterations.close)

    def _endless(self, job: Job, runtime: Runtime, stack: ExitStack) -> Generator[Any, None, None]:
        _, _, loader, model, optimizer = _build(job, runtime)
        context = forward_context(job.train.amp, runtime.device)
        ranks = stack.enter_context(synchronised(model, optimizer, job.sync))
        forward = FiniteLoss(model, runtime, len(loader), ranks=ranks, context=context)
        pipeline = make_pipeline(
            model, optimizer, runtime.device, forward=forward, before_tables=forward.before_tables, sync=job.sync
        )
        captured = job.train.compile == "require"
        config = StepsConfig(compile="require" if captured else "off", total=sys.maxsize, context=context)
        steps = Steps(model, optimizer, runtime, pipeline, forward, ranks, config)
        model.train()
        for epoch in itertools.count():
            loader.set_epoch(epoch)
            yield from steps.outputs(loader, iter)
            pipeline.detach()

    def run(self, clock: Callable[[], float], count: int) -> float:
        """Returns the mean seconds of so many iterations."""
        torch.set_num_threads(self._threads)
        start = clock()
        for _ in range(count):
            next(self._iterations)
        return (clock() - start) / count

    def warm_up(self, clock: Callable[[], float]) -> None:
        """Makes the first iterations, with graph capture; if a rank fails, no other rank waits for it."""
        if self._ranks is None:
            self.run(clock, _WARM_STEPS)
            return
        collectives = Collectives(self._ranks.failures)

        def watched() -> None:
            with collectives.watching("watch"):
                self.run(clock, _WARM_STEPS)

        _, error = self._ranks.together(collectives, watched)
        if error:
            raise ValueError(error)

    def turn(self, clock: Callable[[], float]) -> float:
        """Returns the mean seconds of as many iterations as a turn holds, the same number on all ranks."""
        first = _first(self._ranks, self.run(clock, self._ahead))
        return self.run(clock, max(_LEAST_STEPS, int(_TURN_S / max(first, 1e-6))))


def _write(diagnosis: Diagnosis, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "diagnosis.txt").write_text(f"{diagnosis}\n")
        (folder / "diagnosis.json").write_text(diagnosis.to_json() + "\n")
        diagnosis.html(folder / "diagnosis.html")
    except OSError as error:
        raise ValueError(
            f"--out {folder}: cannot be written: {error.strerror or error}; choose another folder"
        ) from None
    print(f"written to {folder}", file=sys.stderr)
