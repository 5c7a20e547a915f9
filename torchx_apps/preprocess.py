"""Preprocess a recipe's files: `torchx run rec.data.preprocess` or `python -m torchx_apps.preprocess`.

This file reads the command line and returns an exit code; the work is done by `torchx_apps.jobs.preprocessing`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchx_apps.config import RecipeOptions, as_toml, parse_job
from torchx_apps.process import exit_code, say_once
from torchx_apps.recipes.by_name import list_recipes, load_job
from torchx_apps.recipes.preprocess import PREPROCESS_RECIPES, PreprocessJob


def main(argv: Sequence[str] | None = None) -> int:
    """Preprocesses, and turns whatever happens into an exit code.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when done, 1 when not, 130 after Ctrl-C, 143 after SIGTERM; nothing partial is left.
    """
    return exit_code(_preprocess, argv)


def parse(words: Sequence[str]) -> tuple[RecipeOptions, PreprocessJob]:
    """Returns the options and the job of a command line; the component calls it before anything starts."""
    options = RecipeOptions(recipe="ml_100k")
    return parse_job(options, "torchx_apps.preprocess", words, load_job)


def _preprocess(argv: Sequence[str] | None) -> int:
    options, job = parse(sys.argv[1:] if argv is None else argv)
    if options.list_recipes:
        return say_once(list_recipes(PREPROCESS_RECIPES))
    if options.dry_run:
        return say_once(as_toml(job))
    from torchx_apps.jobs.preprocessing import run_preprocess

    run_preprocess(job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
