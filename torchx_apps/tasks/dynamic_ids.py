"""Dynamic ids of a task: their raw values, its data with tables of their capacity, and the live ones for a bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from torchrec_ext.data.loader.dynamic_ids import DynamicIdLoader
from torchrec_ext.data.preprocess import (
    Categorify,
    FittedPreprocessor,
    Step,
    Vocabulary,
)
from torchrec_ext.ids import DynamicIds, string_ids
from torchrec_ext.ids.index import EMPTY
from torchrec_ext.retrieval.manifest import BundleError
from torchx_apps.tasks.export_data import ExportData

if TYPE_CHECKING:
    from torchx_apps.tasks.task import Task


def numbered(values: pa.Array) -> Tensor:
    """Returns the 64-bit id of each value, (V,): a whole number itself, a text's hash, ``EMPTY`` for null.

    Example:
        >>> numbered(pa.array([-7, 900])).tolist(), numbered(pa.array(["a", None]))[1] == EMPTY
        ([-7, 900], tensor(True))
    """
    if pa.types.is_integer(values.type):
        return torch.from_numpy(
            values.fill_null(EMPTY).to_numpy(zero_copy_only=False).astype(np.int64)
        )
    return string_ids(values)


class DataWithTables:
    """A task's data for a model with tables of other sizes than the vocabularies.

    Args:
        data: the data.
        rows: number of rows of these columns' tables.
    """

    def __init__(self, data: Any, rows: Mapping[str, int]) -> None:
        self._data = data
        self.vocab = {**data.vocab, **rows}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


def with_live_ids(data: ExportData, task: Task, loader: DynamicIdLoader) -> ExportData:
    """Returns the data of an export with the live ids as vocabularies; all other ids are unknown.

    The tables of the bundle hold the row of unknown ids and the live rows. A text that got its row on an earlier day is
    known only if the task's rows have it: the ids hold a hash of it.

    Raises:
        BundleError: a column's ids come from a hash, or are read by a later step.
    """
    if data.preprocessor is None:
        raise BundleError(
            "export_data: dynamic ids are mapped by the preprocessor of the rows; give ExportData(preprocessor=)"
        )
    table_rows: dict[str, Tensor] = {}
    vocabularies: dict[str, pa.Array] = {}
    for space, features in loader.features.items():
        values, live_rows = _live_values(task.raw_values(space), space, loader.ids)
        vocabularies |= dict.fromkeys(features, values)
        rows = torch.cat([live_rows.new_zeros(1), live_rows])
        table_rows |= dict.fromkeys(loader.tables[space], rows)
    users = data.users
    if users is not None:
        unknown = dict(users.unknown)
        for name in vocabularies.keys() & unknown.keys():
            # The number of the unknown row may be an id, whose row it must not read.
            unknown[name] = [] if isinstance(unknown[name], list) else None
        users = dataclasses.replace(users, unknown=unknown)
    return dataclasses.replace(
        data,
        users=users,
        preprocessor=_with_vocabularies(data.preprocessor, vocabularies),
        rows=table_rows,
    )


def _live_values(
    values: pa.Array, space: str, ids: DynamicIds
) -> tuple[pa.Array, Tensor]:
    """Returns the ids with a row, as the log has them, and their rows, (n,)."""
    if pa.types.is_integer(values.type):
        live, rows = ids.live_ids(space)
        return pa.array(live.numpy()), rows
    rows = ids.rows({space: numbered(values)})[space]
    is_live = rows > 0
    return values.filter(pa.array(is_live.numpy())), rows[is_live]


def check_raw_ids(preprocessor: FittedPreprocessor, names: Iterable[str]) -> None:
    """Refuses dynamic ids of which no bundle can be made.

    Raises:
        BundleError: another step than the last Categorify makes or reads such ids.
    """
    _with_vocabularies(preprocessor, dict.fromkeys(names, pa.array([], pa.int64())))


def _with_vocabularies(
    preprocessor: FittedPreprocessor, vocabularies: Mapping[str, pa.Array]
) -> FittedPreprocessor:
    """Returns the preprocessor with these vocabularies of some columns, in the order of their ids from 1 on."""
    states = {name: Vocabulary(values) for name, values in vocabularies.items()}
    # An earlier step may hand raw values on under the same name, such as a history of
    # them.
    last: dict[str, int] = {}
    for number, step in enumerate(preprocessor.steps):
        last |= dict.fromkeys(step.writes, number)
    pairs: list[tuple[Step, Any]] = []
    for number, (step, state) in enumerate(preprocessor.pairs):
        names = [
            name
            for name in step.writes
            if name in vocabularies and last[name] == number
        ]
        early = [
            name
            for name in step.reads
            if name in vocabularies and last.get(name, number) < number
        ]
        if early or (names and not isinstance(step, Categorify)):
            raise BundleError(
                f"ids.features.{(early or names)[0]}: a bundle maps raw ids, and {type(step).__name__} of the "
                "preprocessing makes or reads others; take Categorify, as its last step"
            )
        if not names:
            pairs.append((step, state))
            continue
        for column, output in zip(step.reads, step.writes, strict=True):
            pairs.append(
                (Categorify(column=column, output=output), states.get(output, state))
            )
    pairs += [
        (Categorify(column=name), states[name])
        for name in sorted(vocabularies.keys() - last.keys())
    ]
    keep = [name for name in preprocessor.keep if name not in vocabularies]
    return FittedPreprocessor(pairs, preprocessor.raw, keep)
