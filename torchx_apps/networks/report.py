"""compare(): a table of several runs, from their own records; the best of them is named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tabulate import tabulate

from torchrec_ext.train.config import Record
from torchx_apps.recipes.saved_job import CONFIG

_LOWER_IS_BETTER = ("loss", "log_loss", "ne")
# Records about the process, not about the course of the training.
_OF_THE_PROCESS = ("restore", "steps", "left_out")
# Folders, which differ between any two runs.
_OF_THE_FOLDER = ("checkpoint.folder",)
DIVERGED = "diverged"
NOT_ENDED = "not ended"


@dataclass(frozen=True)
class Result:
    """Outcome of one run.

    Args:
        name: name of the run's folder.
        settings: value of each setting, by its key.
        ended: ``all epochs``, ``stopped early``, ``diverged`` or ``not ended``.
        epochs: number of epochs that the run was trained for.
        validation: figures of each evaluation, with ``epoch`` and ``step``.
        test: figures on the test part, with the weights that the run ended with.
        seconds: time from start to end in seconds.
        folder: the run folder.
        message: reason for an early end.
        restored: whether the run went back to the weights of its best evaluation.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    ended: str = NOT_ENDED
    epochs: int = 0
    validation: list[Record] = field(default_factory=list)
    test: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    folder: str = ""
    message: str = ""
    restored: bool = False


def compare(runs: Sequence[Path], out: Path) -> Result | None:
    """Prints the table of some runs, and writes it into a folder; returns the best run.

    Args:
        runs: run folders; those without settings have not begun, and are left out with a note.
        out: folder of ``results.txt`` and ``results.json``.
    """
    results = []
    for run in runs:
        if (run / CONFIG).is_file():
            results.append(read_result(run))
        else:
            print(f"note: {run}: has not begun", flush=True)
    text = table(results)
    best = best_of(results)
    name, part, _ = chosen_by(results)
    document = {
        "best": None if best is None else best.name,
        "chosen_by": f"{part} {name}",
        "members": [asdict(result) for result in results],
    }
    out.mkdir(parents=True, exist_ok=True)
    _replace(out / "results.txt", text + "\n")
    _replace(out / "results.json", json.dumps(document, indent=2) + "\n")
    print(f"\n{text}\n")
    if best is not None:
        print(f"best: {best.name} (*), by {_how(results)}; run folder: {best.folder}")
        print(f"to serve it: python -m torchx_apps.export {best.folder}")
    for result in results:
        if result.ended == DIVERGED:
            print(f"{result.name}: {result.message}")
    print(
        f"all run folders: {out} (table: results.txt)",
        flush=True,
    )
    return best


def _replace(path: Path, text: str) -> None:
    """Writes a file in one move, because two members may end at once."""
    part = path.with_name(f".{os.getpid()}.{path.name}")
    part.write_text(text)
    part.replace(path)


