"""ChunkLoader: rows in memory, in files or on a device -> TowerBatches, resumable, the same on any number of ranks.

Batches: the protocol of these kinds of rows; batches_of() builds them.

training_negatives(): builds the sampler of a LoaderConfig.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch

from torchrec_ext.batch import DrawnStep, TowerBatch
from torchrec_ext.data.columns import Chunk, sample_digest, with_elements
from torchrec_ext.data.files.arrow import Source
from torchrec_ext.data.loader.candidates import RowsWithCandidates, SharedCandidates
from torchrec_ext.data.loader.config import LoaderConfig as LoaderConfig
from torchrec_ext.data.loader.config import Sampling as Sampling
from torchrec_ext.data.loader.epochs import BuiltAhead, Epochs, Share
from torchrec_ext.data.loader.from_files import StreamedRows
from torchrec_ext.data.loader.on_device import DeviceCandidates, ResidentRows, read_all
from torchrec_ext.data.negatives.mixed import CatalogueCandidates, MixedNegatives
from torchrec_ext.data.negatives.samplers import (
    Negatives,
    PopularityNegatives,
    UniformNegatives,
)
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.schema import BatchSchema

Sampler = Negatives | MixedNegatives | CatalogueCandidates


def training_negatives(data: Prepared, config: LoaderConfig) -> Sampler | None:
    """Builds the sampler of ``config``; None if nothing is drawn (``negatives=0``, and not ``mixed``).

    Training pairs are never drawn. Held-out pairs may be: to avoid them would tell the model which they are. Candidates
    of ``mixed`` avoid nothing: ``is_known`` of :func:`in_batch_negatives` excludes the items that a user has taken.
    """
    mixed = config.sampling == "mixed"
    if not (mixed or config.negatives):
        return None
    num_items = data.drawable()
    if mixed:
        return MixedNegatives(
            num_items,
            config.shared_negatives,
            config.batch_size,
            data.popularity,
            config.seed,
        )
    known = data.taken("train")
    if config.sampling == "uniform":
        return UniformNegatives(num_items, known.users, known.items, config.seed)
    return PopularityNegatives(
        num_items,
        known.users,
        known.items,
        config.seed,
        exponent=config.popularity_exponent,
        counts=data.popularity,
    )


def _check(config: LoaderConfig, sampler: Sampler | None, *, has_items: bool) -> None:
    """Refuses a sampler that does not fit the settings.

    Raises:
        ValueError: it is missing, or its batches would be others.
    """
    shared = isinstance(sampler, MixedNegatives | CatalogueCandidates)
    if shared and not has_items:
        raise ValueError(
            f"{type(sampler).__name__} without items: the features of candidates are looked up there; pass items="
        )
    if isinstance(sampler, CatalogueCandidates):
        if config.negatives or config.shared_negatives or config.device:
            raise ValueError(
                f"loader.negatives={config.negatives}, loader.shared_negatives={config.shared_negatives}, "
                f"loader.device={config.device!r} with a loss over the catalogue: set negatives=0, leave the others out"
            )
        return
    sizes = (config.shared_negatives, config.batch_size)
    if (
        isinstance(sampler, MixedNegatives)
        and (sampler.extra, sampler.batch_size) != sizes
    ):
        raise ValueError(
            f"MixedNegatives(extra={sampler.extra}, batch_size={sampler.batch_size}) with loader.shared_negatives="
            f"{sizes[0]} and loader.batch_size={sizes[1]}: log_q would be of other batches; give both the same"
        )
    if (config.negatives and (sampler is None or shared)) or (
        config.shared_negatives and not shared
    ):
        raise ValueError(
            f"loader.negatives={config.negatives}, loader.shared_negatives={config.shared_negatives} with "
            f"negatives={type(sampler).__name__}: pass a sampler of these, or set both to 0"
        )


class Batches(Protocol):
    """The source of a rank's batches: :class:`ResidentRows`, :class:`RowsWithCandidates` or :class:`StreamedRows`.

    ``num_rows`` counts the rows of all ranks; ``ahead`` says whether a thread may build batches, which are then pinned.
    """

    num_rows: int
    ahead: bool

    def fingerprint(self) -> dict[str, Any]:
        """Returns the facts about the rows behind their order; the loader's settings come on top."""

    def batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """Yields the batches of an epoch from step ``start`` on, equally many on every rank."""


