"""MovieLens 100K: the publisher's text files, or the same as parquet -> InteractionData; this package holds no data.

recbole(), tfrs(): the splits on which published figures were made.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from torchrec_ext.data.columns import Chunk, Column, Int64
from torchrec_ext.data.datasets.features import (
    RowContext,
    SideFeatures,
    check_described,
    id_steps,
    number_steps,
    side_features,
    vocabulary_of,
)
from torchrec_ext.data.datasets.interactions import (
    TEST,
    TRAIN,
    VALIDATION,
    Evaluation,
    InteractionData,
    Split,
    from_sides,
    rows_among,
    with_profiles,
)
from torchrec_ext.data.files.arrow import Kind
from torchrec_ext.data.files.parquet import read_parquet
from torchrec_ext.schema import DataError

LICENCE = (
    "MovieLens 100K (c) GroupLens, University of Minnesota: research use only, no redistribution without permission, "
    "no commercial use. Cite: F. M. Harper and J. A. Konstan (2015), The MovieLens Datasets: History and Context, ACM "
    "TiiS 5(4), 19."
)
LICENCE_1M = LICENCE.replace("100K", "1M")
# In the order of u.item's flags. The publisher's first flag, `unknown`, is id 0.
GENRES = (
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
)
GENDERS = ("M", "F")
OCCUPATIONS = (
    "administrator",
    "artist",
    "doctor",
    "educator",
    "engineer",
    "entertainment",
    "executive",
    "healthcare",
    "homemaker",
    "lawyer",
    "librarian",
    "marketing",
    "none",
    "other",
    "programmer",
    "retired",
    "salesman",
    "scientist",
    "student",
    "technician",
    "writer",
)
# 18 of the 943 users gave a Canadian code, which starts with a letter.
ZIP_PREFIXES = (*"0123456789", "Canada")
AGE_CENTRE = 35.0
AGE_SCALE = 15.0

Tables = tuple[Chunk, Chunk, Chunk]
# Texts of an item.
ITEM_COLUMNS = ("movie_title", "release_year", "class")


def movielens_100k(
    tables: Tables,
    history_length: int,
    *,
    split: Split | None = None,
    evaluation: Evaluation | None = None,
) -> InteractionData:
    """Builds the set of interactions, every rating a positive.

    User features: ``user_id``, ``gender``, ``occupation``, ``zip_prefix`` (first digit; one id for Canada), dense
    ``age`` = (years - 35) / 15, ``history``. Item features: ``item_id``, ``release_year`` (an id per year), ``genres``
    (ragged). Id 0 is unknown.

    Args:
        tables: (ratings, users, items) as :func:`from_parquet` and :func:`from_zip` read them.
        history_length: greatest length of a history.
        split: split of the ratings; by time if None.
        evaluation: rules by which the held-out ratings are ranked.
    """
    ratings, people, movies = tables
    user_ids = np.unique(people["user_id"].values)
    item_ids = np.unique(movies["item_id"].values)
    ratings = ratings.with_columns(
        {name: Column(ratings[name].values.astype(np.int64)) for name in ratings}
    )
    rows = {
        "user_id": _rows("user_id", user_ids, ratings),
        "item_id": _rows("item_id", item_ids, ratings),
    }
    if split is not None:
        # Its histories hold the publisher's ids.
        pool = item_ids.searchsorted(split.history.pool).astype(np.int64) + 1
        split = split._replace(history=split.history.with_pool(pool))
    users = _users(people, user_ids)
    size = len(item_ids) + 1
    item_rows = item_ids.searchsorted(movies["item_id"].values) + 1
    titles = ["(unknown)"] * size
    categories: list[list[str]] = [[]] * size
    years = np.zeros(movies.num_rows, np.int64)
    texts = [movies[name].values for name in ITEM_COLUMNS]
    for index, (row, title, year, genres) in enumerate(
        zip(item_rows.tolist(), *texts, strict=True)
    ):
        titles[row], years[index] = split_title(title, year)
        categories[row] = genres.split()
    raw = {
        "release_year": pa.array(years, mask=years == 0),
        "genres": pa.array(movies["class"].values),
    }
    year_steps = id_steps("release_year", vocabulary_of(np.unique(years[years > 0])))
    genre_steps = id_steps("genres", vocabulary_of(GENRES), " ")
    items = side_features(
        item_rows, raw, size, words=RowContext.of([year_steps, genre_steps])
    )
    return from_sides(
        name="ml-100k",
        ratings=ratings.with_columns(rows),
        users=users,
        items=items,
        history_length=history_length,
        titles=titles,
        categories=categories,
        user_ids=np.concatenate([[0], user_ids]),
        item_ids=np.concatenate([[0], item_ids]),
        licence=LICENCE,
        split=split,
        evaluation=evaluation,
    )


def _users(people: Chunk, user_ids: Int64) -> SideFeatures:
    """Returns the features of the users, a row for each of the ascending ``user_ids`` after that of the unknown one."""
    rows = user_ids.searchsorted(people["user_id"].values) + 1
    raw = {
        name: pa.array(people[name].values) for name in ("gender", "occupation", "age")
    }
    prefixes = []
    for code in people["zip_code"].values:
        prefixes.append("Canada" if code[:1].isalpha() else code[:1])
    raw["zip_prefix"] = pa.array(prefixes, pa.string())
    # Fixed words and scales, so that an id means the same whatever users there are.
    words = {"gender": GENDERS, "occupation": OCCUPATIONS, "zip_prefix": ZIP_PREFIXES}
    steps = [id_steps(name, vocabulary_of(values)) for name, values in words.items()]
    steps.append(number_steps("age", AGE_CENTRE, AGE_SCALE))
    return side_features(rows, raw, len(user_ids) + 1, words=RowContext.of(steps))


def split_title(title: str, year: str = "") -> tuple[str, int]:
    """Splits a title from its year, 0 if the year is unknown.

    Example:
        >>> split_title("Toy Story (1995)"), split_title("Land Before Time III (1995) (V)")
        (('Toy Story', 1995), ('Land Before Time III', 1995))
        >>> split_title("unknown", "unkonwn")
        ('unknown', 0)
    """
    if year.isdigit():
        return title.strip(), int(year)
    match = re.fullmatch(r"(.*?)\s*\((\d{4})\)\s*(\(\w+\))?\s*", title)
    if match:
        return match[1], int(match[2])
    # The parquet conversion spells the one untitled film's name this way.
    return title.strip().replace("unkonwn", "unknown"), 0


def features_of_items(columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    """Turns the columns :data:`ITEM_COLUMNS` of ``items.parquet`` into the item features of a request.

    Args:
        columns: (N,) texts of each column, by name.

    Returns:
        ``release_year``, whole numbers, null if unknown, and ``genres``, texts with a space between two.

    Example:
        >>> texts = {"movie_title": ["Toy Story (1995)"], "release_year": [""], "class": ["Animation Comedy"]}
        >>> features = features_of_items({name: pa.array(values) for name, values in texts.items()})
        >>> {name: values.to_pylist() for name, values in features.items()}
        {'release_year': [1995], 'genres': ['Animation Comedy']}
    """
    pairs = zip(
        columns["movie_title"].to_pylist(),
        columns["release_year"].to_pylist(),
        strict=True,
    )
    years = []
    for title, text in pairs:
        _, year = split_title(title or "", text or "")
        years.append(year or None)
    return {"release_year": pa.array(years, pa.int64()), "genres": columns["class"]}


_COLUMNS: Mapping[str, Mapping[str, Kind]] = {
    "inter": {"user_id": "int", "item_id": "int", "rating": "int", "timestamp": "int"},
    "users": {
        "user_id": "int",
        "age": "int",
        "gender": "string",
        "occupation": "string",
        "zip_code": "string",
    },
    "items": {
        "item_id": "int",
        "movie_title": "string",
        "release_year": "string",
        "class": "string",
    },
}


def from_parquet(folder: Path) -> Tables:
    """Reads (ratings, users, items) from ``inter.parquet``, ``users.parquet`` and ``items.parquet``.

    Raises:
        DataError: a file or a column is missing or damaged, or a user or an item is described twice.
    """
    ratings, users, items = (
        read_parquet(folder / f"{name}.parquet", kinds)
        for name, kinds in _COLUMNS.items()
    )
    check_described(folder / "users.parquet", "user_id", users["user_id"].values)
    check_described(folder / "items.parquet", "item_id", items["item_id"].values)
    return ratings, users, items


# The publisher's files, in the order of the tables: the separator, and the number of
# fields of a line.
_TEXTS = {"u.data": ("\t", 4), "u.user": ("|", 5), "u.item": ("|", 6 + len(GENRES))}


def from_zip(path: Path) -> Tables:
    """Reads (ratings, users, items) from the publisher's ``ml-100k.zip``, latin-1 text, without unpacking it to disk.

    Years stand in a column of their own.

    Raises:
        DataError: the file is not a zip, or a file in it is missing or has another form.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            texts = {
                name: archive.read(f"ml-100k/{name}").decode("latin-1")
                for name in _TEXTS
            }
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(
            f"{path}: not the publisher's ml-100k.zip ({error}); delete it and download it again"
        ) from error
    ratings, people, movies = (
        _fields(path, name, text) for name, text in texts.items()
    )
    names = ("unknown", *GENRES)
    items = []
    for item, title, _, _, _, *flags in movies:
        plain_title, year = split_title(title)
        genres = " ".join(
            name for name, flag in zip(names, flags, strict=True) if flag == "1"
        )
        items.append([item, plain_title, str(year or ""), genres])
    return _table(ratings, "inter"), _table(people, "users"), _table(items, "items")


