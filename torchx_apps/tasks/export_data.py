"""The data that a bundle is exported with: catalogue and users with their features, as in the validation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.data.columns import Chunk, Column, Int64, concatenate_rows
from torchrec_ext.data.datasets.config import PARTS
from torchrec_ext.data.datasets.features import RowContext, vocabulary_of
from torchrec_ext.data.datasets.interactions import InteractionData
from torchrec_ext.data.datasets.labelled import LabelledData
from torchrec_ext.data.datasets.sequences import SequenceData, most_recent
from torchrec_ext.data.datasets.streamed import (
    RAW_ITEMS,
    RAW_REQUESTS,
    RAW_USERS,
    StreamedData,
)
from torchrec_ext.data.files.arrow import as_arrow
from torchrec_ext.data.preprocess import (
    Categorify,
    FittedPreprocessor,
    Lists,
    Step,
    Vocabulary,
)
from torchrec_ext.data.preprocess.columns import raw_type
from torchrec_ext.retrieval.catalogue import Catalogue, NamedUsers, filterable
from torchrec_ext.retrieval.columns import steps_for_columns
from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.schema import BatchSchema, DataError

# Requests that the export sends to the bundle, to compare its answers with the live
# model.
AUDITED = 1000


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportData:
    """The data arguments of :func:`torchrec_ext.retrieval.export.export`; see there."""

    catalogue: Catalogue
    users: NamedUsers | None = None
    queries: pa.Table | None = None
    preprocessor: FittedPreprocessor | None = None
    candidate: str | None = None
    oov_ids: Mapping[str, int] | None = None
    unseen: Mapping[str, Sequence[int]] | None = None
    rows: Mapping[str, Tensor] | None = None


def of_interactions(data: InteractionData, schema: BatchSchema) -> ExportData:
    """Returns the catalogue, and the users as before their test items: the bundle serves the validated state.

    Ids and features in requests are those of the files. The items are those of the catalogue, the users those with a
    training row. An item without a training row has the unknown item's id and its own features, as in the evaluation.
    A user without a training row is not known: a request gives his or her features, and the id is the unknown user's.
    Each request gives its context. Of rows that rec.data.preprocess wrote requests are raw rows, see
    :func:`of_streamed`.
    """
    if data.prepared is not None:
        return of_streamed(data.prepared, schema)
    past_last = data.num_items + 1
    everything = _rows_of(data)
    owners = everything["user_id"].values
    # A user's features are those of the latest row.
    users, first = np.unique(owners, return_index=True)
    trained = np.isin(users, data.train["user_id"].values)
    users = users[trained]
    first = first[trained]
    names = [*schema.keys, *schema.dense, *schema.weight_columns]
    context = data.context.sources(
        [name for name in names if name in data.context.names]
    )
    encoding = data.sides.joined(data.context)
    names = encoding.sources(names)
    user_columns = [
        name for name in names if name not in data.items and name not in context
    ]
    item_columns = [name for name in names if name in data.items]
    item_ids = data.items_by_row[:past_last]
    ids = {"user_id": data.users_by_row, "item_id": item_ids, "history": item_ids}
    # Row 0 is the unknown one; tolist() makes a Python value, as JSON needs it.
    unknown_ids = {name: values[:1].tolist()[0] for name, values in ids.items()}
    user_rows = everything.take(first).select(user_columns)
    item_rows = data.items.slice(1, past_last)
    users_table = _as_in_files(user_rows, encoding, ids)
    items_table = _as_in_files(item_rows.select(item_columns), encoding, ids)
    tables = [users_table, items_table]
    queries = None
    if context:
        queries = _as_in_files(
            data.train.sample(AUDITED).select([*user_columns, *context]), encoding, ids
        )
        tables.append(queries)
    liked = data.liked.take(users)
    # Items outside the catalogue have no position.
    has_position = liked.values < past_last
    liked = Column.grouped(
        liked.values[has_position], liked.owners[has_position], len(users)
    )
    return ExportData(
        catalogue=Catalogue(
            ids=item_ids[1:],
            features=items_table,
            titles=None if data.titles is None else data.titles[1:past_last],
            categories=None
            if data.categories is None
            else data.categories[1:past_last],
            attributes=_attributes(_as_in_files(item_rows, encoding, ids), encoding),
            trained=item_ids[np.unique(data.train["item_id"].values)],
        ),
        users=NamedUsers(
            key="user_id",
            ids=ids["user_id"][users],
            features=users_table,
            unknown=_unknown(user_rows, encoding, unknown_ids),
            seen=_positions(data.seen(users, "train", "validation")),
            liked=_positions(liked),
        ),
        queries=queries,
        preprocessor=_preprocessor(tables, encoding, _id_vocabularies(data, ids)),
        candidate="item",
    )


def of_labelled(data: LabelledData, schema: BatchSchema) -> ExportData:
    """Returns the items and users of the training rows with their columns; requests give the context.

    Raises:
        BundleError: the rows have no item.
    """
    if data.prepared is not None:
        return of_streamed(data.prepared, schema)
    if "item_id" not in data.vocab:
        raise BundleError(without_item(f"the rows of '{data.name}' name no item"))
    items = data.trained("item_id")
    item_ids = data.ids("item_id", items)
    names = (*schema.keys, *schema.dense)
    request_columns = data.words.sources(
        [name for name in names if name not in ("item_id", *data.item_features)]
    )
    queries = _as_in_files(
        data.test.sample(AUDITED).select(request_columns), data.words, {}
    )
    features = _as_in_files(_described(data, "item_id", items, names), data.words, {})
    users = None
    if "user_id" in data.vocab:
        users = _users_of_labelled(data, items, names)
    unseen = {}
    # A row that no training row reads is served as the row of unknown ids.
    for name in schema.keys:
        if name in data.words.vocabularies:
            continue
        trained_rows = np.append(data.trained(name), data.oov_ids[name])
        rows = np.setdiff1d(np.arange(data.vocab[name]), trained_rows)
        if len(rows):
            unseen[name] = rows.tolist()
    return ExportData(
        catalogue=Catalogue(
            ids=item_ids,
            features=features,
            attributes=_attributes(features, data.words),
            trained=item_ids,
        ),
        users=users,
        queries=queries,
        preprocessor=_preprocessor([queries, features], data.words, {}),
        candidate="item",
        oov_ids={name: data.oov_ids[name] for name in schema.keys},
        unseen=unseen,
    )


def without_item(why: str) -> str:
    """Explains that rows without an item can be trained but not served."""
    return (
        f"{why}, and a bundle stores a vector of each; leave out export=require (torchx_apps.publish writes such a "
        "model's weights), or name the item's column"
    )


def without_item_tower(
    model: Any, item: tuple[Sequence[str], Sequence[str]], candidate: str | None = None
) -> str | None:
    """Returns why a model of towers cannot be served: its item tower reads other columns; None if it does not.

    Args:
        model: the model that is trained.
        item: the item's features and dense columns, which a bundle knows of each item of the catalogue.
        candidate: name of the item tower; by default the model's last.
    """
    towers = getattr(model, "made_of", None)
    if not towers:
        # The export itself explains this case better.
        return None
    name = candidate or list(towers)[-1]
    columns = {*item[0], *item[1]}
    why = f"there is no tower '{name}'"
    if name in towers:
        others = sorted(set(tower_columns(towers[name].arguments or {})) - columns)
        if not others:
            return None
        why = f"tower '{name}' reads {', '.join(others)}, too"
    return (
        f"a bundle stores the vectors of an item tower, which reads {', '.join(sorted(columns))} and nothing else, and "
        f"{why}; leave out model.towers or export=require"
    )


def tower_columns(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields the columns read by a tower, from its constructor's arguments."""
    for table in arguments.get("tables", ()):
        yield from table.feature_names
    yield from arguments.get("dense", ())


