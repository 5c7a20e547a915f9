"""What every benchmark shares: sides timed in turn, trainings in turn, real gloo processes, and rows of one form.

A row compares two sides of one run: `ratio` is always how many times better ours is, whichever way the unit counts.
`required` is held against the ratio, or against ours where there is none: without a baseline, or to one that is 0 where
more is better. `low` and `high` are the least and the greatest ratio (or figure) of the turns. Every wait has a limit,
and a process that died is named.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import queue
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Row = dict[str, object]
Clock = Callable[[], float]
LIMIT_S = 600.0  # of any wait for another process or thread
ROOT = Path(__file__).resolve().parents[1]
# with it, which users lack, each process compiles the package anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


class Options(NamedTuple):
    """What the command line asks for.

    Args:
        turns: measured turns of each side, after one that warms up.
        quick: small sizes, to see that it runs; the figures mean nothing.
    """

    turns: int
    quick: bool


def command_line(
    description: str | None,
    rows: Mapping[str, Callable[[Options], Iterator[Row]]],
    *,
    turns: int,
    packages: str = "",
    studies: Collection[str] = (),
) -> None:
    """Runs a benchmark from its command line, and prints one JSON object as the last line.

    Args:
        description: the script's docstring.
        rows: by the name that `--only` takes, a function that yields one row or more.
        turns: turns of each side where `--turns` is not given.
        packages: distributions besides torch and torchrec whose versions are printed, with spaces.
        studies: rows that run only where `--only` names them: too long, or in need of something that few machines have.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = [name for name in rows if name not in studies]
    text = ", ".join(usual) + (
        f"; only where named: {', '.join(studies)}" if studies else ""
    )
    parser.add_argument(
        "--only", nargs="+", choices=rows, default=usual, metavar="ROW", help=text
    )
    parser.add_argument(
        "--studies",
        action="store_true",
        help="the rows that run only where they are named",
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=turns,
        help=f"measured turns of each side, default {turns}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that it runs"
    )
    args = parser.parse_args()
    options = Options(turns=1 if args.quick else args.turns, quick=args.quick)
    with tempfile.TemporaryDirectory() as folder:
        # What an earlier run compiled would make captures faster; torch's processes
        # inherit the variable.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        made = [
            row
            for name in (studies if args.studies else args.only)
            for row in rows[name](options)
        ]
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "torchrec", *packages.split())
    }
    result = {
        "benchmark": Path(sys.argv[0]).stem,
        "versions": versions,
        "cores": len(os.sched_getaffinity(0)),
        "rows": made,
    }
    print(json.dumps(result))


def has_data(rows: str, name: str) -> bool:
    """Tells whether the folder in TORCHREC_EXT_DATA has a data set; if not, says that its rows are left out.

    Args:
        rows: rows that need the data set.
        name: data set, a folder in the folder.
    """
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
    name: str,
    ours: float | Sequence[float],
    unit: str,
    *,
    baseline: float | Sequence[float] | None = None,
    better: Literal["more", "less"] = "less",
    required: float | None = None,
    ceiling: float | None = None,
    machine: str | None = None,
    **more: object,
) -> Row:
    """Returns one row, and prints it to stderr.

    Args:
        name: name of the row; results and documents keep it.
        ours: our figure, or one for each turn, of which the median counts.
        unit: unit of both sides.
        baseline: the other side's figure, or one for each turn, in the turns of ``ours``.
        better: whether more of the unit is better, as of rows a second, or less, as of seconds.
        required: our own target, the least ratio; without a ratio, the limit of ``ours``. No page prints it.
        ceiling: greatest ratio that is possible here, as of two processes that never talk.
        machine: what of the machine the ratio depends on, such as "disk"; None where it holds on any of the kind.
        more: further figures of the row.
    """
    our_turns, turns = _turns(ours), None if baseline is None else _turns(baseline)
    each = our_turns
    ratio = None
    if turns is not None and (all(turns) or better == "less"):
        paired = zip(turns, our_turns, strict=True)
        each = [
            mine / theirs if better == "more" else theirs / mine
            for theirs, mine in paired
        ]
        ratio = statistics.median(each)
    middle = statistics.median(each)
    held = None
    if required is not None:
        held = (
            middle <= required
            if ratio is None and better == "less"
            else middle >= required
        )
    made: Row = {
        "name": name,
        "baseline": None if turns is None else _digits(statistics.median(turns)),
        "ours": _digits(statistics.median(our_turns)),
        "unit": unit,
        "better": better,
        "ratio": None if ratio is None else _digits(ratio),
        "low": _digits(min(each)),
        "high": _digits(max(each)),
        "required": required,
        "held": held,
        "ceiling": None if ceiling is None else _digits(ceiling),
        "machine": machine,
        **more,
    }
    keys = [
        key for key in ("baseline", "ours", "ratio", "ceiling") if made[key] is not None
    ]
    print(
        f"{name}: {', '.join(f'{key} {made[key]:,}' for key in keys)} ({unit})",
        file=sys.stderr,
        flush=True,
    )
    return made


