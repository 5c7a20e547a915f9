"""What a bundle needs of a task's data: the catalogue and the users with their features, as the model was validated on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchrec_ext.data.columns import Chunk, Column, concatenate
from torchrec_ext.data.interactions import InteractionData
from torchrec_ext.data.labelled import LabelledData
from torchrec_ext.data.preprocess import Categorify, FittedPreprocessor, Lists, Normalize, Step, Vocabulary
from torchrec_ext.data.row_context import RowContext
from torchrec_ext.data.sequences import SequenceData, most_recent
from torchrec_ext.retrieval.contents import Catalogue, Users
from torchrec_ext.schema import BatchSchema

PARTS = ("test", "validation", "train")  # a user's features are those of the first part that has a row of his or hers
AUDITED = 1000


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """The arguments of :func:`torchrec_ext.retrieval.export.export` that are data."""

    catalogue: Catalogue
    users: Users
    queries: pa.Table | None = None
    preprocessor: FittedPreprocessor | None = None
    candidate: str | None = None
    oov_ids: Mapping[str, int] | None = None


def of_interactions(data: InteractionData, schema: BatchSchema) -> Served:
    """Users as they stand before their test items: what was validated is what is served.

    Ids and features in requests are those of the files; an item that was never trained is the unknown one to the model, as in the
    evaluation. The context is a request's own.
    """
    items = data.items.slice(1, data.items.num_rows)
    everything = _rows_of(data)
    owners = everything["user_id"].values
    users, first = np.unique(owners, return_index=True)
    names = [*schema.keys, *schema.dense, *schema.weight_columns]
    context = [name for name in names if name in data.context.names]
    words = data.sides.joined(data.context)
    sides = {
        "user": [name for name in names if name not in data.items and name not in context],
        "item": [name for name in names if name in data.items],
    }
    shift = data.first_id - 1
    known = everything.take(first).select(sides["user"])
    rows = {side: _said(chunk.select(sides[side]), words, shift) for side, chunk in (("user", known), ("item", items))}
    queries = _said(_some(data.train).select([*sides["user"], *context]), words, shift) if context else None
    return Served(
        catalogue=Catalogue(
            ids=np.arange(1, data.items.num_rows) + shift,
            features=rows["item"],
            titles=None if data.titles is None else data.titles[1:],
            categories=None if data.categories is None else data.categories[1:],
            trained=np.unique(data.train["item_id"].values) + shift,
        ),
        users=Users(
            key="user_id",
            ids=users + shift,
            features=rows["user"],
            unknown={name: _unknown(name, known[name], words, shift) for name in sides["user"]},
            seen=_lists(data.seen(users, "train", "validation"), -1),
            liked=_lists(data.liked.take(users), -1),
        ),
        queries=queries,
        preprocessor=_own_words([*rows.values(), *([] if queries is None else [queries])], words, _own_ids(data, shift)),
        candidate="item",
    )


def of_labelled(data: LabelledData, schema: BatchSchema) -> Served:
    """All items of the files; the context of a request is the request's own, so of a user the id alone is known."""
    sizes = {name: size - 1 for name, size in data.vocab.items()}  # the last row is for an id that is not in the files
    users, items = np.arange(sizes["user_id"]), np.arange(sizes["item_id"])
    liked = data.train.take(np.flatnonzero(data.train["label"].values > 0))
    order = np.argsort(liked["user_id"].values, kind="stable")
    taken = Column.from_lengths(liked["item_id"].values[order], np.bincount(liked["user_id"].values, minlength=len(users)))
    asked = [name for name in (*schema.keys, *schema.dense) if name != "item_id"]
    queries, features = _said(_some(data.test).select(asked), data.words, 0), pa.table({"item_id": items})
    return Served(
        catalogue=Catalogue(ids=items, features=features, trained=np.unique(data.train["item_id"].values)),
        users=Users(
            key="user_id",
            ids=users,
            features=pa.table({"user_id": users}),
            unknown={"user_id": sizes["user_id"]},
            seen=_lists(taken),
            liked=_lists(taken),
        ),
        queries=queries,
        preprocessor=_own_words([queries, features], data.words, {}),
        candidate="item",
        oov_ids={name: sizes[name] for name in schema.keys},
    )


def of_sequences(data: SequenceData) -> Served:
    """Users with what they took before their test items; a request names items as the file does, the most recent ones count."""
    names = np.arange(data.num_items + 1) if data.item_ids is None else data.item_ids
    asked = data.held_out("test")
    before = most_recent(asked.before, data.max_length)
    users = asked.users if data.user_ids is None else data.user_ids[asked.users]
    items = pa.array(names[1:])
    kind = "string" if pa.types.is_string(items.type) or pa.types.is_large_string(items.type) else "int64"
    ids = items.cast(pa.string() if kind == "string" else pa.int64())
    session = pa.ListArray.from_arrays(_offsets(before), ids.take(pa.array(before.values - 1)))
    steps: tuple[Step, ...] = (
        Lists(column="session", max_length=data.max_length),
        Categorify(column="candidates", also=("session",)),
    )
    vocabulary = Vocabulary(ids, pa.array(np.bincount(data.training().values, minlength=len(names))[1:]))
    raw = {"session": f"list<{kind}>", "candidates": kind}
    trained = names[np.unique(data.training().values)]
    return Served(
        catalogue=Catalogue(ids=names[1:], features=pa.table({"candidates": ids}), trained=trained),
        users=Users(
            key="user_id",
            ids=np.asarray(users),
            features=pa.table({"session": session}),
            unknown={"session": []},
            seen=_lists(asked.before, -1),
            liked=_lists(before, -1),
        ),
        preprocessor=FittedPreprocessor(steps=steps, keep=(), raw=raw, states=({}, vocabulary)),
    )


