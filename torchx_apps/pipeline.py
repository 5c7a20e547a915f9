"""Preprocess, train and export as one job: `torchx run rec.pipeline.all`, or `python -m torchx_apps.pipeline`.

The stages are the apps preprocess, train and export of torchx_apps, whose results are the folders `data`, `run` and
`bundle` of --out. A stage whose folder is whole is left out, so the same command goes on where it was stopped. The
first and the last stage are a process of their own that the first rank starts, or becomes; every rank trains.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchx_apps import train
from torchx_apps.cli.command_line import build_parser
from torchx_apps.cli.export_flags import add_bundle_flags
from torchx_apps.cli.process import exit_code, say_once
from torchx_apps.jobs.pipeline import become, begin, check_record, run_alone, stages_of
from torchx_apps.recipes.by_name import list_recipes
from torchx_apps.recipes.preprocess import PREPROCESS_RECIPES

RECORD = "pipeline.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the missing stages, and turns any outcome into an exit code.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when the bundle is whole, 1 when not, 130 after Ctrl-C, 143 after SIGTERM, by when a training has been saved.
    """
    return exit_code(_pipeline, argv)


def _pipeline(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    if options.list_recipes:
        return say_once(
            f"--preprocess\n{list_recipes(PREPROCESS_RECIPES)}\n\n--recipe\n{list_recipes()}"
        )
    is_first = os.environ.get("RANK", "0") == "0"
    stages = stages_of(options)
    record = options.out / RECORD
    check_record(record, stages)
    if options.dry_run:
        return say_once(
            "\n\n".join(f"# {each.app}\n\n{each.keys}" for each in stages.values())
        )
    data, run, bundle = stages.values()
    if is_first:
        for stage in stages.values():
            if stage.whole:
                print(
                    f"{stage.app}: {stage.folder} is whole, of the same settings; it is not made again",
                    flush=True,
                )
    if is_first and not data.whole:
        code = run_alone(data, record)
        if code:
            return code
    data.wait()
    # Checked again, because the rows may have changed since the training began.
    check_record(record, stages)
    if not run.whole:
        if is_first:
            begin(run, record)
        code = train.main(run.flags)
        if code:
            return code
    if is_first and not bundle.whole:
        become(bundle, record)
    # If a rank ended before the others, Slurm would end them a minute later.
    bundle.wait()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("torchx_apps.pipeline", __doc__, trains=False)
    parser.set_defaults(recipe="stream")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for the folders data, run and bundle",
    )
    parser.add_argument(
        "--preprocess",
        default="ml_100k",
        help="a recipe of torchx_apps.preprocess; its keys are --set preprocess.KEY",
    )
    parser.add_argument(
        "--engine", help="of the preprocessing: duckdb, spark or a Spark master URL"
    )
    add_bundle_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
