"""ChunkLoader: rows in memory, in files or on a device -> TowerBatches, the same samples on any number of ranks, resumable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.batch_streams import on_device, on_host
from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.hard_negatives import HardNegatives, Index
from torchrec_ext.data.interactions import InteractionData
from torchrec_ext.data.labelled_rows import labelled_rows as labelled_rows
from torchrec_ext.data.loader_config import LoaderConfig as LoaderConfig
from torchrec_ext.data.loader_config import Sampling as Sampling
from torchrec_ext.data.mixed_candidates import MixedCandidates
from torchrec_ext.data.prefetch import prefetched
from torchrec_ext.data.samplers import Sampler, Stateful, check_sampler
from torchrec_ext.data.samplers import training_negatives as training_negatives
from torchrec_ext.data.share import Share
from torchrec_ext.data.source import Source
from torchrec_ext.schema import BatchSchema, DataError

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


class ChunkLoader:
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
            with the same draws (uniform and by popularity); for a set that fits.

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
        self.config = config
        self._sampler, self._refresh = negatives, refresh
        if device is None:
            self._rows = on_host(chunk, schema, config, items, negatives, share)
        else:
            self._rows = on_device(chunk, schema, config, items, negatives, share, torch.device(device))
        self._pin = torch.cuda.is_available() if config.pin_memory is None else config.pin_memory
        self._epoch = self._step = self._start = 0
        if not len(self):
            raise DataError(
                f"{self._rows.num_rows} rows with loader.batch_size={config.batch_size} and loader.drop_last={config.drop_last} "
                "make no step; give more rows or a smaller batch_size, or keep the last batch"
            )

    def __len__(self) -> int:
        """Steps in an epoch, the same on every rank."""
        whole, rest = divmod(self._rows.num_rows, self.config.batch_size)
        return whole + (rest > 0 and not self.config.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Starts ``epoch``, counted from 0, at its first step; asks for hard negatives anew where it is not the first."""
        self._epoch, self._step, self._start = epoch, 0, 0
        if epoch and self._refresh is not None and isinstance(self._sampler, HardNegatives):
            self._sampler.refresh(self._refresh(epoch))

    def __iter__(self) -> Iterator[TowerBatch]:
        """The epoch's batches; after :meth:`load_state_dict`, those that remain (once)."""
        start, self._start = self._start, 0
        self._step = start
        depth = self.config.prefetch if self._rows.ahead else 0
        for step, batch in enumerate(prefetched(self._batches(start), depth), start=start + 1):
            self._step = step
            yield batch

    def _batches(self, start: int) -> Iterator[TowerBatch]:
        made = self._rows.batches(self._epoch, start)
        yield from (batch.pin_memory() for batch in made) if self._pin and self._rows.ahead else made

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Where the stream stands: numbers, texts and tensors.

        Args:
            step: steps of this epoch that the caller has finished. A pipeline that fetches ahead must say it; where not given, it
                is the number of batches handed out (what the prefetch thread has built does not count).
        """
        state = {"epoch": self._epoch, "step": self._step if step is None else step, "stream": self._stream()}
        return state | ({"sampler": self._sampler.state_dict()} if isinstance(self._sampler, Stateful) else {})

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
