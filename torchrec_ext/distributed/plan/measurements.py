"""Measurements: how long the ranks of a job take for each piece of a step, in the form that a cost model reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.types import CollectiveType, GeneralizedCommsBandwidth

_UNLIMITED = 1e12  # bytes per ms, where a transfer took no time that could be measured


@dataclass(frozen=True, kw_only=True)
class Line:
    """Time in milliseconds that grows linearly with a number: ``fixed + each * number``."""

    fixed: float
    each: float

    @classmethod
    def through(cls, few: tuple[float, float], many: tuple[float, float]) -> Line:
        """Fits the line through two points (number, ms); its slope and its value at 0 are not negative.

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
        """Returns the milliseconds at a number."""
        return self.fixed + self.each * number

    @property
    def rate(self) -> float:
        """Numbers per millisecond, where numbers are large."""
        return min(1 / self.each, _UNLIMITED) if self.each else _UNLIMITED


@dataclass(frozen=True, kw_only=True)
class TowerCost:
    """Cost of one tower by itself on one rank.

    Args:
        rows: rows that a rank brings to the tower in a step.
        dense: ms of the tower's dense layers, forward and backward, by rows.
        look_up: ms of the tower's tables, forward, backward and optimizer, by rows.
        optimizer: ms of one optimizer step of the tower's dense layers.
        dense_bytes: bytes of the tower's dense gradients.
        row_bytes: bytes of the ids, lengths and dense columns of a row, as they are sent.
        pooled_bytes: bytes of the embeddings of a row.
        out_bytes: bytes of the tower's output for a row.
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
        """Adds up towers that run on the same ranks, as one tower with the rows of the first.

        Example:
            >>> from dataclasses import replace
            >>> line = Line(fixed=1.0, each=0.5)
            >>> sizes = {"dense_bytes": 8, "row_bytes": 4, "pooled_bytes": 16, "out_bytes": 4}
            >>> cost = TowerCost(rows=10, dense=line, look_up=line, optimizer=2, **sizes)
            >>> both = TowerCost.together([cost, replace(cost, rows=30)])
            >>> both.rows, both.dense.at(10) == line.at(10) + line.at(30), both.row_bytes, both.optimizer
            (10, True, 16.0, 4)
        """
        rows = costs[0].rows
        ratios = [cost.rows / max(rows, 1) for cost in costs]

        def line(lines: Iterable[Line]) -> Line:
            pairs = list(zip(lines, ratios, strict=True))
            return Line(
                fixed=sum(line.fixed for line, _ in pairs), each=sum(line.each * ratio for line, ratio in pairs)
            )

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
    """Measured times of a job, equal on all ranks: each is the time of the slowest rank.

    Args:
        world_size: R, the number of ranks.
        rows: rows per rank and step.
        all_to_all: ms of an all-to-all, by the bytes that a rank sends to all others together.
        all_reduce: ms of an all-reduce, by bytes.
        steps: ms of a whole step on a sample of the model, by sharding type, with all towers on every rank.
        looked_up: ms, within the first of ``steps``, of all tables with their exchanges, forward, backward and
            optimizer.
        towers: cost of each tower by itself, by name, towers that share tables as one (``user+item``); empty where the
            model has none that can be placed.
        dense_bytes: bytes of all dense gradients.
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
        """Returns the bandwidths in the form that TorchRec's planner reads."""
        return MeasuredBandwidths(self.all_to_all.rate, self.all_reduce.rate)


class MeasuredBandwidths(GeneralizedCommsBandwidth):
    """Bandwidths of the network for TorchRec's planner, in bytes per ms, as measured between all ranks.

    Args:
        all_to_all: bytes per ms of an all-to-all.
        all_reduce: bytes per ms of an all-reduce.
    """

    def __init__(self, all_to_all: float, all_reduce: float) -> None:
        self._all_to_all, self._all_reduce = all_to_all, all_reduce

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Returns the bandwidth of one kind of collective, whatever ranks it spans."""
        return self._all_reduce if collective_type == CollectiveType.ALL_REDUCE else self._all_to_all

    @property
    def intra_host_bw(self) -> float:
        """Bandwidth of an all-to-all."""
        return self._all_to_all

    @property
    def inter_host_bw(self) -> float:
        """Bandwidth of an all-to-all."""
        return self._all_to_all
