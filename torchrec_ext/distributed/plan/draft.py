"""draft(): runs TorchRec's planner with the constraints of a PlanConfig."""

from __future__ import annotations

import logging
import textwrap
from typing import Any, NamedTuple

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

from torch import nn
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import (
    PlannerError,
    PlannerErrorType,
)
from torchrec.distributed.types import CacheParams, ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_ext.distributed.optim.config import Choice, OptimizerConfig
from torchrec_ext.distributed.optim.declared import (
    declare_table_optimizer,
    shardings,
)
from torchrec_ext.distributed.plan.config import PlanConfig, TableChoice
from torchrec_ext.distributed.plan.explain import size_text, table_bytes
from torchrec_ext.distributed.plan.storage import TableStorage, state_storage
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sharders import (
    BY_HOST,
    free_to_shard,
    possible,
    refused_because,
    sharders,
)
from torchrec_ext.distributed.tables import tables_of


class PlanError(ValueError):
    """No plan fits, or a table cannot be sharded as asked; the message names it and the remedy."""


class Request(NamedTuple):
    """A request to the planner: tables, their optimizers and TorchRec's constraints by name.

    ``by_host`` says whether some table is sharded by host.
    """

    tables: list[BaseEmbeddingConfig]
    choices: dict[str, Choice]
    constraints: dict[str, ParameterConstraints]
    by_host: bool

    @classmethod
    def of(
        cls,
        model: nn.Module,
        runtime: Runtime,
        config: PlanConfig,
        optimizer: OptimizerConfig,
    ) -> Request:
        """Builds the request for all tables of ``model``.

        Args:
            model: unsharded model.
            runtime: description of the ranks.
            config: sharding types.
            optimizer: optimizers of the tables.

        Raises:
            PlanError: a table cannot be sharded as asked on these ranks.
        """
        tables = tables_of(model)
        choices = declare_table_optimizer(model, optimizer)
        asked = config.choices([table.name for table in tables])
        kinds = {}
        for name, choice in asked.items():
            kinds[name] = choice.sharding
            # The kernel dense runs data_parallel tables alone, so it decides an open
            # sharding.
            if (choice.sharding, choice.kernel) == ("auto", "dense"):
                kinds[name] = "data_parallel"
        types = shardings(tables, choices, kinds, runtime.device.type)
        by_host = not set(BY_HOST).isdisjoint(types.values())
        constraints: dict[str, ParameterConstraints] = {}
        for table in tables:
            choice = asked[table.name]._replace(sharding=types[table.name])
            constraint = _constraint(table, choice, runtime, by_host=by_host)
            if constraint is not None:
                constraints[table.name] = constraint
        return cls(tables, choices, constraints, by_host)


def draft(
    model: nn.Module, request: Request, topology: Topology, batch_size: int
) -> ShardingPlan:
    """Runs TorchRec's planner for ``request`` on this rank alone.

    Args:
        model: unsharded model with the tables of the request.
        request: tables and constraints.
        topology: devices and their usable memory.
        batch_size: rows per rank and step.

    Raises:
        PlanError: the tables do not fit, or TorchRec has no such sharding type and kernel for a table.
    """
    if not request.tables:
        return ShardingPlan({})
    estimators = [
        EmbeddingPerfEstimator(topology=topology, constraints=request.constraints),
        TableStorage(topology, request.constraints, request.choices),
    ]
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=EmbeddingEnumerator(
            topology, batch_size, request.constraints, estimators
        ),
        # Our reserve is off the topology already: TorchRec's leaves the memory of a CPU
        # rank as it is.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        stats=NoopEmbeddingStats(),
        constraints=request.constraints,
        debug=False,
    )
    # TorchRec logs it by the root logger, whose other messages are the user's.
    logging.getLogger().addFilter(_not_of_replicated_tables)
    try:
        return planner.plan(model, sharders(by_host=request.by_host))
    except PlannerError as error:
        raise PlanError(_refusal(error, request, topology)) from None
    except RuntimeError as error:
        # Most are of a kernel that the device or the sharding type has not.
        first = str(error).strip().partition(". ")[0]
        raise PlanError(
            f"TorchRec's planner: {first[:120]}; another plan.sharding or plan.kernel may fit"
        ) from None
    finally:
        logging.getLogger().removeFilter(_not_of_replicated_tables)


