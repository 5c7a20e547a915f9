"""ChunkLoader: rows in memory, in files or on a device -> TowerBatches, the same samples on any number of ranks, resumable."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchrec_ext.batch import DrawnStep, TowerBatch
from torchrec_ext.data.array_columns import with_elements
from torchrec_ext.data.batch_streams import on_device, on_host
from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.epochs import Epochs
from torchrec_ext.data.hard_negatives import HardNegatives, Index
from torchrec_ext.data.interactions import InteractionData
from torchrec_ext.data.labelled_rows import labelled_rows as labelled_rows
from torchrec_ext.data.loader_config import LoaderConfig as LoaderConfig
from torchrec_ext.data.loader_config import Sampling as Sampling
from torchrec_ext.data.mixed_candidates import MixedCandidates
from torchrec_ext.data.resident import ResidentRows
from torchrec_ext.data.row_groups import Source
from torchrec_ext.data.samplers import Sampler, Stateful, check_sampler
from torchrec_ext.data.samplers import training_negatives as training_negatives
from torchrec_ext.data.share import Share
from torchrec_ext.schema import BatchSchema

_STREAM = (  # settings that change which samples a step has
    "batch_size",
    "negatives",
    "sampling",
    "popularity_exponent",
    "hard_k",
    "hard_share",
    "shared_negatives",
    "frequency",
    "shuffle",
    "drop_last",
    "seed",
)


class ChunkLoader(Epochs):
    """An epoch of TowerBatches from rows in memory, or from files of any size.

    The order and the negatives are functions of (seed, epoch). Each global step takes the next ``batch_size`` rows; rank r of R
    takes a contiguous part of them. All ranks take the same number of steps with batches of the same shape: what is missing are
    rows of weight 0 with empty bags, so every sample counts exactly once. With N negatives, a positive (label 1) is followed by its
    own N (label 0); candidates that all queries share come after the positives, see :class:`SharedCandidates`.

    Rows in memory are shuffled as a whole. Files are read while the epoch runs: :class:`StreamPlan` says in which order, and what
    each rank reads.

    Args:
        chunk: all rows, the same on every rank; or a :class:`Source` of them, such as :class:`ParquetSource`.
        schema: the columns that the model reads.
        config: see :class:`LoaderConfig`.
        items: row i holds the features of item i.
        negatives: draws the negatives; must be given if ``config`` asks for some. A row's place in ``chunk`` is its position. Where
            its draws depend on more than seed, epoch and position, its state is part of the loader's.
        refresh: from an epoch to an index of each user's best items, for :class:`HardNegatives`: called when :meth:`set_epoch`
            begins an epoch other than the first, on every rank, so that it may use collectives. All draws of the first epoch are
            uniform.
        rank: r.
        world_size: R.
        device: hold all rows and items as tensors on this device, and gather and draw there, in the order of rows in memory and
            with the same draws (uniform and by popularity); for a set that fits. ``config.device`` where not given.

    Raises:
        DataError: a source or chunk lacks a column; when iterated, a bad value, naming feature, value and row of ``chunk``, or
            file, row group and row.

    Example:
        Hard negatives from the model's own towers; ``embed_all`` gathers their output for all users or items from all ranks::

            def refresh(epoch: int) -> Index:
                return ExactTopK(embed_all("user"), embed_all("item"), sampler.easy.known, k=200)

            loader = ChunkLoader(rows, schema, config=config, items=items, negatives=sampler, refresh=refresh)
    """

    def __init__(
        self,
        chunk: Chunk | Source,
        schema: BatchSchema,
        *,
        config: LoaderConfig,
        items: Chunk | None = None,
        negatives: Sampler | None = None,
        refresh: Callable[[int], Index] | None = None,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        share = Share(rank=rank, world_size=world_size)
        check_sampler(config, negatives, has_items=items is not None)
        if refresh is not None and not isinstance(negatives, HardNegatives):
            raise ValueError(f"refresh with negatives={type(negatives).__name__}: only HardNegatives are refreshed; leave it out")
        self._sampler, self._refresh = negatives, refresh
        device = device or config.device
        chunk = with_elements(chunk, schema.dense) if isinstance(chunk, Chunk) else chunk
        items = None if items is None else with_elements(items, schema.dense)
        # Padding up to a batch that no epoch fills would cost its time and memory.
        rows = chunk.num_rows if isinstance(chunk, Chunk) else sum(group.rows for group in chunk.groups)
        padded = dataclasses.replace(config, batch_size=min(config.batch_size, max(rows, 1)))
        if device is None:
            self._rows = on_host(chunk, schema, padded, items, negatives, share)
        else:
            self._rows = on_device(chunk, schema, padded, items, negatives, share, torch.device(device))
        super().__init__(config, self._rows.num_rows, "rows")
        if not self._rows.ahead:
            self._depth, self._pin = 0, False

    def set_epoch(self, epoch: int) -> None:
        """Starts ``epoch``, counted from 0, at its first step; asks for hard negatives anew where it is not the first."""
        super().set_epoch(epoch)
        if epoch and self._refresh is not None and isinstance(self._sampler, HardNegatives):
            self._sampler.refresh(self._refresh(epoch))

    def _batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        return self._rows.batches(epoch, start)

    def steps(self) -> Iterator[DrawnStep | TowerBatch]:
        """As :meth:`__iter__`, but a step of rows on a device whose bags hold one id each is a :class:`DrawnStep`."""
        if not (isinstance(self._rows, ResidentRows) and self._rows.fixed):
            yield from self
            return
        start, self._start = self._start, 0
        for step, item in enumerate(self._rows.drawn(self._epoch, start), start=start + 1):
            self._step = step
            yield item

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """See :meth:`Epochs.state_dict`; with the sampler's state, where it has one."""
        state = super().state_dict(step=step)
        return state | ({"sampler": self._sampler.state_dict(self._epoch)} if isinstance(self._sampler, Stateful) else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Epochs.load_state_dict`."""
        super().load_state_dict(state)
        if isinstance(self._sampler, Stateful):
            self._sampler.load_state_dict(state["sampler"])
        if isinstance(self._sampler, MixedCandidates) and self._start == len(self):
            deque(self._rows.batches(self._epoch, self._start), maxlen=0)  # an estimate counts the epoch, if it was not yet over

    def _stream(self) -> dict[str, Any]:
        """What the stream of samples depends on beside the epoch and the sampler's state."""
        return self._rows.fingerprint() | {name: getattr(self.config, name) for name in _STREAM}


def training_loader(
    data: InteractionData,
    schema: BatchSchema,
    config: LoaderConfig,
    *,
    refresh: Callable[[int], Index] | None = None,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str | None = None,
) -> ChunkLoader:
    """The loader of ``data.train`` with the negatives that ``config`` asks for; arguments as of :class:`ChunkLoader`.

    Raises:
        ValueError: ``sampling="hard"`` without ``refresh``, which would stay uniform for ever.
    """
    hard = config.sampling == "hard" and config.negatives > 0
    if hard and refresh is None:
        raise ValueError("loader.sampling='hard' without refresh: nobody says which items are hard; pass refresh=")
    return ChunkLoader(
        data.train,
        schema,
        config=config,
        items=data.items,
        negatives=training_negatives(data, config),
        refresh=refresh if hard else None,
        rank=rank,
        world_size=world_size,
        device=device,
    )
