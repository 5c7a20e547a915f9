"""Rows `towers` of hybrid.py: two towers at the same time on two processes, against one by one in one process.

Batch 4,096 over all ranks; a user tower over 1 M users and a history of 20 of 200 k items, an item tower over 200 k
items, each 512-256-64; dot product, row-wise Adagrad for tables, Adam for dense layers. All sides run in turn in one
pair of processes, each with one thread unless it says otherwise:

    one process       both towers, one by one, on one rank; a plain PyTorch loop without checks, TorchRec's
                      FusedEmbeddingBagCollection, whose backward moves the tables, and fused Adam; the other rank idle
    two of them       one process's loop on both ranks at once, which never talk: the ceiling
    towers on ranks   TowersOnRanks: the user tower on rank 0, the item tower on rank 1, each with one process's loop
    sharded tables    `train()` with both towers on both ranks, table_wise
    plain DDP         a plain PyTorch loop: torch.nn.EmbeddingBag with sparse gradients in DistributedDataParallel
    two threads       one process's loop with two threads
"""

import statistics
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from harness import Options, Row, Trainings, on_ranks, rates, row, slowest
from hybrid_training import Side, looping, training
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagConfig, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.towers import TowersOnRanks
from torchrec_ext.models.tower_model import TowerModel, two_tower

BATCH, BAG, WIDTHS = 4096, 20, (512, 256, 64)
OPTIMIZER = OptimizerConfig(
    tables="row_wise_adagrad", tables_lr=0.05, dense="adam", dense_lr=1e-3
)


def model(quick: bool, device: str = "meta") -> TowerModel:
    users, items = (1_000, 200) if quick else (1_000_000, 200_000)

    def table(name: str, rows: int, width: int) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name,
            feature_names=[name],
            num_embeddings=rows,
            embedding_dim=width,
            pooling=PoolingType.MEAN,
        )

    return two_tower(
        [table("user_id", users, 32), table("history", items, 32)],
        [table("item_id", items, 64)],
        tower_widths=WIDTHS,
        interaction="dot",
        device=torch.device(device),
    )


def batches(size: int, made: TowerModel, seed: int) -> list[TowerBatch]:
    """Eight batches of ``size`` rows; ids as popular as they are in logs."""
    rows = {table.name: table.num_embeddings for table in made._tables}
    generator = torch.Generator().manual_seed(seed)

    def ids(name: str, count: int) -> torch.Tensor:
        return (torch.rand(count, generator=generator) ** 3 * rows[name]).long()

    lengths = torch.ones(3, size, dtype=torch.int32)
    lengths[1] = BAG
    made_batches = []
    for _ in range(8):
        values = torch.cat(
            [ids("user_id", size), ids("history", size * BAG), ids("item_id", size)]
        )
        kjt = KeyedJaggedTensor(
            ["user_id", "history", "item_id"], values, lengths=lengths.view(-1)
        )
        labels, ones = torch.rand(size, generator=generator).round(), torch.ones(size)
        made_batches.append(
            TowerBatch(
                kjt, torch.empty(size, 0), labels, ones, torch.tensor(float(size))
            )
        )
    return made_batches


def fused(tables: list[EmbeddingBagConfig]) -> nn.Module:
    """Tables that their backward moves."""
    return FusedEmbeddingBagCollection(
        tables,
        RowWiseAdagrad,
        {"lr": OPTIMIZER.tables_lr},
        device=torch.device("cpu"),
    )


class TowerWithTables(nn.Module):
    """A tower with look-ups of its own, for a rank of its own."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower
        self.embeddings = fused(tower.tables)

    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        """Returns the tower's output, (B, D)."""
        pooled = self.embeddings(sparse).to_dict()
        # A table and its feature have one name.
        looked_up = {f"{name}@{name}": value for name, value in pooled.items()}
        return self.tower(looked_up, dense)  # type: ignore[no-any-return]


def adam(module: nn.Module) -> torch.optim.Optimizer:
    dense = [
        value
        for name, value in module.named_parameters()
        if "embedding_bags." not in name and "embeddings." not in name
    ]
    return torch.optim.Adam(dense, lr=OPTIMIZER.dense_lr, fused=True)


