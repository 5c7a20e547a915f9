"""Diagnoses a recipe's training: its own loader, step and evaluation under experiments, on all ranks, and a verdict.

Remedies that keep the mathematics are applied on request, one after the other, and measured beside the step without.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.policy import Compile
from torchrec_ext.data.loader.epochs import BuiltAhead
from torchrec_ext.diagnose import Diagnosis, StateCopy, ThreadClock
from torchrec_ext.diagnose.experiments.collectives import (
    Collectives,
    Ranks,
    RanksFailedError,
)
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
from torchx_apps.cli.command_line import write_out
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.jobs.setup import (
    JobParts,
    evaluator_of,
    load_task,
    quieten_libraries,
    set_up,
    shard_job,
)
from torchx_apps.tasks.job import Job
from torchx_apps.tasks.task import Task

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
        budget_s: seconds for the rounds of experiments; the first four may take three times as long.
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
    with Runtime.start(
        job.device, threads=job.threads, collectives=job.collectives
    ) as runtime:
        diagnosis = diagnose_job(job, runtime, budget_s)
        if apply:
            apply_remedies(job, diagnosis, runtime, budget_s)
        if runtime.is_main:
            print(diagnosis.to_json() if as_json else diagnosis)
            if out is not None:
                write_out(
                    out,
                    {
                        "diagnosis.txt": str(diagnosis),
                        "diagnosis.json": diagnosis.to_json(),
                    },
                )
                diagnosis.html(out / "diagnosis.html")
                print(f"written to {out}", file=sys.stderr)
            for file, write in ((html, diagnosis.html), (trace, diagnosis.trace)):
                if file is not None:
                    write(file)
                    print(f"written to {file}", file=sys.stderr)
    return 0


def _build(
    job: Job, runtime: Runtime
) -> tuple[Task, JobParts, DistributedModelParallel, HybridOptimizer]:
    """Returns a job's task and parts, and its sharded model and optimizer."""
    job = dataclasses.replace(
        job, loader=dataclasses.replace(job.loader, prefetch=_ahead(job))
    )
    task = load_task(job, runtime)
    parts = set_up(job, task, runtime, tries_placements=False)
    parallel, optimizer = shard_job(parts, runtime)
    return task, parts, parallel, optimizer


@contextmanager
def _ranks_of(runtime: Runtime) -> Iterator[Ranks | None]:
    """Yields the ranks of the diagnosis, with a process group that ends with it; None if there is one rank."""
    if runtime.world_size == 1:
        yield None
        return
    with closing(Ranks()) as ranks:
        yield ranks


def _ahead(job: Job) -> int:
    """Returns how many batches are built ahead: a choice in the middle of the rounds would change what they compare."""
    return BuiltAhead.DEPTH if job.loader.prefetch is None else job.loader.prefetch


def diagnose_job(job: Job, runtime: Runtime, budget_s: float) -> Diagnosis:
    """Returns the diagnosis of a job's eager steps, its loader and its evaluation; the model is not kept."""
    task, parts, parallel, optimizer = _build(job, runtime)
    loader = parts.loader
    evaluator = evaluator_of(task, parts.schema, loader, parallel, runtime)
    loader.set_epoch(0)
    between: dict[str, tuple[Callable[[], object], int]] = {}
    if task.validates:
        between["the evaluation"] = (
            evaluator.validate,
            max(1, len(loader) * job.train.eval_every),
        )
    step = eager_step(job, parallel, optimizer, runtime, len(loader))
    with _ranks_of(runtime) as ranks:
        with ThreadClock() as clock:
            loop = TrainingLoop(
                step, loader, StateCopy(), clock, recipe=True, modules=[parallel]
            )
            facts = Experiments(loop, budget_s, ranks).facts(between)
            loop.source.close()
        notes = [*facts.notes]
        if ranks is not None and job.sync.mode != "every_step":
            notes.append(
                f"the steps exchange as under sync.mode=every_step; with this job's sync.mode={job.sync.mode} the "
                "exchange takes less of a training"
            )
        facts = dataclasses.replace(
            facts,
            rows=job.loader.batch_size * (1 + job.loader.negatives),
            parameters=sum(parameter.numel() for parameter in parallel.parameters()),
            optimizers=(
                f"{job.optimizer.tables} of the tables",
                f"{job.optimizer.dense} of the layers",
            ),
            loader=LoaderFacts(kind="loader", dataset=type(loader).__name__),
            towers_apart=job.plan.towers != "data_parallel",
            notes=notes,
        )
        # All ranks take rank 0's facts, to draw the same conclusions.
        return Diagnosis(_first(ranks, facts), rank=runtime.rank)


def eager_step(
    job: Job, model: nn.Module, optimizer: HybridOptimizer, runtime: Runtime, steps: int
) -> Callable[[TowerBatch], Any]:
    """Returns the step of a training without graph capture, as a function of a batch."""
    context = forward_context(job.train.amp, runtime.device)
    forward = FiniteLoss(model, runtime, steps, context=context)
    # PlainStep does not call DistributedDataParallel, so it is for one process on a
    # CPU.
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


