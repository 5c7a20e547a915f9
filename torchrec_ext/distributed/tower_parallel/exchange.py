"""The two exchanges of towers that run on ranks of their own: rows to the ranks of a tower, outputs back to the rows' ranks.

All towers share one exchange each way, whatever their number; a row goes to one rank of each tower::

    header    int64   B and Q of the sender; of each tower the rows n and ids V that come        one all-to-all of known size
    payload   int64   of each tower ids V | lengths F x n | dense n x Fd, four-byte values in pairs            one all-to-all
    outputs   float   of each tower n x D                                   one all-to-all, and one more in the backward

Rows for one tower: packed to travel, cut and joined by rank, whole runs of ids at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torchrec.distributed.types import Awaitable
from torchrec.streamable import Multistreamable

from torchrec_ext.distributed.placement import TowerPlacement


class TowerRows(NamedTuple):
    """n rows for one tower: ``values`` (V,) int64, ``lengths`` (F, n) int32, ``dense`` (n, Fd) float32."""

    values: Tensor
    lengths: Tensor
    dense: Tensor

    @property
    def height(self) -> int:
        """How many rows."""
        return self.lengths.shape[1]


class Widths(NamedTuple):
    """F and Fd of a tower."""

    features: int
    dense: int


def pack_rows(parts: Sequence[tuple[TowerRows, Widths]], device: torch.device) -> Tensor:
    """All of them as int64, one after the other."""
    sizes = [packed_size(rows.height, len(rows.values), widths) for rows, widths in parts]
    payload = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    for (rows, widths), place in zip(parts, torch.split(payload, sizes), strict=True):
        for to, own in zip(unpack_rows(place, rows.height, len(rows.values), widths), rows, strict=True):
            to.copy_(own)
    return payload


def packed_size(count: int, ids: int, widths: Widths) -> int:
    """How many int64 hold ``count`` rows with ``ids`` ids."""
    return ids + (widths.features * count + 1) // 2 + (widths.dense * count + 1) // 2


def unpack_rows(payload: Tensor, count: int, ids: int, widths: Widths) -> TowerRows:
    """``count`` rows with ``ids`` ids, as views of their part of a payload."""
    middle = ids + (widths.features * count + 1) // 2
    lengths = payload[ids:middle].view(torch.int32)[: widths.features * count]
    dense = payload[middle:].view(torch.float32)[: widths.dense * count]
    return TowerRows(payload[:ids], lengths.view(widths.features, count), dense.view(count, widths.dense))


def join_rows(parts: Sequence[TowerRows]) -> TowerRows:
    """The rows of several ranks below one another."""
    if len(parts) == 1:
        return parts[0]
    lengths = torch.cat([part.lengths for part in parts], dim=1)
    features = len(lengths)
    # From rank by rank, each feature by feature, to feature by feature: whole runs of ids move.
    runs = torch.stack([part.lengths.sum(dim=1, dtype=torch.int32) for part in parts]).view(-1)
    order = torch.arange(len(runs), dtype=torch.int32, device=runs.device).view(len(parts), features).T.reshape(-1)
    values = torch.cat([part.values for part in parts])
    _, values, _ = torch.ops.fbgemm.permute_1D_sparse_data(order, runs, values, None, len(values))
    return TowerRows(values, lengths, torch.cat([part.dense for part in parts]))


def slice_rows(rows: TowerRows, start: int, stop: int) -> TowerRows:
    """Rows ``start`` to ``stop``."""
    if (start, stop) == (0, rows.height):
        return rows
    # Each feature's ids of the rows before, of these, and after are a run.
    ends = rows.lengths.sum(dim=1).cumsum(0)
    firsts = ends - rows.lengths[:, start:].sum(dim=1)
    lasts = ends - rows.lengths[:, stop:].sum(dim=1)
    runs = [rows.values[first:last] for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]
    return TowerRows(torch.cat(runs), rows.lengths[:, start:stop].contiguous(), rows.dense[start:stop])


def pad_rows(rows: TowerRows, count: int) -> TowerRows:
    """``rows`` and empty ones after them, ``count`` together."""
    missing = count - rows.height
    if not missing:
        return rows
    return TowerRows(rows.values, pad(rows.lengths, (0, missing)), pad(rows.dense, (0, 0, 0, missing)))


class Route(NamedTuple):
    """By rank the towers for which this rank sends it rows, and those for which it sends this rank rows; alike on both sides."""

    to: list[list[str]]
    coming: list[list[str]]


@dataclass
class ExchangeContext(Multistreamable):
    """What one batch leaves for its outputs: by rank the rows sent to it for each tower, and by tower those that each rank sent."""

    route: Route = field(default_factory=lambda: Route([], []))
    sent: list[list[int]] = field(default_factory=list)
    served: dict[str, list[int]] = field(default_factory=dict)

    def record_stream(self, stream: torch.Stream) -> None:
        """Nothing: there are numbers alone."""


@dataclass
class ReceivedRows(Multistreamable):
    """By tower the rows that came, in the order of the ranks that sent them; the towers in one order on every rank."""

    rows: dict[str, TowerRows]

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that ``stream`` still reads them."""
        for rows in self.rows.values():
            for part in rows:
                part.record_stream(stream)


