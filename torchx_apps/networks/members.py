"""members_of(): the networks of one job, from a grid (`--vary key=a,b`) or a list (`--member name:key=value`).

place(): the ranks that train each member; World: how a group of ranks becomes a world of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torchrec_ext.schema.validation import listed
from torchx_apps.config import nearest, with_settings

_PLAIN = re.compile(r"[^\w.=+-]+")


@dataclass(frozen=True)
class MemberJob:
    """One network: its name, what it changes in the recipe, as ``key=value`` texts, and its Job."""

    name: str
    changes: tuple[str, ...]
    job: Any


def members_of(
    base: Any, vary: Sequence[str], listed: Sequence[str], *, own_rows: bool = False
) -> list[MemberJob]:
    """Returns the networks of a job.

    Args:
        base: the recipe with the settings of the command line.
        vary: grid, ``key=a,b,c`` each; the members are all combinations. Values that contain commas are separated by
            ``|``.
        listed: further members, ``name:key=value,key=value`` each.
        own_rows: each member reads its rows in the order of its own ``train.seed``. Else all read the order and the
            negatives of the recipe's seed, so that one loader serves them, and ``train.seed`` changes first weights and
            dropout; a member that changes ``loader.seed`` has its own order in any case.

    Raises:
        ValueError: a key is unknown or a value wrong, named by flag; there is no member, two are one network, or two
            have one name.

    Example:
        >>> from torchx_apps.recipes.by_name import load_recipe
        >>> vary = ["optimizer.dense_lr=1e-3,3e-3", "train.seed=0,1"]
        >>> [member.name for member in members_of(load_recipe("two_tower"), vary, [])]
        ['dense_lr=1e-3_seed=0', 'dense_lr=1e-3_seed=1', 'dense_lr=3e-3_seed=0', 'dense_lr=3e-3_seed=1']
        >>> members_of(load_recipe("two_tower"), ["optimizer.dense_l=1e-3"], [])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: --vary optimizer.dense_l=1e-3: Unrecognized options: ...; did you mean ...--optimizer.dense_lr...?
    """
    members = []
    for changes in _grid(vary):
        members.append(
            MemberJob(
                _grid_name(changes), changes, _job(base, "--vary", changes, own_rows)
            )
        )
    for item in listed:
        name, changes = _listed(item)
        members.append(
            MemberJob(name, changes, _job(base, "--member", changes, own_rows))
        )
    if not members:
        raise ValueError(
            "no member: give --vary KEY=VALUE,VALUE, with a word for each key, or --member NAME:KEY=VALUE,... for "
            "each; one network: python -m torchx_apps.train"
        )
    _check(members)
    return members


def _repeated(values: Sequence[Any]) -> list[Any]:
    """Returns the values that occur more than once."""
    return [value for value, count in Counter(values).items() if count > 1]


def _grid(vary: Sequence[str]) -> list[tuple[str, ...]]:
    # The product of no axes is one member without changes, which nobody has asked for.
    if not vary:
        return []
    keys = []
    axes = []
    for item in vary:
        key, equals, text = item.partition("=")
        key = key.strip()
        values = [value.strip() for value in text.split("|" if "|" in text else ",")]
        if not equals or not key or not all(values):
            raise ValueError(
                f"--vary {item}: write KEY=VALUE,VALUE, such as --vary optimizer.dense_lr=1e-3,3e-3"
            )
        if twice := _repeated(values):
            raise ValueError(
                f"--vary {item}: {twice[0]} stands there twice; two members would be one network"
            )
        keys.append(key)
        axes.append([f"{key}={value}" for value in values])
    if twice := _repeated(keys):
        raise ValueError(
            f"--vary {twice[0]} is given twice; give all its values in one: --vary {twice[0]}=A,B"
        )
    return list(itertools.product(*axes))


def _grid_name(changes: Sequence[str]) -> str:
    """Makes a member's name from the last part of each key, or from the whole key if two end alike."""
    keys = [change.partition("=")[0] for change in changes]
    endings = [key.rpartition(".")[2] for key in keys]
    parts = []
    for key, ending, change in zip(keys, endings, changes, strict=True):
        label = ending if endings.count(ending) == 1 else key
        parts.append(label + change.removeprefix(key))
    return _PLAIN.sub("-", "_".join(parts))


