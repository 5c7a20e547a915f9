"""Columns: a request's raw columns to those of a batch, as the rows of the training files were made."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.data.preprocess.categorical import Categorify
from torchrec_ext.data.preprocess.columns import missing_column, read_cells
from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.data.preprocess.step import Step
from torchrec_ext.schema import BatchSchema, DataError, Jagged, SparseFeature
from torchrec_ext.schema.features import source_columns, widths_of

Rows = Mapping[str, Sequence[Any]]


class Values(NamedTuple):
    """One column of B rows: ``values`` (B,), or (sum of lengths,) with ``lengths`` (B,)."""

    values: NDArray[Any]
    lengths: NDArray[np.int64] | None


class Read(NamedTuple):
    """B rows: what ``BatchSchema.assemble`` takes, and by feature which rows took its out-of-vocabulary row, (B,) bool."""

    sparse: dict[str, Jagged]
    dense: dict[str, Tensor]
    unknown: dict[str, NDArray[np.bool_]]
    size: int


class Columns:
    """Reads raw rows for some of the columns of a schema.

    Args:
        schema: the columns to be made.
        types: by raw column its raw type, such as ``int64`` or ``list<int64>``, where no preprocessor makes it.
        preprocessor: makes the columns from raw ones; without, the raw columns are those of the batch.
        unseen: by feature the rows of its table that no training row has read; they are read as the out-of-vocabulary
            row.

    Raises:
        ValueError: a column of the schema is neither made nor among ``types``.
    """

    def __init__(
        self,
        schema: BatchSchema,
        types: Mapping[str, str],
        preprocessor: FittedPreprocessor | None = None,
        unseen: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.schema = schema
        self.unseen = {name: np.asarray(rows, np.int64) for name, rows in (unseen or {}).items()}
        names = types.keys() if preprocessor is None else preprocessor.outputs.keys()
        self._widths = widths_of(schema.dense, names)
        wanted = [*schema.keys, *source_columns(schema.dense, names), *schema.weight_columns]
        self._part = None if preprocessor is None else steps_for_columns(preprocessor, wanted)
        if self._part is None:
            self.request_columns = {name: _type_of(name, types) for name in wanted}
        else:
            kept = {name: self._part.raw[name] for name in self._part.keep}
            self.request_columns = {**self._part.request_columns, **kept}
            _check_made(wanted, self._part)

    def read(self, rows: Rows) -> Read:
        """The columns of B rows.

        Args:
            rows: (B,) values of each column in ``request_columns``, lists of them for a list column; further ones are
                left aside.

        Raises:
            DataError: a column is missing or has another length; a value is missing, of another type, NaN or infinite.
        """
        for name in self.request_columns:
            if name not in rows:
                raise missing_column("the request", name, rows.keys())
        made = self._as_they_are(rows) if self._part is None else self._made(self._part, rows)
        size = _rows_of(made)
        weights = {feature.name: feature.weights for feature in self.schema.sparse}
        read = Read({}, {}, {}, size)
        for feature in self.schema.sparse:
            column = made[feature.name]
            column_of_weights = weights[feature.name]
            weighing = None if column_of_weights is None else made[column_of_weights].values
            read.sparse[feature.name], read.unknown[feature.name] = _bags(
                feature, column, weighing, self.unseen.get(feature.name)
            )
        for name, width in self._widths.items():
            numbers = _array(name, made[name], width)
            read.dense.update(
                {f"{name}[{at}]": _dense(name, Values(column, None)) for at, column in enumerate(numbers.T)}
            )
        for name in self.schema.dense:
            if name not in read.dense:
                read.dense[name] = _dense(name, made[name])
        return read

    def _as_they_are(self, rows: Rows) -> dict[str, Values]:
        made = {}
        for name, kind in self.request_columns.items():
            cells = read_cells(name, rows[name], kind)
            if not cells.valid.all():
                at = int((~cells.valid).argmax())
                row = at if cells.lengths is None else int(np.cumsum(cells.lengths).searchsorted(at, side="right"))
                raise DataError(f"column '{name}', row {row}: there is no value; send one, or leave the row out")
            made[name] = Values(cells.values, cells.lengths)
        return made

    def _made(self, part: FittedPreprocessor, rows: Rows) -> dict[str, Values]:
        chunk = part.online(rows)
        return {name: Values(chunk[name].values, chunk[name].lengths if chunk[name].ragged else None) for name in chunk}


def steps_for_columns(preprocessor: FittedPreprocessor, wanted: Collection[str]) -> FittedPreprocessor:
    """The steps of a preprocessor that the columns ``wanted`` come from, so that a request need not have the others' columns."""
    needed = set(wanted)
    steps: list[Step] = []
    states: list[Any] = []
    for step, state in zip(reversed(preprocessor.steps), reversed(preprocessor.states), strict=True):
        if needed.isdisjoint(step.writes):
            continue
        own = _narrowed(step, needed)
        needed |= set(own.reads)
        steps.insert(0, own)
        states.insert(0, state)
    keep = tuple(name for name in preprocessor.keep if name in wanted)
    return dataclasses.replace(preprocessor, steps=tuple(steps), states=tuple(states), keep=keep)


