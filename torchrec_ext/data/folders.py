"""A folder of parquet files -> InteractionData, by the names of its files; ids may start at 0 or anywhere above."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchrec_ext.data.columns import Chunk, Column, Int64, concatenate
from torchrec_ext.data.evaluation import Evaluation
from torchrec_ext.data.interactions import InteractionData, from_ratings
from torchrec_ext.data.ncf_text import ncf_files, read_ncf
from torchrec_ext.data.negatives import UniformNegatives
from torchrec_ext.data.parquet import read_parquet
from torchrec_ext.data.row_context import RowContext, read_context
from torchrec_ext.data.side_features import side_features
from torchrec_ext.data.splits import TEST, TRAIN, VALIDATION, with_profiles
from torchrec_ext.schema import DataError

LAYOUTS = (
    "inter.parquet (user_id, item_id, timestamp: the last item of each user is for test), or train.parquet and test.parquet (user, "
    "item), with validation.parquet where it is given and with test_negatives.parquet (user, negative) where each test item is "
    "ranked among its own candidates, or the text files NAME.train.rating, NAME.test.rating and NAME.test.negative of the NCF "
    "paper; with users.parquet (user, ...) and items.parquet (item, ...) where more is known of them, and columns of context "
    "beside the pairs, named in data.context"
)
_NAMES = {TRAIN: "train", VALIDATION: "validation", TEST: "test"}
_SPELLINGS = {"user_id": ("user_id", "user"), "item_id": ("item_id", "item"), "negative": ("negative", "item_id", "item")}


def is_folder_of_interactions(folder: Path) -> bool:
    """Whether the files of one of the layouts are there."""
    pairs = all((folder / f"{part}.parquet").exists() for part in ("train", "test"))
    return pairs or (folder / "inter.parquet").exists() or ncf_files(folder) is not None


def from_folder(
    folder: Path,
    *,
    name: str,
    history_length: int,
    validation: bool = True,
    seed: int = 0,
    columns: Mapping[str, Sequence[str]] | None = None,
    context: Sequence[str] = (),
    licence: str | None = None,
) -> InteractionData:
    """The set in ``folder``, whose layout is one of :data:`LAYOUTS`.

    Where neither times nor a file says what is for validation, one training item of each user is, drawn at random; where test items
    have candidates of their own, it gets as many, drawn uniformly from what the user has not taken. Without candidates all held-out
    items of a user are found in one ranking of the whole catalogue.

    Args:
        folder: with the files.
        name: of the set.
        history_length: greatest length of a history, or of a profile where no times are known.
        validation: hold rows out for validation; False trains on them.
        seed: of what is held out.
        columns: by ``users`` and ``items``, the columns to read of these files, all that describe (see :func:`side_features`) where
            not given.
        context: columns of the interactions that say in what context an item was taken.
        licence: what the publisher asks.

    Raises:
        DataError: a file or a column is missing or damaged, or an id is below 0.
    """
    columns = columns or {}
    negatives, split, evaluation = None, None, Evaluation()
    if context and ncf_files(folder) is not None:
        raise DataError(f"data.context={','.join(context)}: the text files in {folder} have users and items alone; leave it out")
    if (folder / "inter.parquet").exists():
        ratings = _read(folder / "inter.parquet", "user_id", "item_id", "timestamp")
        rows = _context([folder / "inter.parquet"], context)
    else:
        parts, negatives = _parts(folder)
        rows = _context([folder / f"{_NAMES[part]}.parquet" for part in parts], context)
        evaluation = Evaluation(figures=("hr", "recall", "ndcg"), by="user") if negatives is None else Evaluation()
        ratings, part = _joined(parts, validation=validation, seed=seed)
        split = with_profiles(ratings["user_id"].values, ratings["item_id"].values, part, history_length, seed)
    most = max(int(ids.values.max()) for ids in (ratings["item_id"], *([negatives["negative"]] if negatives else [])))
    users = _side(folder / "users.parquet", "user_id", int(ratings["user_id"].values.max()), columns.get("users"))
    items = _side(folder / "items.parquet", "item_id", most, columns.get("items"), taken=set(users[0]))
    if taken := [word for word in context if word in users[0] or word in items[0]]:
        raise DataError(
            f"{folder}: data.context names {taken}, which users.parquet or items.parquet has too; rename one of the columns"
        )
    data = from_ratings(
        name=name,
        ratings=ratings,
        users=users[0],
        items=items[0],
        vocab={
            "user_id": users[0].num_rows,
            **users[1].vocab,
            "history": items[0].num_rows,
            "item_id": items[0].num_rows,
            **items[1].vocab,
        },
        dense=(*users[1].scales, *items[1].scales),
        history_length=history_length,
        titles=items[2],
        first_id=0,
        licence=licence,
        split=split,
        evaluation=evaluation,
        context=rows,
        sides=users[1].joined(items[1]),
    )
    return data if negatives is None else _with_candidates(data, negatives, seed)


def _parts(folder: Path) -> tuple[dict[int, Chunk], Chunk | None]:
    """The pairs of each part, and the negatives of the test items where there are any."""
    if (files := ncf_files(folder)) is not None:
        train, test, negatives = read_ncf(files)
        return {TRAIN: train, TEST: test}, negatives
    if "label" in _names_in(folder / "train.parquet"):
        raise DataError(
            f"{folder}: train.parquet has a column 'label', so not every row is a positive; use a recipe for labelled rows, "
            "such as contextual_ncf or n_tower, or leave the rows with label 0 and the column out"
        )
    files_of = {part: folder / f"{name}.parquet" for part, name in _NAMES.items()}
    parts = {part: _read(file, "user_id", "item_id") for part, file in files_of.items() if part != VALIDATION or file.exists()}
    candidates = folder / "test_negatives.parquet"
    return parts, _read(candidates, "user_id", "negative") if candidates.exists() else None


def _joined(parts: Mapping[int, Chunk], *, validation: bool, seed: int) -> tuple[Chunk, NDArray[np.int8]]:
    """The pairs of all parts, and the part of each."""
    columns = {key: [chunk[key].values for chunk in parts.values()] for key in ("user_id", "item_id")}
    ratings = Chunk({key: Column(np.concatenate(ids)) for key, ids in columns.items()})
    part = np.repeat(np.array(list(parts), dtype=np.int8), [chunk.num_rows for chunk in parts.values()])
    if not validation:
        part[part == VALIDATION] = TRAIN
    elif VALIDATION not in parts:
        part[_one_of_each(ratings["user_id"].values, part, seed)] = VALIDATION
    return ratings, part


def _context(files: Sequence[Path], names: Sequence[str]) -> Chunk | None:
    """The columns of context of all files, one after the other."""
    if not names:
        return None
    reserved = ("timestamp", "history", *(word for words in _SPELLINGS.values() for word in words))
    chunks = [read_context(file, names, sorted(set(reserved))) for file in files]
    for file, chunk in zip(files, chunks, strict=True):
        other = next((name for name in names if chunk[name].values.dtype.kind != chunks[0][name].values.dtype.kind), None)
        if other is not None:
            raise DataError(
                f"{file}: column '{other}' is {chunk[other].values.dtype}, in {files[0].name} {chunks[0][other].values.dtype}; "
                "write one type to all files"
            )
    return Chunk({name: concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]})


def _read(path: Path, *names: str) -> Chunk:
    """Columns of whole numbers under our names, ids from 1."""
    found = _names_in(path)
    spelled = {name: next((word for word in _SPELLINGS.get(name, (name,)) if word in found), name) for name in names}
    chunk = read_parquet(path, dict.fromkeys(spelled.values(), "int"))
    shifted = {name: chunk[word].values.astype(np.int64) + (name in _SPELLINGS) for name, word in spelled.items()}
    for name, values in shifted.items():
        if name in _SPELLINGS and values.min() < 1:
            raise DataError(
                f"{path}: column '{spelled[name]}', row {int(values.argmin())}: id {values.min() - 1}; must be 0 or more"
            )
    return Chunk({name: Column(values) for name, values in shifted.items()})


def _names_in(path: Path) -> list[str]:
    """The file's columns; none where it cannot be read, which :func:`read_parquet` tells better."""
    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError):
        return []


