"""Measurements: what the ranks of a job take for the parts of a step, in the form that a cost model reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.types import CollectiveType, GeneralizedCommsBandwidth

_UNHURRIED = 1e12  # bytes per ms, for what took no time that could be measured


@dataclass(frozen=True, kw_only=True)
class Line:
    """Milliseconds that grow with a number: ``fixed + each * number``."""

    fixed: float
    each: float

    @classmethod
    def through(cls, few: tuple[float, float], many: tuple[float, float]) -> Line:
        """The line through two points (number, ms); it does not fall, nor begin below 0.

        Example:
            >>> Line.through((10, 3.0), (30, 7.0)).at(20)
            5.0
            >>> Line.through((10, 3.0), (30, 2.0)).at(20)
            2.0
        """
        each = max((many[1] - few[1]) / max(many[0] - few[0], 1), 0.0)
        each = min(each, many[1] / max(many[0], 1))
        return cls(fixed=many[1] - each * many[0], each=each)

    def at(self, number: float) -> float:
        """Milliseconds."""
        return self.fixed + self.each * number

    @property
    def rate(self) -> float:
        """The numbers of a millisecond, where there are many."""
        return min(1 / self.each, _UNHURRIED) if self.each else _UNHURRIED


@dataclass(frozen=True, kw_only=True)
class TowerCost:
    """One tower by itself on one rank.

    Args:
        rows: that a rank has of its own for it, in a step.
        dense: ms of its dense layers, forward and backward, by rows.
        look_up: ms of its tables, forward, backward and optimizer, by rows.
        optimizer: ms of a step of its dense layers' optimizer.
        dense_bytes: of its dense gradients.
        row_bytes: of the ids, lengths and dense columns of a row, as they travel.
        pooled_bytes: of the embeddings of a row.
        out_bytes: of its output for a row.
    """

    rows: int
    dense: Line
    look_up: Line
    optimizer: float
    dense_bytes: int
    row_bytes: float
    pooled_bytes: float
    out_bytes: float

    @classmethod
    def together(cls, costs: Sequence[TowerCost]) -> TowerCost:
        """Of towers that run on the same ranks, as one tower with the rows of the first.

        Example:
            >>> from dataclasses import replace
            >>> line = Line(fixed=1.0, each=0.5)
            >>> one = TowerCost(
            ...     rows=10, dense=line, look_up=line, optimizer=2, dense_bytes=8, row_bytes=4, pooled_bytes=16, out_bytes=4
            ... )
            >>> both = TowerCost.together([one, replace(one, rows=30)])
            >>> both.rows, both.dense.at(10) == line.at(10) + line.at(30), both.row_bytes, both.optimizer
            (10, True, 16.0, 4)
        """
        rows = costs[0].rows
        ratios = [cost.rows / max(rows, 1) for cost in costs]

        def line(lines: Iterable[Line]) -> Line:
            pairs = list(zip(lines, ratios, strict=True))
            return Line(fixed=sum(own.fixed for own, _ in pairs), each=sum(own.each * ratio for own, ratio in pairs))

        def bytes_of(sizes: Iterable[float]) -> float:
            return sum(size * ratio for size, ratio in zip(sizes, ratios, strict=True))

        return cls(
            rows=rows,
            dense=line(cost.dense for cost in costs),
            look_up=line(cost.look_up for cost in costs),
            optimizer=sum(cost.optimizer for cost in costs),
            dense_bytes=sum(cost.dense_bytes for cost in costs),
            row_bytes=bytes_of(cost.row_bytes for cost in costs),
            pooled_bytes=bytes_of(cost.pooled_bytes for cost in costs),
            out_bytes=bytes_of(cost.out_bytes for cost in costs),
        )


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What was measured, alike on all ranks: each time is that of the slowest rank.

    Args:
        world_size: R.
        rows: of a rank and step.
        all_to_all: ms by the bytes that a rank sends to all others together.
        all_reduce: ms by bytes.
        steps: by sharding type, towers and dense layers on every rank, ms of a whole step on a sample of the model.
        looked_up: ms of this in the first of them for all tables, with their exchanges, forward, backward and
            optimizer.
        towers: each by itself, those that share tables as one (``user+item``); none where the model has none that can
            be placed.
        dense_bytes: of all dense gradients.
        memory_rate: bytes of tables that a look-up reads in a ms, forward.
    """

    world_size: int
    rows: int
    all_to_all: Line
    all_reduce: Line
    steps: Mapping[str, float]
    looked_up: float
    towers: Mapping[str, TowerCost]
    dense_bytes: int
    memory_rate: float

    def bandwidths(self) -> MeasuredBandwidths:
        """For TorchRec's planner."""
        return MeasuredBandwidths(self.all_to_all.rate, self.all_reduce.rate)


class MeasuredBandwidths(GeneralizedCommsBandwidth):
    """What TorchRec's planner asks of the network, in bytes per ms, as measured between all ranks."""

    def __init__(self, all_to_all: float, all_reduce: float) -> None:
        self._all_to_all, self._all_reduce = all_to_all, all_reduce

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Of one kind of collective, whatever ranks it spans."""
        return self._all_reduce if collective_type == CollectiveType.ALL_REDUCE else self._all_to_all

    @property
    def intra_host_bw(self) -> float:
        """Of an all-to-all."""
        return self._all_to_all

    @property
    def inter_host_bw(self) -> float:
        """Of an all-to-all."""
        return self._all_to_all