def _attributes(features: pa.Table, encoding: RowContext) -> pa.Table:
    """Returns the columns to filter items by; texts that hold lists are split."""
    attributes = filterable(features, "item_id")
    for index, name in enumerate(attributes.column_names):
        if name in encoding.separators:
            texts = attributes[name]
            # An empty text has no value; split, it would have one that is empty.
            texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)
            attributes = attributes.set_column(
                index, name, pc.split_pattern(texts, encoding.separators[name])
            )
    return attributes


def _described(
    data: LabelledData, key: str, rows: Int64, names: Sequence[str]
) -> Chunk:
    """Returns the item's or user's columns behind ``names`` for ``rows`` (N,) of a table."""
    described = data.described(key, rows)
    sources = data.words.sources(names)
    return described.select([name for name in described if name in sources])


def _users_of_labelled(
    data: LabelledData, items: Int64, names: Sequence[str]
) -> NamedUsers:
    """Returns the users of the training rows, with the positions of their items among ``items`` (I,).

    Args:
        data: rows with a user.
        items: rows of the items.
        names: columns that the model reads.
    """
    users = data.trained("user_id")
    owners = data.train["user_id"].values
    row_items = data.train["item_id"].values
    is_liked = (
        (data.train["label"].values > 0)
        & np.isin(owners, users)
        & np.isin(row_items, items)
    )
    owners = users.searchsorted(owners[is_liked])
    positions = items.searchsorted(row_items[is_liked])
    lists = as_arrow(Column.grouped(positions, owners, len(users)))
    user_rows = _described(data, "user_id", users, names)
    return NamedUsers(
        key="user_id",
        ids=data.ids("user_id", users),
        features=_as_in_files(user_rows, data.words, {}),
        unknown=_unknown(user_rows, data.words, data.oov_ids),
        seen=lists,
        liked=lists,
    )


