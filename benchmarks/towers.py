"""Two towers at the same time: in one captured graph, on two processes, and in the usual ways of training.

    python benchmarks/towers.py [--only ROW ...] [--turns 3] [--quick]

Batch 4,096; a user tower over 1 M users and a history of 20 of 200 k items, an item tower over 200 k items, each
512-256-64; dot product, row-wise Adagrad for tables, Adam for dense layers. The baseline is one process of one thread
with both towers one by one: a plain PyTorch loop, TorchRec's FusedEmbeddingBagCollection and fused Adam. All sides of
`ranks` run in turn in one pair of processes:

    towers on ranks   TowersOnRanks: the user tower on rank 0, the item tower on rank 1, each with the baseline's loop
    sharded tables    train() with both towers on both ranks, table_wise
    the ceiling       the baseline on both ranks at once, which never talk

`captured`: train() with `compile=require` on one rank, both towers in one graph.
"""

from __future__ import annotations

from itertools import cycle

import torch
import torch.distributed as dist
from harness import (
    Counted,
    Repeated,
    Trainings,
    command_line,
    looping,
    never_talk,
    on_ranks,
    one_rank,
    rates,
    row,
    slowest,
)
from torch import nn
from torchrec import EmbeddingBagConfig, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.towers import TowersOnRanks
from torchrec_ext.models.tower_model import two_tower
from torchrec_ext.train.loop import TrainConfig, train

BAG, WIDTHS, NAMES = 20, (512, 256, 64), ("user_id", "history", "item_id")
OPTIMIZER = OptimizerConfig(
    tables="row_wise_adagrad", tables_lr=0.05, dense="adam", dense_lr=1e-3
)


def size_of(quick):
    """Rows of a batch over all ranks."""
    return 256 if quick else 4096


def sizes_of(quick):
    """Rows of each table."""
    users, items = (1_000, 200) if quick else (1_000_000, 200_000)
    return dict(zip(NAMES, (users, items, items), strict=True))


def model(quick):
    tables = [
        EmbeddingBagConfig(
            name=name,
            feature_names=[name],
            num_embeddings=rows,
            embedding_dim=64 if name == "item_id" else 32,
            pooling=PoolingType.MEAN,
        )
        for name, rows in sizes_of(quick).items()
    ]
    meta = torch.device("meta")
    options = {"tower_widths": WIDTHS, "interaction": "dot", "device": meta}
    return two_tower(tables[:2], tables[2:], **options)


def batches(size, quick, seed=0):
    """Batches of ``size`` rows; ids as popular as they are in logs.

    As many as the steps of three turns: labels learnt by heart have gradients so small that a CPU computes them slowly.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.ones(3, size, dtype=torch.int32)
    lengths[1] = BAG
    made = []
    for _ in range(8 if quick else 64):
        ids = []
        sizes = sizes_of(quick).values()
        for rows, length in zip(sizes, (1, BAG, 1), strict=True):
            draws = torch.rand(size * length, generator=generator)
            ids.append((draws**3 * rows).long())
        kjt = KeyedJaggedTensor(list(NAMES), torch.cat(ids), lengths=lengths.view(-1))
        labels = torch.rand(size, generator=generator).round()
        count = torch.tensor(float(size))
        made.append(
            TowerBatch(kjt, torch.empty(size, 0), labels, torch.ones(size), count)
        )
    return made


def fused(tables):
    """Tables that their backward moves."""
    settings, cpu = {"lr": OPTIMIZER.tables_lr}, torch.device("cpu")
    return FusedEmbeddingBagCollection(tables, RowWiseAdagrad, settings, device=cpu)


class TowerWithTables(nn.Module):
    """A tower with look-ups of its own, for a rank of its own."""

    def __init__(self, tower):
        super().__init__()
        self.tower, self.embeddings = tower, fused(tower.tables)

    def forward(self, sparse, dense):
        """Returns the tower's output, (B, D)."""
        pooled = self.embeddings(sparse).to_dict()
        # A table and its feature have one name.
        looked_up = {f"{name}@{name}": value for name, value in pooled.items()}
        return self.tower(looked_up, dense)


