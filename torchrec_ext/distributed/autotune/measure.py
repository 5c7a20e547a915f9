"""measure(): micro-benchmarks on the ranks of this job for the cost model of choose.py, which itself runs nothing.

They take a second or two: exchanges of the sizes in question; each tower by itself (look-ups, dense layers, optimizer)
with as many rows as it has on every rank and as it would have on one; and a few whole steps with towers on every rank,
which show what a step takes besides. All of it runs on a sample of the model, whose large tables have fewer rows, on
every rank at the same time.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.distributed.autotune.sample import (
    Sample,
    Stopwatch,
    bags_for,
    flat_values,
    resized,
    resized_dense,
    run_backward,
)
from torchrec_ext.distributed.autotune.trials import Trials
from torchrec_ext.distributed.optim.config import Choice, OptimizerConfig
from torchrec_ext.distributed.optim.declared import declare_table_optimizer
from torchrec_ext.distributed.optim.hybrid import keyed_optimizers
from torchrec_ext.distributed.parallel import dense_layers
from torchrec_ext.distributed.placement import TowerPlacement
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.devices import Cluster
from torchrec_ext.distributed.plan.draft import Request
from torchrec_ext.distributed.plan.measurements import Line, Measurements, TowerCost
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.plan.tower_plan import TowerPlan
from torchrec_ext.distributed.plan.towers import draft_towers, find_towers
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sharders import codecs_of, sharders
from torchrec_ext.distributed.tables import collections, initialise_tables, table_configs, tables_of
from torchrec_ext.distributed.tower_parallel.lookups import sharing_groups
from torchrec_ext.distributed.tower_parallel.sharder import shard_tower, tower_sharders
from torchrec_ext.modules.shared_tables import SharedTables
from torchrec_ext.modules.tower import Reads, Towers


def tower_costs(
    sample: Sample, runtime: Runtime, watch: Stopwatch, config: PlanConfig, optimizer: OptimizerConfig
) -> dict[str, TowerCost]:
    """Measures each tower by itself on one rank, with few rows and with many. Collective.

    Args:
        sample: sample of a model whose towers can be placed.
        runtime: this process's rank and device.
        watch: stopwatch of the ranks.
        config: sharding types.
        optimizer: optimizers of tables and dense layers.

    Returns:
        Costs by tower name, towers that share tables as one.
    """
    model = copy.deepcopy(sample.model)
    path, towers = find_towers(model) or ("", Towers({}))
    for tower in towers.values():
        if getattr(tower, "released_tables", ()):
            tower.release_tables(())  # type: ignore[operator]  # measured with all its tables, shared ones too
    for shared_path in [path for path, module in model.named_modules() if isinstance(module, SharedTables)]:
        parent, _, name = shared_path.rpartition(".")
        setattr(model.get_submodule(parent), name, None)
    plan = _whole_on_this_rank(model, path, list(towers), runtime, config, optimizer)
    group = dist.new_group([runtime.rank], use_local_synchronization=True)
    by_type = {sharder.module_type: sharder for sharder in tower_sharders()}
    choices = optimizer.for_layers(dense_layers(model))
    costs = {}
    for name, tower in towers.items():
        layers = {key: tower.get_parameter(key).to(runtime.device) for key in dense_layers(tower)}
        step_ms = _step_ms(watch, layers, {key: choices[f"{path}.{name}.{key}"] for key in layers})
        run = shard_tower(tower, plan.tables[name], by_type, group, runtime.device)
        initialise_tables(tower, 0)
        costs[name] = _cost(watch, sample, towers.reads[name], tower, run, step_ms, runtime)
    return {
        "+".join(unit): TowerCost.together([costs[name] for name in unit])
        for unit in sharing_groups(dict(towers.items()))
    }


def _whole_on_this_rank(
    model: nn.Module, path: str, names: list[str], runtime: Runtime, config: PlanConfig, optimizer: OptimizerConfig
) -> TowerPlan:
    """Plans every tower on this rank, its tables whole."""
    single = dataclasses.replace(runtime, world_size=1, local_world_size=1)
    request = Request.of(model, single, config, optimizer, {})
    here = TowerPlacement(ranks=dict.fromkeys(names, (runtime.rank,)), world_size=runtime.world_size)
    kind: Any = runtime.device.type
    topology = Cluster(world_size=1, local_world_size=1, device=kind, hbm_gb=1e6, ddr_gb=1e6).topology()
    plan = draft_towers(model, here, request, runtime, 2**50, lambda *_: topology, 1, {})
    tower_plan: Any = plan.plan[path]
    return tower_plan  # type: ignore[no-any-return]


def _step_ms(watch: Stopwatch, layers: Mapping[str, Tensor], choices: Mapping[str, Choice]) -> float:
    """Measures the ms of a step of the optimizers of dense layers."""
    if not layers:
        return 0.0
    copies = {name: nn.Parameter(value.detach().clone()) for name, value in layers.items()}
    for parameter in copies.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizers = [optimizer for _, optimizer in keyed_optimizers("dense", copies, choices)]
    return watch.ms(lambda: [optimizer.step() for optimizer in optimizers])


def _cost(
    watch: Stopwatch,
    sample: Sample,
    reads: Reads,
    tower: Any,
    run: Callable[[KeyedJaggedTensor, Tensor], Tensor],
    step_ms: float,
    runtime: Runtime,
) -> TowerCost:
    rows: Any = sample.batch.shared if reads.shared else sample.batch
    features = list(dict.fromkeys(name for table in tower.tables for name in table.feature_names))
    few = rows.sparse.stride()
    many = few * max(runtime.world_size, 2)
    pooled = [collection for _, collection in collections(tower)]
    whole, tables = [], []
    for count in (few, many):
        bags = resized(sample.batch, features, count).to(runtime.device)
        dense = resized_dense(rows.dense, reads.dense, count).to(runtime.device)

        def run_tower(bags: KeyedJaggedTensor = bags, dense: Tensor = dense) -> None:
            run_backward([run(bags, dense)])

        def look_up(bags: KeyedJaggedTensor = bags) -> None:
            run_backward([flat_values(collection(bags)) for collection in pooled])

        whole.append((count, watch.ms(run_tower)))
        tables.append((count, watch.ms(look_up)))
    lengths = resized(sample.batch, features, few).lengths()
    dense_ms = [(count, max(ms - tables_ms, 0.0)) for (count, ms), (_, tables_ms) in zip(whole, tables, strict=True)]
    return TowerCost(
        rows=few,
        dense=Line.through(*dense_ms),
        look_up=Line.through(*tables),
        optimizer=step_ms,
        dense_bytes=sum(4 * tower.get_parameter(name).numel() for name in dense_layers(tower)),
        row_bytes=8 * float(lengths.sum()) / max(few, 1) + 4 * len(features) + 4 * len(tower.dense),
        pooled_bytes=4 * sum(table.embedding_dim * table.num_features() for table in tower.tables),
        out_bytes=4 * tower.out_features,
    )


_SECONDS = 0.25  # spent on whole steps, for the cost model


def measure(
    flat: Sample,
    apart: Sample | None,
    runtime: Runtime,
    config: PlanConfig,
    optimizer: OptimizerConfig,
    shardings: Sequence[str],
    trials: Trials,
) -> Measurements:
    """Measures on all ranks at the same time; every rank gets the same figures. Collective.

    Args:
        flat: sample of the model to use where all towers run on every rank.
        apart: sample of the model to use where towers have ranks of their own; None where they cannot.
        runtime: this process's rank and device.
        config: plan settings; sharding types of single tables apply here too.
        optimizer: optimizers of tables and dense layers.
        shardings: sharding types for all tables; whole steps are run with each.
        trials: trials that the whole steps are added to.

    Raises:
        PlanError: a table cannot be sharded as asked.
    """
    watch = Stopwatch(runtime)
    tables = tables_of(flat.model)
    dense = sum(4 * flat.model.get_parameter(name).numel() for name in dense_layers(flat.model))
    pooled = 4 * sum(table.embedding_dim * table.num_features() for table in tables) * len(flat.batch)
    towers = {} if apart is None else tower_costs(apart, runtime, watch, _everywhere(config, shardings[0]), optimizer)
    measured = _as_rank_0(
        Measurements(
            world_size=runtime.world_size,
            rows=len(flat.batch),
            all_to_all=watch.all_to_all(max(pooled, 1 << 16)),
            all_reduce=watch.all_reduce(max(dense, 1 << 16)),
            steps={},
            looked_up=_looked_up(watch, flat, runtime, _everywhere(config, shardings[0]), optimizer),
            towers=towers,
            dense_bytes=dense,
            memory_rate=_memory_rate(towers),
        ),
        runtime,
    )
    steps: dict[str, float] = {}
    plans: set[str] = set()
    for kind in shardings:
        asked = _everywhere(config, kind)
        model = copy.deepcopy(flat.model)
        rows = len(flat.batch)
        plan = str(plan_sharding(model, runtime, asked, optimizer=optimizer, batch_size=rows, measured=measured))
        if plan not in plans:  # TorchRec's planner may choose a plan that was asked for before
            trials.add(flat, asked, measured)
            (steps[kind],) = trials.ms([asked], _SECONDS)
        plans.add(plan)
    return dataclasses.replace(measured, steps=steps)


def _everywhere(config: PlanConfig, sharding: str) -> PlanConfig:
    return dataclasses.replace(config, sharding=sharding, towers="data_parallel")  # type: ignore[arg-type]


def _looked_up(
    watch: Stopwatch, sample: Sample, runtime: Runtime, config: PlanConfig, optimizer: OptimizerConfig
) -> float:
    """Measures the ms of all collections, sharded as ``config`` asks, one after the other."""
    model = copy.deepcopy(sample.model)
    plan = plan_sharding(model, runtime, config, optimizer=optimizer, batch_size=len(sample.batch))
    declare_table_optimizer(model, optimizer)
    by_type = {sharder.module_type: sharder for sharder in sharders(codecs_of(config))}
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    calls = []
    for path, collection in list(collections(model)):
        features = [name for table in table_configs(collection) for name in table.feature_names]
        bags = bags_for(features, sample.batch)
        if bags is not None:
            sharded = by_type[type(collection)].shard(collection, plan.get_plan_for_module(path), env, runtime.device)
            initialise_tables(sharded, 0)
            calls.append((sharded, bags.to(runtime.device)))

    return watch.ms(lambda: run_backward([flat_values(sharded(bags)) for sharded, bags in calls]))


def _memory_rate(towers: Mapping[str, TowerCost]) -> float:
    """Returns the bytes of tables read per ms, forward; TorchRec takes backward and optimizer for twice the forward."""
    read = sum(cost.pooled_bytes * cost.rows for cost in towers.values())
    took = sum(cost.look_up.each * cost.rows for cost in towers.values())
    return 3 * read / took if took else 0.0


def _as_rank_0(measured: Measurements, runtime: Runtime) -> Measurements:
    """Returns rank 0's figures: times are the slowest rank's already, but sizes may differ by a row."""
    box = [measured]
    if runtime.world_size > 1:
        dist.broadcast_object_list(box, src=0, device=runtime.device)
    return box[0]