def _side(
    path: Path, key: str, most: int, columns: Sequence[str] | None, taken: set[str] | None = None
) -> tuple[Chunk, RowContext, list[str] | None]:
    """Columns by id, how they were made, and titles where there is a column of that name."""
    if not path.exists():
        return Chunk({key: Column(np.arange(most + 1))}), RowContext(), None
    spelled = next(word for word in (*_SPELLINGS[key], key) if word in _names_in(path) or word == key)
    ids = _read(path, key)[key].values
    size = max(most, int(ids.max())) + 1
    table = read_parquet(path, None if columns is None else [*columns, *(["title"] if "title" in _names_in(path) else [])])
    names = {name: f"item_{name}" if name in (taken or ()) else name for name in table if name != spelled}
    titles = _titles(ids, table["title"], size) if "title" in table else None
    made = side_features(ids, Chunk({names[name]: table[name] for name in names}), size, columns)
    features = Chunk({key: Column(np.arange(size)), **made.columns})
    return features, made.words, titles


def _titles(ids: Int64, column: Column, size: int) -> list[str]:
    titles = ["(unknown)"] * size
    for row, title in zip(ids.tolist(), column.values, strict=True):
        titles[row] = str(title)
    return titles


def _one_of_each(user: Int64, part: NDArray[np.int8], seed: int) -> Int64:
    """A training row of each user who has two or more."""
    rows = np.random.default_rng([seed, 1]).permutation(np.flatnonzero(part == TRAIN))
    _, first, count = np.unique(user[rows], return_index=True, return_counts=True)
    return rows[first[count > 1]]


def _with_candidates(data: InteractionData, negatives: Chunk, seed: int) -> InteractionData:
    candidates = {"test": _by_user(data.test["user_id"].values, negatives)}
    if data.validation.num_rows:
        pairs = data.pairs("train", "validation")
        sampler = UniformNegatives(data.num_items, pairs.users, pairs.items, seed)
        users = data.validation["user_id"].values
        candidates["validation"] = sampler.draw(users, np.arange(len(users)), 0, candidates["test"].shape[1]).ids
    return dataclasses.replace(data, evaluation=Evaluation(candidates=candidates))


def _by_user(users: Int64, negatives: Chunk) -> Int64:
    """(U, N) the negatives of each user, -1 where there are fewer than N."""
    order = np.argsort(negatives["user_id"].values, kind="stable")
    owners, items = negatives["user_id"].values[order], negatives["negative"].values[order]
    starts, stops = owners.searchsorted(users), owners.searchsorted(users, side="right")
    if (starts == stops).any():
        row = int((starts == stops).argmax())
        raise DataError(f"test negatives: user {users[row] - 1}, who has a test item, has no row; write the candidates")
    places = starts[:, None] + np.arange(int((stops - starts).max()))
    inside = places < stops[:, None]
    return np.where(inside, items[np.where(inside, places, 0)], -1)
