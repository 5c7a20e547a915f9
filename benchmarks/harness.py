"""What every benchmark shares: sides timed in turn, trainings in turn, real gloo processes, and rows of one form.

A row compares two sides of one run: `ratio` is always how many times better ours is, whichever way the unit counts.
`low` and `high` are the least and the greatest ratio of the turns, or the range of our figure where there is no
baseline. Every wait has a limit, and a process that died is named.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import pickle
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 600.0  # of any wait for another process or thread
ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
# With it, which users lack, each process compiles the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# TorchX starts torchrun by name.
os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"


class Options(NamedTuple):
    """What the command line asks for.

    Args:
        turns: measured turns of each side, after one that warms up.
        quick: small sizes, to see that it runs; the figures mean nothing.
    """

    turns: int
    quick: bool


def command_line(
    description,
    rows,
    *,
    turns=3,
    packages="",
):
    """Runs a benchmark from its command line, and prints one JSON object as the last line.

    Args:
        description: the script's docstring.
        rows: by the name that `--only` takes, a function that yields one row or more.
        turns: turns of each side without `--turns`.
        packages: distributions besides torch and torchrec whose versions are printed, with spaces.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=rows, default=list(rows))
    parser.add_argument("--turns", type=int, default=turns, help="turns of each side")
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON lines: each row is measured in a process of its own, and added at once",
    )
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds for all rows"
    )
    parser.add_argument(
        "--limit", type=float, default=150.0, help="seconds for one row of --out"
    )
    parser.add_argument("--kernels", help="folder of what is compiled; by default new")
    args = parser.parse_args()
    options = Options(turns=1 if args.quick else args.turns, quick=args.quick)
    warnings.filterwarnings("ignore")
    quieten()
    with tempfile.TemporaryDirectory() as folder:
        # What an earlier run compiled would make captures faster.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = args.kernels or folder
        versions = {
            name: importlib.metadata.version(name)
            for name in ("torch", "triton", "torchrec", *packages.split())
            if importlib.util.find_spec(name.partition("-")[0])
        }
        if args.out:
            made = continued(args, versions, folder)
        else:
            made = [row for name in args.only for row in rows[name](options)]
    print(json.dumps({"versions": versions, "rows": made}))


def continued(args, versions, kernels):
    """Measures what a file of rows lacks of this commit, prints a page, and returns all rows of this commit.

    Each name is measured in a process of its own: one may hang, or leave its process without a device or without
    memory. The file has a line for each name, with its rows. One that failed stands there with its reason, and its turn
    in the next call comes after those that nothing is known of.

    Args:
        args: the command line.
        versions: versions of packages.
        kernels: folder for what the processes compile, each for those after it.
    """
    commit = os.environ.get("COMMIT") or output(["git", "rev-parse", "HEAD"]).strip()
    about = {"versions": versions, "commit": commit}
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        about["card"] = sys.modules["torch"].cuda.get_device_name()
    until = time.monotonic() + args.budget
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.touch()
    known = {}
    for line in args.out.read_text().splitlines():
        each = json.loads(line)
        if about.items() <= each.items():
            known[each["of"]] = each
    left = [name for name in args.only if "rows" not in known.get(name, {})]
    for name in sorted(left, key=lambda name: name in known):
        seconds = min(args.limit, until - time.monotonic())
        command = [sys.executable, Path(sys.argv[0]).resolve(), "--only", name]
        command += ["--turns", args.turns, "--kernels", kernels]
        command += ["--quick"] * args.quick
        try:
            if seconds <= 0:
                raise TimeoutError
            made = {"rows": last_json(command, limit_s=seconds)["rows"]}
        except (RuntimeError, TimeoutError) as error:
            if seconds < args.limit and isinstance(error, TimeoutError):
                told = "left for the next call, the budget is over"
                print(f"{name}: {told}", file=sys.stderr, flush=True)
                continue
            # The last line of a traceback says what it was; without one the command follows.
            first, *others = str(error).splitlines()
            made = {"failed": (others or [first.partition(": ")[0]])[-1][:200]}
            print(f"{name}: failed: {error}", file=sys.stderr, flush=True)
        known[name] = {"of": name, "date": time.strftime("%Y-%m-%d"), **about, **made}
        with args.out.open("a") as file:
            file.write(json.dumps(known[name]) + "\n")
    rows = [row for each in known.values() for row in each.get("rows", ())]
    print(page(rows, known, about), file=sys.stderr)
    return rows


