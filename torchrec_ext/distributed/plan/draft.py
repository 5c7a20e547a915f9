"""draft_plan(): runs TorchRec's planner for devices that need not exist; keeps the plan and its estimates.

refusal(): explains why there is no plan, and what would make one, in numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from torchrec_ext.distributed.optim.config import Choice, OptimizerConfig
from torchrec_ext.distributed.optim.declared import declare_table_optimizer, shardings
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.explain import size_text, table_bytes
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sharders import possible, refused_because, sharders
from torchrec_ext.distributed.tables import collections, table_configs


def refusal(
    reason: str,
    tables: Sequence[BaseEmbeddingConfig],
    sharding: Mapping[str, str],
    world_size: int,
    usable: int,
    choices: Mapping[str, Choice],
) -> str:
    """Explains why no plan fits and what would make it fit.

    Args:
        reason: message of the planner.
        tables: all tables of the model.
        sharding: sharding type asked for, by table name.
        world_size: R, the number of ranks.
        usable: bytes per rank that tables and their state may take.
        choices: optimizer of each table, whose state takes memory too.
    """
    need = _need(tables, sharding, choices)
    sizes = {table.name: table_bytes(table) + choices[table.name].state_bytes(table) for table in tables}
    largest = max(sizes, key=lambda name: sizes[name])
    rows = [
        [t.name, f"{t.num_embeddings:,}", t.embedding_dim, sharding[t.name], size_text(sizes[t.name])] for t in tables
    ]
    return "\n".join(
        [
            f"no sharding plan fits: tables with optimizer state need {size_text(need.spread)} over all ranks and "
            f"{size_text(need.on_each)} on each; {world_size} rank(s) have {size_text(usable)} for them each, "
            f"{size_text(world_size * usable)} together; the largest table, '{largest}', needs "
            f"{size_text(sizes[largest])}",
            tabulate(rows, headers=["table", "rows", "dim", "sharding asked for", "with state"], disable_numparse=True),
            f"what would make it fit: {_remedy(need, world_size, usable)}",
            _changes(tables, sharding, choices, usable),
            f"TorchRec's planner said: {reason.splitlines()[0]}",
        ]
    )


class _Need(NamedTuple):
    """Bytes of tables and their state: ``spread`` over all ranks, and held ``on_each`` of them."""

    spread: int
    on_each: int

    def ranks(self, usable: int) -> int | None:
        """Returns how many ranks of ``usable`` bytes are enough; None where no number is."""
        return None if self.on_each >= usable else max(1, -(-self.spread // (usable - self.on_each)))


def _need(tables: Sequence[BaseEmbeddingConfig], sharding: Mapping[str, str], choices: Mapping[str, Choice]) -> _Need:
    sizes = {table.name: table_bytes(table) + choices[table.name].state_bytes(table) for table in tables}
    on_each = sum(size for name, size in sizes.items() if sharding[name] == "data_parallel")
    return _Need(sum(sizes.values()) - on_each, on_each)


def _remedy(need: _Need, world_size: int, usable: int) -> str:
    each = size_text(need.on_each + -(-need.spread // world_size))
    others = (
        f"{each} for them on each rank, with a larger plan.memory_gb where the device has it; fewer columns, or fewer "
        "rows: ids that leave gaps, such as hashes, are mapped to rows by rec.data.preprocess (Categorify or "
        "HashBucket)"
    )
    ranks = need.ranks(usable)
    if ranks is None:
        return f"shard the data_parallel tables, which no number of ranks makes smaller; {others}"
    return f"at least {ranks} ranks of this size, with row_wise for a table larger than one; {others}"


def _changes(
    tables: Sequence[BaseEmbeddingConfig], sharding: Mapping[str, str], choices: Mapping[str, Choice], usable: int
) -> str:
    """Returns a table of what other optimizers and half precision would need, in the same numbers."""
    half = [
        t if sharding[t.name] == "data_parallel" else dataclasses.replace(t, data_type=DataType.FP16) for t in tables
    ]
    precisions = {"": tables, "fp16 tables": half} if half != list(tables) else {"": tables}
    kinds: dict[str, Mapping[str, Choice]] = {"": choices}
    for kind in ("row_wise_adagrad", "sgd"):
        changed = {name: dataclasses.replace(choice, kind=kind) for name, choice in choices.items()}
        if changed != choices:
            kinds[kind] = changed
    rows = []
    for (kind, changed), (precision, configs) in product(kinds.items(), precisions.items()):
        need = _need(configs, sharding, changed)
        what = ", ".join(filter(None, [kind, precision])) or "as asked"
        rows.append([what, size_text(need.spread), size_text(need.on_each), need.ranks(usable) or "never"])
    headers = ["tables and their state", "over all ranks", "on each", "ranks of this size"]
    return str(tabulate(rows, headers=headers, disable_numparse=True))


class PlanError(ValueError):
    """No plan fits; the message gives the sizes, the capacity and what would make it fit."""


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
        bag_lengths: mean number of ids of a feature in a row, by feature; 1 where not given.
        constraints: TorchRec's own constraints by table name, which win over ``config``.

    Raises:
        PlanError: the tables do not fit, or cannot be sharded as asked.
    """
    device = torch.device(topology.compute_device)
    runtime = Runtime(world_size=topology.world_size, local_world_size=topology.local_world_size, device=device)
    request = Request.of(model, runtime, config, optimizer, constraints or {})
    return draft(model, request.with_bags(bag_lengths or {}), topology, batch_size)