class Dot(nn.Module):
    """The dot product of both towers, and its loss."""

    def forward(self, outputs: list[Tensor], labels: Tensor) -> Tensor:
        """Returns the mean loss."""
        logits = (outputs[0] * outputs[1]).sum(dim=1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def on_ranks_of_their_own(runtime: Runtime, quick: bool) -> Callable[[], None]:
    made = model(quick)
    names = ("user", "item")
    own = names[runtime.rank]
    towers = {
        name: TowerWithTables(made.towers[name]) if name == own else None
        for name in names
    }
    parallel = TowersOnRanks(towers, Dot(), runtime)
    optimizer = adam(parallel)
    # Every rank has the whole batch.
    feed = cycle(batches(256 if quick else BATCH, made, seed=0))

    def step() -> None:
        optimizer.zero_grad()
        batch = next(feed)
        parallel(
            dict.fromkeys(names, (batch.sparse, batch.dense)), batch.labels
        ).backward()
        optimizer.step()

    return step


def alone(quick: bool) -> Callable[[], None]:
    made = model(quick)
    made.look_ups.collections["rows"] = fused(made._tables)
    optimizer = adam(made)
    feed = cycle(batches(256 if quick else BATCH, made, seed=0))

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
                table.name: nn.EmbeddingBag(
                    table.num_embeddings, table.embedding_dim, mode="mean", sparse=True
                )
                for table in tables
            }
        )

    def forward(self, sparse: KeyedJaggedTensor) -> Any:
        """The pooled bags by feature, as a collection of TorchRec gives them."""
        found = {
            name: bag(sparse[name].values(), sparse[name].offsets()[:-1])
            for name, bag in self.bags.items()
        }
        return _Dict(found)


class _Dict(dict[str, torch.Tensor]):
    def to_dict(self) -> dict[str, torch.Tensor]:
        return dict(self)


def plain_ddp(runtime: Runtime, quick: bool) -> Callable[[], None]:
    made = model(quick)
    made.look_ups.collections["rows"] = SparseBags(made._tables)
    tables = [value for name, value in made.named_parameters() if ".bags." in name]
    dense = [value for name, value in made.named_parameters() if ".bags." not in name]
    optimizers = [
        torch.optim.Adagrad(tables, lr=OPTIMIZER.tables_lr),
        torch.optim.Adam(dense, lr=OPTIMIZER.dense_lr, fused=True),
    ]
    ddp = DistributedDataParallel(made)
    feed = cycle(
        batches(
            (256 if quick else BATCH) // runtime.world_size, made, seed=runtime.rank
        )
    )

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(next(feed))[0].backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def hybrid(runtime: Runtime, quick: bool) -> Side:
    made = model(quick)
    own = batches(
        (256 if quick else BATCH) // runtime.world_size, made, seed=runtime.rank
    )
    return training(made, runtime, own, PlanConfig(sharding="table_wise"), OPTIMIZER)


def with_two_threads(step: Callable[[], None]) -> Callable[[], None]:
    def wider() -> None:
        torch.set_num_threads(2)
        step()
        torch.set_num_threads(1)

    return wider


def measured(runtime: Runtime, options: Options) -> dict[str, list[float]]:
    one = alone(options.quick)
    on_one_rank = one if runtime.is_main else lambda: None
    sides = {
        "one process": looping(on_one_rank),
        "two of them": looping(one),
        "towers on ranks": looping(on_ranks_of_their_own(runtime, options.quick)),
        "sharded tables": hybrid(runtime, options.quick),
        "plain DDP": looping(plain_ddp(runtime, options.quick)),
        "two threads": looping(with_two_threads(on_one_rank)),
    }
    trainings = Trainings(sides, before=dist.barrier)
    times = trainings.seconds_per_step(
        4 if options.quick else 8, options.turns, warm_up=6
    )
    trainings.close()
    return times


def rows(options: Options) -> Iterator[Row]:
    """Rows per second over both ranks; ``share`` is the ratio as a share of the ceiling."""
    size = 256 if options.quick else BATCH
    seconds = slowest(on_ranks(measured, 2, options))
    one = rates(size, seconds["one process"])
    pairs = zip(seconds["one process"], seconds["two of them"], strict=True)
    ceiling = statistics.median(2 * alone / together for alone, together in pairs)
    for name, side in (
        ("towers on ranks", "towers on ranks"),
        ("towers, sharded tables instead", "sharded tables"),
        ("towers, plain DDP instead", "plain DDP"),
        ("towers, one process of two threads instead", "two threads"),
    ):
        ours = rates(size, seconds[side])
        share = (
            statistics.median(
                mine / theirs for mine, theirs in zip(ours, one, strict=True)
            )
            / ceiling
        )
        yield row(
            name,
            ours,
            "rows/s",
            baseline=one,
            better="more",
            required=None,
            ceiling=ceiling,
            machine="cores",
            share=round(share, 3),
        )
