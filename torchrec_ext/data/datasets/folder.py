"""from_folder(): a folder of parquet files -> InteractionData, by the files' names; ids are whole numbers or text.

read_ncf(): the text files of He et al. 2017, NAME.train.rating, NAME.test.rating and NAME.test.negative.

read_lines(): the text files of He et al. 2020 (LightGCN), train.txt and test.txt, a user and his or her items a line.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchrec_ext.data.columns import Array, Chunk, Column, Int64
from torchrec_ext.data.datasets.features import (
    RawColumns,
    RowContext,
    check_described,
    raw_column,
    raw_ids,
    same_types,
    side_features,
    times_in,
)
from torchrec_ext.data.datasets.interactions import (
    TEST,
    TRAIN,
    VALIDATION,
    Evaluation,
    InteractionData,
    Split,
    from_ratings,
    leave_one_out,
    with_profiles,
)
from torchrec_ext.data.files.arrow import is_list_type
from torchrec_ext.data.files.parquet import read_columns
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.schema import DataError


def ncf_files(folder: Path) -> tuple[Path, Path, Path] | None:
    """Returns the training, test and negative file; None if one of them is missing."""
    negative_files = sorted(folder.glob("*.test.negative"))
    stem = negative_files[0].name.removesuffix(".test.negative") if negative_files else ""
    files = tuple(folder / f"{stem}{suffix}" for suffix in (".train.rating", ".test.rating", ".test.negative"))
    if not negative_files or not all(file.exists() for file in files):
        return None
    return files[0], files[1], files[2]


def read_ncf(files: tuple[Path, Path, Path]) -> tuple[Chunk, Chunk, Chunk]:
    """Reads (train, test, negatives) with the columns ``user_id`` and ``item_id`` or ``negative``.

    A line of ratings is ``user item rating time``, a line of negatives ``(user,item) negative negative ...``, equally
    many in each line, separated by tabs. User and item are all that is read of ratings.

    Raises:
        DataError: a line has another form.
    """
    train, test = (_pairs(file) for file in files[:2])
    return train, test, _negatives(files[2])


def line_files(folder: Path) -> tuple[Path, Path] | None:
    """Returns train.txt and test.txt; None if one of them is missing."""
    files = (folder / "train.txt", folder / "test.txt")
    return files if all(file.exists() for file in files) else None


def read_lines(file: Path) -> Chunk:
    """Reads ``user_id`` and ``item_id`` of lines ``user item item ...``, separated by blanks; a user may have no item.

    Raises:
        DataError: a line holds something else, or the file no item.
    """
    lines = [line.split() for line in _lines(file)]
    for number, fields in enumerate(lines, start=1):
        if wrong := [field for field in fields if not field.isdecimal()]:
            raise DataError(
                f"{file}: line {number} has '{wrong[0]}', must have a user and items, ids of 0 or more; copy it again"
            )
    counts = np.array([len(fields) - 1 for fields in lines])
    if not counts.any():
        raise DataError(f"{file}: no line has an item after its user; copy it again")
    users = np.array([fields[0] for fields in lines]).astype(np.int64).repeat(counts)
    items = np.concatenate([np.array(fields[1:], dtype=np.int64) for fields in lines])
    return Chunk({"user_id": Column(users), "item_id": Column(items)})


def _pairs(file: Path) -> Chunk:
    rows = _numbers(file, [line.split("\t")[:2] for line in _lines(file)], 2)
    return Chunk({"user_id": Column(rows[:, 0]), "item_id": Column(rows[:, 1])})


def _negatives(file: Path) -> Chunk:
    lines = [line.split("\t") for line in _lines(file)]
    # A line begins with (user,item); the user alone is read.
    owners = [[line[0].strip("()").split(",")[0]] for line in lines]
    users = _numbers(file, owners, 1)[:, 0]
    items = _numbers(file, [line[1:] for line in lines], len(lines[0]) - 1)
    owner_of_each = users.repeat(items.shape[1])
    return Chunk({"user_id": Column(owner_of_each), "negative": Column(items.reshape(-1))})


def _lines(file: Path) -> list[str]:
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{file}: no lines; copy it again")
    return lines


def _numbers(file: Path, rows: list[list[str]], width: int) -> Int64:
    for number, fields in enumerate(rows, start=1):
        if len(fields) != width or not all(field.isdecimal() for field in fields):
            raise DataError(
                f"{file}: line {number} has {fields[:4]}, must have {width} ids of 0 or more; copy the file again"
            )
    return np.array(rows, dtype=np.int64).reshape(len(rows), width)


# The folder that `rec.data.preprocess` writes next to the rows. Id 0 of these rows is the unknown value.
PREPROCESSOR = "preprocessor"
_NAMES = {TRAIN: "train", VALIDATION: "validation", TEST: "test"}
# Files of a folder that have ids of users or items.
_WITH_IDS = ("inter", *_NAMES.values(), "test_negatives", "users", "items")
_SPELLINGS = {
    "user_id": ("user_id", "user"),
    "item_id": ("item_id", "item"),
    "negative": ("negative", "item_id", "item"),
}


def is_folder_of_interactions(folder: Path) -> bool:
    """Says whether a folder has the files of one of the layouts."""
    pairs = all((folder / f"{part}.parquet").exists() for part in ("train", "test"))
    texts = ncf_files(folder) is not None or line_files(folder) is not None
    return pairs or (folder / "inter.parquet").exists() or texts


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
    """Loads the set in ``folder``, in one of the layouts of :data:`torchrec_ext.data.datasets.config.LAYOUTS`.

    If neither times nor a file says which rows are for validation, one random training item of each user is. If test
    items have candidates of their own, the validation item gets as many, drawn uniformly from the items that the user
    has not taken. Without candidates all held-out items of a user are found in one ranking of the whole catalogue.

    Ids are whole numbers or text; a pair without one of them is refused. Missing values of features and of context are
    unknown. If dates give the order of events, equal dates are one moment.

    The catalogue consists of the items of the training rows and of ``items.parquet``, whatever their ids. A held-out
    item that is in neither can be recommended to nobody: it counts as missed, or as the unknown item among candidates
    of its own.

    Args:
        folder: folder with the files.
        name: name of the set.
        history_length: greatest length of a history, or of a profile if no times are known.
        validation: hold rows out for validation; False trains on them.
        seed: seed of the choice of held-out rows.
        columns: columns to read of the files, under ``users`` and ``items``; by default all that describe (see
            :func:`side_features`).
        context: columns of the interactions that say in what context an item was taken.
        licence: terms of the publisher for users, or None.

    Raises:
        DataError: a file or a column is missing or damaged, ids are text in one file and numbers in another, or a
            training row has the id that the preprocessor in the folder writes for the unknown.
    """
    columns = columns or {}
    texts = _text_ids(folder)
    pairs = _read_pairs(folder, context, texts, validation=validation, seed=seed)
    split = _split(pairs.rows, pairs.part, history_length, seed)
    if (folder / PREPROCESSOR).is_dir():
        _check_placeholder(folder, pairs.rows.take(split.rows[split.part == TRAIN]))
    ids, ratings, split = _numbered(folder, pairs.rows, split, pairs.trained, pairs.negatives, texts)
    users = _side(folder / "users.parquet", "user_id", ids.users, texts, columns.get("users"))
    items = _side(folder / "items.parquet", "item_id", ids.items, texts, columns.get("items"), user_names=set(users[0]))
    catalogue = len(ids.items) - ids.outside
    numbers = np.arange(len(ids.items))
    # Items outside the catalogue share the row of the unknown item.
    features = items[0].with_columns({"item_id": Column(np.where(numbers < catalogue, numbers, 0))})
    if ambiguous := [word for word in context if word in users[0] or word in items[0]]:
        raise DataError(
            f"{folder}: data.context names {ambiguous}, which users.parquet or items.parquet has too; rename one of "
            "the columns"
        )
    data = from_ratings(
        name=name,
        ratings=ratings,
        users=users[0],
        items=features,
        vocab={
            "user_id": users[0].num_rows,
            **users[1].vocab,
            "history": catalogue,
            "item_id": catalogue,
            **items[1].vocab,
        },
        dense=(*users[1].scales, *items[1].scales),
        history_length=history_length,
        titles=items[2],
        user_ids=_as_text(ids.users, texts.get("user_id")),
        item_ids=_as_text(ids.items, texts.get("item_id")),
        outside=ids.outside,
        licence=licence,
        split=split,
        evaluation=pairs.evaluation,
        context=pairs.context,
        sides=users[1].joined(items[1]),
    )
    return data if pairs.negatives is None else _with_candidates(data, ids, pairs.negatives, seed)


class _Interactions(NamedTuple):
    """The pairs in a folder.

    ``rows`` hold the files' ids and ``context`` their context. ``part`` is the part of each row, None if times decide.
    ``trained`` names the parts that come from training rows. ``negatives`` are the candidates of test items, if given.
    """

    rows: Chunk
    context: RawColumns | None
    part: NDArray[np.int8] | None
    trained: Sequence[int]
    negatives: Chunk | None
    evaluation: Evaluation


def _read_pairs(folder: Path, context: Sequence[str], texts: _Texts, *, validation: bool, seed: int) -> _Interactions:
    """Reads the pairs in a folder, whatever its layout."""
    if context and (ncf_files(folder) or _by_lines(folder)):
        raise DataError(
            f"data.context={','.join(context)}: the text files in {folder} have users and items alone; leave it out"
        )
    if (folder / "inter.parquet").exists():
        rows = _read(folder / "inter.parquet", "user_id", "item_id", "timestamp", texts=texts)
        return _Interactions(rows, _context([folder / "inter.parquet"], context), None, [TRAIN], None, Evaluation())
    parts, negatives = _parts(folder, texts)
    # Without a file of its own, validation is taken from the rows of train.parquet.
    trained = [TRAIN] if VALIDATION in parts else [TRAIN, VALIDATION]
    columns = _context([folder / f"{_NAMES[part]}.parquet" for part in parts], context)
    evaluation = Evaluation(figures=("hr", "recall", "ndcg"), by="user") if negatives is None else Evaluation()
    rows, part = _joined(parts, validation=validation, seed=seed)
    return _Interactions(rows, columns, part, trained, negatives, evaluation)


class _Ids(NamedTuple):
    """The files' ids of the users and items in each row of our tables.

    ``users`` (rows,) ascend from row 1 on, and so do the items of the catalogue in ``items`` (rows,) and, after these,
    the ``outside`` others. Row 0 is the unknown one, whose number, -1 where no id is that, is no id in the files. An id
    of text is its index among the sorted texts.
    """

    users: Int64
    items: Int64
    outside: int


def _split(pairs: Chunk, part: NDArray[np.int8] | None, history_length: int, seed: int) -> Split:
    """Splits pairs with any ids; histories hold the index of each item among the sorted items of ``pairs``."""
    user, item = (np.unique(pairs[name].values, return_inverse=True)[1] for name in ("user_id", "item_id"))
    if part is None:
        return leave_one_out(user, item, pairs["timestamp"].values, history_length)
    return with_profiles(user, item, part, history_length, seed)


def _numbered(
    folder: Path, pairs: Chunk, split: Split, training_parts: Sequence[int], negatives: Chunk | None, texts: _Texts
) -> tuple[_Ids, Chunk, Split]:
    """Replaces the ids of pairs and histories by rows; items of the parts ``trained`` make the catalogue."""
    described_ids = {
        key: _ids_in(folder / f"{file}.parquet", key, texts)
        for key, file in (("user_id", "users"), ("item_id", "items"))
    }
    users = np.unique(np.concatenate([pairs["user_id"].values, described_ids["user_id"]]))
    item = pairs["item_id"].values
    catalogue = np.unique(
        np.concatenate([item[split.rows[np.isin(split.part, training_parts)]], described_ids["item_id"]])
    )
    occurring = item if negatives is None else np.concatenate([item, negatives["negative"].values])
    outside = np.setdiff1d(occurring, catalogue)
    items = np.concatenate([catalogue, outside])
    ids = _Ids(
        users=np.concatenate([[_nobody(users)], users]),
        items=np.concatenate([[_nobody(items)], items]),
        outside=len(outside),
    )
    windows = split.history.windows
    assert windows is not None, "a history is ragged"
    in_history = _rows_of(ids.items, np.unique(item))
    # A model has no row for an item outside the catalogue.
    in_history[in_history > len(catalogue)] = 0
    split = split._replace(history=Column.from_windows(in_history[split.history.pool], windows))
    rows = {"user_id": _rows_of(ids.users, pairs["user_id"].values), "item_id": _rows_of(ids.items, item)}
    return ids, pairs.with_columns({name: Column(row) for name, row in rows.items()}), split


def _nobody(ids: Int64) -> int:
    """Returns the greatest negative number outside ``ids``."""
    return next(number for number in itertools.count(-1, -1) if number not in ids)


# The sorted texts that are ids, by user_id and item_id; no entry if ids are numbers.
_Texts = Mapping[str, pa.Array]


def _text_ids(folder: Path) -> dict[str, pa.Array]:
    """Collects the text ids of users and items from all files of a folder.

    Raises:
        DataError: a file has ids of text and another one has numbers.
    """
    kinds: dict[str, dict[Path, str]] = {"user_id": {}, "item_id": {}}
    for file in (folder / f"{name}.parquet" for name in _WITH_IDS):
        available = _names_in(file) if file.exists() else []
        for key in kinds:
            spellings = _SPELLINGS[key]
            if key == "item_id":
                spellings = (*spellings, "negative")
            word = next((word for word in spellings if word in available), None)
            if word:
                kinds[key][file] = word
    texts_by_key = {}
    for key, columns in kinds.items():
        # Types are compared before any row is read.
        types = {file: raw_ids(file, name, _column(file, name, rows=0)).type for file, name in columns.items()}
        types |= dict.fromkeys(_text_files(folder), pa.int64())
        if len({str(kind) for kind in types.values()}) > 1:
            type_list = ", ".join(f"{kind} in {file.name}" for file, kind in types.items())
            raise DataError(f"{folder}: the ids in '{key}' are {type_list}; write one type to all files")
        if types and pa.types.is_string(next(iter(types.values()))):
            ids = pa.chunked_array([raw_ids(file, name, _column(file, name)) for file, name in columns.items()])
            texts_by_key[key] = pc.unique(ids).drop_null().sort()
    return texts_by_key


def _text_files(folder: Path) -> tuple[Path, ...]:
    """Returns the text files of pairs, with ids of whole numbers; none if parquet files are read instead."""
    return () if (folder / "inter.parquet").exists() else ncf_files(folder) or _by_lines(folder) or ()


def _column(path: Path, name: str, rows: int | None = None) -> pa.Array:
    """Reads a column, or none of its rows to see its type."""
    if rows == 0:
        return pq.read_schema(path).empty_table().column(name)
    return read_columns(path, [name]).column(name)


def _as_text(ids: Int64, texts: pa.Array | None) -> Array:
    """Returns the ids (rows,) as in the files; if these are text, None for row 0."""
    if texts is None:
        return ids
    words: Array = texts.take(pa.array(ids, mask=ids < 0)).to_numpy(zero_copy_only=False)
    return words


def _rows_of(ids: Int64, values: Int64) -> Int64:
    """Returns (N,) the row of each of ``values`` (N,) among ``ids`` (rows,), -1 for a value without one."""
    order = np.argsort(ids, kind="stable")
    indices = np.minimum(ids[order].searchsorted(values), len(ids) - 1)
    return np.where(ids[order][indices] == values, order[indices], -1)


def _check_placeholder(folder: Path, training_rows: Chunk) -> None:
    """Refuses training rows of user or item 0 in a preprocessor's folder: there 0 is the unknown value."""
    for name in ("user_id", "item_id"):
        count = int((training_rows[name].values == 0).sum())
        if count:
            raise DataError(
                f"{folder}: {count:,} training rows have {name} 0, which the {PREPROCESSOR} there writes for a value "
                "that it does not know; leave these rows out, or lower its min_count"
            )


