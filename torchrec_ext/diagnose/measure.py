"""measure(): all experiments on a loop of one process."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from torchrec_ext.adopt import CannotAdopt
from torchrec_ext.adopt.checks import (
    check_model,
    optimized_parameters,
    update_kind,
)
from torchrec_ext.diagnose.findings import (
    Facts,
    LineFacts,
    LoaderFacts,
    Round,
)
from torchrec_ext.diagnose.loop import (
    TrainingLoop,
    Variant,
    attempt,
    in_rounds,
    sampled,
    warm_up,
)
from torchrec_ext.diagnose.ops import Counted, OpsOfLine, count_ops
from torchrec_ext.diagnose.variants import variants
from torchrec_ext.observe.clock import busy_elsewhere
from torchrec_ext.observe.samples import Samples
from torchrec_ext.observe.state_copy import StateCopy

# Seconds of the loop in which it is sampled at which lines it is: 500 samples.
SAMPLE_S = 1.5
# A table is large with more rows than so many for each id that a step reads.
_LARGE_TABLE = 5
_LINES = 20  # that are kept
_WORKER_BATCHES = 3  # that are timed as a worker makes them, at least


def measure(loop: TrainingLoop, state: StateCopy, budget_s: float) -> Facts:
    """Makes all experiments of one process; ``state`` is a copy of all that the step changes."""
    began = time.perf_counter()
    busy_cores = busy_elsewhere()
    busy: float | None = None
    if not state.optimizers:
        loop.notes.append(
            "no optimizer can be reached from the step, so what it changes is not put back; pass model= and "
            "optimizer="
        )
    counted = Counted()
    rounds: Sequence[Round] = []
    lines: Sequence[LineFacts] = ()
    sampled_s = 0.0
    tables: list[tuple[Any, Any]] = []
    parameters = optimized_parameters(state.optimizers)
    moved = {id(each) for each in parameters if each.requires_grad}

    def changes() -> Iterator[Variant]:
        nonlocal busy
        busy = busy_cores()
        weights = {id(module.weight): module.weight for _, module in tables}
        yield from variants(loop, list(weights.values()), busy)

    if warm_up(loop):
        refusal = _refusal(loop.modules, state.optimizers)
        if refusal:
            loop.not_measured["captured"] = refusal
        counted = _counted(loop)
        for table, module in counted.tables(loop.modules):
            # Of sparse gradients the optimizer moves the rows that were read.
            is_swept = id(module.weight) in moved and not module.sparse
            if is_swept and table.rows > _LARGE_TABLE * table.read:
                tables.append((table, module))
        rounds = in_rounds(loop, changes, budget_s)
        lines, sampled_s = _sample_lines(loop, counted)
    return Facts(
        rounds=rounds,
        ops=counted.ops,
        op_lines=counted.lines.most_common(5),
        syncs=sum(counted.syncs.values()),
        sync_lines=counted.syncs.most_common(5),
        sync_ops=sum(ops.feeding for ops in counted.by_line.values()),
        lines=lines,
        sampled_s=sampled_s,
        # On a GPU an op returns before its kernel runs, so its seconds say nothing.
        product_s=0.0 if loop.cuda else counted.product_s,
        tables=[table for table, _ in tables],
        optimizers=[type(each).__name__ for each in state.optimizers],
        loader=_loader_facts(loop),
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)),
        busy=busy if busy is not None else busy_cores(),
        seconds=time.perf_counter() - began,
        not_measured=loop.not_measured,
        notes=loop.notes,
    )


def _refusal(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> str:
    """Returns why adopt() refuses these, as far as that is known before a step; empty if it takes them."""
    try:
        for module in modules:
            check_model(module)
        for optimizer in optimizers:
            update_kind(optimizer)
    except CannotAdopt as error:
        return f"adopt refuses the step: {error}"
    return ""


def _counted(loop: TrainingLoop) -> Counted:
    """Counts the ops of a step; none if it cannot be counted."""
    run = partial(count_ops, lambda: loop.call(loop.pool[0]), loop.modules)
    return attempt(loop, "ops", run, Counted())


def _sample_lines(
    loop: TrainingLoop, counted: Counted
) -> tuple[Sequence[LineFacts], float]:
    """Returns the user's lines with the most time, and the seconds of an iteration."""
    missing = loop.not_measured
    nothing: tuple[Sequence[LineFacts], float] = ((), 0.0)
    if loop.cuda or loop.compiled:
        missing["lines"] = "sampled only for eager steps on a CPU, whose ops are timed"
        return nothing
    if not SAMPLE_S or "step" in missing or "loop" in missing:
        return nothing

    def sample() -> tuple[Sequence[LineFacts], float]:
        samples, iterations = sampled(loop.iterate, SAMPLE_S)
        seconds = sum(samples.seconds.values()) / iterations
        return _longest_lines(samples, iterations, counted), seconds

    return attempt(loop, "lines", sample, nothing)


def _longest_lines(
    samples: Samples, iterations: float, counted: Counted
) -> Sequence[LineFacts]:
    lines = []
    for (phase, line), spent in samples.seconds.items():
        # A line without a text is none of the user's.
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
    lines.sort(key=lambda each: -each.seconds)
    return lines[:_LINES]


def _loader_facts(loop: TrainingLoop) -> LoaderFacts:
    batches = loop.source.batches
    workers = batches.num_workers if isinstance(batches, DataLoader) else 0

    def make() -> LoaderFacts:
        of_worker = _facts_of_worker(loop) if workers else {}
        of_loader = loop.source.facts(loop.clock.host)
        return dataclasses.replace(of_loader, workers=workers, **of_worker)

    return attempt(loop, "rows", make, LoaderFacts(workers=workers))


def _facts_of_worker(loop: TrainingLoop) -> dict[str, Any]:
    """Makes batches in this process as a worker does, on one thread; the first one opens files, and is not timed.

    Means, not medians: a worker may read many batches at once, and wait in few of them.
    """
    source = loop.source.in_this_process()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times: list[tuple[float, float]] = []
    try:
        source.take(loop.clock.host)
        end = time.perf_counter() + SAMPLE_S
        while len(times) < _WORKER_BATCHES or time.perf_counter() < end:
            _, whole, sleep = source.take(loop.clock.host)
            times.append((whole, sleep))
        samples, _ = sampled(lambda: source.take(loop.clock.host), SAMPLE_S / 3)
    finally:
        torch.set_num_threads(threads)
    seconds = fmean(whole for whole, _ in times)
    asleep = fmean(sleep for _, sleep in times)
    # Sampling slows short lines, so that lines share the seconds without it.
    count = sum(samples.seconds.values()) / max(seconds, 1e-9)
    return {
        "worker_s": seconds,
        "worker_sleep_s": asleep,
        "worker_lines": _longest_lines(samples, count, Counted()),
    }
