"""members_of(): the networks of a grid, `--vary KEY VALUE VALUE ...`, each as the words of an ordinary training.

This module imports no torch: the component reads the grid before anything starts.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchx_apps.config import parse_known_options

# The first word is a key, whatever it is. A later one is a key if it has a dot, as all
# settings have that are worth a grid.
_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_DECIMAL = re.compile(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_LATER_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_NUMBER = re.compile(r"-[\d.]\S*")
_PLAIN = re.compile(r"[^\w.=+-]+")
# Some schedulers make names of containers from the names of roles.
_ROLE = re.compile(r"[^\w.-]+")


@dataclass(frozen=True)
class Member:
    """One network of a grid: its name, which is that of its run folder, and its settings as flags."""

    name: str
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ParentOptions:
    """The flag of a grid that is not the same for all members.

    Args:
        run_dir: folder of the members' run folders; runs/networks-DATE where not given.
    """

    run_dir: Path | None = None


def members_of(vary: Sequence[str]) -> list[Member]:
    """Returns the members of a grid, which are all combinations of its values.

    Args:
        vary: words of the grid: a key and its values, then perhaps another key and its values.

    Raises:
        ValueError: a key has no value, or a value stands there twice; a word is a flag, or the first is no key.

    Example:
        >>> grid = ["optimizer.dense_lr", "1e-3", "3e-3", "train.seed", "0", "1"]
        >>> [member.name for member in members_of(grid)]
        ['dense_lr=1e-3_seed=0', 'dense_lr=1e-3_seed=1', 'dense_lr=3e-3_seed=0', 'dense_lr=3e-3_seed=1']
        >>> members_of(["train.seed", "0", "1"])[1]
        Member(name='seed=1', words=('--train.seed', '1'))
        >>> members_of(["train.seed=0,1"])
        Traceback (most recent call last):
        ...
        ValueError: --vary: train.seed=0,1 is neither a key nor a value; give --vary KEY VALUE VALUE, flags behind --
    """
    axes = _axes(vary)
    labels = _labels(list(axes))
    members = []
    for values in itertools.product(*axes.values()):
        name = []
        words: list[str] = []
        for key, value in zip(axes, values, strict=True):
            name.append(f"{labels[key]}={value}")
            # A value that begins with a dash would be a flag of its own.
            if value.startswith("-"):
                words.append(f"--{key}={value}")
            else:
                words += [f"--{key}", value]
        members.append(Member(_PLAIN.sub("-", "_".join(name)), tuple(words)))
    return members


def _axes(words: Sequence[str]) -> dict[str, list[str]]:
    axes: dict[str, list[str]] = {}
    key = ""
    for word in words:
        is_flag = word.startswith("-") and not _NUMBER.fullmatch(word)
        if is_flag or (not axes and not _KEY.fullmatch(word)):
            raise ValueError(
                f"--vary: {word} is neither a key nor a value; give --vary KEY VALUE VALUE, flags behind --"
            )
        if not axes or _LATER_KEY.fullmatch(word):
            key = word
            axes.setdefault(key, [])
        elif _value(word) in map(_value, axes[key]):
            raise ValueError(
                f"--vary {key}: {word} stands there twice; two members would be one network"
            )
        else:
            axes[key].append(word)
    for name in axes:
        if not axes[name]:
            raise ValueError(
                f"--vary {name}: has no value; write --vary {name} VALUE VALUE"
            )
    if not axes:
        raise ValueError(
            "no member: give --vary KEY VALUE VALUE, such as --vary train.seed 0 1 2; one network: rec.train.hybrid"
        )
    return axes


def _value(word: str) -> float | str:
    """Returns the number that a word stands for, or else the word: 1e-3 is 0.001."""
    # Not 01 or 2024_01, which may be the names of two sets.
    return float(word) if _DECIMAL.fullmatch(word) else word


def _labels(keys: Sequence[str]) -> dict[str, str]:
    """Returns the last part of each key, or the whole key if two end alike."""
    endings = [key.rpartition(".")[2] for key in keys]
    return {
        key: ending if endings.count(ending) == 1 else key
        for key, ending in zip(keys, endings, strict=True)
    }


def split_words(vary: str, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words of a grid and those of the app, as TorchX gives them to a component.

    TorchX reads one word behind a flag, so that the others come with the app's, before ``--``. It takes a ``--`` away
    that stands first.

    Example:
        >>> split_words("train.seed", ["0", "1", "--", "--train.epochs", "2"])
        (['train.seed', '0', '1'], ['--train.epochs', '2'])
        >>> split_words("", ["--train.epochs", "2"])
        ([], ['--train.epochs', '2'])
    """
    words = list(args)
    if "--" not in words:
        words.insert(0 if words and words[0].startswith("--") else len(words), "--")
    end = words.index("--")
    return ([vary] if vary else []) + words[:end], words[end + 1 :]


def roles_of(vary: str, args: Sequence[str], recipe: str, j: str) -> list[Member]:
    """Returns the members of a grid as roles of a job, by name, each with a run folder in one folder.

    Args:
        vary: the first word of the grid.
        args: the other words of the grid, ``--``, and the words that all members have.
        recipe: the recipe.
        j: NODESxPROCS of each member.

    Raises:
        ValueError: the grid is wrong, see :func:`members_of`, or a member would take several nodes.
    """
    grid, rest = split_words(vary, args)
    if "--vary" in rest or any(word.startswith("--vary=") for word in rest):
        raise ValueError("--vary stands before --: --vary train.seed 0 1 2 -- ...")
    members = members_of(grid)
    if "run_dir" in grid:
        raise ValueError(
            "--vary run_dir: each member has a folder of its own in --run_dir; vary settings, such as train.seed"
        )
    nodes, _, procs = j.partition("x")
    # All roles of a job get the address of the first role's first node.
    if procs and nodes != "1":
        raise ValueError(
            f"-j {j}: a member of a grid is on one node, as in -j 1x{procs}; for more start rec.train.hybrid for each"
        )
    parent, others = parse_known_options(
        ParentOptions, "torchx_apps.train_networks", rest
    )
    folder = parent.run_dir or Path("runs") / time.strftime("networks-%Y%m%d-%H%M%S")
    names = [member.name for member in members]
    roles: dict[str, Member] = {}
    for index, member in enumerate(members):
        role = _ROLE.sub("-", member.name)
        if role in roles:
            role = f"{role}-{index}"
        words = ["--members", *names, "--recipe", recipe]
        words += ["--run_dir", str(folder / member.name), *others, *member.words]
        roles[role] = Member(role, tuple(words))
    return list(roles.values())


def roles_or_exit(vary: str, args: Sequence[str], recipe: str, j: str) -> list[Member]:
    """Returns :func:`roles_of`; ends a launcher with one line if the grid is wrong, before any rank starts."""
    try:
        return roles_of(vary, args, recipe, j)
    except ValueError as error:
        sys.exit(str(error))


def fair_threads(members: int, j: str) -> int:
    """Returns the threads of a rank if all members share this machine's cores: as many as there are, at least one.

    Example:
        >>> fair_threads(10_000, "1x2")
        1
    """
    ranks = members * int(j.rpartition("x")[2])
    return max(1, len(os.sched_getaffinity(0)) // ranks)