def _listed(item: str) -> tuple[str, tuple[str, ...]]:
    name, colon, rest = item.partition(":")
    if not colon or not name.strip() or "=" in name:
        raise ValueError(
            f"--member {item}: write NAME:KEY=VALUE,KEY=VALUE, such as --member wide:model.tower_widths=128,64"
        )
    if _PLAIN.search(name):
        raise ValueError(
            f"--member {item}: the name {name!r} must be letters, digits, _ . = + and -, as it names a folder"
        )
    # A comma before `key=` ends a value; others are part of it, as in
    # model.tower_widths=128,64.
    changes = map(str.strip, re.split(r",(?=\s*[A-Za-z_][\w.]*=)", rest))
    return name.strip(), tuple(filter(None, changes))


def _job(base: Any, flag: str, changes: Sequence[str], own_rows: bool) -> Any:
    try:
        job = with_settings(base, changes)
    except ValueError as error:
        raise ValueError(f"{flag} {' '.join(changes)}: {error}") from None
    keys = {change.partition("=")[0] for change in changes}
    if own_rows or "loader.seed" in keys or job.train.seed == base.train.seed:
        return job
    # The app adds train.seed to it: the sum stays the recipe's.
    seed = base.train.seed + base.loader.seed - job.train.seed
    return dataclasses.replace(job, loader=dataclasses.replace(job.loader, seed=seed))


def _check(members: Sequence[MemberJob]) -> None:
    # A name is that of the member's folder.
    for first, other in itertools.combinations(members, 2):
        if first.name == other.name:
            raise ValueError(
                f"two members have the name '{first.name}'; give each --member a name of its own"
            )
        if first.job == other.job:
            raise ValueError(
                f"members '{first.name}' and '{other.name}' are one network: all their settings are equal; leave one "
                "out"
            )


def differing(members: Sequence[MemberJob]) -> list[str]:
    """Returns the keys changed by any member, in the order of their first use."""
    return list(
        dict.fromkeys(
            change.partition("=")[0] for member in members for change in member.changes
        )
    )


def setting(member: MemberJob, key: str) -> str:
    """Returns a member's value for a key: its own, else the recipe's."""
    # The last change of a key is the one that counts.
    for change in reversed(member.changes):
        if change.startswith(f"{key}="):
            return change.partition("=")[2]
    value = attrgetter(key)(member.job)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def named(names: Sequence[str], pattern: str, flag: str) -> list[str]:
    """Returns the members matching a name, or a pattern with * and ?.

    Raises:
        ValueError: there is none; the message names the nearest.
    """
    # Unlike in fnmatch, brackets stand for themselves.
    wildcards = {"*": ".*", "?": "."}
    expression = re.compile(
        "".join(wildcards.get(letter, re.escape(letter)) for letter in pattern)
    )
    matches = [name for name in names if expression.fullmatch(name)]
    if not matches:
        raise ValueError(
            f"{flag}: there is no member {pattern!r}{nearest(pattern, names) or ';'} Members: {listed(names)}"
        )
    return matches


# Same name as in torchrec_ext.distributed.runtime, whose import takes seconds.
_GPUS = "TORCHREC_EXT_GPUS"
_TIMEOUT_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class RankGroup:
    """Members trained by the same ranks: on one rank together as far as they can be stacked, on several in turn."""

    members: tuple[str, ...]
    ranks: tuple[int, ...]


