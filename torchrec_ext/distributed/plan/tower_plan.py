"""TowerPlan: TorchRec's plan of a module whose towers have ranks of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchrec.distributed.types import ModuleShardingPlan

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
