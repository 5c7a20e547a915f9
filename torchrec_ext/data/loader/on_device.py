"""ResidentRows: all rows as tensors on one device, to gather batches there.

DeviceCandidates: draws for rows on a device, made on the host, and the features of the drawn items.
RowsWithDraws: the same rows for a captured step that draws its uniform negatives itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import DrawnStep, TowerBatch
from torchrec_ext.data.columns import Array, Chunk, Column, Int64, concatenate_rows
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.loader.batch import (
    Answers,
    RowColumns,
    assemble,
    known_items,
    padded,
    ragged_lists,
)
from torchrec_ext.data.loader.blocks import BlockLayout
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.epochs import Share, order_of
from torchrec_ext.data.loader.shared import StepCandidates, StepRows
from torchrec_ext.data.loader.table import DeviceTable, item_table, table_of
from torchrec_ext.data.negatives.in_step import DrawTensors, TensorDraws
from torchrec_ext.data.negatives.samplers import Negatives, UniformNegatives
from torchrec_ext.schema import BatchSchema, DataError, RowNumbers


class Drawn(NamedTuple):
    """``ids`` (B, 1 + N) int64, the positive first, and their ``log_q``, float32, or None without negatives.

    ``on_host`` are the ids in numpy; None if a step has drawn them on its device.
    """

    ids: Tensor
    log_q: Tensor | None = None
    on_host: Int64 | None = None

    def part(self, start: int, stop: int) -> Drawn:
        """Returns the candidates of rows ``start`` to ``stop``, views of these."""
        log_q = None if self.log_q is None else self.log_q[start:stop]
        on_host = None if self.on_host is None else self.on_host[start:stop]
        return Drawn(self.ids[start:stop], log_q, on_host)

    def copied(self) -> Drawn:
        """Returns copies, so that a batch owns its memory."""
        log_q = None if self.log_q is None else self.log_q.clone()
        return Drawn(self.ids.clone(), log_q, self.on_host)


class DeviceCandidates:
    """The candidates of rows: each row's item and N negatives, the same as for rows on the host.

    They are drawn in numpy, for many steps at once, and copied: torch takes several times as long, on a GPU too.

    Args:
        schema: the columns of a batch.
        rows: all rows.
        items: row i holds the features of item i.
        sampler: sampler of the negatives; None for N = 0.
        negatives: N.
        device: device of the rows.

    Raises:
        DataError: an item has no features, or a feature is out of range.
    """

    def __init__(
        self,
        schema: BatchSchema,
        rows: Chunk,
        items: Chunk,
        sampler: Negatives | None,
        negatives: int,
        device: torch.device,
    ) -> None:
        self.ids = ("user_id", "item_id") if negatives else ("item_id",)
        self.table = item_table(schema, items, device)
        positives = known_items(
            schema, items.num_rows, rows["item_id"].values, np.arange(rows.num_rows)
        )
        self._positives = positives.astype(np.int64)
        self._count = negatives
        self._device = device
        self._sampler = sampler
        self._users: Int64 | None = None
        if sampler is not None and negatives:
            self._users = rows["user_id"].values.astype(np.int64)

    def in_step(self) -> tuple[TensorDraws, list[Tensor]] | None:
        """Returns what a captured step draws by; None if the host must: for other than uniform negatives.

        The tensors are (N,) positives, (N,) log q, and those of the draws.
        """
        sampler = self._sampler
        if self._users is None or not isinstance(sampler, UniformNegatives):
            return None
        known = sampler.known
        if known.bitmap is None or not known.num_free[known.row_of(self._users)].all():
            return None
        item_ids = np.arange(1, known.num_items + 1)
        draws = TensorDraws(sampler, self._users, item_ids, self._count)
        tensors = [
            torch.from_numpy(self._positives),
            torch.from_numpy(sampler.log_q(self._users, np.int64(1))),
            *draws.tensors,
        ]
        return draws, [tensor.to(self._device) for tensor in tensors]

    def draw(self, rows: Int64, epoch: int) -> Drawn:
        """Draws the candidates of the rows with the numbers ``rows`` (B,)."""
        ids = self._positives[rows][:, None]
        if self._sampler is None or self._users is None:
            return Drawn(moved(ids, self._device), None, ids)
        users = self._users[rows]
        negatives, log_q = self._sampler.draw(users, rows, epoch, self._count)
        positive_log_q = self._sampler.log_q(users, np.maximum(ids[:, 0], 1))
        ids = np.concatenate([ids, negatives], axis=1)
        log_q = np.concatenate([positive_log_q[:, None], log_q], axis=1)
        return Drawn(moved(ids, self._device), moved(log_q, self._device), ids)


def moved(array: Array, device: torch.device) -> Tensor:
    """Copies an array to a device; to a GPU by page-locked memory, so that nobody waits."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


