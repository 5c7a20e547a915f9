"""Everything that needs a GPU, once: the tests marked `gpu`, and what each of its parts gains; `make gpu` runs it.

    python benchmarks/gpu.py [--only ROW ...] [--turns 3] [--budget SECONDS] [--quick] [--results DIR]

The tests come first. It writes DIR/tests.json (each test's outcome), DIR/gpu.json (the rows below, anew after every
turn), those of the scripts that use a GPU where there is one, gpu_adopt.py, negatives.py and mixed_precision.py, and
DIR/summary.md: what held and what did not. A row trains one recipe on generated data with a part and without it, in
turn; both learn the same. What this machine has too little of, such as a second GPU, is named and left out.

With `--budget` nothing begins that would not end within so many seconds, as far as that is known from what ran before;
called again on the same commit and device, it goes on where it stopped. Exit code 1 where a test or a row failed, or
there is no GPU; `--quick` runs the rows on a CPU as well, at small sizes, without the tests.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import ROOT, Row, row

from torchx_apps.config import as_words
from torchx_apps.recipes.by_name import load_recipe

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
SCRIPTS = {"gpu_adopt": [], "negatives": [], "mixed_precision": ["--studies"]}
# Where NVIDIA's Multi-Process Service is, if it runs.
PIPES = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICE = "cuda" if GPUS else "cpu"
SIZES = (
    "data.name=planted",
    "export=never",
    "train.early_stop.metric=",
    f"device={DEVICE}",
)
SMALL = ("train.epochs=1", "loader.batch_size=256")
IDS = ("ids.features.user_id.capacity=4096", "ids.features.item_id.capacity=4096")
# of the recipes that learn pairs; the rows of n_tower are few as they are
FEW = ("data.users=200", "data.items=100")


class Part(NamedTuple):
    """A part that runs on a GPU alone, or otherwise there.

    Args:
        recipe: the recipe that is trained.
        without: settings of the run without the part.
        part: settings of the run with it.
        ranks: ranks of the run without the part, and of that with it.
        together: runs at the same time with the part, whose figures are added up.
        missing: what this machine lacks for it; empty where it has all.
    """

    recipe: str
    without: tuple[str, ...]
    part: tuple[str, ...]
    ranks: tuple[int, int] = (1, 1)
    together: int = 1
    missing: str = ""


def parts() -> dict[str, Part]:
    """Returns the parts by the row's name."""
    here = ("train.compile=off", f"loader.device={DEVICE}")
    capture = "train.compile=require"
    several = "" if GPUS != 1 else "a second GPU"
    sharing = (
        ""
        if (PIPES / "control").exists() or not GPUS
        else "MPS, which `nvidia-cuda-mps-control -d` starts"
    )
    return {
        "resident data": Part("two_tower", ("train.compile=off",), here),
        "captured steps": Part(
            "two_tower", here, (f"loader.device={DEVICE}", "train.compile=require")
        ),
        "dynamic ids, captured": Part("two_tower", (capture,), (capture, *IDS)),
        "two ranks, NCCL": Part("two_tower", here, here, ranks=(1, 2), missing=several),
        "two processes on one GPU, MPS": Part(
            "two_tower", here, here, together=2, missing=sharing
        ),
    }


def main() -> int:
    options = _options()
    if not GPUS and not options.quick:
        print(
            "gpu.py: torch sees no GPU here; `python -m torchrec_ext.doctor` says why",
            file=sys.stderr,
        )
        return 1
    about = {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip(),
        "device": torch.cuda.get_device_name(0) if GPUS else "cpu",
        "gpus": GPUS,
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "torchrec")
        },
    }
    options.results.mkdir(parents=True, exist_ok=True)
    results = Results(options.results, about)
    budget = Budget(options.budget)
    if not options.quick:
        results.tests = results.earlier("tests").get("tests") or tested(budget.left())
        results.write("tests", {"tests": results.tests})
    run_rows(options, results, budget)
    for script, flags in {} if options.quick else SCRIPTS.items():
        if results.earlier(script) or not budget.has(script):
            continue
        with budget.timed(script):
            command = [sys.executable, f"benchmarks/{script}.py", *flags]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE)
        if done.returncode:
            results.failed[script] = f"exit code {done.returncode}"
        else:
            results.write(script, json.loads(done.stdout.splitlines()[-1]))
    summary = results.summary(budget.left_out)
    (options.results / "summary.md").write_text(summary)
    print(f"{summary}\nresults in {options.results}", flush=True)
    return 1 if results.failed or results.failed_tests else 0


