"""BatchBuilder: columns -> TowerBatch, users repeated beside their candidates, item features looked up by id.

padded(): rows of a batch up to a size that all ranks have.

known_items(): checks the item ids of rows and of draws against the table of item features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Array, Chunk, Column, Int64, with_elements
from torchrec_ext.schema import BatchSchema, DataError, Dense, Jagged
from torchrec_ext.schema.batch_schema import IdReplacement


class BatchBuilder:
    """Builds batches with all keys of the schema, in its order.

    The features of shared towers are stored once per user; other user features are repeated for each candidate.

    TorchRec's sharded modules fix the keys at their first call, so a batch of users alone or of items alone carries the
    other's features as empty bags and zeros.

    Args:
        schema: the columns that the model reads.
        items: row i holds the features of item i, as in ``InteractionData.items``; its columns are the item's, all
            others the user's. None if the rows hold everything themselves.
        rows: puts rows of the model's tables in the place of dynamic ids, see :class:`IdHook`; None if there are none.
    """

    def __init__(
        self,
        schema: BatchSchema,
        items: Chunk | None,
        *,
        rows: IdReplacement | None = None,
    ) -> None:
        self.schema = schema
        if rows is not None:
            self.schema, _ = schema.with_hook(rows)
        self.items = with_elements(items or Chunk({}), schema.dense)
        names = [*schema.keys, *schema.dense, *schema.weight_columns]
        self._item_names = [name for name in names if name in self.items]
        self._user_names = [name for name in names if name not in self.items]

    def user_batch(self, users: Chunk) -> TowerBatch:
        """Builds B rows with the user's features alone; labels are 0."""
        users = with_elements(users, self._user_names)
        return self._assemble(
            self._user_columns(users, 1), np.arange(users.num_rows), 1, {}, {}
        )

    def item_batch(self, item_ids: Int64) -> TowerBatch:
        """Builds B rows with the features of the items ``item_ids`` (B,) alone; labels are 0."""
        row_numbers = np.arange(len(item_ids))
        return self._assemble(
            self._item_columns(item_ids, row_numbers), row_numbers, 1, {}, {}
        )

    def pairs(
        self,
        users: Chunk,
        candidates: Int64 | None = None,
        *,
        labels: Array | None = None,
        weights: Array | None = None,
        log_q: Array | None = None,
        targets: Array | None = None,
        total_weight: float | None = None,
        row_numbers: Int64 | None = None,
        padded_rows: int | None = None,
    ) -> TowerBatch:
        """Builds B x N rows of B users with N candidates each, a user's candidates one after the other.

        Args:
            users: B rows with the users' features.
            candidates: (B, N) item ids; by default the rows hold the item's features themselves, or name the item by
                ``item_id``.
            labels: (B, N); zeros by default.
            weights: (B, N); ones by default.
            log_q: (B, N) log-probability with which each candidate was sampled.
            targets: (B, N, tasks) the labels of the schema's further tasks; zeros by default.
            total_weight: see :class:`TowerBatch`.
            row_numbers: (B,) numbers by which an error message names the rows.
            padded_rows: number of users up to which rows of weight 0, with empty bags and zeros, are added.
        """
        users = with_elements(users, self._user_names)
        if candidates is None and self._item_names:
            candidates = users["item_id"].values[:, None]
        width = 1 if candidates is None else candidates.shape[1]
        if row_numbers is None:
            row_numbers = np.arange(users.num_rows)
        # The dense columns of the rows and of the shared rows as matrices, if `users`
        # store them as such.
        dense: dict[Sequence[str], Array] = {}
        for names in (self.schema.row_dense, self.schema.shared_dense):
            # Features of items come from `self.items`, so such a matrix has columns
            # from two places.
            if any(name in self.items for name in names):
                continue
            matrix = users.matrix(names)
            # Other types than numbers go column by column, to name the column in the
            # error.
            if matrix is not None and matrix.dtype.kind in "fiub":
                dense[names] = matrix
        columns = self._user_columns(users, width, dense)
        if candidates is not None:
            columns |= self._item_columns(
                np.ascontiguousarray(candidates).reshape(-1), row_numbers
            )
        # A batch without weights counts all of its rows, but padding must count for
        # nothing.
        if weights is None and padded_rows and padded_rows > users.num_rows:
            weights = np.ones(users.num_rows * width, np.float32)
        vectors = {"labels": labels, "weights": weights, "log_q": log_q}
        if self.schema.tasks:
            vectors["targets"] = targets
        return self._assemble(
            columns, row_numbers, width, vectors, dense, total_weight, padded_rows
        )

    def _user_columns(
        self, users: Chunk, times: int, matrices: Collection[Sequence[str]] = ()
    ) -> dict[str, _Repeated]:
        """Returns the user's columns, without those in ``matrices``."""
        left_out = set(chain.from_iterable(matrices))
        columns = {}
        for name in self._user_names:
            if name not in left_out and name in users:
                columns[name] = _Repeated(
                    users[name], 1 if name in self.schema.shared else times
                )
        return columns

    def _item_columns(
        self, item_ids: Int64, row_numbers: Int64
    ) -> dict[str, _Repeated]:
        item_ids = known_items(self.schema, self.items.num_rows, item_ids, row_numbers)
        return {
            name: _Repeated(self.items[name].take(item_ids))
            for name in self._item_names
        }

    def _assemble(
        self,
        columns: dict[str, _Repeated],
        row_numbers: Int64,
        width: int,
        vectors: Mapping[str, Array | None],
        matrices: Mapping[Sequence[str], Array],
        total_weight: float | None = None,
        padded_users: int | None = None,
    ) -> TowerBatch:
        """Builds a shared row with ``width`` rows for each of ``row_numbers``, padded to ``padded_users``.

        If all of the user's columns are missing, or all of the item's, they are empty; a single missing column is an
        error. Dense columns in ``matrices`` need not be in ``columns``.
        """
        users = len(row_numbers)
        if not matrices and columns.keys().isdisjoint(self._user_names):
            columns |= {
                name: self._nothing(name, users, width) for name in self._user_names
            }
        if columns.keys().isdisjoint(self._item_names):
            columns |= {
                name: self._nothing(name, users, width) for name in self._item_names
            }
        padded_users = padded_users or users
        size = padded_users * width
        floats = {}
        for name, values in vectors.items():
            if values is not None:
                # (B, N) becomes (B x N,), and the further tasks' labels (B, N, tasks)
                # become (B x N, tasks).
                rows = values.reshape(-1, *values.shape[2:])
                floats[name] = padded(
                    as_tensor(rows.astype(np.float32, copy=False)), size
                )
        if "labels" not in floats:
            floats["labels"] = torch.zeros(size)
        if self.schema.tasks and "targets" not in floats:
            floats["targets"] = torch.zeros(size, len(self.schema.tasks))
        pad = padded_users - users
        bags = {}
        for name in self.schema.keys:
            if name in columns:
                bags[name] = self._jagged(
                    name, columns, pad if name in self.schema.shared else pad * width
                )
        return self.schema.assemble(
            bags,
            Dense(
                self._dense(columns, self.schema.row_dense, size, width, matrices),
                self._dense(
                    columns, self.schema.shared_dense, padded_users, 1, matrices
                ),
            ),
            labels=floats["labels"],
            weights=floats.get("weights"),
            log_q=floats.get("log_q"),
            targets=floats.get("targets"),
            total_weight=total_weight,
            index=width,
            shared_rows=padded(as_tensor(row_numbers), padded_users),
        )

    def _dense(
        self,
        columns: Mapping[str, _Repeated],
        names: Sequence[str],
        size: int,
        width: int,
        matrices: Mapping[Sequence[str], Array],
    ) -> Tensor:
        """Returns (size, Fd) the columns side by side, zeros below their rows; ``width`` rows of each of a matrix."""
        if not names:
            return torch.empty(size, 0)
        user_matrix = matrices.get(names)
        if user_matrix is not None and width == 1 and len(user_matrix) == size:
            # A copy: the rows of many steps may be views of one array.
            return torch.from_numpy(user_matrix.astype(np.float32))
        matrix = np.zeros((size, len(names)), np.float32)
        if user_matrix is not None:
            matrix.reshape(-1, width, len(names))[: len(user_matrix)] = user_matrix[
                :, None
            ]
            return torch.from_numpy(matrix)
        for index, name in enumerate(names):
            if name not in columns:
                raise self.schema.missing(name, columns)
            column, times = columns[name]
            values = _numbers(name, column)
            if times == 1:
                matrix[: len(values), index] = values
            else:
                matrix.reshape(-1, times, len(names))[: len(values), :, index] = values[
                    :, None
                ]
        return torch.from_numpy(matrix)

    def _nothing(self, name: str, users: int, width: int) -> _Repeated:
        """Returns zeros for a dense column, and empty bags for the ids of a feature or their weights."""
        size = users if name in self.schema.shared else users * width
        if name in self.schema.dense:
            return _Repeated(Column(np.zeros(size, dtype=np.float32)))
        # Weights have this type too: they are cast to float32 when they are packed.
        return _Repeated(
            Column.from_lengths(
                np.zeros(0, dtype=np.int64), np.zeros(size, dtype=np.int64)
            )
        )

    def _jagged(self, name: str, columns: Mapping[str, _Repeated], pad: int) -> Jagged:
        feature = self.schema.feature(name)
        if feature is None or feature.weights is None:
            return _jagged(name, columns[name], None, pad)
        if feature.weights not in columns:
            raise self.schema.missing(feature.weights, columns)
        ids = columns[name].column
        weights = columns[feature.weights].column
        if not np.array_equal(ids.lengths, weights.lengths):
            row = int((ids.lengths != weights.lengths).argmax())
            raise DataError(
                f"column '{feature.weights}', row {row} of the batch: {weights.lengths[row]} weights for the "
                f"{ids.lengths[row]} ids of '{name}'; give one for each id"
            )
        return _jagged(name, columns[name], weights.values, pad)


