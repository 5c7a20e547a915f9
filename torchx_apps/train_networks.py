"""Train one member of a grid: `torchx run rec.train.networks --vary train.seed 0 1 2` starts it for each.

A member is an ordinary training with a run folder of its own, beside those of the other members. The member that ends
last makes the table of all. This file is the outer shell: command line in, exit code out, each error printed once.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchx_apps.config import RunOptions, parse_job
from torchx_apps.process import exit_code, say_once
from torchx_apps.recipes.by_name import load_recipe, run_recipe

# TorchX calls Slurm's srun with --wait=60: it kills all members a minute after the first
# one has ended. With --kill-on-bad-exit it ends those that wait for one that died.
_ENDS_TOGETHER = "slurm://"
_LOOKS_AGAIN_S = 2.0


@dataclass(frozen=True, kw_only=True)
class MemberOptions(RunOptions):
    """Flags of one member of a grid.

    Args:
        members: names of all members, which are folders beside each other; run_dir is one of these.
    """

    members: tuple[str, ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and turns whatever happens into an exit code.

    Args:
        argv: flags; those of the command line when None.

    Returns:
        0 when the member has ended, also where its loss diverged, which the table says; 1 after an error, 130 after
        Ctrl-C, 143 after SIGTERM, by when the run has been saved.
    """
    return exit_code(partial(run_recipe, parse, _train), argv)


def parse(words: Sequence[str]) -> tuple[MemberOptions, Any]:
    """Returns the options and the job of a command line; the component calls it before anything starts."""
    return parse_job(MemberOptions(), "torchx_apps.train_networks", words, load_recipe)


def _train(options: MemberOptions, job: Any) -> None:
    run = options.run_dir
    if run is None or run.name not in options.members:
        raise ValueError(
            f"--run_dir {run}: must have the name of one of --members; start a grid by torchx run rec.train.networks, "
            "one network by python -m torchx_apps.train"
        )
    # With a folder for all, members would write over each other's checkpoints.
    if job.checkpoint.folder:
        own = f"{job.checkpoint.folder.rstrip('/')}/{run.name}"
        checkpoint = dataclasses.replace(job.checkpoint, folder=own)
        job = dataclasses.replace(job, checkpoint=checkpoint)
    from torchrec_ext.capture.policy import TrainingDivergedError
    from torchx_apps.jobs.resuming import ended
    from torchx_apps.jobs.training import run_training

    # As after a restart of the whole job.
    if ended(run):
        say_once(f"{run.name}: has ended already")
    else:
        try:
            run_training(job, run, member=run.name)
        except TrainingDivergedError as error:
            # One rate too high is a result of a grid, not the end of the other members.
            say_once(f"{run.name}: {error}")
    if os.environ.get("RANK", "0") == "0":
        _finish([run.parent / name for name in options.members])


def _finish(runs: Sequence[Path]) -> None:
    """Makes the table if all members have ended; of members of one job that end at once, one alone."""
    from torchx_apps.jobs.resuming import ended
    from torchx_apps.networks.report import compare

    job = os.environ.get("TORCHX_JOB_ID", "")
    while not all(map(ended, runs)):
        if not job.startswith(_ENDS_TOGETHER):
            return
        time.sleep(_LOOKS_AGAIN_S)
    parent = runs[0].parent
    if job:
        try:
            (parent / f".table-of-{job.rpartition('/')[2]}").touch(exist_ok=False)
        except FileExistsError:
            return
    compare(runs, parent)


if __name__ == "__main__":
    sys.exit(main())
