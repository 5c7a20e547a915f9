"""Columns: converts a request's raw columns into a batch's columns, exactly as for the training files."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.data.preprocess.categorical import Categorify, Vocabulary
from torchrec_ext.data.preprocess.columns import missing_column, read_cells
from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.data.preprocess.step import Step
from torchrec_ext.schema import BatchSchema, DataError, Jagged, SparseFeature
from torchrec_ext.schema.array_columns import source_columns, widths_of

Rows = Mapping[str, Sequence[Any]]
_GREATEST = float(np.finfo(np.float32).max)


class Values(NamedTuple):
    """One column of B rows: ``values`` (B,), or (sum of lengths,) with ``lengths`` (B,)."""

    values: NDArray[Any]
    lengths: NDArray[np.int64] | None


class Read(NamedTuple):
    """B rows for ``BatchSchema.assemble``; ``unknown`` has for each feature (B,) whether any id of a row is unknown.

    A list that was padded with the out-of-vocabulary row is known.
    """

    sparse: dict[str, Jagged]
    dense: dict[str, Tensor]
    unknown: dict[str, NDArray[np.bool_]]
    size: int


class Columns:
    """Converts raw rows into the columns of a schema.

    Args:
        schema: columns to produce.
        types: raw type of each raw column, such as ``int64`` or ``list<int64>``; used without a preprocessor.
        preprocessor: computes the columns from raw ones; without it, raw columns are the batch's columns.
        unseen: rows of a feature's table that training never read, by feature; such ids are replaced by the
            out-of-vocabulary row.
        strict: features without an out-of-vocabulary row; an id outside of their tables is refused.

    Attributes:
        widths: length of the lists in each array column, by name.

    Raises:
        ValueError: a column of the schema is neither computed nor among ``types``.
    """

    def __init__(
        self,
        schema: BatchSchema,
        types: Mapping[str, str],
        preprocessor: FittedPreprocessor | None = None,
        unseen: Mapping[str, Sequence[int]] | None = None,
        strict: Collection[str] = (),
    ) -> None:
        self.schema = schema
        self.strict = frozenset(strict)
        self.unseen = {
            name: np.asarray(rows, np.int64) for name, rows in (unseen or {}).items()
        }
        # Per feature: (num_embeddings,) whether a row is unseen, mostly None.
        self._features = [
            (each, _mask(self.unseen.get(each.name), each.num_embeddings))
            for each in schema.sparse
        ]
        source = "the rows of the export"
        if preprocessor is not None:
            source = "the preprocessor's result"
            types = preprocessor.outputs
        self.widths = widths_of(schema.dense, types.keys())
        column_names = [
            *schema.keys,
            *source_columns(schema.dense, types.keys()),
            *schema.weight_columns,
        ]
        for name in column_names:
            if name not in types:
                raise missing_column(source, name, types.keys())
        self._steps: FittedPreprocessor | None = None
        self._vocabularies: list[
            tuple[set[str], Vocabulary]
        ] = []  # with the raw columns that each is of
        if preprocessor is None:
            self._as_sent: Collection[str] = column_names
            self.request_columns = {name: types[name] for name in column_names}
            self._is_plain = _is_plain(schema, self.request_columns)
        else:
            self._steps = steps = steps_for_columns(preprocessor, column_names)
            self._as_sent = steps.keep
            for step, state in steps.pairs:
                if isinstance(state, Vocabulary):
                    self._vocabularies.append((set(step.reads), state))
            self.request_columns = {
                **steps.request_columns,
                **{name: steps.raw[name] for name in steps.keep},
            }
            # Without steps, every column is kept as it was sent.
            self._is_plain = not steps.steps and _is_plain(schema, self.request_columns)

    def read(self, rows: Rows) -> Read:
        """Reads B raw rows.

        Args:
            rows: B values of each column in ``request_columns``, lists for a list column; further columns are
                ignored.

        Raises:
            DataError: a column is missing or has another length; a value is missing, of another type, NaN or infinite.
        """
        for name in self.request_columns:
            if name not in rows:
                raise missing_column("the request", name, rows.keys())
        if self._is_plain:
            plain = self._read_plain(rows)
            if plain is not None:
                return plain
        columns = (
            self._unprocessed(rows)
            if self._steps is None
            else _preprocessed(self._steps, rows)
        )
        size = _rows_of(columns)
        result = Read({}, {}, {}, size)
        for feature, unseen in self._features:
            name = feature.name
            weights = None
            if feature.weights is not None:
                weights = columns[feature.weights].values
            is_strict = name in self.strict
            result.sparse[name], result.unknown[name] = _bags(
                feature,
                columns[name],
                weights,
                unseen,
                strict=is_strict,
                is_raw=name in self._as_sent,
            )
        for name, width in self.widths.items():
            # The (B, W) numbers of a list column.
            column = columns[name]
            lengths = column.lengths
            if lengths is None:
                lengths = np.ones(len(column.values), np.int64)
            if (lengths != width).any():
                row = int((lengths != width).argmax())
                raise DataError(
                    f"column '{name}', row {row}: {lengths[row]} numbers, must be a list of {width}; send as many"
                )
            for index, numbers in enumerate(
                column.values.reshape(len(lengths), width).T
            ):
                result.dense[f"{name}[{index}]"] = _dense(name, Values(numbers, None))
        for name in self.schema.dense:
            if name not in result.dense:
                result.dense[name] = _dense(name, columns[name])
        return result

    def features_of(self, column: str) -> list[str]:
        """Returns the features that a raw column alone makes."""
        if self._steps is None:
            return [name for name in self.schema.keys if name == column]
        names = []
        for name in self.schema.keys:
            steps = steps_for_columns(self._steps, [name])
            if {*steps.request_columns, *steps.keep} == {column}:
                names.append(name)
        return names

    def share_ids(self, name: str, other: str) -> bool:
        """Returns whether two raw columns hold ids of one kind: they share a vocabulary or a table."""
        if any({name, other} <= columns for columns, _ in self._vocabularies):
            return True
        return not self._tables_of(name).isdisjoint(self._tables_of(other))

    def _tables_of(self, column: str) -> set[str]:
        features = self.features_of(column)
        tables: set[str] = set()
        for feature in self.schema.sparse:
            if feature.name in features:
                tables |= set(feature.tables)
        return tables

    def known_values(self, name: str, most: int) -> list[Any]:
        """Returns up to ``most`` values of a raw column of ids that have a row of their own; none for other columns.

        Values of a vocabulary come in its order, the most frequent first.
        """
        for columns, vocabulary in self._vocabularies:
            if name in columns:
                return vocabulary.values[:most].to_pylist()  # type: ignore[no-any-return]
        for feature, unseen in self._features:
            if feature.name == name and name in self._as_sent:
                # A table may have millions of rows, so look at its first ones only.
                rows = np.arange(min(feature.num_embeddings, 2 * most))
                if unseen is not None:
                    rows = rows[~unseen[rows]]
                if name not in self.strict:
                    rows = rows[rows != feature.oov_id]
                return rows[:most].tolist()  # type: ignore[no-any-return]
        return []

    def _read_plain(self, rows: Rows) -> Read | None:
        """Reads one row of Python's own numbers, all ids known, in a third of the time; None for any others."""
        result = Read({}, {}, {}, 1)
        for feature, unseen in self._features:
            values = rows[feature.name]
            if type(values) is not list or len(values) != 1:
                return None
            is_list = self.request_columns[feature.name].startswith("list")
            ids = values[0] if is_list else values
            # A set of exact types: a bool is an int to isinstance.
            if type(ids) is not list or set(map(type, ids)) - {int}:
                return None
            # Unknown and unseen ids are for the long way, which marks them.
            if not is_list and feature.oov_id in ids:
                return None
            if ids and not 0 <= min(ids) <= max(ids) < feature.num_embeddings:
                return None
            array = np.array(ids, np.int64)
            if unseen is not None and unseen[array].any():
                return None
            lengths = None
            if is_list:
                lengths = torch.from_numpy(np.array([len(ids)], np.int32))
            result.sparse[feature.name] = Jagged(torch.from_numpy(array), lengths, None)
            result.unknown[feature.name] = np.zeros(1, np.bool_)
        for name in self.schema.dense:
            values = rows[name]
            if (
                type(values) is not list
                or len(values) != 1
                or type(values[0]) is not float
            ):
                return None
            if not abs(values[0]) <= _GREATEST:  # also NaN
                return None
            result.dense[name] = torch.from_numpy(np.array(values, np.float32))
        return result

    def _unprocessed(self, rows: Rows) -> dict[str, Values]:
        columns = {}
        for name, kind in self.request_columns.items():
            cells = read_cells(name, rows[name], kind)
            # count_nonzero() takes a tenth of all()'s time.
            if np.count_nonzero(cells.valid) < len(cells.valid):
                row = int((~cells.valid).argmax())
                if cells.lengths is not None:
                    row = int(np.cumsum(cells.lengths).searchsorted(row, side="right"))
                raise DataError(
                    f"column '{name}', row {row}: there is no value; send one, or leave the row out"
                )
            columns[name] = Values(cells.values, cells.lengths)
        return columns