class Budget:
    """The seconds that are left, and those that each kind of work took so far.

    Args:
        seconds: limit of all work; 0 for none.

    Attributes:
        left_out: work that no time was left for.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds if seconds else math.inf
        self._took: dict[str, float] = {}
        self.left_out: list[str] = []

    def left(self) -> float:
        """Returns the seconds left."""
        return self._end - time.monotonic()

    def has(self, work: str) -> bool:
        """Whether the time suffices for one more turn of this work, as far as is known."""
        longest = max(self._took.values(), default=0.0)
        if self._took.get(work, longest) < self.left():
            return True
        self.left_out.append(work)
        return False

    @contextmanager
    def timed(self, work: str) -> Iterator[None]:
        """Notes how long a turn of the work takes."""
        start = time.monotonic()
        yield
        self._took[work] = time.monotonic() - start


class Results:
    """The files of results, and what has failed.

    Args:
        folder: folder of the files.
        about: commit, device and versions of this run.

    Attributes:
        tests: the outcome of each test.
        rows: rows by the name of their part.
        missing: what this machine lacks for a part.
        failed: errors by the name of the part or script.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._folder = folder
        self._about = about
        self.tests: dict[str, str] = {}
        self.rows: dict[str, Row] = {}
        self.missing: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def earlier(self, name: str) -> dict[str, Any]:
        """Returns what an earlier run on this commit and device wrote, or nothing."""
        file = self._folder / f"{name}.json"
        earlier: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return (
            earlier
            if all(earlier.get(key) == value for key, value in self._about.items())
            else {}
        )

    def write(self, name: str, result: Mapping[str, Any]) -> None:
        """Writes the results of one script."""
        text = json.dumps(
            {**result, **self._about, "date": datetime.date.today().isoformat()},
            indent=1,
        )
        (self._folder / f"{name}.json").write_text(text + "\n")

    def write_rows(self, turns: Mapping[str, Sequence[Turn]]) -> None:
        """Writes the rows so far."""
        result = {"benchmark": "gpu", "rows": list(self.rows.values()), "turns": turns}
        self.write(
            "gpu", {**result, "left_out": self.missing, "failed": list(self.failed)}
        )

    @property
    def failed_tests(self) -> list[str]:
        """Names of the tests that failed."""
        return [
            name
            for name, outcome in self.tests.items()
            if outcome in ("failure", "error")
        ]

    def summary(self, left_out: Sequence[str]) -> str:
        """Returns a page of what held and what did not."""
        outcomes = ", ".join(
            f"{count} {outcome}"
            for outcome, count in sorted(Counter(self.tests.values()).items())
        )
        lines = [
            f"# On {self._about['device']}, commit {self._about['commit'][:7] or 'unknown'}",
            "",
        ]
        lines += [
            f"Tests marked `gpu`: {outcomes or 'not run'}.",
            *(f"- failed: {name}" for name in self.failed_tests),
        ]
        lines += [
            "",
            "| part | with it, samples/s | without | ratio | turns |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name, each in self.rows.items():
            figures = (
                f"{each['ours']:,.0f} | {each['baseline']:,.0f} | {each['ratio']:.2f}"
            )
            lines.append(f"| {name} | {figures} | {each['turns']} |")
        lines += [
            f"- {name}: left out, since this machine lacks {what}"
            for name, what in self.missing.items()
        ]
        lines += [f"- {name}: no time was left" for name in dict.fromkeys(left_out)]
        lines += [f"- {name} failed: {error}" for name, error in self.failed.items()]
        return "\n".join(lines) + "\n"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=parts(), default=list(parts()), metavar="ROW"
    )
    parser.add_argument("--turns", type=int, default=3, help="trainings of each side")
    parser.add_argument(
        "--budget",
        type=float,
        default=0.0,
        help="seconds; nothing begins that would take longer",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that the rows run"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the results"
    )
    return parser.parse_args()


class Turn(NamedTuple):
    """Samples a second without a part and with it, and the figures of both models by name."""

    without: float
    part: float
    quality: Mapping[str, Sequence[float]]


