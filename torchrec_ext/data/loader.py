"""ChunkLoader: rows in memory -> TowerBatches, the same samples whatever the number of ranks, resumable at any step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.batches import BatchBuilder
from torchrec_ext.data.columns import Chunk, Column, Int64, PackedRows
from torchrec_ext.data.interactions import InteractionData, Pairs
from torchrec_ext.data.negatives import Negatives, PopularityNegatives, UniformNegatives
from torchrec_ext.data.prefetch import prefetched
from torchrec_ext.schema import BatchSchema, DataError

Sampling = Literal["uniform", "popularity"]


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How rows become batches.

    Args:
        batch_size: positives per step *over all ranks*, so that a result does not depend on the number of ranks. A rank's batch has
            ceil(batch_size / R) x (1 + negatives) rows.
        negatives: drawn per positive; 0 for rows with labels of their own, or for losses that take negatives from the batch.
        sampling: how negatives are drawn, ``uniform`` or ``popularity``.
        popularity_exponent: see :class:`PopularityNegatives`.
        shuffle: a new order each epoch; else the order of the rows.
        drop_last: leave out the last step if it is not full. Else its missing rows are rows of weight 0.
        prefetch: batches built ahead by a thread; 0 builds them in the caller's.
        pin_memory: page-locked batches; where there is a CUDA device if not given.
        seed: of the order and the negatives.
        label: the column with the labels, for ``negatives=0``; all labels are 1 where not given.
        weight: the column with a weight for each row; all weights are 1 where not given.
    """

    batch_size: int = 1024
    negatives: int = 4
    sampling: Sampling = "uniform"
    popularity_exponent: float = 0.75
    shuffle: bool = True
    drop_last: bool = False
    prefetch: int = 2
    pin_memory: bool | None = None
    seed: int = 0
    label: str | None = None
    weight: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("negatives", 0), ("prefetch", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"loader.{name}={getattr(self, name)}: must be {least} or more")
        if self.sampling not in get_args(Sampling):
            raise ValueError(f"loader.sampling={self.sampling!r}: must be one of {', '.join(get_args(Sampling))}")
        if self.label and self.negatives:
            raise ValueError(
                f"loader.label={self.label!r} with loader.negatives={self.negatives}: drawn negatives have label 0 and their "
                "positives label 1; set one of the two"
            )


