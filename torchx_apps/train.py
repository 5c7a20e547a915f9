"""Train a recipe: `torchx run rec.train.hybrid`, or on one rank `python -m torchx_apps.train`.

This file reads the command line and returns an exit code; the work is done by `torchx_apps.jobs.training`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from torchx_apps.config import RunOptions, as_toml, parse_job
from torchx_apps.process import exit_code, say_once
from torchx_apps.recipes.by_name import list_recipes, load_recipe
from torchx_apps.tasks.job import Job


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and turns whatever happens into an exit code.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when trained, 1 when not, 130 after Ctrl-C, 143 after SIGTERM, by when the run has been saved.
    """
    return exit_code(_train, argv)


def parse(words: Sequence[str]) -> tuple[RunOptions, Job]:
    """Returns the options and the job of a command line; the component calls it before anything starts."""
    return parse_job(RunOptions(), "torchx_apps.train", words, load_recipe)


def _train(argv: Sequence[str] | None) -> int:
    options, job = parse(sys.argv[1:] if argv is None else argv)
    if options.list_recipes:
        return say_once(list_recipes())
    if options.dry_run:
        return say_once(as_toml(job))
    from torchrec_ext.train.guards import RunStoppedError
    from torchx_apps.jobs.training import run_training

    try:
        run_training(job, options.run_dir, resume=options.resume)
    except RunStoppedError as stopped:
        say_once(str(stopped))
        return 128 + signal.SIGTERM
    return 0


if __name__ == "__main__":
    sys.exit(main())
