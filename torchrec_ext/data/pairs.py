"""set_of_rows(), set_of_pairs(): rows, or who took what, with what is known of users and items -> a set in splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.data.columns import Column, Int64
from torchrec_ext.data.config import PARTS, Roles
from torchrec_ext.data.features import KEYS, SEPARATOR, RawColumns
from torchrec_ext.data.prepare import TITLE, RawSet
from torchrec_ext.data.splits import TEST, Split
from torchrec_ext.schema import DataError

HISTORY = "history"


def distinct(values: pa.Array) -> pa.Array:
    """Returns the distinct values, in sorted order."""
    found = pc.unique(values)
    return found.take(pc.sort_indices(found))


def numbered(values: pa.Array) -> Int64:
    """Returns (P,) the index of each of ``values`` (P,) among the distinct ones, in sorted order."""
    indices: Int64 = pc.index_in(values, distinct(values)).to_numpy().astype(np.int64)
    return indices


def set_of_pairs(
    name: str,
    users: pa.Array,
    items: pa.Array,
    split: Split,
    sides: Mapping[str, RawColumns],
    *,
    history: str = HISTORY,
    **details: Any,
) -> RawSet:
    """Joins pairs with what is known of users and items, and cuts them into splits.

    Args:
        name: name of the set.
        users: (P,) users of all pairs.
        items: (P,) their items.
        split: part and history of some of them; a history holds indices among the sorted items.
        sides: see :func:`set_of_rows`.
        history: name of the column of the histories.
        details: fields of :class:`RawSet`.
    """
    order = pa.array(split.rows)
    columns = {"user_id": users.take(order)}
    if split.history.lengths.any():
        columns[history] = lists_of(split.history, distinct(items))
        details["shared"] = {"item_id": [history]}
    columns["item_id"] = items.take(order)
    if not (split.part == TEST).any():
        raise DataError(
            f"set '{name}' has no test rows: no user has the 3 interactions that a split by time needs; give more "
            "rows, or splits of your own by rec.data.preprocess"
        )
    if repeats := len(users) - len(split.rows):
        details["notes"] = [
            f"{repeats:,} of {len(users):,} rows repeat a pair of user and item; the first row of a pair counts"
        ]
    mine = [history] if history in columns else []
    roles = Roles(user="user_id", item="item_id", user_features=mine)
    return set_of_rows(name, columns, split.part, sides, roles, **details)


def set_of_rows(
    name: str,
    columns: RawColumns,
    part: NDArray[np.int8],
    sides: Mapping[str, RawColumns],
    roles: Roles,
    **details: Any,
) -> RawSet:
    """Joins rows with what is known of their users and items, and cuts them into splits.

    Args:
        name: name of the set.
        columns: raw columns of all rows.
        part: (B,) TRAIN, VALIDATION or TEST.
        sides: raw columns of users and of items, the key among them, and ``title`` of items for display.
        roles: roles of ``columns``.
        details: fields of :class:`RawSet`.
    """
    joined: dict[str, pa.Array] = {}
    described = {"user": [*roles.user_features], "item": [*roles.item_features]}
    separators = details.pop("separators", {})
    owners = {KEYS[owner]: owner for owner in sides}
    for column, rows in columns.items():
        joined[column] = rows
        if column not in owners:
            continue
        owner = owners[column]
        side = sides[owner]
        places = pc.index_in(rows, side[column])
        for word, values in side.items():
            if word == column:
                continue
            # A batch has one column of a name, so the item's is renamed.
            feature = f"{owner}_{word}" if word in {**columns, **joined} else word
            joined[feature] = values.take(places)
            if word != TITLE:
                described[owner].append(feature)
                if _is_list_of_texts(values):
                    separators = {feature: SEPARATOR} | separators
    splits = {}
    for number, split in enumerate(PARTS):
        rows = pa.array(np.flatnonzero(part == number))
        splits[split] = {word: values.take(rows) for word, values in joined.items()}
    return RawSet(
        name=name,
        splits=splits,
        roles=dataclasses.replace(
            roles, user_features=described["user"], item_features=described["item"]
        ),
        separators=separators,
        **details,
    )


def _is_list_of_texts(values: pa.Array) -> bool:
    """Whether a column is of texts with several values, one ``|`` between two."""
    return bool(
        pa.types.is_string(values.type)
        and pc.any(pc.match_substring(values, SEPARATOR)).as_py()
    )


def lists_of(column: Column, values: pa.Array) -> pa.ListArray:
    """Returns lists of raw ids for a column of indices among the distinct ones."""
    return pa.ListArray.from_arrays(
        pa.array(column.offsets, pa.int32()),
        values.take(pa.array(column.values)),
    )