def of_sequences(data: SequenceData) -> ExportData:
    """Returns the items, and the users with the items before their test items; requests name items as the files do."""
    names = np.arange(data.num_items + 1) if data.item_ids is None else data.item_ids
    held_out = data.held_out("test")
    user_ids = (
        held_out.users if data.user_ids is None else data.user_ids[held_out.users]
    )
    before = most_recent(held_out.before, data.max_length)
    ids = as_arrow(Column(names[1:]))
    sessions = as_arrow(Column(names[before.values], before.offsets))
    training = data.popularity()
    pairs: list[tuple[Step, Any]] = [
        (Lists(column="session", max_length=data.max_length), {}),
        (
            Categorify(column="candidates", also=("session",)),
            Vocabulary(ids, pa.array(training[1:])),
        ),
    ]
    raw = {"session": f"list<{ids.type}>", "candidates": str(ids.type)}
    return ExportData(
        catalogue=Catalogue(
            ids=names[1:],
            features=pa.table({"candidates": ids}),
            trained=names[np.flatnonzero(training)],
        ),
        users=NamedUsers(
            key="user_id",
            ids=user_ids,
            features=pa.table({"session": sessions}),
            unknown={"session": []},
            seen=_positions(held_out.before),
            liked=_positions(before),
        ),
        preprocessor=FittedPreprocessor.of(pairs, raw),
    )


def of_streamed(data: StreamedData, schema: BatchSchema) -> ExportData:
    """Returns the items and users of the training rows as they stand in the log; a request is a row without the item.

    A request may name a user of the vocabulary by id, and gives the context beside it, such as the time, by which the
    user's latest events become a history.

    Raises:
        BundleError: the preprocessing names no item, or its folder has no raw rows.
    """
    item = data.roles.item
    if item is None:
        raise BundleError(
            f"set '{data.name}': its preprocessing names no item, of which a bundle stores the vectors; name its "
            "column in the preprocessing recipe: Prepared(item=...)"
        )
    for name in (RAW_ITEMS, RAW_REQUESTS):
        if not (data.folder / name).exists():
            raise BundleError(
                f"{data.folder}: has no {name}, in which rec.data.preprocess keeps rows as they stand in the log; "
                "preprocess the log again with this version"
            )
    raw_items = pq.read_table(data.folder / RAW_ITEMS)
    names = (*schema.keys, *schema.dense)
    columns = [
        name
        for name in (*data.towers["item"][0], *data.towers["item"][1])
        if name in names
    ]
    of_items = steps_for_columns(data.preprocessor, dict.fromkeys([item, *columns]))
    rows = of_items.online(raw_items.to_pydict())
    (key,) = steps_for_columns(data.preprocessor, [item]).request_columns
    served = np.isin(rows[item].values, data.items[0])
    items = raw_items.filter(pa.array(served))
    ids = items[key].to_numpy(zero_copy_only=False)
    features = items.select(list(of_items.request_columns))
    request_steps = steps_for_columns(
        data.preprocessor, [name for name in names if name not in columns]
    )
    return ExportData(
        catalogue=Catalogue(
            ids=ids,
            features=features,
            attributes=filterable(features, key),
            trained=ids,
        ),
        users=_users_of_streamed(data, names, rows[item].values[served]),
        queries=pq.read_table(data.folder / RAW_REQUESTS).select(
            list(request_steps.request_columns)
        ),
        preprocessor=data.preprocessor,
    )


