"""The quality table: every recipe on real data against the figure that the literature reports for it.

    python benchmarks/quality.py [--only session-beauty,demo] [--seeds 3] [--quick] [--results FILE]

Each training is the command that a user types: `python -m torchx_apps.train --recipe ... --KEY VALUE`, or `torchx run`
for more than one rank. What is trained, how often and what is required stands in quality.json. A finished run is kept
in the results file with its command, figures, seconds and commit, so that a killed benchmark continues. The commit is
the last one that touched the package's code: with other code the run is trained again, and with uncommitted changes of
it every run is. Figures are those after the last epoch, the mean over the seeds; `beside` has those of popularity and
EASE as the runs print them, and `minutes` what the row took. All rows take three hours. Needs TORCHREC_EXT_DATA. Last
lines: one JSON object for each id, `ratio` being the lowest of reached / required over its figures (of required /
reached where less is better).

--quick trains on generated data for about a minute, against figures known there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchx_apps.config import as_words
from torchx_apps.recipes.by_name import load_recipe

ROOT = Path(__file__).resolve().parent.parent
SPEC = Path(__file__).with_suffix(".json")
RESULTS = ROOT / "benchmarks" / "results" / "quality.json"
FOLDERS = ROOT / "runs" / "quality"
# prepared folders of published splits, see sets.py
SETS = FOLDERS / "sets"
BIN = Path(sys.executable).parent
# that a run prints beside its ranking figures
BASELINES = ("popularity", "ease")
LESS_IS_BETTER = ("log_loss", "difference")
# what a run is told, and all that its figures depend on but the code
COMMAND = ("id", "run", "recipe", "set", "ranks")

Row = dict[str, Any]


def main() -> int:
    options = _options()
    spec = json.loads(SPEC.read_text())
    table = (
        spec["quick"]
        if options.quick
        else {name: row for name, row in spec.items() if name != "quick"}
    )
    chosen = options.only.split(",") if options.only else list(table)
    if unknown := sorted(set(chosen) - set(table)):
        print(
            f"--only {','.join(unknown)}: choose from {', '.join(table)}",
            file=sys.stderr,
        )
        return 2
    results = Results(options.results)
    rows = [measure(name, table[name], options.seeds, results) for name in chosen]
    for row in rows:
        print(json.dumps(row))
    return 0 if all(row["ok"] for row in rows) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="ids, with commas; all where not given")
    parser.add_argument(
        "--seeds",
        type=int,
        help="runs of each, seeds from 0; as quality.json says where not given",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a minute on generated data"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where finished runs are kept"
    )
    return parser.parse_args()


class Results:
    """Finished runs, in a file that is whole after each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def runs(self) -> list[Row]:
        """All finished runs, the oldest first."""
        return json.loads(self._path.read_text()) if self._path.exists() else []

    def find(self, key: Row) -> Row | None:
        """The run of that command by that commit's code, if it is done."""
        return next(
            (
                run
                for run in self.runs()
                if all(run.get(name) == value for name, value in key.items())
            ),
            None,
        )

    def add(self, run: Row) -> None:
        """Keeps a run in the place of one of the same command, and beside those that another process has added."""
        command = {name: run.get(name) for name in COMMAND}
        runs = [
            kept
            for kept in self.runs()
            if any(kept.get(name) != value for name, value in command.items())
        ] + [run]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")
        part.replace(self._path)


def measure(name: str, row: Row, seeds: int | None, results: Results) -> Row:
    """All runs of one id, and how they compare with what is required."""
    runs = row.get("runs") or {"model": {"recipe": "", "set": [row["popularity_of"]]}}
    seeds = seeds or row.get("seeds", 1) if "runs" in row else 1
    made = {
        run: [trained(name, run, how, seed, results) for seed in range(seeds)]
        for run, how in runs.items()
    }
    reached = figures(row, made)
    seconds = sum(one["seconds"] for some in made.values() for one in some)
    ratio = min(
        _ratio(figure, reached[figure], required, row.get("tolerance"))
        for figure, required in row["required"].items()
    )
    return {
        "name": name,
        "what": row["what"],
        "reached": {figure: round(value, 4) for figure, value in reached.items()},
        "required": row["required"],
        "reach_for": row.get("reach_for"),
        "beside": beside_of(made, row["required"]),
        "seeds": seeds,
        "minutes": round(seconds / 60, 1),
        "seconds": round(seconds),
        "ratio": round(ratio, 4),
        "ok": ratio >= 1,
    }


def figures(row: Row, runs: Mapping[str, Sequence[Row]]) -> dict[str, float]:
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
        if how == "gain":
            found[figure] = statistics.fmean(by_run["model"]) - statistics.fmean(
                by_run["without"]
            )
        elif how == "difference":
            found[figure] = max(
                abs(one - other) for one, other in zip(*by_run.values(), strict=True)
            )
        else:
            found[figure] = statistics.fmean(by_run["model"])
    return found


