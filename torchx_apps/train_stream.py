"""Train on events as their files come: `torchx run rec.train.stream`, or `python -m torchx_apps.train_stream`.

This file reads the command line and returns an exit code; the work is done by `torchx_apps.jobs.streaming`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from torchx_apps.config import StreamOptions, parse_job
from torchx_apps.process import exit_code
from torchx_apps.recipes.by_name import load_recipe, run_recipe
from torchx_apps.recipes.events import EVENT_RECIPES


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and turns whatever happens into an exit code.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when the log is idle or the last event was trained, 1 after an error, 130 after Ctrl-C, 143 after SIGTERM, by
        when the run has been saved and published.
    """
    app = partial(run_recipe, parse, _run, recipes=EVENT_RECIPES)
    return exit_code(app, argv)


def parse(words: Sequence[str]) -> tuple[StreamOptions, Any]:
    """Returns the options and the job of a command line; the component calls it before anything starts."""
    load = partial(load_recipe, built_in=EVENT_RECIPES)
    return parse_job(StreamOptions(), "torchx_apps.train_stream", words, load)


def _run(options: StreamOptions, job: Any) -> None:
    from torchx_apps.jobs.streaming import run_stream

    run_stream(job, options)


if __name__ == "__main__":
    sys.exit(main())
