"""draft_plan(): runs TorchRec's planner for devices that need not exist; keeps the plan and its estimates.

refusal(): explains why there is no plan, and what would make one, in numbers.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from tabulate import tabulate
from torch import nn
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.constants import KV_CACHING_RATIO
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Storage
from torchrec.distributed.types import CacheParams, KeyValueParams, ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from torchrec_ext.distributed.optim.config import Choice, OptimizerConfig
from torchrec_ext.distributed.optim.declared import (
    declare_table_optimizer,
    has_kernel,
    shardings,
)
from torchrec_ext.distributed.plan.config import CACHING, PlanConfig, TableChoice
from torchrec_ext.distributed.plan.explain import MB, size_text, table_bytes
from torchrec_ext.distributed.plan.storage import (
    TableStorage,
    check_gpus,
    state_storage,
    widen_caches,
)
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sharders import (
    BY_HOST,
    OFF_THE_GPU,
    Codecs,
    codecs_of,
    free_to_shard,
    kernel_refused_because,
    possible,
    precision_refused_because,
    refused_because,
    sharders,
)
from torchrec_ext.distributed.tables import tables_of


def refusal(reason: str, request: Request, topology: Topology) -> str:
    """Explains why no plan fits, and names remedies.

    Args:
        reason: message of the planner.
        request: tables, with all that is asked for them.
        topology: devices and their usable memory.
    """
    world_size = topology.world_size
    storage = topology.devices[0].storage
    # On a CPU, tables are in host memory, and there is no HBM.
    usable = storage.hbm or storage.ddr
    need = _need(request)
    sizes = {
        table.name: _size_with_state(table, request.choices) for table in request.tables
    }
    largest = max(sizes, key=sizes.__getitem__)
    rows = []
    for table in request.tables:
        sharding = request.asked[table.name].sharding
        size = size_text(sizes[table.name])
        rows.append(
            [
                table.name,
                f"{table.num_embeddings:,}",
                table.embedding_dim,
                sharding,
                size,
            ]
        )
    headers = ["table", "rows", "dim", "sharding asked for", "with state"]
    lines = [
        f"no sharding plan fits: tables with optimizer state need {size_text(need.spread)} over all ranks and "
        f"{size_text(need.on_each)} on each; {world_size} rank(s) have {size_text(usable)} each, "
        f"{size_text(world_size * usable)} together; the largest table, '{largest}', needs "
        f"{size_text(sizes[largest])}",
        tabulate(rows, headers=headers, disable_numparse=True),
    ]
    # One number of bytes describes a rank only if all tables live in the same memory.
    if any(choice.kernel in OFF_THE_GPU for choice in request.asked.values()):
        lines.append(_by_memory(request, world_size, storage))
    else:
        lines.append(f"what would make it fit: {_remedy(need, world_size, usable)}")
        lines.append(_changes(request, usable))
    lines.append(f"TorchRec's planner said: {reason.splitlines()[0]}")
    return "\n".join(lines)


def _by_memory(request: Request, world_size: int, has: Storage) -> str:
    """Formats the kernels' needs of GPU, host memory and SSD as a table, with a remedy in ranks."""
    needs = {"GPU": 0.0, "host memory": 0.0, "SSD": 0.0}
    for table in request.tables:
        size = table_bytes(table)
        choice = request.asked[table.name]
        kernel = choice.kernel
        home = {
            "key_value": "SSD",
            "fused_uvm": "host memory",
            "fused_uvm_caching": "host memory",
        }.get(kernel, "GPU")
        needs[home] += size
        if kernel in CACHING:
            needs["GPU"] += size * (choice.cache_load_factor or KV_CACHING_RATIO)
        shape = (table.num_embeddings, table.embedding_dim)
        state = state_storage(request.choices[table.name], shape, kernel, "cuda")
        needs["GPU"] += state.hbm
        needs["host memory"] += state.ddr
        needs["SSD"] += state.ssd
    rows = []
    least = 1
    for (name, need), usable in zip(
        needs.items(), (has.hbm, has.ddr, has.ssd), strict=True
    ):
        ranks = 0
        if usable:
            ranks = math.ceil(need / usable)
        least = max(least, ranks)
        enough = f"{max(ranks, 1):,}"
        if need and not usable:
            enough = "never"
        rows.append(
            [
                name,
                size_text(int(need)),
                size_text(usable),
                size_text(world_size * usable),
                enough,
            ]
        )
    headers = [
        "memory",
        "needed over all ranks",
        "each rank has",
        "together",
        "ranks of this size",
    ]
    table_text = tabulate(rows, headers=headers, disable_numparse=True)
    return (
        f"what would make it fit: at least {least:,} ranks of this size, row_wise or column_wise for a table larger "
        f"than one; more memory where it lacks; or another kernel\n{table_text}"
    )


