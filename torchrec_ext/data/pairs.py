"""set_of_pairs(): who took what, split, with what is known of users and items -> the raw columns of each split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.data.columns import Column, Int64
from torchrec_ext.data.config import PARTS
from torchrec_ext.data.features import SEPARATOR, RawColumns, why_left_out
from torchrec_ext.data.prepare import Evaluation, RawSet, Roles
from torchrec_ext.data.splits import Split
from torchrec_ext.schema import DataError

KEYS = {"user": "user_id", "item": "item_id"}
# Column of a held-out row's own candidates.
CANDIDATES = "candidates"
HISTORY = "history"


class PairRows(NamedTuple):
    """Raw pairs: users and items, and the part of each row; None if times decide."""

    users: pa.Array
    items: pa.Array
    part: NDArray[np.int8] | None


class Described(NamedTuple):
    """What a file says of users or items: its path and its raw columns, the key among them under our name."""

    path: Path
    columns: RawColumns
    left_out: Mapping[str, str] = {}
    # Whether every column is known to describe a user or an item.
    published: bool = False


def distinct(values: pa.Array) -> pa.Array:
    """Returns the distinct values, in sorted order."""
    found = pc.unique(values)
    return found.take(pc.sort_indices(found))


def numbered(*ids: pa.Array) -> tuple[Int64, ...]:
    """Returns the index of each id among the distinct ones, in sorted order."""
    arrays = []
    for values in ids:
        indices = pc.index_in(values, distinct(values))
        arrays.append(indices.to_numpy().astype(np.int64))
    return tuple(arrays)


def set_of_pairs(
    name: str,
    rows: PairRows,
    split: Split,
    sides: Mapping[str, Described],
    *,
    candidates: Column | None = None,
    evaluation: Evaluation | None = None,
    left_out: Mapping[str, str] | None = None,
    separators: Mapping[str, str] | None = None,
    licence: str | None = None,
    numbers: Sequence[str] = (),
) -> RawSet:
    """Joins pairs with what is known of users and items, and cuts them into splits.

    Args:
        name: name of the set.
        rows: all pairs.
        split: part and history of some of them; a history holds indices among the sorted items.
        sides: columns of users and items.
        candidates: items that each held-out row is ranked among, indices among the sorted items, by row of ``split``.
        evaluation: rule of the ranking.
        left_out: see :class:`RawSet`.
        separators: see :class:`RawSet`.
        licence: see :class:`RawSet`.
        numbers: see :class:`RawSet`.
    """
    order = pa.array(split.rows)
    columns: dict[str, pa.Array] = {"user_id": rows.users.take(order)}
    described: dict[str, list[str]] = {"user": [], "item": []}
    all_left_out = dict(left_out or {})
    all_separators = dict(separators or {})
    titles: dict[object, str] = {}
    item_column = rows.items.take(order)
    for owner, key in KEYS.items():
        if owner == "item":
            if split.history.lengths.any():
                columns[HISTORY] = lists_of(split.history, distinct(rows.items))
                described["user"].append(HISTORY)
            columns["item_id"] = item_column
        if owner not in sides:
            continue
        table = sides[owner].columns
        all_left_out |= sides[owner].left_out
        keys = columns[key]
        places = pc.index_in(keys, table[key])
        for word, values in table.items():
            if word == key:
                continue
            if word == "title" and owner == "item":
                pairs = zip(table[key].to_pylist(), values.to_pylist(), strict=True)
                titles = {each: str(text) for each, text in pairs if text is not None}
                continue
            reason = None if sides[owner].published else why_left_out(values)
            if reason is not None:
                all_left_out[word] = reason
                continue
            # A batch has one column of a name, so the item's is renamed.
            feature = f"{owner}_{word}" if word in columns else word
            if pa.types.is_string(values.type) and feature not in all_separators:
                with_lists = pc.any(pc.match_substring(values, SEPARATOR)).as_py()
                if with_lists:
                    all_separators[feature] = SEPARATOR
            columns[feature] = values.take(places)
            described[owner].append(feature)
    evaluation = evaluation or Evaluation()
    shared = [HISTORY] if HISTORY in columns else []
    if candidates is not None:
        columns[CANDIDATES] = lists_of(candidates, distinct(rows.items))
        shared.append(CANDIDATES)
    splits = {}
    for number, part in enumerate(PARTS):
        indices = pa.array(np.flatnonzero(split.part == number))
        splits[part] = {word: values.take(indices) for word, values in columns.items()}
    notes = []
    repeats = len(rows.users) - len(split.rows)
    if repeats:
        notes.append(
            f"{repeats:,} of {len(rows.users):,} rows repeat a pair of user and item; the first row of a pair counts"
        )
    if not len(splits["test"]["user_id"]):
        raise DataError(
            f"set '{name}' has no test rows: no user has the 3 interactions that a split by time needs"
        )
    return RawSet(
        name=name,
        splits=splits,
        roles=Roles(
            label="",
            user="user_id",
            item="item_id",
            user_features=described["user"],
            item_features=described["item"],
        ),
        shared={"item_id": shared} if shared else {},
        separators={
            word: text for word, text in all_separators.items() if word in columns
        },
        titles=titles,
        left_out=all_left_out,
        notes=notes,
        evaluation=evaluation,
        licence=licence,
        numbers=numbers,
    )


def lists_of(column: Column, values: pa.Array) -> pa.ListArray:
    """Returns lists of raw ids for a column of indices among the distinct ones."""
    return pa.ListArray.from_arrays(
        pa.array(column.offsets, pa.int32()),
        values.take(pa.array(column.values)),
    )