class Request(NamedTuple):
    """A request to the planner: the ``sharding`` type by table, ``auto`` included, and TorchRec's ``constraints``."""

    tables: list[BaseEmbeddingConfig]
    sharding: dict[str, str]
    choices: dict[str, Choice]
    constraints: dict[str, ParameterConstraints]

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
        tables = [table for _, collection in collections(model) for table in table_configs(collection)]
        # TorchRec's planner counts the state of the optimizer that a table names, and none where it names none.
        choices = declare_table_optimizer(model, optimizer)
        chosen = shardings(tables, choices, config.by_table([table.name for table in tables]), runtime.device.type)
        wanted = {table.name: _constraint(table, chosen[table.name], runtime) for table in tables}
        derived = {name: constraint for name, constraint in wanted.items() if constraint is not None}
        return cls(tables, chosen, choices, {**derived, **constraints})

    def on(self, names: Collection[str], runtime: Runtime, constraints: Mapping[str, ParameterConstraints]) -> Request:
        """Returns the request for the tables ``names`` alone, on other ranks.

        Args:
            names: names of the tables.
            runtime: description of the ranks.
            constraints: TorchRec's constraints by table name, which win.

        Raises:
            PlanError: a table cannot be sharded as asked on these ranks.
        """
        tables = [table for table in self.tables if table.name in names]
        wanted = {table.name: _constraint(table, self.sharding[table.name], runtime) for table in tables}
        derived = {name: constraint for name, constraint in wanted.items() if constraint is not None}
        winning = {name: constraint for name, constraint in constraints.items() if name in wanted}
        sharding = {name: self.sharding[name] for name in wanted}
        return self._replace(tables=tables, sharding=sharding, constraints={**derived, **winning})

    def with_bags(self, lengths: Mapping[str, float]) -> Request:
        """Returns the request with the mean number of ids per row of each feature; 1 where not given."""
        constraints = dict(self.constraints)
        for table in self.tables:
            factors = [lengths.get(feature, 1.0) for feature in table.feature_names]
            constraints[table.name] = dataclasses.replace(
                constraints.get(table.name, ParameterConstraints()), pooling_factors=factors
            )
        return self._replace(constraints=constraints)


class _PlanStats(NoopEmbeddingStats):
    """Keeps the sharding options that TorchRec's planner hands to its statistics."""

    options: list[ShardingOption]

    def log(self, *args: Any, **stats: Any) -> None:
        """Keeps the options of the best plan; the planner calls it once."""
        self.options = stats["best_plan"]


def draft(model: nn.Module, request: Request, topology: Topology, batch_size: int) -> Draft:
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
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        # Our reserve is off the topology already: TorchRec's leaves the memory of a CPU rank as it is.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        stats=stats,
        constraints=request.constraints,
        debug=False,
    )
    try:
        plan = planner.plan(model, sharders())
    except PlannerError as error:
        storage = topology.devices[0].storage
        reason = str(error).strip() or type(error).__name__
        usable = storage.hbm or storage.ddr
        raise PlanError(
            refusal(reason, request.tables, request.sharding, topology.world_size, usable, request.choices)
        ) from None
    return Draft(plan, stats.options)


def _constraint(table: BaseEmbeddingConfig, sharding: str, runtime: Runtime) -> ParameterConstraints | None:
    """Returns the planner's constraints for a sharding type; for ``auto`` none, or the types that are possible at all.

    A column-wise type sets a minimal width too: else TorchRec leaves a table of up to 128 columns whole.
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
    fitting = [
        width for width in widths if table.embedding_dim % width == 0 and width * world_size >= table.embedding_dim
    ]
    if not fitting:
        raise PlanError(
            f"table '{table.name}': {table.embedding_dim} columns cannot be split over {world_size} ranks into equal "
            f"parts of a multiple of 4; choose another sharding type, as in plan.tables={table.name}=row_wise, or "
            "another embedding_dim"
        )
    return ParameterConstraints(sharding_types=[sharding], min_partition=fitting[0])
