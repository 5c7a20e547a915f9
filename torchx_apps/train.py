"""Train a recipe: `torchx run rec.train.hybrid`, or on one rank `python -m torchx_apps.train`.

This file reads the command line and returns an exit code; the work is done by `torchx_apps.jobs.training`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from torchx_apps.config import RunOptions, parse_job
from torchx_apps.process import exit_code
from torchx_apps.recipes.by_name import load_recipe, run_recipe
from torchx_apps.tasks.job import Job


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and turns whatever happens into an exit code.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when trained, 1 when not, 130 after Ctrl-C, 143 after SIGTERM, by when the run has been saved.
    """
    return exit_code(partial(run_recipe, parse, _run), argv)


def parse(words: Sequence[str]) -> tuple[RunOptions, Job]:
    """Returns the options and the job of a command line; the component calls it before anything starts."""
    return parse_job(RunOptions(), "torchx_apps.train", words, load_recipe)


def _run(options: RunOptions, job: Job) -> None:
    from torchx_apps.jobs.training import run_training

    run_training(job, options.run_dir)


if __name__ == "__main__":
    sys.exit(main())
