"""The splits of MovieLens 100K that published figures were made on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.evaluation import Evaluation
from torchrec_ext.data.parquet import read_parquet
from torchrec_ext.data.splits import TEST, TRAIN, VALIDATION, Split, with_profiles
from torchrec_ext.schema import DataError

Split100K = Literal["last_item", "recbole", "tfrs"]
_PARTS = {"train": TRAIN, "valid": VALIDATION, "test": TEST}


class Protocol(NamedTuple):
    """The ratings as the split sees them, their parts (None: by time) and how the held-out ones are ranked."""

    ratings: Chunk
    split: Split | None
    evaluation: Evaluation


def recbole(ratings: Chunk, file: Path, history_length: int) -> Protocol:
    """RecBole 1.2.1's default: a random tenth of each user for validation and for test, seed 2020; full ranking, seen items out.

    Args:
        ratings: of all users.
        file: ``user_id``, ``item_id`` and ``split`` (train, valid or test) of each rating.
        history_length: greatest length of a profile.

    Raises:
        DataError: the file is missing, or does not hold each rating once.
    """
    table = read_parquet(file, {"user_id": "int", "item_id": "int", "split": "string"})
    many = int(max(ratings["item_id"].values.max(), table["item_id"].values.max())) + 1
    wanted, found = (chunk["user_id"].values.astype(np.int64) * many + chunk["item_id"].values for chunk in (ratings, table))
    order = np.argsort(found)
    places = order[np.minimum(found[order].searchsorted(wanted), len(found) - 1)]
    if len(found) != len(wanted) or not np.array_equal(found[places], wanted):
        raise DataError(f"{file}: {len(found):,} pairs, which are not the {len(wanted):,} of the ratings, each once; get both anew")
    part = np.array([_PARTS[str(name)] for name in table["split"].values], dtype=np.int8)[places]
    split = with_profiles(ratings["user_id"].values, ratings["item_id"].values, part, history_length)
    return Protocol(ratings, split, Evaluation(figures=("recall", "ndcg"), by="user"))


def tfrs(tables: tuple[Chunk, Chunk, Chunk], history_length: int, *, validation: bool, seed: int = 42) -> Protocol:
    """TensorFlow Recommenders' retrieval tutorial: 80,000 random ratings train, 20,000 test; movies are known by their title.

    Movies of one title are one, that of the smallest id. Each test rating is ranked among all titles, those that the user has taken
    before too. TensorFlow's shuffle cannot be repeated without it: ``seed`` is numpy's.

    Args:
        tables: ratings, users and movies.
        history_length: greatest length of a profile.
        validation: take a tenth of the training ratings for validation.
        seed: of the split.
    """
    ratings, _, movies = tables
    titles = [f"{title} {year}" for title, year in zip(movies["movie_title"].values, movies["release_year"].values, strict=True)]
    _, first, of_title = np.unique(np.array(titles), return_index=True, return_inverse=True)
    ids = movies["item_id"].values.astype(np.int64)
    by_id = np.zeros(ids.max() + 1, dtype=np.int64)
    by_id[ids] = ids[first[of_title]]
    ratings = ratings.with_columns({"item_id": Column(by_id[ratings["item_id"].values])})
    order = np.random.default_rng(seed).permutation(ratings.num_rows)
    tenth = ratings.num_rows // 10
    part = np.full(ratings.num_rows, TRAIN, dtype=np.int8)
    part[order[: 2 * tenth]] = TEST
    if validation:
        part[order[2 * tenth : 2 * tenth + 8 * tenth // 10]] = VALIDATION
    split = with_profiles(ratings["user_id"].values.astype(np.int64), ratings["item_id"].values, part, history_length)
    return Protocol(ratings, split, Evaluation(at=(1, 5, 10, 50, 100), figures=("hr",), keep_seen=True))
