"""Train a recipe: `torchx run rec.train.hybrid`, or on one rank `python -m torchx_apps.train`.

This file reads the command line and returns an exit code; the work is done by `torchx_apps.jobs.training`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from torchx_apps.agent import exit_code
from torchx_apps.cli.command_line import apply_overrides, build_parser, describe_keys, list_recipes, load_recipe


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
        return _say(list_recipes())
    job = apply_overrides(load_recipe(options.recipe), options.set)
    if options.dry_run:
        return _say(describe_keys(job))
    from torchrec_ext.train.guards.finite import RunStoppedError
    from torchx_apps.jobs.training import run_training

    try:
        run_training(job, options.run_dir, resume=options.resume)
    except RunStoppedError as stopped:
        _say(str(stopped))
        return 128 + signal.SIGTERM
    return 0


def _say(text: str) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
