"""set_of_pairs(): who took what, with what is known of users and items -> a set in splits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.config import PARTS, Roles
from torchrec_ext.data.features import KEYS, RawColumns
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
    sides: Mapping[str, RawColumns] | None = None,
    *,
    more: RawColumns | None = None,
    history: str = HISTORY,
    **details: Any,
) -> RawSet:
    """Joins pairs with what is known of users and items, and cuts them into splits.

    Args:
        name: name of the set.
        users: (P,) users of all pairs.
        items: (P,) their items.
        split: part and history of some of them; a history holds indices among the sorted items.
        sides: raw columns of users and of items, the key among them, and ``title`` of items for display.
        more: (P,) further columns of the pairs.
        history: name of the column of the histories.
        details: fields of :class:`RawSet`.
    """
    if not (split.part == TEST).any():
        raise DataError(
            f"set '{name}' has no test rows: no user has the 3 interactions that a split by time needs; give more "
            "rows, or splits of your own by rec.data.preprocess"
        )
    if repeats := len(users) - len(split.rows):
        details["notes"] = [
            f"{repeats:,} of {len(users):,} rows repeat a pair of user and item; the first row of a pair counts"
        ]
    order = pa.array(split.rows)
    described: dict[str, list[str]] = {"user": [], "item": []}
    columns: dict[str, pa.Array] = {}

    def describe(owner: str, ids: pa.Array) -> None:
        key = KEYS[owner]
        columns[key] = ids.take(order)
        side = dict((sides or {}).get(owner, {key: ids}))
        places = pc.index_in(columns[key], side.pop(key))
        for word, values in side.items():
            columns[word] = values.take(places)
            if word != TITLE:
                described[owner].append(word)

    describe("user", users)
    if split.history.lengths.any():
        # Indices among the sorted items.
        columns[history] = pa.ListArray.from_arrays(
            pa.array(split.history.offsets, pa.int32()),
            distinct(items).take(pa.array(split.history.values)),
        )
        details["shared"] = {"item_id": [history]}
        described["user"].insert(0, history)
    describe("item", items)
    columns |= {word: values.take(order) for word, values in (more or {}).items()}
    splits = {}
    for number, part in enumerate(PARTS):
        rows = pa.array(np.flatnonzero(split.part == number))
        splits[part] = {word: values.take(rows) for word, values in columns.items()}
    return RawSet(
        name=name,
        splits=splits,
        roles=Roles(
            user="user_id",
            item="item_id",
            user_features=described["user"],
            item_features=described["item"],
        ),
        **details,
    )