def _fields(path: Path, name: str, text: str) -> list[list[str]]:
    """Returns the fields of each line of a file in the zip."""
    separator, count = _TEXTS[name]
    rows = [line.split(separator) for line in text.split("\n") if line.strip()]
    for number, fields in enumerate(rows, start=1):
        if len(fields) != count:
            raise DataError(
                f"{path}: {name} line {number} has {len(fields)} fields, must have {count}; delete the file and "
                "download it again"
            )
    return rows


def _table(rows: Sequence[Sequence[str]], name: str) -> Chunk:
    """Turns lines of fields into the columns of a table, whole numbers or text."""
    columns = {}
    for index, (column, kind) in enumerate(_COLUMNS[name].items()):
        values = [fields[index] for fields in rows]
        columns[column] = Column(
            np.array(values, dtype=np.int64 if kind == "int" else object)
        )
    return Chunk(columns)


def _rows(name: str, described: Int64, ratings: Chunk) -> Column:
    """Returns (N,) the row, from 1 on, of each rating's id in ``described``.

    Raises:
        DataError: an id is not described.
    """
    ids = ratings[name].values
    rows = rows_among(described, ids)
    bad = rows < 0
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"set 'ml-100k': {name} {ids[row]} in row {row} of the ratings is not described ({int(bad.sum())} such "
            "rows); drop these rows or add the missing description"
        )
    return Column(rows + 1)


