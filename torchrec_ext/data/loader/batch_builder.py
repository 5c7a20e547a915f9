"""BatchBuilder: batches of users alone or of items alone, as an evaluation embeds them.

padded(): rows of a batch up to a size that all ranks have.

known_items(): checks the item ids of rows and of draws against the table of item features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Array, Chunk, Column, Int64, with_elements
from torchrec_ext.schema import BatchSchema, DataError, Jagged
from torchrec_ext.schema.batch_schema import IdReplacement


class BatchBuilder:
    """Builds batches with all keys of the schema, in its order, that hold the features of users or of items alone.

    TorchRec's sharded modules fix the keys at their first call, so a batch of users alone or of items alone carries the
    other's features as empty bags and zeros. Labels are 0.

    Args:
        schema: the columns that the model reads.
        items: row i holds the features of item i, as in ``Prepared.items``; its columns are the item's, all others the
            user's.
        rows: puts rows of the model's tables in the place of dynamic ids, see :class:`IdHook`; None if there are none.
    """

    def __init__(
        self, schema: BatchSchema, items: Chunk, *, rows: IdReplacement | None = None
    ) -> None:
        self.schema = schema
        if rows is not None:
            self.schema, _ = schema.with_hook(rows)
        self.items = with_elements(items, schema.dense)
        names = [*schema.keys, *schema.dense]
        self._item_names = [name for name in names if name in self.items]
        self._user_names = [name for name in names if name not in self.items]

    def user_batch(self, users: Chunk) -> TowerBatch:
        """Builds B rows with the user's features alone."""
        users = with_elements(users, self._user_names)
        return self._batch(users, self._user_names, np.arange(users.num_rows))

    def item_batch(self, item_ids: Int64) -> TowerBatch:
        """Builds B rows with the features of the items ``item_ids`` (B,) alone."""
        numbers = np.arange(len(item_ids))
        ids = known_items(self.schema, self.items.num_rows, item_ids, numbers)
        columns = self.items.select(self._item_names).take(ids)
        return self._batch(columns, self._item_names, numbers)

    def _batch(
        self, columns: Mapping[str, Column], names: Sequence[str], numbers: Int64
    ) -> TowerBatch:
        """Builds a row with the columns ``names`` for each of ``numbers``; other columns are empty."""
        schema = self.schema
        size = len(numbers)
        for name in names:
            if name not in columns:
                raise schema.missing(name, columns)
        bags = {}
        for name in schema.keys:
            column = columns[name] if name in names else _EMPTY
            lengths = np.zeros(size, np.int32)
            lengths[: len(column)] = column.lengths
            values = as_tensor(_ids(name, column))
            bags[name] = Jagged(values, torch.from_numpy(lengths))
        dense = {}
        for name in schema.dense:
            dense[name] = torch.zeros(size)
            if name in names:
                dense[name] = torch.from_numpy(_numbers(name, columns[name]))
        rows = torch.from_numpy(numbers)
        return schema.assemble(
            bags,
            dense,
            labels=torch.zeros(size),
            targets=torch.zeros(size, len(schema.tasks)),
            rows=rows,
        )


_EMPTY = Column(np.zeros(0, np.int64), np.zeros(1, np.int64))


def _ids(name: str, column: Column) -> Array:
    # What torch has no tensor of; the schema refuses floats, in batches that were built
    # elsewhere as well.
    if column.pool.dtype.kind not in "iufb":
        raise DataError(
            f"column '{name}' is {column.pool.dtype}, ids must be integers; map the values to ids first"
        )
    return column.values


def _numbers(name: str, column: Column) -> Array:
    if column.ragged or column.pool.dtype.kind not in "fiub":
        kind = "ragged" if column.ragged else column.pool.dtype
        raise DataError(
            f"column '{name}' is {kind}, must be one number per row; read it as a sparse feature, or convert it"
        )
    return column.pool.astype(np.float32)


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