def _is_plain(schema: BatchSchema, types: Mapping[str, str]) -> bool:
    """Returns whether all columns are ids without weights, lists of them, and numbers."""
    kinds = {types[name] for name in schema.keys}
    numbers = {types.get(name) for name in schema.dense}
    return (
        not schema.weight_columns
        and kinds <= {"int64", "list<int64>"}
        and numbers <= {"float32", "float64"}
    )


def _preprocessed(steps: FittedPreprocessor, rows: Rows) -> dict[str, Values]:
    columns = {}
    for name, column in steps.online(rows).items():
        columns[name] = Values(column.values, column.lengths if column.ragged else None)
    return columns


def steps_for_columns(
    preprocessor: FittedPreprocessor, names: Collection[str]
) -> FittedPreprocessor:
    """Reduces a preprocessor to the steps behind the columns ``names``, so that a request needs fewer columns."""
    # Backwards: a later step decides which columns an earlier step must write.
    needed_columns = set(names)
    steps: list[Step] = []
    states: list[Any] = []
    for step, state in zip(
        reversed(preprocessor.steps), reversed(preprocessor.states), strict=True
    ):
        if needed_columns.isdisjoint(step.writes):
            continue
        narrowed_step = _narrow_step(step, needed_columns)
        needed_columns |= set(narrowed_step.reads)
        steps.insert(0, narrowed_step)
        states.insert(0, state)
    keep = tuple(name for name in preprocessor.keep if name in names)
    return dataclasses.replace(
        preprocessor, steps=tuple(steps), states=tuple(states), keep=keep
    )


