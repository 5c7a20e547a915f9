"""Train a recipe: `torchx run rec.train.hybrid`, or on one rank `python -m torchx_apps.train`.

This file reads the command line and returns an exit code; the work is done by `torchx_apps.jobs.training`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from torchx_apps.agent import exit_code
from torchx_apps.cli.command_line import build_parser, describe_keys
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.recipes.by_name import list_recipes, load_recipe

# Variable with the topology of a job that goes on with the nodes that are up, as the component was given it.
ELASTIC = "TORCHREC_EXT_ELASTIC"


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
    check_elastic(job)
    if options.dry_run:
        return _say(describe_keys(job))
    from torchrec_ext.train.guards.finite import RunStoppedError
    from torchx_apps.jobs.report import diagnosis_command
    from torchx_apps.jobs.training import run_training

    try:
        diagnosis = diagnosis_command(options.recipe, options.set)
        run_training(job, options.run_dir, resume=options.resume, diagnosis=diagnosis)
    except RunStoppedError as stopped:
        _say(str(stopped))
        return 128 + signal.SIGTERM
    return 0


def check_elastic(job: Any, topology: str | None = None) -> None:
    """Refuses settings for a fixed number of ranks, if the job trains on however many nodes are up.

    Args:
        job: the job.
        topology: MIN:MAXxPROCS of the launch; that of this process's environment where not given, empty for none.

    Raises:
        ValueError: naming the setting.

    Example:
        >>> job = apply_overrides(load_recipe("two_tower"), ["sync.table_copies=2"])
        >>> check_elastic(job, "2:4x1")
        Traceback (most recent call last):
        ...
        ValueError: sync.table_copies=2 with -j 2:4x1: it must divide the number of ranks, which may be 3; write -j 4x1
    """
    topology = os.environ.get(ELASTIC, "") if topology is None else topology
    if not topology:
        return
    least, _, rest = topology.partition(":")
    most, _, procs = rest.partition("x")
    ranks = [nodes * int(procs) for nodes in range(int(least), int(most) + 1)]
    towers = job.plan.towers
    copies = job.sync.table_copies
    if ":" in towers or (towers == "tower_parallel" and ranks[0] < 2):
        raise ValueError(
            f"plan.towers={towers} with -j {topology}: it gives towers ranks of their own, whose number changes with "
            f"the nodes that are up; set plan.towers=auto, or write -j {rest}"
        )
    odd = next((count for count in ranks if count % copies), None)
    if odd:
        raise ValueError(
            f"sync.table_copies={copies} with -j {topology}: it must divide the number of ranks, which may be {odd}; "
            f"write -j {rest}"
        )


def _say(text: str) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
