"""ChunkLoader: rows in memory or files -> TowerBatches, the same samples whatever the number of ranks, resumable at any step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.batches import BatchBuilder
from torchrec_ext.data.columns import Array, Chunk, Column, Int64, PackedRows
from torchrec_ext.data.interactions import InteractionData, Pairs
from torchrec_ext.data.loader_config import LoaderConfig as LoaderConfig
from torchrec_ext.data.loader_config import Sampling as Sampling
from torchrec_ext.data.negatives import Negatives, PopularityNegatives, UniformNegatives
from torchrec_ext.data.prefetch import prefetched
from torchrec_ext.data.resident import ResidentRows, read_all
from torchrec_ext.data.source import Source
from torchrec_ext.data.streamed import StreamedRows
from torchrec_ext.schema import BatchSchema, DataError


class ChunkLoader:
    """An epoch of TowerBatches from rows in memory, or from files of any size.

    The order and the negatives are functions of (seed, epoch). Each global step takes the next ``batch_size`` rows; rank r of R
    takes a contiguous part of them. All ranks take the same number of steps with batches of the same shape: what is missing are
    rows of weight 0 with empty bags, so every sample counts exactly once. With N negatives, a positive (label 1) is followed by its
    own N (label 0).

    Rows in memory are shuffled as a whole. Files are read while the epoch runs: :class:`StreamPlan` says in which order, and what
    each rank reads.

    Args:
        chunk: all rows, the same on every rank; or a :class:`Source` of them, such as :class:`ParquetSource`.
        schema: the columns that the model reads.
        config: see :class:`LoaderConfig`.
        items: row i holds the features of item i.
        negatives: draws the negatives; must be given if ``config.negatives`` > 0. A row's place in ``chunk`` is its position.
        rank: r.
        world_size: R.
        device: hold all rows as tensors on this device and gather the batches there, in the order of rows in memory; for a set that
            fits, and ``negatives=0`` without ``items``.

    Raises:
        DataError: a source or chunk lacks a column; when iterated, a bad value, naming feature, value and row of ``chunk``, or
            file, row group and row.
    """

    def __init__(
        self,
        chunk: Chunk | Source,
        schema: BatchSchema,
        *,
        config: LoaderConfig,
        items: Chunk | None = None,
        negatives: Negatives | None = None,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} of world_size={world_size}: rank must be 0 to {world_size - 1}")
        if config.negatives and negatives is None:
            raise ValueError(f"loader.negatives={config.negatives}, but no sampler was given; pass negatives=, or set it to 0")
        if device is not None and (config.negatives or items is not None):
            raise ValueError(
                f"device={device} with loader.negatives={config.negatives}{' and items' if items is not None else ''}: rows on a "
                "device come as they are; set negatives=0 and give rows that hold the item features, or leave device out"
            )
        self.config = config
        self._resident: ResidentRows | None = None
        self._streamed: StreamedRows | None = None
        if device is not None:
            rows = chunk if isinstance(chunk, Chunk) else read_all(chunk, schema, config.label, config.weight)
            self._resident = ResidentRows(rows, schema, config.label, config.weight, torch.device(device))
            self._device = torch.device(device)
            self._num_rows = rows.num_rows
        elif isinstance(chunk, Chunk):
            self._hold(chunk, schema)
        else:
            self._streamed = StreamedRows(chunk, schema, config, items, rank, world_size)
            self._num_rows = self._streamed.num_rows
        self._builder = BatchBuilder(schema, items)
        self._negatives = negatives
        self._rank, self._world_size = rank, world_size
        self._pin = torch.cuda.is_available() if config.pin_memory is None else config.pin_memory
        self._epoch = self._step = self._start = 0
        if not len(self):
            raise DataError(
                f"{self._num_rows} rows with loader.batch_size={config.batch_size} and loader.drop_last={config.drop_last} make no "
                "step; give more rows or a smaller batch_size, or keep the last batch"
            )

    def _hold(self, chunk: Chunk, schema: BatchSchema) -> None:
        for name in filter(None, (self.config.label, self.config.weight)):
            if name not in chunk:
                raise DataError(f"column '{name}' is missing; the rows have {sorted(chunk)}")
        self._rows = PackedRows(chunk.select([name for name in chunk if name in _needed(schema, self.config)]))
        self._weights = chunk[self.config.weight].values if self.config.weight else None
        self._num_rows = chunk.num_rows

    def __len__(self) -> int:
        """Steps in an epoch, the same on every rank."""
        whole, rest = divmod(self._num_rows, self.config.batch_size)
        return whole + (rest > 0 and not self.config.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Starts ``epoch``, counted from 0, at its first step."""
        self._epoch, self._step, self._start = epoch, 0, 0

    def __iter__(self) -> Iterator[TowerBatch]:
        """The epoch's batches; after :meth:`load_state_dict`, those that remain (once)."""
        start, self._start = self._start, 0
        self._step = start
        depth = 0 if self._resident else self.config.prefetch
        for step, batch in enumerate(prefetched(self._batches(self._epoch, start), depth), start=start + 1):
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
        order = self._streamed.fingerprint() if self._streamed else {"rows": self._num_rows}
        return order | {name: getattr(self.config, name) for name in names}

    def _batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        if self._streamed:
            made = self._from_stream(self._streamed, epoch, start)
        else:
            order = self._order(epoch)
            build = self._on_device(self._resident, order) if self._resident else partial(self._build, order, epoch)
            made = (build(step) for step in range(start, len(self)))
        yield from (batch.pin_memory() for batch in made) if self._pin and not self._resident else made

    def _order(self, epoch: int) -> Int64:
        if not self.config.shuffle:
            return np.arange(self._num_rows)
        return np.random.Generator(np.random.PCG64([self.config.seed, epoch])).permutation(self._num_rows)

    def _part(self, count: int) -> slice:
        """This rank's rows of a global batch of ``count``."""
        return slice(self._rank * count // self._world_size, (self._rank + 1) * count // self._world_size)

    def _on_device(self, resident: ResidentRows, order: Int64) -> Callable[[int], TowerBatch]:
        numbers, size = torch.from_numpy(order).to(self._device), self.config.batch_size

        def build(step: int) -> TowerBatch:
            everyone = numbers[step * size : (step + 1) * size]
            total = resident.total_weight(everyone) / self._world_size
            return resident.batch(everyone[self._part(len(everyone))], -(-size // self._world_size), total)

        return build

    def _from_stream(self, streamed: StreamedRows, epoch: int, start: int) -> Iterator[TowerBatch]:
        for rows in streamed.rows(epoch, start):
            if rows.batch is not None:
                yield rows.batch
            else:
                yield self._paired(rows.chunk, rows.numbers, rows.weights, epoch, rows.total)

    def _build(self, order: Int64, epoch: int, step: int) -> TowerBatch:
        everyone = order[step * self.config.batch_size : (step + 1) * self.config.batch_size]
        rows = everyone[self._part(len(everyone))]
        weights, total = None, float(len(everyone))
        if self._weights is not None:
            weights = self._weights[rows]
            total = float(self._weights[everyone].sum(dtype=np.float64))
        return self._paired(self._rows.take(rows), rows, weights, epoch, total)

    def _paired(self, mine: Chunk, rows: Int64, weights: Array | None, epoch: int, total: float) -> TowerBatch:
        """This rank's batch of the rows ``mine`` with the numbers ``rows``; ``total`` is the weight of the global batch."""
        width = 1 + self.config.negatives
        labels = np.zeros((len(rows), width), dtype=np.float32)
        labels[:, 0] = mine[self.config.label].values if self.config.label else 1.0
        candidates, log_q = self._candidates(mine, rows, epoch)
        return self._builder.pairs(
            mine,
            candidates,
            labels=labels,
            weights=None if weights is None else weights.repeat(width),
            log_q=log_q,
            total_weight=total * width / self._world_size,
            row_numbers=rows,
            padded_rows=-(-self.config.batch_size // self._world_size),
        )

    def _candidates(self, mine: Chunk, rows: Int64, epoch: int) -> tuple[Int64 | None, Any]:
        """(B, 1 + N) item ids and their log q, the positive first; (None, None) without negatives."""
        if not self.config.negatives or self._negatives is None:
            return None, None
        users, positives = mine["user_id"].values, mine["item_id"].values
        ids, log_q = self._negatives.draw(users, rows, epoch, self.config.negatives)
        known = np.maximum(positives, 1)
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
