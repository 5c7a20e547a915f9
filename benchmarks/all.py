"""Every benchmark, alone on this machine, in rounds; writes benchmarks/results/NAME.json.

    python benchmarks/all.py [--rounds 3] [--turns 3] [--only NAME ...] [--studies] [--quick] [--results DIR]

A round runs each script once, in a process of its own, so that a row's rounds lie a quarter of an hour apart. Results
are written after each round of a script. A row of the results has the median of its rounds, and as `low` and `high` the
least and the greatest ratio of any turn. Beside the rows stand the commit, the versions, and the machine's own
yardsticks, measured before each round: with them the ratios of two machines can be told apart. Run it on a machine that
does nothing else: it refuses to begin where others keep a core busy. `--studies` runs, once, the rows that scripts
otherwise leave out, and writes them to NAME-studies.json. `quality.py` (hours of training) and `zoo.py` (hours of
capturing) are run by themselves.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, Row, in_turn, last_json, on_ranks

RESULTS = ROOT / "benchmarks" / "results"
LIMIT_S = 1500  # of one script in one round
STUDIES_LIMIT_S = 4500  # of the long rows of one script, which run once
# A number of threads that somebody exported would be that of a baseline that takes
# torch's own.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.endswith("_NUM_THREADS")
}
SCRIPTS = (
    "small_model",
    "negatives",
    "hybrid",
    "networks",
    "loader",
    "preprocess",
    "checkpoint",
    "serving",
    "evaluation",
    "session",
    "dynamic_ids",
    "first_use",
    "chain",
    "mixed_precision",
    "adopt",
    "diagnose",
)


def main() -> int:
    options = _options()
    if options.yardsticks:
        print(
            json.dumps(
                {unit: measure(options.quick) for unit, measure in YARDSTICKS.items()}
            )
        )
        return 0
    if not options.quick and (busy := _busy_cores()) > 0.3:
        print(
            f"others keep {busy:.1f} cores busy: figures taken now would be theirs too; stop them first",
            file=sys.stderr,
        )
        return 2
    about: dict[str, Any] = {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
    }
    start = time.monotonic()
    yardsticks: list[dict[str, float]] = []
    rounds: dict[str, list[Row]] = {name: [] for name in options.only}
    failed: dict[str, str] = {}
    tables: dict[str, list[str]] = {}
    options.results.mkdir(parents=True, exist_ok=True)
    for number in range(1, options.rounds + 1):
        yardsticks.append(machine(options.quick))
        print(
            f"round {number} of {options.rounds}, {_minutes(start)}: {_yardsticks(yardsticks[-1:])}",
            flush=True,
        )
        for name in options.only:
            if name in failed:
                continue
            print(
                f"round {number} of {options.rounds}, {_minutes(start)}: {name}",
                flush=True,
            )
            try:
                rounds[name].append(_run(name, options))
            except RuntimeError as error:
                failed[name] = str(error)
                print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            else:
                # After each round, so that a run that is ended keeps the rounds before.
                about |= {"rounds": number, "machine": _spread(yardsticks)}
                tables[name] = _write(name, rounds[name], about, options)
    print("\n".join(line for lines in tables.values() for line in lines), flush=True)
    print(
        f"{_minutes(start)}; results in {options.results}"
        + "".join(f"\nfailed: {name}" for name in failed)
    )
    return 1 if failed else 0


def _write(
    name: str,
    results: Sequence[Any],
    about: Mapping[str, Any],
    options: argparse.Namespace,
) -> list[str]:
    """Writes the results of a script's rounds so far; returns their table."""
    if not results[0]["rows"]:
        return []
    merged = {
        **results[0],
        **about,
        "rows": merge([result["rows"] for result in results]),
    }
    (
        options.results / f"{name}{'-studies' if options.studies else ''}.json"
    ).write_text(_as_json(merged))
    return list(table(name, merged["rows"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="times that each script runs"
    )
    parser.add_argument(
        "--turns", type=int, default=3, help="measured turns of each side in a script"
    )
    parser.add_argument(
        "--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), metavar="NAME"
    )
    parser.add_argument(
        "--studies",
        action="store_true",
        help="the long rows that scripts leave out, once",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes and one round, to see that all of it runs",
    )
    parser.add_argument(
        "--yardsticks",
        action="store_true",
        help="print the machine's own figures, and nothing else",
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="folder of the results; with --quick a temporary one",
    )
    options = parser.parse_args()
    if options.quick or options.studies:
        options.rounds = 1
    options.results = options.results or (
        Path(tempfile.mkdtemp()) if options.quick else RESULTS
    )
    return options


def _run(name: str, options: argparse.Namespace) -> Any:
    """The JSON of one run of a script; its progress goes to stderr.

    Raises:
        RuntimeError: the script failed, or was not done within its limit; it and its processes are ended.
    """
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / f"{name}.py"),
        "--turns",
        str(options.turns),
    ]
    command += [
        flag
        for flag, given in (("--quick", options.quick), ("--studies", options.studies))
        if given
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    limit_s = STUDIES_LIMIT_S if options.studies else LIMIT_S
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise RuntimeError(f"not done after {limit_s} s") from None
    except BaseException:
        os.killpg(process.pid, 9)
        raise
    if process.returncode:
        raise RuntimeError(
            f"exit code {process.returncode}; its last lines stand above"
        )
    return json.loads(output.splitlines()[-1])


def merge(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """One row for each name: medians of the rounds, and the range over all of them."""
    merged = []
    for rows in zip(*rounds, strict=True):
        one: dict[str, Any] = dict(rows[0])
        for key in ("baseline", "ours", "ratio", "ceiling"):
            if any(row[key] is None for row in rows):
                one[key] = None
            else:
                one[key] = float(
                    f"{statistics.median(float(str(row[key])) for row in rows):.4g}"
                )
        one["low"], one["high"] = (
            min(row["low"] for row in rows),
            max(row["high"] for row in rows),
        )  # type: ignore[type-var]
        if one["required"] is not None:
            figure = one["ours"] if one["ratio"] is None else one["ratio"]
            less = one["ratio"] is None and one["better"] == "less"
            one["held"] = (
                figure <= one["required"] if less else figure >= one["required"]
            )
        merged.append(one)
    return merged


def machine(quick: bool) -> dict[str, float]:
    """The machine's own yardsticks, none of which runs any of our code; their memory is a process's of its own."""
    return last_json(
        [sys.executable, __file__, "--yardsticks", *(["--quick"] if quick else [])]
    )  # type: ignore[no-any-return]


def _copy(quick: bool) -> float:
    import numpy as np

    source = np.ones((16 if quick else 256) * 2**20 // 4, dtype=np.float32)
    target = np.empty_like(source)
    seconds = in_turn({"copy": lambda: np.copyto(target, source)}, 5)["copy"]
    return 2 * source.nbytes / statistics.median(seconds) / 1e9


def _random_reads(quick: bool) -> float:
    import numpy as np

    rows = np.ones(((2**14 if quick else 2**22), 64), dtype=np.float32)
    places = np.random.default_rng(0).permutation(len(rows))[:200_000]
    out = np.empty((len(places), 64), dtype=np.float32)
    seconds = in_turn(
        {"rows": lambda: np.take(rows, places, axis=0, out=out, mode="clip")}, 5
    )["rows"]
    return len(places) / statistics.median(seconds) / 1e6


def _products(quick: bool) -> float:
    import torch

    torch.set_num_threads(1)
    size = 256 if quick else 1024
    matrix = torch.rand(size, size)
    seconds = in_turn({"product": lambda: matrix @ matrix}, 5)["product"]
    return 2 * size**3 / statistics.median(seconds) / 1e9


def _interpreter(quick: bool) -> float:
    count = 10**5 if quick else 3 * 10**6

    def loop() -> None:
        for _ in range(count):
            pass

    return count / statistics.median(in_turn({"loop": loop}, 3)["loop"]) / 1e6


def _disk(quick: bool) -> float:
    size = 32 if quick else 1024
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 if quick else 3):
            start = time.perf_counter()
            command = [
                "dd",
                "if=/dev/zero",
                f"of={folder}/dd",
                "bs=4M",
                f"count={size // 4}",
                "conv=fsync",
                "status=none",
            ]
            subprocess.run(command, check=True, timeout=300)
            rates.append(size / 1024 / (time.perf_counter() - start) * 1.073741824)
    return statistics.median(rates)


def _two_processes(quick: bool) -> float:
    """How many times one process's work two processes get done that never talk."""
    one, two = (on_ranks(_work, ranks, 2 if quick else 5) for ranks in (1, 2))
    return sum(1 / seconds for seconds in two) * one[0]


def _work(_: object, turns: int) -> float:
    """Seconds of products that fit into a core's cache."""
    import torch
    import torch.distributed as dist

    matrix = torch.rand(256, 256)
    return statistics.median(
        in_turn({"": lambda: matrix @ matrix}, turns, 2000, before=dist.barrier)[""]
    )


YARDSTICKS: Mapping[str, Callable[[bool], float]] = {
    "GB/s copied in memory": _copy,
    "M random rows of 256 bytes/s": _random_reads,
    "GFLOP/s of one core": _products,
    "M steps/s of a Python loop": _interpreter,
    "GB/s written by dd conv=fsync": _disk,
    "times one process's work, by two that never talk": _two_processes,
}


def _spread(yardsticks: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Least, median and greatest of each yardstick over the rounds."""
    spread = {}
    for unit in YARDSTICKS:
        each = [round_[unit] for round_ in yardsticks]
        spread[unit] = [
            float(f"{value:.3g}")
            for value in (min(each), statistics.median(each), max(each))
        ]
    return spread


def _yardsticks(yardsticks: Sequence[Mapping[str, float]]) -> str:
    return ", ".join(
        f"{middle:g} {unit}" for unit, (_, middle, _) in _spread(yardsticks).items()
    )


def commit() -> str:
    """The commit that is measured; ``+`` where files differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", ".", ":!benchmarks/results"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    return head + "+" * bool(changed)


def _cpu() -> str:
    """The processor, its cores and the widest vectors that torch uses on it, by which kernels are chosen."""
    import torch

    lines = (
        Path("/proc/cpuinfo").read_text().splitlines()
        if Path("/proc/cpuinfo").exists()
        else []
    )
    names = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} cores, {torch.backends.cpu.get_cpu_capability()}"


def _busy_cores(seconds: float = 2.0) -> float:
    """Cores that others keep busy."""

    def busy() -> float:
        fields = [
            int(field)
            for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        ]
        return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")

    if not Path("/proc/stat").exists():
        return 0.0
    before = busy()
    time.sleep(seconds)
    return (busy() - before) / seconds


def table(name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of a result as a person reads it."""
    yield f"== {name}"
    for row in rows:
        figures = " ".join(
            f"{row[key]:>12,.4g}" if row[key] is not None else " " * 12
            for key in ("baseline", "ours")
        )
        ratio = (
            ""
            if row["ratio"] is None
            else f"{row['ratio']:.3g}x ({row['low']:.3g} to {row['high']:.3g})"
        )
        ceiling = "" if row["ceiling"] is None else f"ceiling {row['ceiling']:.3g}x"
        yield f"{row['name'][:60]:60s} {figures} {row['unit']:22s} {ratio:24s} {ceiling}".rstrip()


def _as_json(result: Mapping[str, Any]) -> str:
    """Text with one row a line, so that differences of two results can be read."""
    head = {key: value for key, value in result.items() if key != "rows"}
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n'


def _minutes(start: float) -> str:
    return f"{(time.monotonic() - start) / 60:.0f} min"


if __name__ == "__main__":
    sys.exit(main())
