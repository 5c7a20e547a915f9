"""Small sets in the form of the real ones."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from torchrec_ext.data import planted
from torchrec_ext.data.pairs import set_of_pairs
from torchrec_ext.data.prepare import Evaluation, RawSet
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.data.sets import open_set
from torchrec_ext.data.splits import leave_one_out

USERS, ITEMS, RATINGS_EACH = 60, 40, 12


def write_ml_100k(root: Path) -> Path:
    """``ml-100k/`` below ``root`` with the publisher's three files; returns ``root``."""
    rng = np.random.default_rng(0)
    folder = root / "ml-100k"
    folder.mkdir(parents=True)
    taken = [rng.permutation(ITEMS)[:RATINGS_EACH] + 1 for _ in range(USERS)]
    items = np.concatenate(taken)
    rows = {
        "u.data": zip(
            np.arange(USERS).repeat(RATINGS_EACH) + 1,
            items,
            rng.integers(1, 6, len(items)),
            np.linspace(880_000_000, 893_000_000, len(items)).astype(np.int64),
            strict=True,
        ),
        "u.user": (
            (user, rng.integers(10, 70), "MF"[user % 2], "writer", "V0R2M")
            for user in range(1, USERS + 1)
        ),
        "u.item": (
            (
                *(item, f"Mis\u00e9rables {item} (199{item % 2 + 4})", "01-Jan-1995"),
                *("", ""),
                # Comedy, or drama and war.
                *(int(flag in ((5,), (8, 17))[item % 2]) for flag in range(19)),
            )
            for item in range(1, ITEMS + 1)
        ),
    }
    for name, lines in rows.items():
        mark = "\t" if name == "u.data" else "|"
        text = "".join(mark.join(map(str, line)) + "\n" for line in lines)
        (folder / name).write_text(text, encoding="latin-1")
    return root


@functools.cache
def planted_data(**sizes: int) -> Prepared:
    """Generated tastes as a prepared folder, once in a process."""
    return open_set(planted.planted(**sizes))


def checkerboard(users: int, items: int, history_length: int = 50) -> RawSet:
    """Users u who take item i if and only if u + i is even, in a random order.

    Once a user's training and validation items are masked, the test item alone is left of its colour: the best HR and
    NDCG are exactly 1, and popularity knows nothing.
    """
    rng = np.random.default_rng([users, items])
    user, item = np.indices((users, items)).reshape(2, -1) + 1
    rows = rng.permutation(np.flatnonzero((user + item) % 2 == 0))
    user, item = user[rows], item[rows]
    numbers = np.arange(1, users + 1)
    return set_of_pairs(
        "checkerboard",
        pa.array(user),
        pa.array(item),
        leave_one_out(user, item - 1, np.arange(len(rows)), history_length),
        {
            "user": {
                "user_id": pa.array(numbers),
                "gender": pa.array(rng.integers(1, 3, users)),
                "age": pa.array(rng.normal(size=users)),
            },
            "item": {
                "item_id": pa.array(np.arange(1, items + 1)),
                "title": pa.array([f"square {number}" for number in range(items)]),
            },
        },
    )


def checkerboard_data(**sizes: int) -> Prepared:
    """A generated checkerboard as a prepared folder."""
    return open_set(checkerboard(**sizes))


def with_candidates(raw: RawSet, count: int, **rule: Any) -> RawSet:
    """The set with so many trained items beside each held-out row, among which its item is ranked."""
    rng = np.random.default_rng(0)
    trained = np.unique(raw.splits["train"]["item_id"])
    splits = {}
    for split, columns in raw.splits.items():
        size = len(columns["item_id"])
        most = 0 if split == "train" else count
        drawn = pa.array(rng.choice(trained, size * most))
        offsets = pa.array(np.arange(size + 1) * most, pa.int32())
        lists = pa.ListArray.from_arrays(offsets, drawn)
        splits[split] = {**columns, "candidates": lists}
    return dataclasses.replace(
        raw,
        splits=splits,
        shared={"item_id": (*raw.shared["item_id"], "candidates")},
        evaluation=Evaluation(candidates="candidates", **rule),
    )