def read_result(run: Path) -> Result:
    """Returns the outcome of a run from its folder.

    Raises:
        ValueError: its settings cannot be read.
    """
    try:
        settings = dict(_flat(json.loads((run / CONFIG).read_text())))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{run / CONFIG}: cannot be read ({error}); name a run folder"
        ) from None
    records = []
    with suppress(OSError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            # A run that goes on may be writing its last line.
            with suppress(ValueError):
                records.append(json.loads(line))
    summary: dict[str, Any] = {}
    # A run that diverged, or goes on, has none.
    with suppress(OSError, ValueError):
        summary = json.loads((run / "summary.json").read_text())
    return result_of(run, settings, records, summary)


def result_of(
    run: Path,
    settings: Mapping[str, Any],
    history: Sequence[Record],
    summary: Mapping[str, Any],
) -> Result:
    """Returns the outcome of a run from its settings, its records and its figures."""
    records = [record for record in history if record["kind"] not in _OF_THE_PROCESS]
    last: Record = records[-1] if records else {"kind": "", "epoch": 0}
    ended = NOT_ENDED
    epochs = last["epoch"]
    if last["kind"] == "error":
        ended = DIVERGED
        # The error came within its epoch.
        epochs -= 1
    elif summary:
        ended = "stopped early" if last["kind"] == "stop" else "all epochs"
    return Result(
        name=run.name,
        settings=settings,
        ended=ended,
        epochs=epochs,
        validation=_of_kind(records, "eval"),
        test=dict(summary.get("test", {})),
        seconds=summary.get("seconds", 0.0),
        folder=str(run),
        message=last.get("message", ""),
        restored=bool(_of_kind(history, "restore")),
    )


def _of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differing(results: Sequence[Result]) -> list[str]:
    """Returns the keys that have not one value in all runs, in the order of the settings."""
    keys: dict[str, None] = {}
    for result in results:
        keys |= dict.fromkeys(result.settings)
    found = []
    for key in keys:
        values = [result.settings.get(key) for result in results]
        if key not in _OF_THE_FOLDER and any(value != values[0] for value in values):
            found.append(key)
    return found


def chosen_by(results: Sequence[Result]) -> tuple[str, str, bool]:
    """Returns the figure to choose the best by, its part (``validation`` or ``test``), and whether higher is better."""
    settings = results[0].settings if results else {}
    # The test part should not choose, so it does only where a run has no evaluation.
    part = "test"
    if all(result.validation for result in results if result.test):
        part = "validation"
    if settings.get("train.early_stop.metric"):
        higher = settings.get("train.early_stop.mode") == "max"
        return settings["train.early_stop.metric"], part, higher
    names = _all_figures(results, part)
    name = names[0] if names else ""
    return name, part, name not in _LOWER_IS_BETTER


def _figures(result: Result, part: str) -> dict[str, float]:
    if part == "test":
        return result.test
    evaluations = result.validation
    # The evaluation whose weights the run has: the best where an early stop went back
    # to it.
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
    """Returns the names of the figures of any run, in the order of their first one."""
    names: dict[str, None] = {}
    for result in results:
        names |= dict.fromkeys(_figures(result, part))
    return list(names)


def best_of(results: Sequence[Result]) -> Result | None:
    """Returns the run with the best last validation figure, else test figure; None if none has ended well."""
    name, part, higher = chosen_by(results)
    able = []
    for result in results:
        if name in _figures(result, part) and result.ended not in (DIVERGED, NOT_ENDED):
            able.append(result)
    choose = max if higher else min
    return choose(able, key=lambda result: _figures(result, part)[name], default=None)


def table(results: Sequence[Result]) -> str:
    """Returns a table with a row for each run: what sets it apart, its figures and its time; the best has a star.

    If only ``train.seed`` sets them apart, a last row has mean and standard deviation of each figure.
    """
    keys = differing(results)
    name, part, _ = chosen_by(results)
    best = best_of(results)
    figures = _all_figures(results, "test")
    rows = []
    values = []
    for result in results:
        row = [f"{result.name} *" if result is best else result.name]
        row += [_text(result.settings.get(key)) for key in keys]
        numbers = [result.test.get(figure) for figure in figures]
        if part == "validation":
            numbers.insert(0, _figures(result, part).get(name))
        row += [*map(_number, numbers), str(result.epochs), result.ended]
        rows.append([*row, f"{result.seconds:.1f}"])
        if result.ended not in (DIVERGED, NOT_ENDED):
            values.append(numbers)
    if keys == ["train.seed"] and len(values) > 1:
        means = [_mean_and_std(column) for column in zip(*values, strict=True)]
        rows.append(["mean ± std", "", *means, "", "", ""])
    headers = ["member", *keys]
    if part == "validation":
        headers.append(f"validation {name}")
    headers += [f"test {figure}" for figure in figures]
    headers += ["epochs", "ended", "seconds"]
    return str(tabulate(rows, headers=headers, disable_numparse=True))


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _mean_and_std(values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    return f"{mean(numbers):.4f} ± {stdev(numbers):.4f}" if len(numbers) > 1 else ""


def _how(results: Sequence[Result]) -> str:
    name, part, _ = chosen_by(results)
    if part == "test":
        return f"{part} {name}, as this set has no validation rows"
    return f"{part} {name}"