def batches_of(
    chunk: Chunk | Source,
    schema: BatchSchema,
    config: LoaderConfig,
    items: Chunk | None,
    sampler: Sampler | None,
    share: Share,
    device: torch.device | None,
    *,
    in_order: bool,
) -> Batches:
    """Builds the source of batches: rows in memory as tensors, shuffled as a whole, or rows in files.

    Rows whose items are looked up are read into memory: known pairs are there anyway.

    Raises:
        ValueError: the settings ask a device for what only the host can do.
    """
    where = f"device={device} with loader."
    if isinstance(sampler, MixedNegatives | CatalogueCandidates):
        assert items is not None, "checked by ChunkLoader"
        if device is not None:
            raise ValueError(
                f"{where}sampling={config.sampling!r}: its candidates are drawn on the host; leave device out"
            )
        shared = SharedCandidates(schema, config, items, sampler, share)
        if isinstance(chunk, Chunk):
            return RowsWithCandidates(chunk, schema, config, shared, share)
        return StreamedRows(chunk, schema, config, items, shared, share, in_order)
    if config.negatives and items is None:
        raise ValueError(
            f"loader.negatives={config.negatives} without items: drawn items need features; pass items="
        )
    ids: tuple[str, ...] = ()
    if config.negatives:
        ids = ("user_id", "item_id")
    elif items is not None:
        ids = ("item_id",)
    if not isinstance(chunk, Chunk):
        if items is None and device is None:
            return StreamedRows(chunk, schema, config, None, None, share, in_order)
        without = [name for name in items or () if name not in ids]
        chunk = read_all(chunk, schema, config, ids, without)
    candidates = None
    place = device or torch.device("cpu")
    if items is not None:
        candidates = DeviceCandidates(
            schema, chunk, items, sampler, config.negatives, place
        )
    return ResidentRows(
        chunk, schema, config, candidates, share, place, ahead=device is None
    )


# Settings that change which samples a step has.
_STREAM_SETTINGS = (
    "batch_size",
    "negatives",
    "sampling",
    "popularity_exponent",
    "shared_negatives",
    "shuffle",
    "drop_last",
    "seed",
)


