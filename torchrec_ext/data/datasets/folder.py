"""from_folder(): a folder of parquet files -> InteractionData, by the files' names; ids are whole numbers or text.

read_ncf(): the text files of He et al. 2017, NAME.train.rating, NAME.test.rating and NAME.test.negative.

read_lines(): the text files of He et al. 2020 (LightGCN), train.txt and test.txt, a user and his or her items a line.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.data.columns import Array, Chunk, Column, Int64, concatenate_rows
from torchrec_ext.data.datasets.config import PARTS
from torchrec_ext.data.datasets.features import (
    RawColumns,
    RowContext,
    SideFeatures,
    check_described,
    names_in,
    raw_column,
    read_ids,
    same_types,
    side_features,
    spelled,
    times_in,
)
from torchrec_ext.data.datasets.interactions import (
    TRAIN,
    VALIDATION,
    Evaluation,
    InteractionData,
    Split,
    from_sides,
    leave_one_out,
    rows_among,
    untaken_items,
    with_profiles,
)
from torchrec_ext.data.files.arrow import is_list_type
from torchrec_ext.data.files.parquet import read_columns
from torchrec_ext.schema import DataError

# The table of candidates of the test items.
_NEGATIVES = "test_negatives"


def ncf_files(folder: Path) -> dict[str, Path]:
    """Returns the training, test and negative file by the names of our tables; empty if one of them is missing."""
    negative_files = sorted(folder.glob("*.test.negative"))
    if not negative_files:
        return {}
    stem = negative_files[0].name.removesuffix(".test.negative")
    train = folder / f"{stem}.train.rating"
    test = folder / f"{stem}.test.rating"
    if not train.exists() or not test.exists():
        return {}
    return {"train": train, "test": test, _NEGATIVES: negative_files[0]}


def read_ncf(paths: Mapping[str, Path]) -> dict[str, Chunk]:
    """Reads the files of :func:`ncf_files`: ``user_id`` and ``item_id``, or ``negative``, of each.

    A line of ratings is ``user item rating time``, a line of negatives ``(user,item) negative negative ...``, equally
    many in each line, separated by tabs. User and item are all that is read of ratings.

    Raises:
        DataError: a line has another form.
    """
    chunks = {}
    for name in ("train", "test"):
        rows = [line.split("\t")[:2] for line in _lines(paths[name])]
        _check_numbers(paths[name], rows, 2)
        chunks[name] = _owned(paths[name], rows, "item_id")
    file = paths[_NEGATIVES]
    owners: list[list[str]] = []
    negatives: list[list[str]] = []
    for line in _lines(file):
        pair, *fields = line.split("\t")
        # A line begins with (user,item); the user alone is read.
        owners.append([pair.strip("()").split(",")[0]])
        negatives.append(fields)
    _check_numbers(file, owners, 1)
    _check_numbers(file, negatives, len(negatives[0]))
    rows = [owner + fields for owner, fields in zip(owners, negatives, strict=True)]
    chunks[_NEGATIVES] = _owned(file, rows, "negative")
    return chunks


def line_files(folder: Path) -> dict[str, Path]:
    """Returns train.txt and test.txt by the names of our tables; empty if one of them is missing."""
    paths = {"train": folder / "train.txt", "test": folder / "test.txt"}
    return paths if all(path.exists() for path in paths.values()) else {}


def read_lines(file: Path) -> Chunk:
    """Reads ``user_id`` and ``item_id`` of lines ``user item item ...``, separated by blanks; a user may have no item.

    Raises:
        DataError: a line holds something else, or the file no item.
    """
    rows = [line.split() for line in _lines(file)]
    for number, fields in enumerate(rows, start=1):
        for field in fields:
            if not field.isdecimal():
                raise DataError(
                    f"{file}: line {number} has '{field}', must have a user and items, ids of 0 or more; copy it again"
                )
    return _owned(file, rows, "item_id")


def _lines(file: Path) -> list[str]:
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{file}: no lines; copy it again")
    return lines


def _check_numbers(file: Path, rows: list[list[str]], width: int) -> None:
    for number, fields in enumerate(rows, start=1):
        if len(fields) != width or not all(field.isdecimal() for field in fields):
            raise DataError(
                f"{file}: line {number} has {fields[:4]}, must have {width} ids of 0 or more; copy the file again"
            )


def _owned(file: Path, rows: list[list[str]], name: str) -> Chunk:
    """Returns ``user_id`` and ``name`` of rows of a user and his or her items."""
    counts = [len(fields) - 1 for fields in rows]
    if not any(counts):
        raise DataError(f"{file}: no line has an item after its user; copy it again")
    users = np.array([fields[0] for fields in rows], dtype=np.int64).repeat(counts)
    items: list[str] = []
    for fields in rows:
        items += fields[1:]
    return Chunk(
        {"user_id": Column(users), name: Column(np.array(items, dtype=np.int64))}
    )


# The folder that `rec.data.preprocess` writes next to the rows. Id 0 of these rows is
# the unknown value.
PREPROCESSOR = "preprocessor"
# The file of each part: TRAIN, VALIDATION and TEST count from 0.
_NAMES = dict(enumerate(PARTS))
_SPELLINGS = {
    "user_id": ("user_id", "user"),
    "item_id": ("item_id", "item"),
    "negative": ("negative", "item_id", "item"),
    "timestamp": ("timestamp",),
}


def is_folder_of_interactions(folder: Path) -> bool:
    """Says whether a folder has the files of one of the layouts."""
    pairs = all((folder / f"{part}.parquet").exists() for part in ("train", "test"))
    return (
        pairs
        or (folder / "inter.parquet").exists()
        or bool(ncf_files(folder) or line_files(folder))
    )


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
    files = _read_files(folder, context)
    pairs = _pairs_of(files, context, validation=validation, seed=seed)
    # Before the ids become rows, because the training rows decide which items are in
    # the catalogue.
    split = _split(pairs.rows, pairs.part, history_length, seed)
    if (folder / PREPROCESSOR).is_dir():
        _check_placeholder(folder, pairs.rows.take(split.rows[split.part == TRAIN]))
    ids, ratings, split = _numbered(files, pairs, split)
    users, _ = _side(files, "users", "user_id", ids.users, columns.get("users"))
    user_names = {"user_id", *users.columns}
    items, titles = _side(
        files,
        "items",
        "item_id",
        ids.items,
        columns.get("items"),
        user_names=user_names,
    )
    if ambiguous := [
        word for word in context if word in {*users.columns, *items.columns}
    ]:
        raise DataError(
            f"{folder}: data.context names {ambiguous}, which users.parquet or items.parquet has too; rename one of "
            "the columns"
        )
    data = from_sides(
        name=name,
        ratings=ratings,
        users=users,
        items=items,
        history_length=history_length,
        titles=titles,
        user_ids=_as_text(ids.users, files.texts.get("user_id")),
        item_ids=_as_text(ids.items, files.texts.get("item_id")),
        outside=ids.outside,
        licence=licence,
        split=split,
        evaluation=pairs.evaluation,
        context=pairs.context,
    )
    if _NEGATIVES in files.tables:
        return _with_candidates(data, ids, files.tables[_NEGATIVES], seed)
    return data


class _Files(NamedTuple):
    """The files of a folder and their ids and times, by the names of parquet files without the ending.

    ``texts`` holds the sorted texts by ``user_id`` and ``item_id`` if ids are text. An id in ``tables`` is then an
    index among them.
    """

    paths: Mapping[str, Path]
    tables: Mapping[str, Chunk]
    texts: Mapping[str, pa.Array]


def _read_files(folder: Path, context: Sequence[str]) -> _Files:
    """Reads ids, and times, from all files of a folder, whatever its layout.

    Raises:
        DataError: a file or a column is missing, misnamed or damaged, or ids are text in one file and numbers in
            another.
    """
    ncf = ncf_files(folder)
    # LightGCN's files beside train.parquet are not read.
    lines = {} if (folder / "train.parquet").exists() else line_files(folder)
    if context and (ncf or lines):
        raise DataError(
            f"data.context={','.join(context)}: the text files in {folder} have users and items alone; leave it out"
        )
    if (folder / "valid.parquet").exists():
        raise DataError(
            f"{folder}: valid.parquet is not read under this name; rename it to validation.parquet"
        )
    paths: dict[str, Path] = {}
    chunks: dict[str, Chunk] = {}
    columns: dict[str, Sequence[str]] = {}
    if (folder / "inter.parquet").exists():
        columns["inter"] = ("user_id", "item_id", "timestamp")
        if "label" in names_in(folder / "inter.parquet") and "label" not in context:
            warnings.warn(
                f"{folder / 'inter.parquet'}: column 'label' is not used, each row is a positive; leave out rows with "
                "label 0, or split the file for recipe contextual_ncf, which reads labels",
                stacklevel=2,
            )
    elif ncf:
        paths = ncf
        chunks = read_ncf(ncf)
    elif lines:
        paths = lines
        chunks = {name: read_lines(path) for name, path in lines.items()}
    elif "label" in names_in(folder / "train.parquet"):
        raise DataError(
            f"{folder}: train.parquet has a column 'label', so not every row is a positive; use a "
            "recipe for labelled rows, such as contextual_ncf"
        )
    else:
        columns |= dict.fromkeys(_NAMES.values(), ("user_id", "item_id"))
        columns[_NEGATIVES] = ("user_id", "negative")
    columns |= {"users": ("user_id",), "items": ("item_id",)}
    tables: dict[str, Mapping[str, pa.Array]] = {}
    for name, chunk in chunks.items():
        tables[name] = {key: pa.array(column.values) for key, column in chunk.items()}
    for name, keys in columns.items():
        path = folder / f"{name}.parquet"
        # Without one of these two, reading fails and names it; the others need not
        # exist.
        if name in ("train", "test") or path.exists():
            paths[name] = path
            tables[name] = _read(path, *keys)
    return _Files(paths, *_without_texts(folder, paths, tables))


def _without_texts(
    folder: Path,
    paths: Mapping[str, Path],
    tables: Mapping[str, Mapping[str, pa.Array]],
) -> tuple[dict[str, Chunk], dict[str, pa.Array]]:
    """Replaces text ids by their index among the sorted texts; returns the texts by key, too.

    Raises:
        DataError: a file has ids of text and another one has numbers.
    """
    texts = {}
    for key, names in (("user_id", {"user_id"}), ("item_id", {"item_id", "negative"})):
        ids: dict[str, pa.Array] = {}
        for file, table in tables.items():
            for name in names & table.keys():
                ids[file] = table[name]
        if len({array.type for array in ids.values()}) > 1:
            type_list = ", ".join(
                f"{array.type} in {paths[file].name}" for file, array in ids.items()
            )
            raise DataError(
                f"{folder}: the ids in '{key}' are {type_list}; write one type to all files"
            )
        if pa.types.is_string(next(iter(ids.values())).type):
            texts[key] = pc.unique(pa.chunked_array(list(ids.values()))).sort()
    chunks = {}
    for file, table in tables.items():
        columns = {}
        for name, array in table.items():
            # Negatives are items, and numbered with them.
            key = "item_id" if name == "negative" else name
            numbers = pc.index_in(array, texts[key]) if key in texts else array
            columns[name] = Column(numbers.to_numpy().astype(np.int64, copy=False))
        chunks[file] = Chunk(columns)
    return chunks, texts


class _Interactions(NamedTuple):
    """The pairs in a folder.

    ``rows`` hold the files' ids and ``context`` their context. ``part`` is the part of each row, None if times decide.
    ``trained`` names the parts that come from training rows.
    """

    rows: Chunk
    context: RawColumns | None
    part: NDArray[np.int8] | None
    trained: Sequence[int]
    evaluation: Evaluation


def _pairs_of(
    files: _Files, context: Sequence[str], *, validation: bool, seed: int
) -> _Interactions:
    """Returns the pairs of all parts, one part after the other."""
    if "inter" in files.tables:
        columns = _context([files.paths["inter"]], context)
        return _Interactions(
            files.tables["inter"], columns, None, [TRAIN], Evaluation()
        )
    parts = {
        part: files.tables[name]
        for part, name in _NAMES.items()
        if name in files.tables
    }
    # Without a file of its own, validation is taken from the rows of train.parquet.
    trained = [TRAIN] if VALIDATION in parts else [TRAIN, VALIDATION]
    columns = _context([files.paths[_NAMES[part]] for part in parts], context)
    evaluation = Evaluation()
    if _NEGATIVES not in files.tables:
        evaluation = Evaluation(figures=("hr", "recall", "ndcg"), by="user")
    # The pairs of all parts, one part after the other, and the part of each.
    rows = concatenate_rows(list(parts.values()), ("user_id", "item_id"))
    sizes = [chunk.num_rows for chunk in parts.values()]
    part = np.repeat(np.array(list(parts), dtype=np.int8), sizes)
    if not validation:
        # Rows of validation.parquet are trained on, too.
        part[part == VALIDATION] = TRAIN
    elif VALIDATION not in parts:
        part[_one_of_each(rows["user_id"].values, part, seed)] = VALIDATION
    return _Interactions(rows, columns, part, trained, evaluation)


class _Ids(NamedTuple):
    """The files' ids of the users and items in each row of our tables.

    ``users`` (rows,) ascend from row 1 on, and so do the items of the catalogue in ``items`` (rows,) and, after these,
    the ``outside`` others. Row 0 is the unknown one, whose number, -1 where no id is that, is no id in the files. An id
    of text is its index among the sorted texts.
    """

    users: Int64
    items: Int64
    outside: int


def _split(
    pairs: Chunk, part: NDArray[np.int8] | None, history_length: int, seed: int
) -> Split:
    """Splits pairs with any ids; histories hold the index of each item among the sorted items of ``pairs``."""
    _, user = np.unique(pairs["user_id"].values, return_inverse=True)
    _, item = np.unique(pairs["item_id"].values, return_inverse=True)
    if part is None:
        return leave_one_out(user, item, pairs["timestamp"].values, history_length)
    return with_profiles(user, item, part, history_length, seed)


def _numbered(
    files: _Files, pairs: _Interactions, split: Split
) -> tuple[_Ids, Chunk, Split]:
    """Replaces the ids of pairs and histories by rows; items of the parts ``trained`` make the catalogue."""
    user = pairs.rows["user_id"].values
    item = pairs.rows["item_id"].values
    trained_items = item[split.rows[np.isin(split.part, pairs.trained)]]
    users = _distinct(user, files.tables.get("users"), "user_id")
    catalogue = _distinct(trained_items, files.tables.get("items"), "item_id")
    negatives = files.tables.get(_NEGATIVES)
    # A candidate may be an item of no pair.
    outside = np.setdiff1d(_distinct(item, negatives, "negative"), catalogue)
    items = np.concatenate([catalogue, outside])
    ids = _Ids(
        users=np.concatenate([[_nobody(users)], users]),
        items=np.concatenate([[_nobody(items)], items]),
        outside=len(outside),
    )
    in_history = rows_among(ids.items, np.unique(item))
    # A model has no row for an item outside the catalogue.
    in_history[in_history > len(catalogue)] = 0
    split = split._replace(
        history=split.history.with_pool(in_history[split.history.pool])
    )
    rows = {
        "user_id": Column(rows_among(ids.users, user)),
        "item_id": Column(rows_among(ids.items, item)),
    }
    return ids, pairs.rows.with_columns(rows), split


def _distinct(ids: Int64, table: Chunk | None, key: str) -> Int64:
    """Returns the distinct ids of pairs and of another file, ascending."""
    if table is not None:
        ids = np.concatenate([ids, table[key].values])
    return np.unique(ids)


def _nobody(ids: Int64) -> int:
    """Returns the greatest negative number outside ``ids``."""
    # Not simply -1, since ids may be any whole numbers, such as hashes.
    return next(number for number in itertools.count(-1, -1) if number not in ids)


def _as_text(ids: Int64, texts: pa.Array | None) -> Array:
    """Returns the ids (rows,) as in the files; if these are text, None for row 0."""
    if texts is None:
        return ids
    words: Array = texts.take(pa.array(ids, mask=ids < 0)).to_numpy(
        zero_copy_only=False
    )
    return words


def _check_placeholder(folder: Path, training_rows: Chunk) -> None:
    """Refuses training rows of user or item 0 in a preprocessor's folder: there 0 is the unknown value."""
    for name in ("user_id", "item_id"):
        count = int((training_rows[name].values == 0).sum())
        if count:
            raise DataError(
                f"{folder}: {count:,} training rows have {name} 0, which the {PREPROCESSOR} there writes for a value "
                "that it does not know; leave these rows out, or lower its min_count"
            )


