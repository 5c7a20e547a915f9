"""What a bundle needs of a task's data: the catalogue and the users with their features, as the model was validated on them.

NamedData: what every task says of its data in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchrec_ext.data.columns import Chunk, Column, concatenate
from torchrec_ext.data.datasets.features import RowContext
from torchrec_ext.data.datasets.interactions import InteractionData
from torchrec_ext.data.datasets.labelled import LabelledData
from torchrec_ext.data.datasets.sequences import SequenceData, most_recent
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.preprocess import Categorify, FittedPreprocessor, Lists, Normalize, Step, Vocabulary
from torchrec_ext.retrieval.exporting.content import Catalogue, NamedUsers
from torchrec_ext.schema import BatchSchema

PARTS = ("test", "validation", "train")  # a user's features are those of the first part that has a row of his or hers
AUDITED = 1000


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportData:
    """The arguments of :func:`torchrec_ext.retrieval.exporting.export.export` that are data."""

    catalogue: Catalogue
    users: NamedUsers
    queries: pa.Table | None = None
    preprocessor: FittedPreprocessor | None = None
    candidate: str | None = None
    oov_ids: Mapping[str, int] | None = None
    unseen: Mapping[str, Sequence[int]] | None = None


def of_interactions(data: InteractionData, schema: BatchSchema) -> ExportData:
    """Users as they stand before their test items: what was validated is what is served.

    Ids and features in requests are those of the files. The items are those of the catalogue, the users those with a
    training row; an item of the catalogue without one is the unknown item to the model, with its own features, as in
    the evaluation. A user without one is not known: a request says his or her features, and the id is that of the
    unknown user. The context is a request's own.
    """
    items = data.items.slice(1, data.num_items + 1)
    everything = _rows_of(data)
    owners = everything["user_id"].values
    users, first = np.unique(owners, return_index=True)
    trained = np.isin(users, data.train["user_id"].values)
    users, first = users[trained], first[trained]
    names = [*schema.keys, *schema.dense, *schema.weight_columns]
    context = [name for name in names if name in data.context.names]
    words = data.sides.joined(data.context)
    sides = {
        "user": [name for name in names if name not in data.items and name not in context],
        "item": [name for name in names if name in data.items],
    }
    ids = {"user_id": data.users_by_row, "item_id": data.items_by_row[: data.num_items + 1]}
    ids["history"] = ids["item_id"]
    known = everything.take(first).select(sides["user"])
    rows = {side: _said(chunk.select(sides[side]), words, ids) for side, chunk in (("user", known), ("item", items))}
    queries = _said(_some(data.train).select([*sides["user"], *context]), words, ids) if context else None
    liked = data.liked.take(users)
    return ExportData(
        catalogue=Catalogue(
            ids=ids["item_id"][1:],
            features=rows["item"],
            titles=None if data.titles is None else data.titles[1 : data.num_items + 1],
            categories=None if data.categories is None else data.categories[1 : data.num_items + 1],
            trained=ids["item_id"][np.unique(data.train["item_id"].values)],
        ),
        users=NamedUsers(
            key="user_id",
            ids=ids["user_id"][users],
            features=rows["user"],
            unknown={name: _unknown(name, known[name], words, ids) for name in sides["user"]},
            seen=_lists(data.seen(users, "train", "validation"), -1),
            liked=_lists(_only(liked, liked.values <= data.num_items), -1),
        ),
        queries=queries,
        preprocessor=_own_words([*rows.values(), *([] if queries is None else [queries])], words, _own_ids(data, ids)),
        candidate="item",
    )


def of_labelled(data: LabelledData, schema: BatchSchema) -> ExportData:
    """Items and users of the training rows; the context of a request is the request's own, so of a user the id alone is known."""
    users, items = data.trained("user_id"), data.trained("item_id")
    train = {name: data.train[name].values for name in ("user_id", "item_id", "label")}
    liked = (train["label"] > 0) & np.isin(train["user_id"], users) & np.isin(train["item_id"], items)
    owners, taken = users.searchsorted(train["user_id"][liked]), items.searchsorted(train["item_id"][liked])
    order = np.argsort(owners, kind="stable")
    lists = Column.from_lengths(taken[order], np.bincount(owners, minlength=len(users)))
    asked = [name for name in (*schema.keys, *schema.dense) if name != "item_id"]
    known = {name: Chunk({name: Column(rows)}) for name, rows in (("user_id", users), ("item_id", items))}
    queries = _said(_some(data.test).select(asked), data.words, {})
    features = {name: _said(rows, data.words, {}) for name, rows in known.items()}
    numbered = [name for name in schema.keys if name not in data.words.vocabularies]
    unseen = {name: np.setdiff1d(np.arange(data.oov_ids[name]), data.trained(name)).tolist() for name in numbered}
    return ExportData(
        catalogue=Catalogue(
            ids=data.ids("item_id", items), features=features["item_id"], trained=data.ids("item_id", items)
        ),
        users=NamedUsers(
            key="user_id",
            ids=data.ids("user_id", users),
            features=features["user_id"],
            unknown={"user_id": data.oov_ids["user_id"] if "user_id" in numbered else None},
            seen=_lists(lists),
            liked=_lists(lists),
        ),
        queries=queries,
        preprocessor=_own_words([queries, features["item_id"]], data.words, {}),
        candidate="item",
        oov_ids={name: data.oov_ids[name] for name in schema.keys},
        unseen={name: rows for name, rows in unseen.items() if rows},
    )


