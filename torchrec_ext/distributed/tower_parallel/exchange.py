"""TowerExchange: sends rows to the ranks of their towers, and brings the outputs back to the ranks of the rows.

All towers share one exchange each way, whatever their number; a row goes to one rank of each tower::

    header    int64   B and Q of the sender; per tower its rows n and ids V           one all-to-all of known size
    payload   int64   per tower ids V | lengths F x n | dense n x Fd, 4-byte values in pairs        one all-to-all
    outputs   float   per tower n x D                         one all-to-all, and one more in the backward

TowerRows: rows for one tower, packed into a payload, cut and joined by rank, whole runs of ids at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torchrec.distributed.types import Awaitable
from torchrec.streamable import Multistreamable

from torchrec_ext.distributed.placement import TowerPlacement


class TowerRows(NamedTuple):
    """Rows for one tower, n of them: ``values`` (V,) int64, ``lengths`` (F, n) int32, ``dense`` (n, Fd) float32."""

    values: Tensor
    lengths: Tensor
    dense: Tensor

    @property
    def height(self) -> int:
        """Number of rows, n."""
        return self.lengths.shape[1]


class Widths(NamedTuple):
    """Numbers of ``features``, F, and of ``dense`` columns, Fd, of a tower's input."""

    features: int
    dense: int


def pack_rows(
    towers: Sequence[tuple[TowerRows, Widths]], device: torch.device
) -> Tensor:
    """Packs rows of several towers into one int64 payload, one tower after the other."""
    sizes = [
        packed_size(rows.height, len(rows.values), widths) for rows, widths in towers
    ]
    payload = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    for (rows, widths), piece in zip(towers, torch.split(payload, sizes), strict=True):
        for target, source in zip(
            unpack_rows(piece, rows.height, len(rows.values), widths), rows, strict=True
        ):
            target.copy_(source)
    return payload


def packed_size(count: int, ids: int, widths: Widths) -> int:
    """Returns how many int64 hold ``count`` rows with ``ids`` ids."""
    return ids + (widths.features * count + 1) // 2 + (widths.dense * count + 1) // 2


def unpack_rows(payload: Tensor, count: int, ids: int, widths: Widths) -> TowerRows:
    """Returns ``count`` rows with ``ids`` ids as views of their piece of a payload."""
    middle = ids + (widths.features * count + 1) // 2
    lengths = payload[ids:middle].view(torch.int32)[: widths.features * count]
    dense = payload[middle:].view(torch.float32)[: widths.dense * count]
    return TowerRows(
        payload[:ids],
        lengths.view(widths.features, count),
        dense.view(count, widths.dense),
    )


def join_rows(pieces: Sequence[TowerRows]) -> TowerRows:
    """Concatenates the rows of several ranks."""
    if len(pieces) == 1:
        return pieces[0]
    lengths = torch.cat([piece.lengths for piece in pieces], dim=1)
    features = len(lengths)
    # Reorders whole runs of ids from rank by rank, each feature by feature, to feature
    # by feature.
    runs = torch.stack(
        [piece.lengths.sum(dim=1, dtype=torch.int32) for piece in pieces]
    ).view(-1)
    order = (
        torch.arange(len(runs), dtype=torch.int32, device=runs.device)
        .view(len(pieces), features)
        .T.reshape(-1)
    )
    values = torch.cat([piece.values for piece in pieces])
    _, values, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        order, runs, values, None, len(values)
    )
    return TowerRows(values, lengths, torch.cat([piece.dense for piece in pieces]))


def slice_rows(rows: TowerRows, start: int, stop: int) -> TowerRows:
    """Returns the rows from ``start`` to ``stop``."""
    if (start, stop) == (0, rows.height):
        return rows
    # A feature's ids are three runs: of the rows before, of these rows, and of the rows
    # after.
    ends = rows.lengths.sum(dim=1).cumsum(0)
    firsts = ends - rows.lengths[:, start:].sum(dim=1)
    lasts = ends - rows.lengths[:, stop:].sum(dim=1)
    runs = [
        rows.values[first:last]
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
    ]
    return TowerRows(
        torch.cat(runs),
        rows.lengths[:, start:stop].contiguous(),
        rows.dense[start:stop],
    )


def pad_rows(rows: TowerRows, count: int) -> TowerRows:
    """Appends empty rows until there are ``count``."""
    missing = count - rows.height
    if not missing:
        return rows
    return TowerRows(
        rows.values,
        pad(rows.lengths, (0, missing)),
        pad(rows.dense, (0, 0, 0, missing)),
    )


class Route(NamedTuple):
    """Towers by peer rank: this rank sends the peer rows for the towers in ``to``, and receives rows for ``coming``."""

    to: list[list[str]]
    coming: list[list[str]]