def _context(files: Sequence[Path], names: Sequence[str]) -> dict[str, pa.Array] | None:
    """Reads the columns of context of all files, one file after the other."""
    if not names:
        return None
    reserved = sorted({"history"}.union(*_SPELLINGS.values()))
    if wrong := [name for name in names if name in reserved]:
        raise DataError(
            f"data.context names {wrong}: {', '.join(reserved)} have a meaning of their own; name other columns of "
            f"{files[0].name}"
        )
    by_file = same_types({file: _context_in(file, names) for file in files})
    context = {}
    for name in names:
        context[name] = pa.concat_arrays([columns[name] for columns in by_file])
    return context


def _context_in(path: Path, names: Sequence[str]) -> dict[str, pa.Array]:
    """Reads columns of one value per row; True and False are 1 and 0."""
    table = read_columns(path, names)
    columns = {}
    for name in names:
        column = raw_column(path, name, table.column(name))
        if is_list_type(column.type):
            raise DataError(
                f"{path}: column '{name}' holds lists; context is one value per row: name another in data.context"
            )
        columns[name] = (
            column.cast(pa.int64()) if pa.types.is_boolean(column.type) else column
        )
    return columns


def _read(path: Path, *names: str) -> dict[str, pa.Array]:
    """Reads ids, and times as whole numbers, under our names.

    Raises:
        DataError: a value is missing, an id is neither a whole number nor text, or a time is neither a whole number
            nor a date.
    """
    words = spelled(path, {name: _SPELLINGS[name] for name in names})
    return read_ids(
        path, words, f"a row needs {', '.join(words.values())}", timestamp=_whole_times
    )


