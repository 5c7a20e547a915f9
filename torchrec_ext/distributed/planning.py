"""plan_sharding(): TorchRec's planner on the devices of this job."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    PlannerError,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_ext.distributed.explain import refusal
from torchrec_ext.distributed.kernels import possible, refused_because
from torchrec_ext.distributed.optimizers import OptimizerConfig, declare_table_optimizer, shardings
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections, table_configs

Sharding = Literal["auto", "data_parallel", "table_wise", "row_wise", "column_wise", "table_column_wise"]
GB = 1024**3


class PlanError(ValueError):
    """No plan fits: the message gives the sizes, the capacity and what would make it fit."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How tables are spread over ranks.

    Args:
        sharding: one sharding type for every table, or ``auto``: TorchRec's planner chooses per table.
        tables: exceptions by table, as ``("user_id=row_wise", "genres=data_parallel")``.
        memory_gb: memory per rank that tables may take, GiB; what the device has free, divided by its processes, where 0.
        reserve: share of that memory kept for dense layers, activations and buffers, 0 to 1.
    """

    sharding: Sharding = "auto"
    tables: tuple[str, ...] = ()
    memory_gb: float = 0.0
    reserve: float = 0.15

    def __post_init__(self) -> None:
        _check_sharding("sharding", self.sharding)
        for exception in self.tables:
            _check_sharding(f"tables: {exception!r}", exception.partition("=")[2])
        if self.memory_gb < 0:
            raise ValueError(f"memory_gb={self.memory_gb}: must be positive, or 0 for what the device has free")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve={self.reserve}: must be at least 0 and below 1")

    def by_table(self, names: list[str]) -> dict[str, str]:
        """The sharding type of each table, ``auto`` included."""
        chosen: dict[str, str] = dict.fromkeys(names, self.sharding)
        for exception in self.tables:
            name, _, kind = exception.partition("=")
            if name not in chosen:
                raise ValueError(f"tables: {exception!r} names no table of the model; its tables are {', '.join(names)}")
            chosen[name] = kind
        return chosen


def _check_sharding(argument: str, value: str) -> None:
    if value not in get_args(Sharding):
        raise ValueError(f"{argument}: sharding {value!r} must be one of {', '.join(get_args(Sharding))}")


class RowWiseOnCpu(BaseEmbeddingSharder):
    """Adds row_wise to what a sharder offers on the CPU.

    TorchRec's kernels and collectives support it there, its own list leaves it out (torchrec #1252, #1396).
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The sharding types for this device."""
        types: list[str] = super().sharding_types(compute_device_type)
        row_wise = ShardingType.ROW_WISE.value
        return types if row_wise in types else [*types, row_wise]


class BagSharder(RowWiseOnCpu, EmbeddingBagCollectionSharder):
    """TorchRec's sharder of EmbeddingBagCollection, with row_wise on the CPU too."""


class SequenceSharder(RowWiseOnCpu, EmbeddingCollectionSharder):
    """TorchRec's sharder of EmbeddingCollection, with row_wise on the CPU too."""


def sharders() -> list[ModuleSharder[nn.Module]]:
    """The sharders for every kind of collection that a tower may hold."""
    return [BagSharder(), SequenceSharder()]