def place(names: Sequence[str], world_size: int, groups: str = "") -> list[RankGroup]:
    """Assigns members to groups of ranks.

    Args:
        names: names of the members.
        world_size: number of ranks, R.
        groups: ``a:0-1,b:2``: members (a name, a pattern with * and ?, or several with + between) and ranks (``0-1``,
            ``2`` or ``0+2``). Where not given, members are dealt to the ranks in their order, as evenly as can be; with
            more ranks than members each has as many ranks as the others, or one more.

    Raises:
        ValueError: a member or rank does not exist, is in two groups, or in none.

    Example:
        >>> place(["a", "b", "c"], 2)
        [RankGroup(members=('a', 'b'), ranks=(0,)), RankGroup(members=('c',), ranks=(1,))]
        >>> place(["a", "b"], 3, "a:0-1,b:2")
        [RankGroup(members=('a',), ranks=(0, 1)), RankGroup(members=('b',), ranks=(2,))]
        >>> place(["a", "b"], 2, "a:0-1,b:2")
        Traceback (most recent call last):
        ...
        ValueError: --groups b:2: there is no rank 2; the job has ranks 0 to 1: start more with -j, or name one of these
    """
    if not groups:
        return _dealt(names, world_size)
    members_by_ranks: dict[tuple[int, ...], list[str]] = {}
    for item in groups.split(","):
        members, colon, text = item.strip().rpartition(":")
        if (
            not colon
            or not members
            or not re.fullmatch(r"\d+(-\d+)?(\+\d+(-\d+)?)*", text)
        ):
            raise ValueError(
                f"--groups {item}: write MEMBER:RANKS, such as a:0-1,b:2 or small*:0,large:1+2"
            )
        ranks = _ranks(text)
        if missing := [rank for rank in ranks if rank >= world_size]:
            raise ValueError(
                f"--groups {item}: there is no rank {missing[0]}; the job has ranks 0 to {world_size - 1}: start more "
                "with -j, or name one of these"
            )
        for pattern in members.split("+"):
            members_by_ranks.setdefault(ranks, []).extend(
                named(names, pattern, f"--groups {item}")
            )
    rank_groups = [
        RankGroup(tuple(members), ranks) for ranks, members in members_by_ranks.items()
    ]
    _check_of_rank_groups(rank_groups, names, world_size)
    return rank_groups


def _dealt(names: Sequence[str], world_size: int) -> list[RankGroup]:
    groups = min(len(names), world_size)
    ranks = range(world_size)
    return [
        RankGroup(_share(names, group, groups), _share(ranks, group, groups))
        for group in range(groups)
    ]


def _share(things: Sequence[Any], number: int, parts: int) -> tuple[Any, ...]:
    """Returns one of ``parts`` parts of ``things`` in their order; the first parts have one more, if any have."""
    size, more = divmod(len(things), parts)
    start = number * size + min(number, more)
    return tuple(things[start : start + size + (number < more)])


def _ranks(text: str) -> tuple[int, ...]:
    ranks: set[int] = set()
    for piece in text.split("+"):
        first, _, last = piece.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(ranks))


def _check_of_rank_groups(
    groups: Sequence[RankGroup], names: Sequence[str], world_size: int
) -> None:
    members: list[str] = []
    ranks: list[int] = []
    for group in groups:
        members += group.members
        ranks += group.ranks
    _check_once("member", names, members, "give it ranks")
    _check_once(
        "rank",
        range(world_size),
        ranks,
        "give it a member, or start fewer ranks with -j",
    )


def _check_once(
    what: str, required: Sequence[Any], grouped: Sequence[Any], remedy: str
) -> None:
    for each in required:
        if grouped.count(each) > 1:
            raise ValueError(
                f"--groups: {what} {each} is in two groups; groups share no {what}"
            )
    for each in required:
        if each not in grouped:
            raise ValueError(f"--groups: {what} {each} is in no group; {remedy}")


def group_of(groups: Sequence[RankGroup], rank: int) -> RankGroup:
    """Returns the group of a rank."""
    return next(group for group in groups if rank in group.ranks)


