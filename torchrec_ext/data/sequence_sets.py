"""Sets of sequences by name: a folder of parquet files, or generated with a known answer."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from torchrec_ext.data.columns import Column, Int64
from torchrec_ext.data.datasets import FOLDER_VARIABLE, DatasetUnavailable
from torchrec_ext.data.parquet import read_parquet
from torchrec_ext.data.row_context import check_finite
from torchrec_ext.data.sequences import SequenceData, from_rows
from torchrec_ext.schema import DataError

PLANTED = "planted"
LONGEST = 20  # of planted sequences
_SPELLINGS = {"user": ("user", "user_id"), "item": ("item", "item_id"), "order": ("position", "timestamp", "time")}
LAYOUT = (
    "one file *sequences.parquet or inter.parquet with a row per event: user (or user_id), item (or item_id), and position, "
    "timestamp or time"
)


@dataclass(frozen=True, kw_only=True)
class SequenceConfig:
    """Which set of sequences to load.

    Args:
        name: of the folder of a set, such as ``amazon-beauty-sequences``, which holds one file as in :data:`LAYOUT`; or
            ``planted``, generated data.
        max_length: S, the most items that a model reads before its target: the most recent ones.
        folder: where the sets lie, each in a folder of its own name; ``$TORCHREC_EXT_DATA`` where not given.
        users: how many users to generate; for generated data only.
        items: how many items to generate.
        seed: of the generator.
    """

    name: str = field(
        default="amazon-beauty-sequences",
        metadata={"doc": f"amazon-beauty-sequences, generated data (planted), or a folder of your own, named so, with {LAYOUT}."},
    )
    max_length: int = 50
    folder: str | None = None
    users: int | None = None
    items: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"data.max_length={self.max_length}: must be 1 or more")
        for key in ("users", "items"):
            value = getattr(self, key)
            if value is not None and self.name != PLANTED:
                raise ValueError(f"data.{key}={value}: {self.name} has its own; leave it out, or choose data.name={PLANTED}")


def load_sequences(config: SequenceConfig) -> SequenceData:
    """Loads the set that ``config`` names.

    Raises:
        DatasetUnavailable: there is no such folder, or no file of the layout in it.
        DataError: a file is damaged, lacks a column, or holds a null.
    """
    if config.name == PLANTED:
        options = {key: value for key, value in (("users", config.users), ("items", config.items)) if value is not None}
        return dataclasses.replace(planted_sequences(seed=config.seed, **options), max_length=config.max_length)
    root = config.folder or os.environ.get(FOLDER_VARIABLE)
    if not root:
        raise DatasetUnavailable(
            f"set '{config.name}': {FOLDER_VARIABLE} is not set and data.folder is not given; name the folder in which "
            f"{config.name}/ lies, with {LAYOUT}; or use generated data: data.name={PLANTED}"
        )
    data = read_sequences(_file_in(Path(root) / config.name, config.name), name=config.name)
    return dataclasses.replace(data, max_length=config.max_length)


def read_sequences(path: Path, *, name: str) -> SequenceData:
    """The sequences in a file of the :data:`LAYOUT`; rows may stand in any order, ids may be any numbers or text."""
    found = list(pq.read_schema(path).names)
    spelled = {role: next((word for word in words if word in found), "") for role, words in _SPELLINGS.items()}
    for role, words in _SPELLINGS.items():
        if not spelled[role]:
            raise DataError(f"{path}: no column {' or '.join(words)}; the file has {', '.join(found)}")
    rows = read_parquet(path, list(spelled.values()))
    for column in rows:
        if rows[column].ragged:
            raise DataError(f"{path}: column '{column}' holds lists, must hold one value per row; write a row for each event")
        check_finite(path, column, rows[column].values)
    columns = (rows[spelled[role]].values for role in ("user", "item", "order"))
    return from_rows(name, *columns, times=spelled["order"] != "position")


def _file_in(folder: Path, name: str) -> Path:
    files = sorted(folder.glob("*sequences.parquet")) or sorted(folder.glob("inter.parquet"))
    if len(files) == 1:
        return files[0]
    what = f"has {', '.join(file.name for file in files)}" if files else ("has no such file" if folder.exists() else "is not there")
    raise DatasetUnavailable(f"set '{name}': {folder} {what}; it must hold {LAYOUT}; or use generated data: data.name={PLANTED}")


def planted_sequences(*, users: int = 4_000, items: int = 400, seed: int = 0) -> SequenceData:
    """Each item has a successor, drawn once: with probability .7 a user takes it next, else any item; none is taken twice.

    The answer: to rank the successor of the last item first, if it has not been taken, and the others in any order. ``best`` is
    what that reaches on the test items, the others found as often as by chance. Popularity knows nothing.

    Args:
        users: how many.
        items: how many, at least 30.
        seed: of everything.
    """
    if users < 1 or items < LONGEST + 10:
        raise ValueError(f"planted sequences of users={users}, items={items}: needs at least 1 user and {LONGEST + 10} items")
    rng = np.random.default_rng([seed, users, items])
    rows, successor = np.arange(users), rng.permutation(items)
    lengths = rng.integers(4, LONGEST + 1, users)
    steps, left = np.zeros((users, LONGEST), dtype=np.int64), np.ones((users, items), dtype=bool)
    for step in range(LONGEST):
        following = successor[steps[:, step - 1]]
        follows = (rng.random(users) < 0.7) & left[rows, following] & (step > 0)
        steps[:, step] = np.where(follows, following, (rng.random((users, items)) * left).argmax(axis=1))
        left[rows, steps[:, step]] = False
    inside = np.arange(LONGEST) < lengths[:, None]
    return SequenceData(
        name=PLANTED,
        sequences=Column.from_lengths(steps[inside].astype(np.int64) + 1, lengths),
        num_items=items,
        best=_best(steps, lengths, successor),
    )


def _best(steps: Int64, lengths: Int64, successor: Int64) -> dict[str, float]:
    """What the rule reaches on the last items, those before left out of the ranking, in expectation over the order of the rest."""
    rows, last = np.arange(len(steps)), lengths - 1
    targets, guesses = steps[rows, last], successor[steps[rows, last - 1]]
    left = np.ones((len(steps), len(successor)), dtype=bool)
    before = np.arange(steps.shape[1]) < last[:, None]
    left[np.nonzero(before)[0], steps[before]] = False
    first = left[rows, guesses].astype(np.int64)  # places that the guess takes
    gains = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(2, 12)))])
    found = {}
    for name, upto in (("HR@1", np.arange(11.0).clip(max=1)), ("HR@10", np.arange(11.0)), ("NDCG@10", gains)):
        by_chance = (upto[-1] - upto[first]) / (left.sum(axis=1) - first)
        found[name] = float(np.where(targets == guesses, upto[1], by_chance).mean())
    return found
