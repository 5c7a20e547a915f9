"""Plans of towers that run on ranks of their own: TorchRec's planner runs once per tower, in the memory still free."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.utils import placement as shard_placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
)

from torchrec_ext.distributed.placement import PlacementError, TowerPlacement
from torchrec_ext.distributed.plan.draft import PlanError, Request, draft
from torchrec_ext.distributed.plan.tower_plan import TowerPlan
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections, tables_of
from torchrec_ext.distributed.tower_parallel.lookups import (
    sharing_groups,
    towers_by_host,
)
from torchrec_ext.modules.shared_tables import SharedTables, look_ups, readers
from torchrec_ext.modules.tower import Towers

# TorchRec's other types create process groups by host, over all ranks.
WITHIN_A_TOWER = [
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_column_wise",
]


def find_towers(model: nn.Module) -> tuple[str, Towers] | None:
    """Returns the path and the module of the model's Towers; None without Towers."""
    return next(
        (
            (path, module)
            for path, module in model.named_modules()
            if isinstance(module, Towers)
        ),
        None,
    )


def tower_placement(
    model: nn.Module, asked: str, world_size: int
) -> TowerPlacement | None:
    """Returns the placement for ``PlanConfig.towers``; None for towers on every rank.

    Args:
        model: unsharded model.
        asked: text of ``PlanConfig.towers``; ``auto`` means every rank, where the chooser has not replaced it.
        world_size: R, the number of ranks.

    Raises:
        PlacementError: the placement does not fit the model's towers or the ranks, or separates towers that share a
            table.
    """
    if asked in ("data_parallel", "auto"):
        return None
    located = find_towers(model)
    if located is None:
        raise PlacementError(
            f"plan.towers={asked}: {type(model).__name__} has no Towers to place; leave it at data_parallel"
        )
    towers: dict[str, Any] = dict(located[1].items())
    _check_weighted(asked, towers)
    if asked == "tower_parallel":
        # Place towers on ranks in proportion to their cost; towers with a shared table
        # count as one.
        together = {"+".join(unit): unit for unit in sharing_groups(towers)}
        if len(together) == 1 and len(towers) > 1:
            table, names = next(
                (table, names)
                for table, names in readers(towers).items()
                if len(names) > 1
            )
            raise PlacementError(
                f"plan.towers=tower_parallel: the towers {' and '.join(names)} share table '{table}'; "
                "give each a table of its own name, or take plan.towers=data_parallel"
            )
        loads = {}
        for name, unit in together.items():
            loads[name] = sum(tower_cost(towers[tower]) for tower in unit)
        ranks = TowerPlacement.apart(loads, world_size).ranks
        by_tower: dict[str, tuple[int, ...]] = {}
        for name, unit in together.items():
            by_tower |= dict.fromkeys(unit, ranks[name])
        # In the order of the towers, which may differ from that of the units.
        return TowerPlacement(
            ranks={tower: by_tower[tower] for tower in towers}, world_size=world_size
        )
    placement = TowerPlacement.parse(asked, list(towers), world_size)
    _check_together(asked, towers, placement)
    return placement


def tower_cost(tower: nn.Module) -> float:
    """Returns a tower's cost of one row: multiplications of its dense layers plus numbers read from tables."""
    weights: set[str] = set()
    for path, collection in collections(tower):
        weights |= {f"{path}.{name}" for name, _ in collection.named_parameters()}
    dense = sum(
        value.numel() for name, value in tower.named_parameters() if name not in weights
    )
    tables: Any = tower.tables
    looked_up = sum(table.embedding_dim * table.num_features() for table in tables)
    return float(dense + looked_up)


def _check_weighted(setting: str, towers: Mapping[str, Any]) -> None:
    for name, tower in towers.items():
        weighted_features = set(getattr(tower, "weights", {}))
        for table in tower.tables:
            if weighted_features & set(table.feature_names):
                raise PlacementError(
                    f"plan.towers={setting}: table '{table.name}' of tower '{name}' pools by weights, which travel "
                    "with no tower; leave it at data_parallel"
                )


def _check_together(
    setting: str, towers: Mapping[str, Any], placement: TowerPlacement
) -> None:
    """Refuses a placement that separates the towers of a shared table."""
    for table, names in readers(towers).items():
        rank_sets = {placement.ranks[name] for name in names}
        if len(rank_sets) > 1:
            unit = next(unit for unit in sharing_groups(towers) if names[0] in unit)
            ranks_of_unit: set[int] = set()
            for name in unit:
                ranks_of_unit |= set(placement.ranks[name])
            ranks = {name: placement.ranks[name] for name in towers}
            ranks |= dict.fromkeys(unit, tuple(sorted(ranks_of_unit)))
            possible = TowerPlacement(ranks=ranks, world_size=placement.world_size)
            places = []
            for name in names:
                ranks_of_tower = ", ".join(map(str, placement.ranks[name]))
                places.append(f"'{name}' on rank(s) {ranks_of_tower}")
            where = " and ".join(places)
            raise PlacementError(
                f"plan.towers={setting}: the towers {where} share table '{table}', which has one place; "
                f"give them the same ranks, as in plan.towers={possible}, or take auto"
            )


