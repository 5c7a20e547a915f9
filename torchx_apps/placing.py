"""What ``plan.towers=auto`` becomes: measured on the ranks of the job, before anything is sharded."""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import Any

from torchrec_ext.distributed.auto_plan import auto_plan
from torchrec_ext.distributed.chooser import EVERYWHERE, Decision
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.loop import Record
from torchrec_ext.train.run_folder import RunFolder
from torchx_apps.job import Job, Task, schema_of
from torchx_apps.lookups import merge_lookups


def place_towers(job: Job, task: Task, model: Any, runtime: Runtime) -> tuple[Job, Decision | None]:
    """``job`` with what was chosen, and why; as it is where its towers are placed already, or there is one rank."""
    if job.plan.towers != "auto" or runtime.world_size == 1:
        return job, None
    loader = task.loader(schema_of(job, task, model), job.loader, rank=runtime.rank, world_size=runtime.world_size)
    loader.set_epoch(0)
    if job.lookups == "merged":
        merge_lookups(job, model, runtime.world_size)
    flat = dataclasses.replace(job, plan=dataclasses.replace(job.plan, towers=EVERYWHERE))
    everywhere = copy.deepcopy(model)
    merge_lookups(flat, everywhere, runtime.world_size)
    plan, decision = auto_plan(
        model,
        next(iter(loader)),
        runtime,
        job.plan,
        job.optimizer,
        everywhere=everywhere,
        together=why_on_every_rank(job),
    )
    return dataclasses.replace(job, plan=plan), decision


def why_on_every_rank(job: Job) -> str:
    """Why towers must run on every rank, or nothing."""
    if job.sync.mode != "every_step":
        return f"sync.mode={job.sync.mode} averages towers that every rank has"
    if job.sync.table_copies > 1:
        return f"sync.table_copies={job.sync.table_copies}: towers on ranks of their own have one copy"
    return ""


def report_steps(folder: RunFolder, decision: Decision, history: Sequence[Record]) -> None:
    """Prints the measured step beside the foreseen ones, and writes ``placement.json``.

    Args:
        folder: of the run.
        decision: what was chosen before it.
        history: of the training.
    """
    records = [record for record in history if record["kind"] == "train"]
    steps = [record["step"] - before for record, before in zip(records, [0, *(record["step"] for record in records)], strict=False)]
    times = [1e3 * record["rows"] / record["rows_per_s"] / count for record, count in zip(records, steps, strict=True)]
    measured = statistics.median(times[1:] or times)  # the first steps fill pipelines and pools
    print(f"\n{decision.text(measured)}")
    folder.write(
        "placement.json",
        json.dumps({"measured_ms": measured, "candidates": [dataclasses.asdict(one) for one in decision.candidates]}, indent=2),
    )
