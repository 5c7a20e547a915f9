"""PlanConfig: how tables and towers are spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchrec_ext.distributed.placement import PLACEMENTS, parse_ranks

Sharding = Literal["auto", "data_parallel", "table_wise", "row_wise", "column_wise", "table_column_wise"]


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How tables and towers are spread over ranks.

    Args:
        sharding: sharding type of every table, or ``auto``: TorchRec's planner chooses per table,
            but tables that are small all together (2^18 weights) are whole on each rank of a CPU job.
        tables: exceptions by table, as ``("user_id=row_wise", "genres=data_parallel")``.
        memory_gb: memory per rank that tables may take, GiB; 0 for what the device has free, divided by its processes.
        reserve: share of that memory kept for dense layers, activations and buffers, 0 to 1.
        towers: placement of a model's towers: ``data_parallel``, on every rank, one after the other;
            ``tower_parallel``, at the same time, each on ranks of its own; ranks for each, as in ``user:0-1,item:2+3``;
            or ``auto``: data_parallel, unless measurements say otherwise. The tables of a tower that has ranks of its
            own are sharded over these alone.
    """

    sharding: Sharding = "auto"
    tables: tuple[str, ...] = ()
    memory_gb: float = 0.0
    reserve: float = 0.15
    towers: str = "data_parallel"

    def __post_init__(self) -> None:
        _check_sharding("sharding", self.sharding)
        for exception in self.tables:
            _check_sharding(f"tables: {exception!r}", exception.partition("=")[2])
        if self.memory_gb < 0:
            raise ValueError(f"memory_gb={self.memory_gb}: must be positive, or 0 for what the device has free")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve={self.reserve}: must be at least 0 and below 1")
        if self.towers not in PLACEMENTS:
            parse_ranks(self.towers)

    def by_table(self, names: list[str]) -> dict[str, str]:
        """Returns the sharding type asked for, ``auto`` included, for each of the tables ``names``.

        Raises:
            ValueError: an exception names none of the tables.
        """
        chosen: dict[str, str] = dict.fromkeys(names, self.sharding)
        for exception in self.tables:
            name, _, kind = exception.partition("=")
            if name not in chosen:
                raise ValueError(
                    f"tables: {exception!r} names no table of the model; its tables are {', '.join(names)}"
                )
            chosen[name] = kind
        return chosen


def _check_sharding(argument: str, value: str) -> None:
    if value not in get_args(Sharding):
        raise ValueError(f"{argument}: sharding {value!r} must be one of {', '.join(get_args(Sharding))}")
