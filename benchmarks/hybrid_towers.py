"""Row `tower-parallel` of hybrid.py: two towers at the same time on two processes, against one by one in one process.

Batch 4,096 over all ranks; a user tower over 1 M users and a history of 20 of 200 k items, an item tower over 200 k
items, each 512-256-64; dot product, row-wise Adagrad for tables, Adam for dense layers. All sides run in turn in one
pair of processes:

    one process       both towers, one by one, on one rank, tables' optimizer fused into the backward; the other idle
    two of them       the same on both ranks at once, which never talk: the ceiling
    tower-parallel    plan.towers=user:0,item:1
    sharded tables    both towers on both ranks, table_wise
    plain DDP         torch.nn.EmbeddingBag with sparse gradients in DistributedDataParallel
"""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from hybrid_ranks import Options, Row, in_turn, on_ranks, row
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagConfig, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.train.step.pipeline import make_pipeline

BATCH, BAG, WIDTHS = 4096, 20, (512, 256, 64)
OPTIMIZER = OptimizerConfig(tables="row_wise_adagrad", tables_lr=0.05, dense="adam", dense_lr=1e-3)


def model(quick: bool, device: str = "meta") -> TowerModel:
    users, items = (1_000, 200) if quick else (1_000_000, 200_000)

    def table(name: str, rows: int, width: int) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=rows, embedding_dim=width, pooling=PoolingType.MEAN
        )

    return two_tower(
        [table("user_id", users, 32), table("history", items, 32)],
        [table("item_id", items, 64)],
        tower_widths=WIDTHS,
        interaction="dot",
        device=torch.device(device),
    )


def batches(size: int, made: TowerModel, seed: int) -> Iterator[TowerBatch]:
    """Eight batches of ``size`` rows again and again; ids as popular as they are in logs."""
    rows = {table.name: table.num_embeddings for table in made._tables}
    generator = torch.Generator().manual_seed(seed)

    def ids(name: str, count: int) -> torch.Tensor:
        return (torch.rand(count, generator=generator) ** 3 * rows[name]).long()

    lengths = torch.ones(3, size, dtype=torch.int32)
    lengths[1] = BAG
    found = []
    for _ in range(8):
        values = torch.cat([ids("user_id", size), ids("history", size * BAG), ids("item_id", size)])
        kjt = KeyedJaggedTensor(["user_id", "history", "item_id"], values, lengths=lengths.view(-1))
        labels, ones = torch.rand(size, generator=generator).round(), torch.ones(size)
        found.append(TowerBatch(kjt, torch.empty(size, 0), labels, ones, torch.tensor(float(size))))
    return cycle(found)


def alone(quick: bool) -> Callable[[], None]:
    made = model(quick)
    for tower in made.towers.values():
        tower.embeddings = FusedEmbeddingBagCollection(
            tower.tables, RowWiseAdagrad, {"lr": OPTIMIZER.tables_lr}, device=torch.device("cpu")
        )
    dense = [value for name, value in made.named_parameters() if "embeddings." not in name]
    optimizer = torch.optim.Adam(dense, lr=OPTIMIZER.dense_lr)
    feed = batches(256 if quick else BATCH, made, seed=0)

    def step() -> None:
        optimizer.zero_grad()
        made(next(feed))[0].backward()
        optimizer.step()

    return step


class SparseBags(nn.Module):
    """Tables as torch.nn.EmbeddingBags, whose gradients are sparse."""

    def __init__(self, tables: list[EmbeddingBagConfig]) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag(table.num_embeddings, table.embedding_dim, mode="mean", sparse=True)
                for table in tables
            }
        )

    def forward(self, sparse: KeyedJaggedTensor) -> Any:
        """The pooled bags by feature, as a collection of TorchRec gives them."""
        found = {name: bag(sparse[name].values(), sparse[name].offsets()[:-1]) for name, bag in self.bags.items()}
        return _Dict(found)


class _Dict(dict[str, torch.Tensor]):
    def to_dict(self) -> dict[str, torch.Tensor]:
        return dict(self)


def plain_ddp(runtime: Runtime, quick: bool) -> Callable[[], None]:
    made = model(quick)
    for tower in made.towers.values():
        tower.embeddings = SparseBags(tower.tables)
    tables = [value for name, value in made.named_parameters() if ".bags." in name]
    dense = [value for name, value in made.named_parameters() if ".bags." not in name]
    optimizers = [
        torch.optim.Adagrad(tables, lr=OPTIMIZER.tables_lr),
        torch.optim.Adam(dense, lr=OPTIMIZER.dense_lr),
    ]
    ddp = DistributedDataParallel(made)
    feed = batches((256 if quick else BATCH) // runtime.world_size, made, seed=runtime.rank)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(next(feed))[0].backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def hybrid(runtime: Runtime, quick: bool, towers: str) -> Callable[[], None]:
    made = model(quick)
    feed = batches((256 if quick else BATCH) // runtime.world_size, made, seed=runtime.rank)
    plan = plan_sharding(made, runtime, PlanConfig(sharding="table_wise", towers=towers), optimizer=OPTIMIZER)
    pipeline = make_pipeline(*hybrid_parallel(made, runtime, plan=plan, optimizer=OPTIMIZER), runtime.device)
    return lambda: pipeline.progress(feed)


def measured(runtime: Runtime, options: Options) -> dict[str, float]:
    one = alone(options.quick)
    sides = {
        "one process": one if runtime.is_main else lambda: None,
        "two of them": one,
        "tower-parallel": hybrid(runtime, options.quick, "user:0,item:1"),
        "sharded tables": hybrid(runtime, options.quick, "data_parallel"),
        "plain DDP": plain_ddp(runtime, options.quick),
    }
    return in_turn(sides, options.repeats, inner=2 if options.quick else 4)


def rows(options: Options) -> Iterator[Row]:
    """Rows per second over both ranks; ``share`` is the ratio as a share of the ceiling, required .85."""
    size = 256 if options.quick else BATCH
    ranks = on_ranks(measured, 2, options)
    seconds = {side: max(rank[side] for rank in ranks) for side in ranks[0]}
    one = size / seconds["one process"]
    ceiling = 2 * size / seconds["two of them"] / one
    for name, side, required in (
        ("tower-parallel", "tower-parallel", 1.6),
        ("tower-parallel, sharded tables instead", "sharded tables", None),
        ("tower-parallel, plain DDP instead", "plain DDP", None),
    ):
        ours = size / seconds[side]
        yield row(name, one, ours, "rows/s", ours / one, required, ceiling, share=round(ours / one / ceiling, 3))
