"""explain(): shows a sharding plan as a table that one can read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

from tabulate import tabulate
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import OFF_THE_GPU
from torchrec_ext.distributed.plan.storage import state_storage
from torchrec_ext.distributed.tables import table_shardings, tables_of

GB, MB = 1024**3, 1024**2


def explain(
    plan: ShardingPlan,
    model: nn.Module,
    world_size: int,
    *,
    optimizer: OptimizerConfig | None = None,
) -> str:
    """Shows a plan as a table: each table's size, its sharding type, which rank holds which shard, and sums per rank.

    Where a table has its rows in the host's memory, beside a GPU, the compute kernels are shown too.

    Args:
        plan: sharding plan of :func:`plan_sharding` or TorchRec's planner.
        model: module that was planned, sharded since or not.
        world_size: R, the number of ranks.
        optimizer: optimizers of the tables, whose state is summed up per rank, too.
    """
    headers = ["table", "rows x dim", "MiB", "sharding", "where"]
    planned = list(_planned(plan, model))
    kernels = any(sharding.compute_kernel in OFF_THE_GPU for _, sharding in planned)
    if kernels:
        headers.insert(4, "kernel")
    rows = []
    per_rank = [0.0] * world_size
    states = [0.0] * world_size
    choices = optimizer.for_tables(model) if optimizer else {}
    for table, sharding in planned:
        where, shards = _placed(table, sharding, world_size)
        for rank, shape in shards:
            per_rank[rank] += math.prod(shape) * bytes_per_weight(table) / MB
            if choices:
                state = state_storage(choices[table.name], shape, "fused", "cpu")
                states[rank] += state.ddr / MB
        size = f"{table.num_embeddings:,} x {table.embedding_dim}"
        row = [table.name, size, f"{table_bytes(table) / MB:.2f}"]
        row.append(sharding.sharding_type)
        if kernels:
            row.append(sharding.compute_kernel)
        rows.append([*row, where])
    if not rows:
        return "no table to shard: each rank holds all layers"
    readable = tabulate(rows, headers=headers, disable_numparse=True)
    text = f"{readable}\nweights on {', '.join(_by_rank(per_rank))}"
    if choices:
        text += f"\noptimizer state on {', '.join(_by_rank(states))}"
    return text


def _by_rank(sizes: Sequence[float]) -> list[str]:
    """Returns ``rank 0: 1.50 MiB`` for each rank; of many ranks the range."""
    if len(sizes) > 8:
        return [f"{len(sizes)} ranks: {min(sizes):.2f} to {max(sizes):.2f} MiB each"]
    return [f"rank {rank}: {size:.2f} MiB" for rank, size in enumerate(sizes)]


def size_text(size: int) -> str:
    """Formats bytes in the largest unit of GiB, MiB and KiB with a value of 1 or more, else in KiB.

    Example:
        >>> size_text(153_600_000_000), size_text(512_256), size_text(3)
        ('143.05 GiB', '500.25 KiB', '0.00 KiB')
    """
    for unit, name in ((GB, "GiB"), (MB, "MiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 1024:,.2f} KiB"


def bytes_per_weight(table: BaseEmbeddingConfig) -> int:
    """Returns the bytes of one weight: 2 for fp16 and bf16 tables, else 4."""
    if table.data_type in (DataType.FP16, DataType.BF16):
        return 2
    return 4


def table_bytes(table: BaseEmbeddingConfig) -> int:
    """Returns the bytes of a table's weights."""
    return int(table.num_embeddings * table.embedding_dim * bytes_per_weight(table))


def _planned(
    plan: ShardingPlan, model: nn.Module
) -> Iterator[tuple[BaseEmbeddingConfig, ParameterSharding]]:
    # By name: a plan may have other paths for tables that several towers share.
    shardings = table_shardings(plan)
    for table in tables_of(model):
        if table.name in shardings:
            yield table, shardings[table.name]


def _placed(
    table: BaseEmbeddingConfig, sharding: ParameterSharding, world_size: int
) -> tuple[str, list[tuple[int, Sequence[int]]]]:
    """Returns where a table's shards are, in words, and the rank and (rows, columns) of each."""
    spec = sharding.sharding_spec
    # A table that the ranks replicate has no shards.
    if spec is None:
        whole = (table.num_embeddings, table.embedding_dim)
        return "every rank", [(rank, whole) for rank in range(world_size)]
    texts = []
    shards = []
    for shard in spec.shards:
        rank = shard.placement.rank()
        shards.append((rank, shard.shard_sizes))
        text = f"rank {rank}"
        row, column = shard.shard_offsets
        height, width = shard.shard_sizes
        if not height:
            text += " no rows"
        elif height < table.num_embeddings:
            text += f" rows {row}-{row + height - 1}"
        if width < table.embedding_dim:
            text += f" columns {column}-{column + width - 1}"
        texts.append(text)
    if len(texts) > 4:
        texts[4:] = [f"and {len(texts) - 4} more"]
    return "; ".join(texts), shards