def _whole_times(path: Path, name: str, column: pa.ChunkedArray) -> pa.Array:
    if pa.types.is_integer(column.type):
        # Of any unit: only their order counts.
        return column.combine_chunks()
    return times_in(path, name, column).cast(pa.int64())


def _side(
    files: _Files,
    file: str,
    key: str,
    ids: Int64,
    columns: Sequence[str] | None,
    user_names: Collection[str] = (),
) -> tuple[SideFeatures, list[str] | None]:
    """Reads features by row, and titles if there are such; ``ids`` (rows,) are the files' ids."""
    if file not in files.tables:
        return SideFeatures(Chunk({}), RowContext()), None
    path = files.paths[file]
    id_column = spelled(path, {key: _SPELLINGS[key]})[key]
    described_ids = files.tables[file][key].values
    # The message names an id as the file writes it.
    check_described(path, id_column, _as_text(described_ids, files.texts.get(key)))
    available = names_in(path)
    names = columns
    if names is None:
        names = [name for name in available if name != id_column]
    has_titles = "title" in available
    stored = [*names, "title"] if has_titles else names
    table = read_columns(path, list(dict.fromkeys(stored)))
    rows = rows_among(ids, described_ids)
    raw = {}
    for name in names:
        # A batch has one column of a name, so the item's is renamed.
        feature = f"item_{name}" if name in user_names else name
        raw[feature] = raw_column(path, name, table.column(name))
    features = side_features(rows, raw, len(ids), columns)
    if not has_titles:
        return features, None
    titles = ["(unknown)"] * len(ids)
    for row, title in zip(
        rows.tolist(), table.column("title").to_pylist(), strict=True
    ):
        if title is not None:
            titles[row] = str(title)
    return features, titles


def _one_of_each(user: Int64, part: NDArray[np.int8], seed: int) -> Int64:
    """Draws a training row of each user with two or more."""
    # Not ``seed`` alone, because with_profiles draws its order from that.
    rows = np.random.default_rng([seed, 1]).permutation(np.flatnonzero(part == TRAIN))
    _, first, count = np.unique(user[rows], return_index=True, return_counts=True)
    return rows[first[count > 1]]


def _with_candidates(
    data: InteractionData, ids: _Ids, negatives: Chunk, seed: int
) -> InteractionData:
    owners = rows_among(ids.users, negatives["user_id"].values)
    items = rows_among(ids.items, negatives["negative"].values)
    candidates = {
        "test": candidates_by_user(
            data.test["user_id"].values, ids.users, owners, items
        )
    }
    if data.validation.num_rows:
        user_pairs = data.pairs("train", "validation")
        users = data.validation["user_id"].values
        candidates["validation"] = untaken_items(
            data.num_items, user_pairs, users, candidates["test"].shape[1], seed
        )
    return dataclasses.replace(data, evaluation=Evaluation(candidates=candidates))


def candidates_by_user(
    users: Int64, ids: Int64, owners: Int64, negatives: Int64
) -> Int64:
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
