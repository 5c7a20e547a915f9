"""Serving: scores, searches and the HTTP service, by this package and by an earlier commit in turn, on one thread.

    python benchmarks/serving.py [--only ROW ...] [--turns 3] [--quick]

The earlier commit is the last one whose bundles had a network format and a server of their own; its files are read from
this repository's history into a folder of their own. Each side is a process (serving_side.py) with its own bundle of
the same weights. Beside both stand the whole network in torch, ONNX Runtime called by hand, FAISS's exact search, and a
plain server of torch. Last line: one JSON object.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness import ROOT, Options, Row, command_line, row
from load import Load, ask, http_request

EARLIER = os.environ.get("TORCHREC_EXT_EARLIER", "e5a77dd7")
RATE = 100.0
SHARES = ("0.0001", "0.01", "0.1", "0.5", "1")
_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@functools.cache
def earlier() -> Path:
    """Returns a folder with the files of the earlier commit."""
    folder = Path(tempfile.mkdtemp(prefix="earlier-"))
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", EARLIER], capture_output=True, check=True
    )
    subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
    return folder


class Side:
    """A process of serving_side.py over the package in ``tree``."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        word = [] if tree == ROOT else ["old"]
        self._process = subprocess.Popen(
            [sys.executable, ROOT / "benchmarks/serving_side.py", *word],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ENV, "PYTHONPATH": str(tree)},
        )

    def __call__(self, *command: Any) -> Any:
        """Sends a command, and returns the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the side of {self.tree} ended at {command}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


Timed = tuple[Side, str]


def in_turn(
    sides: dict[str, Timed], turns: int, calls: int, in_a_row: int = 10
) -> dict[str, list[list[float]]]:
    """Seconds of every call of each side by turn, after a turn that warms up."""
    times: dict[str, list[list[float]]] = {name: [] for name in sides}
    number = 0
    for turn in range(-1, turns):
        these: dict[str, list[float]] = {name: [] for name in sides}
        count = calls if turn >= 0 else in_a_row
        for first in range(number, number + count, in_a_row):
            for name, (side, call) in sides.items():
                these[name] += side("time", call, first, in_a_row)
        number += count
        if turn >= 0:
            for name, seconds in these.items():
                times[name].append(seconds)
    return times


def compared(
    name: str,
    baseline: Sequence[Sequence[float]],
    ours: Sequence[Sequence[float]],
    required: float | None,
    **more: object,
) -> Row:
    """Returns the row of two sides' seconds by turn and call: medians of the turns in ms."""
    medians = [
        [1e3 * statistics.median(turn) for turn in turns] for turns in (ours, baseline)
    ]
    return row(name, medians[0], "ms", baseline=medians[1], required=required, **more)


def number_of_calls(turns: int, calls: int) -> int:
    """Returns how many different requests :func:`in_turn` makes."""
    return turns * calls + 10


@contextmanager
def both(
    folder: Path, items: int, interaction: str
) -> Iterator[tuple[Side, Side, Path, Path]]:
    """Yields both sides with a bundle of the same weights, the earlier one's first."""
    with ExitStack() as stack:
        old, new = Side(earlier()), Side(ROOT)
        for name, side in (("old", old), ("new", new)):
            stack.callback(side.close)
            side("make", str(folder / name), items, interaction)
        yield old, new, folder / "old", folder / "new"
        for name in ("old", "new"):
            shutil.rmtree(folder / name)


