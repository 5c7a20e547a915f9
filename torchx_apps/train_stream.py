"""Train on events as their files come: `torchx run rec.train.stream`, or `python -m torchx_apps.train_stream`.

This file reads the command line and returns an exit code; the work is done by `torchx_apps.jobs.streaming`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torchx_apps.cli.command_line import build_parser, describe_keys
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.cli.process import exit_code, say_once
from torchx_apps.recipes.by_name import list_recipes, load_recipe
from torchx_apps.recipes.events import EVENT_RECIPES


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and turns whatever happens into an exit code.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when the log is idle or the last event was trained, 1 after an error, 130 after Ctrl-C, 143 after SIGTERM, by
        when the run has been saved and published.
    """
    return exit_code(_train, argv)


def _train(argv: Sequence[str] | None) -> int:
    parser = build_parser("torchx_apps.train_stream", __doc__)
    parser.add_argument(
        "--log", default="", metavar="FOLDER", help="folder of the log's files"
    )
    parser.add_argument(
        "--until-idle",
        type=float,
        metavar="SECONDS",
        help="end after these without a new event",
    )
    parser.add_argument(
        "--events",
        type=int,
        help="end after this number of events, with those before a resume",
    )
    parser.add_argument(
        "--publish-s",
        type=float,
        default=10.0,
        help="seconds between two bundles; 0 for one at the end",
    )
    parser.add_argument(
        "--bundles",
        type=Path,
        help="folder of the bundles; that of the run where not given",
    )
    parser.add_argument("--keep", type=int, default=3, help="bundles to keep")
    options = parser.parse_args(argv)
    if options.list_recipes:
        return say_once(list_recipes(EVENT_RECIPES))
    flags = {
        "folder": options.log or None,
        "until_idle_s": options.until_idle,
        "events": options.events,
    }
    changes = [
        f"data.{name}={value}" for name, value in flags.items() if value is not None
    ]
    job = apply_overrides(
        load_recipe(options.recipe, EVENT_RECIPES), [*options.set, *changes]
    )
    if options.dry_run:
        return say_once(describe_keys(job))
    from torchrec_ext.train.guards.finite import RunStoppedError
    from torchx_apps.jobs.streaming import Publication, run_stream

    publication = Publication(
        seconds=options.publish_s, folder=options.bundles, keep=options.keep
    )
    try:
        run_stream(job, publication, options.run_dir, resume=options.resume)
    except RunStoppedError as stopped:
        say_once(str(stopped))
        return 128 + signal.SIGTERM
    return 0


if __name__ == "__main__":
    sys.exit(main())