def draft_towers(
    model: nn.Module,
    placement: TowerPlacement,
    request: Request,
    runtime: Runtime,
    usable: int,
    topology: Callable[[Runtime, int], Topology],
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints],
) -> ShardingPlan:
    """Plans each tower's tables on its ranks, and all other tables on all ranks, on this rank alone.

    Args:
        model: unsharded model.
        placement: ranks of its towers.
        request: what is asked for all tables.
        runtime: description of all ranks.
        usable: bytes per rank that tables and their state may take.
        topology: function from a runtime and bytes per rank to the topology of its ranks.
        batch_size: rows per rank and step.
        constraints: TorchRec's own constraints, by table name.

    Raises:
        PlanError: the tables of a tower do not fit on its ranks; the message names the tower and the ranks.
    """
    towers_path, towers = find_towers(model) or ("", Towers({}))
    free = [usable] * runtime.world_size
    tables: dict[str, dict[str, EmbeddingModuleShardingPlan]] = {}
    by_tower = _collections_by_tower(towers, placement)
    # The largest tower goes first, while there is most room.
    for name in sorted(towers, key=lambda name: -_weights(by_tower[name])):
        members = placement.ranks[name]
        # Describe these ranks as a job of their own, with one rank a host if hosts hold
        # unequal numbers of them.
        hosts = Counter(rank // runtime.local_world_size for rank in members)
        counts = set(hosts.values())
        on_each_host = 1
        if len(counts) == 1:
            on_each_host = counts.pop()
        tower_ranks = dataclasses.replace(
            runtime, world_size=len(members), local_world_size=on_each_host
        )
        names = [table.name for table in tables_of(by_tower[name])]
        tower_request = request.on(
            names, tower_ranks, {**_possible(request), **constraints}
        )
        # A tower's ranks look up the rows of all ranks of the job.
        rows = -(-batch_size * runtime.world_size // len(members))
        tables[name] = {}
        if not names:
            continue
        try:
            # A topology has one size of memory for all ranks, so that of the fullest
            # counts.
            drafted = draft(
                by_tower[name],
                tower_request,
                topology(tower_ranks, min(free[rank] for rank in members)),
                rows,
            )
        except PlanError as error:
            where = ", ".join(map(str, members))
            raise PlanError(f"tower '{name}' on rank(s) {where}: {error}") from None
        for option in drafted.options:
            for shard in option.shards:
                # On a CPU, tables are in host memory, and there is no HBM.
                free[members[shard.rank]] -= shard.storage.hbm or shard.storage.ddr
        for path, _ in collections(by_tower[name]):
            shardings = EmbeddingModuleShardingPlan()
            for table, sharding in drafted.plan.get_plan_for_module(path).items():
                shardings[table] = _table_over_all(sharding, members, runtime)
            tables[name][path] = shardings
    rest = _only(
        model, [path for path, _ in collections(model) if not _in_towers(model, path)]
    )
    others = [table.name for table in tables_of(rest)]
    modules: dict[str, Any] = {}
    if others:
        other_request = request.on(others, runtime, constraints)
        modules = dict(
            draft(
                rest, other_request, topology(runtime, min(free)), batch_size
            ).plan.plan
        )
    for name, plans in tables.items():
        for path, plan in plans.items():
            modules[f"{towers_path}.{name}.{path}".lstrip(".")] = plan
    return ShardingPlan({**modules, towers_path: TowerPlan(placement, tables)})


def _collections_by_tower(
    towers: Towers, placement: TowerPlacement
) -> dict[str, nn.Module]:
    """Returns for each tower a module with its collections at their paths, and its hosted look-ups."""
    modules = {}
    for name, tower in towers.items():
        modules[name] = _only(tower, [path for path, _ in collections(tower)])
    for host, names in towers_by_host(dict(towers.items()), placement).items():
        modules[host].add_module("lookups", look_ups(towers, names))
    return modules


def _in_towers(model: nn.Module, path: str) -> bool:
    """Whether the collection at ``path`` belongs to a tower, or to shared tables for a tower to host."""
    names = path.split(".")
    # From the model itself, at the empty path, down to the module above the collection.
    for end in range(len(names)):
        if isinstance(
            model.get_submodule(".".join(names[:end])), Towers | SharedTables
        ):
            return True
    return False


def _weights(tower: nn.Module) -> int:
    tables = tables_of(tower)
    return sum(table.num_embeddings * table.embedding_dim for table in tables)


def _possible(request: Request) -> dict[str, ParameterConstraints]:
    """Returns constraints for tables with sharding ``auto``: the types that TorchRec supports on a subset of ranks."""
    constraints = {}
    for name, choice in request.asked.items():
        if choice.sharding != "auto":
            continue
        current = request.constraints.get(name, ParameterConstraints())
        allowed = current.sharding_types or WITHIN_A_TOWER
        types = [kind for kind in WITHIN_A_TOWER if kind in allowed]
        constraints[name] = dataclasses.replace(current, sharding_types=types)
    return constraints


def _only(model: nn.Module, paths: Iterable[str]) -> nn.Module:
    """Returns a module with nothing but the collections of ``model`` at ``paths``."""
    root = nn.Module()
    for path in paths:
        *above, name = path.split(".")
        parent = root
        for child in above:
            if not hasattr(parent, child):
                parent.add_module(child, nn.Module())
            parent = getattr(parent, child)
        parent.add_module(name, model.get_submodule(path))
    return root


def _table_over_all(
    sharding: ParameterSharding, members: tuple[int, ...], runtime: Runtime
) -> ParameterSharding:
    """Returns a sharding with ranks of the job in place of ranks of the tower."""
    ranks = sharding.ranks
    if ranks is not None:
        ranks = [members[rank] for rank in ranks]
    spec = sharding.sharding_spec
    if isinstance(spec, EnumerableShardingSpec):
        shards = []
        for shard in spec.shards:
            rank = members[shard.placement.rank()]
            placement = shard_placement(
                runtime.device.type, rank, runtime.local_world_size
            )
            shards.append(dataclasses.replace(shard, placement=placement))
        spec = EnumerableShardingSpec(shards)
    return dataclasses.replace(sharding, ranks=ranks, sharding_spec=spec)
