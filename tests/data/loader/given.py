"""Batches of rows with candidates that a test names, by the loader that draws them otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Column, Float32, Int64
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.samplers import NegativeSample
from torchrec_ext.schema import BatchSchema


@dataclass(frozen=True)
class Given:
    """A sampler that draws (B, N) items that are known before."""

    items: Int64

    def draw(
        self, users: Int64, positions: Int64, epoch: int, n: int
    ) -> NegativeSample:
        drawn = self.items[positions]
        return NegativeSample(drawn, np.zeros(drawn.shape, np.float32))

    def log_q(self, users: Int64, items: Int64) -> Float32:
        return np.zeros(len(items), np.float32)


def batch_of(
    schema: BatchSchema,
    rows: Chunk,
    candidates: Int64 | None = None,
    *,
    items: Chunk | None = None,
) -> TowerBatch:
    """Returns the batch of ``rows`` beside ``candidates`` (B, 1 + N)."""
    size = rows.num_rows
    sampler = None
    negatives = 0
    if candidates is not None:
        users = np.arange(rows.num_rows)
        if "user_id" not in rows:
            rows = rows.with_columns({"user_id": Column(users)})
        rows = rows.with_columns({"item_id": Column(candidates[:, 0])})
        sampler = Given(candidates[:, 1:])
        negatives = candidates.shape[1] - 1
    loader = ChunkLoader(
        rows,
        schema,
        config=LoaderConfig(batch_size=size, negatives=negatives, shuffle=False),
        items=items,
        negatives=sampler,
    )
    (batch,) = loader
    return batch
