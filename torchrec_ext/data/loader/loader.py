"""ChunkLoader: rows in memory, in files or on a device -> TowerBatches, resumable, the same on any number of ranks.

Batches: the protocol of these three kinds of rows; on_host() and batches_on_device() build them.

training_negatives(): builds the sampler of a LoaderConfig; check_sampler(): checks a sampler against a config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from torchrec_ext.batch import DrawnStep, TowerBatch
from torchrec_ext.data.columns import Chunk, sample_digest, with_elements
from torchrec_ext.data.datasets.interactions import InteractionData
from torchrec_ext.data.datasets.interactions import labelled_rows as labelled_rows
from torchrec_ext.data.files.arrow import Source
from torchrec_ext.data.loader.candidates import OwnCandidates, SharedCandidates
from torchrec_ext.data.loader.config import LoaderConfig as LoaderConfig
from torchrec_ext.data.loader.config import Sampling as Sampling
from torchrec_ext.data.loader.epochs import BuiltAhead, Epochs, Share
from torchrec_ext.data.loader.from_files import StreamedRows
from torchrec_ext.data.loader.in_memory import MemoryRows
from torchrec_ext.data.loader.on_device import DeviceCandidates, ResidentRows, read_all
from torchrec_ext.data.negatives.hard import Index
from torchrec_ext.data.negatives.mixed import CatalogueCandidates, MixedCandidates
from torchrec_ext.data.negatives.registry import NEGATIVES
from torchrec_ext.data.negatives.samplers import Negatives, SampledData, TrainingSampler
from torchrec_ext.schema import BatchSchema

Sampler = Negatives | MixedCandidates | CatalogueCandidates


@runtime_checkable
class Stateful(Protocol):
    """A sampler with a state: its draws depend on more than seed, epoch and row."""

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """Returns the state behind the draws of ``epoch``."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state``: the next draws are those after it."""


@runtime_checkable
class Refreshable(Protocol):
    """A sampler of the items ranked high by the current model."""

    def refresh(self, index: Index) -> None:
        """Asks ``index`` for each user's best items."""


def training_negatives(data: InteractionData, config: LoaderConfig) -> Sampler | None:
    """Builds the sampler of ``config``; None if nothing is drawn (``negatives=0``, and not ``mixed``).

    Training pairs are never drawn. Held-out pairs may be: to avoid them would tell the model which they are. Candidates
    of ``mixed`` avoid nothing: ``is_known`` of :func:`in_batch_negatives` excludes the items that a user has taken.
    """
    kind: type[TrainingSampler] = NEGATIVES[config.sampling]
    if not kind.shared and not config.negatives:
        return None
    counts = data.popularity()[: data.num_items + 1]
    sampled = SampledData(
        num_items=data.num_items,
        users=data.known.users,
        items=data.known.items,
        counts=counts,
    )
    return kind.configured(config, sampled)  # type: ignore[return-value]  # each has the methods that `shared` implies


def check_sampler(
    config: LoaderConfig, sampler: Sampler | None, *, has_items: bool
) -> None:
    """Checks that a sampler fits ``config``.

    Raises:
        ValueError: a sampler is missing, or is of another kind or has other settings than ``config`` says.
    """
    if isinstance(sampler, CatalogueCandidates):
        _check_catalogue(config, has_items=has_items)
        return
    shared = NEGATIVES[config.sampling].shared
    if shared:
        setting = f"loader.shared_negatives={config.shared_negatives}"
        required_kind = "MixedCandidates"
    else:
        setting = f"loader.negatives={config.negatives}"
        required_kind = "a sampler with draw(users, positions, epoch, n)"
    if sampler is None and (shared or config.negatives):
        raise ValueError(
            f"{setting}, but no sampler was given; pass negatives=, or set it to 0"
        )
    if sampler is not None and isinstance(sampler, MixedCandidates) != shared:
        raise ValueError(
            f"loader.sampling={config.sampling!r} with negatives={type(sampler).__name__}: must be {required_kind}"
        )
    if shared and not has_items:
        raise ValueError(
            f"loader.sampling={config.sampling!r} without items: the features of extra candidates are looked up there; "
            "pass items="
        )
    if isinstance(sampler, MixedCandidates):
        extra = sampler.mixed.extra
        batch_size = sampler.mixed.batch_size
        if (extra, batch_size) != (config.shared_negatives, config.batch_size):
            raise ValueError(
                f"MixedNegatives(extra={extra}, batch_size={batch_size}) with "
                f"loader.shared_negatives={config.shared_negatives} and loader.batch_size={config.batch_size}: log_q "
                "would be that of other batches; give both the same"
            )


