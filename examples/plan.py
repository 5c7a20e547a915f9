"""Plans two tables for 64 GPUs that need not exist, with TorchRec's planner, and prints what each rank would hold.

    python examples/plan.py

Change the tables, their optimizer and the hardware. Tables on the meta device take no memory.
"""

from __future__ import annotations

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    ShardingOption,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

GIB = 2**30
DEVICES = 64
ROWS = {"ad": 300_000_000, "item": 12_000_000}
DIM = 64


class Chosen(NoopEmbeddingStats):
    """Keeps the sharding options that the planner has chosen, with its estimates for each shard."""

    options: list[ShardingOption]

    def log(
        self, *args: object, best_plan: list[ShardingOption], **more: object
    ) -> None:
        """Keeps the options; the planner calls it once."""
        self.options = best_plan


tables = EmbeddingBagCollection(
    tables=[
        EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=rows, embedding_dim=DIM
        )
        for name, rows in ROWS.items()
    ],
    device=torch.device("meta"),
)
# The planner counts the state of the optimizers that the weights name.
apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.01})
hosts = HardwareConfig(hbm_cap_bytes=80 * GIB, ddr_cap_bytes=1024 * GIB // 8)
topology = TopologyFactory.create_topology(
    TrainerConfig(world_size=DEVICES, local_world_size=8),
    hosts,
    KernelConfig(compute_device="cuda", use_hardware_based_bandwidth=True),
)
chosen = Chosen()
planner = EmbeddingShardingPlanner(
    topology=topology,
    batch_size=1024,  # rows of a rank in a step
    storage_reservation=FixedPercentageStorageReservation(percentage=0.15),
    stats=chosen,
)
planner.plan(tables, [EmbeddingBagCollectionSharder()])  # type: ignore[list-item]
held = [0] * DEVICES
for option in chosen.options:
    print(f"table {option.name}: {option.sharding_type}, {option.compute_kernel}")
    for shard in option.shards:
        if shard.rank is not None and shard.storage is not None:
            held[shard.rank] += shard.storage.hbm
for rank, size in enumerate(held):
    print(f"rank {rank:2}: {size / GIB:6.3f} GiB of its GPU")
