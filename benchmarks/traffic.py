"""Traffic: the bytes of a training step that cross from host to host, by formula, before anything is trained.

With R ranks of B rows each, spread evenly over the hosts, counted over all ranks and in both directions:

    flat      every rank sends each table's rank ids and lengths, and gets F x D numbers a row back; gradients return
              likewise. All dense layers are averaged over all ranks.
    towers    a row goes to one rank of each tower, with its dense columns; the tower's output, D (c F + p) numbers
              where it compresses, comes back. A tower's tables and dense layers stay within its host; the layers over
              the towers are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec_ext.distributed.placement import TowerPlacement
from torchrec_ext.modules.tower import Tower

_ID, _FLOAT, _LENGTH = 8, 4, 4


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one step sends across hosts.

    Args:
        rows: bytes of ids, lengths and dense columns sent to tables or towers.
        outputs: bytes of pooled embeddings, or of tower outputs.
        gradients: bytes of the gradients of ``outputs``.
        dense: bytes of the gradients of replicated layers, averaged in a ring.
    """

    rows: float
    outputs: float
    gradients: float
    dense: float

    @property
    def total(self) -> float:
        """Bytes of all four kinds."""
        return self.rows + self.outputs + self.gradients + self.dense

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {value / 1e6:,.3f}" for name, value in vars(self).items()
        )
        return f"{self.total / 1e6:,.3f} MB a step across hosts ({parts})"


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """Ranks on equal hosts, and the rows that each brings to a step.

    Args:
        world_size: R, the number of ranks.
        local_world_size: ranks per host; divides ``world_size``.
        rows: B, rows per rank and step.
    """

    world_size: int
    local_world_size: int
    rows: int

    def __post_init__(self) -> None:
        for name in ("world_size", "local_world_size", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        if self.world_size % self.local_world_size:
            raise ValueError(
                f"world_size={self.world_size}: must be a multiple of local_world_size={self.local_world_size}"
            )

    def apart(self, first: int, second: int) -> bool:
        """Whether two ranks are on different hosts."""
        return first // self.local_world_size != second // self.local_world_size

    def averaged(self, parameters: int) -> float:
        """Returns the bytes across hosts that averaging float32 gradients over a ring in rank order takes."""
        links = sum(
            self.apart(rank, (rank + 1) % self.world_size)
            for rank in range(self.world_size)
        )
        return links * 2 * (self.world_size - 1) / self.world_size * _FLOAT * parameters


def flat_traffic(
    towers: Sequence[Tower],
    layout: HostLayout,
    owner: Mapping[str, int],
    ids: Mapping[str, float],
    dense: int,
) -> Traffic:
    """Returns the traffic of a step with tables sharded table-wise over all ranks and every dense layer replicated.

    Args:
        towers: towers that hold all the tables.
        layout: ranks and hosts.
        owner: rank of each table, by table name.
        ids: mean number of ids per row, by feature.
        dense: number of parameters of all dense layers together.
    """
    rows = pooled = 0.0
    for table in (table for tower in towers for table in tower.tables):
        senders = (
            sum(
                layout.apart(rank, owner[table.name])
                for rank in range(layout.world_size)
            )
            * layout.rows
        )
        rows += senders * sum(
            _LENGTH + _ID * ids[feature] for feature in table.feature_names
        )
        pooled += senders * _FLOAT * table.embedding_dim * len(table.feature_names)
    return Traffic(
        rows=rows, outputs=pooled, gradients=pooled, dense=layout.averaged(dense)
    )


def tower_traffic(
    towers: Mapping[str, Tower],
    layout: HostLayout,
    placement: TowerPlacement,
    ids: Mapping[str, float],
    dense: int,
) -> Traffic:
    """Returns the traffic of a step with each tower on ranks of its own.

    Args:
        towers: towers by name.
        layout: ranks and hosts.
        placement: ranks of each tower, all of them on one host.
        ids: mean number of ids per row, by feature.
        dense: number of parameters of the layers over the towers.

    Raises:
        ValueError: a tower whose ranks are on several hosts.
    """
    rows = outputs = 0.0
    for name, tower in towers.items():
        members = placement.ranks[name]
        if any(layout.apart(members[0], rank) for rank in members):
            raise ValueError(
                f"tower '{name}' on ranks {list(members)} spans hosts of {layout.local_world_size} ranks; place it "
                "within one: inside a tower the formula counts nothing"
            )
        sent = _rows_sent(name, layout, placement)
        features = [
            feature for table in tower.tables for feature in table.feature_names
        ]
        rows += sent * (
            sum(_LENGTH + _ID * ids[feature] for feature in features)
            + _FLOAT * len(tower.dense)
        )
        outputs += sent * _FLOAT * tower.out_features
    return Traffic(
        rows=rows, outputs=outputs, gradients=outputs, dense=layout.averaged(dense)
    )


def _rows_sent(tower: str, layout: HostLayout, placement: TowerPlacement) -> int:
    """Counts the rows of all ranks that a tower runs on another host."""
    count = 0
    for rank in range(layout.world_size):
        targets = placement.targets(tower, rank)
        cuts = placement.cuts(tower, rank, layout.rows)
        for target, (start, stop) in zip(targets, cuts, strict=True):
            if layout.apart(rank, target):
                count += stop - start
    return count