def _parts(folder: Path, texts: _Texts) -> tuple[dict[int, Chunk], Chunk | None]:
    """Reads the pairs of each part, and the negatives of the test items if there are any."""
    if (files := ncf_files(folder)) is not None:
        train, test, negatives = read_ncf(files)
        return {TRAIN: train, TEST: test}, negatives
    if (lines := _by_lines(folder)) is not None:
        return {TRAIN: read_lines(lines[0]), TEST: read_lines(lines[1])}, None
    if "label" in _names_in(folder / "train.parquet"):
        raise DataError(
            f"{folder}: train.parquet has a column 'label', so not every row is a positive; use a recipe for labelled "
            "rows, such as contextual_ncf or n_tower, or leave the rows with label 0 and the column out"
        )
    files_of = {part: folder / f"{name}.parquet" for part, name in _NAMES.items()}
    parts = {
        part: _read(file, "user_id", "item_id", texts=texts)
        for part, file in files_of.items()
        if part != VALIDATION or file.exists()
    }
    candidates = folder / "test_negatives.parquet"
    return parts, _read(candidates, "user_id", "negative", texts=texts) if candidates.exists() else None


def _by_lines(folder: Path) -> tuple[Path, Path] | None:
    """Returns train.txt and test.txt if the rows of the folder are in them, not in parquet files."""
    return None if (folder / "train.parquet").exists() else line_files(folder)


