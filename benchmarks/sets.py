"""Published sets, and the splits on which published figures were made, as prepared folders.

    TORCHREC_EXT_DATA=... python benchmarks/sets.py recbole OUT

- `ml-100k`: each user's last film tests, the one before it validates; histories of 20 films.
- `recbole`: ml-100k by RecBole 1.2.1's defaults, seed 2020: a random tenth of each user's ratings validates and another
  tests, and all held-out items of a user are found in one ranking. Needs RecBole's own rows in recbole_split.parquet.
- `tfrs`: TensorFlow Recommenders' retrieval tutorial on ml-100k: 80,000 random ratings train and 20,000 test. Movies of
  one title are one. Each test rating is ranked among all titles, seen ones too. The shuffle is numpy's.
- `ncf`: ml-1m in the NCF paper's split: no row validates, and a test item is ranked among its own candidates.
- `frappe`, and `frappe-without` its context; `beauty`: Amazon Beauty's sequences.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.data.columns import Column, Windows
from torchrec_ext.data.config import DataConfig, Roles
from torchrec_ext.data.files.arrow import as_arrow
from torchrec_ext.data.pairs import numbered, set_of_pairs
from torchrec_ext.data.prepare import Evaluation, RawSet, write_set
from torchrec_ext.data.sets import raw_set
from torchrec_ext.data.splits import (
    TEST,
    TRAIN,
    VALIDATION,
    Split,
    leave_one_out,
)

PARTS = {"train": TRAIN, "valid": VALIDATION, "test": TEST}
USERS = """SELECT user_id, gender, occupation, CASE WHEN regexp_matches(zip_code, '^[A-Za-z]') THEN 'Canada'
    ELSE zip_code[1] END AS zip_prefix, CAST(age AS DOUBLE) AS age FROM '{}/users.parquet'"""
# A year of the title where the column holds none; one film has neither.
FILMS = r"""SELECT item_id, CASE WHEN regexp_matches(release_year, '^\d+$') THEN trim(movie_title)
    ELSE replace(trim(regexp_replace(movie_title, '\s*\(\d{{4}}\)\s*(\(\w+\))?\s*$', '')), 'unkonwn', 'unknown')
    END AS title, nullif(coalesce(try_cast(release_year AS BIGINT),
    try_cast(regexp_extract(movie_title, '\((\d{{4}})\)', 1) AS BIGINT)), 0) AS release_year,
    string_split("class", ' ') AS genres FROM '{}/items.parquet'"""


def query(sql, name):
    """A query over the files of a set."""
    return duckdb.sql(sql.format(*[root() / name] * sql.count("{}")))


def rows_of(sql, name):
    """The columns of a query."""
    table = query(sql, name).to_arrow_table()
    return {each: table[each].combine_chunks() for each in table.column_names}


def ml_100k(length=20):
    """ml-100k, each user's last item held out."""
    ratings = rows_of("SELECT * FROM '{}/inter.parquet'", "ml-100k")
    users, items = ratings["user_id"], ratings["item_id"]
    times = ratings["timestamp"].to_numpy()
    return set_of_pairs(
        "ml-100k",
        users,
        items,
        leave_one_out(numbered(users), numbered(items), times, length),
        {"user": rows_of(USERS, "ml-100k"), "item": rows_of(FILMS, "ml-100k")},
    )


def recbole():
    """ml-100k by RecBole's defaults."""
    rows = query("FROM '{}/recbole_split.parquet'", "ml-100k").fetchall()
    part = {(user, item): PARTS[name] for user, item, name in rows}
    return resplit(
        ml_100k(0), part, 300, Evaluation(figures=("recall", "ndcg"), by="user")
    )


