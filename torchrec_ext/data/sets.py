"""load_set(): a set by name -> Prepared: generated rows, or a folder as it stands.

Whatever a set is made of, it is written as a prepared folder and read from there. Pairs, labelled rows and sessions
differ in their columns alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.data import planted
from torchrec_ext.data.columns import Column, Windows
from torchrec_ext.data.config import PARTS, PLANTED, DataConfig, Form, Roles
from torchrec_ext.data.features import (
    KEYS,
    LABEL,
    ORDER,
    TIMES,
    read_rows,
    why_no_lists,
)
from torchrec_ext.data.files.arrow import is_list_type
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.pairs import (
    numbered,
    set_of_pairs,
)
from torchrec_ext.data.prepare import SESSION, TITLE, RawSet, write_set
from torchrec_ext.data.prepared import (
    Prepared,
    is_prepared,
    open_prepared,
    set_folder,
    temporary_folder,
)
from torchrec_ext.data.preprocess.files import scan
from torchrec_ext.data.splits import TRAIN, VALIDATION, Split, leave_one_out
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import check_least, listed


def load_set(config: DataConfig, form: Form = "pairs") -> Prepared:
    """Loads the set named by ``config``, from the folder of rec.data.preprocess or from a temporary one.

    Args:
        config: settings that name the set.
        form: how a folder as it stands is read, and which rows are generated.

    Raises:
        DataError: the set is not on this machine, a file is damaged, or a column is not what it must be.
    """
    # Rows are generated, whatever folder of this name lies where the command runs.
    if config.name != PLANTED:
        folder = set_folder(config.name, config.folder)
        if is_prepared(folder):
            return open_prepared(folder, config, form)
    return open_set(raw_set(config, form), config, form)


def open_set(
    raw: RawSet, config: DataConfig | None = None, form: Form = "pairs"
) -> Prepared:
    """Prepares rows in a temporary folder, removed together with the result.

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


def raw_set(config: DataConfig, form: Form) -> RawSet:
    """Returns the rows of the set named by ``config`` as its files have them; see :func:`load_set`."""
    if config.name != PLANTED:
        read: dict[Form, Callable[[Path, DataConfig], RawSet]] = {
            "pairs": pairs_in,
            "labels": labels_in,
            "sessions": sessions_in,
        }
        return read[form](set_folder(config.name, config.folder), config)
    if form == "sessions":
        clicks, best = planted.planted_sequences(
            seed=config.seed, **config.generated_sizes()
        )
        users, items = pa.array(clicks.users), pa.array(clicks.items)
        raw = set_of_sessions(PLANTED, users, items, config.history_length)
        return dataclasses.replace(raw, best=best)
    if form == "labels":
        return planted.planted_log_set(seed=config.seed, sessions=False)
    return planted.planted(
        history_length=config.history_length,
        seed=config.seed,
        **config.generated_sizes(),
    )


def pairs_in(folder: Path, config: DataConfig) -> RawSet:
    """Reads a folder of pairs: inter.parquet with times, and the users' and the items' columns of its rows.

    These are named like ``user_age`` and ``item_brand``; ``title`` is shown with recommendations.

    Raises:
        DataError: a file or a column is missing or damaged.
    """
    log = _log_of(folder)
    rows = read_rows(log, [*KEYS.values(), ORDER], ("user_", "item_", TITLE))
    read = {*KEYS, *KEYS.values(), *TIMES, *rows}
    why = "of an event; what is known before it is told by a preprocessing recipe"
    names = [name.replace(".", "_") for name in ParquetSource(log).columns]
    left_out = dict.fromkeys(sorted({*names} - read), why)
    left_out |= _without_lists(rows)
    if TITLE in rows:
        rows[TITLE] = rows[TITLE].cast(pa.string())
    users, items = (rows.pop(key) for key in KEYS.values())
    times = rows.pop(ORDER).to_numpy(zero_copy_only=False)
    return set_of_pairs(
        config.name,
        users,
        items,
        leave_one_out(numbered(users), numbered(items), times, config.history_length),
        more=rows,
        left_out=left_out,
    )


def _without_lists(rows: dict[str, pa.Array]) -> dict[str, str]:
    """Takes the columns of lists out of rows; says why, by their names."""
    left_out = {}
    for name, values in [*rows.items()]:
        if is_list_type(values.type):
            left_out[name] = why_no_lists(rows.pop(name).type)
    return left_out