def _joined(parts: Mapping[int, Chunk], *, validation: bool, seed: int) -> tuple[Chunk, NDArray[np.int8]]:
    """Concatenates the pairs of all parts; returns them with the part of each."""
    columns = {}
    for key in ("user_id", "item_id"):
        ids = [chunk[key].values for chunk in parts.values()]
        columns[key] = Column(np.concatenate(ids))
    ratings = Chunk(columns)
    sizes = [chunk.num_rows for chunk in parts.values()]
    part = np.repeat(np.array(list(parts), dtype=np.int8), sizes)
    if not validation:
        part[part == VALIDATION] = TRAIN
    elif VALIDATION not in parts:
        part[_one_of_each(ratings["user_id"].values, part, seed)] = VALIDATION
    return ratings, part


def _context(files: Sequence[Path], names: Sequence[str]) -> dict[str, pa.Array] | None:
    """Reads the columns of context of all files, one file after the other."""
    if not names:
        return None
    reserved = sorted({"timestamp", "history", *(word for words in _SPELLINGS.values() for word in words)})
    if wrong := [name for name in names if name in reserved]:
        raise DataError(
            f"data.context names {wrong}: {', '.join(reserved)} have a meaning of their own; name other columns of "
            f"{files[0].name}"
        )
    columns = same_types({file: _context_in(file, names) for file in files})
    return {name: pa.concat_arrays([file_columns[name] for file_columns in columns]) for name in names}