def page(rows, known, about):
    """Returns a Markdown page of rows, with all that a row says beside its ratio, and of what failed.

    Args:
        rows: the rows.
        known: lines of the file by the name of a row, with the reason if it failed.
        about: what all rows share: versions, commit and card.
    """
    versions = ", ".join(f"{name} {each}" for name, each in about["versions"].items())
    head = f"{about.get('card', 'CPU')}, {versions}, commit {about['commit'][:8]}"
    common = {"name", "baseline", "ours", "unit", "ratio", "low", "high", "ceiling"}
    lines = [head, "", "| | baseline | ours | ratio | more |", "|---|---|---|---|---|"]
    for each in rows:
        of = f"{each['baseline']:,} {each['unit']}" if each["baseline"] else ""
        ratio = f"{each['ratio']}x" if each["ratio"] else ""
        more = {key: told for key, told in each.items() if key not in common}
        more = ", ".join(f"{key} {told}" for key, told in more.items() if told)
        lines.append(f"| {each['name']} | {of} | {each['ours']:,} | {ratio} | {more} |")
    for name, each in known.items():
        if "failed" in each:
            lines.append(f"| {name} | failed | | | {each['failed']} |")
    return "\n".join(lines)


def quieten():
    """Silences what libraries say at import and in every step."""
    for name in ("", "torch", "torchrec", "fbgemm_gpu"):
        logging.getLogger(name).setLevel(logging.ERROR)


def has_data(rows, name):
    """Tells whether the folder in TORCHREC_EXT_DATA has a data set; if not, says that its rows are left out."""
    folder = os.environ.get("TORCHREC_EXT_DATA")
    if folder and Path(folder, name).is_dir():
        return True
    print(
        f"{rows}: left out: TORCHREC_EXT_DATA names no folder with {name}",
        file=sys.stderr,
        flush=True,
    )
    return False


def row(
    name,
    ours,
    unit,
    *,
    baseline=None,
    better="less",
    ceiling=None,
    **more,
):
    """Returns one row, and prints it to stderr.

    Args:
        name: name of the row; results and documents keep it.
        ours: our figure, or one for each turn, of which the median counts.
        unit: unit of both sides.
        baseline: the other side's figure, or one for each turn, in the turns of ``ours``.
        better: whether more of the unit is better, as of rows a second, or less, as of seconds.
        ceiling: greatest ratio that is possible here, as of two processes that never talk.
        more: further figures of the row.
    """
    mine = _turns(ours)
    theirs = None if baseline is None else _turns(baseline)
    each, ratio = mine, None
    if theirs is not None and (all(theirs) or better == "less"):
        pairs = list(zip(theirs, mine, strict=True))
        each = [
            our / their if better == "more" else their / our for their, our in pairs
        ]
        ratio = statistics.median(each)
    made = {
        "name": name,
        "baseline": None if theirs is None else digits(statistics.median(theirs)),
        "ours": digits(statistics.median(mine)),
        "unit": unit,
        "ratio": None if ratio is None else digits(ratio),
        "low": digits(min(each)),
        "high": digits(max(each)),
        "ceiling": None if ceiling is None else digits(ceiling),
        **more,
    }
    figures = ("baseline", "ours", "ratio", "ceiling")
    told = [f"{key} {made[key]:,}" for key in figures if made[key] is not None]
    print(f"{name}: {', '.join(told)} ({unit})", file=sys.stderr, flush=True)
    return made


def _turns(figure):
    return list(figure) if isinstance(figure, Sequence) else [float(figure)]


