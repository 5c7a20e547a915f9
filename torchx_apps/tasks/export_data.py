"""The data that a bundle is exported with: catalogue and users with their features, as in the validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import Tensor

from torchrec_ext.data.columns import Column, Int64
from torchrec_ext.data.files.arrow import as_arrow
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.prepare import RAW_ITEMS, RAW_REQUESTS, RAW_USERS
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.data.preprocess import FittedPreprocessor, Lists
from torchrec_ext.data.splits import Pairs
from torchrec_ext.retrieval.catalogue import Catalogue, NamedUsers, filterable
from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.schema import BatchSchema, DataError
from torchrec_ext.schema.array_columns import source_columns


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportData:
    """The data arguments of :func:`torchrec_ext.retrieval.export.export`; see there."""

    catalogue: Catalogue
    users: NamedUsers | None = None
    queries: pa.Table | None = None
    preprocessor: FittedPreprocessor | None = None
    rows: Mapping[str, Tensor] | None = None


def without_item_tower(
    model: Any, item: tuple[Sequence[str], Sequence[str]]
) -> str | None:
    """Returns why a model of towers cannot be served: its item tower reads other columns; None if it does not.

    Args:
        model: the model that is trained.
        item: the item's features and dense columns, which a bundle knows of each item of the catalogue.
    """
    towers = getattr(model, "towers", None)
    if not towers:
        # The export itself explains this case better.
        return None
    name = list(towers)[-1]
    columns = {*item[0], *item[1]}
    others = sorted(set(tower_columns(towers[name])) - columns)
    if not others:
        return None
    return (
        f"a bundle stores the vectors of an item tower, which reads {', '.join(sorted(columns))} and nothing else, and "
        f"tower '{name}' reads {', '.join(others)}, too; leave model.towers out, or the bundle (--export never)"
    )


def tower_columns(tower: Any) -> list[str]:
    """Returns the columns that a tower reads."""
    columns = source_columns(tower.dense)
    for table in tower.tables:
        columns += table.feature_names
    return columns


def of_prepared(
    data: Prepared, schema: BatchSchema, catalogue: Sequence[str] = ()
) -> ExportData:
    """Returns the items and users of the training rows as they stand in the log; a request is a row without the item.

    A request may name a user of the vocabulary by id, and gives the context beside it, such as the time, by which the
    user's latest events become a history.

    Args:
        data: the set.
        schema: columns of the model.
        catalogue: parquet files of the items to serve, as raw/items.parquet has them; that one if empty.

    Raises:
        BundleError: the folder has no raw rows.
        DataError: the catalogue lacks a column, or has one of another type.
    """
    item = data.roles.item
    assert item is not None, "Task.unservable was asked"
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
    of_items = data.preprocessor.only(dict.fromkeys([item, *columns]))
    (key,) = data.preprocessor.only([item]).request_columns
    items = items_in(catalogue, raw_items, key) if catalogue else raw_items
    item_rows = of_items.online(items.to_pydict())[item].values
    known = np.isin(item_rows, data.item_ids)
    if not catalogue:
        items = items.filter(pa.array(known))
        item_rows = item_rows[known]
    ids = items[key].to_numpy(zero_copy_only=False)
    features = items.select(list(of_items.request_columns))
    request_steps = data.preprocessor.only(
        [name for name in names if name not in columns]
    )
    return ExportData(
        catalogue=Catalogue(
            ids=ids,
            features=features,
            titles=items["title"].to_pylist()
            if "title" in items.column_names
            else None,
            attributes=_attributes(features, key, data.preprocessor),
        ),
        users=_users_of(data, names, item_rows, ids),
        queries=pq.read_table(data.folder / RAW_REQUESTS).select(
            list(request_steps.request_columns)
        ),
        preprocessor=data.preprocessor,
    )


def items_in(paths: Sequence[str], raw_items: pa.Table, key: str) -> pa.Table:
    """Reads the items of parquet files, with the columns and types of the training's; titles may be missing."""
    source = ParquetSource(paths)
    schema = raw_items.schema
    names = [name for name in schema.names if name != "title" or name in source.columns]
    for name in names:
        source.type_of(name)
    table = pa.concat_tables(source.table(group, names) for group in source.groups)
    if table[key].null_count:
        row = table[key].is_null().index(True).as_py()
        raise DataError(
            f"--catalogue: row {row} has no '{key}'; give every item its id, or leave the row out"
        )
    columns = {}
    for name in names:
        try:
            columns[name] = table[name].cast(schema.field(name).type)
        except pa.ArrowException as error:
            raise DataError(
                f"--catalogue: column '{name}' is {table[name].type}, was {schema.field(name).type} in training "
                f"({str(error)[:60]}); convert it"
            ) from None
    return pa.table(columns)


