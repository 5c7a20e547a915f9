"""TowerRows: all rows of a recipe as tensors on one device, from which TowerBatches are gathered there.

DeviceCandidates: draws for rows on a device, and the features of the drawn items.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Array, Chunk, Int64
from torchrec_ext.data.loader.batch import (
    Answers,
    RowColumns,
    assemble,
    known_items,
)
from torchrec_ext.data.loader.blocks import BlockLayout
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.shared import (
    SessionCandidates,
    SharedCandidates,
    StepRows,
)
from torchrec_ext.data.loader.table import DeviceTable, item_table, table_of
from torchrec_ext.data.negatives.row_draws import RowDraws
from torchrec_ext.data.negatives.samplers import Negatives
from torchrec_ext.data.order import RowOrder, Share
from torchrec_ext.data.resident import ResidentRows, RowStep
from torchrec_ext.drawn import DrawnStep
from torchrec_ext.schema import BatchSchema, RowNumbers


class DeviceCandidates:
    """The candidates of rows: each row's item and N negatives, with their log q if there are negatives.

    See :class:`~torchrec_ext.data.resident.Draws`.

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
        self.count = 1 + negatives
        self.table = item_table(schema, items, device)
        positives = known_items(
            schema, items.num_rows, rows["item_id"].values, np.arange(rows.num_rows)
        )
        self._positives = positives.astype(np.int64)
        self._negatives: RowDraws | None = None
        if sampler is not None and negatives:
            users = rows["user_id"].values.astype(np.int64)
            self._negatives = RowDraws(sampler, users, negatives)

    def draw(self, rows: Int64, epoch: int) -> tuple[Array, ...]:
        """Returns the ids (B, 1 + N) of the rows' candidates, the positive first, and their log q, float32."""
        ids = self._positives[rows][:, None]
        of = self._negatives
        if of is None:
            return (ids,)
        negatives, log_q = of.sample(rows, epoch)
        # The positive may be item 0, the unknown one, which nobody draws.
        drawable = np.maximum(ids[:, 0], 1)
        positive_log_q = of.sampler.log_q(of.users[rows], drawable)
        return (
            np.concatenate([ids, negatives], axis=1),
            np.concatenate([positive_log_q[:, None], log_q], axis=1),
        )

    @cached_property
    def tensors(self) -> Sequence[Tensor] | None:
        """(N,) positives, (N,) log q, and what the negatives are drawn by; None if the host must draw."""
        of = self._negatives
        if of is None or of.tensors is None:
            return None
        log_q = of.sampler.log_q(of.users, np.ones_like(of.users))
        return (
            torch.from_numpy(self._positives),
            torch.from_numpy(log_q),
            *of.tensors,
        )

    def keys(self, epoch: int) -> Tensor:
        """See :meth:`RowDraws.keys`."""
        assert self._negatives is not None
        return self._negatives.keys(epoch)

    def draw_in_step(
        self, rows: Tensor, keys: Tensor, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Returns what :meth:`draw` does by torch ops."""
        assert self._negatives is not None
        positives, log_q, *of_draws = tensors
        (negatives,) = self._negatives.draw_in_step(rows, keys, of_draws)
        ids = torch.cat([positives[rows][:, None], negatives], dim=1)
        return ids, log_q[rows][:, None].expand(ids.shape)


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


class TowerRows(ResidentRows):
    """Builds batches of rows that are tensors on one device, shuffled as a whole.

    Besides order and draws the number of ids in each step's bags comes from the host: a step waits for nothing.

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
        candidates: DeviceCandidates | SharedCandidates | SessionCandidates | None,
        share: Share,
        device: torch.device,
        *,
        without: Sequence[str] = (),
        total: str | None = None,
        ahead: bool = False,
    ) -> None:
        draws: DeviceCandidates | None = None
        self._of_step: SharedCandidates | SessionCandidates | None = None
        if isinstance(candidates, DeviceCandidates):
            draws = candidates
        else:
            self._of_step = candidates
        order = RowOrder(
            num_rows=rows.num_rows,
            batch_size=config.batch_size,
            num_steps=config.num_steps(rows.num_rows),
            drop_last=config.drop_last,
            share=share,
            seed=config.seed if config.shuffle else None,
        )
        super().__init__(order, draws, device)
        self.ahead = ahead
        self._config = config
        self._total = total or config.weight
        ids = candidates.ids if candidates else ()
        layout = BlockLayout.of(schema, config, ids, without)
        if total:
            layout = dataclasses.replace(layout, floats=(*layout.floats, total))
        table = table_of(layout, rows, "the rows in memory", device)
        self._tables = _Tables(table, draws.table if draws else None)
        tables = self._tables.present
        self.tensors = tuple(chain.from_iterable(each.tensors for each in tables))
        self._schema = schema
        # Rows of a batch, padding included, and candidates of each.
        self._users = share.rows(config.batch_size)
        self._width = 1 + config.negatives
        ragged = [name for each in tables for name in each.ragged]
        self._ragged = ragged
        # With padding no key has one id in each bag.
        self._lists = tuple(name for name in schema.keys if name in ragged)

    @property
    def num_rows(self) -> int:
        """Number of rows of the set."""
        return self.order.num_rows

    def fingerprint(self) -> dict[str, Any]:
        """Returns the facts about the rows behind their order; the loader's settings come on top."""
        return {"rows": self.num_rows}

    def batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """Yields the batches of an epoch from step ``start`` on, equally many on every rank."""
        for step in self.steps(epoch, start):
            yield step.batch()

    def drawn(
        self, epoch: int, start: int, *, inside: bool = False
    ) -> Iterator[DrawnStep | TowerBatch]:
        """Yields the steps of :meth:`batches` before their batches are made; call it only if :meth:`draws_steps`.

        A last step that is not full is yielded as a batch: all others have its shapes.
        """
        full = self.num_rows // self._config.batch_size
        for number, step in enumerate(self.steps(epoch, start, inside=inside), start):
            yield step if number < full else step.batch()

    def made(self, step: RowStep) -> TowerBatch:
        """Builds a step's batch by what the host knows: op by op a captured step's way takes several times as long."""
        (total_weight,) = step.further
        # Where a thread may build them, the host holds the rows and waits for nobody.
        totals = {} if self.ahead else self._counts(step)
        if self._of_step is not None:
            columns = self._tables.rows.columns(step.rows, totals)
            rows = StepRows(columns, step.rows, total_weight)
            return self._of_step.batch(rows, step.epoch, step.number)
        # Copies, so that a batch owns its memory.
        drawn = [each.clone() for each in step.drawn]
        return self._batch(self._tables, step.rows, drawn, totals, total_weight)

    def draws_steps(self, *, inside: bool) -> bool:
        """Whether steps can be handed out before their batches are made, see :meth:`drawn`.

        No batch may need other rows' candidates, or ids that are replaced. Lists of any length are gathered ``inside``
        a captured step alone, where as many ids are read as no step exceeds.
        """
        is_alone = self._of_step is None and self._schema.replaces is None
        if not self._ragged:
            return is_alone
        return inside and is_alone

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

    def assemble(
        self, tensors: Sequence[Tensor], drawn: Sequence[Tensor]
    ) -> TowerBatch:
        """Makes the batch of a step of the rows, the global batch's weight, and the candidates."""
        rows, total_weight, *candidates = drawn
        tables = self._tables.over(tensors, self._room)
        return self._batch(tables, rows, candidates, {}, total_weight)

    def _batch(
        self,
        tables: _Tables,
        rows: Tensor,
        candidates: Sequence[Tensor],
        totals: Mapping[str, int],
        total_weight: Tensor,
    ) -> TowerBatch:
        """Builds the batch of ``rows`` (B,) and their candidates, one row's after another's.

        ``candidates`` are the tensors of :meth:`DeviceCandidates.draw`, ``totals`` those of a :class:`DeviceTable`.
        """
        schema = self._schema
        width = self._width
        size = self._users * width
        repeated = rows
        if width > 1:
            # With its size told, the repetition does not wait for the device.
            repeated = rows.repeat_interleave(width, output_size=len(rows) * width)
        names = schema.keys
        own = [name for name in names if name not in schema.shared]
        if schema.candidate and schema.candidate not in tables.rows.ragged:
            own.append(schema.candidate)
        of_rows = tables.rows.columns(repeated, totals, dict.fromkeys(own))
        shared = of_rows
        index = items = log_q = None
        numbers = of_rows.numbers
        if schema.shared:
            in_shared = [name for name in names if name in schema.shared]
            shared = tables.rows.columns(rows, totals, in_shared)
            numbers = shared.numbers
            index = torch.arange(self._users, device=self.device).repeat_interleave(
                width, output_size=size
            )
        elif width > 1:
            numbers = tables.rows.columns(rows, names=()).numbers
        if tables.items is not None:
            items, *of_drawn = [each.reshape(-1) for each in candidates]
            features = tables.items.columns(items, totals)
            of_rows = RowColumns(
                of_rows.bags | features.bags, of_rows.numbers | features.numbers
            )
            if of_drawn:
                (log_q,) = of_drawn
        places = torch.arange(width, device=self.device)
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
                self.device,
            ),
            total_weight=total_weight,
            numbers=RowNumbers((rows[:, None] * width + places).view(-1), rows),
            shared=shared,
            index=index,
            shared_size=self._users,
            items=items if schema.candidate == "item_id" else None,
            log_q=log_q,
            lists=self._lists if len(rows) == self._users else None,
        )

    def _counts(self, step: RowStep) -> dict[str, int]:
        """Returns the number of ids in the bags of each ragged column of a step's rows; no device is asked."""
        totals = {}
        table, items = self._tables
        for name, lengths in table.host_lengths.items():
            # Repeated for each candidate, unless all of them share the row.
            is_shared = name in self._schema.shared
            width = 1 if is_shared else self._width
            totals[name] = int(lengths[step.on_host].sum()) * width
        if items is not None:
            for name, lengths in items.host_lengths.items():
                totals[name] = int(lengths[step.drawn_on_host[0]].sum())
        return totals

    def further(self, everyone: Tensor) -> tuple[Tensor, ...]:
        """Returns the weight of the global batch divided by R, () on the device."""
        width = self._width
        ranks = self.order.share.world_size
        if self._total is None:
            return (torch.full((), len(everyone) * width / ranks, device=self.device),)
        weights = self._tables.rows.number(self._total, everyone)
        # In float64 up to the end, since a GPU divides a float32 by multiplying with
        # the rounded reciprocal.
        return ((weights.double().sum() * width / ranks).float(),)
