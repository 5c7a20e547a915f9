"""tower_costs(): each tower of a model by itself on one rank, with few rows and with many."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.distributed.choices import Choice
from torchrec_ext.distributed.cluster import Cluster
from torchrec_ext.distributed.drafting import Request
from torchrec_ext.distributed.hybrid_optimizer import keyed_optimizers
from torchrec_ext.distributed.measurements import Line, TowerCost
from torchrec_ext.distributed.optimizers import OptimizerConfig
from torchrec_ext.distributed.parallel import dense_layers
from torchrec_ext.distributed.placement import TowerPlacement, TowerPlan
from torchrec_ext.distributed.planning import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sample import Sample, back, resized, resized_dense, values_of
from torchrec_ext.distributed.stopwatch import Stopwatch
from torchrec_ext.distributed.tables import collections, initialise_tables
from torchrec_ext.distributed.tower_lookups import units
from torchrec_ext.distributed.tower_planning import draft_towers, find_towers
from torchrec_ext.distributed.tower_ranks import on_ranks, tower_sharders
from torchrec_ext.modules.shared_tables import SharedTables
from torchrec_ext.modules.towers import Reads, Towers


def tower_costs(
    sample: Sample, runtime: Runtime, watch: Stopwatch, config: PlanConfig, optimizer: OptimizerConfig
) -> dict[str, TowerCost]:
    """By tower of a model whose towers can be placed, those that share tables as one; every rank calls it."""
    model = copy.deepcopy(sample.model)
    path, towers = find_towers(model) or ("", Towers({}))
    for tower in towers.values():
        if getattr(tower, "lent", ()):
            tower.lend(())  # type: ignore[operator]  # measured with all its tables, as if they were its own
    for beside in (at for at, module in model.named_modules() if isinstance(module, SharedTables)):
        parent, _, name = beside.rpartition(".")
        setattr(model.get_submodule(parent), name, None)
    plan = _alone(model, path, list(towers), runtime, config, optimizer)
    group = dist.new_group([runtime.rank], use_local_synchronization=True)
    by_type = {sharder.module_type: sharder for sharder in tower_sharders()}
    choices = optimizer.for_layers(dense_layers(model))
    found = {}
    for name, tower in towers.items():
        layers = {key: value for key in dense_layers(tower) for value in [tower.get_parameter(key).to(runtime.device)]}
        stepped = _step_ms(watch, {key: (value, choices[f"{path}.{name}.{key}"]) for key, value in layers.items()})
        run = on_ranks(tower, plan.tables[name], by_type, group, runtime.device)
        initialise_tables(tower, 0)
        found[name] = _cost(watch, sample, towers.reads[name], tower, run, stepped, runtime)
    return {"+".join(unit): TowerCost.together([found[name] for name in unit]) for unit in units(dict(towers.items()))}


def _alone(
    model: nn.Module, path: str, names: list[str], runtime: Runtime, config: PlanConfig, optimizer: OptimizerConfig
) -> TowerPlan:
    """Every tower on this rank, its tables whole."""
    one = dataclasses.replace(runtime, world_size=1, local_world_size=1)
    request = Request.of(model, one, config, optimizer, {})
    here = TowerPlacement(ranks=dict.fromkeys(names, (runtime.rank,)), world_size=runtime.world_size)
    kind: Any = runtime.device.type
    topology = Cluster(world_size=1, local_world_size=1, device=kind, hbm_gb=1e6, ddr_gb=1e6).topology()
    plan = draft_towers(model, here, request, runtime, 2**50, lambda *_: topology, 1, {})
    found: Any = plan.plan[path]
    return found  # type: ignore[no-any-return]


def _step_ms(watch: Stopwatch, layers: Mapping[str, tuple[Tensor, Choice]]) -> float:
    """Ms of a step of the optimizers of dense layers."""
    if not layers:
        return 0.0
    own = {name: nn.Parameter(value.detach().clone()) for name, (value, _) in layers.items()}
    for parameter in own.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizers = [made for _, made in keyed_optimizers("dense", own, {name: choice for name, (_, choice) in layers.items()})]
    return watch.ms(lambda: [made.step() for made in optimizers])


def _cost(
    watch: Stopwatch,
    sample: Sample,
    reads: Reads,
    tower: Any,
    run: Callable[[KeyedJaggedTensor, Tensor], Tensor],
    stepped: float,
    runtime: Runtime,
) -> TowerCost:
    rows: Any = sample.batch.shared if reads.shared else sample.batch
    features = list(dict.fromkeys(name for table in tower.tables for name in table.feature_names))
    few = rows.sparse.stride()
    many = few * max(runtime.world_size, 2)
    whole, tables = [], []
    for count in (few, many):
        bags = resized(sample.batch, features, count).to(runtime.device)
        dense = resized_dense(rows.dense, reads.dense, count).to(runtime.device)
        own = [collection for _, collection in collections(tower)]
        whole.append((count, watch.ms(lambda bags=bags, dense=dense: back([run(bags, dense)]))))  # type: ignore[misc]
        tables.append((count, watch.ms(lambda bags=bags, own=own: back([values_of(one(bags)) for one in own]))))  # type: ignore[misc]
    lengths = resized(sample.batch, features, few).lengths()
    return TowerCost(
        rows=few,
        dense=Line.through(*((count, max(both - alone, 0.0)) for (count, both), (_, alone) in zip(whole, tables, strict=True))),
        look_up=Line.through(*tables),
        optimizer=stepped,
        dense_bytes=sum(4 * tower.get_parameter(name).numel() for name in dense_layers(tower)),
        row_bytes=8 * float(lengths.sum()) / max(few, 1) + 4 * len(features) + 4 * len(tower.dense),
        pooled_bytes=4 * sum(table.embedding_dim * table.num_features() for table in tower.tables),
        out_bytes=4 * tower.out_features,
    )
