"""What a run prints for a person: its data, its figures beside a baseline's, an example, a stage's progress."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.config import Record
from torchrec_ext.train.report.progress import RunFolder
from torchx_apps.tasks.job import Task

_FALLING = ("log_loss", "ne")  # figures of which less is better


def report_start(task: Task, runtime: Runtime) -> None:
    """Prints the data and the ranks as soon as both are known, since what comes next takes seconds."""
    print(describe_data(task))
    print(
        f"ranks: {runtime.world_size} on {runtime.device.type} over {runtime.backend}, {runtime.threads} thread(s) each"
    )
    if runtime.oversubscribed:
        print(f"note: {runtime.oversubscribed}")
    sys.stdout.flush()


def describe_data(task: Task) -> str:
    """Says what a task's data is and, in a second line, what its licence asks."""
    return f"data: {task.describe()}" + (f"\nlicence: {task.licence}" if task.licence else "")


def finish_training(
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
    worse = worse_than(task.baseline_name, figures, baseline)
    if worse:
        print(f"\nwarning: {worse}")
    print(
        f"\ntrained in {seconds:.1f} s, evaluations included, at {rate:,.0f} samples/s; the largest rank took "
        f"{memory:,.0f} MiB"
    )
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
        **({"warning": worse} if worse else {}),
    }
    folder.write("summary.json", json.dumps(summary, indent=2))


def say_end(folder: Path, picture: Path) -> None:
    """Prints where the run's files are."""
    events = f"`{program('tensorboard')} --logdir {folder}` shows the events"
    print(f"\nrun folder: {folder} (picture: {picture.name}; {events})", flush=True)


def program(name: str) -> str:
    """Returns the command that starts a program of this environment from the current folder."""
    beside = Path(sys.executable).parent / name
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else name


def figures_table(task: Task, figures: Record, baseline: Record) -> str:
    """Returns a table of the test figures beside the baseline's, their ratio, and the best possible where known."""
    best = {name.lower(): value for name, value in task.best.items()}
    rows = []
    for name, value in figures.items():
        base = baseline.get(name)
        row = [name, f"{value:.4f}", f"{base:.4f}" if base else "", f"{value / base:.2f}x" if base else ""]
        rows.append(row + ([f"{best[name]:.4f}" if name in best else ""] if best else []))
    headers = [task.asked, "this model", task.baseline_name, "ratio"] + (["best possible"] if best else [])
    return str(tabulate(rows, headers=headers, disable_numparse=True))


def worse_than(name: str, figures: Mapping[str, float], baseline: Mapping[str, float]) -> str:
    """Returns a warning about a model that does worse than a baseline by some figure; empty where it does not.

    Args:
        name: name of the baseline.
        figures: the model's figures.
        baseline: the baseline's figures.

    Example:
        >>> worse_than("the same for all", {"auc": 0.7, "log_loss": 0.321}, {"auc": 0.5, "log_loss": 0.042})[:81]
        'this model is worse than the same for all by log_loss (0.3210 against 0.0420); tr'
        >>> worse_than("popularity", {"hr@10": 0.2}, {"hr@10": 0.1})
        ''
    """
    falls = [key for key in baseline if key in figures and (figures[key] > baseline[key]) == (key in _FALLING)]
    worse = [key for key in falls if figures[key] != baseline[key]]
    if not worse:
        return ""
    reasons = ", ".join(f"{key} ({figures[key]:.4f} against {baseline[key]:.4f})" for key in worse)
    calibration = figures.get("calibration", 1.0)
    if not 0.8 < calibration < 1.25:
        reasons += f"; it predicts {calibration:.3g} times the positives that there are"
    remedy = "train longer (train.epochs), or with other rates (optimizer.tables_lr, optimizer.dense_lr)"
    if set(worse) & set(_FALLING):
        remedy += ", and end where validation is best (train.early_stop.metric=log_loss, train.early_stop.mode=min)"
    return f"this model is worse than {name} by {reasons}; {remedy}"


def read_warning(run: Path) -> dict[str, str]:
    """Reads the warning that :func:`finish_training` wrote: ``{"warning": ...}``, or an empty dict."""
    with suppress(OSError, ValueError):
        summary = json.loads((run / "summary.json").read_text())
        return {"warning": summary["warning"]} if "warning" in summary else {}
    return {}


_EVERY_S = 10.0


class StageProgress:
    """Shows how far a stage of work is, on rank 0: by a bar on a terminal, elsewhere by a line every ten seconds.

    Args:
        runtime: this rank's runtime.
        app: name that the lines begin with.
        bytes_of: names of the stages that count bytes; the others count items.
    """

    def __init__(self, runtime: Runtime, app: str, *, bytes_of: tuple[str, ...] = ()) -> None:
        self._speaks, self._app, self._bytes_of = runtime.is_main, app, bytes_of
        self._on_terminal = sys.stderr.isatty()
        self._bar: Any = None
        self._stage = ""
        self._next = time.monotonic() + _EVERY_S

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Shows that ``done`` of ``total`` are done of a stage, where ten seconds have passed."""
        if not self._speaks:
            return
        if self._on_terminal:
            self._draw(stage, done, total)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY_S
            print(
                f"{self._app}: {stage}, {done:,} of {total:,} {'bytes' if stage in self._bytes_of else 'items'}",
                flush=True,
            )

    def _draw(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.__exit__()
            unit: dict[str, Any] = {"unit": "B", "unit_scale": True} if stage in self._bytes_of else {"unit": " items"}
            self._bar, self._stage = tqdm(total=total, desc=stage, leave=False, **unit), stage
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> StageProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
