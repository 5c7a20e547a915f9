"""set_of_pairs(): who took what, split, with what is known of users and items -> the raw columns of each split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.data.columns import Column, Int64
from torchrec_ext.data.config import PARTS
from torchrec_ext.data.features import KEYS, SEPARATOR, RawColumns
from torchrec_ext.data.prepare import TITLE, Evaluation, RawSet, Roles
from torchrec_ext.data.splits import Split
from torchrec_ext.schema import DataError

HISTORY = "history"


class PairRows(NamedTuple):
    """Raw pairs: users and items, and the part of each row; None if times decide."""

    users: pa.Array
    items: pa.Array
    part: NDArray[np.int8] | None


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
    sides: Mapping[str, RawColumns],
    *,
    evaluation: Evaluation | None = None,
    left_out: Mapping[str, str] | None = None,
    separators: Mapping[str, str] | None = None,
    numbers: Sequence[str] = (),
    history: str = HISTORY,
) -> RawSet:
    """Joins pairs with what is known of users and items, and cuts them into splits.

    Args:
        name: name of the set.
        rows: all pairs.
        split: part and history of some of them; a history holds indices among the sorted items.
        sides: raw columns of users and of items, the key among them, and ``title`` of items for display.
        evaluation: rule of the ranking.
        left_out: see :class:`RawSet`.
        separators: see :class:`RawSet`.
        numbers: see :class:`RawSet`.
        history: name of the column of the histories.
    """
    order = pa.array(split.rows)
    columns: dict[str, pa.Array] = {"user_id": rows.users.take(order)}
    described: dict[str, list[str]] = {"user": [], "item": []}
    all_separators = dict(separators or {})
    item_column = rows.items.take(order)
    for owner, key in KEYS.items():
        if owner == "item":
            if split.history.lengths.any():
                columns[history] = lists_of(split.history, distinct(rows.items))
                described["user"].append(history)
            columns["item_id"] = item_column
        if owner not in sides:
            continue
        side = sides[owner]
        for word, values in of_side(columns, key, side).items():
            # A batch has one column of a name, so the item's is renamed.
            feature = f"{owner}_{word}" if word in columns else word
            columns[feature] = values
            if word != TITLE:
                described[owner].append(feature)
            if word in listed_texts(side):
                all_separators.setdefault(feature, SEPARATOR)
    evaluation = evaluation or Evaluation()
    shared = [history] if history in columns else []
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
        left_out=left_out or {},
        notes=notes,
        evaluation=evaluation,
        numbers=numbers,
    )


def of_side(rows: RawColumns, key: str, side: RawColumns) -> dict[str, pa.Array]:
    """Returns what is known of each row's user or item, by column."""
    places = pc.index_in(rows[key], side[key])
    return {word: side[word].take(places) for word in side if word != key}


def listed_texts(side: RawColumns) -> list[str]:
    """Returns the columns of texts with several values, one ``|`` between two."""
    return [
        word
        for word, values in side.items()
        if pa.types.is_string(values.type)
        and word != TITLE
        and pc.any(pc.match_substring(values, SEPARATOR)).as_py()
    ]


def lists_of(column: Column, values: pa.Array) -> pa.ListArray:
    """Returns lists of raw ids for a column of indices among the distinct ones."""
    return pa.ListArray.from_arrays(
        pa.array(column.offsets, pa.int32()),
        values.take(pa.array(column.values)),
    )
