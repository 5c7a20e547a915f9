"""What a newcomer waits for: answers of the command line, the doctor, the demo job and its memory.

    python benchmarks/first_use.py [--only ROW ...] [--turns N] [--quick]

A start-up row is the seconds of a command in a process of its own, from its start to its end, as its user waits.
The import of the package stands beside that of torch, in the same turns, both without the start of Python itself.
`torchx run` has the slowest dry run of all components, what a rank imports beside TorchRec, and the seconds until two
ranks have made their first step. The demo job is timed by the clock of whoever types the command, from `torchx run` to
the prompt, on MovieLens 100K (TORCHREC_EXT_DATA; without it the rows are left out). The row `cold`, which
benchmarks/all.py leaves out, clones this repository and times `make demo` from nothing, installation included, on
generated data.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import LIMIT_S, ROOT, Options, Row, command_line, has_data, in_turn, row

BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
APPS = [sys.executable, "-m"]
# Name of the row -> the command, its exit status, and the seconds that are asked for.
COMMANDS: dict[str, tuple[Sequence[str], int, float]] = {
    "dry-run": ([*APPS, "torchx_apps.train", "--dry_run"], 0, 2.0),
    "help": ([*APPS, "torchx_apps.preprocess", "--help"], 0, 2.0),
    "wrong-key": ([*APPS, "torchx_apps.train", "--nosuch=1"], 1, 2.0),
    "doctor": ([*APPS, "torchrec_ext.doctor"], 0, 3.0),
    "builtins": ([str(BIN / "torchx"), "builtins"], 0, 1.0),
}
# The components of `torchx run`, with the flags that they need.
COMPONENTS: dict[str, Sequence[str]] = {
    "train.hybrid": (),
    "train.networks": (),
    "train.stream": (),
    "data.preprocess": (),
    "serve.embed": ("--bundle", "bundle", "--", "--out", "vectors"),
    "serve.export": ("--run", "runs/first"),
    "serve.http": ("--bundle", "bundle"),
}
JOB = "import torchx_apps.jobs.training, torchx_apps.recipes.two_tower"  # what a rank of a job of training imports


def run(
    command: Sequence[str], status: int = 0, cwd: Path = ROOT, limit_s: float = LIMIT_S
) -> None:
    """Runs a command to its end.

    Raises:
        RuntimeError: it ended with another status, or was not done after ``limit_s``.
    """
    line = " ".join(command)
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{line}: not done after {limit_s:.0f} s") from None
    if done.returncode != status:
        raise RuntimeError(
            f"{line} ended with exit code {done.returncode}, not {status}:\n{done.stderr[-3000:]}"
        )


def start_up(options: Options) -> Iterator[Row]:
    sides = {
        name: lambda command=command, status=status: run(command, status)
        for name, (command, status, _) in COMMANDS.items()
    }
    for name, code in (
        ("python", "pass"),
        ("package", "import torchrec_ext"),
        ("torch", "import torch"),
    ):
        sides[name] = lambda code=code: run([sys.executable, "-c", code])
    seconds = in_turn(sides, options.turns)

    def milliseconds(name: str) -> list[float]:
        # Of two starts that differ by noise alone the difference may be 0 or less; the
        # clock's own steps are finer.
        pairs = zip(seconds[name], seconds["python"], strict=True)
        return [max(1e3 * (whole - python), 0.1) for whole, python in pairs]

    torch_ms = round(statistics.median(milliseconds("torch")))
    yield row("import", milliseconds("package"), "ms", required=50, torch_ms=torch_ms)
    for name, (_, _, required) in COMMANDS.items():
        yield row(name, seconds[name], "s", required=required)


def launch(options: Options) -> Iterator[Row]:
    """What `torchx run` takes before a job does its work: the slowest dry run, and the first step of two ranks."""
    torchx = str(BIN / "torchx")
    dry = in_turn(
        {
            name: lambda name=name, flags=flags: run(
                [torchx, "run", "--dryrun", f"rec.{name}", *flags]
            )
            for name, flags in COMPONENTS.items()
        },
        1 if options.quick else options.turns,
    )
    slowest = max(dry, key=lambda name: statistics.median(dry[name]))
    yield row("torchx-dry-run", dry[slowest], "s", required=1.5, component=slowest)
    sides = {
        name: lambda code=code: run([sys.executable, "-c", code])
        for name, code in (
            ("torchrec", "import torchrec"),
            ("job", f"import torchrec; {JOB}"),
        )
    }
    seconds = in_turn(sides, options.turns)
    pairs = zip(seconds["job"], seconds["torchrec"], strict=True)
    yield row(
        "own-imports",
        [max(whole - torchrec, 0.001) for whole, torchrec in pairs],
        "s",
        required=1.0,
    )
    yield row(
        "first-step",
        [_first_step(torchx) for _ in range(options.turns)],
        "s",
        required=12.0,
    )


def _first_step(torchx: str) -> float:
    """Returns the seconds from `torchx run` on two ranks to the record of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            torchx,
            "run",
            "rec.train.hybrid",
            "-j",
            "1x2",
            "--",
            "--run_dir",
            f"{folder}/run",
            "--data.name=planted",
            "--train.epochs=1",
            "--train.log_every=1",
        ]
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        records, seconds = Path(folder, "run", "metrics.jsonl"), None
        assert process.stdout is not None
        with process.stdout as printed:
            reader = threading.Thread(target=printed.read)
            reader.start()
            while process.poll() is None:
                if seconds is None and records.exists() and records.stat().st_size:
                    seconds = time.perf_counter() - start
                time.sleep(0.01)
            reader.join()
        if process.returncode or seconds is None:
            raise RuntimeError(
                f"{' '.join(command)} ended with exit code {process.returncode}, and steps: {seconds}"
            )
        return seconds


def demo(options: Options) -> Iterator[Row]:
    """One run, however many turns are asked for: it takes most of a minute."""
    if not (options.quick or has_data("demo", "ml-100k")):
        return
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            str(BIN / "torchx"),
            "run",
            "rec.train.hybrid",
            "--",
            "--run_dir",
            str(run_dir),
        ]
        if options.quick:
            command += ["--data.name=planted", "--train.epochs=1"]
        start = time.perf_counter()
        run(command)
        seconds = time.perf_counter() - start
        summary = json.loads((run_dir / "summary.json").read_text())
    figures = {
        f"{name}, {of}": round(values[name], 4)
        for of, values in (
            ("test items", summary["test"]),
            ("popularity", summary["popularity"]),
        )
        for name in values
    }
    yield row("demo-job", seconds, "s", required=90, figures=figures)
    yield row("rank-memory", summary["peak_memory_mib"], "MiB", required=1536)


def cold(options: Options) -> Iterator[Row]:
    del options
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        run(["git", "clone", "-q", str(ROOT), str(clone)])
        start = time.perf_counter()
        run(
            ["make", "demo", "DEMO_ARGS=--data.name planted"],
            cwd=clone,
            limit_s=3 * LIMIT_S,
        )
        yield row(
            "make-demo-from-nothing", time.perf_counter() - start, "s", required=360
        )


ROWS = {"start-up": start_up, "launch": launch, "demo": demo, "cold": cold}


if __name__ == "__main__":
    command_line(__doc__, ROWS, turns=3, packages="torchx", studies=["cold"])