def digits(value):
    """Returns a figure with four digits."""
    return float(f"{value:.4g}")


def milliseconds(seconds):
    """Returns each turn in milliseconds."""
    return [1e3 * each for each in seconds]


def in_turn(
    sides,
    turns,
    inner=1,
    *,
    before=lambda: None,
):
    """Seconds of a call of each side, one figure for each turn after the first, which warms up.

    Args:
        sides: what is timed, by name.
        turns: measured turns.
        inner: calls of one side in a row, as in a loop that does nothing else.
        before: called before each side's calls, as a barrier of ranks; a side that does nothing on some rank leaves
            the machine to the others.
    """
    times = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name, call in sides.items():
            before()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            if turn:
                times[name].append((time.perf_counter() - start) / inner)
    return times


class Trainings:
    """Several trainings of one process in turn, each a call of `train()` in a thread of its own that waits its turn.

    A side is a function of ``stop`` that calls ``train(..., stop=stop)``: `train()` asks `stop` after every step, on
    several ranks whenever they meet, which is where a side waits. So a step is what a command runs, with its checks,
    pipeline and loader, and what is decided once (whether to capture steps, say) is decided once.

    Args:
        sides: trainings by name; more epochs than all turns take.
        before: called on every rank before a side has its turn, as a barrier.
        loaders: by side of several ranks, the loader whose batches are counted as its steps.
    """

    def __init__(
        self,
        sides,
        before=lambda: None,
        loaders=None,
    ):
        self._before, self._loaders = before, loaders or {}
        self._sides = {name: _Training(name, side) for name, side in sides.items()}

    def seconds_per_step(self, steps, turns, *, warm_up=50):
        """Seconds of a step of each side, by turn; each side first makes ``warm_up`` steps that are not counted."""
        for side in self._sides.values():
            self._before()
            side.run(warm_up)
        times = {name: [] for name in self._sides}
        for _ in range(turns):
            for name, side in self._sides.items():
                self._before()
                loader = self._loaders.get(name)
                handed = 0 if loader is None else loader.count
                start = time.perf_counter()
                side.run(steps)
                seconds = time.perf_counter() - start
                times[name].append(
                    seconds / (steps if loader is None else loader.count - handed)
                )
        return times

    def run(self, name, steps):
        """Has one side make so many steps."""
        self._sides[name].run(steps)

    def close(self):
        """Ends every training after its next step."""
        for side in self._sides.values():
            self._before()
            side.end()


class _Training:
    def __init__(self, name, side):
        self._name, self._steps, self._ending, self._over = name, 0, False, False
        self._error = None
        self._go, self._rested = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._thread, args=(side,), daemon=True).start()

    def _thread(self, side):
        from torchrec_ext.train.guards import RunStoppedError

        self._go.acquire()
        try:
            side(self._stop)
        except RunStoppedError:
            pass
        except BaseException as error:
            self._error = error
        self._over = True
        self._rested.release()

    def _stop(self):
        self._steps -= 1
        if self._steps <= 0 and not self._ending:
            self._rested.release()
            self._go.acquire()
        return self._ending

    def run(self, steps):
        self._steps = steps
        self._go.release()
        if not self._rested.acquire(timeout=LIMIT_S):
            raise TimeoutError(f"{self._name}: no {steps} steps in {LIMIT_S:.0f} s")
        if self._error is not None:
            raise self._error
        if self._over:
            raise RuntimeError(
                f"{self._name}: its training ended before its turns did; give it more epochs"
            )

    def end(self):
        self._ending = True
        self._go.release()
        if not self._rested.acquire(timeout=LIMIT_S):
            raise TimeoutError(f"{self._name}: not ended after {LIMIT_S:.0f} s")


def looping(step):
    """Returns the side that calls ``step`` until it is stopped: a loop of one's own."""

    def side(stop):
        while not stop():
            step()

    return side


class Counted:
    """A loader of another that counts the batches or steps it has handed out.

    Args:
        loader: loader of this rank.
    """

    def __init__(self, loader):
        self._loader, self.count = loader, 0

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        for batch in self._loader:
            self.count += 1
            yield batch


