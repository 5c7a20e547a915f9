"""What the asynchronous loader and 16 bits gain, alone and together, for each recipe; and what they cost in quality.

    python benchmarks/mixed_precision.py (--studies | --only RECIPE ...) [--turns 1] [--quick]

Each run is the command of a user, `python -m torchx_apps.train --recipe ...`, on one rank of one thread. The
baseline builds its batches in the training thread (loader.prefetch=0, loader.read_ahead=0) and computes in float32.
Three rows a recipe: `loader` has a thread that builds batches ahead (loader.prefetch=2) and one that reads files,
`bf16` the baseline's loader with train.amp=bf16, `bf16 and loader` both.
Rows are samples a second of the steps; `quality` has the named figure of the test rows for the baseline and for
ours, after fewer epochs than the recipe's own, with one seed. `device` says where they ran: with CUDA the rows are
made there, and again with fp16.
With fp16 each rank holds the tables whole, since a sharded one is moved inside the backward, by scaled gradients.
So that the 36 runs of one turn take less than 25 minutes on two cores that others use too, `two_tower` and `retrieval`
train one epoch, `retrieval` on MovieLens 100K and not on MovieLens 1M, and popularity alone stands beside a ranking.
Each run prints its seconds, from its command to its end.
A recipe whose data set is not in TORCHREC_EXT_DATA is left out. Last line: one JSON object.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, Options, Row, command_line, has_data, row

from torchx_apps.config import with_settings
from torchx_apps.recipes.by_name import load_recipe

# EASE would be solved for in each run
_BESIDE = ("evaluation.baselines=popularity",)
# Epochs that are enough to compare, the figure that is compared, and further settings.
RECIPES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "two_tower": (1, "hr@10", _BESIDE),
    "retrieval": (1, "hr@10", ("data.name=ml-100k", *_BESIDE)),
    "ncf": (1, "hr@10", _BESIDE),
    "contextual_ncf": (2, "auc", ()),
    "n_tower": (2, "auc", ()),
    "session": (2, "ndcg@10", _BESIDE),
    "stream": (2, "auc", _BESIDE),
    "bst": (2, "auc", ()),
    "multi_task": (2, "conversion_auc", _BESIDE),
}
PLAIN = ("loader.prefetch=0", "loader.read_ahead=0")
# as with a GPU; where it is not given, a CPU's loader measures whether it is faster
AHEAD = ("loader.prefetch=2",)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def trained(recipe: str, epochs: int, settings: tuple[str, ...]) -> dict[str, Any]:
    """The summary of one run."""
    with tempfile.TemporaryDirectory() as name:
        words = [
            f"train.epochs={epochs}",
            f"device={DEVICE}",
            "export=never",
            "train.early_stop.metric=",
            *settings,
        ]
        flags = [f"--{setting}" for setting in words]
        command = [
            sys.executable,
            "-m",
            "torchx_apps.train",
            "--recipe",
            recipe,
            "--run_dir",
            f"{name}/run",
            *flags,
        ]
        # as `torchx run` starts a rank
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment
        )
        if done.returncode:
            raise RuntimeError(
                f"{command} ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
            )
        summary: dict[str, Any] = json.loads(
            (Path(name) / "run" / "summary.json").read_text()
        )
        return summary


def compared(recipe: str, options: Options) -> Iterator[Row]:
    epochs, figure, more = RECIPES[recipe]
    data = with_settings(load_recipe(recipe), list(more)).data.name
    if data != "planted" and not has_data(recipe, data):
        return
    kinds = ("bf16", "fp16") if DEVICE == "cuda" else ("bf16",)
    variants = {"plain": PLAIN, "loader": AHEAD}
    for kind in kinds:
        precision = (
            f"train.amp={kind}",
            *(("plan.sharding=data_parallel",) if kind == "fp16" else ()),
        )
        variants |= {
            kind: (*PLAIN, *precision),
            f"{kind} and loader": (*AHEAD, *precision),
        }
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for turn in range(1 if options.quick else options.turns):
        for name, settings in variants.items():
            begun = time.monotonic()
            run = trained(recipe, 1 if options.quick else epochs, (*more, *settings))
            made[name].append(run)
            said = (
                f"{recipe}, {name}, turn {turn + 1}: {time.monotonic() - begun:.0f} s"
            )
            print(
                f"{said}, {run['samples_per_s']:,.0f} samples/s",
                file=sys.stderr,
                flush=True,
            )
    baseline = made.pop("plain")
    for name, runs in made.items():
        yield row(
            f"{recipe}, {name}",
            [run["samples_per_s"] for run in runs],
            "samples/s",
            baseline=[run["samples_per_s"] for run in baseline],
            better="more",
            device=DEVICE,
            quality={
                figure: [
                    round(baseline[0]["test"][figure], 4),
                    round(runs[0]["test"][figure], 4),
                ]
            },
            waiting=[
                round(baseline[0]["data_wait"], 3),
                round(runs[0]["data_wait"], 3),
            ],
        )


def main() -> None:
    rows = {recipe: functools.partial(compared, recipe) for recipe in RECIPES}
    command_line(__doc__, rows, turns=1, studies=list(RECIPES))


if __name__ == "__main__":
    main()
