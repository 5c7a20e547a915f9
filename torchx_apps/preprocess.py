"""Preprocess a recipe's files: `torchx run rec.data.preprocess` or `python -m torchx_apps.preprocess`.

This file reads the command line and returns an exit code; the work is done by `torchx_apps.jobs.preprocessing`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from torchx_apps.config import RecipeOptions, parse_job
from torchx_apps.process import exit_code
from torchx_apps.recipes.by_name import load_recipe, run_recipe
from torchx_apps.recipes.preprocess import PREPROCESS_RECIPES, PreprocessJob


def main(argv: Sequence[str] | None = None) -> int:
    """Preprocesses, and turns whatever happens into an exit code.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when done, 1 when not, 130 after Ctrl-C, 143 after SIGTERM; nothing partial is left.
    """
    app = partial(run_recipe, parse, _run, recipes=PREPROCESS_RECIPES)
    return exit_code(app, argv)


def parse(words: Sequence[str]) -> tuple[RecipeOptions, PreprocessJob]:
    """Returns the options and the job of a command line; the component calls it before anything starts."""
    load = partial(load_recipe, built_in=PREPROCESS_RECIPES, kind=PreprocessJob)
    options = RecipeOptions(recipe="ml_100k")
    return parse_job(options, "torchx_apps.preprocess", words, load)


def _run(options: RecipeOptions, job: PreprocessJob) -> None:
    from torchx_apps.jobs.preprocessing import run_preprocess

    run_preprocess(job)


if __name__ == "__main__":
    sys.exit(main())
