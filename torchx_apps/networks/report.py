"""Reports a job of several networks: progress, a table of the members, the best of them, a picture of the figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev

from tabulate import tabulate

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.drawing.figures import figure_with_panels, save_figure
from torchrec_ext.train.config import Record
from torchrec_ext.train.report.progress import records_of
from torchx_apps.jobs.report import describe_data
from torchx_apps.networks.members import MemberJob, differing, setting
from torchx_apps.tasks.job import Job
from torchx_apps.tasks.task import Task

_LOWER_IS_BETTER = ("loss", "log_loss", "ne")
# Records about the process, not about the course of the training.
_OF_THE_PROCESS = ("restore", "steps")


@dataclass(frozen=True)
class Result:
    """Outcome of one member.

    Args:
        name: name of the member.
        ended: ``all epochs``, ``stopped early`` or ``diverged``.
        epochs: number of epochs that the member was trained for.
        validation: figures of each evaluation, with ``epoch`` and ``step``.
        test: figures on the test part, with the weights that the member ended with.
        seconds: time from start to end in seconds; members of a stack have that of the whole stack.
        ranks: ranks that trained the member.
        folder: run folder of the member.
        message: reason for an early end.
        restored: whether the member went back to the weights of its best evaluation.
    """

    name: str
    ended: str = ""
    epochs: int = 0
    validation: list[Record] = field(default_factory=list)
    test: dict[str, float] = field(default_factory=dict)
    loss: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    ranks: Sequence[int] = ()
    folder: str = ""
    message: str = ""
    restored: bool = False


def result_of(
    name: str,
    history: Sequence[Record],
    figures: dict[str, float],
    seconds: float,
    ranks: Sequence[int],
    folder: str,
) -> Result:
    """Returns the result of a member from its records; epochs of earlier releases began at 0 and are shifted."""
    restored = bool(records_of(history, "restore"))
    shift = int(any(record["epoch"] == 0 for record in history))
    records = []
    for record in history:
        if record["kind"] not in _OF_THE_PROCESS:
            records.append({**record, "epoch": record["epoch"] + shift})
    last = records[-1]
    ended = {"stop": "stopped early", "error": "diverged"}.get(
        last["kind"], "all epochs"
    )
    epochs = last["epoch"]
    if ended == "diverged":
        # The error came within its epoch.
        epochs -= 1
    losses = records_of(records, "train")
    return Result(
        name=name,
        ended=ended,
        epochs=epochs,
        validation=records_of(records, "eval"),
        test=figures,
        loss=[
            {key: record[key] for key in ("epoch", "step", "loss")} for record in losses
        ],
        seconds=seconds,
        ranks=tuple(ranks),
        folder=folder,
        message=last.get("message", ""),
        restored=restored,
    )


def read_result(
    member: MemberJob, folder: Path, seconds: float | None, ranks: Sequence[int]
) -> Result:
    """Returns the result of a member from its run folder, with the folder's seconds if ``seconds`` is None."""
    records = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    summary = folder / "summary.json"
    # A member that diverged has none.
    saved = json.loads(summary.read_text()) if summary.exists() else {}
    duration = saved.get("seconds", 0.0) if seconds is None else seconds
    return result_of(
        member.name, records, saved.get("test", {}), duration, ranks, str(folder)
    )


def report_networks_start(
    task: Task, runtime: Runtime, members: Sequence[str], loaders: int
) -> None:
    """Prints the data, and the members of the stack."""
    print(describe_data(task))
    text = "one loader read once for all" if loaders == 1 else f"{loaders} loaders"
    print(
        f"stack of {len(members)} on {runtime.device.type}, {runtime.threads} thread(s), {text}: {', '.join(members)}",
        flush=True,
    )


class StackProgress:
    """Prints a line for all members of a stack at each of their evaluations, and one for each member at its end."""

    def __init__(self, members: Sequence[str]) -> None:
        self._active = list(members)
        self._records: dict[str, Record] = {}

    def show(self, name: str, record: Record) -> None:
        """Takes one record of one member."""
        if record["kind"] in ("stop", "error"):
            self._active.remove(name)
        if record["kind"] in ("stop", "error", "restore"):
            print(f"{name}: {record['message']}", flush=True)
        if record["kind"] != "train":
            return
        self._records[name] = record
        step = record["step"]
        here = {
            member: latest
            for member, latest in self._records.items()
            if latest["step"] == step
        }
        # The last member of a step prints for all.
        if set(here) != set(self._active):
            return
        losses = [latest["loss"] for latest in here.values()]
        rate = sum(latest["rows_per_s"] for latest in here.values())
        spread = f"{min(losses):.4f} to {max(losses):.4f}"
        print(
            f"epoch {record['epoch']}, step {step}: {len(here)} members, loss {spread}, {rate:,.0f} samples/s",
            flush=True,
        )


def chosen_by(
    members: Sequence[MemberJob], results: Sequence[Result]
) -> tuple[str, str, bool]:
    """Returns the figure to choose the best by, its part (``validation`` or ``test``), and whether higher is better."""
    job: Job = members[0].job
    # The test part should not choose, so it does only where a member has no evaluation.
    part = (
        "validation"
        if all(result.validation for result in results if result.test)
        else "test"
    )
    stop = job.train.early_stop
    if stop.metric:
        return stop.metric, part, stop.mode == "max"
    names = _all_figures(results, part)
    name = names[0] if names else ""
    return name, part, name not in _LOWER_IS_BETTER


def _figures(result: Result, part: str) -> dict[str, float]:
    if part == "test":
        return result.test
    evaluations = result.validation
    # The evaluation whose weights the member has: the best where an early stop went
    # back to it.
    if result.restored:
        evaluations = [
            record for record in evaluations if record.get("best")
        ] or evaluations
    if not evaluations:
        return {}
    return {
        name: value
        for name, value in evaluations[-1].items()
        if isinstance(value, float)
    }


