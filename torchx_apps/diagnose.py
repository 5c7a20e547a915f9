"""Say why a recipe's training is slow: `torchx run rec.diagnose.why_slow` or `python -m torchx_apps.diagnose`.

This file reads the command line and returns an exit code; the work is done by `torchx_apps.jobs.diagnosing`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torchx_apps.cli.command_line import build_parser, describe_keys
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.cli.process import exit_code, say_once
from torchx_apps.recipes.by_name import list_recipes, load_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Diagnoses, and turns whatever happens into an exit code.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when there is a page, 1 when a flag or the recipe is wrong, 130 after Ctrl-C.
    """
    return exit_code(_diagnose, argv)


def _diagnose(argv: Sequence[str] | None) -> int:
    parser = build_parser("torchx_apps.diagnose", __doc__, trains=False)
    parser.add_argument(
        "--budget",
        type=float,
        default=25.0,
        metavar="SECONDS",
        help="of the rounds of experiments; the first four may take three times as long",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for diagnosis.txt, .json and .html",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the page with pictures"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a Chrome trace of the measured steps",
    )
    parser.add_argument(
        "--apply",
        action="store_true",
        help="apply the remedies that keep the mathematics, and measure what they gain",
    )
    options = parser.parse_args(argv)
    if options.list_recipes:
        return say_once(list_recipes())
    if not options.budget > 0:
        raise ValueError(
            f"--budget {options.budget:g}: must be a number of seconds above 0"
        )
    job = apply_overrides(load_recipe(options.recipe), options.set)
    if options.dry_run:
        return say_once(describe_keys(job))
    from torchx_apps.jobs.diagnosing import run_diagnosis

    return run_diagnosis(
        job,
        budget_s=options.budget,
        as_json=options.json,
        out=options.out,
        html=options.html,
        trace=options.trace,
        apply=options.apply,
    )


if __name__ == "__main__":
    sys.exit(main())