# Rows drawn for at a time: one draw for many small steps.
_ROWS_DRAWN = 1 << 16


class _HostStep(NamedTuple):
    """A step of an epoch: (B,) numbers of this rank's rows, and what the host knows of them.

    Args:
        number: number of the step.
        rows: on the device.
        on_host: on the host.
        total_weight: weight of the global batch, ().
        candidates: what was drawn; None without negatives, and where the step draws.
        is_full: whether the global batch is.
    """

    number: int
    rows: Tensor
    on_host: Int64
    total_weight: Tensor
    candidates: Drawn | None
    is_full: bool


class _Tables(NamedTuple):
    """The tables behind a batch: its rows, and the features of its candidates."""

    rows: DeviceTable
    items: DeviceTable | None

    @property
    def present(self) -> list[DeviceTable]:
        """The tables that are not None."""
        return [table for table in self if table is not None]

    def over(
        self, tensors: Sequence[Tensor], room: Mapping[str, int] | None = None
    ) -> _Tables:
        """Returns these tables over other tensors; see :meth:`DeviceTable.over`."""
        count = len(self.rows.tensors)
        items = self.items
        if items is not None:
            items = items.over(tensors[count:], room)
        return _Tables(self.rows.over(tensors[:count], room), items)


def _with(columns: RowColumns, others: RowColumns) -> RowColumns:
    return RowColumns(columns.bags | others.bags, columns.numbers | others.numbers)


