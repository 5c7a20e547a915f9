"""SessionLoader: sequences -> batches for next-item prediction, of equally many items a rank, resumable at any step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Column, Int64, sample_digest
from torchrec_ext.data.loader.batch_builder import padded
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.epochs import Epochs, Share, order_of
from torchrec_ext.data.negatives.mixed import CatalogueCandidates
from torchrec_ext.schema import BatchSchema, DataError, Jagged


class SessionLoader(Epochs):
    """Yields an epoch of batches with the features ``session`` and ``item_id``; every sequence counts exactly once.

    The order and the candidates are functions of (seed, epoch), whatever the number of ranks. Each global step takes
    the next ``batch_size`` sequences, deals them out so that the ranks get almost equally many items, and pads every
    rank's share with empty rows of weight 0 to the same shape. All ranks take the same number of steps.

    Args:
        sequences: ragged column of 2 or more items per row, all of which but the first are targets; the same on every
            rank.
        schema: schema of the model.
        config: settings: ``batch_size`` sequences over all ranks; ``negatives`` N makes batch_size x N candidates,
            drawn uniformly and shared by all targets of a step, and 0 makes the whole catalogue the candidates.
        num_items: number of items in the catalogue, ids 1 to num_items.
        rank: r.
        world_size: R.

    Attributes:
        hook: where :class:`DynamicIdLoader` replaces the ids of the batches.

    Raises:
        DataError: a sequence without a target; when iterated, an id outside its table.
    """

    def __init__(
        self,
        sequences: Column,
        schema: BatchSchema,
        *,
        config: LoaderConfig,
        num_items: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._share = Share(rank=rank, world_size=world_size)
        _check(config)
        self._lengths = sequences.lengths
        if len(sequences) and int(self._lengths.min()) < 2:
            row = int((self._lengths < 2).argmax())
            raise DataError(
                f"sequence {row} has {self._lengths[row]} items, must have 2 or more: the first is an input, the "
                "others are targets; cut sequences with training_windows()"
            )
        self._sequences = sequences
        self._schema, self.hook = schema.with_hook()
        self._num_items = num_items
        super().__init__(config, len(sequences), "sequences")
        # Padding up to a batch that no epoch fills would cost its time and memory.
        self._size = min(config.batch_size, self.num_samples)

    def stream_facts(self) -> dict[str, Any]:
        """Returns the settings and sizes behind the stream, without the epoch."""
        facts: dict[str, Any] = {
            "sequences": len(self._sequences),
            "items": self._num_items,
            "content": self._content,
        }
        for name in ("batch_size", "negatives", "shuffle", "drop_last", "seed"):
            facts[name] = getattr(self.config, name)
        return facts

    @cached_property
    def _content(self) -> str:
        return sample_digest(Chunk({"sequences": self._sequences}))

    def epoch_batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """See :meth:`Epochs.epoch_batches`."""
        order = order_of(self.config, len(self._sequences), epoch)
        size = self.config.batch_size
        for step in range(start, len(self)):
            yield self._batch(order[step * size : (step + 1) * size], epoch, step)

    def _batch(self, global_rows: Int64, epoch: int, step: int) -> TowerBatch:
        lengths = self._lengths[global_rows]
        local_rows = global_rows[
            deal(lengths, self._share.world_size) == self._share.rank
        ]
        size = self._share.rows(self._size)
        candidates = self._candidates(epoch, step)
        session = Jagged(
            torch.from_numpy(self._sequences.take(local_rows).values),
            padded(torch.from_numpy(self._lengths[local_rows]), size).int(),
        )
        # Candidates belong to the step, but TorchRec wants them as bags of its rows,
        # here of equal lengths.
        lengths_of_candidates = torch.diff(
            torch.arange(size + 1) * len(candidates) // size
        ).int()
        # The targets of all ranks: every item of a sequence but the first. Each rank
        # divides its loss by them.
        targets = float((lengths - 1).sum())
        return self._schema.assemble(
            {
                "session": session,
                "item_id": Jagged(torch.from_numpy(candidates), lengths_of_candidates),
            },
            labels=torch.ones(size),
            weights=(torch.arange(size) < len(local_rows)).float(),
            total_weight=targets / self._share.world_size,
            rows=padded(torch.from_numpy(local_rows), size),
        )

    def _candidates(self, epoch: int, step: int) -> Int64:
        """Returns this rank's share of the step's candidates, filled up with 0 to the same number on every rank."""
        if not self.config.negatives:
            everything = np.arange(1, self._num_items + 1)
        else:
            # The same seed on every rank: all draw the candidates of the step, and each
            # takes its part of them.
            generator = np.random.Generator(
                np.random.PCG64([self.config.seed, epoch, step, 1])
            )
            everything = generator.integers(
                1, self._num_items + 1, size=self._size * self.config.negatives
            )
        candidates = CatalogueCandidates(everything)
        return candidates.draw(
            epoch, step, rank=self._share.rank, world_size=self._share.world_size
        )


def deal(lengths: Int64, world_size: int) -> Int64:
    """Returns (B,) the rank of each sequence; ranks differ by one sequence, and by the longest's items, at most.

    In each round every rank takes one sequence, the longest first; the longest of a round goes to the rank with fewest
    items.

    Example:
        >>> deal(np.array([9, 2, 8, 3]), 2).tolist()
        [0, 0, 1, 1]
    """
    ranks = np.zeros(len(lengths), dtype=np.int64)
    loads = np.zeros(world_size, dtype=np.int64)
    # One round for each sequence of a batch, to deal all of them to one rank.
    if world_size == 1:
        return ranks
    # Stable sorts: each rank deals by itself, and all have to agree on ties.
    order = np.argsort(-lengths, kind="stable")
    for start in range(0, len(lengths), world_size):
        round_rows = order[start : start + world_size]
        round_ranks = np.argsort(loads, kind="stable")[: len(round_rows)]
        ranks[round_rows] = round_ranks
        loads[round_ranks] += lengths[round_rows]
    return ranks


def _check(config: LoaderConfig) -> None:
    for name in ("label", "weight"):
        if getattr(config, name):
            raise ValueError(
                f"loader.{name}={getattr(config, name)!r}: sequences have no such column; leave it out"
            )
    if config.sampling != "uniform":
        raise ValueError(
            f"loader.sampling={config.sampling!r}: candidates that all targets share are drawn "
            "uniformly; leave it out, and set loader.negatives=0 for the whole catalogue"
        )
    if config.device:
        raise ValueError(
            f"loader.device={config.device!r}: sequences are dealt out on the host; leave loader.device out"
        )