def _narrow_step(step: Step, needed_columns: Collection[str]) -> Step:
    """Narrows a step with one vocabulary for several columns to the needed ones."""
    if not isinstance(step, Categorify):
        return step
    also = tuple(name for name in step.also if name in needed_columns)
    if (step.output or step.column) in needed_columns:
        return dataclasses.replace(step, also=also)
    return dataclasses.replace(step, column=also[0], output=None, also=also[1:])


def _rows_of(columns: Mapping[str, Values]) -> int:
    sizes = {}
    for name, (values, lengths) in columns.items():
        rows = values if lengths is None else lengths
        sizes[name] = len(rows)
    if len(set(sizes.values())) > 1:
        raise DataError(
            f"the request's columns have different numbers of rows, {sizes}; send one entry per row in each"
        )
    return next(iter(sizes.values()), 0)


def _bags(
    feature: SparseFeature,
    column: Values,
    weights: NDArray[Any] | None,
    unseen: NDArray[np.bool_] | None,
    *,
    strict: bool,
    is_raw: bool,
) -> tuple[Jagged, NDArray[np.bool_]]:
    raw_ids = column.values.astype(np.int64, copy=False)
    ids = with_oov_row(feature, raw_ids, strict=strict)
    lengths = column.lengths
    if not ids.flags.writeable:  # torch warns about read-only memory, such as Arrow's
        ids = ids.copy()
    if unseen is not None and unseen[ids].any():
        ids = np.where(unseen[ids], feature.oov_id, ids)
    unknown = ids == feature.oov_id
    # Without an out-of-vocabulary row, oov_id is an ordinary row.
    if strict:
        unknown = np.zeros(len(ids), np.bool_)
    if is_raw and lengths is not None:
        # A list may be padded with the out-of-vocabulary row itself; the row alone
        # stands for an unknown id.
        unknown &= raw_ids != feature.oov_id
    bag_lengths = bag_weights = None
    if lengths is not None:
        bag_lengths = torch.from_numpy(lengths.astype(np.int32))
        if np.count_nonzero(unknown):
            rows = np.repeat(np.arange(len(lengths)), lengths)[unknown]
            unknown = np.bincount(rows, minlength=len(lengths)) > 0
        else:
            unknown = np.zeros(len(lengths), np.bool_)
    if weights is not None:
        bag_weights = torch.from_numpy(weights.astype(np.float32))
    return Jagged(torch.from_numpy(ids), bag_lengths, bag_weights), unknown


def with_oov_row(
    feature: SparseFeature, ids: NDArray[np.int64], *, strict: bool
) -> NDArray[np.int64]:
    """Replaces ids outside of a feature's tables by its out-of-vocabulary row.

    Raises:
        DataError: there is such an id, and the feature is ``strict``: it has no out-of-vocabulary row.
    """
    # As unsigned numbers, negative ids are the greatest.
    outside = ids.view(np.uint64) >= feature.num_embeddings
    if not np.count_nonzero(outside):
        return ids
    if strict:
        raise DataError(
            f"column '{feature.name}': {ids[outside][0]} is no row of table {feature.readers}, which "
            f"has the rows 0 to {feature.num_embeddings - 1:,}; send another id, or export the model "
            f"with oov_ids={{'{feature.name}': ROW}}"
        )
    return np.where(outside, feature.oov_id, ids)


def _mask(rows: NDArray[np.int64] | None, size: int) -> NDArray[np.bool_] | None:
    """Returns (size,) whether a row is among ``rows``; None for None."""
    if rows is None:
        return None
    mask = np.zeros(size, np.bool_)
    mask[rows[(rows >= 0) & (rows < size)]] = True
    return mask


def _dense(name: str, column: Values) -> Tensor:
    if column.lengths is not None:
        raise DataError(
            f"column '{name}': a list in each row, must be one number; send a number"
        )
    finite = np.isfinite(column.values)
    if np.count_nonzero(finite) < len(finite):
        row = int((~finite).argmax())
        raise DataError(
            f"column '{name}', row {row}: value {column.values[row]} is not finite; send a number"
        )
    return torch.from_numpy(column.values.astype(np.float32))
