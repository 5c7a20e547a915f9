"""Every benchmark, alone on this machine; writes benchmarks/results/all.json.

    python benchmarks/all.py [--turns 3] [--only NAME ...] [--quick] [--results FILE]

Each program runs in a process of its own, and the file is written after each. A row names its run: commit, date,
versions and machine. Rows of programs that do not run keep their figures. Run it on a machine that does nothing else:
it refuses to begin if others keep a core busy. `gpu.py` runs if there is a GPU. `quality.py`, hours of training, runs
by itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import ROOT, last_json

RESULTS = ROOT / "benchmarks" / "results" / "all.json"
LIMIT_S = 1500  # of one program
PROGRAMS = (
    "ncf",
    "towers",
    "networks",
    "loader",
    "chain",
    "sharding",
    "serving",
    "diagnose",
    "ids",
    "stream",
)


def main():
    options = _options()
    if not options.quick and (busy := os.getloadavg()[0]) > 0.5:
        print(
            f"others keep {busy:.1f} cores busy: stop them first; their work would change the figures",
            file=sys.stderr,
        )
        return 2
    # A number of threads that somebody exported would be that of a baseline that takes
    # torch's own.
    for name in [name for name in os.environ if name.endswith("_NUM_THREADS")]:
        del os.environ[name]
    about = {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "on": _machine(),
    }
    failed = []
    for name in options.only:
        print(name, flush=True)
        try:
            command = [sys.executable, ROOT / "benchmarks" / f"{name}.py"]
            command += ["--turns", options.turns, *["--quick"] * options.quick]
            made = last_json(command, limit_s=LIMIT_S)
        except (RuntimeError, TimeoutError) as error:
            failed.append(name)
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
        else:
            # After each, so that a run that is ended keeps what came before.
            _write(name, made, about, options.results)
    print(f"results in {options.results}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _write(name, made, run, path):
    """Replaces the rows of a program, and drops the runs that no row names any more."""
    kept = json.loads(path.read_text()) if path.exists() else {"runs": {}, "rows": []}
    key = f"{run['commit']} {run['date']}"
    versions = kept["runs"].get(key, {}).get("versions", {}) | made["versions"]
    rows = [row for row in kept["rows"] if row["program"] != name]
    # Written by hand: what limits a row.
    limits = {row["name"]: row.get("limit") for row in kept["rows"]}
    for row in made["rows"]:
        limit = limits.get(row["name"])
        rows.append({"program": name, **row, "run": key, "limit": limit})
    rows.sort(key=lambda row: (*PROGRAMS, "gpu").index(row["program"]))
    named = {row["run"] for row in rows}
    runs = {**kept["runs"], key: {**run, "versions": versions}}
    runs = {key: each for key, each in runs.items() if key in named}
    # One row a line, so that differences of two results can be read.
    texts = [f"{json.dumps(key)}: {json.dumps(each)}" for key, each in runs.items()]
    lines = [json.dumps(row) for row in rows]
    parts = [",\n  ".join(each) for each in (texts, lines)]
    path.write_text(
        f'{{\n "runs": {{\n  {parts[0]}\n }},\n "rows": [\n  {parts[1]}\n ]\n}}\n'
    )


def _options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # each device has its node there
    usual = [*PROGRAMS, *(["gpu"] if Path("/dev/nvidia0").exists() else [])]
    known = [*PROGRAMS, "gpu"]
    parser.add_argument("--turns", type=int, default=3, help="turns of each side")
    parser.add_argument("--only", nargs="+", choices=known, default=usual)
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    parser.add_argument("--results", type=Path, help="file; by --quick a temporary one")
    options = parser.parse_args()
    quick = Path(tempfile.gettempdir(), f"benchmarks-{os.getpid()}.json")
    options.results = options.results or (quick if options.quick else RESULTS)
    return options


def commit(*folders):
    """The last commit, or the last that touched these folders; ``+`` if files differ from it."""

    def git(*words):
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    measured = folders or (".", ":!benchmarks/results")
    changed = git("status", "--porcelain", "--", *measured)
    return git("log", "-1", "--format=%h", "--", *folders) + "+" * bool(changed)


def _machine():
    """The processor, its cores, the widest vectors that torch uses on it, and the GPU."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    cores = len(os.sched_getaffinity(0))
    on = f"{name}, {cores} cores, {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available():
        on += f", {torch.cuda.get_device_name(0)}"
    return on


if __name__ == "__main__":
    sys.exit(main())
