"""plan_sharding(): TorchRec's planner on the devices of this job."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
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
    batch_size: int = 512,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> ShardingPlan:
    """TorchRec's plan for ``model`` on the ranks of this job; every rank must call it and gets the same plan or the same error.

    Args:
        model: any module that holds EmbeddingBagCollections or EmbeddingCollections, also on the meta device.
        runtime: this process's place in the job.
        config: sharding types and memory.
        batch_size: rows per rank and step, for the cost model.
        constraints: TorchRec's own constraints by table name, for what ``config`` cannot say; they win.

    Raises:
        PlanError: the tables do not fit, on every rank alike.
    """
    config = config or PlanConfig()
    tables = [table for _, collection in collections(model) for table in table_configs(collection)]
    chosen = config.by_table([table.name for table in tables])
    wanted = {
        table.name: _constraint(table, chosen[table.name], runtime.world_size) for table in tables if chosen[table.name] != "auto"
    }
    outcome: list[ShardingPlan | Exception] = [RuntimeError("no plan came from rank 0")]
    # The planner runs on rank 0 alone, and TorchRec's collective_plan leaves the other ranks waiting when it fails there.
    if runtime.rank == 0:
        capacity = _capacity(config, runtime)
        try:
            outcome = [_planner(config, runtime, capacity, {**wanted, **(constraints or {})}, batch_size).plan(model, sharders())]
        except PlannerError as error:
            reason = str(error).strip() or type(error).__name__
            outcome = [PlanError(refusal(reason, tables, chosen, runtime.world_size, capacity))]
        except Exception as error:
            logging.getLogger(__name__).exception("the planner failed")
            outcome = [RuntimeError(f"the planner failed on rank 0: {type(error).__name__}: {error}")]
    if runtime.world_size > 1:
        dist.broadcast_object_list(outcome, src=0, device=runtime.device)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _constraint(table: BaseEmbeddingConfig, sharding: str, world_size: int) -> ParameterConstraints:
    """Asking for columns means to have them split: TorchRec leaves a table of up to 128 columns whole unless told otherwise."""
    width = table.embedding_dim // world_size
    splits = "column" in sharding and width % 4 == 0 and table.embedding_dim % max(width, 1) == 0 and width > 0
    return ParameterConstraints(sharding_types=[sharding], min_partition=width if splits else None)


def _planner(
    config: PlanConfig, runtime: Runtime, capacity: int, constraints: dict[str, ParameterConstraints], batch_size: int
) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(
        topology=_topology(runtime, capacity),
        batch_size=batch_size,
        storage_reservation=FixedPercentageStorageReservation(percentage=config.reserve),
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
    limits = [_kilobytes("/proc/meminfo", "MemAvailable:") * 1024 or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limit, used = (_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        limits.append(max(limit - used, 0))
    return min(limits)


def _kilobytes(path: str, name: str) -> int:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def _number(path: str) -> int | None:
    """The number in a file of the control group; None where there is no such file, or no limit."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