def beside_of(
    runs: Mapping[str, Sequence[Row]], names: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """The means over the seeds of each baseline that the run ``model`` printed beside the figures that are required."""
    by_name = {}
    for name in BASELINES:
        some = [
            one["beside"][name]
            for one in runs.get("model", ())
            if name in one.get("beside", {})
        ]
        if some:
            shown = [figure for figure in names if figure in some[0]]
            by_name[name] = {
                figure: round(statistics.fmean(figures[figure] for figures in some), 4)
                for figure in shown
            }
    return by_name


def _ratio(
    figure: str, reached: float, required: float, tolerance: float | None
) -> float:
    if tolerance is not None:
        return (
            1.0
            if abs(reached - required) <= tolerance
            else min(reached / required, required / reached)
        )
    return (
        min(required / max(reached, 1e-9), 10.0)
        if figure.endswith(LESS_IS_BETTER)
        else reached / required
    )


def trained(name: str, run: str, how: Row, seed: int, results: Results) -> Row:
    """The figures of one training, or of the popularity ranking, from the results file or made now."""
    overrides = [*how["set"], f"train.seed={seed}"] if how["recipe"] else how["set"]
    key = {
        "id": name,
        "run": run,
        "recipe": how["recipe"],
        "set": overrides,
        "ranks": how.get("ranks", 1),
    }
    key["commit"] = code_commit()
    kept = results.find(key)
    if kept is not None and not key["commit"].endswith("+"):
        return kept
    start, beside = time.perf_counter(), {}
    if how["recipe"]:
        folder = FOLDERS / f"{name}-{run}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        _follow(
            command(key, folder),
            f"{name} {run}, seed {seed}",
            folder.with_suffix(".log"),
        )
        reached, beside = results_of(folder)
    else:
        reached = popularity(how["set"][0])
    done = {
        **key,
        "figures": reached,
        "beside": beside,
        "seconds": round(time.perf_counter() - start, 1),
    }
    results.add(done)
    return done


def results_of(folder: Path) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The test figures of a run, and those of the baselines beside."""
    summary = json.loads((folder / "summary.json").read_text())
    return summary["test"], {
        name: summary[name] for name in BASELINES if name in summary
    }


def code_commit() -> str:
    """The last commit that touched the package's code; ``+`` where files of it differ from the commit."""
    git = ["git", "-C", str(ROOT)]
    code = ["--", "torchrec_ext", "torchx_apps"]
    last = subprocess.run(
        [*git, "log", "-1", "--format=%h", *code], capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", *code], capture_output=True, text=True
    ).stdout.strip()
    return last + "+" * bool(changed)


def command(key: Row, folder: Path) -> list[str]:
    """What a user would type."""
    flags = as_words(load_recipe(key["recipe"]), [*map(prepared, key["set"])])
    if key["ranks"] == 1:
        return [
            sys.executable,
            "-m",
            "torchx_apps.train",
            "--recipe",
            key["recipe"],
            "--run_dir",
            str(folder),
            *flags,
        ]
    job = [
        "rec.train.hybrid",
        "--recipe",
        key["recipe"],
        "-j",
        f"1x{key['ranks']}",
        "--",
        "--run_dir",
        str(folder),
    ]
    return [str(BIN / "torchx"), "run", "-s", "local_cwd", *job, *flags]


def prepared(text: str) -> str:
    """A setting with the folder of a published split in the place of ``{sets}/NAME``; it is written first."""
    start, mark, name = text.partition("{sets}/")
    if not mark:
        return text
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import sets

    return start + str(sets.prepare(name, SETS / name))


def _follow(line: Sequence[str], title: str, log: Path) -> None:
    """Runs a command; its progress goes to stderr, all it says into a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{title}: {' '.join(line)}", file=sys.stderr)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for text in _lines(process):
            file.write(text)
            if "epoch " in text and "step " in text:
                print(
                    f"{title}: {text[text.index('epoch ') :].rstrip()}",
                    file=sys.stderr,
                    flush=True,
                )
    if process.wait():
        raise SystemExit(
            f"{title} ended with exit code {process.returncode}; the end of {log}:\n"
            + log.read_text()[-2000:]
        )


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    try:
        yield from process.stdout
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def popularity(data: str) -> dict[str, float]:
    """Returns HR@10 and NDCG@10 of the popularity ranking; the target loses ties, as in the published evaluation."""
    import torch

    from torchrec_ext.data.sets import load_dataset
    from torchrec_ext.train.metrics import Candidates, gains_among, ranking_metrics
    from torchx_apps.tasks.evaluator import held_out_rows, question_of

    rows = load_dataset(prepared(data))
    question = question_of(rows, "test", held_out_rows(rows, "test"), ()).question
    assert isinstance(question, Candidates)
    counts = torch.from_numpy(rows.popularity)[question.ids.clamp(min=0)].double()
    # Half a count more for all but the target: it loses every tie.
    counts[:, 1:] += 0.5
    return ranking_metrics(question.hits(gains_among(counts, question.ids, 10)))


if __name__ == "__main__":
    sys.exit(main())
