"""load_set(): a set by name -> Prepared: generated rows, or a folder as it stands.

Whatever a set is made of, it is written as a prepared folder and read from there. Pairs, labelled rows and sessions
differ in their columns alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.data import planted
from torchrec_ext.data.columns import Array, Column, Int64, Windows
from torchrec_ext.data.config import PARTS, PLANTED, DataConfig, Form
from torchrec_ext.data.features import (
    SEPARATOR,
    RawColumns,
    check_described,
    names_in,
    raw_column,
    raw_ids,
    read_ids,
    refuse_lists,
    same_types,
    spelled,
    times_in,
    why_left_out,
)
from torchrec_ext.data.files.arrow import is_list_type
from torchrec_ext.data.files.sources import read_columns
from torchrec_ext.data.pairs import (
    HISTORY,
    KEYS,
    PairRows,
    listed_texts,
    numbered,
    of_side,
    set_of_pairs,
)
from torchrec_ext.data.prepare import (
    SESSION,
    TITLE,
    Evaluation,
    RawSet,
    Roles,
    write_set,
)
from torchrec_ext.data.prepared import (
    Prepared,
    data_folder,
    load_prepared,
    open_prepared,
    prepared_folder,
    temporary_folder,
)
from torchrec_ext.data.splits import (
    TRAIN,
    VALIDATION,
    Split,
    leave_one_out,
    with_profiles,
)
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import listed

_SPELLINGS = {
    "user_id": ("user_id", "user"),
    "item_id": ("item_id", "item"),
    "order": ("timestamp", "time", "position"),
}
_RESERVED = ("label", *KEYS, *KEYS.values())


def load_set(config: DataConfig, form: Form = "pairs") -> Prepared:
    """Loads the set named by ``config``, from the folder of rec.data.preprocess or from a temporary one.

    Args:
        config: settings that name the set.
        form: how a folder as it stands is read, and which rows are generated.

    Raises:
        DataError: the set is not on this machine, a file is damaged, or a column is not what it must be.
    """
    if prepared_folder(config.name, config.folder) is not None:
        return load_prepared(config, form)
    raw = raw_set(config, form)
    return open_set(raw, config, form)


def open_set(
    raw: RawSet, config: DataConfig | None = None, form: Form = "pairs"
) -> Prepared:
    """Prepares rows in a temporary folder, which lives as long as what is returned.

    Args:
        raw: the rows.
        config: settings with the name of the set; by default that of ``raw``.
        form: what the rows are read as.
    """
    temporary = temporary_folder()
    folder = Path(temporary.name)
    write_set(folder, raw)
    return open_prepared(
        folder, config or DataConfig(name=raw.name), form, temporary=temporary
    )


def load_dataset(name: str = PLANTED, **settings: Any) -> Prepared:
    """Loads the positives of a set by name; ``settings`` are those of :class:`DataConfig`; see :func:`load_set`."""
    return load_set(DataConfig(name=name, **settings), "pairs")


def raw_set(config: DataConfig, form: Form) -> RawSet:
    """Returns the rows of the set named by ``config`` as its files have them; see :func:`load_set`."""
    if config.name == PLANTED and form == "sessions":
        return planted_sessions(config)
    if config.name == PLANTED and form == "labels":
        return planted.planted_context(seed=config.seed)
    if config.name == PLANTED:
        return planted.planted(
            history_length=config.history_length,
            seed=config.seed,
            **config.generated_sizes(),
        )
    folder = data_folder(config.name, config.folder)
    read: Callable[[Path, DataConfig], RawSet] = {
        "pairs": pairs_in,
        "labels": labels_in,
        "sessions": sessions_in,
    }[form]
    if folder is None or not folder.is_dir():
        place = folder or "data.folder, which is not set"
        raise DataError(
            f"set '{config.name}' is not on this machine (looked in {place}); put its files there, as in "
            f"docs/recipes.md, or set data.name={PLANTED}"
        )
    return read(folder, config)


def pairs_in(folder: Path, config: DataConfig) -> RawSet:
    """Reads a folder of pairs: inter.parquet with times, or train and test.parquet with what belongs to them.

    If neither times nor a file says which rows are for validation, one random training item of each user is. Of files
    without times all held-out items of a user are found in one ranking of the whole catalogue.

    Raises:
        DataError: a file or a column is missing or damaged, or ids are text in one file and numbers in another.
    """
    _refuse_other_files(folder)
    log = folder / "inter.parquet"
    files: dict[str, Path] = {}
    if log.exists():
        files["train"] = log
        tables = {log: _read(log, "user_id", "item_id", "order")}
    else:
        files = {
            part: folder / f"{part}.parquet"
            for part in PARTS
            if part != "validation" or (folder / "validation.parquet").exists()
        }
        tables = {file: _read(file, "user_id", "item_id") for file in files.values()}
    sides, of_sides = _sides(folder)
    _check_one_type(folder, tables, sides)
    rows = [tables[file] for file in files.values()]
    users, items = (
        pa.concat_arrays([columns[key] for columns in rows]) for key in KEYS.values()
    )
    user, item = numbered(users, items)
    names = names_in(next(iter(files.values())))
    left_out = {
        name: "of an event; what is known before it is told by a preprocessing recipe"
        for name in names
        if name not in {*itertools.chain(*_SPELLINGS.values())}
    }
    for reasons in of_sides.values():
        left_out |= reasons
    length = config.history_length
    if log.exists():
        part = None
        split = leave_one_out(user, item, _order_of(rows[0]["order"]), length)
        evaluation = Evaluation()
    else:
        sizes = [len(columns["user_id"]) for columns in rows]
        part = np.repeat(
            np.array([PARTS.index(name) for name in files], dtype=np.int8), sizes
        )
        if "validation" not in files:
            part[_one_of_each(user, part, config.seed)] = VALIDATION
        split = with_profiles(user, item, part, length, config.seed)
        evaluation = Evaluation(figures=("hr", "recall", "ndcg"), by="user")
    return set_of_pairs(
        config.name,
        PairRows(users, items, part),
        split,
        sides,
        evaluation=evaluation,
        left_out=left_out,
    )


def _refuse_other_files(folder: Path) -> None:
    """Refuses a folder in a layout that no recipe reads, by the file that tells it."""
    if (folder / "inter.parquet").exists():
        return
    if not (folder / "train.parquet").exists():
        raise DataError(
            f"{folder}: has neither inter.parquet nor train.parquet, as in docs/recipes.md; write one of them, or set "
            f"data.name={PLANTED}"
        )
    if "label" in names_in(folder / "train.parquet"):
        raise DataError(
            f"{folder}: train.parquet has a column 'label', so not every row is a positive; use a "
            "recipe for labelled rows, such as contextual_ncf"
        )


def _one_of_each(user: Int64, part: NDArray[np.int8], seed: int) -> Int64:
    """Draws a training row of each user with two or more."""
    # Not ``seed`` alone, because with_profiles draws its order from that.
    rows = np.random.default_rng([seed, 1]).permutation(np.flatnonzero(part == TRAIN))
    _, first, count = np.unique(user[rows], return_index=True, return_counts=True)
    return rows[first[count > 1]]


def _sides(folder: Path) -> tuple[dict[str, RawColumns], dict[str, dict[str, str]]]:
    """Reads users.parquet and items.parquet, if they are there; and why columns of each are left out, by name."""
    sides: dict[str, RawColumns] = {}
    left_out: dict[str, dict[str, str]] = {owner: {} for owner in KEYS}
    for owner, key in KEYS.items():
        path = folder / f"{owner}s.parquet"
        if not path.exists():
            continue
        word = spelled(path, {key: _SPELLINGS[key]})[key]
        columns = read_ids(path, {key: word}, "describes nothing")
        check_described(path, word, columns[key].to_numpy(zero_copy_only=False))
        table = read_columns(path)
        for column in table.column_names:
            if column == word:
                continue
            short = column.replace(".", "_")
            of_items = owner == "user" and short == TITLE
            if short in columns or short in _RESERVED or of_items:
                raise DataError(
                    f"{path}: column '{column}' has the name of another, or a meaning of its own; rename it here"
                )
            values = _as_float64(raw_column(path, column, table.column(column)))
            is_title = owner == "item" and short == TITLE
            reason = None if is_title else why_left_out(values)
            if is_title:
                columns[short] = values.cast(pa.string())
            elif reason is None:
                columns[short] = values
            else:
                left_out[owner][short] = reason
        sides[owner] = columns
    return sides, left_out


def _plain(column: pa.Array) -> pa.Array:
    """Returns a raw column with True and False as 1 and 0, and fractions of 32 bits."""
    if pa.types.is_boolean(column.type):
        return column.cast(pa.int64())
    return _as_float64(column)


def _as_float64(column: pa.Array) -> pa.Array:
    """Returns fractions of 32 bits in 64, in which means are computed; other columns stay."""
    if pa.types.is_floating(column.type):
        # Rounded to 32 bits, so that a number compares equal in files of 32 and of 64
        # bits.
        return column.cast(pa.float32()).cast(pa.float64())
    return column


def _check_one_type(
    folder: Path, tables: Mapping[Path, RawColumns], sides: Mapping[str, RawColumns]
) -> None:
    """Refuses ids that are text in one file and numbers in another."""
    files = dict(tables)
    files |= {folder / f"{owner}s.parquet": side for owner, side in sides.items()}
    for key in KEYS.values():
        kinds = {
            path.name: str(columns[key].type)
            for path, columns in files.items()
            if key in columns
        }
        if len(set(kinds.values())) > 1:
            text = ", ".join(f"{kind} in {name}" for name, kind in kinds.items())
            raise DataError(
                f"{folder}: the ids in '{key}' are {text}; write one type to all files"
            )


def _read(path: Path, *names: str) -> dict[str, pa.Array]:
    """Reads ids and an order under our names; see :func:`read_ids`."""
    words = spelled(path, {name: _SPELLINGS[name] for name in names})
    return read_ids(
        path, words, f"a row needs {', '.join(words.values())}", order=_read_order
    )


def _read_order(path: Path, name: str, column: pa.ChunkedArray) -> pa.Array:
    """Reads positions or times of any unit: only their order counts."""
    order = raw_column(path, name, column)
    refuse_lists(path, name, order)
    if pa.types.is_string(order.type):
        # raw_column keeps text without a first date. This raises an error that names
        # the row.
        times_in(path, name, order)
    return order.cast(pa.int64()) if pa.types.is_timestamp(order.type) else order


def _order_of(values: pa.Array) -> Array:
    order: Array = values.to_numpy(zero_copy_only=False)
    return order


def labels_in(folder: Path, config: DataConfig) -> RawSet:
    """Reads train, validation and test.parquet with labels, and joins users.parquet and items.parquet.

    Raises:
        DataError: a file or a column is missing or damaged, a label is neither 0 nor 1, or a column is of one type in
            one file and of another one in another.
    """
    files = {part: folder / f"{part}.parquet" for part in PARTS}
    missing = [part for part, file in files.items() if not file.exists()]
    if missing:
        raise DataError(
            f"{folder}: has no rows for {', '.join(missing)}; put files as in docs/recipes.md there, or set "
            f"data.name={PLANTED}"
        )
    read = {file: _labelled_columns(file) for file in files.values()}
    splits = dict(zip(files, same_types(read), strict=True))
    described: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for file, columns in read.items():
        for name in columns.keys() - splits["train"].keys():
            left_out[name] = f"{file.name} has it, and train.parquet has not"
    sides, of_sides = _sides(folder)
    separators: dict[str, str] = {}
    for owner, key in KEYS.items():
        described[owner] = [
            name for name in splits["train"] if name.startswith(f"{owner}_")
        ]
        side = sides.get(owner)
        if side is None:
            continue
        path = folder / f"{owner}s.parquet"
        if key not in splits["train"]:
            raise DataError(
                f"{path}: describes {owner}s, and {files['train'].name} has no column '{owner}' (it has "
                f"{listed(splits['train'])}); write the ids there, or leave this file out"
            )
        _check_one_type(folder, {files["train"]: splits["train"]}, {owner: side})
        left_out |= of_sides[owner]
        for name in (*side, *of_sides[owner]):
            if name in splits["train"] and name != key:
                raise DataError(
                    f"{path}: column '{name}' is in {files['train'].name}, too; leave it out of one of the files, "
                    "or rename it where it describes the event"
                )
        described[owner] += [name for name in side if name not in (key, TITLE)]
        separators |= dict.fromkeys(listed_texts(side), SEPARATOR)
        for part, columns in splits.items():
            splits[part] = {**columns, **of_side(columns, key, side)}
    keys = {
        owner: key if key in splits["train"] else None for owner, key in KEYS.items()
    }
    return RawSet(
        name=config.name,
        splits=splits,
        roles=Roles(
            label="label",
            user=keys["user"],
            item=keys["item"],
            user_features=described["user"],
            item_features=described["item"],
        ),
        separators=separators,
        kept=("label",),
        left_out=left_out,
        notes=_label_notes(splits),
    )


def _label_notes(splits: Mapping[str, RawColumns]) -> list[str]:
    """Returns a line for each split whose rows have one label."""
    notes = []
    for part, columns in splits.items():
        only = pc.unique(columns["label"])
        if len(only) == 1:
            notes.append(
                f"all {len(columns['label']):,} {part} rows have label {only[0].as_py():g}: nothing tells one from "
                "another, so there is no AUC"
            )
    return notes


def _labelled_columns(path: Path) -> dict[str, pa.Array]:
    """Reads the raw columns under our names; labels as float32, True and False as 1 and 0."""
    table = read_columns(path)
    if "label" not in table.column_names:
        raise DataError(
            f"{path}: column 'label' is missing, it has {listed(table.column_names)}; add it, as in docs/recipes.md"
        )
    columns: dict[str, pa.Array] = {}
    for name in table.column_names:
        # Tables are named like their columns, and a module's name has no dot.
        role = KEYS.get(name, name.replace(".", "_"))
        if role in columns:
            raise DataError(
                f"{path}: two columns are '{role}', of which one is written '{name}'; rename one"
            )
        convert = raw_ids if role in KEYS.values() else raw_column
        column = convert(path, name, table.column(name))
        if is_list_type(column.type):
            raise DataError(
                f"{path}: column '{name}' holds lists; must be one value per row: leave it out"
            )
        columns[role] = _plain(column)
    columns["label"] = _labels(path, columns["label"])
    return columns


def _labels(path: Path, column: pa.Array) -> pa.Array:
    # Of text or times, the first label is wrong already.
    row = 0
    count = len(column)
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        column = column.cast(pa.float64(), safe=False)
        is_wrong = pc.invert(pc.is_in(column, pa.array([0.0, 1.0])))
        row = is_wrong.index(True).as_py()
        count = pc.sum(is_wrong).as_py()
    if row >= 0:
        raise DataError(
            f"{path}: column 'label', row {row}: {column[row].as_py()}; must be 0 or 1 ({count:,} rows are not); write "
            "ratings so, such as rating >= 4"
        )
    return column.cast(pa.float32())


@dataclass(frozen=True, kw_only=True)
class TakenItems:
    """Users' items in order: (E,) users and items, one user's after another's, each user's oldest first."""

    users: pa.Array
    items: pa.Array


def sessions_in(folder: Path, config: DataConfig) -> RawSet:
    """Reads a log, inter.parquet, with a user, an item and an order in each row.

    Raises:
        DataError: there is no such file, it is damaged, lacks a column, or holds a null.
    """
    log = folder / "inter.parquet"
    if not log.exists():
        raise DataError(
            f"set '{config.name}': {folder} has no inter.parquet, as in docs/recipes.md; write it, or set "
            f"data.name={PLANTED}"
        )
    columns = _read(log, "user_id", "item_id", "order")
    (user,) = numbered(columns["user_id"])
    # Equal times keep the order of the rows.
    order = pa.array(np.lexsort((_order_of(columns["order"]), user)))
    events = TakenItems(
        users=columns["user_id"].take(order), items=columns["item_id"].take(order)
    )
    return set_of_sessions(config.name, events, config.history_length)


def planted_sessions(config: DataConfig) -> RawSet:
    """Returns the generated sequences as a set of sessions."""
    sequences, best = planted.planted_sequences(
        seed=config.seed, **config.generated_sizes()
    )
    return set_of_sessions(
        PLANTED,
        TakenItems(users=pa.array(sequences.owners), items=pa.array(sequences.values)),
        config.history_length,
        best=best,
    )


def set_of_sessions(
    name: str,
    events: TakenItems,
    length: int,
    *,
    best: Mapping[str, float] | None = None,
) -> RawSet:
    """Cuts users' items into rows of a session and its next item: the last item tests, the one before it validates.

    A training row has at most ``length`` items in its session. They are cut from the end, so that each item but a
    user's first is a target once: a session's items but the first, and the next item. A user with fewer than three
    items has all of them in training.

    Args:
        name: name of the set.
        events: all events.
        length: greatest number of items before a target.
        best: see :class:`RawSet`.
    """
    user, item = numbered(events.users, events.items)
    starts = np.flatnonzero(np.diff(user, prepend=-1))
    stops = np.append(starts[1:], len(user))
    sizes = stops - starts
    held_out = np.where(sizes >= 3, 2, 0)
    rows: list[tuple[Int64, Int64, NDArray[np.int8]]] = []
    targets = np.maximum(sizes - held_out - 1, 0)
    pieces = -(-targets // length)
    owner = np.arange(len(sizes)).repeat(pieces)
    # Counted from the end, so that only the first piece of a user is short: 0 for a
    # user's last piece.
    from_end = np.cumsum(pieces)[owner] - 1 - np.arange(len(owner))
    last = stops[owner] - held_out[owner] - 1 - from_end * length
    rows.append(
        (
            np.maximum(starts[owner], last - length),
            last,
            np.full(len(owner), TRAIN, np.int8),
        )
    )
    asked = np.flatnonzero(held_out)
    for part, back in ((VALIDATION, 2), (PARTS.index("test"), 1)):
        last = stops[asked] - back
        rows.append(
            (
                np.maximum(starts[asked], last - length),
                last,
                np.full(len(asked), part, np.int8),
            )
        )
    if not len(asked):
        raise DataError(
            f"set '{name}' has no test rows: no user has the 3 items that holding out two of them needs"
        )
    begins = np.concatenate([begin for begin, _, _ in rows])
    ends = np.concatenate([end for _, end, _ in rows])
    parts = np.concatenate([part for _, _, part in rows])
    split = Split(ends, parts, Column.from_windows(item, Windows(begins, ends)))
    raw = set_of_pairs(
        name,
        PairRows(events.users, events.items, parts),
        split,
        {},
        evaluation=Evaluation(),
    )
    return _as_sessions(raw, length, best or {})


def _as_sessions(raw: RawSet, length: int, best: Mapping[str, float]) -> RawSet:
    """Renames the history of a set of pairs: it is the session whose next item the row names."""

    def renamed(names: Sequence[str]) -> list[str]:
        return [SESSION if name == HISTORY else name for name in names]

    splits = {}
    for part, columns in raw.splits.items():
        splits[part] = dict(zip(renamed(list(columns)), columns.values(), strict=True))
    return dataclasses.replace(
        raw,
        splits=splits,
        roles=dataclasses.replace(
            raw.roles, user_features=renamed(raw.roles.user_features)
        ),
        shared={key: renamed(names) for key, names in raw.shared.items()},
        lengths={SESSION: length},
        notes=(),
        best=best,
    )