def tfrs():
    """ml-100k as in the tutorial."""
    pairs = query("SELECT user_id, item_id FROM '{}/inter.parquet'", "ml-100k")
    pairs = pairs.fetchall()
    of_title = "min(item_id) OVER (PARTITION BY title, release_year)"
    first = query(f"SELECT item_id, {of_title} FROM ({FILMS})", "ml-100k").fetchall()
    ids, firsts = map(pa.array, zip(*first, strict=True))
    first = dict(first)
    raw = ml_100k(0)
    splits = {}
    for name, columns in raw.splits.items():
        merged = firsts.take(pc.index_in(columns["item_id"], ids))
        splits[name] = {**columns, "item_id": merged}
    order = np.random.default_rng(42).permutation(len(pairs))
    test = set(order[: len(order) // 5].tolist())
    part = {}
    for row, (user, item) in enumerate(pairs):
        part[user, first[item]] = TEST if row in test else TRAIN
    rule = Evaluation(at=(1, 5, 10, 50, 100), figures=("hr",), keep_seen=True)
    return resplit(dataclasses.replace(raw, splits=splits), part, 0, rule)


def ncf():
    """ml-1m, each test item beside its own 99 candidates."""
    pairs = "SELECT \"user\" AS user_id, item AS item_id FROM '{}/%s.parquet'"
    lists = "SELECT \"user\" AS user_id, list(negative) AS candidates FROM '{}/test_negatives.parquet' GROUP BY ALL"
    none = f"SELECT *, CAST([] AS INTEGER[]) AS candidates FROM ({pairs % 'train'})"
    test = f"FROM ({pairs % 'test'}) JOIN ({lists}) USING (user_id) ORDER BY user_id"
    return RawSet(
        name="ml-1m-ncf",
        splits={
            "train": rows_of(none, "ml-1m-ncf"),
            "test": rows_of(test, "ml-1m-ncf"),
        },
        roles=Roles(label="", user="user_id", item="item_id"),
        shared={"item_id": ("candidates",)},
        evaluation=Evaluation(candidates="candidates"),
    )


def as_it_stands(name, form, files, names):
    """Files of a published set under the names of a folder as it stands."""
    with tempfile.TemporaryDirectory() as folder:
        for file, own in zip(files.split(), names.split(), strict=True):
            Path(folder, own + ".parquet").symlink_to(root() / name / f"{file}.parquet")
        return raw_set(DataConfig(name=folder), form)


def frappe(kept=None):
    """Frappe's labelled rows, of all columns or of some."""
    raw = as_it_stands(
        "frappe", "labels", "train_resampled validation test", "train validation test"
    )
    splits = {
        part: {name: columns[name] for name in kept or columns}
        for part, columns in raw.splits.items()
    }
    return dataclasses.replace(raw, splits=splits)


SETS = {
    "ml-100k": ml_100k,
    "recbole": recbole,
    "tfrs": tfrs,
    "ncf": ncf,
    "frappe": frappe,
    "frappe-without": lambda: frappe(["user_id", "item_id", "label"]),
    "beauty": lambda: as_it_stands(
        "amazon-beauty-sequences", "sessions", "beauty_sequences", "inter"
    ),
}


def root():
    return Path(os.environ["TORCHREC_EXT_DATA"])


def resplit(raw, part, length, rule):
    """The rows of a set in given parts by (user, item), with profiles of at most ``length`` items."""
    rows = {
        name: pa.concat_arrays([columns[name] for columns in raw.splits.values()])
        for name in raw.splits["train"]
    }
    user, item = (rows[name].to_numpy() for name in ("user_id", "item_id"))
    parts = [part[pair] for pair in zip(user.tolist(), item.tolist(), strict=True)]
    split = with_profiles(user, item, np.array(parts, dtype=np.int8), length)
    rows = {name: values.take(pa.array(split.rows)) for name, values in rows.items()}
    roles = raw.roles
    shared = {}
    if length:
        rows["history"] = as_arrow(split.history)
        features = [*roles.user_features, "history"]
        roles = dataclasses.replace(roles, user_features=features)
        shared = {"item_id": ("history",)}
    splits = {
        name: {
            column: values.filter(pa.array(split.part == number))
            for column, values in rows.items()
        }
        for number, name in enumerate(("train", "validation", "test"))
    }
    return dataclasses.replace(
        raw, splits=splits, roles=roles, shared=shared, evaluation=rule
    )


def with_profiles(user, item, part, length, seed=0):
    """Splits rows by given parts, for events in an unknown order.

    A pair that occurs more than once in a part is kept once.

    In place of a history each row has a profile: at most ``length`` of its user's training items in a random order,
    never the row itself, and no held-out item. Rows of a user stand in that order, so that the profile of a training
    row is the ``length`` rows after it; the first row follows the last::

        training items of a user    5 2 9
        profiles of their rows      5: [2, 9]   2: [9, 5]   9: [5, 2]
        profile of a held-out row   [5, 2, 9]

    Args:
        user: (B,) ids.
        item: (B,) ids.
        part: (B,) TRAIN, VALIDATION or TEST.
        length: greatest length of a profile.
        seed: seed of the order.
    """
    # One number for each pair and part, so that np.unique compares both. A pair may be
    # in several parts.
    pair = (user * (item.max(initial=0) + 1) + item) * 3 + part
    shuffled = np.random.default_rng(seed).permutation(
        np.unique(pair, return_index=True)[1]
    )
    rows = shuffled[np.lexsort((part[shuffled], user[shuffled]))]
    user = user[rows]
    item = item[rows]
    part = part[rows]
    first = user.searchsorted(user)
    training = part == TRAIN
    # Number of training rows before each row.
    before = np.concatenate([[0], training.cumsum()])
    count = before[user.searchsorted(user, "right")] - before[first]
    # A user's training items twice in a row: all of them but the one at place p are the
    # count - 1 items from p + 1 on.
    start = 2 * before[first]
    index = np.arange(len(rows)) - first
    pool = np.zeros(2 * int(training.sum()), dtype=np.int64)
    for copy in (0, 1):
        pool[(start + index + copy * count)[training]] = item[training]
    starts = np.where(training, start + index + 1, start)
    stops = starts + np.minimum(count - training, length)
    return Split(rows, part, Column.from_windows(pool, Windows(starts, stops)))


def prepare(name, folder):
    """Writes a set unless it is there; returns its folder."""
    if not (folder / "summary.json").exists():
        write_set(folder, SETS[name]())
    return folder


if __name__ == "__main__":
    prepare(sys.argv[1], Path(sys.argv[2]))