class World:
    """All ranks of the job, with a store to exchange texts; each group becomes a torch world of its own later.

    Args:
        environ: environment that torchrun set; without RANK there is one rank.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        import torch
        import torch.distributed as dist

        self._environ = environ
        self.rank = int(environ.get("RANK", "0"))
        self.size = int(environ.get("WORLD_SIZE", "1"))
        self._local = int(environ.get("LOCAL_RANK", "0"))
        self._address = _address(environ)
        self._gpus = torch.cuda.device_count()
        local = int(environ.get("LOCAL_WORLD_SIZE", "1"))
        self.processes_per_gpu = -(-local // self._gpus) if self._gpus else 0
        store: Any = dist.HashStore()
        if "RANK" in environ:
            store = next(iter(dist.rendezvous("env://")))[0]
        # The prefix keeps our keys apart from torch's in the same store.
        self._store = dist.PrefixStore("networks", store)
        self._gathers = 0

    def narrow(self, group: RankGroup, name: str) -> None:
        """Makes this process's next ``Runtime.start`` join the ranks of ``group`` alone.

        The environment that torchrun set becomes that of a job of these ranks, which meet at a port of their own.

        Args:
            group: group of this rank.
            name: name of the new world, unique in the job.
        """
        if self.size == 1:
            return
        index = group.ranks.index(self.rank)
        if index == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                self._store.set(
                    f"address/{name}", f"{self._address}:{free.getsockname()[1]}"
                )
        self._store.set(
            f"host/{name}/{self.rank}", f"{socket.gethostname()}:{self._local}"
        )
        hosts = {
            rank: self.receive(f"host/{name}/{rank}").rpartition(":")
            for rank in group.ranks
        }
        local_ranks = [
            rank for rank in group.ranks if hosts[rank][0] == socket.gethostname()
        ]
        address, _, port = self.receive(f"address/{name}").rpartition(":")
        self._environ.update(
            RANK=str(index),
            WORLD_SIZE=str(len(group.ranks)),
            LOCAL_RANK=str(local_ranks.index(self.rank)),
            LOCAL_WORLD_SIZE=str(len(local_ranks)),
            MASTER_ADDR=address,
            MASTER_PORT=port,
            # With the agent's store all ranks would be its clients, and no store would
            # be opened at this port.
            TORCHELASTIC_USE_AGENT_STORE="False",
        )
        self._environ.update(
            _of_local_ranks(self._gpus, [int(hosts[rank][2]) for rank in local_ranks])
        )

    def widen(self) -> None:
        """Restores this process's rank in the whole job, for error messages."""
        if self.size > 1:
            self._environ["RANK"] = str(self.rank)

    def send(self, key: str, text: str) -> None:
        """Stores a text for the other ranks."""
        self._store.set(key, text)

    def receive(self, key: str) -> str:
        """Waits for the text of a key and returns it; a failing rank ends the job, and this wait with it."""
        from datetime import timedelta

        self._store.wait([key], timedelta(seconds=_TIMEOUT_S))
        return bytes(self._store.get(key)).decode()

    def gathered(self, value: Any) -> list[Any]:
        """Returns the values of all ranks in rank order; values must fit JSON, and all ranks call it together."""
        # Each key of the store is written once, so the calls are numbered.
        self._gathers += 1
        key = f"gathered/{self._gathers}"
        self.send(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self.receive(f"{key}/{rank}")) for rank in range(self.size)]


def _address(environ: Mapping[str, str]) -> str:
    """Returns the address for other ranks to reach this host: on one host, the job's own."""
    if environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE"):
        return environ.get("MASTER_ADDR", "127.0.0.1")
    return socket.getfqdn()


def _of_local_ranks(gpus: int, local_ranks: Sequence[int]) -> dict[str, str]:
    """Returns the variables to tell ``Runtime.start`` the GPU of each of a group's ranks on one host.

    CUDA_VISIBLE_DEVICES would change nothing: fbgemm's import has initialised CUDA. With more processes than GPUs,
    groups of one rank share them in turn; for others there is nothing to choose.

    Args:
        gpus: number of GPUs that this host's processes see.
        local_ranks: ranks of the group among all processes of the host.

    Example:
        >>> _of_local_ranks(3, [1, 2]), _of_local_ranks(2, [3]), _of_local_ranks(2, [1, 2]), _of_local_ranks(0, [0])
        ({'TORCHREC_EXT_GPUS': '1,2'}, {'TORCHREC_EXT_GPUS': '1'}, {}, {})
    """
    if not gpus or (len(local_ranks) > 1 and max(local_ranks) >= gpus):
        return {}
    return {_GPUS: ",".join(str(rank % gpus) for rank in local_ranks)}
