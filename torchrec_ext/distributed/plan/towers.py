"""Plans of towers that run on ranks of their own: TorchRec's planner once for each tower, on its ranks and what is left of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.planner.utils import placement as place_of_shard
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
)

from torchrec_ext.distributed.placement import PlacementError, TowerPlacement, TowerPlan
from torchrec_ext.distributed.plan.draft import PlanError, Request, draft
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections, table_configs
from torchrec_ext.distributed.tower_parallel.lookups import hosts, units
from torchrec_ext.modules.shared_tables import SharedTables, look_ups, readers
from torchrec_ext.modules.tower import Towers

# TorchRec's other types make process groups by host, of all ranks.
WITHIN_A_TOWER = ["data_parallel", "table_wise", "row_wise", "column_wise", "table_column_wise"]


def find_towers(model: nn.Module) -> tuple[str, Towers] | None:
    """The path of the model's Towers, and they."""
    return next(((path, module) for path, module in model.named_modules() if isinstance(module, Towers)), None)


def tower_placement(model: nn.Module, asked: str, world_size: int) -> TowerPlacement | None:
    """The placement that ``PlanConfig.towers`` asks for; None for towers that run on every rank.

    Args:
        model: unsharded.
        asked: the text; ``auto`` is every rank here, unless the chooser has put a placement in its stead.
        world_size: R.

    Raises:
        PlacementError: it does not fit the model's towers or the ranks, or it takes towers apart that share a table.
    """
    if asked in ("data_parallel", "auto"):
        return None
    found = find_towers(model)
    if found is None:
        raise PlacementError(
            f"plan.towers={asked}: {type(model).__name__} has no Towers to place; leave it at data_parallel"
        )
    towers: dict[str, Any] = dict(found[1].items())
    _check_weighted(asked, towers)
    if asked == "tower_parallel":
        return _apart(towers, world_size)
    placement = TowerPlacement.parse(asked, list(towers), world_size)
    _check_together(asked, towers, placement)
    return placement


def _apart(towers: Mapping[str, Any], world_size: int) -> TowerPlacement:
    """Towers that share a table are one."""
    together = {"+".join(unit): unit for unit in units(towers)}
    if len(together) == 1 and len(towers) > 1:
        table, names = next((table, names) for table, names in readers(towers).items() if len(names) > 1)
        raise PlacementError(
            f"plan.towers=tower_parallel: the towers {' and '.join(names)} share table '{table}', so that all towers "
            "have one set of ranks, and none runs beside another; give each a table of its own name, or leave "
            "plan.towers at data_parallel"
        )
    loads = {name: sum(tower_cost(towers[tower]) for tower in unit) for name, unit in together.items()}
    ranks = TowerPlacement.apart(loads, world_size).ranks
    of_tower = {tower: ranks[name] for name, unit in together.items() for tower in unit}
    return TowerPlacement(ranks={tower: of_tower[tower] for tower in towers}, world_size=world_size)


def tower_cost(tower: nn.Module) -> float:
    """What a row costs a tower: the multiplications of its dense layers, and as many numbers as it reads from tables."""
    own = {f"{path}.{name}" for path, collection in collections(tower) for name, _ in collection.named_parameters()}
    dense = sum(value.numel() for name, value in tower.named_parameters() if name not in own)
    tables: Any = tower.tables
    return float(dense + sum(table.embedding_dim * table.num_features() for table in tables))


def _check_weighted(asked: str, towers: Mapping[str, Any]) -> None:
    for name, tower in towers.items():
        weighted = next(
            (table for table in tower.tables if set(table.feature_names) & set(getattr(tower, "weights", {}))), None
        )
        if weighted is not None:
            raise PlacementError(
                f"plan.towers={asked}: table '{weighted.name}' of tower '{name}' pools by weights, which travel with "
                "no tower; leave it at data_parallel"
            )