def _users_of_streamed(
    data: StreamedData, names: Sequence[str], items: Int64
) -> NamedUsers | None:
    """Returns the users of the vocabulary, with their items in training.

    Args:
        data: preprocessed rows.
        names: columns that the model reads.
        items: row of the items' table of each position of the catalogue, (I,).

    Returns:
        The users; None if the preprocessing names no user or has no vocabulary of them, or an older version did it.
    """
    user = data.roles.user
    path = data.folder / RAW_USERS
    if user is None or not path.exists():
        return None
    table = pq.read_table(path)
    of_id = steps_for_columns(data.preprocessor, [user])
    (key,) = of_id.request_columns
    rows = of_id.online({key: table[key].combine_chunks()})[user].values
    table = table.filter(pa.array(rows > 0))
    rows = rows[rows > 0]
    features, dense = data.towers["user"]
    user_steps = steps_for_columns(
        data.preprocessor, [name for name in (*features, *dense) if name in names]
    )
    # The id too if no tower reads it: a table without a column has no rows.
    described = table.select(
        [
            name
            for name in table.column_names
            if name == key or name in user_steps.request_columns
        ]
    )
    owner = np.full(data.vocab[user], -1)
    position = np.full(data.vocab[str(data.roles.item)], -1)
    owner[rows] = np.arange(len(rows))
    position[items] = np.arange(len(items))
    item_lists = as_arrow(_taken(data, owner, position, len(rows), len(items)))
    return NamedUsers(
        key=key,
        ids=table[key].to_numpy(zero_copy_only=False),
        features=described,
        unknown=_nobody(described, user_steps, dense),
        seen=item_lists,
        liked=item_lists,
    )


def _taken(
    data: StreamedData, owner: Int64, position: Int64, users: int, items: int
) -> Column:
    """Returns the positions of each user's items, from first to last, of training rows with label 1.

    Args:
        data: preprocessed rows.
        owner: number of the user of each row of the users' table, -1 for none.
        position: position in the catalogue of each row of the items' table, -1 for none.
        users: number of users.
        items: number of items of the catalogue.
    """
    user = str(data.roles.user)
    item = str(data.roles.item)
    pairs = [np.zeros(0, np.int64)]
    for rows in data.clicked(user, item):
        owners = owner[rows[user].values]
        positions = position[rows[item].values]
        usable = (owners >= 0) & (positions >= 0)
        pairs.append(owners[usable] * items + positions[usable])
    values, first = np.unique(np.concatenate(pairs), return_index=True)
    # In the order of the rows again: np.unique has sorted the pairs.
    owners, positions = np.divmod(values[np.argsort(first)], items)
    return Column.grouped(positions, owners, users)


def _nobody(
    described: pa.Table, steps: FittedPreprocessor, dense: Sequence[str]
) -> dict[str, Any]:
    """Returns the raw columns of an unknown user: no value, or the mean if one is needed."""
    nobody: dict[str, Any] = {}
    for field in described.schema:
        nobody[field.name] = [] if pa.types.is_list(field.type) else None
    for number in dense:
        if number not in steps.outputs:
            continue
        number_steps = steps_for_columns(steps, [number])
        try:
            number_steps.online(
                {name: [nobody.get(name)] for name in number_steps.request_columns}
            )
        except DataError:
            # The steps of this number take no missing value, so give them the mean.
            for name in nobody.keys() & number_steps.request_columns:
                kind = described.schema.field(name).type
                if nobody[name] is None and not pa.types.is_string(kind):
                    mean = pc.mean(described[name]).as_py() or 0.0
                    nobody[name] = mean if pa.types.is_floating(kind) else round(mean)
    return nobody


def _rows_of(data: InteractionData) -> Chunk:
    """Returns the rows of all parts, the latest part first; the training rows have the latest first."""
    chunks = [getattr(data, part) for part in reversed(PARTS)]
    chunks[-1] = chunks[-1].take(np.arange(chunks[-1].num_rows)[::-1])
    names = [name for name in chunks[0] if all(name in chunk for chunk in chunks)]
    return concatenate_rows(chunks, names)