def apply_remedies(
    job: Job, diagnosis: Diagnosis, runtime: Runtime, budget_s: float
) -> None:
    """Applies remedies that are settings of the job, see :func:`apply_in_turn`.

    Args:
        job: the job as it was diagnosed.
        diagnosis: diagnosis of the job, to which proof, kept lines and notes are added.
        runtime: this process's rank.
        budget_s: seconds that the rounds of each further diagnosis may take.
    """
    # Gains are predicted as shares of iterations that include evaluations and
    # checkpoints.
    between = diagnosis.facts.mean_between()

    def change(current: Job, remedy: Remedy) -> tuple[Job, str] | None:
        settings = job_settings(remedy)
        if not settings:
            return None
        return apply_overrides(current, settings), " ".join(
            f"--set {setting}" for setting in settings
        )

    def diagnose_again(changed: Job) -> Diagnosis:
        return diagnose_job(changed, runtime, budget_s)

    with _ranks_of(runtime) as ranks:

        def compare(before: Job, after: Job) -> list[tuple[float, float]]:
            turns = _turns(before, after, runtime, ranks)
            return [(old + between, new + between) for old, new in turns]

        try:
            apply_in_turn(diagnosis, job, change, compare, diagnose_again)
        except RanksFailedError as error:
            notes = [*diagnosis.facts.notes, f"no further remedy was applied: {error}"]
            diagnosis.facts = dataclasses.replace(diagnosis.facts, notes=notes)


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
    settings = [
        flags[flag] + value
        for flag, value in itertools.pairwise(words)
        if flag in flags
    ]
    # A remedy writes "..." where the user must find a value.
    if any(setting.endswith("...") for setting in settings):
        return []
    return settings


def _turns(
    before: Job, after: Job, runtime: Runtime, ranks: Ranks | None
) -> list[tuple[float, float]]:
    """Times iterations of two jobs by turns, with equal results on all ranks; sends their output to stderr.

    All ranks make as many iterations. An iteration takes what it takes on the rank that counts least: one that stood in
    the run queue does not see that itself, and the others waited for it.

    Raises:
        ValueError: a job has no captured step, and must have one.
        RanksFailedError: a job failed on a rank for which others waited.
    """
    with ExitStack() as stack, ThreadClock() as clock, redirect_stdout(sys.stderr):
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        old = _Iterated(before, runtime, stack, ranks)
        new = _Iterated(after, runtime, stack, ranks)
        old.warm_up(clock)
        new.warm_up(clock)
        turns: list[tuple[float, float]] = []
        end = time.perf_counter() + _PROOF_S
        # Rank 0's clock decides for all, because a turn is collective.
        while len(turns) < _TURNS[0] or (
            len(turns) < _TURNS[1] and _first(ranks, time.perf_counter() < end)
        ):
            # The first of a pair changes, so that a machine that slows down or speeds
            # up favours neither.
            if len(turns) % 2 == 0:
                turns.append((old.turn(clock), new.turn(clock)))
            else:
                new_s = new.turn(clock)
                turns.append((old.turn(clock), new_s))
        if ranks is None:
            return turns
        fastest = np.min(ranks.gather(turns), axis=0)
        return [(old_s, new_s) for old_s, new_s in fastest.tolist()]


def _first(ranks: Ranks | None, value: Any) -> Any:
    """Returns the value of rank 0; collective if there are several ranks."""
    return value if ranks is None else ranks.gather(value)[0]


class _Iterated:
    """Iterations of a job's training loop, epoch after epoch."""

    def __init__(
        self, job: Job, runtime: Runtime, stack: ExitStack, ranks: Ranks | None
    ) -> None:
        self._ranks = ranks
        self._threads = job.threads or runtime.threads
        # Iterations to use up the batches prepared during the other variant's turn,
        # before its own turn is timed.
        self._ahead = _ahead(job) + 2
        self._iterations = self._endless(job, runtime, stack)
        stack.callback(self._iterations.close)

    def _endless(
        self, job: Job, runtime: Runtime, stack: ExitStack
    ) -> Generator[Any, None, None]:
        _, parts, model, optimizer = _build(job, runtime)
        loader = parts.loader
        context = forward_context(job.train.amp, runtime.device)
        ranks = stack.enter_context(synchronised(model, optimizer, job.sync))
        forward = FiniteLoss(model, runtime, len(loader), ranks=ranks, context=context)
        pipeline = make_pipeline(
            model,
            optimizer,
            runtime.device,
            forward=forward,
            before_tables=forward.before_tables,
            sync=job.sync,
        )
        # Not "auto", which would compare captured steps with eager ones in the middle
        # of a turn.
        captures: Compile = "require" if job.train.compile == "require" else "off"
        config = StepsConfig(compile=captures, total=sys.maxsize, context=context)
        steps = Steps(model, optimizer, runtime, pipeline, forward, ranks, config)
        model.train()
        for epoch in itertools.count():
            loader.set_epoch(epoch)
            yield from steps.outputs(loader, iter)
            pipeline.detach()

    def run(self, clock: Callable[[], float], count: int) -> float:
        """Returns the mean seconds of so many iterations."""
        # Both variants run in this process, and a remedy may be another number of
        # threads.
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
        seconds = _first(self._ranks, self.run(clock, self._ahead))
        return self.run(clock, max(_LEAST_STEPS, int(_TURN_S / max(seconds, 1e-6))))