def _check_catalogue(config: LoaderConfig, *, has_items: bool) -> None:
    for name in ("negatives", "shared_negatives"):
        if getattr(config, name):
            raise ValueError(
                f"loader.{name}={getattr(config, name)} with loader.sampling={config.sampling!r} and a loss over the "
                "catalogue: all items are candidates already; leave both out, with loader.negatives=0"
            )
    if config.device:
        raise ValueError(
            f"loader.device={config.device!r} with a loss over the catalogue: its batches are made on the host; leave "
            "loader.device out"
        )
    if not has_items:
        raise ValueError(
            "CatalogueCandidates without items: the features of all items are looked up there; pass items="
        )


class Batches(Protocol):
    """The source of a rank's batches: :class:`MemoryRows`, :class:`StreamedRows` or :class:`ResidentRows`.

    ``num_rows`` counts the rows of all ranks; ``ahead`` says whether a thread may build batches, which are then pinned.
    """

    num_rows: int
    ahead: bool

    def fingerprint(self) -> dict[str, Any]:
        """Returns the facts about the rows behind their order; the loader's settings come on top."""

    def batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """Yields the batches of an epoch from step ``start`` on, equally many on every rank."""


def on_host(
    chunk: Chunk | Source,
    schema: BatchSchema,
    config: LoaderConfig,
    items: Chunk | None,
    sampler: Sampler | None,
    share: Share,
    *,
    in_order: bool,
) -> Batches:
    """Builds the source of batches on the host, for rows in memory or in files.

    Raises:
        ValueError: a frequency estimate with a source.
    """
    pairing: OwnCandidates | SharedCandidates | None
    if isinstance(sampler, MixedCandidates | CatalogueCandidates):
        assert items is not None, "checked by check_sampler"
        pairing = SharedCandidates(schema, config, items, sampler, share)
    else:
        pairing = OwnCandidates(schema, config, items, sampler, share)
    estimator = None
    if isinstance(sampler, MixedCandidates) and sampler.estimates:
        estimator = sampler
    if isinstance(chunk, Chunk):
        return MemoryRows(chunk, schema, config, pairing, share, estimator)
    if estimator:
        raise ValueError(
            "a frequency estimate with a source of rows: a rank sees its own rows only; give MixedCandidates the "
            "counts of the items, or rows in memory"
        )
    # Rows that come as they are go straight from their blocks into the batch, each
    # value copied once.
    if items is None and not config.negatives:
        pairing = None
    return StreamedRows(chunk, schema, config, items, pairing, share, in_order=in_order)


def batches_on_device(
    chunk: Chunk | Source,
    schema: BatchSchema,
    config: LoaderConfig,
    items: Chunk | None,
    sampler: Sampler | None,
    share: Share,
    device: torch.device,
) -> Batches:
    """Puts the rows on ``device``, to build their batches there.

    Raises:
        ValueError: the settings ask for what only the host can do.
    """
    where = f"device={device} with loader."
    if isinstance(sampler, MixedCandidates | CatalogueCandidates):
        raise ValueError(
            f"{where}sampling={config.sampling!r}: its candidates are drawn on the host; leave device out"
        )
    if config.negatives and items is None:
        raise ValueError(
            f"{where}negatives={config.negatives} without items: drawn items need features; pass items="
        )
    ids: tuple[str, ...] = ()
    if config.negatives:
        ids = ("user_id", "item_id")
    elif items is not None:
        ids = ("item_id",)
    if not isinstance(chunk, Chunk):
        chunk = read_all(
            chunk,
            schema,
            config,
            ids,
            [name for name in items or () if name not in ids],
        )
    candidates = None
    if items is not None:
        candidates = DeviceCandidates(
            schema, chunk, items, sampler, config.negatives, device
        )
    return ResidentRows(chunk, schema, config, candidates, share, device)


