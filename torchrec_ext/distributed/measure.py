"""measure(): micro-benchmarks on the ranks of this job, a second or two of them, for the chooser's cost model.

Exchanges of the sizes in question; each tower by itself, its look-ups, dense layers and optimizer, with as many rows as it has on
every rank and as it would have on one; and a few whole steps with towers on every rank, which tell what a step takes besides. All
of it runs on a sample of the model, whose large tables have fewer rows, on every rank at the same time.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv

from torchrec_ext.distributed.measurements import Measurements, TowerCost
from torchrec_ext.distributed.optimizers import OptimizerConfig, declare_table_optimizer
from torchrec_ext.distributed.parallel import dense_layers
from torchrec_ext.distributed.planning import PlanConfig, plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sample import Sample, back, bags_for, values_of
from torchrec_ext.distributed.sharders import sharders
from torchrec_ext.distributed.stopwatch import Stopwatch
from torchrec_ext.distributed.tables import collections, initialise_tables, table_configs
from torchrec_ext.distributed.tower_costs import tower_costs
from torchrec_ext.distributed.trials import Trials

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
        plan = str(plan_sharding(model, runtime, asked, optimizer=optimizer, batch_size=len(flat.batch), measured=found))
        if plan not in plans:  # what TorchRec's planner chooses may be what was asked for before
            trials.add(flat, asked, found)
            (steps[kind],) = trials.ms([asked], _SECONDS)
        plans.add(plan)
    return dataclasses.replace(found, steps=steps)


def _everywhere(config: PlanConfig, sharding: str) -> PlanConfig:
    return dataclasses.replace(config, sharding=sharding, towers="data_parallel")  # type: ignore[arg-type]


def _looked_up(watch: Stopwatch, sample: Sample, runtime: Runtime, config: PlanConfig, optimizer: OptimizerConfig) -> float:
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
        outputs = [values_of(sharded(bags)) for sharded, bags in calls]
        back(outputs)

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
