"""Members: the networks of one job, from a grid (`--vary key=a,b`) or a list (`--member name:key=value`) over one recipe."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchx_apps.overrides import apply_overrides
from torchx_apps.values import nearest

_PLAIN = re.compile(r"[^\w.=+-]+")


@dataclass(frozen=True)
class MemberJob:
    """One network: its name, what it changes in the recipe, as ``key=value`` texts, and its Job."""

    name: str
    changes: tuple[str, ...]
    job: Any


def members_of(base: Any, vary: Sequence[str], listed: Sequence[str], *, own_rows: bool = False) -> list[MemberJob]:
    """The networks of a job.

    Args:
        base: the recipe as changed by ``--set``.
        vary: ``key=a,b,c`` each; the members are all combinations. Values that have commas themselves are separated by ``|``.
        listed: ``name:key=value,key=value`` each, one member more.
        own_rows: each member reads its rows in the order of its own ``train.seed``. Else all read the order and the negatives of
            the recipe's seed, so that one loader serves them, and ``train.seed`` moves first weights and dropout; a member that
            changes ``loader.seed`` has its own in any case.

    Raises:
        ValueError: an unknown key or a wrong value, by flag; no member, one that is there twice, or a name that two have.

    Example:
        >>> from torchx_apps.cli import load_recipe
        >>> [m.name for m in members_of(load_recipe("two_tower"), ["optimizer.dense_lr=1e-3,3e-3", "train.seed=0,1"], [])]
        ['dense_lr=1e-3_seed=0', 'dense_lr=1e-3_seed=1', 'dense_lr=3e-3_seed=0', 'dense_lr=3e-3_seed=1']
        >>> members_of(load_recipe("two_tower"), ["optimizer.dense_l=1e-3"], [])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: --vary optimizer.dense_l=1e-3: there is no key 'dense_l'; did you mean 'dense_lr'? Keys here: ...
    """
    asked = [("--vary", _grid_name(changes, vary), changes) for changes in _grid(vary)]
    asked += [("--member", *_listed(item)) for item in listed]
    if not asked:
        raise ValueError(
            "no member: give --vary KEY=VALUE,VALUE once or more for all combinations, or --member NAME:KEY=VALUE,... for each "
            "network; `python -m torchx_apps.train --recipe NAME` trains one"
        )
    made = [MemberJob(name, changes, _job(base, flag, changes, own_rows)) for flag, name, changes in asked]
    _check(made)
    return made


def _grid(vary: Sequence[str]) -> list[tuple[str, ...]]:
    axes = []
    for item in vary:
        key, equals, text = item.partition("=")
        values = [value.strip() for value in text.split("|" if "|" in text else ",")]
        if not equals or not key.strip() or not all(values):
            raise ValueError(f"--vary {item}: write KEY=VALUE,VALUE, such as --vary optimizer.dense_lr=1e-3,3e-3")
        if twice := [value for value, count in Counter(values).items() if count > 1]:
            raise ValueError(f"--vary {item}: {twice[0]} stands there twice; two members would be one network")
        axes.append([f"{key.strip()}={value}" for value in values])
    keys = [axis[0].partition("=")[0] for axis in axes]
    if twice := [key for key, count in Counter(keys).items() if count > 1]:
        raise ValueError(f"--vary {twice[0]} is given twice; give all its values in one: --vary {twice[0]}=A,B")
    return [tuple(changes) for changes in itertools.product(*axes)] if axes else []


def _grid_name(changes: Sequence[str], vary: Sequence[str]) -> str:
    """By the last part of each key, or the whole key where two end alike."""
    keys = [change.partition("=")[0] for change in changes]
    last = Counter(key.rpartition(".")[2] for key in keys)
    parts = []
    for key, change in zip(keys, changes, strict=True):
        short = key.rpartition(".")[2]
        parts.append(f"{short if last[short] == 1 else key}={change.partition('=')[2]}")
    return _PLAIN.sub("-", "_".join(parts))


def _listed(item: str) -> tuple[str, tuple[str, ...]]:
    name, colon, rest = item.partition(":")
    if not colon or not name.strip() or "=" in name:
        raise ValueError(f"--member {item}: write NAME:KEY=VALUE,KEY=VALUE, such as --member wide:model.tower_widths=128,64")
    if _PLAIN.search(name):
        raise ValueError(f"--member {item}: the name {name!r} must be letters, digits, _ . = + and -, as it names a folder")
    # A comma before `key=` ends a value; others are part of it, as in model.tower_widths=128,64.
    changes = [change.strip() for change in re.split(r",(?=\s*[A-Za-z_][\w.]*=)", rest) if change.strip()]
    return name.strip(), tuple(changes)


def _job(base: Any, flag: str, changes: Sequence[str], own_rows: bool) -> Any:
    try:
        job = apply_overrides(base, changes)
    except ValueError as error:
        raise ValueError(str(error).replace("--set ", f"{flag} ")) from None
    keys = {change.partition("=")[0] for change in changes}
    if own_rows or "loader.seed" in keys or job.train.seed == base.train.seed:
        return job
    # The app adds train.seed to it: the sum stays the recipe's.
    seed = base.train.seed + base.loader.seed - job.train.seed
    return dataclasses.replace(job, loader=dataclasses.replace(job.loader, seed=seed))


def _check(members: Sequence[MemberJob]) -> None:
    for one, other in itertools.combinations(members, 2):
        if one.name == other.name:
            raise ValueError(f"two members have the name '{one.name}'; give each --member a name of its own")
        if one.job == other.job:
            raise ValueError(
                f"members '{one.name}' and '{other.name}' are one network: all their settings are equal; leave one out"
            )


def differing(members: Sequence[MemberJob]) -> list[str]:
    """The keys that some member changes, in the order of their first use."""
    return list(dict.fromkeys(change.partition("=")[0] for member in members for change in member.changes))


def setting(member: MemberJob, key: str) -> str:
    """The value that a member has for a key, as it was given or as the recipe has it."""
    given = {change.partition("=")[0]: change.partition("=")[2] for change in member.changes}
    if key in given:
        return given[key]
    value = member.job
    for part in key.split("."):
        value = getattr(value, part)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def named(names: Sequence[str], pattern: str, flag: str) -> list[str]:
    """The members that a name, or a pattern with * and ?, stands for.

    Raises:
        ValueError: none; it names the nearest.
    """
    expression = re.compile("".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in pattern))
    found = [name for name in names if expression.fullmatch(name)]
    if not found:
        raise ValueError(f"{flag}: there is no member {pattern!r}{nearest(pattern, names) or ';'} Members: {', '.join(names)}")
    return found