# Settings that change which samples a step has.
_STREAM_SETTINGS = (
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
    """Yields an epoch of TowerBatches from rows in memory, or from files of any size.

    The order and the negatives are functions of (seed, epoch). Each global step takes the next ``batch_size`` rows;
    rank r of R takes a contiguous part of them. All ranks take the same number of steps with batches of the same shape:
    missing rows are filled up by rows of weight 0 with empty bags, so every sample counts exactly once. With N
    negatives, a positive (label 1) is followed by its own N (label 0); candidates that all queries share come after the
    positives, see :class:`SharedCandidates`.

    Rows in memory are shuffled as a whole. Files are read while the epoch runs: :class:`StreamPlan` says in which
    order, and what each rank reads.

    Args:
        chunk: all rows, the same on every rank; or a :class:`Source` of them, such as :class:`ParquetSource`.
        schema: the columns that the model reads.
        config: see :class:`LoaderConfig`.
        items: row i holds the features of item i.
        negatives: sampler of the negatives; must be given if ``config`` asks for some. A row's index in ``chunk`` is
            its position. If draws depend on more than seed, epoch and position, the sampler's state is part of the
            loader's.
        refresh: function from an epoch to an index of each user's best items, for :class:`HardNegatives`. It is called
            when :meth:`set_epoch` begins an epoch other than the first, on every rank, so that it may use collectives.
            All draws of the first epoch are uniform.
        rank: r.
        world_size: R.
        device: device that holds all rows and items as tensors, for a set that fits; gathers and draws are made there,
            in the order of rows in memory and with the same draws (uniform and by popularity); ``config.device`` by
            default.
        in_order: whether, with ``shuffle=False`` and a source, each step has the next rows of the files, for which a
            rank decodes most blocks; False gives each rank a part of the files, so that one rank decodes each row, for
            figures that do not depend on the order.

    Raises:
        DataError: a source or chunk lacks a column; when iterated, a bad value, naming feature, value and row of
            ``chunk``, or file, row group and row.

    Example:
        Hard negatives by a search of your own: ``vectors()`` returns (U, D), row u is the vector of user u, and
        ``index`` searches the items' (more than ``k``, since known ones are dropped)::

            def refresh(epoch: int) -> Index:
                queries = vectors()
                return lambda users: index.search(queries[users], 200)[1]

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
        in_order: bool = True,
    ) -> None:
        share = Share(rank=rank, world_size=world_size)
        check_sampler(config, negatives, has_items=items is not None)
        if refresh is not None and not isinstance(negatives, Refreshable):
            refreshed = " and ".join(
                kind.__name__ for kind in NEGATIVES.values() if kind.refreshed
            )
            raise ValueError(
                f"refresh with negatives={type(negatives).__name__}: only {refreshed} are refreshed; leave it out"
            )
        self._sampler = negatives
        self._refresh = refresh
        device = device or config.device
        # Of files an array column becomes columns of one number where a row group is
        # read.
        if isinstance(chunk, Chunk):
            chunk = with_elements(chunk, schema.dense)
            rows = chunk.num_rows
        else:
            rows = sum(group.rows for group in chunk.groups)
        self._chunk = chunk
        if items is not None:
            items = with_elements(items, schema.dense)
        # Padding up to a batch that no epoch fills would cost its time and memory.
        fitting_config = dataclasses.replace(
            config, batch_size=min(config.batch_size, max(rows, 1))
        )
        if device is None:
            self._rows = on_host(
                chunk,
                schema,
                fitting_config,
                items,
                negatives,
                share,
                in_order=in_order,
            )
        else:
            self._rows = batches_on_device(
                chunk,
                schema,
                fitting_config,
                items,
                negatives,
                share,
                torch.device(device),
            )
        super().__init__(config, self._rows.num_rows, "rows")
        # Rows on a device: there is nothing for a thread to hide, and no copy to pin
        # memory for.
        if not self._rows.ahead:
            self.ahead = BuiltAhead(0)
            self._pin = False

    def set_epoch(self, epoch: int) -> None:
        """Starts ``epoch``, counted from 0, at its first step; from the second epoch on refreshes hard negatives."""
        super().set_epoch(epoch)
        # An epoch that was resumed on another number of ranks keeps its order; the next
        # one has this number's.
        if isinstance(self._rows, StreamedRows):
            self._rows.follow(None)
        if (
            epoch
            and self._refresh is not None
            and isinstance(self._sampler, Refreshable)
        ):
            self._sampler.refresh(self._refresh(epoch))

    def epoch_batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """See :meth:`Epochs.epoch_batches`."""
        return self._rows.batches(epoch, start)

    def steps(self) -> Iterator[DrawnStep | TowerBatch]:
        """Yields the steps: a :class:`DrawnStep` for rows on a device with one id in each bag, else a batch."""
        if not (isinstance(self._rows, ResidentRows) and self._rows.fixed):
            yield from self
            return
        start = self._start
        self._start = 0
        for step, item in enumerate(
            self._rows.drawn(self._epoch, start), start=start + 1
        ):
            self._step = step
            yield item

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Returns the position in the stream (:meth:`Epochs.state_dict`), with the sampler's state if it has one."""
        state = super().state_dict(step=step)
        if isinstance(self._sampler, Stateful):
            state["sampler"] = self._sampler.state_dict(self._epoch)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Epochs.load_state_dict`.

        Rows in files keep the order of the saved epoch until it ends, if it depends on the number of ranks.
        """
        if isinstance(self._rows, StreamedRows):
            self._rows.follow(state["stream"])
        super().load_state_dict(state)
        if isinstance(self._sampler, Stateful):
            self._sampler.load_state_dict(state["sampler"])
        # Saved after an epoch's last step but before its end: an estimate has still to
        # count the epoch.
        if isinstance(self._sampler, MixedCandidates) and self._start == len(self):
            for _ in self._rows.batches(self._epoch, self._start):
                pass

    def stream_facts(self) -> dict[str, Any]:
        """Returns the settings and facts behind the stream of samples, without epoch and sampler's state."""
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
    data: InteractionData,
    schema: BatchSchema,
    config: LoaderConfig,
    *,
    refresh: Callable[[int], Index] | None = None,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str | None = None,
) -> ChunkLoader:
    """Builds the loader of ``data.train`` with the negatives of ``config``; see :class:`ChunkLoader`.

    Raises:
        ValueError: a sampler of hard negatives without ``refresh``, which would stay uniform for ever.
    """
    refreshed = NEGATIVES[config.sampling].refreshed and config.negatives > 0
    if not refreshed:
        refresh = None
    elif refresh is None:
        raise ValueError(
            f"loader.sampling={config.sampling!r} without refresh: nobody says which items are hard; pass refresh="
        )
    negatives: Sampler | None
    if schema.catalogue:
        negatives = CatalogueCandidates(np.arange(1, data.num_items + 1))
    else:
        negatives = training_negatives(data, config)
    return ChunkLoader(
        data.train,
        schema,
        config=config,
        items=data.items,
        negatives=negatives,
        refresh=refresh,
        rank=rank,
        world_size=world_size,
        device=device,
    )