def _context_in(path: Path, names: Sequence[str]) -> dict[str, pa.Array]:
    """Reads columns of one value per row; True and False are 1 and 0."""
    table = read_columns(path, names)
    columns = {name: raw_column(path, name, table.column(name)) for name in names}
    for name, column in columns.items():
        if is_list_type(column.type):
            raise DataError(
                f"{path}: column '{name}' holds lists; context is one value per row: name another in data.context"
            )
        if pa.types.is_boolean(column.type):
            columns[name] = column.cast(pa.int64())
    return columns


def _read(path: Path, *names: str, texts: _Texts) -> Chunk:
    """Reads ids, and times, under our names; an id of text is its index among ``texts``.

    Raises:
        DataError: a value is missing, an id is neither a whole number nor text, or a time is neither a whole number
            nor a date.
    """
    available = _names_in(path)
    column_names = {}
    for name in names:
        spellings = _SPELLINGS.get(name, (name,))
        column_names[name] = next((word for word in spellings if word in available), name)
    table = read_columns(path, list(column_names.values()))
    columns = {}
    for name, word in column_names.items():
        column = table.column(word)
        if name in _SPELLINGS:
            array = raw_ids(path, word, column)
        elif pa.types.is_integer(column.type):
            array = column
        else:
            array = times_in(path, word, column).cast(pa.int64())
        if array.null_count:
            row = array.is_null().index(True).as_py()
            raise DataError(
                f"{path}: column '{word}', row {row}: value is null ({array.null_count:,} such rows), and a row needs "
                f"{', '.join(column_names.values())}; leave these rows out"
            )
        key = "item_id" if name == "negative" else name
        if key in texts:
            array = pc.index_in(array, texts[key])
        columns[name] = Column(array.to_numpy().astype(np.int64, copy=False))
    return Chunk(columns)