def _attributes(
    features: pa.Table, key: str, preprocessor: FittedPreprocessor
) -> pa.Table:
    """Returns the columns to filter items by; texts that hold lists are split."""
    attributes = filterable(features, key)
    separators = {
        step.column: step.separator
        for step in preprocessor.steps
        if isinstance(step, Lists) and step.separator
    }
    for index, name in enumerate(attributes.column_names):
        if name in separators:
            texts = attributes[name]
            # An empty text has no value; split, it would have one that is empty.
            texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)
            attributes = attributes.set_column(
                index, name, pc.split_pattern(texts, separators[name])
            )
    return attributes


def _users_of(
    data: Prepared, names: Sequence[str], items: Int64, item_ids: Any
) -> NamedUsers | None:
    """Returns the users of the vocabulary, with the items of all their rows.

    Args:
        data: preprocessed rows.
        names: columns that the model reads.
        items: row of the items' table of each item of the catalogue, (I,), 0 for an unknown item.
        item_ids: ids of these items, (I,).

    Returns:
        The users; None if the preprocessing names no user or has no vocabulary of them, or an older version did it.
    """
    user = data.roles.user
    path = data.folder / RAW_USERS
    if user is None or not path.exists():
        return None
    table = pq.read_table(path)
    of_id = data.preprocessor.only([user])
    (key,) = of_id.request_columns
    rows = of_id.online({key: table[key].combine_chunks()})[user].values
    table = table.filter(pa.array(rows > 0))
    rows = rows[rows > 0]
    features, dense = data.towers["user"]
    user_steps = data.preprocessor.only(
        [name for name in (*features, *dense) if name in names]
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
    # Row 0 is that of all unknown items, and none of them.
    position[0] = -1
    # Held-out rows too: to a service they are what the user took last.
    item_lists = _taken(
        data.taken_in_order("train", "validation", "test"),
        owner,
        position,
        len(rows),
        len(items),
    )
    positions = as_arrow(item_lists)
    seen_ids = type(positions).from_arrays(
        positions.offsets, pa.array(item_ids).take(positions.values)
    )
    return NamedUsers(
        key=key,
        ids=table[key].to_numpy(zero_copy_only=False),
        features=described,
        unknown=_nobody(described, user_steps, dense),
        seen_ids=seen_ids,
    )


def _taken(
    pairs: Pairs, owner: Int64, position: Int64, users: int, items: int
) -> Column:
    """Returns the positions of each user's items, from first to last.

    Args:
        pairs: users and items, in order.
        owner: number of the user of each row of the users' table, -1 for none.
        position: position in the catalogue of each row of the items' table, -1 for none.
        users: number of users.
        items: number of items of the catalogue.
    """
    owners = owner[pairs.users]
    positions = position[pairs.items]
    usable = (owners >= 0) & (positions >= 0)
    numbers = owners[usable] * items + positions[usable]
    values, first = np.unique(numbers, return_index=True)
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
    for number in set(dense) & steps.outputs.keys():
        number_steps = steps.only([number])
        names = number_steps.request_columns
        try:
            number_steps.online({name: [nobody.get(name)] for name in names})
        except DataError:
            # The steps of this number take no missing value, so give them the mean.
            for name in nobody.keys() & names:
                kind = described.schema.field(name).type
                if nobody[name] is None and not pa.types.is_string(kind):
                    mean = pc.mean(described[name]).as_py() or 0.0
                    nobody[name] = mean if pa.types.is_floating(kind) else round(mean)
    return nobody
