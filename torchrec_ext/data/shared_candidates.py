"""SharedCandidates: a step's positives, and after them extra candidates that all queries of the batch share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Array, Chunk, Column, Int64
from torchrec_ext.data.item_features import known_items
from torchrec_ext.data.loader_config import LoaderConfig
from torchrec_ext.data.mixed_candidates import MixedCandidates
from torchrec_ext.data.pairing import StepRows, identified
from torchrec_ext.data.share import Share
from torchrec_ext.schema import BatchSchema, Jagged

Sections = Sequence[tuple[Column | None, int]]  # columns below one another, each in so many rows; None is empty


class SharedCandidates:
    """See :class:`Pairing`.

    A rank's batch has ceil(batch_size / R) + ceil(shared_negatives / R) rows::

        positives, padding up to ceil(batch_size / R) | extra candidates, padding

    Extra candidates have item features only, label and weight 0, and the log q of the mixture, as the positives have:
    ``in_batch_negatives(..., queries=ceil(batch_size / R))``. Where the user's features are shared they stand once for each
    positive, and the extra candidates point at the first user, who is not asked about them.

    Args:
        schema: the columns of the batch.
        config: see :class:`LoaderConfig`.
        items: row i holds the features of item i.
        candidates: draws them.
        share: of this rank.
    """

    ids = ("item_id",)

    def __init__(self, schema: BatchSchema, config: LoaderConfig, items: Chunk, candidates: MixedCandidates, share: Share) -> None:
        self._schema, self._config, self._items = schema, config, items
        self._candidates, self._share = candidates, share
        self._alone = any(name in schema.shared for name in items)  # then each row needs a shared row of its own

    def batch(self, rows: StepRows, epoch: int, step: int) -> TowerBatch:
        """See :meth:`Pairing.batch`."""
        chunk, queries = rows.chunk, self._share.rows(self._config.batch_size)
        positives = known_items(self._schema, self._items.num_rows, chunk["item_id"].values, rows.numbers)
        drawn = self._candidates.draw(epoch, step, self._share)
        size, extra = queries + len(drawn), drawn[drawn > 0]
        columns: dict[str, Sections] = {}
        for name in [*self._schema.keys, *self._schema.dense]:
            if name in self._items:
                column = self._items[name]
                columns[name] = [(column.take(positives), queries), (column.take(extra), len(drawn))]
            elif name in chunk:
                columns[name] = [(chunk[name], queries), *self._no_user(name, len(drawn))]
        ids = np.concatenate([positives, extra])
        items = np.zeros(size, np.int64)
        places = np.concatenate([np.arange(len(positives)), queries + np.arange(len(extra))])
        items[places] = ids
        batch = self._schema.assemble(
            {name: _jagged(sections) for name, sections in columns.items() if name in self._schema.keys},
            {name: _vector(sections) for name, sections in columns.items() if name in self._schema.dense},
            labels=_spread(_labels(chunk, self._config.label), size),
            weights=_spread(np.ones(len(positives)) if rows.weights is None else rows.weights, size),
            log_q=_spread(self._candidates.log_q(ids), size, places),
            total_weight=rows.total / self._share.world_size,
            index=torch.arange(size) if self._alone else torch.from_numpy(np.arange(size) * (np.arange(size) < queries)),
            shared_rows=_numbers(rows.numbers, size if self._alone else queries),
        )
        batch = identified(batch, self._schema, rows, candidates=items)
        return dataclasses.replace(batch, queries=queries)

    def _no_user(self, name: str, count: int) -> Sections:
        return [] if name in self._schema.shared and not self._alone else [(None, count)]


def _labels(chunk: Chunk, label: str | None) -> Array:
    return np.ones(chunk.num_rows, np.float32) if label is None else chunk[label].values


def _jagged(sections: Sections) -> Jagged:
    lengths = [np.zeros(size, np.int32) for _, size in sections]
    for (column, _), own in zip(sections, lengths, strict=True):
        if column is not None:
            own[: len(column)] = column.lengths
    values = [column.values for column, _ in sections if column is not None]
    return Jagged(torch.from_numpy(np.concatenate(values)), torch.from_numpy(np.concatenate(lengths)))


def _vector(sections: Sections) -> Tensor:
    parts = [_spread(np.zeros(0) if column is None else column.values, size) for column, size in sections]
    return torch.cat(parts)


def _spread(values: Array, size: int, places: Int64 | None = None) -> Tensor:
    """(size,) float32: the values at ``places``, from the first on where not given, zeros elsewhere."""
    vector = torch.zeros(size)
    vector.numpy()[np.arange(len(values)) if places is None else places] = values
    return vector


def _numbers(numbers: Int64, size: int) -> Tensor:
    padded = np.zeros(size, np.int64)
    padded[: len(numbers)] = numbers
    return torch.from_numpy(padded)
