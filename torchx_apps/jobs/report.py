"""What a run prints for a person: its data, its figures beside a baseline's, an example, a stage's progress."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.config import Record
from torchrec_ext.train.report.progress import (
    RunFolder,
    records_of,
    time_shares,
)
from torchx_apps.recipes.saved_job import summary_of
from torchx_apps.tasks.baselines import Beside
from torchx_apps.tasks.task import Task

NOTHING_BESIDE = Beside({}, {})
# Ends of the names of figures of which less is better; a task's are named after it: conversion_log_loss.
_FALLING = ("_log_loss", "_ne")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A training as it went, since it was resumed if it was.

    Args:
        history: records.
        seconds: seconds that it took, evaluations included.
        collectives: over what the ranks' collectives went.
    """

    history: Sequence[Record]
    seconds: float
    collectives: str = "gloo"


def report_start(task: Task, runtime: Runtime, amp: str) -> None:
    """Prints the data, the ranks and the precision ``amp`` as soon as they are known: the next stage takes seconds."""
    print(f"data: {task.describe()}")
    ranks = f"ranks: {runtime.world_size} on {runtime.device.type} over {collectives_of(runtime)}"
    precision = "" if amp == "off" else f", dense layers in {amp}"
    print(f"{ranks}, {runtime.threads} thread(s) each{precision}")
    if runtime.obstacle:
        print(f"note: the ranks share no memory: {runtime.obstacle}")
    if runtime.oversubscribed:
        print(f"note: {runtime.oversubscribed}")
    sys.stdout.flush()


def collectives_of(runtime: Runtime) -> str:
    """Returns over what the ranks' collectives go."""
    return (
        f"{runtime.backend} and shared memory"
        if runtime.shares_memory
        else runtime.backend
    )


class Tested(NamedTuple):
    """Figures of the model and, on rank 0, of the baseline on the test rows; rows for a person; each rank's MiB."""

    figures: Record
    baseline: Record
    example: str
    memory: Sequence[float]


def finish_training(
    folder: RunFolder,
    task: Task,
    tested: Tested,
    trained: Trained,
    beside: Beside = NOTHING_BESIDE,
) -> None:
    """Prints the figures and the example, and writes ``summary.json``.

    Args:
        folder: the run's folder.
        task: the task that was trained.
        tested: figures on the test rows, an example, and the most memory that each rank took.
        trained: how the training went.
        beside: figures of further baselines there.
    """
    figures, baseline, example, memory = tested
    records = records_of(trained.history, "train")
    seconds = sum(record["rows"] / record["rows_per_s"] for record in records)
    # A run that was resumed after its last step has none.
    rate = sum(record["rows"] for record in records) / (seconds or 1.0)
    shares = time_shares(trained.history)
    if beside.rule:
        print(f"\n{beside.rule}", end="")
    print(f"\n{figures_table(task, figures, baseline, beside.figures)}")
    for name, reason in beside.left_out.items():
        print(f"left out: {name}, {reason}")
    undefined = [name for name, value in figures.items() if math.isnan(value)]
    if undefined:
        print(
            f"note: {', '.join(undefined)}: not defined, because the test rows have one label"
        )
    worse = worse_than(task.baseline_name, figures, baseline)
    if worse:
        print(f"\nwarning: {worse}")
    in_collectives = (
        f"{shares['ranks']:.1%} in collectives, " if "ranks" in shares else ""
    )
    print(
        f"\ntrained in {trained.seconds:.1f} s: steps took {seconds:.1f} s, at {rate:,.0f} samples/s, captures, "
        f"evaluations and saves the rest; {shares['data']:.1%} of the steps' time waiting for data, {in_collectives}"
        f"{shares['compute']:.1%} computing; the largest rank took {max(memory):,.0f} MiB"
    )
    if example:
        print(f"\n{example}")
    summary = {
        "data": task.name,
        "test": figures,
        task.baseline_name: baseline,
        **beside.figures,
        "repeats": beside.repeats,
        "best": dict(task.best),
        "seconds": trained.seconds,
        "samples_per_s": rate,
        "shares": shares,
        "peak_memory_mib": max(memory),
        "collectives": trained.collectives,
    }
    if worse:
        summary["warning"] = worse
    folder.write("summary.json", json.dumps(summary, indent=2))


