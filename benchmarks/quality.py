"""The quality table: every recipe on real data against the figure that the literature reports for it.

    python benchmarks/quality.py [--only NAME ...] [--quick] [--results FILE]

Each training is the command that a user types: `python -m torchx_apps.train --recipe ... --KEY VALUE`, or `torchx run`
for more than one rank. What is trained and how often stands in quality.json. A finished run is kept in the results file
with its command, figures, seconds and commit, so that a killed benchmark continues; with other code it is trained
again. Figures are those after the last epoch, the mean over the seeds, beside those of popularity and EASE. All rows
take three hours. Needs TORCHREC_EXT_DATA. `--quick` trains on generated data for about a minute.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path

from all import commit
from harness import BIN, ROOT, output

SPEC = Path(__file__).with_suffix(".json")
RESULTS = ROOT / "benchmarks" / "results" / "quality.json"
FOLDERS = ROOT / "runs" / "quality"
# that a run prints beside its ranking figures
BASELINES = ("popularity", "ease")
LIMIT_S = 3600.0  # of one training


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="rows; all by default")
    parser.add_argument("--quick", action="store_true", help="on generated data")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    spec = json.loads(SPEC.read_text())
    quick = spec.pop("quick")
    for name, row in (quick if options.quick else spec).items():
        if options.only and name not in options.only:
            continue
        made = {
            run: [
                trained(name, run, how, seed, options.results)
                for seed in range(row.get("seeds", 1))
            ]
            for run, how in row["runs"].items()
        }
        reached, beside = figures(row, made), beside_of(made, row["required"])
        line = {"name": name, "reached": reached, "required": row["required"]}
        print(json.dumps({**line, "beside": beside}), flush=True)


def runs_of(path):
    """All finished runs, the oldest first."""
    return json.loads(path.read_text()) if path.exists() else []


def figures(row, runs):
    """The mean of each required figure over the seeds.

    ``auc gain`` is how much more of it the run ``model`` has than the run ``without``; ``auc difference`` the greatest
    between the two runs of one seed that have an AUC.
    """
    found = {}
    for figure in row["required"]:
        name, _, how = figure.partition(" ")
        by_run = {
            run: [one["figures"][name] for one in some]
            for run, some in runs.items()
            if name in some[0]["figures"]
        }
        if how == "difference":
            pairs = zip(*by_run.values(), strict=True)
            found[figure] = max(abs(one - other) for one, other in pairs)
        else:
            found[figure] = statistics.fmean(by_run["model"])
            if how == "gain":
                found[figure] -= statistics.fmean(by_run["without"])
    return found


def beside_of(runs, names):
    """The means over the seeds of each baseline that the run ``model`` printed beside the figures that are required."""
    by_name = {}
    for baseline in BASELINES:
        some = [
            one["beside"][baseline]
            for one in runs.get("model", ())
            if baseline in one.get("beside", {})
        ]
        for figure in names:
            if some and figure in some[0]:
                mean = statistics.fmean(each[figure] for each in some)
                by_name.setdefault(baseline, {})[figure] = round(mean, 4)
    return by_name


def trained(name, run, how, seed, results):
    """The figures of one training, from the results file or made now."""
    key = {"id": name, "run": run, "recipe": how["recipe"], "data": how.get("data")}
    key |= {"set": [*how["set"], f"train.seed={seed}"], "ranks": how.get("ranks", 1)}
    current = {**key, "commit": commit("torchrec_ext", "torchx_apps")}
    kept = runs_of(results)
    for one in kept:
        if current.items() <= one.items() and not current["commit"].endswith("+"):
            return one
    start, folder = time.perf_counter(), FOLDERS / f"{name}-{run}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    words = command(key, folder)
    print(f"{name} {run}, seed {seed}: {' '.join(words)}", file=sys.stderr, flush=True)
    output(words, limit_s=LIMIT_S, OMP_NUM_THREADS="1")
    summary = json.loads((folder / "summary.json").read_text())
    beside = {each: summary[each] for each in BASELINES if each in summary}
    done = {**current, "figures": summary["test"], "beside": beside}
    done["seconds"] = round(time.perf_counter() - start, 1)
    kept = [one for one in kept if not key.items() <= one.items()] + [done]
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    return done


def command(key, folder):
    """What a user would type; a set of sets.py is written first."""
    settings, data = key["set"], key["data"]
    if data:
        import sets

        prepared = sets.prepare(data, FOLDERS / "sets" / data)
        settings = [f"data.name={prepared}", *settings]
    flags = []
    for setting in settings:
        name, _, value = setting.partition("=")
        # commas stand between the values of a tuple
        flags += [f"--{name}", *value.split(",")]
    where = ["--recipe", key["recipe"]], ["--run_dir", str(folder), *flags]
    if key["ranks"] == 1:
        return [sys.executable, "-m", "torchx_apps.train", *where[0], *where[1]]
    job = ["rec.train.hybrid", *where[0], "-j", f"1x{key['ranks']}", "--", *where[1]]
    return [str(BIN / "torchx"), "run", "-s", "local_cwd", *job]


if __name__ == "__main__":
    main()