class AfterCollective(Awaitable[Any]):
    """What ``follow`` returns once a collective has ended."""

    def __init__(self, work: dist.Work, follow: Callable[[], Any]) -> None:
        super().__init__()
        self._work, self._follow = work, follow

    def _wait_impl(self) -> Any:
        self._work.wait()
        return self._follow()


@dataclass(frozen=True, kw_only=True)
class TowerSpec:
    """What the exchange knows of a tower.

    Args:
        widths: of its input.
        out: D, of its output.
        shared: whether its rows are the Q shared ones.
        equal: whether all its ranks must run as many rows; those with fewer get empty ones.
    """

    widths: Widths
    out: int
    shared: bool
    equal: bool


class TowerExchange:
    """Sends the rows of all towers to their ranks and brings their outputs back.

    Args:
        placement: of the towers.
        journeys: by tower.
        group: all ranks.
        device: of this rank.
    """

    def __init__(
        self,
        placement: TowerPlacement,
        journeys: Mapping[str, TowerSpec],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._placement, self._journeys, self._group, self._device = placement, journeys, group, device
        self._rank = dist.get_rank(group)
        self._busiest: dict[tuple[str, tuple[int, ...]], int] = {}
        self._routes: dict[tuple[str, ...], Route] = {}

    def begin(self, step: ExchangeContext, own: Mapping[str, TowerRows], counts: tuple[int, int]) -> AfterCollective:
        """Announces this rank's rows to the ranks of their towers; to be waited for twice, then the rows have :class:`ReceivedRows`.

        Args:
            step: of this batch; is filled.
            own: by tower.
            counts: B and Q.
        """
        step.route = route = self._route(tuple(own))
        cuts = {name: iter(self._placement.cuts(name, self._rank, rows.height)) for name, rows in own.items()}
        parts = [[slice_rows(own[name], *next(cuts[name])) for name in to] for to in route.to]
        step.sent = [[part.height for part in to] for to in parts]
        header = [
            number for to in parts for number in (*counts, *(size for p in to for size in (p.height, len(p.values))))
        ]
        sizes = [2 + 2 * len(coming) for coming in route.coming]
        arriving = torch.empty(sum(sizes), dtype=torch.int64, device=self._device)
        announced = dist.all_to_all_single(
            arriving,
            torch.tensor(header, device=self._device),
            sizes,
            [2 + 2 * len(to) for to in route.to],
            group=self._group,
            async_op=True,
        )
        return AfterCollective(
            announced, lambda: self._send(step, parts, [part.tolist() for part in torch.split(arriving.cpu(), sizes)])
        )

    def _route(self, names: tuple[str, ...]) -> Route:
        if names not in self._routes:
            ranks, targets = range(self._placement.world_size), self._placement.targets
            to = [[name for name in names if rank in targets(name, self._rank)] for rank in ranks]
            coming = [[name for name in names if self._rank in targets(name, rank)] for rank in ranks]
            self._routes[names] = Route(to, coming)
        return self._routes[names]

    def _send(self, step: ExchangeContext, parts: list[list[TowerRows]], headers: list[list[int]]) -> AfterCollective:
        coming = [
            list(zip(names, header[2::2], header[3::2], strict=True))
            for names, header in zip(step.route.coming, headers, strict=True)
        ]
        received = [sum(self._size(*announced) for announced in some) for some in coming]
        going = [list(zip(names, some, strict=True)) for names, some in zip(step.route.to, parts, strict=True)]
        counts = [sum(self._size(name, rows.height, len(rows.values)) for name, rows in some) for some in going]
        sent = pack_rows([(rows, self._journeys[name].widths) for some in going for name, rows in some], self._device)
        out = sent.new_empty(sum(received))
        work = dist.all_to_all_single(out, sent, received, counts, group=self._group, async_op=True)
        return AfterCollective(work, lambda: self._arrived(step, coming, out, headers))

    def _size(self, name: str, rows: int, ids: int) -> int:
        return packed_size(rows, ids, self._journeys[name].widths)

    def _arrived(
        self, step: ExchangeContext, coming: list[list[tuple[str, int, int]]], payload: Tensor, headers: list[list[int]]
    ) -> ReceivedRows:
        announced = [one for some in coming for one in some]
        parts: dict[str, list[TowerRows]] = {}
        for (name, rows, ids), part in zip(
            announced, torch.split(payload, [self._size(*one) for one in announced]), strict=True
        ):
            parts.setdefault(name, []).append(unpack_rows(part, rows, ids, self._journeys[name].widths))
        step.served = {name: [part.height for part in found] for name, found in parts.items()}
        rows_of: dict[str, TowerRows] = {}
        # Two ranks that run the same towers one after the other must do so in one order, whoever's rows came first.
        for name, journey in ((name, journey) for name, journey in self._journeys.items() if name in parts):
            found = join_rows(parts[name])
            rows_of[name] = (
                pad_rows(found, self._most(name, tuple(h[journey.shared] for h in headers))) if journey.equal else found
            )
        return ReceivedRows(rows_of)

    def _most(self, name: str, counts: tuple[int, ...]) -> int:
        """The rows of the tower's busiest rank; ranks mostly have as many as in the step before."""
        if (name, counts) not in self._busiest:
            self._busiest[name, counts] = self._placement.busiest(name, counts)
        return self._busiest[name, counts]

    def back(self, step: ExchangeContext, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each row's outputs on the rank that it came from, by tower."""
        served = {name: iter(torch.split(outputs[name][: sum(rows)], rows)) for name, rows in step.served.items()}
        sending = [[next(served[name]).reshape(-1) for name in coming] for coming in step.route.coming]
        # A rank without a tower takes part too, and in the backward.
        nothing = torch.empty(0, device=self._device, requires_grad=torch.is_grad_enabled())
        sent = torch.cat([nothing, *(part for some in sending for part in some)])
        sizes = [
            [rows * self._journeys[name].out for name, rows in zip(*some, strict=True)]
            for some in zip(step.route.to, step.sent, strict=True)
        ]
        counts = [sum(map(len, some)) for some in sending]
        got: Tensor = Exchange.apply(sent, counts, [sum(some) for some in sizes], self._group)  # type: ignore[no-untyped-call]
        pieces: dict[str, list[Tensor]] = {}
        names = [name for to in step.route.to for name in to]
        for name, piece in zip(names, torch.split(got, [size for some in sizes for size in some]), strict=True):
            pieces.setdefault(name, []).append(piece.view(-1, self._journeys[name].out))
        return {name: found[0] if len(found) == 1 else torch.cat(found) for name, found in pieces.items()}


class Exchange(torch.autograd.Function):
    """An all-to-all with a gradient: the all-to-all back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, counts: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        """Flat ``sent``, ``counts`` of it to each rank, to a flat tensor with ``received`` from each."""
        ctx.counts, ctx.received, ctx.group = counts, received, group
        out = sent.new_empty(sum(received))
        dist.all_to_all_single(out, sent.contiguous(), received, counts, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of ``sent``."""
        (gradient,) = gradients
        out = gradient.new_empty(sum(ctx.counts))
        dist.all_to_all_single(out, gradient.contiguous(), ctx.counts, ctx.received, group=ctx.group)
        return out, None, None, None