def _rows_of(data: InteractionData) -> Chunk:
    """The rows of all parts, one part after the other; within the training rows the latest first."""
    chunks = [getattr(data, part) for part in PARTS]
    last_first = np.arange(chunks[-1].num_rows)[::-1]
    chunks[-1] = chunks[-1].take(last_first.copy())
    names = [name for name in chunks[0] if all(name in chunk for chunk in chunks)]
    return Chunk({name: concatenate([chunk[name] for chunk in chunks]) for name in names})


_IDS = ("user_id", "item_id", "history")


def _shifted(chunk: Chunk, shift: int) -> Chunk:
    """Ids as the files have them."""
    own = [name for name in _IDS if name in chunk] if shift else []
    return chunk.with_columns({name: Column(chunk[name].values + shift, chunk[name].offsets) for name in own})


def _some(rows: Chunk) -> Chunk:
    """As many as are audited, evenly over all."""
    return rows.take(np.linspace(0, rows.num_rows - 1, min(AUDITED, rows.num_rows)).astype(np.int64))


def _said(rows: Chunk, words: RowContext, shift: int) -> pa.Table:
    """Rows as the files and requests say them."""
    said = words.raw(rows)
    table = _arrow(_shifted(rows, shift))
    return pa.table({name: said.get(name, table[name]) for name in table.column_names})


def _own_ids(data: InteractionData, shift: int) -> dict[tuple[str, ...], NDArray[np.int64]]:
    """By the columns that share them, what the files call rows 1 and after; those that are called by their numbers are left out.

    An item that was never trained is the unknown one, though not in a history, as in the evaluation.
    """
    users, items = (np.arange(1, size) + shift for size in (data.vocab["user_id"], data.items.num_rows))
    trained = np.isin(np.arange(1, data.items.num_rows), data.train["item_id"].values)
    if trained.all():
        return {("user_id",): users, ("item_id", "history"): items} if shift else {}
    nobody = np.iinfo(np.int64).min + np.arange(len(items))
    return ({("user_id",): users, ("history",): items} if shift else {}) | {("item_id",): np.where(trained, items, nobody)}


def _own_words(
    tables: Sequence[pa.Table], words: RowContext, own: Mapping[tuple[str, ...], NDArray[np.int64]]
) -> FittedPreprocessor | None:
    """From what files and requests say to ids and numbers; None where that is the same.

    Args:
        tables: with the columns, as they are said.
        words: of columns.
        own: see :func:`_own_ids`.
    """
    raw = {field.name: _raw(field) for table in tables for field in table.schema}
    steps: list[Step] = []
    states: list[Any] = []
    for name in raw:
        if name in words.separators:
            steps.append(Lists(column=name, separator=words.separators[name]))
            states.append({})
        if name in words.names:
            raw[name] = words.raw_type(name)
            steps.append(Categorify(column=name) if name in words.vocabularies else Normalize(column=name))
            states.append(words.vocabularies[name] if name in words.vocabularies else _state(words.scales[name]))
    for columns, ids in own.items():
        found = [name for name in columns if name in raw]
        if found:
            steps.append(Categorify(column=found[0], also=tuple(found[1:])))
            states.append(Vocabulary(pa.array(ids), pa.array(np.zeros(len(ids), np.int64))))
    written = {name for step in steps for name in step.writes}
    keep = tuple(name for name in raw if name not in written)
    return FittedPreprocessor(steps=tuple(steps), keep=keep, raw=raw, states=tuple(states)) if steps else None


def _state(scale: tuple[float, float]) -> dict[str, float]:
    """Of Normalize."""
    return {"mean": scale[0], "std": scale[1]}


def _raw(field: pa.Field) -> str:
    inner = field.type.value_type if pa.types.is_list(field.type) else field.type
    kind = "float32" if pa.types.is_floating(inner) else "int64"
    return f"list<{kind}>" if pa.types.is_list(field.type) else kind


def _unknown(name: str, column: Column, words: RowContext, shift: int) -> Any:
    """What a user of whom nothing is known has in a column."""
    if name in words.scales:
        return words.scales[name][0]
    if name in words.vocabularies:
        return "" if name in words.separators else None
    if column.ragged:
        return []
    return 0 + (shift if name in _IDS else 0) if column.values.dtype.kind in "iu" else 0.0


def _arrow(chunk: Chunk) -> pa.Table:
    return pa.table({name: _lists(column) if column.ragged else pa.array(column.values) for name, column in chunk.items()})


def _lists(column: Column, shift: int = 0) -> pa.ListArray:
    return pa.ListArray.from_arrays(_offsets(column), pa.array(column.values + shift if shift else column.values))


def _offsets(column: Column) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(column.lengths)]).astype(np.int32))
