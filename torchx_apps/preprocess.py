"""Preprocess a recipe's files: `torchx run rec.data.preprocess` or `python -m torchx_apps.preprocess`.

This file reads the command line and returns an exit code; the work is done by `torchx_apps.jobs.preprocessing`.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Sequence

from torchx_apps.cli.command_line import build_parser, describe_keys
from torchx_apps.cli.errors import describe_error
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.cli.process import hand_over, say_once
from torchx_apps.recipes.by_name import list_recipes, load_job
from torchx_apps.recipes.preprocess import PREPROCESS_RECIPES


def main(argv: Sequence[str] | None = None) -> int:
    """Preprocesses, and turns whatever happens into an exit code.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when done, 1 when not, 130 when stopped by Ctrl-C or by the scheduler.
    """
    try:
        return _preprocess(argv)
    except KeyboardInterrupt:
        print("stopped; nothing partial was left", file=sys.stderr)
        return 130
    except Exception as error:
        hand_over(describe_error(error))
        return 1


def _preprocess(argv: Sequence[str] | None) -> int:
    parser = build_parser("torchx_apps.preprocess", __doc__, trains=False)
    parser.set_defaults(recipe="ml_100k")
    parser.add_argument(
        "--out", help="folder for the result; a new one in runs/ where not given"
    )
    options = parser.parse_args(argv)
    if options.list_recipes:
        return say_once(list_recipes(PREPROCESS_RECIPES))
    job = apply_overrides(load_job(options.recipe), options.set)
    job = dataclasses.replace(job, out=options.out or job.out)
    if options.dry_run:
        return say_once(describe_keys(job))
    from torchx_apps.jobs.preprocessing import run_preprocess

    run_preprocess(job)
    return 0


if __name__ == "__main__":
    # Acts as Ctrl-C, to remove unfinished files.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