def _log_of(folder: Path) -> Path:
    """Returns the file of events; refuses a folder without one."""
    log = folder / "inter.parquet"
    if not log.exists():
        raise DataError(
            f"{folder}: has no inter.parquet (docs/recipes.md): write user, item and time there, preprocess the rows, "
            f"or set data.name={PLANTED}; rows with a label are for contextual_ncf"
        )
    return log


def labels_in(folder: Path, config: DataConfig) -> RawSet:
    """Reads train, validation and test.parquet with labels.

    Raises:
        DataError: a file or a column is missing or damaged, a label is neither 0 nor 1, or a column is of one type in
            one file and of another one in another.
    """
    files = {part: folder / f"{part}.parquet" for part in PARTS}
    missing = [part for part, file in files.items() if not file.exists()]
    if missing:
        there = listed(sorted(path.name for path in folder.iterdir()))[:60]
        raise DataError(
            f"{folder}: has {there or 'no files'} and no {missing[0]}.parquet; write it as in docs/recipes.md, "
            f"read csv by rec.data.preprocess (docs/preprocess.md), or set data.name={PLANTED}"
        )
    # A file that lacks a column of the first, or has another type, is refused.
    scan(list(files.values()))
    read = {file: read_rows(file, [LABEL]) for file in files.values()}
    train = read[files["train"]]
    left_out = {}
    for file, columns in read.items():
        columns[LABEL] = columns[LABEL].cast(pa.float32())
        for name in columns.keys() - train.keys():
            left_out[name] = f"{file.name} has it, and train.parquet has not"
    left_out |= _without_lists(train)
    for columns, name in itertools.product(read.values(), train):
        # Of a column without a value a file has no type, or that of texts where others have dates.
        if columns[name].null_count == len(columns[name]):
            columns[name] = columns[name].cast(train[name].type)
    splits = {}
    notes = []
    for part, file in files.items():
        columns = {name: read[file][name] for name in train}
        splits[part] = columns
        only = pc.unique(columns[LABEL])
        if len(only) == 1:
            notes.append(
                f"all {len(columns[LABEL]):,} {part} rows have label {only[0].as_py():g}: nothing tells one from "
                "another, so there is no AUC"
            )
    user, item = (key if key in train else None for key in KEYS.values())
    return RawSet(
        name=config.name,
        splits=splits,
        roles=Roles(label=LABEL, user=user, item=item),
        kept=(LABEL,),
        left_out=left_out,
        notes=notes,
    )


def sessions_in(folder: Path, config: DataConfig) -> RawSet:
    """Reads a log, inter.parquet, with a user, an item and an order in each row.

    Raises:
        DataError: there is no such file, it is damaged, lacks a column, or holds a null.
    """
    columns = read_rows(_log_of(folder), [*KEYS.values(), ORDER], ())
    user = numbered(columns["user_id"])
    # Equal times keep the order of the rows.
    times = columns[ORDER].to_numpy(zero_copy_only=False)
    order = pa.array(np.lexsort((times, user)))
    users, items = (columns[key].take(order) for key in KEYS.values())
    return set_of_sessions(config.name, users, items, config.history_length)


def set_of_sessions(name: str, users: pa.Array, items: pa.Array, length: int) -> RawSet:
    """Cuts users' items into rows of a session and its next item: the last item tests, the one before it validates.

    A training row has at most ``length`` items in its session. They are cut from the end, so that each item but a
    user's first is a target once: a session's items but the first, and the next item. A user with fewer than three
    items has all of them in training.

    Args:
        name: name of the set.
        users: (E,) users, the events of one after those of another.
        items: (E,) items, each user's oldest first.
        length: greatest number of items before a target.
    """
    check_least("data.history_length", length)
    user, item = numbered(users), numbered(items)
    starts = np.flatnonzero(np.diff(user, prepend=-1)).tolist()
    # Of each row the user's first item, the item that is next, and the part.
    rows: list[tuple[int, int, int]] = []
    for start, stop in zip(starts, [*starts[1:], len(user)], strict=True):
        trained = stop - 2 if stop - start >= 3 else stop
        first = start + 1 + (trained - start - 2) % length
        for last in range(first, trained, length):
            rows.append((start, last, TRAIN))
        for part, last in enumerate(range(trained, stop), start=VALIDATION):
            rows.append((start, last, part))
    begins, ends, parts = np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()
    begins = np.maximum(begins, ends - length)
    history = Column.from_windows(item, Windows(begins, ends))
    raw = set_of_pairs(
        name,
        users,
        items,
        Split(ends, parts.astype(np.int8), history),
        history=SESSION,
    )
    return dataclasses.replace(raw, lengths={SESSION: length}, notes=())
