"""Everything that needs a GPU, once: the tests marked `gpu`, and what each of its parts gains; `make gpu` runs it.

    python benchmarks/gpu.py [--only ROW ...] [--turns 3] [--quick] [--results DIR]

It writes DIR/tests.json (each test's outcome), DIR/gpu.json (the rows below), and those of the scripts that use a GPU
where there is one, negatives.py and mixed_precision.py. A row trains one recipe on generated data with a part and
without it, in turn; both learn the same. What this machine has too little of, such as a second GPU, is named and left
out. Exit code 1 where a test or a row failed, or there is no GPU; `--quick` runs the rows on a CPU as well, at small
sizes, without the tests.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import ROOT, Options, Row, row

from torchrec_ext.networks.gpu_sharing import mps_is_running

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
SCRIPTS = {"negatives": [], "mixed_precision": ["--studies"]}
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICE = "cuda" if GPUS else "cpu"
SIZES = ("data.name=planted", "export=never", "train.early_stop.metric=", f"device={DEVICE}")
SMALL = ("train.epochs=1", "loader.batch_size=256")
FEW = ("data.users=200", "data.items=100")  # of the recipes that learn pairs; the rows of n_tower are few as they are


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
    several = "" if GPUS != 1 else "a second GPU"
    sharing = "" if mps_is_running(os.environ) or not GPUS else "MPS, which `nvidia-cuda-mps-control -d` starts"
    return {
        "resident data": Part("two_tower", ("train.compile=off",), here),
        "captured steps": Part("two_tower", here, (f"loader.device={DEVICE}", "train.compile=require")),
        "towers on streams": Part("n_tower", here, (*here, "streams=true")),
        "two ranks, NCCL": Part("two_tower", here, here, ranks=(1, 2), missing=several),
        "two processes on one GPU, MPS": Part("two_tower", here, here, together=2, missing=sharing),
    }


def main() -> int:
    options = _options()
    if not GPUS and not options.quick:
        print("gpu.py: torch sees no GPU here; `python -m torchrec_ext.doctor` says why", file=sys.stderr)
        return 1
    about = {
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(0) if GPUS else "cpu",
        "gpus": GPUS,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
    }
    options.results.mkdir(parents=True, exist_ok=True)
    write = functools.partial(_write, options.results, about)
    failed = []
    rows, missing = [], {}
    for name in options.only:
        part = parts()[name]
        if part.missing:
            missing[name] = part.missing
            print(f"{name}: left out, since this machine lacks {part.missing}", flush=True)
            continue
        try:
            rows += list(compared(name, part, Options(turns=options.turns, quick=options.quick)))
        except RuntimeError as error:
            failed.append(name)
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
    write("gpu", {"benchmark": "gpu", "rows": rows, "left_out": missing, "failed": failed})
    if not options.quick:
        outcomes = tested()
        write("tests", {"tests": outcomes})
        print("; ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes.values()).items()), flush=True)
        failed += [name for name, outcome in outcomes.items() if outcome in ("failure", "error")]
        for script, flags in SCRIPTS.items():
            done = subprocess.run([sys.executable, f"benchmarks/{script}.py", *flags], cwd=ROOT, stdout=subprocess.PIPE)
            if done.returncode:
                failed.append(script)
            else:
                write(script, json.loads(done.stdout.splitlines()[-1]))
    print(f"results in {options.results}" + "".join(f"\nfailed: {name}" for name in failed), flush=True)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=parts(), default=list(parts()), metavar="ROW")
    parser.add_argument("--turns", type=int, default=3, help="trainings of each side")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that the rows run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


def _write(folder: Path, about: Mapping[str, Any], name: str, result: Mapping[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({**result, **about}, indent=1) + "\n")


def compared(name: str, part: Part, options: Options) -> Iterator[Row]:
    """Trains without the part and with it, in turn."""
    few = () if part.recipe == "n_tower" else FEW
    size = (*SMALL, *few) if options.quick else ()
    before, after = [], []
    for _ in range(1 if options.quick else options.turns):
        before.append(trained(part.recipe, (*SIZES, *part.without, *size), part.ranks[0]))
        run = functools.partial(trained, part.recipe, (*SIZES, *part.part, *size), part.ranks[1])
        with ThreadPoolExecutor(part.together) as pool:
            after.append([each.result() for each in [pool.submit(run) for _ in range(part.together)]])
    quality = {figure: [before[0]["test"][figure], after[0][0]["test"][figure]] for figure in before[0]["test"]}
    yield row(
        name,
        [sum(run["samples_per_s"] for run in runs) for runs in after],
        "samples/s",
        baseline=[run["samples_per_s"] for run in before],
        better="more",
        device=DEVICE,
        quality=quality,
    )


def trained(recipe: str, settings: tuple[str, ...], ranks: int) -> dict[str, Any]:
    """Returns the summary of one run.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        launch = ["-m", "torchx_apps.agent", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        flags = [f"--set={setting}" for setting in settings]
        app = ["-m", "torchx_apps.train", "--recipe", recipe, "--run-dir", f"{folder}/run", *flags]
        done = subprocess.run([sys.executable, *launch, *app], capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"{recipe} with {settings}: exit code {done.returncode}:\n{done.stderr[-2000:]}")
        summary: dict[str, Any] = json.loads((Path(folder) / "run" / "summary.json").read_text())
        return summary


def tested() -> dict[str, str]:
    """Runs every test marked `gpu`, the slow ones too; returns by name passed, skipped, failure or error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        chosen = "gpu or (gpu and slow)"  # conftest.py leaves slow tests out where nobody names them
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", chosen, f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT)
        return outcomes_of(report.read_text()) if report.exists() else {"pytest": "error"}


def outcomes_of(report: str) -> dict[str, str]:
    """Returns the outcome of each test of pytest's XML report.

    Example:
        >>> outcomes_of('<r><testcase classname="a" name="b"/><testcase classname="a" name="c"><skipped/></testcase>'
        ...             '</r>')
        {'a.b': 'passed', 'a.c': 'skipped'}
    """
    return {
        f"{case.get('classname')}.{case.get('name')}": next((child.tag for child in case), "passed")
        for case in ElementTree.fromstring(report).iter("testcase")
    }


if __name__ == "__main__":
    sys.exit(main())