def _names_in(path: Path) -> list[str]:
    """Returns the names of the file's columns; none if it is unreadable, for :func:`read_columns` to report."""
    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError):
        return []


def _ids_in(path: Path, key: str, texts: _Texts) -> Int64:
    """Reads the ids in a file of users or items; none if there is no such file."""
    return _read(path, key, texts=texts)[key].values if path.exists() else np.zeros(0, np.int64)


def _side(
    path: Path, key: str, ids: Int64, texts: _Texts, columns: Sequence[str] | None, user_names: set[str] | None = None
) -> tuple[Chunk, RowContext, list[str] | None]:
    """Reads features by row, how they were made, and titles if there are such; ``ids`` (rows,) are the files' ids."""
    numbers = {key: Column(np.arange(len(ids)))}
    if not path.exists():
        return Chunk(numbers), RowContext(), None
    available = _names_in(path)
    id_column = next((word for word in _SPELLINGS[key] if word in available), key)
    described_ids = _ids_in(path, key, texts)
    check_described(path, id_column, _as_text(described_ids, texts.get(key)), Chunk({}))
    names = [name for name in available if name != id_column] if columns is None else list(columns)
    read_names = list(names)
    if "title" in available and "title" not in names:
        read_names.append("title")
    table = read_columns(path, list(dict.fromkeys(read_names)))
    rows = _rows_of(ids, described_ids)
    titles = _titles(rows, table.column("title"), len(ids)) if "title" in table.column_names else None
    renamed = {name: f"item_{name}" if name in (user_names or ()) else name for name in names}
    raw = {renamed[name]: raw_column(path, name, table.column(name)) for name in names}
    features = side_features(rows, raw, len(ids), columns)
    return Chunk({**numbers, **features.columns}), features.words, titles