class _Need(NamedTuple):
    """Bytes of tables and their state: ``spread`` over all ranks, and held ``on_each`` of them."""

    spread: int
    on_each: int

    def ranks(self, usable: int) -> int | None:
        """Returns the least number of ranks with ``usable`` bytes each; None if no number is enough."""
        room = usable - self.on_each
        if room <= 0:
            return None
        return max(1, -(-self.spread // room))


def _need(request: Request) -> _Need:
    spread = 0
    on_each = 0
    for table in request.tables:
        size = _size_with_state(table, request.choices)
        if request.asked[table.name].sharding == "data_parallel":
            on_each += size
        else:
            spread += size
    return _Need(spread, on_each)


def _size_with_state(table: BaseEmbeddingConfig, choices: Mapping[str, Choice]) -> int:
    """Returns the bytes of a table and its optimizer state."""
    return table_bytes(table) + choices[table.name].state_bytes(table)


def _remedy(need: _Need, world_size: int, usable: int) -> str:
    each = size_text(need.on_each + -(-need.spread // world_size))
    others = (
        f"{each} for them on each rank (plan.memory_gb); fewer columns; or fewer rows, by rec.data.preprocess "
        "(Categorify or HashBucket)"
    )
    ranks = need.ranks(usable)
    if ranks is None:
        return f"shard the data_parallel tables, which no number of ranks makes smaller; {others}"
    return f"at least {ranks} ranks of this size, with row_wise for a table larger than one; {others}"


def _changes(request: Request, usable: int) -> str:
    """Formats the needs under other optimizers and half precision as a table."""
    half = []
    for table in request.tables:
        # A data_parallel table must be fp32, see refused_because().
        if request.asked[table.name].sharding != "data_parallel":
            table = dataclasses.replace(table, data_type=DataType.FP16)
        half.append(table)
    precisions = {"": request.tables}
    # What changes nothing has no line of its own.
    if half != request.tables:
        precisions["fp16 tables"] = half
    kinds = {"": request.choices}
    for kind in ("row_wise_adagrad", "sgd"):
        changed = {
            name: dataclasses.replace(choice, kind=kind)
            for name, choice in request.choices.items()
        }
        if changed != request.choices:
            kinds[kind] = changed
    rows = []
    for (kind, changed), (precision, configs) in product(
        kinds.items(), precisions.items()
    ):
        need = _need(request._replace(tables=configs, choices=changed))
        what = ", ".join(filter(None, [kind, precision])) or "as asked"
        rows.append(
            [
                what,
                size_text(need.spread),
                size_text(need.on_each),
                need.ranks(usable) or "never",
            ]
        )
    headers = [
        "tables and their state",
        "over all ranks",
        "on each",
        "ranks of this size",
    ]
    return str(tabulate(rows, headers=headers, disable_numparse=True))


class PlanError(ValueError):
    """No plan fits; the message gives sizes, capacity and remedies."""


class Draft(NamedTuple):
    """A plan, and the planner's ``options``: its estimates of memory and milliseconds for each shard of each table."""

    plan: ShardingPlan
    options: list[ShardingOption]


def draft_plan(
    model: nn.Module,
    topology: Topology,
    config: PlanConfig,
    *,
    optimizer: OptimizerConfig,
    batch_size: int,
    bag_lengths: Mapping[str, float] | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> Draft:
    """Plans for devices that need not exist; no other rank takes part.

    Args:
        model: unsharded model, as for :func:`plan_sharding`.
        topology: devices, and the memory of each that tables and their state may take.
        config: sharding types; its memory is not read.
        optimizer: optimizers of the tables.
        batch_size: rows per rank and step.
        bag_lengths: mean number of ids of a feature in a row, by feature; by default 1.
        constraints: TorchRec's own constraints by table name, which win over ``config``.

    Raises:
        PlanError: the tables do not fit, or cannot be sharded as asked.
    """
    device = torch.device(topology.compute_device)
    runtime = Runtime(
        world_size=topology.world_size,
        local_world_size=topology.local_world_size,
        device=device,
    )
    request = Request.of(model, runtime, config, optimizer, constraints or {})
    stored = [
        name for name, choice in request.asked.items() if choice.kernel == "key_value"
    ]
    if stored and not topology.devices[0].storage.ssd:
        raise PlanError(
            f"table '{stored[0]}': kernel=key_value, but the hosts have no SSD; give the topology an SSD"
        )
    drafted = draft(model, request.with_bags(bag_lengths or {}), topology, batch_size)
    refuse_exchange(drafted, request.tables, config, topology.world_size)
    return drafted


def refuse_exchange(
    draft: Draft,
    tables: Sequence[BaseEmbeddingConfig],
    config: PlanConfig,
    world_size: int,
) -> None:
    """Refuses quantised communication without an exchange, and int8 if TorchRec cannot send it.

    Raises:
        PlanError: every table is data_parallel, or one is sharded so that int8 cannot carry its embeddings.
    """
    if not config.quantised or world_size == 1 or not draft.options:
        return
    precisions = (
        f"plan.forward_precision={config.forward_precision}, "
        f"plan.backward_precision={config.backward_precision}"
    )
    # Nothing would be quantised, although it was asked for.
    if all(option.sharding_type == "data_parallel" for option in draft.options):
        raise PlanError(
            f"{precisions}: every table is data_parallel, so ranks exchange no embeddings; shard one, as with "
            f"plan.tables={draft.options[0].name}=table_wise, or leave the precisions at fp32"
        )
    if "int8" not in (config.forward_precision, config.backward_precision):
        return
    configs = {table.name: table for table in tables}
    for option in draft.options:
        table = configs[option.name]
        reason = precision_refused_because(
            table, option.sharding_type, min(shard.size[1] for shard in option.shards)
        )
        if reason:
            raise PlanError(f"{precisions}: table '{option.name}': {reason}")


class Request(NamedTuple):
    """A request to the planner: the choices ``asked`` by table, ``auto`` included, and TorchRec's ``constraints``."""

    tables: list[BaseEmbeddingConfig]
    asked: dict[str, TableChoice]
    choices: dict[str, Choice]
    constraints: dict[str, ParameterConstraints]
    codecs: Codecs | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        runtime: Runtime,
        config: PlanConfig,
        optimizer: OptimizerConfig,
        constraints: Mapping[str, ParameterConstraints],
    ) -> Request:
        """Builds the request for all tables of ``model``.

        Args:
            model: unsharded model.
            runtime: description of the ranks.
            config: sharding types.
            optimizer: optimizers of the tables.
            constraints: TorchRec's constraints by table name, which win over ``config``.

        Raises:
            PlanError: a table cannot be sharded as asked.
        """
        tables = tables_of(model)
        choices = declare_table_optimizer(model, optimizer)
        requests = config.choices([table.name for table in tables])
        kinds = {}
        for name, choice in requests.items():
            # The kernel dense runs data_parallel tables alone, so it decides an open
            # sharding.
            if (choice.sharding, choice.kernel) == ("auto", "dense"):
                kinds[name] = "data_parallel"
            else:
                kinds[name] = choice.sharding
        types = shardings(tables, choices, kinds, runtime.device.type)
        requests = {
            name: choice._replace(sharding=types[name])
            for name, choice in requests.items()
        }
        request = cls(tables, requests, choices, {}, codecs_of(config))
        return request._replace(
            constraints=_winning(request.derived(runtime), constraints)
        )

    def derived(self, runtime: Runtime) -> dict[str, ParameterConstraints]:
        """Derives the planner's constraints from the requested choices, by table.

        Raises:
            PlanError: a table cannot be sharded as asked on these ranks.
        """
        by_host = any(choice.sharding in BY_HOST for choice in self.asked.values())
        constraints: dict[str, ParameterConstraints] = {}
        for table in self.tables:
            choice = self.choices[table.name]
            # An optimizer of ours, or our weight decay, writes rows where they lie,
            # past the cache of a kernel.
            by_row = (
                not has_kernel(choice.kind, runtime.device.type)
                or choice.weight_decay > 0
            )
            request = self.asked[table.name]
            constraint = _constraint(
                table, request, runtime, by_host=by_host, cached=not by_row
            )
            if constraint is not None:
                constraints[table.name] = constraint
        return constraints

    def on(
        self,
        names: Collection[str],
        runtime: Runtime,
        constraints: Mapping[str, ParameterConstraints],
    ) -> Request:
        """Returns the request for the tables ``names`` alone, on other ranks.

        Args:
            names: names of the tables.
            runtime: description of the ranks.
            constraints: TorchRec's constraints by table name, which win.

        Raises:
            PlanError: a table cannot be sharded as asked on these ranks.
        """
        tables = [table for table in self.tables if table.name in names]
        choices = {table.name: self.asked[table.name] for table in tables}
        request = self._replace(tables=tables, asked=choices)
        winning = {
            name: constraint
            for name, constraint in constraints.items()
            if name in request.asked
        }
        return request._replace(constraints=_winning(request.derived(runtime), winning))

    def with_bags(self, lengths: Mapping[str, float]) -> Request:
        """Returns the request with the mean number of ids per row of each feature, by default 1."""
        constraints = dict(self.constraints)
        for table in self.tables:
            factors = [lengths.get(feature, 1.0) for feature in table.feature_names]
            constraints[table.name] = dataclasses.replace(
                constraints.get(table.name, ParameterConstraints()),
                pooling_factors=factors,
            )
        return self._replace(constraints=constraints)


class _PlanStats(NoopEmbeddingStats):
    """Keeps the sharding options from TorchRec's planner, which hands them to its statistics."""

    options: list[ShardingOption]

    def log(self, *args: Any, **stats: Any) -> None:
        """Keeps the options of the best plan; the planner calls it once."""
        self.options = stats["best_plan"]


def draft(
    model: nn.Module, request: Request, topology: Topology, batch_size: int
) -> Draft:
    """Runs TorchRec's planner for ``request`` on this rank alone.

    Args:
        model: unsharded model with the tables of the request.
        request: tables and constraints.
        topology: devices and their usable memory.
        batch_size: rows per rank and step.

    Raises:
        PlanError: the tables do not fit.
    """
    if not request.tables:
        return Draft(ShardingPlan({}), [])
    stats = _PlanStats()
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
        stats=stats,
        constraints=request.constraints,
        debug=False,
    )
    # TorchRec logs it by the root logger, whose other messages are the user's.
    logging.getLogger().addFilter(_not_of_replicated_tables)
    try:
        requested_types: set[str] = set()
        for constraint in request.constraints.values():
            requested_types.update(constraint.sharding_types or ())
        by_host = not requested_types.isdisjoint(BY_HOST)
        plan = planner.plan(model, sharders(request.codecs, by_host=by_host))
        # The attributes by which tables of one sharding type share a cache, by table
        # name.
        kinds: dict[str, Hashable] = {}
        for table in request.tables:
            kinds[table.name] = (
                table.data_type,
                getattr(table, "pooling", None),
                request.choices[table.name],
            )
        widen_caches(stats.options, kinds)
        check_gpus(stats.options, topology)
    except PlannerError as error:
        reason = str(error).strip() or type(error).__name__
        raise PlanError(refusal(reason, request, topology)) from None
    finally:
        logging.getLogger().removeFilter(_not_of_replicated_tables)
    return Draft(plan, stats.options)


def _not_of_replicated_tables(record: logging.LogRecord) -> bool:
    """Drops the planner's warning about tables without a sharding spec: replicated ones have none."""
    return not record.getMessage().startswith("Sharding spec not found")


def _winning(
    derived: Mapping[str, ParameterConstraints],
    requested: Mapping[str, ParameterConstraints],
) -> dict[str, ParameterConstraints]:
    """Merges constraints: the ``requested`` win, the ``derived`` fill in tables and kernels left open."""
    winning = dict(requested)
    for name, ours in derived.items():
        theirs = winning.setdefault(name, ours)
        if theirs.compute_kernels is None:
            winning[name] = dataclasses.replace(
                theirs,
                compute_kernels=ours.compute_kernels,
                cache_params=theirs.cache_params or ours.cache_params,
                key_value_params=theirs.key_value_params or ours.key_value_params,
            )
    return winning


def _constraint(
    table: BaseEmbeddingConfig,
    request: TableChoice,
    runtime: Runtime,
    *,
    by_host: bool,
    cached: bool,
) -> ParameterConstraints | None:
    """Returns the planner's constraints for a table; None if nothing is requested and every type is possible.

    A column-wise type sets a minimal width too: else TorchRec leaves a table of up to 128 columns whole.

    Args:
        table: configuration of the table.
        request: sharding type and kernel, ``auto`` included.
        runtime: description of the ranks.
        by_host: whether some table is sharded by host, so that the sharder offers these types on a CPU.
        cached: whether its optimizer may find the table's rows in a cache.
    """
    sharding = request.sharding
    device = runtime.device.type
    reason = refused_because(table, sharding, device) or kernel_refused_because(
        request, device
    )
    if reason is None and not cached and request.kernel in CACHING:
        reason = (
            f"kernel={request.kernel}: its optimizer, or its weight decay, reads and writes rows where they lie, of "
            "which the cache may hold newer ones; choose kernel=fused_uvm, or row_wise_adagrad without weight decay"
        )
    if reason:
        raise PlanError(f"table '{table.name}': {reason}")
    # The kernel fields of the planner's constraints; none if the planner is free to
    # choose.
    kernel: dict[str, Any] = {}
    if request.kernel != "auto":
        kernel["compute_kernels"] = [request.kernel]
    elif runtime.device.type == "cuda" and not cached:
        kernel["compute_kernels"] = ["dense", "fused", "fused_uvm"]
    if request.cache_load_factor:
        kernel["cache_params"] = CacheParams(load_factor=request.cache_load_factor)
    # TorchRec counts no cache at all if its size is missing.
    if request.kernel == "key_value":
        cache = (
            table_bytes(table)
            * (request.cache_load_factor or KV_CACHING_RATIO)
            / runtime.world_size
        )
        kernel["key_value_params"] = KeyValueParams(
            max_l1_cache_size=math.ceil(cache / MB)
        )
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
        f"multiples of 4; choose another type, such as plan.tables={table.name}=row_wise, or embedding_dim"
    )