def _check_together(asked: str, towers: Mapping[str, Any], placement: TowerPlacement) -> None:
    """A table has one place, and so have the towers that share it."""
    for table, names in readers(towers).items():
        apart = {placement.ranks[name] for name in names}
        if len(apart) > 1:
            unit = next(unit for unit in units(towers) if names[0] in unit)
            everywhere = tuple(sorted({rank for name in unit for rank in placement.ranks[name]}))
            ranks = {name: everywhere if name in unit else placement.ranks[name] for name in towers}
            possible = TowerPlacement(ranks=ranks, world_size=placement.world_size)
            where = " and ".join(f"'{name}' on rank(s) {', '.join(map(str, placement.ranks[name]))}" for name in names)
            raise PlacementError(
                f"plan.towers={asked} puts the towers {where}, but they share table '{table}', which has one place: "
                f"give them the same ranks, as in plan.towers={possible}; or take plan.towers=auto, which keeps them "
                "together, or give each a table of its own name"
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
    """The plan of each tower's tables on its ranks and of all other tables on all ranks; this rank alone makes it.

    Args:
        model: unsharded.
        placement: of its towers.
        request: what is asked of all tables.
        runtime: all ranks.
        usable: bytes per rank that tables and their state may take.
        topology: of the ranks that a runtime describes, with bytes for each of them.
        batch_size: rows per rank and step.
        constraints: TorchRec's own, by table name.

    Raises:
        PlanError: the tables of a tower do not fit on its ranks; the message names the tower and the ranks.
    """
    path, towers = find_towers(model) or ("", Towers({}))
    free = [usable] * runtime.world_size
    tables: dict[str, dict[str, EmbeddingModuleShardingPlan]] = {}
    held = _held(towers, placement)
    for name in sorted(towers, key=lambda name: -_weights(held[name])):  # the largest while there is most room
        members = placement.ranks[name]
        place = _ranks_of(runtime, members)
        names = [table.name for _, collection in collections(held[name]) for table in table_configs(collection)]
        own = request.on(names, place, {**_possible(request), **constraints})
        rows = -(-batch_size * runtime.world_size // len(members))
        tables[name] = {}
        if not names:
            continue
        try:
            made = draft(held[name], own, topology(place, min(free[rank] for rank in members)), rows)
        except PlanError as error:
            where = ", ".join(map(str, members))
            raise PlanError(f"tower '{name}' on rank(s) {where}: {error}") from None
        _take(free, made.options, members)
        plans = {at: made.plan.get_plan_for_module(at) for at, _ in collections(held[name])}
        tables[name] = {at: _over_all(plan, members, runtime) for at, plan in plans.items()}
    rest = _only(model, [at for at, _ in collections(model) if not _of_towers(model, at)])
    others = [table.name for _, collection in collections(rest) for table in table_configs(collection)]
    plan: dict[str, Any] = {}
    if others:
        plan = dict(
            draft(rest, request.on(others, runtime, constraints), topology(runtime, min(free)), batch_size).plan.plan
        )
    plan |= {f"{path}.{name}.{at}".lstrip("."): own for name, plans in tables.items() for at, own in plans.items()}
    return ShardingPlan({**plan, path: TowerPlan(placement, tables)})


def _held(towers: Towers, placement: TowerPlacement) -> dict[str, nn.Module]:
    """By tower its collections at their paths, and the look-ups that it hosts."""
    held = {name: _only(tower, [at for at, _ in collections(tower)]) for name, tower in towers.items()}
    for host, names in hosts(dict(towers.items()), placement).items():
        held[host].add_module("lookups", look_ups(towers, names))
    return held


def _of_towers(model: nn.Module, path: str) -> bool:
    """Whether the collection at ``path`` is a tower's, or one of those that towers will host."""
    parts = path.split(".")
    above = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts)))
    return any(isinstance(module, Towers | SharedTables) for module in above)


def _weights(tower: nn.Module) -> int:
    tables = [table for _, collection in collections(tower) for table in table_configs(collection)]
    return sum(table.num_embeddings * table.embedding_dim for table in tables)


def _possible(request: Request) -> dict[str, ParameterConstraints]:
    """For tables whose sharding is free, what TorchRec can do on some of the ranks."""
    found = {}
    for name in (name for name, kind in request.sharding.items() if kind == "auto"):
        known = request.constraints.get(name, ParameterConstraints())
        types = [kind for kind in WITHIN_A_TOWER if kind in (known.sharding_types or WITHIN_A_TOWER)]
        found[name] = dataclasses.replace(known, sharding_types=types)
    return found


def _only(model: nn.Module, paths: Iterable[str]) -> nn.Module:
    """Nothing but the collections at ``paths``."""
    found = nn.Module()
    for path in paths:
        *above, name = path.split(".")
        parent = found
        for part in above:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(name, model.get_submodule(path))
    return found


def _ranks_of(runtime: Runtime, members: tuple[int, ...]) -> Runtime:
    """These ranks as a job of their own; on hosts that hold unequal numbers of them, as one to a host."""
    hosts = [rank // runtime.local_world_size for rank in members]
    counts = {hosts.count(host) for host in hosts}
    return dataclasses.replace(
        runtime, world_size=len(members), local_world_size=counts.pop() if len(counts) == 1 else 1
    )


def _take(free: list[int], options: list[ShardingOption], members: tuple[int, ...]) -> None:
    for shard in (shard for option in options for shard in option.shards):
        free[members[shard.rank]] -= shard.storage.hbm or shard.storage.ddr


def _over_all(
    plan: EmbeddingModuleShardingPlan, members: tuple[int, ...], runtime: Runtime
) -> EmbeddingModuleShardingPlan:
    """From ranks counted within the tower to ranks of the job."""
    return EmbeddingModuleShardingPlan({name: _moved(own, members, runtime) for name, own in plan.items()})


def _moved(own: ParameterSharding, members: tuple[int, ...], runtime: Runtime) -> ParameterSharding:
    ranks = None if own.ranks is None else [members[rank] for rank in own.ranks]
    spec = own.sharding_spec
    if isinstance(spec, EnumerableShardingSpec):
        places = [members[shard.placement.rank()] for shard in spec.shards]
        spec = EnumerableShardingSpec(
            [
                dataclasses.replace(
                    shard, placement=place_of_shard(runtime.device.type, rank, runtime.local_world_size)
                )
                for shard, rank in zip(spec.shards, places, strict=True)
            ]
        )
    return dataclasses.replace(own, ranks=ranks, sharding_spec=spec)