def plan_sharding(
    model: nn.Module,
    runtime: Runtime,
    config: PlanConfig | None = None,
    *,
    optimizer: OptimizerConfig | None = None,
    batch_size: int = 512,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> ShardingPlan:
    """TorchRec's plan for ``model`` on the ranks of this job; every rank must call it and gets the same plan or the same error.

    Args:
        model: any module that holds EmbeddingBagCollections or EmbeddingCollections, also on the meta device.
        runtime: this process's place in the job.
        config: sharding types and memory.
        optimizer: of the tables, whose state takes memory too; the same as is given to :func:`hybrid_parallel`.
        batch_size: rows per rank and step, for the cost model.
        constraints: TorchRec's own constraints by table name, for what ``config`` cannot say; they win.

    Raises:
        PlanError: the tables do not fit, or cannot be sharded as asked, on every rank alike.
    """
    config, optimizer = config or PlanConfig(), optimizer or OptimizerConfig()
    tables = [table for _, collection in collections(model) for table in table_configs(collection)]
    # TorchRec's planner counts the state of the optimizer that a table names, and none where it names none.
    choices = declare_table_optimizer(model, optimizer)
    chosen = shardings(tables, choices, config.by_table([table.name for table in tables]), runtime.device.type)
    wanted = {table.name: _constraint(table, chosen[table.name], runtime) for table in tables}
    own = {name: constraint for name, constraint in wanted.items() if constraint is not None}
    outcome: list[ShardingPlan | Exception] = [RuntimeError("no plan came from rank 0")]
    # The planner runs on rank 0 alone, and TorchRec's collective_plan leaves the other ranks waiting when it fails there.
    if runtime.rank == 0:
        try:
            usable = int(_capacity(config, runtime) * (1 - config.reserve))
            planner = _planner(runtime, usable, {**own, **(constraints or {})}, batch_size)
            state_bytes = {table.name: choices[table.name].state_bytes(table) for table in tables}

            def say(reason: str) -> str:
                return refusal(reason, tables, chosen, runtime.world_size, usable, lambda table: state_bytes[table.name])

            outcome = [_plan_or_refusal(planner, model, say)]
        except Exception as error:
            logging.getLogger(__name__).exception("the planner failed")
            outcome = [RuntimeError(f"the planner failed on rank 0: {type(error).__name__}: {error}")]
    if runtime.world_size > 1:
        dist.broadcast_object_list(outcome, src=0, device=runtime.device)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _plan_or_refusal(planner: EmbeddingShardingPlanner, model: nn.Module, say: Callable[[str], str]) -> ShardingPlan | PlanError:
    try:
        return planner.plan(model, sharders())
    except PlannerError as error:
        return PlanError(say(str(error).strip() or type(error).__name__))


def _constraint(table: BaseEmbeddingConfig, sharding: str, runtime: Runtime) -> ParameterConstraints | None:
    """What a sharding type asks of the planner; for ``auto`` nothing, or what is possible at all.

    Asking for columns means to have them split: TorchRec leaves a table of up to 128 columns whole unless told otherwise.
    """
    world_size, device = runtime.world_size, runtime.device.type
    reason = refused_because(table, sharding, device)
    if reason:
        raise PlanError(f"table '{table.name}': {reason}")
    if sharding == "auto":
        types = possible(table, device)
        return None if types is None else ParameterConstraints(sharding_types=types)
    if "column" not in sharding or world_size == 1:
        return ParameterConstraints(sharding_types=[sharding])
    widths = range(4, table.embedding_dim, 4)
    fitting = [width for width in widths if table.embedding_dim % width == 0 and width * world_size >= table.embedding_dim]
    if not fitting:
        raise PlanError(
            f"table '{table.name}': {table.embedding_dim} columns cannot be split over {world_size} ranks into equal parts of a "
            f"multiple of 4; choose another sharding type, as in plan.tables={table.name}=row_wise, or another embedding_dim"
        )
    return ParameterConstraints(sharding_types=[sharding], min_partition=fitting[0])


def _planner(
    runtime: Runtime, usable: int, constraints: dict[str, ParameterConstraints], batch_size: int
) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(
        topology=_topology(runtime, usable),
        batch_size=batch_size,
        # Ours is taken off `usable` already: TorchRec's reserve leaves the memory of a CPU rank as it is.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        stats=NoopEmbeddingStats(),
        constraints=constraints,
        debug=False,
    )


def _topology(runtime: Runtime, capacity: int) -> Topology:
    on_gpu = runtime.device.type == "cuda"
    return TopologyFactory.create_topology(
        TrainerConfig(world_size=runtime.world_size, local_world_size=runtime.local_world_size),
        HardwareConfig(hbm_cap_bytes=capacity if on_gpu else None, ddr_cap_bytes=None if on_gpu else capacity),
        KernelConfig(compute_device=runtime.device.type),
    )


def _capacity(config: PlanConfig, runtime: Runtime) -> int:
    """Bytes per rank that tables, their optimizer state and the reserve may take."""
    if config.memory_gb:
        return int(config.memory_gb * GB)
    if runtime.device.type == "cuda":
        return int(torch.cuda.mem_get_info(runtime.device)[0])
    return available_memory() // runtime.local_world_size


def available_memory() -> int:
    """Bytes of memory that this host, or the container that this process runs in, can still give."""
    limits = [_line("/proc/meminfo", "MemAvailable:") * 1024 or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limit, used = (_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        cache = _line("/sys/fs/cgroup/memory.stat", "inactive_file")  # given back when memory is short
        limits.append(max(limit - used + cache, 0))
    return min(limits)


def _line(path: str, name: str) -> int:
    """The number in the line of a file that begins with ``name``; 0 where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _number(path: str) -> int | None:
    """The number in a file of the control group; None where there is no such file, or no limit."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
