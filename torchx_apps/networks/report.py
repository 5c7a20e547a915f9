"""compare(): a table of several runs, from their own records; the best of them is named."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tabulate import tabulate

from torchrec_ext.train.config import Record
from torchx_apps.jobs.tracking import flat
from torchx_apps.recipes.saved_job import CONFIG, records_in, summary_of

_LOWER_IS_BETTER = ("loss", "log_loss", "ne")
# Records about the process, not about the course of the training.
_OF_THE_PROCESS = ("restore", "steps", "left_out")
# A folder, which differs between any two runs.
_OF_THE_FOLDER = "checkpoint.folder"
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
        validation: figures of the evaluation whose weights the run has; empty if it has none.
        test: figures on the test part, with the weights that the run ended with.
        seconds: time from start to end in seconds.
        folder: the run folder.
        message: reason for an early end.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    ended: str = NOT_ENDED
    epochs: int = 0
    validation: Mapping[str, float] = field(default_factory=dict)
    test: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    folder: str = ""
    message: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the run has ended well."""
        return self.ended not in (DIVERGED, NOT_ENDED)


def compare(runs: Sequence[Path], out: Path) -> Result | None:
    """Prints the table of some runs, and writes it into a folder; returns the best run.

    Args:
        runs: run folders; those without settings have not begun, and are left out with a note.
        out: folder of ``results.txt`` and ``results.json``.

    Raises:
        ValueError: none of them has begun, or its settings cannot be read.
    """
    results = []
    if not any((run / CONFIG).is_file() for run in runs):
        raise ValueError(
            f"{', '.join(map(str, runs))}: no run has begun there; name run folders, which have a {CONFIG}"
        )
    for run in runs:
        if (run / CONFIG).is_file():
            results.append(read_result(run))
        else:
            print(f"note: {run}: has not begun", flush=True)
    text = table(results)
    best = best_of(results)
    part, name, _ = chosen_by(results)
    document = {
        "best": best.name if best else None,
        "chosen_by": f"{part} {name}",
        "members": [asdict(result) for result in results],
    }
    out.mkdir(parents=True, exist_ok=True)
    _replace(out / "results.txt", text + "\n")
    _replace(out / "results.json", json.dumps(document, indent=2) + "\n")
    print(f"\n{text}\n")
    if best is None and any(map(_is_of_data, differing(results))):
        print(
            "no best: the members have different data, whose figures say nothing of each other"
        )
    if best is not None:
        why = ", as this set has no validation rows" if part == "test" else ""
        print(
            f"best: {best.name} (*), by {part} {name}{why}; run folder: {best.folder}"
        )
        print(f"to serve it: python -m torchx_apps.export {best.folder}")
    for result in results:
        if result.ended == DIVERGED:
            print(f"{result.name}: {result.message}")
    print(f"all run folders: {out} (table: results.txt)", flush=True)
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
        settings = dict(flat(json.loads((run / CONFIG).read_text())))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{run / CONFIG}: cannot be read ({error}); name a run folder"
        ) from None
    records = records_in(run)
    summary = summary_of(run)
    course = [each for each in records if each["kind"] not in _OF_THE_PROCESS]
    last: Record = course[-1] if course else {"kind": "", "epoch": 0}
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
        validation=_validation(records),
        test=summary.get("test", {}),
        seconds=summary.get("seconds", 0.0),
        folder=str(run),
        message=last.get("message", ""),
    )


def _validation(records: Sequence[Record]) -> dict[str, float]:
    """Returns the figures of the last evaluation, or of the best where an early stop went back to its weights."""
    evaluations = [record for record in records if record["kind"] == "eval"]
    if any(record["kind"] == "restore" for record in records):
        best = [record for record in evaluations if record.get("best")]
        evaluations = best or evaluations
    last: Record = evaluations[-1] if evaluations else {}
    return {name: value for name, value in last.items() if isinstance(value, float)}


def _keys(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the keys of any mapping, in the order of their first one."""
    return list(dict.fromkeys(chain.from_iterable(mappings)))


def differing(results: Sequence[Result]) -> list[str]:
    """Returns the keys that have not one value in all runs, in the order of the settings."""
    found = []
    for key in _keys([result.settings for result in results]):
        values = [result.settings.get(key) for result in results]
        if key != _OF_THE_FOLDER and values.count(values[0]) < len(values):
            found.append(key)
    return found


def chosen_by(results: Sequence[Result]) -> tuple[str, str, bool]:
    """Returns the part (``validation`` or ``test``) and figure that choose the best, and whether higher is better."""
    settings = results[0].settings if results else {}
    # The test part should not choose, so it does only where a run has no evaluation.
    part = "test"
    if all(result.validation for result in results if result.test):
        part = "validation"
    if settings.get("train.early_stop.metric"):
        higher = settings.get("train.early_stop.mode") == "max"
        return part, settings["train.early_stop.metric"], higher
    names = _keys([getattr(result, part) for result in results])
    name = names[0] if names else ""
    return part, name, name not in _LOWER_IS_BETTER


def _is_of_data(key: str) -> bool:
    return key in ("data.name", "data.folder")


def best_of(results: Sequence[Result]) -> Result | None:
    """Returns the run with the best last validation figure, else test figure.

    None if none has ended well, or if they have different data.
    """
    if any(map(_is_of_data, differing(results))):
        return None
    part, name, higher = chosen_by(results)
    able = [
        result for result in results if result.is_done and name in getattr(result, part)
    ]
    choose = max if higher else min
    return choose(able, key=lambda result: getattr(result, part)[name], default=None)


def table(results: Sequence[Result]) -> str:
    """Returns a table with a row for each run: what sets it apart, its figures and its time; the best has a star.

    If only ``train.seed`` sets them apart, a last row has mean and standard deviation of each figure.
    """
    keys = differing(results)
    part, name, _ = chosen_by(results)
    best = best_of(results)
    figures = [("test", key) for key in _keys([result.test for result in results])]
    if part == "validation":
        figures.insert(0, (part, name))
    rows = []
    of_done = []
    for result in results:
        numbers = [getattr(result, of_part).get(key) for of_part, key in figures]
        rows.append(
            [
                f"{result.name} *" if result is best else result.name,
                *(_text(result.settings.get(key)) for key in keys),
                *("" if number is None else f"{number:.4f}" for number in numbers),
                result.epochs,
                result.ended,
                f"{result.seconds:.1f}",
            ]
        )
        if result.is_done:
            of_done.append(numbers)
    if keys == ["train.seed"] and len(of_done) > 1:
        means = []
        for column in zip(*of_done, strict=True):
            values = [value for value in column if value is not None]
            several = len(values) > 1
            means.append(f"{mean(values):.4f} ± {stdev(values):.4f}" if several else "")
        rows.append(["mean ± std", "", *means])
    headers = ["member", *keys, *map(" ".join, figures), "epochs", "ended", "seconds"]
    return str(tabulate(rows, headers=headers, disable_numparse=True))


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
