"""Traffic: the bytes of a training step that cross from host to host, by formula, before anything is trained.

With R ranks of B rows each, in hosts of as many ranks, counted over all ranks and both ways:

    flat      every rank sends each table's rank ids and lengths, and gets F x N numbers a row back; gradients go the same way.
              All dense layers are averaged over all ranks.
    towers    a row goes to one rank of each tower, dense columns too, and what the tower makes of it, D (c F + p) numbers where it
              compresses, comes back. A tower's tables and dense layers stay in its host; the layers over the towers are
              averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchrec_ext.distributed.placement import TowerPlacement
from torchrec_ext.modules.tower import Tower

_ID, _FLOAT, _LENGTH = 8, 4, 4


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one step across hosts.

    Args:
        rows: ids, lengths and dense columns on their way to tables or towers.
        outputs: pooled bags, or what towers make of them.
        gradients: of these.
        dense: gradients of replicated layers, by a ring.
    """

    rows: float
    outputs: float
    gradients: float
    dense: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.rows + self.outputs + self.gradients + self.dense

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / 1e6:,.3f}" for name, value in vars(self).items())
        return f"{self.total / 1e6:,.3f} MB a step across hosts ({parts})"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Who sends to whom.

    Args:
        world_size: R.
        local_world_size: ranks of a host.
        rows: B of each rank.
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

    def apart(self, one: int, other: int) -> bool:
        """Whether two ranks are on different hosts."""
        return one // self.local_world_size != other // self.local_world_size

    def averaged(self, parameters: int) -> float:
        """Bytes across hosts of averaging float32 gradients over all ranks by a ring in rank order."""
        links = sum(self.apart(rank, (rank + 1) % self.world_size) for rank in range(self.world_size))
        return links * 2 * (self.world_size - 1) / self.world_size * _FLOAT * parameters


def flat_traffic(
    towers: Sequence[Tower], cluster: Cluster, owner: Mapping[str, int], ids: Mapping[str, float], dense: int
) -> Traffic:
    """Of a step with the tables sharded table-wise over all ranks and every dense layer replicated.

    Args:
        towers: with all tables.
        cluster: the ranks.
        owner: by table its rank.
        ids: by feature how many a row has, in the mean.
        dense: parameters of all dense layers together.
    """
    rows = pooled = 0.0
    for table in (table for tower in towers for table in tower.tables):
        senders = sum(cluster.apart(rank, owner[table.name]) for rank in range(cluster.world_size)) * cluster.rows
        rows += senders * sum(_LENGTH + _ID * ids[feature] for feature in table.feature_names)
        pooled += senders * _FLOAT * table.embedding_dim * len(table.feature_names)
    return Traffic(rows=rows, outputs=pooled, gradients=pooled, dense=cluster.averaged(dense))


def tower_traffic(
    towers: Mapping[str, Tower], cluster: Cluster, placement: TowerPlacement, ids: Mapping[str, float], dense: int
) -> Traffic:
    """Of a step with each tower on the ranks of its own that ``placement`` gives it.

    Args:
        towers: by name.
        cluster: the ranks.
        placement: every tower within one host.
        ids: by feature how many a row has, in the mean.
        dense: parameters of the layers over the towers.

    Raises:
        ValueError: a tower whose ranks are on several hosts.
    """
    rows = outputs = 0.0
    for name, tower in towers.items():
        members = placement.ranks[name]
        if any(cluster.apart(members[0], rank) for rank in members):
            raise ValueError(
                f"tower '{name}' on ranks {list(members)} spans hosts of {cluster.local_world_size} ranks; place it "
                "within one: "
                "inside a tower the formula counts nothing"
            )
        abroad = _rows_abroad(name, cluster, placement)
        features = [feature for table in tower.tables for feature in table.feature_names]
        rows += abroad * (sum(_LENGTH + _ID * ids[feature] for feature in features) + _FLOAT * len(tower.dense))
        outputs += abroad * _FLOAT * tower.out_features
    return Traffic(rows=rows, outputs=outputs, gradients=outputs, dense=cluster.averaged(dense))


def _rows_abroad(tower: str, cluster: Cluster, placement: TowerPlacement) -> int:
    """How many rows of all ranks a tower runs on another host."""
    sent: Callable[[int], int] = lambda rank: sum(  # noqa: E731
        stop - start
        for target, (start, stop) in zip(
            placement.targets(tower, rank), placement.cuts(tower, rank, cluster.rows), strict=True
        )
        if cluster.apart(rank, target)
    )
    return sum(map(sent, range(cluster.world_size)))
