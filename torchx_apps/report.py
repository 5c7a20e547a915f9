"""What a run tells a person: the plan, the figures beside a baseline's, and an example."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.loop import Record
from torchrec_ext.train.run_folder import RunFolder
from torchx_apps.job import Task


def say_start(task: Task, runtime: Runtime) -> None:
    """The data and the ranks, as soon as both are known: what comes next takes seconds."""
    print(f"data: {task.describe()}")
    if task.licence:
        print(f"licence: {task.licence}")
    print(f"ranks: {runtime.world_size} on {runtime.device.type} over {runtime.backend}, {runtime.threads} thread(s) each")
    if runtime.oversubscribed:
        print(f"note: {runtime.oversubscribed}")
    sys.stdout.flush()


def finish(
    folder: RunFolder,
    task: Task,
    figures: Record,
    baseline: Record,
    example: str,
    history: Sequence[Record],
    seconds: float,
    memory: float,
) -> None:
    """Prints the figures and the example, and writes ``summary.json``."""
    records = [record for record in history if record["kind"] == "train"]
    rate = sum(r["rows"] for r in records) / sum(r["rows"] / r["rows_per_s"] for r in records)
    print(f"\n{figures_table(task, figures, baseline)}")
    print(f"\ntrained in {seconds:.1f} s, evaluations included, at {rate:,.0f} samples/s; the largest rank took {memory:,.0f} MiB")
    if example:
        print(f"\n{example}")
    summary = {
        "data": task.name,
        "test": figures,
        task.baseline_name: baseline,
        "best": dict(task.best),
        "seconds": seconds,
        "samples_per_s": rate,
        "peak_memory_mib": memory,
    }
    folder.write("summary.json", json.dumps(summary, indent=2))


def say_end(folder: Path, picture: Path) -> None:
    """Where the run's files are."""
    events = f"`{program('tensorboard')} --logdir {folder}` shows the events"
    print(f"\nrun folder: {folder} (picture: {picture.name}; {events})", flush=True)


def program(name: str) -> str:
    """A program of this environment, as it is started from the current folder."""
    beside = Path(sys.executable).parent / name
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else name


def figures_table(task: Task, figures: Record, baseline: Record) -> str:
    """Each figure of the test part beside the baseline's, their ratio, and the best possible where known."""
    best = {name.lower(): value for name, value in task.best.items()}
    rows = []
    for name, value in figures.items():
        base = baseline.get(name)
        row = [name, f"{value:.4f}", f"{base:.4f}" if base else "", f"{value / base:.2f}x" if base else ""]
        rows.append(row + ([f"{best[name]:.4f}" if name in best else ""] if best else []))
    headers = [task.asked, "this model", task.baseline_name, "ratio"] + ["best possible"] * bool(best)
    return str(tabulate(rows, headers=headers, disable_numparse=True))
