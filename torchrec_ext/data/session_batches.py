"""Columns -> batches for the two sides of a next-item model, as a ranking of the catalogue asks for them."""

from __future__ import annotations

import numpy as np
import torch

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Column, Int64
from torchrec_ext.schema import BatchSchema, DataError, Jagged


class SessionBatches:
    """Batches of sessions only or of items only; TorchRec's sharded modules want every key, so the other one is empty bags.

    Args:
        schema: of the model, with the features ``session`` and ``candidates``.
    """

    def __init__(self, schema: BatchSchema) -> None:
        self._schema = schema

    def sessions(self, sessions: Column) -> TowerBatch:
        """B rows, each with the items before the one to predict, oldest first.

        Raises:
            DataError: an empty session, of which nothing is known that a next item could follow from.
        """
        lengths = sessions.lengths
        if not lengths.all():
            row = int((lengths == 0).argmax())
            raise DataError(
                f"session {row} is empty ({int((lengths == 0).sum())} of {len(lengths)}); rank by popularity where nothing is known"
            )
        return self._batch("session", sessions.values, lengths)

    def items(self, ids: Int64) -> TowerBatch:
        """B rows, each with one item as its candidate."""
        return self._batch("candidates", ids, np.ones_like(ids))

    def _batch(self, feature: str, values: Int64, lengths: Int64) -> TowerBatch:
        size = len(lengths)
        empty = Jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(size, dtype=torch.int32))
        columns = dict.fromkeys(self._schema.keys, empty) | {feature: Jagged(torch.from_numpy(values), torch.from_numpy(lengths))}
        return self._schema.assemble(columns, labels=torch.zeros(size))