def say_end(folder: Path) -> None:
    """Prints the location of the run's files."""
    print(
        f"\nrun folder: {folder} (`{program('tensorboard')} --logdir {folder}` shows its curves)",
        flush=True,
    )


def program(name: str) -> str:
    """Returns the command for a program of this environment, as typed from the current folder."""
    sibling = Path(sys.executable).parent / name
    return os.path.relpath(sibling) if sibling.is_relative_to(Path.cwd()) else name


def figures_table(
    task: Task,
    figures: Record,
    baseline: Record,
    beside: Mapping[str, Record] | None = None,
) -> str:
    """Formats the test figures as a table with the baseline's, their ratio, and the best possible if known.

    ``beside`` are further baselines, by name.
    """
    others = beside or {}
    best = {name.lower(): value for name, value in task.best.items()}
    rows = []
    for name, value in figures.items():
        base = baseline.get(name)
        # A baseline without this figure, or with a 0, gives no ratio.
        has_ratio = base and not math.isnan(value)
        row = [name, value, base, f"{value / base:.2f}x" if has_ratio else None]
        row += [other.get(name) for other in others.values()]
        rows.append([*row, best[name]] if name in best else row)
    headers = [task.heading, "this model", task.baseline_name, "ratio", *others]
    if best:
        headers.append("best possible")
    return str(
        tabulate(rows, headers=headers, floatfmt=".4f", numalign="left", missingval="")
    )


def worse_than(
    name: str, figures: Mapping[str, float], baseline: Mapping[str, float]
) -> str:
    """Warns if a model is worse than a baseline by some figure; empty if it is not.

    Args:
        name: name of the baseline.
        figures: the model's figures.
        baseline: the baseline's figures.

    Example:
        >>> worse_than("the same for all", {"auc": 0.7, "log_loss": 0.321}, {"auc": 0.5, "log_loss": 0.042})[:81]
        'this model is worse than the same for all by log_loss (0.3210 against 0.0420); tr'
        >>> worse_than("the same for all", {"auc": float("nan")}, {"auc": 0.5})
        ''
        >>> "nan" in worse_than("", {"log_loss": 0.3, "calibration": float("nan")}, {"log_loss": 0.2})
        False
        >>> worse_than("popularity", {"hr@10": 0.2, "buy_log_loss": 0.1}, {"hr@10": 0.1, "buy_log_loss": 0.2})
        ''
    """
    falling = {key for key in baseline if f"_{key}".endswith(_FALLING)}
    worse = []
    for key in filter(figures.__contains__, baseline):
        found, usual = figures[key], baseline[key]
        # What is not defined is neither.
        if found > usual if key in falling else found < usual:
            worse.append(key)
    if not worse:
        return ""
    reasons = ", ".join(
        f"{key} ({figures[key]:.4f} against {baseline[key]:.4f})" for key in worse
    )
    calibration = figures.get("calibration", 1.0)
    # Without a positive it is not a number.
    if calibration < 0.8 or calibration > 1.25:
        reasons += f"; it predicts {calibration:.3g} times the positives that there are"
    remedy = "train longer (train.epochs), or with other rates (optimizer.tables_lr, optimizer.dense_lr)"
    rising = next((key for key in worse if key in falling), None)
    if rising:
        remedy += f", and end where validation is best (train.early_stop.metric={rising}, train.early_stop.mode=min)"
    return f"this model is worse than {name} by {reasons}; {remedy}"


def read_warning(run: Path) -> dict[str, str]:
    """Reads the warning of :func:`finish_training`: ``{"warning": ...}``, or an empty dict."""
    summary = summary_of(run)
    return {"warning": summary["warning"]} if "warning" in summary else {}
