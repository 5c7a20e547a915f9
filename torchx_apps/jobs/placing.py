"""Where the towers of a job run: what ``plan.towers=auto`` becomes, and whether their look-ups are merged."""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

from torch import nn

from torchrec_ext.distributed.autotune.choose import EVERYWHERE, Decision, auto_plan
from torchrec_ext.distributed.plan.planner import why_on_all_ranks
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.config import Record
from torchrec_ext.train.loop import checked_steps
from torchrec_ext.train.report.progress import RunFolder
from torchx_apps.tasks.job import Job, Task, schema_of

# Batches for the trials of plan.towers=auto, used in turn.
_BATCHES = 4


def merge_lookups(job: Job, model: nn.Module, world_size: int) -> None:
    """Merges the look-ups of a model's towers into one exchange as ``job.lookups`` says, before planning.

    ``auto`` merges where that saves exchanges and nothing prevents it: there are several ranks, all towers are on all
    of them, and no optimizer is given to a table by the path of its tower.

    Raises:
        ValueError: ``merged`` for a model that is not made of towers.
    """
    merge = getattr(model, "merge_lookups", None)
    if merge is None:
        if job.lookups == "merged":
            raise ValueError(
                f"lookups=merged: {type(model).__name__} has no look-ups of several towers; leave it at auto"
            )
        return
    by_path = any("." in exception.partition("=")[0] for exception in job.optimizer.per_table)
    helps = world_size > 1 and job.plan.towers == "data_parallel" and not by_path
    if job.lookups == "merged" or (job.lookups == "auto" and helps):
        merge()


def place_towers(job: Job, task: Task, model: Any, runtime: Runtime) -> tuple[Job, Decision | None]:
    """Tries placements of the towers if ``plan.towers`` is ``auto`` and there are several ranks. Collective.

    Returns:
        The job with the placement that was chosen, and the decision; the job as it is and None if none was needed.
    """
    if job.plan.towers != "auto" or runtime.world_size == 1:
        return job, None
    loader = task.loader(schema_of(job, task, model), job.loader, rank=runtime.rank, world_size=runtime.world_size)
    loader.set_epoch(0)
    if job.lookups == "merged":
        merge_lookups(job, model, runtime.world_size)
    flat = dataclasses.replace(job, plan=dataclasses.replace(job.plan, towers=EVERYWHERE))
    everywhere = copy.deepcopy(model)
    merge_lookups(flat, everywhere, runtime.world_size)
    batches = list(islice(loader, _BATCHES))
    plan, decision = auto_plan(
        model,
        batches[0],
        runtime,
        job.plan,
        job.optimizer,
        everywhere=everywhere,
        together=why_on_every_rank(job),
        more=batches[1:],
        steps=partial(checked_steps, config=job.train),
    )
    return dataclasses.replace(job, plan=plan), decision


def why_on_every_rank(job: Job) -> str:
    """Explains why the towers of a job must run on every rank; empty if they need not."""
    if not job.sync.agrees_every_step:
        return f"sync.mode={job.sync.mode} averages towers that every rank has"
    if job.sync.table_copies > 1:
        return f"sync.table_copies={job.sync.table_copies}: towers on ranks of their own have one copy"
    if job.plan.quantised:
        return "quantised communication is of tables that all ranks share"
    return next(filter(None, map(why_on_all_ranks, job.plan.asked)), "")


def report_steps(folder: RunFolder, decision: Decision, history: Sequence[Record]) -> None:
    """Prints the measured time of a step next to those of the trials, and writes ``placement.json``.

    Args:
        folder: the run's folder.
        decision: the placement that was chosen before the training, with its candidates.
        history: the training's records.
    """
    records = [record for record in history if record["kind"] == "train"]
    earlier = [0, *(record["step"] for record in records)]
    counts = [record["step"] - before for record, before in zip(records, earlier, strict=False)]
    times = [1e3 * record["rows"] / record["rows_per_s"] / count for record, count in zip(records, counts, strict=True)]
    # The first steps fill pipelines and pools.
    measured = statistics.median(times[1:] or times)
    print(f"\n{decision.text(measured)}")
    candidates = [dataclasses.asdict(candidate) for candidate in decision.candidates]
    folder.write("placement.json", json.dumps({"measured_ms": measured, "candidates": candidates}, indent=2))