class Repeated:
    """A loader of a few batches in memory, again and again: one epoch of more steps than any benchmark makes.

    Args:
        batches: batches of this rank.
    """

    def __init__(self, batches):
        self._batches = list(batches)

    def __iter__(self):
        return itertools.islice(itertools.cycle(self._batches), len(self))

    def __len__(self):
        return 10_000_000

    def set_epoch(self, epoch):
        """Changes nothing: every pass has one order."""


@contextlib.contextmanager
def one_rank():
    """A process group of one, whose trainings print nothing to stdout."""
    from torchrec_ext.distributed.runtime import Runtime

    with (
        Runtime.start("cpu", threads=1) as runtime,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        yield runtime


def on_ranks(
    function,
    world_size,
    *args,
    collectives="auto",
):
    """Runs a module's ``function(runtime, *args)`` on ``world_size`` CPU ranks with one thread each; results by rank.

    Ranks join by ``Runtime.start(collectives=collectives)``, as those of a command do. What a rank prints to stdout,
    such as the lines of a training, is dropped.

    Raises:
        RuntimeError: a rank raised or died, or not all were done within the limit; the message names it.
    """
    from torch import multiprocessing

    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        context = multiprocessing.start_processes(
            _rank,
            (function, world_size, port, collectives, folder, args),
            world_size,
            join=False,
            daemon=True,
        )
        until = time.monotonic() + LIMIT_S
        while not context.join(5):
            if time.monotonic() > until:
                for process in context.processes:
                    process.kill()
                raise RuntimeError(f"{function.__name__}: not done within the limit")
        results = (Path(folder, str(rank)) for rank in range(world_size))
        return [pickle.loads(file.read_bytes()) for file in results]


def _rank(
    rank,
    function,
    world_size,
    port,
    collectives,
    folder,
    args,
):
    from torchrec_ext.distributed.runtime import Runtime

    warnings.filterwarnings("ignore")
    quieten()
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        os.environ |= {name: str(value), f"LOCAL_{name}": str(value)}
    with Runtime.start(
        "cpu", threads=1, timeout_s=LIMIT_S, collectives=collectives
    ) as runtime:
        made = function(runtime, *args)
        Path(folder, str(rank)).write_bytes(pickle.dumps(made))


def slowest(by_rank):
    """For each side and turn the seconds of the rank that took longest."""
    return {
        name: [
            max(turn) for turn in zip(*(rank[name] for rank in by_rank), strict=True)
        ]
        for name in by_rank[0]
    }


def never_talk(alone, together):
    """Returns how many times one process's work two do that never talk, by their seconds of a step in each turn."""
    pairs = zip(alone, together, strict=True)
    return statistics.median(2 * one / two for one, two in pairs)


def peak_mb():
    """Greatest resident memory of this process, MB; ru_maxrss would be that of the process that started it, if more."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024 / 1e6


def rates(count, seconds):
    """``count`` a second, for each turn."""
    return [count / each for each in seconds]


def last_json(command, *, limit_s=LIMIT_S, **environment):
    """Runs a command in a process of its own and returns the JSON of its last line.

    Raises:
        RuntimeError: the command failed, or was not done after ``limit_s``.
    """
    return json.loads(output(command, limit_s=limit_s, **environment).splitlines()[-1])


def output(command, *, limit_s=LIMIT_S, **environment):
    """Runs a command in a process of its own and returns what it printed.

    Raises:
        TimeoutError: the command was not done after ``limit_s``; it and all that it started are killed.
        RuntimeError: the command failed.
    """
    line = [str(word) for word in command]
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        told, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            f"not done after {limit_s:.0f} s: {' '.join(line)}"
        ) from None
    finally:
        # What it started, such as workers of a loader, may go on without it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise RuntimeError(
            f"exit code {process.returncode}: {' '.join(line)}\n{errors[-3000:]}"
        )
    return told
