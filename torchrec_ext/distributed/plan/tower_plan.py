"""TowerPlan: TorchRec's plan of a module whose towers have ranks of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

from torchrec_ext.distributed.placement import TowerPlacement


@dataclass
class TowerPlan(ModuleShardingPlan):
    """Plan of a :class:`Towers` module: where each tower runs, and how its tables are sharded over its ranks.

    Args:
        placement: ranks of each tower.
        tables: sharding plans by tower name and path of a collection within the tower; ranks count within the job.
    """

    placement: TowerPlacement
    tables: Mapping[str, Mapping[str, ModuleShardingPlan]]


def table_shardings(plan: ShardingPlan) -> dict[str, ParameterSharding]:
    """Returns the sharding of each table by its name, whatever the path of its collection."""
    shardings: dict[str, ParameterSharding] = {}
    for module in plan.plan.values():
        # A TowerPlan has no tables of its own: the plans of its towers' collections are
        # there too.
        if isinstance(module, EmbeddingModuleShardingPlan):
            shardings |= module
    return shardings