_PARTS = {"train": TRAIN, "valid": VALIDATION, "test": TEST}


class Protocol(NamedTuple):
    """The ratings as the split sees them, their parts (None: by time), and the rules of the evaluation."""

    ratings: Chunk
    split: Split | None
    evaluation: Evaluation


def recbole(ratings: Chunk, file: Path, history_length: int) -> Protocol:
    """Returns RecBole 1.2.1's default protocol, seed 2020.

    A random tenth of each user's ratings is for validation, another for test; all items but those seen are ranked.

    Args:
        ratings: ratings of all users.
        file: parquet file with ``user_id``, ``item_id`` and ``split`` (train, valid or test) of each rating.
        history_length: greatest length of a profile.

    Raises:
        DataError: the file is missing, or does not hold each rating once.
    """
    table = read_parquet(file, {"user_id": "int", "item_id": "int", "split": "string"})
    # A pair becomes one number, user * many + item.
    many = int(max(ratings["item_id"].values.max(), table["item_id"].values.max())) + 1
    rating_keys = (
        ratings["user_id"].values.astype(np.int64) * many + ratings["item_id"].values
    )
    table_keys = (
        table["user_id"].values.astype(np.int64) * many + table["item_id"].values
    )
    indices = rows_among(table_keys, rating_keys)
    if len(table_keys) != len(rating_keys) or (indices < 0).any():
        raise DataError(
            f"{file}: {len(table_keys):,} pairs, which are not the {len(rating_keys):,} of the ratings, each once; "
            "get both anew"
        )
    part_of_pair = np.array(
        [_PARTS[str(name)] for name in table["split"].values], dtype=np.int8
    )
    part = part_of_pair[indices]
    split = with_profiles(
        ratings["user_id"].values, ratings["item_id"].values, part, history_length
    )
    return Protocol(ratings, split, Evaluation(figures=("recall", "ndcg"), by="user"))


def tfrs(
    tables: tuple[Chunk, Chunk, Chunk], history_length: int, *, validation: bool
) -> Protocol:
    """Returns the protocol of TensorFlow Recommenders' retrieval tutorial: 80,000 random ratings train, 20,000 test.

    Movies of one title are one, that of the smallest id. Each test rating is ranked among all titles, those that the
    user has taken before too. TensorFlow's shuffle cannot be repeated without TensorFlow: this one is numpy's.

    Args:
        tables: ratings, users and movies.
        history_length: greatest length of a profile.
        validation: take a tenth of the training ratings for validation.
    """
    ratings, _, movies = tables
    # The year is a part of the title, as the publisher writes it.
    titles = movies["movie_title"].values + " " + movies["release_year"].values
    _, first, of_title = np.unique(
        titles.astype(str), return_index=True, return_inverse=True
    )
    ids = movies["item_id"].values.astype(np.int64)
    by_id = np.zeros(ids.max() + 1, dtype=np.int64)
    by_id[ids] = ids[first[of_title]]
    ratings = ratings.with_columns(
        {"item_id": Column(by_id[ratings["item_id"].values])}
    )
    # The tutorial's seed.
    order = np.random.default_rng(42).permutation(ratings.num_rows)
    tenth = ratings.num_rows // 10
    part = np.full(ratings.num_rows, TRAIN, dtype=np.int8)
    part[order[: 2 * tenth]] = TEST
    if validation:
        # A tenth of the eight tenths that are left for training.
        part[order[2 * tenth : 2 * tenth + 8 * tenth // 10]] = VALIDATION
    split = with_profiles(
        ratings["user_id"].values.astype(np.int64),
        ratings["item_id"].values,
        part,
        history_length,
    )
    return Protocol(
        ratings,
        split,
        Evaluation(at=(1, 5, 10, 50, 100), figures=("hr",), keep_seen=True),
    )
