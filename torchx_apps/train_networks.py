"""Train several networks in one job: `torchx run rec.train.networks`, or `python -m torchx_apps.train_networks`.

The members are all combinations of `--vary optimizer.dense_lr=1e-3,3e-3 train.seed=0,1,2`, or those that are
listed, such as `--member narrow:model.tower_widths=64,32 wide:model.tower_widths=256,64`. This file is the
outer shell: command line in, exit code out, each error printed once. The training itself is in `networks`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchx_apps.config import RunOptions, as_toml, merged, parse_job
from torchx_apps.networks.config import NetworksConfig, codistillation_of
from torchx_apps.networks.members import (
    MemberJob,
    RankGroup,
    differing,
    members_of,
    place,
    setting,
)
from torchx_apps.process import exit_code, say_once
from torchx_apps.recipes.by_name import list_recipes, load_recipe


@dataclass(frozen=True, kw_only=True)
class NetworksOptions(RunOptions):
    """Flags of training several networks.

    Args:
        vary: all combinations of KEY=A,B; A|B for values with commas.
        member: one member more, NAME:KEY=A,KEY=B.
        groups: which ranks train which, such as a:0-1,b:2.
        own_rows: each member reads in the order of its own train.seed.
        stack: auto, require or never train members of one shape as one network.
        codistill: stacked members learn from each other's predictions, as in weight=1,burn_in=1000,every=100.
        weights: write each stacked member's state dict as weights.pt.
        list: print the members and their ranks, and exit.
        ranks: for list and dry_run, the number of ranks of the job.
    """

    vary: tuple[str, ...] = ()
    member: tuple[str, ...] = ()
    groups: str = ""
    own_rows: bool = False
    stack: str = "auto"
    codistill: str = ""
    weights: bool = False
    list: bool = False
    ranks: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and turns whatever happens into an exit code.

    Args:
        argv: flags; those of the command line when None.

    Returns:
        0 when a member was trained, 1 when none was or a flag was wrong, 130 after Ctrl-C, 143 after SIGTERM, when all
        stacked members have been saved.
    """
    return exit_code(_train, argv)


def parse(words: Sequence[str]) -> tuple[NetworksOptions, Any]:
    """Returns the options and the recipe's job of a command line; the component calls it before anything starts."""
    for flag in ("--vary", "--member"):
        words = merged(words, flag)
    return parse_job(
        NetworksOptions(), "torchx_apps.train_networks", words, load_recipe
    )


def _train(argv: Sequence[str] | None) -> int:
    options, base = parse(sys.argv[1:] if argv is None else argv)
    if options.resume:
        raise ValueError(
            f"--resume {options.resume}: several networks go on in their own folder; give --run_dir"
        )
    if options.list_recipes:
        return say_once(list_recipes())
    members = members_of(base, options.vary, options.member, own_rows=options.own_rows)
    # --list and --dry_run run without ranks, so --ranks says their number.
    groups = place(
        [member.name for member in members],
        options.ranks or int(os.environ.get("WORLD_SIZE", "1")),
        options.groups,
    )
    config = NetworksConfig(
        stack=options.stack,
        codistillation=codistillation_of(options.codistill),
        weights=options.weights,
    )
    if options.list:
        return say_once(listing(members, groups))
    if options.dry_run:
        return say_once(f"{as_toml(base)}\n\n{listing(members, groups)}")
    if options.ranks:
        raise ValueError(
            f"--ranks {options.ranks}: it is of --list and --dry_run; a job's ranks are given by -j"
        )
    from torchrec_ext.train.guards.finite import RunStoppedError
    from torchx_apps.networks.members import World
    from torchx_apps.networks.run import run_networks

    try:
        return (
            0 if run_networks(members, groups, World(), config, options.run_dir) else 1
        )
    except RunStoppedError as stopped:
        print(stopped, flush=True)
        return 128 + signal.SIGTERM


def listing(members: Sequence[MemberJob], groups: Sequence[RankGroup]) -> str:
    """Formats the members as a table, with their differing settings and their ranks."""
    from tabulate import tabulate

    keys = differing(members)
    ranks = {
        name: ", ".join(map(str, group.ranks))
        for group in groups
        for name in group.members
    }
    rows = []
    for member in members:
        values = [setting(member, key) for key in keys]
        rows.append([member.name, *values, ranks[member.name]])
    return str(
        tabulate(rows, headers=["member", *keys, "ranks"], disable_numparse=True)
    )


if __name__ == "__main__":
    sys.exit(main())
