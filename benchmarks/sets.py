"""The splits on which published figures were made, as prepared folders.

    TORCHREC_EXT_DATA=... python benchmarks/sets.py recbole OUT

- `recbole`: ml-100k by RecBole 1.2.1's defaults, seed 2020: a random tenth of each user's ratings validates and another
  tests, and all held-out items of a user are found in one ranking. Needs RecBole's own rows in recbole_split.parquet.
- `tfrs`: TensorFlow Recommenders' retrieval tutorial on ml-100k: 80,000 random ratings train and 20,000 test. Movies of
  one title are one. Each test rating is ranked among all titles, seen ones too. The shuffle is numpy's.
- `ncf`: ml-1m in the NCF paper's split, trained on all rows but the test items: no row validates.
- `frappe-without`: frappe without its context.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchrec_ext.data.catalog import ml_100k_tables
from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.movielens import films_and_people
from torchrec_ext.data.prepare import Evaluation, write_set
from torchrec_ext.data.sets import ml_100k, raw_set
from torchrec_ext.data.splits import TEST, TRAIN, VALIDATION, with_profiles

# The longest profile of a user in RecBole's split.
LENGTH = 300
PARTS = {"train": TRAIN, "valid": VALIDATION, "test": TEST}


def recbole():
    """ml-100k by RecBole's defaults."""
    folder = root() / "ml-100k"
    split = pq.read_table(folder / "recbole_split.parquet").to_pydict()
    rows = zip(split["user_id"], split["item_id"], split["split"], strict=True)
    part = {(int(user), int(item)): PARTS[name] for user, item, name in rows}
    rule = Evaluation(figures=("recall", "ndcg"), by="user")
    return resplit(ml_100k(folder, 0), part, LENGTH, rule)


def tfrs():
    """ml-100k as in the tutorial."""
    folder = root() / "ml-100k"
    ratings, _, films = films_and_people(*ml_100k_tables(folder))
    raw = merged(ml_100k(folder, 0), films)
    order = np.random.default_rng(42).permutation(len(ratings["user_id"]))
    test = set(order[: len(order) // 5].tolist())
    part = {}
    first = dict(zip(*first_of_title(films), strict=True))
    pairs = zip(
        ratings["user_id"].to_pylist(), ratings["item_id"].to_pylist(), strict=True
    )
    for row, (user, item) in enumerate(pairs):
        part[user, first[item]] = TEST if row in test else TRAIN
    rule = Evaluation(at=(1, 5, 10, 50, 100), figures=("hr",), keep_seen=True)
    return resplit(raw, part, 0, rule)


def ncf():
    """ml-1m without rows that validate."""
    config = DataConfig(name="ml-1m-ncf", folder=str(root()), history_length=0)
    raw = raw_set(config, "pairs")
    train, validation = raw.splits["train"], raw.splits["validation"]
    splits = {
        "train": {
            name: pa.concat_arrays([values, validation[name]])
            for name, values in train.items()
        },
        "validation": {name: values.slice(0, 0) for name, values in train.items()},
        "test": raw.splits["test"],
    }
    return dataclasses.replace(raw, splits=splits)


def frappe_without():
    """Frappe's users, items and labels alone."""
    raw = raw_set(DataConfig(name="frappe", folder=str(root())), "labels")
    kept = ("user_id", "item_id", "label")
    splits = {
        part: {name: columns[name] for name in kept}
        for part, columns in raw.splits.items()
    }
    return dataclasses.replace(raw, splits=splits)


SETS = {
    "recbole": recbole,
    "tfrs": tfrs,
    "ncf": ncf,
    "frappe-without": frappe_without,
}


def root():
    return Path(os.environ["TORCHREC_EXT_DATA"])


def first_of_title(films):
    """Each film, and the film of the smallest id with the same title and year."""
    ids = films["item_id"].to_pylist()
    titles = zip(films["title"].to_pylist(), films["release_year"].to_pylist())  # noqa: B905
    first = {}
    of_title = []
    for item, title in sorted(zip(ids, titles, strict=True)):
        of_title.append(first.setdefault(title, item))
    return sorted(ids), of_title


def merged(raw, films):
    """Films of one title as one."""
    ids, firsts = (pa.array(values) for values in first_of_title(films))
    splits = {}
    for part, columns in raw.splits.items():
        items = firsts.take(pc.index_in(columns["item_id"], ids))
        splits[part] = {**columns, "item_id": items}
    return dataclasses.replace(raw, splits=splits)


def resplit(raw, part, length, rule):
    """The rows of a set in given parts by (user, item), with profiles of at most ``length`` items."""
    rows = {
        name: pa.concat_arrays([columns[name] for columns in raw.splits.values()])
        for name in raw.splits["train"]
    }
    user, item = (rows[name].to_numpy() for name in ("user_id", "item_id"))
    parts = np.array(
        [part[pair] for pair in zip(user.tolist(), item.tolist(), strict=True)],
        dtype=np.int8,
    )
    split = with_profiles(user, item, parts, length)
    if length:
        profiles = as_lists(split.history)
        rows = {
            name: values.take(pa.array(split.rows)) for name, values in rows.items()
        }
        rows["history"] = profiles
    else:
        rows = {
            name: values.take(pa.array(split.rows)) for name, values in rows.items()
        }
    splits = {
        name: {
            column: values.filter(pa.array(split.part == number))
            for column, values in rows.items()
        }
        for number, name in enumerate(("train", "validation", "test"))
    }
    roles = raw.roles
    shared = {}
    if length:
        roles = dataclasses.replace(
            roles, user_features=[*roles.user_features, "history"]
        )
        shared = {"item_id": ("history",)}
    return dataclasses.replace(
        raw, splits=splits, roles=roles, shared=shared, evaluation=rule
    )


def as_lists(column):
    return pa.ListArray.from_arrays(
        pa.array(column.offsets, pa.int32()), pa.array(column.values)
    )


def prepare(name, folder):
    """Writes a set unless it is there; returns its folder."""
    if not (folder / "summary.json").exists():
        write_set(folder, SETS[name]())
    return folder


if __name__ == "__main__":
    prepare(sys.argv[1], Path(sys.argv[2]))
