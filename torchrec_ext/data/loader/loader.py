"""ChunkLoader: rows in memory, in files or on a device -> TowerBatches, resumable, the same on any number of ranks.

batches_of(), sessions_of(): build the source of the batches, for rows in memory or in files.

training_negatives(): builds the sampler of a LoaderConfig.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import (
    Chunk,
    Column,
    concatenate_rows,
    sample_digest,
    with_elements,
)
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.loader.blocks import BlockLayout
from torchrec_ext.data.loader.config import LoaderConfig as LoaderConfig
from torchrec_ext.data.loader.config import Sampling as Sampling
from torchrec_ext.data.loader.from_files import StreamedRows
from torchrec_ext.data.loader.on_device import DeviceCandidates, TowerRows
from torchrec_ext.data.loader.prefetch import prefetched
from torchrec_ext.data.loader.shared import (
    ITEM,
    SESSION,
    CatalogueCandidates,
    SessionCandidates,
    SharedCandidates,
)
from torchrec_ext.data.loader.table import item_table
from torchrec_ext.data.negatives.samplers import (
    Negatives,
    PopularityNegatives,
    UniformNegatives,
)
from torchrec_ext.data.order import Share
from torchrec_ext.data.prepared import Prepared, with_next
from torchrec_ext.drawn import DrawnStep
from torchrec_ext.schema import BatchSchema, DataError
from torchrec_ext.schema.validation import listed

Sampler = Negatives | CatalogueCandidates


def training_negatives(data: Prepared, config: LoaderConfig) -> Negatives | None:
    """Builds the sampler of ``config``; None if nothing is drawn.

    Training pairs are never drawn. Held-out pairs may be: to avoid them would tell the model which they are.
    """
    if not config.negatives:
        return None
    num_items = data.drawable()
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


def _check(
    config: LoaderConfig,
    sampler: Sampler | None,
    schema: BatchSchema,
    items: Chunk | None,
) -> None:
    """Refuses a sampler that does not fit the settings.

    Raises:
        ValueError: it is missing, or its batches would be others.
    """
    in_shared = sorted({*schema.shared} & {*(items or ())})
    if in_shared:
        raise ValueError(
            f"shared={listed(in_shared)}: each candidate has columns of its own; share the user's columns alone"
        )
    if isinstance(sampler, CatalogueCandidates):
        if config.negatives or config.device:
            raise ValueError(
                f"loader.negatives={config.negatives}, loader.device={config.device!r} with a loss over the catalogue: "
                "set negatives=0, leave device out"
            )
    elif config.negatives and (sampler is None or items is None):
        raise ValueError(
            f"loader.negatives={config.negatives} without negatives= and items=: pass a sampler and the items' "
            "features, or set it to 0"
        )


# The source of a rank's batches.
Batches = TowerRows | StreamedRows


def batches_of(
    chunk: Chunk | ParquetSource,
    schema: BatchSchema,
    config: LoaderConfig,
    items: Chunk | None,
    sampler: Sampler | None,
    share: Share,
    *,
    in_order: bool,
) -> Batches:
    """Builds the source of batches: rows in memory as tensors, shuffled as a whole, or rows in files.

    Rows whose items are looked up are read into memory: known pairs are there anyway.

    Raises:
        ValueError: the settings ask a device for what only the host can do.
    """
    place = torch.device(config.device or "cpu")
    shared: SharedCandidates | None = None
    ids: tuple[str, ...] = ()
    own: Negatives | None = None
    if isinstance(sampler, CatalogueCandidates):
        assert items is not None, "CatalogueCandidates without items="
        table = item_table(schema, items, place)
        shared = SharedCandidates(schema, config, table, sampler.items, share)
        ids = shared.ids
    elif items is not None:
        own = sampler
        ids = ("user_id", "item_id") if config.negatives else ("item_id",)
    without = [name for name in items or () if name not in ids]
    if not isinstance(chunk, Chunk):
        if shared is not None or (items is None and not config.device):
            return StreamedRows(chunk, schema, config, without, shared, share, in_order)
        layout = BlockLayout.of(schema, config, ids, without)
        layout.require(chunk)
        groups = []
        for group in chunk.groups:
            # Checked here, where a message can name the file.
            columns, floats = layout.checked(group, chunk.read(group, layout.names))
            # An id that is a label too stays an id, whose integers are exact.
            groups.append(
                {name: Column(each) for name, each in floats.items()} | columns
            )
        chunk = concatenate_rows(groups, layout.names)
    candidates: DeviceCandidates | SharedCandidates | None = shared
    if shared is None and items is not None:
        candidates = DeviceCandidates(
            schema, chunk, items, own, config.negatives, place
        )
    return TowerRows(
        chunk,
        schema,
        config,
        candidates,
        share,
        place,
        without=without,
        ahead=config.device is None,
    )


def sessions_of(
    chunk: Chunk,
    schema: BatchSchema,
    config: LoaderConfig,
    num_items: int,
    share: Share,
) -> TowerRows:
    """Builds the batches of sessions, a ragged column ``session`` of 2 or more items.

    Raises:
        ValueError: the settings ask for columns or draws that sessions do not have.
        DataError: a session without a target.
    """
    if config.label or config.weight:
        raise ValueError(
            f"loader.label={config.label!r}, loader.weight={config.weight!r}: sessions have no such columns; "
            "leave both out"
        )
    if config.sampling != "uniform":
        raise ValueError(
            f"loader.sampling={config.sampling!r}: candidates that all targets share are drawn "
            "uniformly; leave it out, and set loader.negatives=0 for the whole catalogue"
        )
    lengths = chunk[SESSION].lengths
    if chunk.num_rows and int(lengths.min()) < 2:
        row = int((lengths < 2).argmax())
        raise DataError(
            f"sequence {row} has {lengths[row]} items, must have 2 or more: the first is an input, the others are "
            "targets; leave it out"
        )
    return TowerRows(
        # Each rank divides its loss by the targets of all ranks.
        chunk.with_columns({"targets": Column(lengths - 1)}),
        schema,
        dataclasses.replace(config, negatives=0),
        SessionCandidates(schema, config, num_items, share),
        share,
        torch.device(config.device or "cpu"),
        without=[ITEM],
        total="targets",
        ahead=config.device is None,
    )


# Settings that change which samples a step has.
_STREAM_SETTINGS = (
    "batch_size",
    "negatives",
    "sampling",
    "popularity_exponent",
    "shuffle",
    "drop_last",
    "seed",
)
_AHEAD_ON_GPU = 2


class ChunkLoader:
    """Yields an epoch of TowerBatches from rows in memory, or from files of any size.

    The order and the negatives are functions of (seed, epoch). Each global step takes the next ``batch_size`` rows;
    rank r of R takes a contiguous part of them. All ranks take the same number of steps with batches of the same shape:
    missing rows are filled up by rows of weight 0 with empty bags, so every sample counts exactly once. With N
    negatives, a positive (label 1) is followed by its own N (label 0); candidates that all queries share come after the
    positives, see :class:`SharedCandidates`. Sessions have the candidates of a step beside them.

    Rows in memory are tensors, checked once and shuffled as a whole. Files are read while the epoch runs, unless
    negatives are drawn for their rows: :class:`StreamPlan` says in which order, and what each rank reads.

    Args:
        chunk: all rows, the same on every rank; or a :class:`ParquetSource` of them.
        schema: the columns that the model reads.
        config: see :class:`LoaderConfig`.
        items: row i holds the features of item i.
        negatives: sampler of the negatives; must be given if ``config`` asks for some. A row's index in ``chunk`` is
            its position.
        rank: r.
        world_size: R.
        in_order: whether, with ``shuffle=False`` and a source, each step has the next rows of the files, for which a
            rank decodes most blocks; False gives each rank a part of the files, so that one rank decodes each row, for
            figures that do not depend on the order.
        sessions: number of items of the catalogue, ids from 1 on, for rows that are sessions: a ragged column
            ``session``, of which each item but the first is a target. N ``negatives`` make batch_size x N candidates,
            drawn uniformly and shared by all targets of a step; 0 makes the whole catalogue the candidates.

    Attributes:
        depth: number of batches that a thread builds ahead, 2 with a CUDA device and else 0; it may be set.
        epoch: the epoch that it is in.
        hook: where :func:`drop_ids` and :class:`DynamicIdLoader` replace the ids of the batches.
        sessions: see above; None for other rows.

    Raises:
        DataError: an epoch would have no step; a source or chunk lacks a column; when iterated, a bad value, naming
            feature, value and row of ``chunk``, or file, row group and row.
    """

    def __init__(
        self,
        chunk: Chunk | ParquetSource,
        schema: BatchSchema,
        *,
        config: LoaderConfig,
        items: Chunk | None = None,
        negatives: Sampler | None = None,
        rank: int = 0,
        world_size: int = 1,
        in_order: bool = True,
        sessions: int | None = None,
    ) -> None:
        share = Share(rank=rank, world_size=world_size)
        if sessions is None:
            _check(config, negatives, schema, items)
        self.sessions = sessions
        # Of files an array column becomes columns of one number where a row group is
        # read.
        if isinstance(chunk, Chunk):
            chunk = with_elements(chunk, schema.dense)
        self._chunk = chunk
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if config.shuffle and world_size == 1 < ranks:
            warnings.warn(
                f"a loader of all rows on {ranks} ranks: each trains on every row; give rank= and world_size=, or "
                "shuffle=False where each shall see all",
                stacklevel=2,
            )
        names = chunk if isinstance(chunk, Chunk) else chunk.columns
        # A loss that compares rows reads no labels.
        unread = not (config.negatives or config.label) and schema.label_range
        if unread and sessions is None and "label" in names:
            warnings.warn(
                "loader.negatives=0 without loader.label: every row has label 1, and the rows' column 'label' is not "
                "read; give LoaderConfig(label='label')",
                stacklevel=2,
            )
        schema, self.hook = schema.with_hook()
        if items is not None:
            items = with_elements(items, schema.dense)
        # Padding up to a batch that no epoch fills would cost its time and memory.
        fitting_config = dataclasses.replace(
            config, batch_size=min(config.batch_size, max(chunk.num_rows, 1))
        )
        self._rows: Batches
        if sessions is None:
            self._rows = batches_of(
                chunk,
                schema,
                fitting_config,
                items,
                negatives,
                share,
                in_order=in_order,
            )
        else:
            assert isinstance(chunk, Chunk), "sessions are in memory"
            self._rows = sessions_of(chunk, schema, fitting_config, sessions, share)
        self.config = config
        self.num_samples = self._rows.num_rows
        # A rank on the CPU, perhaps of a host with GPUs, pins nothing: that would cost a
        # context of CUDA.
        on_cpu = dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO
        on_gpu = torch.cuda.is_available() and not on_cpu
        # Rows on a device: there is nothing for a thread to hide, and no copy to pin
        # memory for. On a CPU the thread and the step wait for each other at Python's
        # lock, which costs most models more than it hides.
        self._pin = False
        self.depth = 0
        if self._rows.ahead and on_gpu:
            self.depth = _AHEAD_ON_GPU
            self._pin = True
        self._go_to(0, 0)
        if not len(self):
            raise DataError(
                f"{self.num_samples} rows with loader.batch_size={config.batch_size} and "
                f"loader.drop_last={config.drop_last} make no step; give more rows or a smaller batch_size, or keep "
                "the last batch"
            )

    def __len__(self) -> int:
        """Number of steps in an epoch, the same on every rank."""
        return self.config.num_steps(self.num_samples)

    def set_epoch(self, epoch: int) -> None:
        """Starts ``epoch``, counted from 0, at its first step."""
        self._go_to(epoch, 0)
        # An epoch that was resumed on another number of ranks keeps its order; the next
        # one has this number's.
        if isinstance(self._rows, StreamedRows):
            self._rows.follow(None)

    def _go_to(self, epoch: int, step: int) -> None:
        self.epoch = epoch
        self._step = step
        self._start = step
        self._is_over = False

    def __iter__(self) -> Iterator[TowerBatch]:
        """Yields the epoch's batches; once after :meth:`load_state_dict`, the remaining ones.

        Raises:
            RuntimeError: it is called in several workers of a DataLoader, each of which would yield all rows.
        """
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise RuntimeError(
                f"{type(self).__name__} in {worker.num_workers} workers of a DataLoader: each would yield all rows; "
                "iterate over the loader itself, whose threads read ahead"
            )
        if self._is_over and self.config.shuffle:
            # As silent as with torch's DistributedSampler otherwise.
            warnings.warn(
                f"{type(self).__name__}: another pass over epoch {self.epoch}, in the same order; call "
                "set_epoch(epoch) before each pass",
                stacklevel=2,
            )
        start = self._start
        self._start = 0
        self._step = start
        batches = self._rows.batches(self.epoch, start)
        # In the thread that builds batches, if there is one: pinning copies them.
        if self._pin:
            batches = (batch.pin_memory() for batch in batches)
        for step, batch in enumerate(prefetched(batches, self.depth), start=start + 1):
            # Here and not in the thread: batches that nobody has taken yet do not
            # count.
            self._step = step
            yield batch
        self._is_over = True

    def steps(self, *, inside: bool = False) -> Iterator[DrawnStep | TowerBatch]:
        """Yields the steps: a :class:`DrawnStep` for rows on a device, else a batch.

        Args:
            inside: whether a captured step draws uniform negatives itself, id by id the same, and gathers lists of any
                length; otherwise rows with such lists are batches too.
        """
        rows = self._rows
        if (
            not isinstance(rows, TowerRows)
            or rows.ahead
            or not rows.draws_steps(inside=inside)
        ):
            yield from self
            return
        start = self._start
        self._start = 0
        drawn = rows.drawn(self.epoch, start, inside=inside)
        for step, item in enumerate(drawn, start=start + 1):
            self._step = step
            yield item

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Returns the position in the stream, as numbers, texts and tensors.

        Args:
            step: number of steps of this epoch that the caller has finished. A pipeline that fetches ahead must give
                it; by default it is the number of batches handed out (those that the prefetch thread has built
                do not count).

        Raises:
            ValueError: the epoch has no such step.
        """
        if step is not None and not 0 <= step <= len(self):
            raise ValueError(
                f"step={step}: epoch {self.epoch} has {len(self)} steps; give the number of those done in it"
            )
        return {
            "epoch": self.epoch,
            "step": self._step if step is None else step,
            "stream": self.stream_facts(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the saved position, on any number of ranks.

        Rows in files keep the order of the saved epoch until it ends, if it depends on the number of ranks.

        Raises:
            ValueError: the state belongs to another stream, whose remaining samples are different ones.
        """
        if isinstance(self._rows, StreamedRows):
            self._rows.follow(state["stream"])
        stream = self.stream_facts()
        # Facts that the state lacks are not compared: it may come from an earlier
        # version.
        then = dict(state["stream"])
        changes = [name for name, value in then.items() if value != stream.get(name)]
        if not changes:
            self._go_to(int(state["epoch"]), int(state["step"]))
            return
        was = "; ".join(
            f"{name} was {then[name]!r} and is {stream.get(name)!r}" for name in changes
        )
        raise ValueError(
            f"cannot resume with other batches: {was[:90]}; put settings and files back, or begin a new run "
            "with its weights (start.path)"
        )

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
) -> ChunkLoader:
    """Builds the loader of the training rows, with the negatives of ``config``; see :class:`ChunkLoader`."""
    if data.form == "sessions":
        rows = data.rows("train")
        before = with_next(rows[SESSION], rows[str(data.roles.item)].values)
        return ChunkLoader(
            Chunk({SESSION: before}),
            schema,
            config=config,
            rank=rank,
            world_size=world_size,
            sessions=data.drawable(),
        )
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
    )
