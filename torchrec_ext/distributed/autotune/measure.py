"""measure(): micro-benchmarks on the ranks of this job, a second or two of them, for the chooser's cost model.

Exchanges of the sizes in question; each tower by itself, its look-ups, dense layers and optimizer, with as many rows as
it has on every rank and as it would have on one; and a few whole steps with towers on every rank, which tell what a
step takes besides. All of it runs on a sample of the model, whose large tables have fewer rows, on every rank at the
same time.

tower_costs(): each tower of a model by itself on one rank, with few rows and with many.
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
from torchrec_ext.distributed.optim.config import Choice, OptimizerConfig, declare_table_optimizer
from torchrec_ext.distributed.optim.hybrid import keyed_optimizers
from torchrec_ext.distributed.parallel import dense_layers
from torchrec_ext.distributed.placement import TowerPlacement, TowerPlan
from torchrec_ext.distributed.plan.cluster import Cluster
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.draft import Request
from torchrec_ext.distributed.plan.measurements import Line, Measurements, TowerCost
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.plan.towers import draft_towers, find_towers
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sharders import sharders
from torchrec_ext.distributed.tables import collections, initialise_tables, table_configs
from torchrec_ext.distributed.tower_parallel.lookups import sharing_groups
from torchrec_ext.distributed.tower_parallel.sharder import shard_tower, tower_sharders
from torchrec_ext.modules.shared_tables import SharedTables
from torchrec_ext.modules.tower import Reads, Towers


def tower_costs(
    sample: Sample, runtime: Runtime, watch: Stopwatch, config: PlanConfig, optimizer: OptimizerConfig
) -> dict[str, TowerCost]:
    """By tower of a model whose towers can be placed, those that share tables as one; every rank calls it."""
    model = copy.deepcopy(sample.model)
    path, towers = find_towers(model) or ("", Towers({}))
    for tower in towers.values():
        if getattr(tower, "released_tables", ()):
            tower.release_tables(())  # type: ignore[operator]  # measured with all its tables, as if they were its own
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
        run = shard_tower(tower, plan.tables[name], by_type, group, runtime.device)
        initialise_tables(tower, 0)
        found[name] = _cost(watch, sample, towers.reads[name], tower, run, stepped, runtime)
    return {
        "+".join(unit): TowerCost.together([found[name] for name in unit])
        for unit in sharing_groups(dict(towers.items()))
    }


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
    optimizers = [
        made for _, made in keyed_optimizers("dense", own, {name: choice for name, (_, choice) in layers.items()})
    ]
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
        whole.append((count, watch.ms(lambda bags=bags, dense=dense: run_backward([run(bags, dense)]))))  # type: ignore[misc]
        tables.append(
            (count, watch.ms(lambda bags=bags, own=own: run_backward([flat_values(one(bags)) for one in own])))
        )  # type: ignore[misc]
    lengths = resized(sample.batch, features, few).lengths()
    return TowerCost(
        rows=few,
        dense=Line.through(
            *((count, max(both - alone, 0.0)) for (count, both), (_, alone) in zip(whole, tables, strict=True))
        ),
        look_up=Line.through(*tables),
        optimizer=stepped,
        dense_bytes=sum(4 * tower.get_parameter(name).numel() for name in dense_layers(tower)),
        row_bytes=8 * float(lengths.sum()) / max(few, 1) + 4 * len(features) + 4 * len(tower.dense),
        pooled_bytes=4 * sum(table.embedding_dim * table.num_features() for table in tower.tables),
        out_bytes=4 * tower.out_features,
    )


_SECONDS = 0.25  # of whole steps, for the cost model


def measure(
    flat: Sample,
    apart: Sample | None,
    runtime: Runtime,
    config: PlanConfig,
    optimizer: OptimizerConfig,
    shardings: Sequence[str],
    trials: Trials,
) -> Measurements:
    """Every rank calls it at the same time and gets the same figures.

    Args:
        flat: of the model as it is where all towers run on every rank.
        apart: of the model as it is where its towers have ranks of their own; None where they cannot.
        runtime: this process's place in the job.
        config: of the plan; sharding types for single tables count here too.
        optimizer: of tables and dense layers.
        shardings: sharding types for all tables; whole steps are run with each.
        trials: gets those steps.

    Raises:
        PlanError: a table cannot be sharded so.
    """
    watch = Stopwatch(runtime)
    tables = [table for _, collection in collections(flat.model) for table in table_configs(collection)]
    dense = sum(4 * flat.model.get_parameter(name).numel() for name in dense_layers(flat.model))
    pooled = 4 * sum(table.embedding_dim * table.num_features() for table in tables) * len(flat.batch)
    towers = {} if apart is None else tower_costs(apart, runtime, watch, _everywhere(config, shardings[0]), optimizer)
    found = _as_rank_0(
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
        plan = str(
            plan_sharding(model, runtime, asked, optimizer=optimizer, batch_size=len(flat.batch), measured=found)
        )
        if plan not in plans:  # what TorchRec's planner chooses may be what was asked for before
            trials.add(flat, asked, found)
            (steps[kind],) = trials.ms([asked], _SECONDS)
        plans.add(plan)
    return dataclasses.replace(found, steps=steps)


def _everywhere(config: PlanConfig, sharding: str) -> PlanConfig:
    return dataclasses.replace(config, sharding=sharding, towers="data_parallel")  # type: ignore[arg-type]


def _looked_up(
    watch: Stopwatch, sample: Sample, runtime: Runtime, config: PlanConfig, optimizer: OptimizerConfig
) -> float:
    """Ms of all collections, sharded as ``config`` asks, one after the other."""
    model = copy.deepcopy(sample.model)
    plan = plan_sharding(model, runtime, config, optimizer=optimizer, batch_size=len(sample.batch))
    declare_table_optimizer(model, optimizer)
    by_type = {sharder.module_type: sharder for sharder in sharders()}
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    calls = []
    for path, collection in list(collections(model)):
        features = [name for table in table_configs(collection) for name in table.feature_names]
        bags = bags_for(features, sample.batch)
        if bags is not None:
            sharded = by_type[type(collection)].shard(collection, plan.get_plan_for_module(path), env, runtime.device)
            initialise_tables(sharded, 0)
            calls.append((sharded, bags.to(runtime.device)))

    def run() -> None:
        outputs = [flat_values(sharded(bags)) for sharded, bags in calls]
        run_backward(outputs)

    return watch.ms(run)


def _memory_rate(towers: Mapping[str, TowerCost]) -> float:
    """TorchRec reckons the backward with its optimizer as twice the forward."""
    read = sum(cost.pooled_bytes * cost.rows for cost in towers.values())
    took = sum(cost.look_up.each * cost.rows for cost in towers.values())
    return 3 * read / took if took else 0.0


def _as_rank_0(found: Measurements, runtime: Runtime) -> Measurements:
    """The times are those of the slowest rank already; the sizes of ranks may differ by a row."""
    box = [found]
    if runtime.world_size > 1:
        dist.broadcast_object_list(box, src=0, device=runtime.device)
    return box[0]