def _narrowed(step: Step, needed: Collection[str]) -> Step:
    """A vocabulary that several columns share is applied to those that are needed."""
    if not isinstance(step, Categorify):
        return step
    also = tuple(name for name in step.also if name in needed)
    if (step.output or step.column) in needed:
        return dataclasses.replace(step, also=also)
    return dataclasses.replace(step, column=also[0], output=None, also=also[1:])


def _type_of(name: str, types: Mapping[str, str]) -> str:
    if name not in types:
        raise missing_column("the rows of the export", name, types.keys())
    return types[name]


def _check_made(wanted: Collection[str], part: FittedPreprocessor) -> None:
    for name in wanted:
        if name not in part.outputs:
            raise missing_column("the preprocessor's result", name, part.outputs.keys())


def _rows_of(made: Mapping[str, Values]) -> int:
    sizes = {name: len(column.values if column.lengths is None else column.lengths) for name, column in made.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(
            f"the request's columns have different numbers of rows, {sizes}; send one entry per row in each"
        )
    return next(iter(sizes.values()), 0)


def _bags(
    feature: SparseFeature, column: Values, weights: NDArray[Any] | None, unseen: NDArray[np.int64] | None
) -> tuple[Jagged, NDArray[np.bool_]]:
    known, lengths = column.values.astype(np.int64, copy=False), column.lengths
    outside = known.view(np.uint64) >= feature.num_embeddings  # where ids below 0 are the greatest of all
    if unseen is not None:
        outside |= np.isin(known, unseen)
    if outside.any():
        known = np.where(outside, feature.oov_id, known)
    elif not known.flags.writeable:  # Arrow's memory, of which torch warns
        known = known.copy()
    unknown = known == feature.oov_id
    if lengths is not None:
        missed = unknown.any()
        rows = np.repeat(np.arange(len(lengths)), lengths)[unknown] if missed else ()
        unknown = np.bincount(rows, minlength=len(lengths)) > 0 if missed else np.zeros(len(lengths), np.bool_)
    of_lengths = None if lengths is None else torch.from_numpy(lengths.astype(np.int32))
    weighing = None if weights is None else torch.from_numpy(weights.astype(np.float32))
    return Jagged(torch.from_numpy(known), of_lengths, weighing), unknown


def _array(name: str, column: Values, width: int) -> NDArray[Any]:
    """(B, W)."""
    lengths = np.ones(len(column.values), np.int64) if column.lengths is None else column.lengths
    if (lengths != width).any():
        row = int((lengths != width).argmax())
        raise DataError(f"column '{name}', row {row}: {lengths[row]} numbers, must be a list of {width}; send as many")
    return column.values.reshape(len(lengths), width)


def _dense(name: str, column: Values) -> Tensor:
    if column.lengths is not None:
        raise DataError(f"column '{name}': a list in each row, must be one number; send a number")
    finite = np.isfinite(column.values)
    if not finite.all():
        row = int((~finite).argmax())
        raise DataError(f"column '{name}', row {row}: value {column.values[row]} is not finite; send a number")
    return torch.from_numpy(column.values.astype(np.float32))