def _all_figures(results: Sequence[Result], part: str) -> list[str]:
    """Returns the names of the figures of any member, in the order of their first one."""
    names: dict[str, None] = {}
    for result in results:
        names |= dict.fromkeys(_figures(result, part))
    return list(names)


def best_of(members: Sequence[MemberJob], results: Sequence[Result]) -> Result | None:
    """Returns the member with the best last validation figure, else test figure; None if all diverged."""
    name, part, higher = chosen_by(members, results)
    able = [
        result
        for result in results
        if name in _figures(result, part) and result.ended != "diverged"
    ]
    choose = max if higher else min
    return choose(able, key=lambda result: _figures(result, part)[name], default=None)


def table(members: Sequence[MemberJob], results: Sequence[Result]) -> str:
    """Returns a table with a row for each member: what sets it apart, its figures and its time; the best has a star.

    If only ``train.seed`` sets them apart, a last row has mean and standard deviation of each figure.
    """
    keys = differing(members)
    name, part, _ = chosen_by(members, results)
    best = best_of(members, results)
    figures = _all_figures(results, "test")
    rows = []
    values = []
    for member, result in zip(members, results, strict=True):
        row = [f"{member.name} *" if result is best else member.name]
        row += [setting(member, key) for key in keys]
        numbers = [result.test.get(figure) for figure in figures]
        if part == "validation":
            numbers.insert(0, _figures(result, part).get(name))
        rows.append(
            [
                *row,
                *map(_number, numbers),
                str(result.epochs),
                result.ended,
                f"{result.seconds:.1f}",
            ]
        )
        if result.ended != "diverged":
            values.append(numbers)
    if keys == ["train.seed"] and len(values) > 1:
        rows.append(
            [
                "mean ± std",
                "",
                *map(_mean_and_std, zip(*values, strict=True)),
                "",
                "",
                "",
            ]
        )
    headers = ["member", *keys]
    if part == "validation":
        headers.append(f"validation {name}")
    headers += [f"test {figure}" for figure in figures]
    headers += ["epochs", "ended", "seconds"]
    return str(tabulate(rows, headers=headers, disable_numparse=True))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _mean_and_std(values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    return f"{mean(numbers):.4f} ± {stdev(numbers):.4f}" if len(numbers) > 1 else ""


def finish_networks(
    root: Path, members: Sequence[MemberJob], results: Sequence[Result]
) -> bool:
    """Prints and writes the table (``results.txt``, ``results.json``) and the picture ``networks.png``."""
    text = table(members, results)
    best = best_of(members, results)
    name, part, _ = chosen_by(members, results)
    root.mkdir(parents=True, exist_ok=True)
    (root / "results.txt").write_text(text + "\n")
    document = {
        "best": None if best is None else best.name,
        "chosen_by": f"{part} {name}",
        "members": [asdict(result) for result in results],
    }
    (root / "results.json").write_text(json.dumps(document, indent=2) + "\n")
    draw_networks(root / "networks.png", results, best)
    print(f"\n{text}\n")
    if best is not None:
        how = f"{part} {name}"
        if part == "test":
            how += ", as this set has no validation rows"
        print(f"best: {best.name} (*), by {how}; run folder: {best.folder}")
        print(f"to serve it: python -m torchx_apps.export {best.folder}")
    for result in results:
        if result.ended == "diverged":
            print(f"{result.name}: {result.message}")
    print(
        f"all run folders: {root} (table: results.txt, picture: networks.png)",
        flush=True,
    )
    return best is not None


def draw_networks(path: Path, results: Sequence[Result], best: Result | None) -> None:
    """Draws the training loss and every validation figure against epochs, with a line for each member.

    A figure with one point of each member is drawn as bars.
    """
    from matplotlib import colormaps

    figures = _all_figures(results, "validation")
    figure, axes = figure_with_panels(
        1 + len(figures), (4.4 * (1 + len(figures)) + 2.2, 3.8)
    )
    colours = colormaps["viridis"].resampled(max(len(results), 2))
    panels = {"training loss": [_loss_points(result) for result in results]}
    for name in figures:
        panels[f"{name}, validation"] = [_points(result, name) for result in results]
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        are_bars = max(map(len, curves), default=0) == 1
        for index, (result, points) in enumerate(zip(results, curves, strict=True)):
            style = {"color": colours(index), "linewidth": 1.2, "label": result.name}
            if result is best:
                style |= {"linewidth": 2.6, "label": f"{result.name} *"}
            epochs = [epoch for epoch, _ in points]
            values = [value for _, value in points]
            if are_bars:
                # A member without the figure keeps its place.
                bar = axis.bar([index], values or [0.0], **style)
                axis.bar_label(bar, fmt="%.4f", fontsize=8)
            else:
                marker = "" if axis is axes[0] else "o"
                axis.plot(epochs, values, marker=marker, markersize=3, **style)
        axis.set(title=title, xlabel="" if are_bars else "epoch")
        if are_bars:
            axis.set_xticks([])
    axes[-1].legend(
        frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )
    save_figure(figure, path)


def _points(result: Result, name: str) -> list[tuple[float, float]]:
    """Returns a figure of each evaluation that has it, against epochs."""
    return [
        (record["epoch"], record[name])
        for record in result.validation
        if name in record
    ]


def _loss_points(result: Result) -> list[tuple[float, float]]:
    """Returns the training loss of each record, against epochs."""
    steps = max((record["step"] for record in result.loss), default=1) / max(
        result.epochs, 1
    )
    return [(record["step"] / steps, record["loss"]) for record in result.loss]