def _turns(figure: float | Sequence[float]) -> list[float]:
    return list(figure) if isinstance(figure, Sequence) else [float(figure)]


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def in_turn(
    sides: Mapping[str, Callable[[], object]],
    turns: int,
    inner: int = 1,
    *,
    clock: Clock = time.perf_counter,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of a call of each side, one figure for each turn after the first, which warms up.

    Args:
        sides: what is timed, by name.
        turns: measured turns.
        inner: calls of one side in a row, as in a loop that does nothing else.
        clock: clock to read.
        before: called before each side's calls, as a barrier of ranks; a side that does nothing on some rank leaves
            the machine to the others.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name, call in sides.items():
            before()
            start = clock()
            for _ in range(inner):
                call()
            if turn:
                times[name].append((clock() - start) / inner)
    return times


def calls_in_turn(
    sides: Mapping[str, Callable[[int], object]],
    turns: int,
    calls: int,
    *,
    in_a_row: int = 10,
) -> dict[str, list[list[float]]]:
    """Seconds of every call of each side, a list for each turn after the first, which warms up with a tenth of them.

    Args:
        sides: what is timed, by name; it is given the number of the call, so that none repeats another of its side.
        turns: measured turns.
        calls: calls of each side in a turn.
        in_a_row: calls of one side before the next one's, as in a server that does nothing else.
    """
    times: dict[str, list[list[float]]] = {
        name: [[] for _ in range(turns)] for name in sides
    }
    number = 0
    for turn in range(-1, turns):
        last = number + (calls if turn >= 0 else max(in_a_row, calls // 10))
        for first in range(number, last, in_a_row):
            for name, call in sides.items():
                for each in range(first, min(first + in_a_row, last)):
                    start = time.perf_counter()
                    call(each)
                    if turn >= 0:
                        times[name][turn].append(time.perf_counter() - start)
        number = last
    return times


def number_of_calls(turns: int, calls: int, *, in_a_row: int = 10) -> int:
    """Returns how many different numbers :func:`calls_in_turn` gives to each side."""
    return turns * calls + max(in_a_row, calls // 10)


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest of ``values`` at or above ``percent`` of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class Trainings:
    """Several trainings of one process in turn, each a call of `train()` in a thread of its own that waits its turn.

    A side is a function of ``stop`` that calls ``train(..., stop=stop)``: `train()` asks `stop` after every step on
    every rank, which is where a side waits. So a step is what a command runs, with its checks, its
    pipeline and its loader, and what is decided once (whether to capture steps, say) is decided once.

    Args:
        sides: trainings by name; more epochs than all turns take.
        before: called on every rank before a side has its turn, as a barrier.
        loaders: by side, the loader whose batches are counted as its steps, where `stop` is asked at other times too:
            under local SGD and DiLoCo, whenever ranks meet.
    """

    def __init__(
        self,
        sides: Mapping[str, Callable[[Callable[[], bool]], object]],
        before: Callable[[], object] = lambda: None,
        loaders: Mapping[str, Counted] | None = None,
    ) -> None:
        self._before, self._loaders = before, loaders or {}
        self._sides = {name: _Training(name, side) for name, side in sides.items()}

    def seconds_per_step(
        self, steps: int, turns: int, *, warm_up: int = 50
    ) -> dict[str, list[float]]:
        """Seconds of a step of each side, by turn; each side first makes ``warm_up`` steps that are not counted."""
        for side in self._sides.values():
            self._before()
            side.run(warm_up)
        times: dict[str, list[float]] = {name: [] for name in self._sides}
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

    def run(self, name: str, steps: int) -> None:
        """Has one side make so many steps."""
        self._sides[name].run(steps)

    def close(self) -> None:
        """Ends every training after its next step."""
        for side in self._sides.values():
            self._before()
            side.end()


class _Training:
    def __init__(self, name: str, side: Callable[[Callable[[], bool]], object]) -> None:
        self._name, self._steps, self._ending, self._over = name, 0, False, False
        self._error: BaseException | None = None
        self._go, self._rested = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._thread, args=(side,), daemon=True).start()

    def _thread(self, side: Callable[[Callable[[], bool]], object]) -> None:
        from torchrec_ext.train.guards.finite import RunStoppedError

        self._go.acquire()
        try:
            side(self._stop)
        except RunStoppedError:
            pass
        except BaseException as error:
            self._error = error
        self._over = True
        self._rested.release()

    def _stop(self) -> bool:
        self._steps -= 1
        if self._steps <= 0 and not self._ending:
            self._rested.release()
            self._go.acquire()
        return self._ending

    def run(self, steps: int) -> None:
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

    def end(self) -> None:
        self._ending = True
        self._go.release()
        if not self._rested.acquire(timeout=LIMIT_S):
            raise TimeoutError(f"{self._name}: not ended after {LIMIT_S:.0f} s")


class Counted:
    """A loader of another that counts the batches or steps it has handed out.

    Args:
        loader: loader of this rank.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self.count = loader, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._counted(iter(self._loader))

    def steps(self) -> Iterator[Any]:
        """Yields the loader's steps."""
        return self._counted(self._loader.steps())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.count += 1
            yield batch


class Repeated:
    """A loader of a few batches in memory, again and again: one epoch of more steps than any benchmark makes.

    Args:
        batches: batches of this rank.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self._batches), len(self))

    def __len__(self) -> int:
        return 10_000_000

    def set_epoch(self, epoch: int) -> None:
        """Changes nothing: every pass has one order."""


def on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    limit_s: float = LIMIT_S,
    collectives: str = "auto",
) -> list[Any]:
    """Runs a module's ``function(runtime, *args)`` on ``world_size`` CPU ranks with one thread each; results by rank.

    Ranks join by ``Runtime.start(collectives=collectives)``, as those of a command do. What a rank prints to stdout,
    such as the lines of a training, is dropped.

    Raises:
        RuntimeError: a rank raised or died, or not all were done after ``limit_s``; the message names it.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        context.Process(
            target=_rank,
            args=(function, rank, world_size, port, collectives, results, args),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _gathered(
            function.__name__, processes, results, time.monotonic() + limit_s
        )
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def _gathered(
    name: str, processes: Sequence[Any], results: Any, until: float
) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(processes):
        try:
            rank, error, value = results.get(timeout=2)
        except queue.Empty:
            dead = [
                at
                for at, process in enumerate(processes)
                if process.exitcode is not None and at not in values
            ]
            if dead:
                raise RuntimeError(
                    f"{name}: rank {dead[0]} ended with exit code {processes[dead[0]].exitcode} and no result"
                ) from None
            if time.monotonic() > until:
                waiting = [
                    str(rank) for rank in range(len(processes)) if rank not in values
                ]
                raise RuntimeError(
                    f"{name}: no result of rank {', '.join(waiting)} within the limit"
                ) from None
            continue
        if error:
            raise RuntimeError(f"{name}: rank {rank}:\n{error}")
        values[rank] = value
    return [values[rank] for rank in range(len(processes))]


def _rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    collectives: Any,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    from torchrec_ext.distributed.runtime import Runtime

    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    try:
        with Runtime.start(
            "cpu", threads=1, timeout_s=LIMIT_S, collectives=collectives
        ) as runtime:
            results.put((rank, None, function(runtime, *args)))
            results.close()
            results.join_thread()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        results.close()
        results.join_thread()


def slowest(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """For each side and turn the seconds of the rank that took longest."""
    return {
        name: [
            max(turn) for turn in zip(*(rank[name] for rank in by_rank), strict=True)
        ]
        for name in by_rank[0]
    }


def peak_mb() -> float:
    """Greatest resident memory of this process, MB; ru_maxrss would be that of the process that started it, if more."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024 / 1e6


def rates(count: float, seconds: Iterable[float]) -> list[float]:
    """``count`` a second, for each turn."""
    return [count / each for each in seconds]


def last_json(
    command: Sequence[object], *, limit_s: float = LIMIT_S, **environment: str
) -> Any:
    """Runs a command in a process of its own and returns the JSON of its last line.

    Raises:
        RuntimeError: the command failed, or was not done after ``limit_s``.
    """
    return json.loads(output(command, limit_s=limit_s, **environment).splitlines()[-1])


def checkout(source: str, folder: Path, *, limit_s: float = 300.0) -> Path:
    """Returns ``folder`` with a public repository in it, ``OWNER/NAME@COMMIT``, which is cloned if it is not there.

    Raises:
        RuntimeError: it cannot be cloned.
    """
    if folder.is_dir():
        return folder
    name, commit = source.split("@")
    # a clone that was interrupted is no checkout
    partial = folder.with_suffix(".partial")
    git = ["git", "-C", partial]
    output(["git", "init", "--quiet", partial], limit_s=limit_s)
    output(
        [
            *git,
            "fetch",
            "--quiet",
            "--depth=1",
            f"https://github.com/{name}.git",
            commit,
        ],
        limit_s=limit_s,
    )
    output([*git, "checkout", "--quiet", "FETCH_HEAD"], limit_s=limit_s)
    partial.rename(folder)
    return folder


def output(
    command: Sequence[object], *, limit_s: float = LIMIT_S, **environment: str
) -> str:
    """Runs a command in a process of its own and returns what it printed.

    Raises:
        RuntimeError: the command failed, or was not done after ``limit_s``.
    """
    line = [str(word) for word in command]
    try:
        done = subprocess.run(
            line,
            capture_output=True,
            text=True,
            timeout=limit_s,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"{' '.join(line)}: not done after {limit_s:.0f} s"
        ) from None
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(line)} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return done.stdout