def _titles(ids: Int64, column: pa.ChunkedArray, size: int) -> list[str]:
    titles = ["(unknown)"] * size
    for row, title in zip(ids.tolist(), column.to_pylist(), strict=True):
        titles[row] = titles[row] if title is None else str(title)
    return titles


def _one_of_each(user: Int64, part: NDArray[np.int8], seed: int) -> Int64:
    """Draws a training row of each user with two or more."""
    # Not ``seed`` alone, because with_profiles draws its order from that.
    rows = np.random.default_rng([seed, 1]).permutation(np.flatnonzero(part == TRAIN))
    _, first, count = np.unique(user[rows], return_index=True, return_counts=True)
    return rows[first[count > 1]]


def _with_candidates(data: InteractionData, ids: _Ids, negatives: Chunk, seed: int) -> InteractionData:
    owners = _rows_of(ids.users, negatives["user_id"].values)
    items = _rows_of(ids.items, negatives["negative"].values)
    candidates = {"test": candidates_by_user(data.test["user_id"].values, ids.users, owners, items)}
    if data.validation.num_rows:
        pairs = data.pairs("train", "validation")
        sampler = UniformNegatives(data.num_items, pairs.users, pairs.items, seed)
        users = data.validation["user_id"].values
        count = candidates["test"].shape[1]
        candidates["validation"] = sampler.draw(users, np.arange(len(users)), 0, count).ids
    return dataclasses.replace(data, evaluation=Evaluation(candidates=candidates))


def candidates_by_user(users: Int64, ids: Int64, owners: Int64, negatives: Int64) -> Int64:
    """Returns (U, N) the negatives of each user, filled up with -1.

    Args:
        users: (U,) rows of the users.
        ids: (rows,) the files' id of the user in each row.
        owners: (M,) rows of the users of ``negatives``.
        negatives: (M,) rows of items.

    Raises:
        DataError: one of ``users`` has no candidate.
    """
    # Stable, so that the candidates of a user keep the order of the file.
    order = np.argsort(owners, kind="stable")
    owners = owners[order]
    items = negatives[order]
    starts = owners.searchsorted(users)
    stops = owners.searchsorted(users, side="right")
    if (starts == stops).any():
        row = int((starts == stops).argmax())
        raise DataError(
            f"test negatives: user {ids[users[row]]}, who has a test item, has no row; write the candidates"
        )
    indices = starts[:, None] + np.arange(int((stops - starts).max()))
    inside = indices < stops[:, None]
    return np.where(inside, items[np.where(inside, indices, 0)], -1)
