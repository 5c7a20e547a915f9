"""Train several networks in one job: `torchx run rec.train.networks`, or `python -m torchx_apps.train_networks`.

The members are all combinations of `--vary optimizer.dense_lr=1e-3,3e-3 --vary train.seed=0,1,2`, or those that are
listed, such as `--member narrow:model.tower_widths=64,32 --member wide:model.tower_widths=256,64`. This file is the
outer shell: command line in, exit code out, each error printed once. The training itself is in `networks`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from torchrec_ext.networks.config import Codistillation
from torchx_apps.cli.command_line import build_parser, describe_keys
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.cli.process import exit_code, say_once
from torchx_apps.networks.config import NetworksConfig
from torchx_apps.networks.members import (
    MemberJob,
    RankGroup,
    differing,
    members_of,
    place,
    setting,
)
from torchx_apps.recipes.by_name import list_recipes, load_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and turns whatever happens into an exit code.

    Args:
        argv: flags; those of the command line when None.

    Returns:
        0 when a member was trained, 1 when none was or a flag was wrong, 130 after Ctrl-C, 143 after SIGTERM, when all
        stacked members have been saved.
    """
    return exit_code(_train, argv)


def _train(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    if options.list_recipes:
        return say_once(list_recipes())
    base = apply_overrides(load_recipe(options.recipe), options.set)
    members = members_of(base, options.vary, options.member, own_rows=options.own_rows)
    # --list and --dry-run run without ranks, so --ranks says their number.
    groups = place(
        [member.name for member in members],
        options.ranks or int(os.environ.get("WORLD_SIZE", "1")),
        options.groups,
    )
    # Read before --dry-run returns, by which the launcher looks for mistakes.
    config = _config(options)
    if options.list:
        return say_once(listing(members, groups))
    if options.dry_run:
        return say_once(f"{describe_keys(base)}\n\n{listing(members, groups)}")
    if options.ranks:
        raise ValueError(
            f"--ranks {options.ranks}: it is of --list and --dry-run; a job's ranks are given by -j"
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


def _config(options: argparse.Namespace) -> NetworksConfig:
    changes = options.codistill.split(",") if options.codistill else []
    try:
        codistillation = apply_overrides(Codistillation(), changes)
    except ValueError as error:
        raise ValueError(str(error).replace("--set ", "--codistill ")) from None
    return NetworksConfig(
        stack=options.stack,
        codistillation=codistillation,
        weights=options.weights,
        resume=options.resume,
    )


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


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("torchx_apps.train_networks", __doc__)
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="all combinations; A|B for values with commas",
    )
    parser.add_argument(
        "--member",
        action="append",
        default=[],
        metavar="NAME:KEY=A,KEY=B",
        help="one member more",
    )
    parser.add_argument(
        "--groups",
        default="",
        metavar="MEMBER:RANKS,...",
        help="which ranks train which, such as a:0-1,b:2",
    )
    parser.add_argument(
        "--own-rows",
        action="store_true",
        help="each member reads in the order of its own train.seed",
    )
    parser.add_argument(
        "--stack",
        default="auto",
        metavar="auto|require|never",
        help="train members of one shape as one network",
    )
    parser.add_argument(
        "--codistill",
        default="",
        metavar="KEY=VALUE,...",
        help="stacked members learn from each other's predictions",
    )
    parser.add_argument(
        "--weights",
        action="store_true",
        help="write each stacked member's state dict as weights.pt",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the members and their ranks, and exit",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=0,
        help="of --list and --dry-run: the number of ranks of the job",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