# By column of ids: the id in files and requests of each table row.
FileIds = Mapping[str, NDArray[Any]]


def _positions(lists: Column) -> pa.ListArray:
    """Returns lists of items as positions in the catalogue; that of item 1 is 0."""
    return as_arrow(Column(lists.values - 1, lists.offsets))


def _as_in_files(rows: Chunk, encoding: RowContext, ids: FileIds) -> pa.Table:
    """Returns rows with the ids, words and numbers of the files, as requests have them."""
    columns = encoding.raw(rows)
    for name, column in rows.items():
        if name in ids:
            column = Column(ids[name][column.values], column.offsets)
        if name not in columns:
            columns[name] = as_arrow(column)
    return pa.table({name: columns[name] for name in rows})


def _id_vocabularies(
    data: InteractionData, ids: FileIds
) -> dict[tuple[str, ...], NDArray[Any]]:
    """Returns the file's ids of rows 1..n of each group of columns with one id space, unless ids equal rows.

    A user or an item without a training row is the unknown one, though not in a history, as in the evaluation.
    """
    vocabularies: dict[tuple[str, ...], NDArray[Any]] = {}
    for name in ("user_id", "item_id"):
        file_ids = ids[name][1:]
        table_rows = np.arange(1, len(file_ids) + 1)
        trained = np.isin(table_rows, data.train[name].values)
        numbered = np.array_equal(file_ids, table_rows)
        lists = ("history",) if name == "item_id" else ()
        if trained.all():
            if not numbered:
                columns = (name, *lists)
                vocabularies[columns] = file_ids
            continue
        # Ids that no request has.
        unused = np.iinfo(np.int64).min + np.arange(len(file_ids))
        if file_ids.dtype == object:
            unused = np.array(
                [f"\0{row}" for row in range(len(file_ids))], dtype=object
            )
        vocabularies[(name,)] = np.where(trained, file_ids, unused)
        if lists and not numbered:
            vocabularies[lists] = file_ids
    return vocabularies


def raw_types(tables: Iterable[pa.Table]) -> dict[str, str]:
    """Returns the raw type of each column of some tables."""
    return {
        field.name: raw_type(field.type) or "int64"
        for table in tables
        for field in table.schema
    }


def _preprocessor(
    tables: Sequence[pa.Table],
    encoding: RowContext,
    vocabularies: Mapping[tuple[str, ...], NDArray[Any]],
) -> FittedPreprocessor | None:
    """Returns a preprocessor from the values of files and requests to ids and numbers; None if they are equal.

    Args:
        tables: tables with the columns, as in the files.
        encoding: vocabularies and scales of the columns.
        vocabularies: ids of the files, see :func:`_id_vocabularies`.
    """
    raw = raw_types(tables)
    pairs: list[tuple[Step, Any]] = []
    for name in raw:
        steps = encoding.steps_of(name)
        if steps:
            raw[name] = encoding.raw_type(name)
            pairs += steps
    for columns, ids in vocabularies.items():
        names = [name for name in columns if name in raw]
        if names:
            pairs.append(
                (Categorify(column=names[0], also=tuple(names[1:])), vocabulary_of(ids))
            )
    if not pairs:
        return None
    outputs: set[str] = set()
    for step, _ in pairs:
        outputs.update(step.writes)
    return FittedPreprocessor.of(
        pairs, raw, [name for name in raw if name not in outputs]
    )


def _unknown(
    rows: Chunk, encoding: RowContext, ids: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the columns of an unknown user.

    Args:
        rows: rows of known users.
        encoding: vocabularies and scales of the columns.
        ids: id of the unknown in a column of ids.
    """
    unknown: dict[str, Any] = {}
    for name, column in rows.items():
        if name in encoding.scales:
            unknown[name] = encoding.scales[name][0]
        elif name in encoding.vocabularies or name in encoding.times:
            unknown[name] = "" if name in encoding.separators else None
        elif column.ragged:
            unknown[name] = []
        else:
            unknown[name] = ids.get(
                name, 0 if column.values.dtype.kind in "iu" else 0.0
            )
    return unknown