class _Repeated(NamedTuple):
    """A column with each row repeated ``times`` times in succession."""

    column: Column
    times: int = 1


def _jagged(name: str, repeated: _Repeated, weights: Array | None, pad: int) -> Jagged:
    column, times = repeated
    # What torch has no tensor of; the schema refuses floats, in batches that were built
    # elsewhere as well.
    if column.pool.dtype.kind not in "iufb":
        raise DataError(
            f"column '{name}' is {column.pool.dtype}, ids must be integers; map the values to ids first"
        )
    weighing: Tensor | None = None
    if weights is not None:
        weighing = as_tensor(weights.astype(np.float32, copy=False))
    if not column.ragged:
        # Without repetition no copy is made.
        values = as_tensor(column.values if times == 1 else column.values.repeat(times))
        if weighing is not None:
            weighing = weighing.repeat_interleave(times)
        # One id in each bag needs no lengths, unless padding adds empty bags.
        lengths = (
            padded(torch.ones(len(values), dtype=torch.int32), len(values) + pad)
            if pad
            else None
        )
        return Jagged(values, lengths, weighing)
    values = as_tensor(column.values)
    lengths = torch.from_numpy(column.lengths.astype(np.int32))
    if times > 1:
        # Repeat rows by FBGEMM: it copies whole rows, several times faster than a
        # gather by an index per value.
        rows = torch.from_numpy(np.arange(len(lengths), dtype=np.int32).repeat(times))
        lengths, values, weighing = torch.ops.fbgemm.permute_1D_sparse_data(
            rows, lengths, values, weighing, len(values) * times
        )
    return Jagged(values, padded(lengths, len(lengths) + pad), weighing)