def of_sequences(data: SequenceData) -> ExportData:
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
    return ExportData(
        catalogue=Catalogue(ids=names[1:], features=pa.table({"candidates": ids}), trained=trained),
        users=NamedUsers(
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


Ids = Mapping[str, NDArray[np.int64]]  # by column of ids, what files and requests call the user or item of each row


def _shifted(chunk: Chunk, ids: Ids) -> Chunk:
    """Ids as the files have them."""
    own = [name for name in ids if name in chunk]
    return chunk.with_columns({name: Column(ids[name][chunk[name].values], chunk[name].offsets) for name in own})


def _only(lists: Column, kept: NDArray[np.bool_]) -> Column:
    """Lists without some of their values."""
    rows = np.arange(len(lists)).repeat(lists.lengths)
    return Column.from_lengths(lists.values[kept], np.bincount(rows[kept], minlength=len(lists)))


def _some(rows: Chunk) -> Chunk:
    """As many as are audited, evenly over all."""
    return rows.take(np.linspace(0, rows.num_rows - 1, min(AUDITED, rows.num_rows)).astype(np.int64))


def _said(rows: Chunk, words: RowContext, ids: Ids) -> pa.Table:
    """Rows as the files and requests say them."""
    said = words.raw(rows)
    table = _arrow(_shifted(rows, ids))
    return pa.table({name: said.get(name, table[name]) for name in table.column_names})


def _own_ids(data: InteractionData, ids: Ids) -> dict[tuple[str, ...], NDArray[np.int64]]:
    """By the columns that share them, what the files call rows 1 and after; those that are called by their numbers are left out.

    A user or an item without a training row is the unknown one, though not in a history, as in the evaluation.
    """
    found: dict[tuple[str, ...], NDArray[np.int64]] = {}
    for name in ("user_id", "item_id"):
        own = ids[name][1:]
        trained = np.isin(np.arange(1, len(own) + 1), data.train[name].values)
        numbered = np.array_equal(own, np.arange(1, len(own) + 1))
        lists = ("history",) if name == "item_id" else ()
        if trained.all():
            found |= {} if numbered else {(name, *lists): own}
            continue
        nobody = np.iinfo(np.int64).min + np.arange(len(own))
        found |= {(name,): np.where(trained, own, nobody)} | ({} if numbered or not lists else {lists: own})
    return found


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


def _unknown(name: str, column: Column, words: RowContext, ids: Ids) -> Any:
    """What a user of whom nothing is known has in a column."""
    if name in words.scales:
        return words.scales[name][0]
    if name in words.vocabularies:
        return "" if name in words.separators else None
    if column.ragged:
        return []
    if name in ids:
        return int(ids[name][0])
    return 0 if column.values.dtype.kind in "iu" else 0.0


def _arrow(chunk: Chunk) -> pa.Table:
    return pa.table(
        {name: _lists(column) if column.ragged else pa.array(column.values) for name, column in chunk.items()}
    )


def _lists(column: Column, shift: int = 0) -> pa.ListArray:
    return pa.ListArray.from_arrays(_offsets(column), pa.array(column.values + shift if shift else column.values))


def _offsets(column: Column) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(column.lengths)]).astype(np.int32))


class NamedData:
    """A task over ``data``, which has a name, a licence and the best figures that can be reached where they are known."""

    data: Any

    @property
    def name(self) -> str:
        """Of the set."""
        return str(self.data.name)

    @property
    def licence(self) -> str | None:
        """What the publisher asks."""
        licence: str | None = self.data.licence
        return licence

    @property
    def best(self) -> Mapping[str, float]:
        """The best possible figures of generated data."""
        best: Mapping[str, float] = self.data.best
        return best

    def positives(self, config: LoaderConfig, tasks: Sequence[str] = ()) -> list[float]:
        """The share of positives among the training rows as the loader gives them, by weight; never quite 0 or 1.

        None where a column is missing, of which the loader tells.

        Args:
            config: names the columns of labels and weights, and the negatives drawn for each row.
            tasks: further columns of labels, each with a share of its own.
        """
        rows, names = self.data.train, [config.label, *tasks]
        if any(name and name not in rows for name in (*names, config.weight)):
            return []
        weights = rows[config.weight].values.astype(np.float64) if config.weight else None
        shares = [np.average(rows[name].values, weights=weights) if name else 1.0 for name in names]
        least = 0.5 / (rows.num_rows * (1 + config.negatives) + 1)
        return [float(np.clip(share / (1 + config.negatives), least, 1 - least)) for share in shares]