class ChunkLoader:
    """An epoch of TowerBatches from rows in memory.

    The order and the negatives are functions of (seed, epoch). Each global step takes the next ``batch_size`` rows; rank r of R
    takes a contiguous part of them. All ranks take the same number of steps with batches of the same shape: what is missing are
    rows of weight 0 with empty bags, so every sample counts exactly once. With N negatives, a positive (label 1) is followed by its
    own N (label 0).

    Args:
        chunk: all rows, the same on every rank.
        schema: the columns that the model reads.
        config: see :class:`LoaderConfig`.
        items: row i holds the features of item i.
        negatives: draws the negatives; must be given if ``config.negatives`` > 0. A row's place in ``chunk`` is its position.
        rank: r.
        world_size: R.

    Raises:
        DataError: when iterated, for a bad value, naming feature, row of ``chunk`` and value.
    """

    def __init__(
        self,
        chunk: Chunk,
        schema: BatchSchema,
        *,
        config: LoaderConfig,
        items: Chunk | None = None,
        negatives: Negatives | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} of world_size={world_size}: rank must be 0 to {world_size - 1}")
        if config.negatives and negatives is None:
            raise ValueError(f"loader.negatives={config.negatives}, but no sampler was given; pass negatives=, or set it to 0")
        for name in filter(None, (config.label, config.weight)):
            if name not in chunk:
                raise DataError(f"column '{name}' is missing; the rows have {sorted(chunk)}")
        self.config = config
        self._rows = PackedRows(chunk.select([name for name in chunk if name in _needed(schema, config)]))
        self._weights = chunk[config.weight].values if config.weight else None
        self._builder = BatchBuilder(schema, items)
        self._negatives = negatives
        self._rank, self._world_size = rank, world_size
        self._pin = torch.cuda.is_available() if config.pin_memory is None else config.pin_memory
        self._epoch = self._step = self._start = 0
        if not len(self):
            raise DataError(
                f"{chunk.num_rows} rows with loader.batch_size={config.batch_size} and loader.drop_last={config.drop_last} make no "
                "step; give more rows or a smaller batch_size, or keep the last batch"
            )

    def __len__(self) -> int:
        """Steps in an epoch, the same on every rank."""
        whole, rest = divmod(self._rows.num_rows, self.config.batch_size)
        return whole + (rest > 0 and not self.config.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Starts ``epoch``, counted from 0, at its first step."""
        self._epoch, self._step, self._start = epoch, 0, 0

    def __iter__(self) -> Iterator[TowerBatch]:
        """The epoch's batches; after :meth:`load_state_dict`, those that remain (once)."""
        start, self._start = self._start, 0
        self._step = start
        for step, batch in enumerate(prefetched(self._batches(self._epoch, start), self.config.prefetch), start=start + 1):
            self._step = step
            yield batch

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Where the stream stands.

        Args:
            step: steps of this epoch that the caller has finished. A pipeline that fetches ahead must say it; where not given, it
                is the number of batches handed out (what the prefetch thread has built does not count).
        """
        return {"epoch": self._epoch, "step": self._step if step is None else step, "stream": self._stream()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken, on any number of ranks.

        Raises:
            ValueError: the state is of another stream, so the remaining samples would not be those that are missing.
        """
        mine = self._stream()
        different = {name: (value, mine.get(name)) for name, value in state["stream"].items() if value != mine.get(name)}
        if different:
            parts = ", ".join(f"{name} was {was!r} and is {now!r}" for name, (was, now) in different.items())
            raise ValueError(f"cannot resume in the middle of an epoch: {parts}; restore these settings, or start a new epoch")
        self._epoch, self._step = int(state["epoch"]), int(state["step"])
        self._start = self._step

    def _stream(self) -> dict[str, Any]:
        """What the stream of samples depends on beside the epoch."""
        names = ("batch_size", "negatives", "sampling", "popularity_exponent", "shuffle", "drop_last", "seed")
        return {"rows": self._rows.num_rows} | {name: getattr(self.config, name) for name in names}

    def _batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        order = self._order(epoch)
        for step in range(start, len(self)):
            batch = self._build(order, epoch, step)
            yield batch.pin_memory() if self._pin else batch

    def _order(self, epoch: int) -> Int64:
        if not self.config.shuffle:
            return np.arange(self._rows.num_rows)
        return np.random.Generator(np.random.PCG64([self.config.seed, epoch])).permutation(self._rows.num_rows)

    def _build(self, order: Int64, epoch: int, step: int) -> TowerBatch:
        everyone = order[step * self.config.batch_size : (step + 1) * self.config.batch_size]
        count, ranks = len(everyone), self._world_size
        rows = everyone[self._rank * count // ranks : (self._rank + 1) * count // ranks]
        mine = self._rows.take(rows)
        width = 1 + self.config.negatives
        labels = np.zeros((len(rows), width), dtype=np.float32)
        labels[:, 0] = mine[self.config.label].values if self.config.label else 1.0
        weights, total = None, float(count)
        if self._weights is not None:
            weights = self._weights[rows].repeat(width)
            total = float(self._weights[everyone].sum(dtype=np.float64))
        candidates, log_q = self._candidates(mine, rows, epoch)
        return self._builder.pairs(
            mine,
            candidates,
            labels=labels,
            weights=weights,
            log_q=log_q,
            total_weight=total * width / ranks,
            row_numbers=rows,
            padded_rows=-(-self.config.batch_size // ranks),
        )

    def _candidates(self, mine: Chunk, rows: Int64, epoch: int) -> tuple[Int64 | None, Any]:
        """(B, 1 + N) item ids and their log q, the positive first; (None, None) without negatives."""
        if not self.config.negatives or self._negatives is None:
            return None, None
        users, positives = mine["user_id"].values, mine["item_id"].values
        ids, log_q = self._negatives.draw(users, rows, epoch, self.config.negatives)
        known = np.clip(positives, 1, None) if len(positives) else positives
        return (
            np.concatenate([positives[:, None], ids], axis=1),
            np.concatenate([self._negatives.log_q(users, known)[:, None], log_q], axis=1),
        )


def _needed(schema: BatchSchema, config: LoaderConfig) -> set[str | None]:
    return {*schema.keys, *schema.dense, "user_id", "item_id", config.label, config.weight}


def training_negatives(data: InteractionData, config: LoaderConfig, *, avoid: Pairs | None = None) -> Negatives | None:
    """The sampler that ``config`` asks for, which avoids the training pairs; None for ``negatives=0``.

    Held-out pairs may be drawn in training: to avoid them would tell the model which they are.

    Args:
        data: the set.
        config: the loader's.
        avoid: the pairs to reject, the training pairs where not given.
    """
    pairs = avoid or data.known
    if not config.negatives:
        return None
    if config.sampling == "uniform":
        return UniformNegatives(data.num_items, pairs.users, pairs.items, config.seed)
    return PopularityNegatives(data.num_items, pairs.users, pairs.items, config.seed, exponent=config.popularity_exponent)


def training_loader(
    data: InteractionData, schema: BatchSchema, config: LoaderConfig, *, rank: int = 0, world_size: int = 1
) -> ChunkLoader:
    """The loader of ``data.train`` with the negatives that ``config`` asks for."""
    return ChunkLoader(
        data.train,
        schema,
        config=config,
        items=data.items,
        negatives=training_negatives(data, config),
        rank=rank,
        world_size=world_size,
    )


def labelled_rows(data: InteractionData, part: str = "validation", *, negatives: int = 4, seed: int = 0) -> Chunk:
    """The positives of a part with negatives, the same at every call, and a ``label`` column: rows for AUC and log loss.

    Negatives avoid all pairs of the set, held-out ones too. To be loaded with ``LoaderConfig(negatives=0, label="label")``.

    Args:
        data: the set.
        part: ``train``, ``validation`` or ``test``.
        negatives: N per positive.
        seed: of the draws.
    """
    chunk: Chunk = getattr(data, part)
    pairs = data.pairs()
    sampler = UniformNegatives(data.num_items, pairs.users, pairs.items, seed)
    rows = np.arange(chunk.num_rows)
    drawn = sampler.draw(chunk["user_id"].values, rows, 0, negatives).ids
    labels = np.zeros((chunk.num_rows, 1 + negatives), dtype=np.float32)
    labels[:, 0] = 1.0
    ids = np.concatenate([chunk["item_id"].values[:, None], drawn], axis=1)
    return chunk.take(rows.repeat(1 + negatives)).with_columns(
        {"item_id": Column(ids.reshape(-1)), "label": Column(labels.reshape(-1))}
    )