class ChunkLoader(Epochs):
    """Yields an epoch of TowerBatches from rows in memory, or from files of any size.

    The order and the negatives are functions of (seed, epoch). Each global step takes the next ``batch_size`` rows;
    rank r of R takes a contiguous part of them. All ranks take the same number of steps with batches of the same shape:
    missing rows are filled up by rows of weight 0 with empty bags, so every sample counts exactly once. With N
    negatives, a positive (label 1) is followed by its own N (label 0); candidates that all queries share come after the
    positives, see :class:`SharedCandidates`.

    Rows in memory are tensors, checked once and shuffled as a whole. Files are read while the epoch runs, unless
    negatives are drawn for their rows: :class:`StreamPlan` says in which order, and what each rank reads.

    Args:
        chunk: all rows, the same on every rank; or a :class:`Source` of them, such as :class:`ParquetSource`.
        schema: the columns that the model reads.
        config: see :class:`LoaderConfig`.
        items: row i holds the features of item i.
        negatives: sampler of the negatives; must be given if ``config`` asks for some. A row's index in ``chunk`` is
            its position.
        rank: r.
        world_size: R.
        device: device that holds all rows and items as tensors, for a set that fits; gathers and draws are made there,
            in the order of rows in memory and with the same draws (uniform and by popularity); ``config.device`` by
            default.
        in_order: whether, with ``shuffle=False`` and a source, each step has the next rows of the files, for which a
            rank decodes most blocks; False gives each rank a part of the files, so that one rank decodes each row, for
            figures that do not depend on the order.

    Attributes:
        hook: where :class:`IdDropout` and :class:`DynamicIdLoader` replace the ids of the batches.

    Raises:
        DataError: a source or chunk lacks a column; when iterated, a bad value, naming feature, value and row of
            ``chunk``, or file, row group and row.
    """

    def __init__(
        self,
        chunk: Chunk | Source,
        schema: BatchSchema,
        *,
        config: LoaderConfig,
        items: Chunk | None = None,
        negatives: Sampler | None = None,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | None = None,
        in_order: bool = True,
    ) -> None:
        share = Share(rank=rank, world_size=world_size)
        _check(config, negatives, has_items=items is not None)
        device = device or config.device
        # Of files an array column becomes columns of one number where a row group is
        # read.
        if isinstance(chunk, Chunk):
            chunk = with_elements(chunk, schema.dense)
            rows = chunk.num_rows
        else:
            rows = sum(group.rows for group in chunk.groups)
        self._chunk = chunk
        schema, self.hook = schema.with_hook()
        if items is not None:
            items = with_elements(items, schema.dense)
        # Padding up to a batch that no epoch fills would cost its time and memory.
        fitting_config = dataclasses.replace(
            config, batch_size=min(config.batch_size, max(rows, 1))
        )
        self._rows = batches_of(
            chunk,
            schema,
            fitting_config,
            items,
            negatives,
            share,
            None if device is None else torch.device(device),
            in_order=in_order,
        )
        super().__init__(config, self._rows.num_rows, "rows")
        # Rows on a device: there is nothing for a thread to hide, and no copy to pin
        # memory for.
        if not self._rows.ahead:
            self.ahead = BuiltAhead(0)
            self._pin = False

    def set_epoch(self, epoch: int) -> None:
        """Starts ``epoch``, counted from 0, at its first step."""
        super().set_epoch(epoch)
        # An epoch that was resumed on another number of ranks keeps its order; the next
        # one has this number's.
        if isinstance(self._rows, StreamedRows):
            self._rows.follow(None)

    def epoch_batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """See :meth:`Epochs.epoch_batches`."""
        return self._rows.batches(epoch, start)

    def steps(self) -> Iterator[DrawnStep | TowerBatch]:
        """Yields the steps: a :class:`DrawnStep` for rows on a device with one id in each bag, else a batch."""
        rows = self._rows
        if not (isinstance(rows, ResidentRows) and rows.fixed and not rows.ahead):
            yield from self
            return
        start = self._start
        self._start = 0
        for step, item in enumerate(rows.drawn(self._epoch, start), start=start + 1):
            self._step = step
            yield item

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Epochs.load_state_dict`.

        Rows in files keep the order of the saved epoch until it ends, if it depends on the number of ranks.
        """
        if isinstance(self._rows, StreamedRows):
            self._rows.follow(state["stream"])
        super().load_state_dict(state)

    def stream_facts(self) -> dict[str, Any]:
        """Returns the settings and facts behind the stream of samples, without the epoch."""
        settings = {name: getattr(self.config, name) for name in _STREAM_SETTINGS}
        return self._rows.fingerprint() | {"content": self._content} | settings

    @cached_property
    def _content(self) -> str:
        return (
            sample_digest(self._chunk)
            if isinstance(self._chunk, Chunk)
            else self._chunk.digest()
        )


def training_loader(
    data: Prepared,
    schema: BatchSchema,
    config: LoaderConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str | None = None,
) -> ChunkLoader:
    """Builds the loader of the training rows, with the negatives of ``config``; see :class:`ChunkLoader`."""
    items = None
    # Labelled rows have the columns of their own items.
    if data.form != "labels" or schema.catalogue:
        items = data.items
    everything = CatalogueCandidates(data.item_ids) if schema.catalogue else None
    return ChunkLoader(
        data.training_rows((config.label, config.weight)),
        schema,
        config=config,
        items=items,
        negatives=everything or training_negatives(data, config),
        rank=rank,
        world_size=world_size,
        device=device,
    )
