"""What a newcomer waits for: import, listing components, the demo job, and the memory of one of its ranks.

    python benchmarks/first_use.py [--repeats 5] [--cold]

The demo job is timed by the clock of whoever types the command, from `torchx run` to the prompt, on MovieLens 100K
where it is found. --cold also clones this repository and times `make demo` from nothing, installation included. Last
line: one JSON object.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def seconds(command: Sequence[str | Path], cwd: Path = ROOT) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=cwd, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def interleaved(repeats: int, *commands: Sequence[str | Path]) -> list[float]:
    """The median of each command, all run in turn."""
    times = [[seconds(command) for command in commands] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def row(name: str, ours: float, unit: str, required: float, baseline: float | None = None) -> dict[str, object]:
    """``ratio`` is the limit over what was measured: 1 or more keeps it."""
    return {
        "name": name,
        "baseline": baseline,
        "ours": round(ours, 3),
        "unit": unit,
        "ratio": round(required / ours, 2),
        "required": required,
        "ceiling": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="also time `make demo` in a new clone")
    options = parser.parse_args()
    python = [sys.executable, "-c"]
    nothing, package, torch_alone = interleaved(
        options.repeats, [*python, "pass"], [*python, "import torchrec_ext"], [*python, "import torch"]
    )
    (builtins,) = interleaved(options.repeats, [BIN / "torchx", "builtins"])
    rows = [
        row("import", (package - nothing) * 1e3, "ms", 50, round((torch_alone - nothing) * 1e3, 1)),
        row("builtins", builtins, "s", 1.0),
    ]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [BIN / "torchx", "run", "rec.train.hybrid", "--run_dir", run, "--set", "fallback=planted"]
        job = seconds([str(part) for part in command])
        summary = json.loads((run / "summary.json").read_text())
        rows += [
            row("demo-job", job, "s", 90),
            row("rank-memory", summary["peak_memory_mib"], "MiB", 1536),
        ]
        if options.cold:
            subprocess.run(["git", "clone", "-q", ROOT, f"{folder}/clone"], check=True)
            rows.append(row("make-demo-from-nothing", seconds(["make", "demo"], Path(folder) / "clone"), "s", 360))
    for name, value in summary["test"].items():
        print(
            f"demo, {name} on the test items: {value:.4f} (popularity: "
            f"{summary['popularity'].get(name, float('nan')):.4f})"
        )
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchrec", "torchx", "torchrec-ext")}
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"benchmark": "first_use", "versions": versions, "cores": cores, "rows": rows}))


if __name__ == "__main__":
    main()
