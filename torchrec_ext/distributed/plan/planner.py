"""plan_sharding(): TorchRec's planner on the devices of this job.

small_tables_whole(): settings by which tables that are small all together are on every rank, where it is free.
"""

from __future__ import annotations

import copy
import dataclasses
import logging

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ShardingPlan, ShardingType

from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.draft import (
    PlanError,
    Request,
    draft,
)
from torchrec_ext.distributed.runtime import Runtime, available_memory
from torchrec_ext.distributed.sharders import refused_because
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.distributed.tables import table_shardings, tables_of


def plan_sharding(
    model: nn.Module,
    runtime: Runtime,
    config: PlanConfig | None = None,
    *,
    optimizer: OptimizerConfig | None = None,
    batch_size: int = 512,
) -> ShardingPlan:
    """Plans the sharding of ``model`` on the ranks of this job with TorchRec's planner. Collective.

    Every rank gets the same plan, or raises the same error.

    Args:
        model: any module that holds EmbeddingBagCollections or EmbeddingCollections, also on the meta device.
        runtime: this process's rank and device.
        config: sharding types and memory.
        optimizer: optimizers of the tables, whose state takes memory too; those given to :func:`hybrid_parallel`.
        batch_size: rows per rank and step, for the cost model.

    Raises:
        PlanError: the tables do not fit, or cannot be sharded as asked.
    """
    config = config or PlanConfig()
    # On all ranks: settings that cannot be are the same error everywhere.
    request = Request.of(model, runtime, config, optimizer or OptimizerConfig())
    outcome: list[ShardingPlan | Exception] = [RuntimeError("no plan came from rank 0")]
    # The planner runs on rank 0 alone. TorchRec's collective_plan would leave the other
    # ranks waiting where it fails.
    if runtime.rank == 0:
        try:
            # Measured on rank 0: hosts of one job are taken to be equal.
            usable = int(_capacity(config, runtime) * (1 - config.reserve))
            host = int(
                available_memory() / runtime.local_world_size * (1 - config.reserve)
            )
            topology = _topology(runtime, usable, host)
            outcome = [draft(model, request, topology, batch_size)]
        except PlanError as error:
            outcome = [error]
        # Any failure must reach the other ranks, which wait in the broadcast.
        except Exception as error:
            logging.getLogger(__name__).exception("the planner failed")
            outcome = [
                RuntimeError(
                    f"the planner failed on rank 0: {type(error).__name__}: {error}"
                )
            ]
    if runtime.world_size > 1:
        dist.broadcast_object_list(outcome, src=0, device=runtime.device)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


# Most weights of all tables together that are cheaper to replicate than to shard, on a
# CPU. With six equal tables on 2 ranks, replicas made a step 1.15 to 1.32 times as fast
# at .05 M to .38 M weights, and slower (.74 to .87) from 1 M on.
SMALL_WEIGHTS = 2**18


# A line for the user whose tables are so.
SMALL_NOTE = (
    f"plan.sharding=auto: all tables together have {SMALL_WEIGHTS:,} weights or fewer, so each rank has them whole, "
    "which is faster than an exchange in each step"
)


def small_tables_whole(
    model: nn.Module,
    runtime: Runtime,
    config: PlanConfig,
    optimizer: OptimizerConfig,
    sync: SyncConfig | None = None,
) -> PlanConfig:
    """Returns settings that replicate every table if all together have few weights.

    TorchRec's cost model counts bytes, and so shards tables whatever their size. On a CPU a step without exchanges is
    faster as long as all gradients together travel in about the time of the messages that it saves.

    Args:
        model: unsharded model.
        runtime: this process's rank and device.
        config: sharding types that were asked for.
        optimizer: optimizers of the tables; with ``clip_norm`` the norm would then take in the tables.
        sync: what ranks exchange; the rule was measured for gradients exchanged in every step, the default.

    Returns:
        ``config`` with these settings; as it is if a table is large, asked for otherwise, or cannot be on every rank,
        or where there is one rank or a GPU.
    """
    tables = tables_of(model)
    replicated = ShardingType.DATA_PARALLEL.value
    choices = config.choices([table.name for table in tables]).values()
    free = all(
        (choice.sharding, choice.kernel) == ("auto", "auto") for choice in choices
    )
    possible = not any(refused_because(table, replicated, "cpu") for table in tables)
    weights = sum(table.num_embeddings * table.embedding_dim for table in tables)
    if (
        runtime.world_size == 1
        or runtime.device.type != "cpu"
        or (sync or SyncConfig()) != SyncConfig()
        or optimizer.clip_norm
        or weights > SMALL_WEIGHTS
        or not (free and possible)
    ):
        return config
    return dataclasses.replace(config, sharding="data_parallel")


def on_own_device(plan: ShardingPlan, runtime: Runtime) -> ShardingPlan:
    """Returns ``plan`` with this rank's shards on its own device.

    TorchRec's planner gives the local ranks of a host its GPUs from 0 on; a job on some of the GPUs has others, and
    TorchRec checks that a shard is where its plan says.
    """
    if runtime.device.type == "cpu":
        return plan
    moved = copy.deepcopy(plan)
    device = _remote_device(f"rank:{runtime.rank}/{runtime.device}")
    for sharding in table_shardings(moved).values():
        for shard in getattr(sharding.sharding_spec, "shards", ()):
            if shard.placement.rank() == runtime.rank:
                shard.placement = device
    return moved


def _topology(runtime: Runtime, capacity: int, host: int) -> Topology:
    """Returns the topology of ranks with ``capacity`` bytes for tables each; GPUs with ``host`` bytes beside them."""
    hardware = HardwareConfig(ddr_cap_bytes=capacity)
    if runtime.device.type == "cuda":
        hardware = HardwareConfig(hbm_cap_bytes=capacity, ddr_cap_bytes=host)
    return TopologyFactory.create_topology(
        TrainerConfig(
            world_size=runtime.world_size, local_world_size=runtime.local_world_size
        ),
        hardware,
        KernelConfig(compute_device=runtime.device.type),
    )


def _capacity(config: PlanConfig, runtime: Runtime) -> int:
    """Returns the bytes per rank for tables, their optimizer state and the reserve."""
    if config.memory_gb:
        return int(config.memory_gb * 1024**3)
    if runtime.device.type == "cuda":
        return int(torch.cuda.mem_get_info(runtime.device)[0])
    return available_memory() // runtime.local_world_size
