"""Plan tables for devices one does not have: `torchx run rec.plan` or `python -m torchx_apps.plan`; no GPU is needed.

This file reads the command line and returns an exit code; the work is done by `torchx_apps.jobs.planning`.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from torchx_apps.cli.command_line import build_parser, describe_keys
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.cli.plan_flags import check_flags
from torchx_apps.cli.process import exit_code, say_once
from torchx_apps.recipes.by_name import list_recipes, load_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, and turns whatever happens into an exit code.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when there is a plan, 1 when there is none or a flag is wrong, 130 after Ctrl-C.
    """
    return exit_code(_plan, argv)


def _plan(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    if options.list_recipes:
        return say_once(list_recipes())
    if bool(options.recipe) == bool(options.tables):
        raise ValueError(
            "give --tables NAME=ROWSxDIM,..., or --recipe NAME for the tables of a recipe, and not both"
        )
    if options.set and not options.recipe:
        raise ValueError(
            f"--set {options.set[0]}: it changes a recipe; give one with --recipe"
        )
    job = None
    plan = None
    if options.recipe:
        job = apply_overrides(load_recipe(options.recipe), options.set)
        plan = job.plan
    if options.dry_run:
        return say_once(options.tables if job is None else describe_keys(job))
    check_flags(options, plan)
    # Imports make objects that stay: collections took a seventh of their time, and
    # freed nothing.
    gc.disable()
    from torchx_apps.jobs.planning import run_plan

    gc.freeze()
    gc.enable()
    return run_plan(options, job)


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("torchx_apps.plan", __doc__, trains=False)
    parser.set_defaults(recipe=None)
    parser.add_argument(
        "--tables",
        help="NAME=ROWSxDIM, or NAME=ROWSxDIMxIDS with the mean ids of a row; K, M and B; by commas",
    )
    parser.add_argument(
        "--world-size", type=int, default=8, help="devices, a process each"
    )
    parser.add_argument(
        "--local-world-size",
        type=int,
        help="devices of a host; 8, or all where there are fewer",
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_numbers(
        {
            "--hbm": (80.0, "GiB of memory of a GPU"),
            "--ddr": (
                1024.0,
                "GiB of memory of a host; beside GPUs 0: tables stay on them",
            ),
            "--ssd": (0.0, "GiB of SSD of a host, for --kernel key_value"),
            "--intra": (600.0, "GiB/s that a device sends to those of its host"),
            "--inter": (12.5, "GiB/s that a device sends to those of other hosts"),
            "--memory-rate": (
                0.0,
                "GiB/s of the memory of tables; TorchRec's figure where 0",
            ),
            "--reserve": (0.15, "share of memory for all but tables"),
        }
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        help="rows of a device and step; the recipe's, or 1024",
    )
    parser.add_argument(
        "--sharding",
        help="auto, or one sharding type for every table; the recipe's, or auto",
    )
    parser.add_argument(
        "--kernel",
        help="auto, or one compute kernel for every table; the recipe's, or auto",
    )
    parser.add_argument(
        "--cache-load-factor",
        type=float,
        help="share of rows cached on a GPU; the recipe's, or TorchRec's .2",
    )
    parser.add_argument(
        "--optimizer", help="optimizer of the tables; the recipe's, or row_wise_adagrad"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for plan.txt, plan.json and a picture of memory by rank",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the plan as JSON instead"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