@dataclass
class ExchangeContext(Multistreamable):
    """Numbers of rows of one batch, used to route its outputs back.

    Args:
        route: towers whose rows are exchanged with each peer rank.
        sent: numbers of rows by peer rank, sent to it for each tower of ``route.to``.
        received: numbers of rows by tower of this rank, received from each rank that sent any.
    """

    route: Route = field(default_factory=lambda: Route([], []))
    sent: list[list[int]] = field(default_factory=list)
    received: dict[str, list[int]] = field(default_factory=dict)

    def record_stream(self, stream: torch.Stream) -> None:
        """Does nothing: the context holds no tensors."""


@dataclass
class ReceivedRows(Multistreamable):
    """Received rows by tower, in the order of the sending ranks; towers have one order on every rank."""

    rows: dict[str, TowerRows]

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that ``stream`` still reads the rows."""
        for rows in self.rows.values():
            for tensor in rows:
                tensor.record_stream(stream)


class AfterCollective(Awaitable[Any]):
    """Awaitable result of ``follow``, called once a collective has ended."""

    def __init__(self, work: dist.Work, follow: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work
        self._follow = follow

    def _wait_impl(self) -> Any:
        self._work.wait()
        return self._follow()


@dataclass(frozen=True, kw_only=True)
class TowerSpec:
    """Shape of a tower's input and output, as the exchange needs it.

    Args:
        widths: numbers of features and dense columns.
        out: D, the width of the output.
        shared: whether the tower reads the Q shared rows.
        equal: whether all ranks of the tower must run equally many rows; empty rows fill up the others.
    """

    widths: Widths
    out: int
    shared: bool
    equal: bool


class TowerExchange:
    """Sends the rows of all towers to their ranks and brings their outputs back.

    Args:
        placement: ranks of each tower.
        specs: input and output of each tower, by name.
        group: process group of all ranks.
        device: device of this rank.
    """

    def __init__(
        self,
        placement: TowerPlacement,
        specs: Mapping[str, TowerSpec],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._placement = placement
        self._specs = specs
        self._group = group
        self._device = device
        self._rank = dist.get_rank(group)
        self._busiest: dict[tuple[str, tuple[int, ...]], int] = {}
        self._routes: dict[tuple[str, ...], Route] = {}

    def begin(
        self,
        context: ExchangeContext,
        rows: Mapping[str, TowerRows],
        counts: tuple[int, int],
    ) -> AfterCollective:
        """Announces this rank's rows to the ranks of their towers; waiting twice yields their :class:`ReceivedRows`.

        Args:
            context: context of this batch, which is filled.
            rows: this rank's rows, by tower.
            counts: B and Q of this rank.
        """
        context.route = route = self._route(tuple(rows))
        cuts = {
            name: iter(self._placement.cuts(name, self._rank, r.height))
            for name, r in rows.items()
        }
        slices: list[list[TowerRows]] = []
        context.sent = []
        header: list[int] = []
        for to in route.to:
            pieces = [slice_rows(rows[name], *next(cuts[name])) for name in to]
            slices.append(pieces)
            context.sent.append([piece.height for piece in pieces])
            header += counts
            for piece in pieces:
                header += (piece.height, len(piece.values))
        sizes = [2 + 2 * len(coming) for coming in route.coming]
        # A peer announces B, Q, and two numbers for each tower that it sends rows to,
        # so all sizes are known.
        received = torch.empty(sum(sizes), dtype=torch.int64, device=self._device)
        work = dist.all_to_all_single(
            received,
            torch.tensor(header, device=self._device),
            sizes,
            [2 + 2 * len(to) for to in route.to],
            group=self._group,
            async_op=True,
        )

        def send_rows() -> AfterCollective:
            # One copy to the host for all sizes, which lie there while the payload is
            # split.
            return self._send(
                context,
                slices,
                [piece.tolist() for piece in torch.split(received.cpu(), sizes)],
            )

        return AfterCollective(work, send_rows)

    def _route(self, names: tuple[str, ...]) -> Route:
        # Kept, because a model mostly runs the same towers in every step.
        if names not in self._routes:
            targets = self._placement.targets
            route = Route([], [])
            for rank in range(self._placement.world_size):
                route.to.append(
                    [name for name in names if rank in targets(name, self._rank)]
                )
                route.coming.append(
                    [name for name in names if self._rank in targets(name, rank)]
                )
            self._routes[names] = route
        return self._routes[names]

    def _send(
        self,
        context: ExchangeContext,
        slices: list[list[TowerRows]],
        headers: list[list[int]],
    ) -> AfterCollective:
        coming: list[list[tuple[str, int, int]]] = []
        sizes: list[int] = []
        for names, header in zip(context.route.coming, headers, strict=True):
            by_tower = list(zip(names, header[2::2], header[3::2], strict=True))
            coming.append(by_tower)
            sizes.append(sum(self._size(*entry) for entry in by_tower))
        towers: list[tuple[TowerRows, Widths]] = []
        counts: list[int] = []
        for names, pieces in zip(context.route.to, slices, strict=True):
            count = 0
            for name, rows in zip(names, pieces, strict=True):
                towers.append((rows, self._specs[name].widths))
                count += self._size(name, rows.height, len(rows.values))
            counts.append(count)
        message = pack_rows(towers, self._device)
        out = message.new_empty(sum(sizes))
        work = dist.all_to_all_single(
            out, message, sizes, counts, group=self._group, async_op=True
        )
        return AfterCollective(
            work, lambda: self._unpack(context, coming, out, headers)
        )

    def _size(self, name: str, rows: int, ids: int) -> int:
        return packed_size(rows, ids, self._specs[name].widths)

    def _unpack(
        self,
        context: ExchangeContext,
        coming: list[list[tuple[str, int, int]]],
        payload: Tensor,
        headers: list[list[int]],
    ) -> ReceivedRows:
        announced: list[tuple[str, int, int]] = []
        for by_tower in coming:
            announced += by_tower
        payloads = torch.split(payload, [self._size(*entry) for entry in announced])
        received: dict[str, list[TowerRows]] = {}
        context.received = {}
        for (name, count, ids), piece in zip(announced, payloads, strict=True):
            received.setdefault(name, []).append(
                unpack_rows(piece, count, ids, self._specs[name].widths)
            )
            context.received.setdefault(name, []).append(count)
        result: dict[str, TowerRows] = {}
        # Two ranks that run the same towers one after the other must do so in one
        # order, whoever's rows came first.
        for name, spec in self._specs.items():
            if name not in received:
                continue
            result[name] = join_rows(received[name])
            if spec.equal:
                # A header begins with B and Q; a tower of shared rows runs Q of them
                # for each rank, any other B.
                counts = tuple(header[spec.shared] for header in headers)
                # The rows of the tower's busiest rank; cached, as ranks mostly have as
                # many rows in every step.
                if (name, counts) not in self._busiest:
                    self._busiest[name, counts] = self._placement.busiest(name, counts)
                result[name] = pad_rows(result[name], self._busiest[name, counts])
        return ReceivedRows(result)

    def back(
        self, context: ExchangeContext, outputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Sends the outputs back to the ranks of their rows.

        Args:
            context: context of the batch.
            outputs: (n, D) outputs of this rank's towers, by name, in the order of the received rows.

        Returns:
            (B, D) or (Q, D) outputs for this rank's rows, by tower.
        """
        # Empty rows that filled up the others have no sender, so their outputs are cut
        # off.
        outputs_by_rank = {
            name: iter(torch.split(outputs[name][: sum(rows)], rows))
            for name, rows in context.received.items()
        }
        # A rank without a tower takes part too, and in the backward.
        flat = [
            torch.empty(0, device=self._device, requires_grad=torch.is_grad_enabled())
        ]
        counts: list[int] = []
        for coming in context.route.coming:
            by_tower = [next(outputs_by_rank[name]).reshape(-1) for name in coming]
            flat += by_tower
            counts.append(sum(map(len, by_tower)))
        names: list[str] = []
        sizes: list[int] = []
        totals: list[int] = []
        for to, heights in zip(context.route.to, context.sent, strict=True):
            sizes_of_rank = [
                rows * self._specs[name].out
                for name, rows in zip(to, heights, strict=True)
            ]
            names += to
            sizes += sizes_of_rank
            totals.append(sum(sizes_of_rank))
        received: Tensor = Exchange.apply(torch.cat(flat), counts, totals, self._group)  # type: ignore[no-untyped-call]
        pieces: dict[str, list[Tensor]] = {}
        for name, piece in zip(names, torch.split(received, sizes), strict=True):
            pieces.setdefault(name, []).append(piece.view(-1, self._specs[name].out))
        by_name = {}
        for name, parts in pieces.items():
            by_name[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return by_name


class Exchange(torch.autograd.Function):
    """All-to-all with another all-to-all as its backward, for the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        message: Tensor,
        counts: list[int],
        received: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Sends ``counts`` numbers of flat ``sent`` to each rank; returns a flat tensor with ``received`` from each."""
        ctx.counts = counts
        ctx.received = received
        ctx.group = group
        out = message.new_empty(sum(received))
        dist.all_to_all_single(out, message.contiguous(), received, counts, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Returns the gradient of ``sent``."""
        (gradient,) = gradients
        out = gradient.new_empty(sum(ctx.counts))
        # A collective sends memory as it lies, and autograd may hand over a view.
        dist.all_to_all_single(
            out, gradient.contiguous(), ctx.counts, ctx.received, group=ctx.group
        )
        return out, None, None, None
