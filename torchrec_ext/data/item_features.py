"""Item ids of rows and of draws -> places in the table of item features, checked."""

from __future__ import annotations

import numpy as np

from torchrec_ext.data.columns import Int64
from torchrec_ext.schema import BatchSchema, DataError


def known_items(schema: BatchSchema, num_rows: int, ids: Int64, numbers: Int64) -> Int64:
    """``ids`` (B,), each a row of the table of item features; with ``out_of_range="oov"`` others become the feature's ``oov_id``.

    Args:
        schema: says what other ids do.
        num_rows: of the table of item features.
        ids: (B,).
        numbers: (B,) by which a message names a row.

    Raises:
        DataError: an id has no features.
    """
    bad = (ids < 0) | (ids >= num_rows)
    if not bad.any():
        return ids
    feature = schema.feature("item_id")
    oov_id = feature.oov_id if feature else 0
    if schema.out_of_range == "oov":
        return np.where(bad, oov_id, ids)
    readers = f" of table {feature.readers}" if feature else ""
    at = int(bad.argmax())
    raise DataError(
        f"feature 'item_id'{readers}: id {ids[at]} in row {numbers[at]} has no features (known items: 0 to {num_rows - 1}; "
        f"{int(bad.sum())} such ids of {len(ids)}); fix the data, or set out_of_range='oov' to use item {oov_id} for them"
    )
