"""Train a recipe: `torchx run rec.train.hybrid`, or on one rank `python -m torchx_apps.train`.

This file reads the command line and returns an exit code; the work is done by `torchx_apps.jobs.training`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from torchx_apps.cli.command_line import build_parser, describe_keys
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.cli.process import exit_code, say_once
from torchx_apps.recipes.by_name import list_recipes, load_recipe
from torchx_apps.tasks.job import check_elastic


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and turns whatever happens into an exit code.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when trained, 1 when not, 130 after Ctrl-C, 143 after SIGTERM, by when the run has been saved.
    """
    return exit_code(_train, argv)


def _train(argv: Sequence[str] | None) -> int:
    options = build_parser("torchx_apps.train", __doc__).parse_args(argv)
    if options.list_recipes:
        return say_once(list_recipes())
    job = apply_overrides(load_recipe(options.recipe), options.set)
    check_elastic(job)
    if options.dry_run:
        return say_once(describe_keys(job))
    from torchrec_ext.train.guards.finite import RunStoppedError
    from torchx_apps.jobs.training import run_training

    try:
        run_training(job, options.run_dir, resume=options.resume)
    except RunStoppedError as stopped:
        say_once(str(stopped))
        return 128 + signal.SIGTERM
    return 0


if __name__ == "__main__":
    sys.exit(main())