def run_rows(options: argparse.Namespace, results: Results, budget: Budget) -> None:
    """Trains one turn of every part after the other, and writes the rows after each."""
    quick, names = options.quick, options.only
    turns = {
        name: [Turn(*turn) for turn in of_part]
        for name, of_part in results.earlier("gpu").get("turns", {}).items()
    }
    results.rows = {
        name: compared(name, of_part) for name, of_part in turns.items() if of_part
    }
    for number in range(1 if quick else options.turns):
        for name in names:
            part = parts()[name]
            if part.missing and name not in results.missing:
                results.missing[name] = part.missing
                print(
                    f"{name}: left out, since this machine lacks {part.missing}",
                    flush=True,
                )
            is_done = len(turns.setdefault(name, [])) > number
            if (
                part.missing
                or is_done
                or name in results.failed
                or not budget.has(name)
            ):
                continue
            try:
                with budget.timed(name):
                    turns[name].append(one_turn(part, quick=quick))
                results.rows[name] = compared(name, turns[name])
            except RuntimeError as error:
                results.failed[name] = str(error).splitlines()[0]
                print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            results.write_rows(turns)


def one_turn(part: Part, *, quick: bool) -> Turn:
    """Trains without the part and with it."""
    few = () if part.recipe == "n_tower" else FEW
    size = (*SMALL, *few) if quick else ()
    before = trained(part.recipe, (*SIZES, *part.without, *size), part.ranks[0])
    run = functools.partial(
        trained, part.recipe, (*SIZES, *part.part, *size), part.ranks[1]
    )
    with ThreadPoolExecutor(part.together) as pool:
        runs = [
            each.result() for each in [pool.submit(run) for _ in range(part.together)]
        ]
    quality = {
        figure: (before["test"][figure], runs[0]["test"][figure])
        for figure in before["test"]
    }
    return Turn(
        before["samples_per_s"], sum(each["samples_per_s"] for each in runs), quality
    )


def compared(name: str, turns: Sequence[Turn]) -> Row:
    """Returns the row of a part."""
    return row(
        name,
        [turn.part for turn in turns],
        "samples/s",
        baseline=[turn.without for turn in turns],
        better="more",
        device=DEVICE,
        turns=len(turns),
        quality=turns[0].quality,
    )


def trained(recipe: str, settings: tuple[str, ...], ranks: int) -> dict[str, Any]:
    """Returns the summary of one run.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        launch = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            if ranks > 1
            else []
        )
        flags = as_words(load_recipe(recipe), settings)
        app = [
            "-m",
            "torchx_apps.train",
            "--recipe",
            recipe,
            "--run_dir",
            f"{folder}/run",
            *flags,
        ]
        done = subprocess.run(
            [sys.executable, *launch, *app], capture_output=True, text=True, cwd=ROOT
        )
        if done.returncode:
            raise RuntimeError(
                f"{recipe} with {settings}: exit code {done.returncode}:\n{done.stderr[-2000:]}"
            )
        summary: dict[str, Any] = json.loads(
            (Path(folder) / "run" / "summary.json").read_text()
        )
        return summary


def tested(seconds: float) -> dict[str, str]:
    """Runs every test marked `gpu`, the slow ones too; returns by name passed, skipped, failure or error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        chosen = "gpu or (gpu and slow)"  # conftest.py leaves slow tests out where nobody names them
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rfE",
            "-m",
            chosen,
            f"--junitxml={report}",
        ]
        command += [
            "--continue-on-collection-errors",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            *map(str, gpu_files()),
        ]
        if importlib.util.find_spec("xdist"):
            workers = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
            command += [
                "-n",
                str(workers),
                "--dist",
                "loadfile",
                "--no-loadscope-reorder",
            ]
        try:
            subprocess.run(
                command, cwd=ROOT, timeout=None if math.isinf(seconds) else seconds
            )
        except subprocess.TimeoutExpired:
            print(
                f"gpu.py: the tests did not end within {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        return (
            outcomes_of(report.read_text()) if report.exists() else {"pytest": "error"}
        )


def gpu_files() -> list[Path]:
    """Returns the files with tests marked `gpu`: to collect all others takes longer than these tests."""
    marked = re.compile(r"mark\.gpu\b|\bdevice: torch\.device\b")
    return [
        file
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if marked.search(file.read_text())
    ]


def outcomes_of(report: str) -> dict[str, str]:
    """Returns the outcome of each test of pytest's XML report.

    Example:
        >>> outcomes_of('<r><testcase classname="a" name="b"/><testcase classname="a" name="c"><skipped/></testcase>'
        ...             '</r>')
        {'a.b': 'passed', 'a.c': 'skipped'}
    """
    return {
        f"{case.get('classname')}.{case.get('name')}": next(
            (child.tag for child in case), "passed"
        )
        for case in ElementTree.fromstring(report).iter("testcase")
    }


if __name__ == "__main__":
    sys.exit(main())