def _numbers(name: str, column: Column) -> Array:
    if column.ragged or column.pool.dtype.kind not in "fiub":
        kind = "ragged" if column.ragged else column.pool.dtype
        raise DataError(
            f"column '{name}' is {kind}, must be one number per row; read it as a sparse feature, or convert it"
        )
    return column.pool


def padded(rows: Tensor, size: int) -> Tensor:
    """Returns (size, ...) the rows, and zeros after them."""
    if len(rows) == size:
        return rows
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])


def as_tensor(array: Array) -> Tensor:
    """Converts an array, with a copy if needed: Arrow's memory is read-only, and torch takes no negative strides."""
    return torch.from_numpy(
        array if array.flags.writeable and array.flags.c_contiguous else array.copy()
    )


def known_items(
    schema: BatchSchema,
    num_rows: int,
    ids: Int64,
    row_numbers: Int64,
    name: str = "item_id",
) -> Int64:
    """Checks item ids and returns them; ``out_of_range="oov"`` replaces ids without features by the ``oov_id``.

    Args:
        schema: decides what happens to an id without features.
        num_rows: number of rows of the table of item features.
        ids: (B x W,) item ids, W of each row one after the other.
        row_numbers: (B,) numbers by which a message names the rows.
        name: column of the ids.

    Raises:
        DataError: an id has no features.
    """
    bad = (ids < 0) | (ids >= num_rows)
    if not bad.any():
        return ids
    feature = schema.feature(name)
    oov_id = 0
    readers = ""
    # Ids that no table reads are of items all the same: their features are looked up.
    if feature is not None:
        oov_id = feature.oov_id
        readers = f" of table {feature.readers}"
    if schema.out_of_range == "oov":
        return np.where(bad, oov_id, ids)
    index = int(bad.argmax())
    row = row_numbers[index * len(row_numbers) // len(ids)]
    raise DataError(
        f"feature '{name}'{readers}: id {ids[index]} in row {row} has no features (known items: 0 to {num_rows - 1}; "
        f"{int(bad.sum())} such ids of {len(ids)}); fix the data, or set out_of_range='oov' to use item {oov_id}"
    )