def scores(options: Options) -> Iterator[Row]:
    """500 of a million items, and 1,000 of 1,000, from a request's values to a list of scores."""
    sizes = [(20_000, 500)] if options.quick else [(1_000_000, 500), (1_000, 1_000)]
    calls = 100
    number = number_of_calls(options.turns, calls)
    for items, count in sizes:
        with (
            tempfile.TemporaryDirectory() as folder,
            both(Path(folder), items, "top_nn") as (old, new, old_at, new_at),
        ):
            old("open", ["calls", str(old_at), count, number])
            new(
                "open",
                ["calls", str(new_at), count, number],
                ["whole", items, count, number],
            )
            sides = {
                "old": (old, "score"),
                "new": (new, "score"),
                "by hand": (new, "by hand"),
                "one graph": (old, "one graph"),
                "whole": (new, "whole"),
            }
            times = in_turn(sides, options.turns, calls)
        name = f"score {count:,} of {items:,}"
        yield compared(
            f"{name}, against the earlier commit", times["old"], times["new"], 1
        )
        yield compared(
            f"{name}, against ONNX Runtime, one graph of tower and top NN",
            times["one graph"],
            times["new"],
            1 / 1.2,
        )
        yield compared(
            f"{name}, against the two graphs called by hand, unchecked",
            times["by hand"],
            times["new"],
            1 / 1.2,
        )
        least = 20 if count == items else 8
        yield compared(
            f"{name}, against the whole network", times["whole"], times["new"], least
        )


def search(options: Options) -> Iterator[Row]:
    """The 100 greatest products of a million rows of 64, without a filter and under filters of five shares."""
    items = 20_000 if options.quick else 1_000_000
    calls = 20
    number = number_of_calls(options.turns, calls)
    with (
        tempfile.TemporaryDirectory() as folder,
        both(Path(folder), items, "dot") as (old, new, old_at, new_at),
    ):
        old("open", ["calls", str(old_at), 0, number])
        new("open", ["calls", str(new_at), 0, number], ["flat", str(new_at), number])
        sides = {
            "old": (old, "search"),
            "new": (new, "search"),
            "flat": (new, "flat"),
            **{share: (new, f"search {share}") for share in SHARES},
        }
        times = in_turn(sides, options.turns, calls)
    name = f"exact search, 100 of {items:,} x 64"
    yield compared(
        f"{name}, against the earlier commit", times["old"], times["new"], None
    )
    yield compared(f"{name}, against FAISS flat", times["flat"], times["new"], 0.9)
    for share in SHARES:
        yield compared(
            f"{name}, filter of {float(share):.2%}, against none",
            times["new"],
            times[share],
            1 / 1.1,
        )


def gate(options: Options) -> Iterator[Row]:
    """The 100 best of 100,000 x 64 by a top NN over the whole catalogue: at most 1.3 times the earlier commit's."""
    items = 10_000 if options.quick else 100_000
    calls = 40
    number = number_of_calls(options.turns, calls)
    with (
        tempfile.TemporaryDirectory() as folder,
        both(Path(folder), items, "top_nn") as (old, new, old_at, new_at),
    ):
        for side, at in ((old, old_at), (new, new_at)):
            side("open", ["calls", str(at), 0, number])
        sides = {"old": (old, "search"), "new": (new, "search")}
        times = in_turn(sides, options.turns, calls)
    yield compared(
        f"top NN over all of {items:,} x 64, against the earlier commit",
        times["old"],
        times["new"],
        1 / 1.3,
    )