def _refusal(error: PlannerError, request: Request, topology: Topology) -> str:
    if error.error_type != PlannerErrorType.INSUFFICIENT_STORAGE:
        reason = str(error).strip().partition("\n")[0]
        return textwrap.shorten(
            f"TorchRec's planner found no plan: {reason or error.error_type.value}", 200
        )
    # On a CPU, tables are in host memory, and there is no HBM.
    storage = topology.devices[0].storage
    sizes = {}
    for table in request.tables:
        shape = (table.num_embeddings, table.embedding_dim)
        state = state_storage(request.choices[table.name], shape, "fused", "cpu")
        sizes[table.name] = table_bytes(table) + state.ddr
    largest = max(sizes, key=sizes.__getitem__)
    return (
        f"no sharding plan fits {topology.world_size} rank(s) of {size_text(storage.hbm or storage.ddr)}: tables with "
        f"state take {size_text(sum(sizes.values()))}, '{largest}' {size_text(sizes[largest])}; add ranks or "
        "plan.memory_gb"
    )


def _not_of_replicated_tables(record: logging.LogRecord) -> bool:
    """Drops the planner's warning about tables without a sharding spec: replicated ones have none."""
    return not record.getMessage().startswith("Sharding spec not found")


def _constraint(
    table: BaseEmbeddingConfig,
    request: TableChoice,
    runtime: Runtime,
    *,
    by_host: bool,
) -> ParameterConstraints | None:
    """Returns the planner's constraints for a table; None if nothing is requested and every type is possible.

    A column-wise type sets a minimal width too: else TorchRec leaves a table of up to 128 columns whole.

    Args:
        table: configuration of the table.
        request: sharding type and kernel, ``auto`` included.
        runtime: description of the ranks.
        by_host: whether some table is sharded by host, so that the sharder offers these types on a CPU.
    """
    sharding = request.sharding
    device = runtime.device.type
    reason = refused_because(table, sharding, device)
    if reason:
        raise PlanError(f"table '{table.name}': {reason}")
    # The kernel fields of the planner's constraints; none if the planner is free to
    # choose.
    kernel: dict[str, Any] = {}
    if request.kernel != "auto":
        kernel["compute_kernels"] = [request.kernel]
    if request.cache_load_factor:
        kernel["cache_params"] = CacheParams(load_factor=request.cache_load_factor)
    if sharding == "auto":
        types = possible(table, device)
        if request.kernel not in ("auto", "dense"):
            types = [kind for kind in free_to_shard(device) if kind != "grid_shard"]
        elif types is None and by_host and device == "cpu":
            types = [*free_to_shard(device), "data_parallel"]
        if types is None and not kernel:
            return None
        return ParameterConstraints(sharding_types=types, **kernel)
    pieces = 1
    over = "ranks"
    if sharding == "grid_shard":
        pieces = runtime.world_size // runtime.local_world_size
        over = "hosts"
    elif "column" in sharding:
        pieces = runtime.world_size
    if pieces == 1:
        return ParameterConstraints(sharding_types=[sharding], **kernel)
    # FBGEMM's kernels need a multiple of 4 columns, and no rank should hold two pieces
    # of a table.
    for width in range(4, table.embedding_dim, 4):
        if table.embedding_dim % width == 0 and width * pieces >= table.embedding_dim:
            return ParameterConstraints(
                sharding_types=[sharding], min_partition=width, **kernel
            )
    raise PlanError(
        f"table '{table.name}': {table.embedding_dim} columns cannot be split over {pieces} {over} into equal "
        f"multiples of 4; choose another type, such as plan.tables.{table.name}.sharding=row_wise, or embedding_dim"
    )
