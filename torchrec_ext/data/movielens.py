"""MovieLens 100K: the publisher's text files, or the same as parquet -> raw columns; this package holds no data."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.features import RawColumns, check_described
from torchrec_ext.data.files.arrow import Kind
from torchrec_ext.data.files.sources import read_parquet
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
Tables = tuple[Chunk, Chunk, Chunk]
# Texts of an item.
ITEM_COLUMNS = ("movie_title", "release_year", "class")


def films_and_people(
    ratings: Chunk, people: Chunk, films: Chunk
) -> tuple[RawColumns, RawColumns, RawColumns]:
    """Returns the raw columns of ratings, users and films, as requests have them.

    Args:
        ratings: as :func:`from_parquet` and :func:`from_zip` read them.
        people: users, read in the same way.
        films: films, read in the same way.
    """
    prefixes = []
    for code in people["zip_code"].values:
        prefixes.append("Canada" if code[:1].isalpha() else code[:1])
    users = {
        "user_id": pa.array(people["user_id"].values.astype(np.int64)),
        "gender": pa.array(people["gender"].values),
        "occupation": pa.array(people["occupation"].values),
        "zip_prefix": pa.array(prefixes, pa.string()),
        "age": pa.array(people["age"].values.astype(np.float64)),
    }
    texts = {name: pa.array(films[name].values) for name in ITEM_COLUMNS}
    titles = [
        split_title(title, year)[0]
        for title, year in zip(
            films["movie_title"].values, films["release_year"].values, strict=True
        )
    ]
    items = {
        "item_id": pa.array(films["item_id"].values.astype(np.int64)),
        "title": pa.array(titles),
        **features_of_items(texts),
    }
    interactions = {
        name: pa.array(ratings[name].values.astype(np.int64)) for name in ratings
    }
    return interactions, users, items


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