@contextmanager
def service(
    tree: Path, *command: str, log: Path, path: Path | None = None
) -> Iterator[tuple[int, float]]:
    """Starts a service; yields its port and the seconds until it answered. ``path`` comes first in PYTHONPATH."""
    start = time.perf_counter()
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=log.parent,
            env={**os.environ, **_ENV, "PYTHONPATH": f"{path or tree}:{tree}"},
        )
    assert process.stdout is not None
    try:
        found = re.search(r":(\d+)/", process.stdout.readline())
        if found is None:
            raise RuntimeError(f"the service did not begin:\n{log.read_text()[-2000:]}")
        yield int(found[1]), time.perf_counter() - start
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def resident_mib(port: int) -> float:
    """Returns the memory of a service's worker."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        text = page.read().decode()
    lines = [line for line in text.splitlines() if line.startswith("serve_resident_b")]
    return sum(float(line.split()[-1]) for line in lines) / 2**20


def http(options: Options) -> Iterator[Row]:
    """100 of 4,000 items by a top NN from all features of a user, 100 requests a second; ready after; memory."""
    items = 4_000
    seconds = 1.0 if options.quick else 6.0
    users = _questions(items)
    requests = [
        http_request(
            "POST",
            "/v1/recommend",
            json.dumps({"user": user, "k": 100, "vector": "live"}),
        )
        for user in users
    ]
    loads: dict[str, list[Load]] = {"old": [], "new": [], "torch": []}
    ready: dict[str, float] = {}
    memory: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        both(Path(folder), items, "top_nn") as (old, new, old_at, new_at),
    ):
        old.close()
        new.close()
        serve = ("-m", "torchx_apps.serve")
        flags = ("--port=0", "--log=events")
        plain = (
            "-c",
            "import socket, sys, uvicorn; sys.path.insert(0, sys.argv[1])\n"
            "import serving_side\n"
            "app = serving_side.torch_app()\n"
            "made = socket.create_server(('127.0.0.1', 0))\n"
            "print(f'http://127.0.0.1:{made.getsockname()[1]}/', flush=True)\n"
            "config = uvicorn.Config(app, log_level='warning', access_log=False)\n"
            "uvicorn.Server(config).run(sockets=[made])",
            str(ROOT / "benchmarks"),
        )
        for turn in range(-1, options.turns):
            for name, tree, command in (
                ("old", earlier(), (*serve, str(old_at), *flags)),
                ("new", ROOT, (*serve, str(new_at), *flags)),
                ("torch", ROOT, plain),
            ):
                log = Path(folder) / f"{name}.log"
                with service(tree, *command, log=log) as (port, took):
                    ask(port, RATE, 1, requests)  # warms up
                    if turn < 0:
                        continue
                    loads[name].append(ask(port, RATE, seconds, requests))
                    ready[name] = min(took, ready.get(name, took))
                    if name != "torch":
                        memory[name] = resident_mib(port)
        # pyarrow imports pandas where it is installed, and the extra `serve` brings none.
        bare = Path(folder) / "bare"
        bare.mkdir()
        (bare / "pandas.py").write_text("raise ImportError('not installed')\n")
        command = (*serve, str(new_at), *flags)
        log = Path(folder) / "bare.log"
        with service(ROOT, *command, log=log, path=bare) as (port, _):
            ask(port, RATE, seconds, requests)
            # Opening reads every table and row, so their pages count as its memory.
            mapped = sum(path.stat().st_size for path in new_at.rglob("*.npy"))
            memory["bare"] = resident_mib(port) - mapped / 2**20
    for percent in (50, 99):
        ours = [load.percentile(percent) for load in loads["new"]]
        for name, words in (("old", "the earlier commit"), ("torch", "a torch server")):
            theirs = [load.percentile(percent) for load in loads[name]]
            yield row(
                f"http p{percent}, against {words}",
                ours,
                "ms",
                baseline=theirs,
                required=1 / 0.6 if (percent, name) == (50, "old") else None,
            )
    middle = statistics.median(load.percentile(50) for load in loads["new"])
    tail = statistics.median(load.percentile(99) for load in loads["new"])
    yield row("http p99 over p50", tail / middle, "times", required=3)
    failed = [len(load.failed) for load in loads["new"]]
    yield row("http failed requests", failed, "requests", required=0)
    yield row(
        "http ready after", ready["new"], "s", baseline=ready["old"], required=None
    )
    yield row("http memory of a worker", memory["new"], "MiB", baseline=memory["old"])
    yield row(
        "http memory of a worker beside its mapped rows, without pandas as the extra `serve` installs it",
        memory["bare"],
        "MiB",
        required=150,
    )


def _questions(items: int) -> list[dict[str, Any]]:
    import numpy as np

    random = np.random.default_rng(3)
    return [
        {
            "user_id": int(random.integers(1, 100_000)),
            "history": random.integers(1, items, 20).tolist(),
            "age": round(float(random.random()), 3),
        }
        for _ in range(512)
    ]


ROWS = {"scores": scores, "search": search, "gate": gate, "http": http}


def main() -> None:
    try:
        command_line(
            __doc__, ROWS, turns=3, packages="numpy faiss-cpu onnxruntime uvicorn"
        )
    finally:
        if earlier.cache_info().currsize:
            shutil.rmtree(earlier(), ignore_errors=True)


if __name__ == "__main__":
    main()