class ResidentRows:
    """Builds batches of rows that are tensors on one device, shuffled as a whole.

    From the host come an epoch's order, its number of steps and the number of ids in each step's bags: a step waits for
    nothing.

    Args:
        rows: all rows, checked here, once.
        schema: the columns of a batch.
        config: see :class:`LoaderConfig`.
        candidates: the items' features and the draws, for each row or for the step; None if rows come as they are.
        share: this rank's share of each global batch.
        device: device of the tensors.
        without: columns of the schema that the rows need not have.
        total: column of numbers whose sum is the weight of a batch; that of the weights by default.
        ahead: whether a thread may build batches ahead; a step is then never handed out before its batch is made.
    """

    def __init__(
        self,
        rows: Chunk,
        schema: BatchSchema,
        config: LoaderConfig,
        candidates: DeviceCandidates | StepCandidates | None,
        share: Share,
        device: torch.device,
        *,
        without: Sequence[str] = (),
        total: str | None = None,
        ahead: bool = False,
    ) -> None:
        self.ahead = ahead
        self.num_rows = rows.num_rows
        self._config = config
        self._share = share
        self._device = device
        self._total = total or config.weight
        # Sessions are dealt to the ranks by their lengths.
        self._lengths = rows[total].values if total else None
        self._candidates: DeviceCandidates | None = None
        self._of_step: StepCandidates | None = None
        if isinstance(candidates, DeviceCandidates):
            self._candidates = candidates
        else:
            self._of_step = candidates
        ids = candidates.ids if candidates else ()
        layout = BlockLayout.of(schema, config, ids, without)
        if total:
            layout = dataclasses.replace(layout, floats=(*layout.floats, total))
        config.check_columns(layout.names, rows)
        table = table_of(layout, rows, "the rows in memory", device)
        items = self._candidates.table if self._candidates else None
        self._tables = _Tables(table, items)
        self._schema = schema
        # Rows of a batch, padding included, and candidates of each.
        self._users = share.rows(config.batch_size)
        self._width = 1 + config.negatives
        ragged = [name for each in self._tables.present for name in each.ragged]
        self._ragged = ragged
        self._lists = ragged_lists(schema, ragged)

    def fingerprint(self) -> dict[str, Any]:
        """Returns the facts about the rows behind their order; the loader's settings come on top."""
        return {"rows": self.num_rows}

    def batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """Yields the batches of an epoch from step ``start`` on, equally many on every rank."""
        for step in self._steps(epoch, start):
            yield self._made(epoch, step)

    def _steps(
        self, epoch: int, start: int, *, draws: bool = True
    ) -> Iterator[_HostStep]:
        """Yields the steps of an epoch from ``start`` on; without ``draws`` the candidates are left out."""
        order = order_of(self._config, self.num_rows, epoch)
        numbers = moved(order, self._device)
        size = self._config.batch_size
        parts = []
        for step in range(start, self._config.num_steps(self.num_rows)):
            whole = slice(step * size, min((step + 1) * size, self.num_rows))
            part = self._share.part(whole.stop - whole.start)
            mine: slice | Int64 = slice(
                whole.start + part.start, whole.start + part.stop
            )
            if self._lengths is not None:
                mine = whole.start + self._share.dealt(self._lengths[order[whole]])
            parts.append((whole, mine))
        candidates: Iterator[Drawn | None] = repeat(None)
        if draws and self._candidates is not None:
            candidates = self._draws([order[mine] for _, mine in parts], epoch)
        for step, (whole, mine) in enumerate(parts, start=start):
            yield _HostStep(
                step,
                numbers[mine],
                order[mine],
                self._total_weight(numbers[whole]),
                next(candidates),
                is_full=whole.stop - whole.start == size,
            )

    def _made(self, epoch: int, step: _HostStep) -> TowerBatch:
        """Builds a step's batch by what the host knows: op by op a captured step's way takes several times as long."""
        candidates: Drawn | None = None
        if step.candidates is not None:
            candidates = step.candidates.copied()
        elif self._candidates is not None:
            candidates = self._candidates.draw(step.on_host, epoch)
        # Where a thread may build them, the host holds the rows and waits for nobody.
        totals = {} if self.ahead else self._counts(step.on_host, candidates)
        if self._of_step is not None:
            columns = self._tables.rows.columns(step.rows, totals)
            rows = StepRows(columns, step.rows, step.total_weight)
            batch = self._of_step.batch(rows, epoch, step.number)
        else:
            batch = self.batch(
                self._tables, step.rows, candidates, totals, step.total_weight
            )
        return self._with_lengths(batch, step.on_host)

    def _with_lengths(self, batch: TowerBatch, rows: Int64) -> TowerBatch:
        """Tells a batch the lengths of its rows' lists: a session's buckets depend on them, and a GPU is not asked."""
        if self._device.type != "cpu":
            batch.host_lengths = {}
            for name, lengths in self._tables.rows.host_lengths.items():
                if name not in self._schema.shared:
                    of_rows = torch.from_numpy(lengths[rows].repeat(self._width))
                    batch.host_lengths[name] = padded(of_rows, len(batch))
        return batch

    def _draws(self, steps: list[Int64], epoch: int) -> Iterator[Drawn]:
        """Yields the candidates of each step's rows; those of several steps are drawn at once."""
        assert self._candidates is not None
        at_once = max(1, _ROWS_DRAWN // self._share.rows(self._config.batch_size))
        for first in range(0, len(steps), at_once):
            some = steps[first : first + at_once]
            try:
                ahead = self._candidates.draw(np.concatenate(some), epoch)
            except DataError:
                # A user of a later step has no negative; that step says so when its
                # turn comes.
                for rows in some:
                    yield self._candidates.draw(rows, epoch)
                continue
            start = 0
            for rows in some:
                stop = start + len(rows)
                yield ahead.part(start, stop)
                start = stop

    def draws_steps(self, *, inside: bool) -> bool:
        """Whether steps can be handed out before their batches are made, see :meth:`drawn`.

        No batch may need other rows' candidates, or ids that are replaced. Lists of any length are gathered ``inside``
        a captured step alone, where as many ids are read as no step exceeds.
        """
        is_alone = self._of_step is None and self._schema.replaces is None
        if not self._ragged:
            return is_alone
        has_parts = any(keys and keys.per_key > 1 for keys in self._schema.layout)
        return inside and is_alone and not has_parts and self._lengths is None

    @cached_property
    def _room(self) -> dict[str, int]:
        """The number of ids that no step's bags exceed, by ragged column; see :meth:`DeviceTable.over`."""
        table, items = self._tables
        room = {}
        for name in table.ragged:
            is_shared = name in self._schema.shared
            most = table.most(name, self._users, distinct=True)
            room[name] = most * (1 if is_shared else self._width)
        if items is not None:
            size = self._users * self._width
            room |= {
                name: items.most(name, size, distinct=False) for name in items.ragged
            }
        # As many ids as bags would be read as one id in each bag.
        bags = (0, self._users, self._users * self._width)
        return {
            name: most + next(more for more in range(4) if most + more not in bags)
            for name, most in room.items()
        }

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See :class:`Resident`."""
        return tuple(
            chain.from_iterable(table.tensors for table in self._tables.present)
        )

    @cached_property
    def with_draws(self) -> RowsWithDraws | None:
        """These rows for steps that draw themselves; None if the host must draw."""
        draws = self._candidates.in_step() if self._candidates else None
        return RowsWithDraws(self, *draws) if draws else None

    def drawn(
        self, epoch: int, start: int, *, inside: bool = False
    ) -> Iterator[DrawnStep | TowerBatch]:
        """Yields the steps of :meth:`batches` before their batches are made.

        A last step that is not full is yielded as a batch. Call it only if :meth:`draws_steps`.

        Args:
            epoch: number of the epoch.
            start: number of the first step.
            inside: whether steps draw for themselves where they can; otherwise many steps are drawn for at a time.
        """
        with_draws = self.with_draws if inside else None
        keys = with_draws.keys(epoch) if with_draws else None
        for step in self._steps(epoch, start, draws=with_draws is None):
            make = partial(self._made, epoch, step)
            if not step.is_full:
                yield make()
                continue
            tensors = [step.rows, step.total_weight]
            if keys is not None:
                tensors.append(keys)
            elif step.candidates is not None:
                ids, log_q, _ = step.candidates
                tensors += [ids] if log_q is None else [ids, log_q]
            yield DrawnStep(tuple(tensors), with_draws or self, make)

    def over(self, tensors: Sequence[Tensor]) -> _Tables:
        """Returns the tables behind a step's batch, with other ``tensors`` in place of these rows' own."""
        return self._tables.over(tensors, self._room)

    def assemble(
        self, tensors: Sequence[Tensor], drawn: Sequence[Tensor]
    ) -> TowerBatch:
        """See :class:`Resident`; ``drawn`` holds the rows' numbers, the global batch's weight, and the candidates."""
        rows, total_weight, *candidate_tensors = drawn
        candidates: Drawn | None = None
        # The ids of the candidates, and their log q if some of them are drawn.
        if candidate_tensors:
            ids, *log_q = candidate_tensors
            candidates = Drawn(ids, log_q[0] if log_q else None)
        return self.batch(self.over(tensors), rows, candidates, {}, total_weight)

    def batch(
        self,
        tables: _Tables,
        rows: Tensor,
        candidates: Drawn | None,
        totals: Mapping[str, int],
        total_weight: Tensor,
    ) -> TowerBatch:
        """Builds the batch of ``rows`` (B,) and their candidates, one row's after another's.

        ``totals`` are those of :meth:`DeviceTable.bags`.
        """
        schema = self._schema
        width = self._width
        size = self._users * width
        repeated = rows
        if width > 1:
            # With its size told, the repetition does not wait for the device.
            repeated = rows.repeat_interleave(width, output_size=len(rows) * width)
        names = schema.keys
        single = [name for name in schema.identities if name not in tables.rows.ragged]
        own = [name for name in names if name not in schema.shared]
        of_rows = tables.rows.columns(repeated, totals, dict.fromkeys([*own, *single]))
        shared = of_rows
        index = items = log_q = None
        numbers = of_rows.numbers
        if schema.shared:
            in_shared = [name for name in names if name in schema.shared]
            shared = tables.rows.columns(rows, totals, in_shared)
            numbers = shared.numbers
            index = torch.arange(self._users, device=self._device).repeat_interleave(
                width, output_size=size
            )
        elif width > 1:
            numbers = tables.rows.columns(rows, names=()).numbers
        if candidates is not None and tables.items is not None:
            items = candidates.ids.reshape(-1)
            features = tables.items.columns(items, totals)
            of_rows = _with(of_rows, features)
            shared = _with(shared, features)
            if candidates.log_q is not None:
                log_q = candidates.log_q.reshape(-1)
        places = torch.arange(width, device=self._device)
        return assemble(
            schema,
            of_rows,
            Answers.of(
                schema,
                self._config,
                numbers,
                len(rows),
                self._users,
                width,
                self._device,
            ),
            total_weight=total_weight,
            numbers=RowNumbers((rows[:, None] * width + places).view(-1), rows),
            shared=shared,
            index=index,
            shared_size=self._users,
            items=items if schema.candidate == "item_id" else None,
            log_q=log_q,
            # With padding no key has one id in each bag.
            lists=self._lists if len(rows) == self._users else None,
        )

    def _counts(self, rows: Int64, candidates: Drawn | None) -> dict[str, int]:
        """Returns the number of ids in the bags of each ragged column of a step's rows; no device is asked."""
        totals = {}
        table, items = self._tables
        for name, lengths in table.host_lengths.items():
            # Repeated for each candidate, unless all of them share the row.
            is_shared = name in self._schema.shared
            width = 1 if is_shared else self._width
            totals[name] = int(lengths[rows].sum()) * width
        if items is not None and candidates is not None:
            for name, lengths in items.host_lengths.items():
                totals[name] = int(lengths[candidates.on_host].sum())
        return totals

    def _total_weight(self, global_rows: Tensor) -> Tensor:
        """Returns the weight of the global batch divided by R, () on the device."""
        width = self._width
        ranks = self._share.world_size
        if self._total is None:
            return torch.full((), len(global_rows) * width / ranks, device=self._device)
        weights = self._tables.rows.number(self._total, global_rows)
        # In float64 up to the end, since a GPU divides a float32 by multiplying with
        # the rounded reciprocal.
        return (weights.double().sum() * width / ranks).float()


class RowsWithDraws:
    """Rows on a device for steps that draw their own negatives; see :class:`Resident`.

    Args:
        rows: the rows.
        draws: the draws.
        tensors: see :meth:`DeviceCandidates.in_step`.
    """

    def __init__(
        self, rows: ResidentRows, draws: TensorDraws, tensors: Sequence[Tensor]
    ) -> None:
        self._rows = rows
        self._draws = draws
        self._own = len(rows.tensors)
        self.tensors = (*rows.tensors, *tensors)

    def keys(self, epoch: int) -> Tensor:
        """Returns the (2,) keys of an epoch's draws, on the device."""
        return self._draws.keys(epoch).to(self.tensors[0].device)

    def assemble(
        self, tensors: Sequence[Tensor], drawn: Sequence[Tensor]
    ) -> TowerBatch:
        """Makes the batch of the rows' numbers, the global batch's weight and the epoch's keys in ``drawn``."""
        rows, total_weight, keys = drawn
        positives, log_q, *of_draws = tensors[self._own :]
        negatives = self._draws.draw(rows, keys, DrawTensors(*of_draws))
        ids = torch.cat([positives[rows][:, None], negatives], dim=1)
        candidates = Drawn(ids, log_q[rows][:, None].expand(ids.shape))
        tables = self._rows.over(tensors[: self._own])
        return self._rows.batch(tables, rows, candidates, {}, total_weight)


def read_all(
    source: ParquetSource,
    schema: BatchSchema,
    config: LoaderConfig,
    ids: Sequence[str],
    without: Sequence[str],
) -> Chunk:
    """Reads all rows of a source into memory.

    Args:
        source: files with the rows.
        schema: the columns to read, and their checks.
        config: settings that name the label and the weight.
        ids: further columns with one id per row.
        without: columns of the schema that the source need not have.
    """
    layout = BlockLayout.of(schema, config, ids, without)
    layout.require(source, config)
    chunks = []
    for group in source.groups:
        columns, floats = layout.checked(group, source.read(group, layout.names))
        for name, values in floats.items():
            # A column that is both an id and a label stays an id, whose integers are
            # exact.
            columns.setdefault(name, Column(values))
        chunks.append(columns)
    return concatenate_rows(chunks, chunks[0])
