"""explain(): a sharding plan, or the reason why there is none, in tables and numbers one can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tabulate import tabulate
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from torchrec_ext.distributed.placement import TowerPlan
from torchrec_ext.distributed.tables import collections, table_configs

GB = 1024**3
MB = 1024**2


def explain(plan: ShardingPlan, model: nn.Module, world_size: int) -> str:
    """The plan as a table: what each table is, how it is split, which rank holds which part, and the sum per rank.

    Args:
        plan: from :func:`plan_sharding` or TorchRec's planner.
        model: the module that was planned, sharded since or not.
        world_size: R.
    """
    rows, per_rank = [], [0.0] * world_size
    for table, sharding in _planned(plan, model):
        for rank, elements in _elements_per_rank(table, sharding, world_size).items():
            per_rank[rank] += elements * bytes_per_weight(table) / MB
        rows.append(
            [
                table.name,
                f"{table.num_embeddings:,} x {table.embedding_dim}",
                f"{table_bytes(table) / MB:.2f}",
                sharding.sharding_type,
                _where(table, sharding, world_size),
            ]
        )
    totals = ", ".join(f"rank {rank}: {size:.2f} MiB" for rank, size in enumerate(per_rank))
    readable = tabulate(rows, headers=["table", "rows x dim", "MiB", "sharding", "where"], disable_numparse=True)
    towers = [f"\ntowers run on the ranks {own.placement}" for own in plan.plan.values() if isinstance(own, TowerPlan)]
    return f"{readable}\nweights on {totals}{''.join(towers)}"


def refusal(
    reason: str,
    tables: Sequence[BaseEmbeddingConfig],
    sharding: Mapping[str, str],
    world_size: int,
    usable: int,
    state_bytes: Callable[[BaseEmbeddingConfig], int],
) -> str:
    """Why no plan fits and what would make it fit.

    Args:
        reason: what the planner said.
        tables: all tables of the model.
        sharding: the sharding type asked for, by table.
        world_size: R.
        usable: bytes per rank that tables and their state may take.
        state_bytes: bytes of optimizer state of a table.
    """
    sizes = {table.name: table_bytes(table) + state_bytes(table) for table in tables}
    on_each = sum(size for name, size in sizes.items() if sharding[name] == "data_parallel")
    spread = sum(sizes.values()) - on_each
    largest = max(sizes, key=lambda name: sizes[name])
    rows = [[t.name, f"{t.num_embeddings:,}", t.embedding_dim, sharding[t.name], size_text(sizes[t.name])] for t in tables]
    return "\n".join(
        [
            f"no sharding plan fits: tables with optimizer state need {size_text(spread)} over all ranks and {size_text(on_each)} "
            f"on each; {world_size} rank(s) have {size_text(usable)} for them each, {size_text(world_size * usable)} together; "
            f"the largest table, '{largest}', needs {size_text(sizes[largest])}",
            tabulate(rows, headers=["table", "rows", "dim", "sharding asked for", "with state"], disable_numparse=True),
            f"what would make it fit: {_remedy(spread, on_each, usable)}",
            f"TorchRec's planner said: {reason.splitlines()[0]}",
        ]
    )


def _remedy(spread: int, on_each: int, usable: int) -> str:
    others = "fp16 tables; row_wise_adagrad or sgd; fewer rows or columns; a larger plan.memory_gb where the device has it"
    if on_each >= usable:
        return f"shard the data_parallel tables, which no number of ranks makes smaller; {others}"
    return f"at least {-(-spread // (usable - on_each))} ranks of this size, with row_wise for a table larger than one; {others}"


def size_text(size: int) -> str:
    """Bytes in the largest unit of which there is one.

    Example:
        >>> size_text(153_600_000_000), size_text(512_256), size_text(3)
        ('143.05 GiB', '500.25 KiB', '0.00 KiB')
    """
    unit, name = next((pair for pair in ((GB, "GiB"), (MB, "MiB")) if size >= pair[0]), (1024, "KiB"))
    return f"{size / unit:,.2f} {name}"


def bytes_per_weight(table: BaseEmbeddingConfig) -> int:
    """2 for fp16 and bf16 tables, else 4."""
    return 2 if table.data_type in (DataType.FP16, DataType.BF16) else 4


def table_bytes(table: BaseEmbeddingConfig) -> int:
    """Bytes of a table's weights."""
    return int(table.num_embeddings * table.embedding_dim * bytes_per_weight(table))


def _planned(plan: ShardingPlan, model: nn.Module) -> Iterator[tuple[BaseEmbeddingConfig, ParameterSharding]]:
    for path, collection in collections(model):
        module_plan = plan.get_plan_for_module(path)
        for table in table_configs(collection):
            if module_plan and table.name in module_plan:
                yield table, module_plan[table.name]


def _shards(sharding: ParameterSharding) -> list[tuple[int, list[int], list[int]]]:
    """(rank, offsets, sizes) of each shard; none for a table that each of its ranks holds whole."""
    spec = sharding.sharding_spec
    if spec is None:
        return []
    return [(shard.placement.rank(), list(shard.shard_offsets), list(shard.shard_sizes)) for shard in spec.shards]


def _elements_per_rank(table: BaseEmbeddingConfig, sharding: ParameterSharding, world_size: int) -> dict[int, int]:
    shards = _shards(sharding)
    if not shards:
        return dict.fromkeys(sharding.ranks or range(world_size), table.num_embeddings * table.embedding_dim)
    sums: dict[int, int] = {}
    for rank, _, (height, width) in shards:
        sums[rank] = sums.get(rank, 0) + height * width
    return sums


def _where(table: BaseEmbeddingConfig, sharding: ParameterSharding, world_size: int) -> str:
    shards = _shards(sharding)
    if not shards:
        ranks = sharding.ranks or []
        return f"each of the ranks {', '.join(map(str, ranks))}" if 0 < len(ranks) < world_size else "every rank"
    return "; ".join(f"rank {rank}{_part(table, offsets, sizes)}" for rank, offsets, sizes in shards[:4]) + (
        f"; and {len(shards) - 4} more" if len(shards) > 4 else ""
    )


def _part(table: BaseEmbeddingConfig, offsets: list[int], sizes: list[int]) -> str:
    part = ""
    if sizes[0] < table.num_embeddings:
        part += f" rows {offsets[0]}-{offsets[0] + sizes[0] - 1}" if sizes[0] else " no rows"
    if sizes[1] < table.embedding_dim:
        part += f" columns {offsets[1]}-{offsets[1] + sizes[1] - 1}"
    return part