def adam(module):
    dense = [
        value
        for name, value in module.named_parameters()
        if "embedding_bags." not in name
    ]
    return torch.optim.Adam(dense, lr=OPTIMIZER.dense_lr, fused=True)


class Dot(nn.Module):
    """The dot product of both towers, and its loss."""

    def forward(self, outputs, labels):
        """Returns the mean loss."""
        logits = (outputs[0] * outputs[1]).sum(dim=1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def on_ranks_of_their_own(runtime, quick):
    made, names = model(quick), ("user", "item")
    own = names[runtime.rank]
    towers = {**dict.fromkeys(names), own: TowerWithTables(made.towers[own])}
    parallel = TowersOnRanks(towers, Dot(), runtime)
    optimizer = adam(parallel)
    # Every rank has the whole batch.
    feed = cycle(batches(size_of(quick), quick))

    def step():
        optimizer.zero_grad()
        batch = next(feed)
        inputs = dict.fromkeys(names, (batch.sparse, batch.dense))
        parallel(inputs, batch.labels).backward()
        optimizer.step()

    return step


def alone(quick):
    made = model(quick)
    tables = [table for tower in made.towers.values() for table in tower.tables]
    made.look_ups.collections["rows"] = fused(tables)
    optimizer = adam(made)
    feed = cycle(batches(size_of(quick), quick))

    def step():
        optimizer.zero_grad()
        made(next(feed))[0].backward()
        optimizer.step()

    return step


def trained(runtime, quick, config):
    """Returns the side that trains the model by train(), its tables table_wise."""
    made = model(quick)
    own = batches(size_of(quick) // runtime.world_size, quick, runtime.rank)
    table_wise = PlanConfig(sharding="table_wise")
    options = {"optimizer": OPTIMIZER, "batch_size": len(own[0])}
    plan = plan_sharding(made, runtime, table_wise, **options)
    sharded, optimizer = hybrid_parallel(made, runtime, plan=plan, optimizer=OPTIMIZER)
    loader = Counted(Repeated(own))

    def side(stop):
        train(sharded, optimizer, loader, runtime, config, stop=stop)

    return side, loader


def measured(runtime, options):
    one = alone(options.quick)
    on_one_rank = one if runtime.is_main else lambda: None
    sharded, loader = trained(runtime, options.quick, TrainConfig(epochs=1))
    sides = {
        "one process": looping(on_one_rank),
        "two of them": looping(one),
        "towers on ranks": looping(on_ranks_of_their_own(runtime, options.quick)),
        "towers, sharded tables instead": sharded,
    }
    loaders = {"towers, sharded tables instead": loader}
    trainings = Trainings(sides, before=dist.barrier, loaders=loaders)
    steps = 4 if options.quick else 16
    times = trainings.seconds_per_step(steps, options.turns, warm_up=6)
    trainings.close()
    return times


def ranks(options):
    """Rows a second over both ranks."""
    seconds = slowest(on_ranks(measured, 2, options))
    one = seconds.pop("one process")
    ceiling = never_talk(one, seconds.pop("two of them"))
    for name, each in seconds.items():
        yield compared(name, each, one, options, ceiling=ceiling)


def captured(options):
    config = TrainConfig(epochs=1, compile="require")
    with one_rank() as runtime:
        sides = {
            "eager": looping(alone(options.quick)),
            "captured": trained(runtime, options.quick, config)[0],
        }
        trainings = Trainings(sides)
        steps = 4 if options.quick else 16
        seconds = trainings.seconds_per_step(steps, options.turns, warm_up=12)
        trainings.close()
    name = "towers, one captured graph"
    yield compared(name, seconds["captured"], seconds["eager"], options)


def compared(name, ours, baseline, options, **more):
    size = size_of(options.quick)
    theirs = rates(size, baseline)
    return row(
        name, rates(size, ours), "rows/s", baseline=theirs, better="more", **more
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(__doc__, {"ranks": ranks, "captured": captured})
