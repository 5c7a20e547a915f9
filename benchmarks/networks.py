"""Several networks in one job: stacked against one after another, and at the same time against one after another.

    python benchmarks/networks.py [--only ROW ...] [--turns 3] [--quick]

Networks are Contextual NCFs of a small set (654 users, 1,127 items, 21 columns of context, 74,673 parameters), 256
positives with 4 negatives each, dense Adam, one thread. Figures are milliseconds of a step of all eight networks, each
with a loader of its own, as `--vary train.seed=0,...,7` gives them. A stack is timed inside `train_stack()`, which is
what `rec.train.networks` calls: loaders, checks of the losses, compiled step and windows of the loss included. Networks
that are trained one after another are timed as one network, eight times.

`stacked-eager`: a stack with train.compile=off, against plain PyTorch: nn.Embedding, the context beside every row,
fused Adam, on batches that our loader builds, with the faster of one thread and two. `stacked-eager, same form` is the
same stack against one network under `train()` with train.compile=off, and `stacked-compiled` a stack with
train.compile=require against one network under `train()` with train.compile=require: what `rec.train.hybrid` runs.
`one loader` rows are the same stacks where all members read one loader, as with `--vary optimizer.dense_lr=...`.
`two-networks`: a two-tower network and a Contextual NCF, seconds until both have made as many steps as last equally
long, each under `train()`: on a rank group of its own at the same time, against one after the other on one rank. Its
ceiling is what two processes reach that never talk. Last line: one JSON object.
"""

import contextlib
import datetime
import functools
import itertools
import json
import logging
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from harness import (
    LIMIT_S,
    Options,
    Row,
    Trainings,
    command_line,
    in_turn,
    on_ranks,
    row,
    slowest,
)
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.capture.policy import Compile
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.ncf import ContextualNCF
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.networks.training import Member, train_stack
from torchrec_ext.train.config import TrainConfig
from torchrec_ext.train.loop import train

USERS, ITEMS, CONTEXT, COUNT, POSITIVES, NEGATIVES = 654, 1_127, 21, 83_731, 256, 4
MEMBERS = 8
COLUMNS = [f"c{number}" for number in range(CONTEXT)]
ADAM = OptimizerConfig(tables="adam", tables_lr=1e-3, dense="adam", dense_lr=1e-3)
FOREVER = 1_000_000  # epochs

Stop = Callable[[], bool]


class Plain(nn.Module):
    """The network as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gmf_user, self.gmf_item = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.mlp_user, self.mlp_item = nn.Embedding(USERS, 32), nn.Embedding(ITEMS, 32)
        layers = [
            nn.Linear(64 + CONTEXT, 32),
            nn.ReLU(),
            nn.Linear(32, 16),
            nn.ReLU(),
            nn.Linear(16, 8),
            nn.ReLU(),
        ]
        self.mlp, self.head = nn.Sequential(*layers), nn.Linear(16, 1)

    def forward(
        self, user: torch.Tensor, item: torch.Tensor, context: torch.Tensor
    ) -> torch.Tensor:
        """Returns the logits, (B,)."""
        gmf = self.gmf_user(user) * self.gmf_item(item)
        mlp = self.mlp(
            torch.cat([self.mlp_user(user), self.mlp_item(item), context], 1)
        )
        return self.head(torch.cat([gmf, mlp], 1)).squeeze(1)  # type: ignore[no-any-return]


def ncf(*, shared: Sequence[str] = ("user",), device: str = "cpu") -> ContextualNCF:
    return ContextualNCF(
        USERS, ITEMS, context_dense=COLUMNS, shared=shared, device=torch.device(device)
    )


def towers(device: str = "cpu") -> TowerModel:
    tables = [
        EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=rows, embedding_dim=32
        )
        for name, rows in (("user_id", USERS), ("item_id", ITEMS))
    ]
    return two_tower(
        tables[:1],
        tables[1:],
        user_dense=COLUMNS,
        tower_widths=(64, 32),
        top_widths=(32,),
        shared=("user",),
        device=torch.device(device),
    )


@functools.cache
def rows_in_memory() -> tuple[Chunk, Chunk, UniformNegatives]:
    """The positives, the items and the sampler that draws the negatives."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, USERS, COUNT)
    item = (
        np.minimum((ITEMS * rng.random(COUNT) ** 2.5).astype(np.int64), ITEMS - 2) + 1
    )
    context = {
        name: Column((rng.random(COUNT, dtype=np.float32) < 0.3).astype(np.float32))
        for name in COLUMNS
    }
    positives = Chunk({"user_id": Column(user), "item_id": Column(item), **context})
    return (
        positives,
        Chunk({"item_id": Column(np.arange(ITEMS))}),
        UniformNegatives(ITEMS - 1, user, item),
    )


def loader(model: TowerModel, seed: int = 0) -> ChunkLoader:
    positives, items, negatives = rows_in_memory()
    config = LoaderConfig(
        batch_size=POSITIVES, negatives=NEGATIVES, seed=seed, drop_last=True
    )
    return ChunkLoader(
        positives,
        model.schema(),
        config=config,
        items=items,
        negatives=negatives,
        device="cpu",
    )


def stacked(
    stop: Stop, *, compiled: bool, members: int, one_loader: bool = False
) -> None:
    """Trains a stack as `rec.train.networks` does."""
    config = TrainConfig(epochs=FOREVER, compile="require" if compiled else "off")
    networks = [ncf() for _ in range(members)]
    loaders = [
        loader(networks[0], 0 if one_loader else seed)
        for seed in range(1 if one_loader else members)
    ]
    train_stack(
        {
            str(number): Member(
                network=network,
                loader=loaders[number % len(loaders)],
                optimizer=ADAM,
                train=config,
                seed=number,
                checkpoints=None,
            )
            for number, network in enumerate(networks)
        },
        log=lambda *_: None,
        stop=stop,
        say=lambda _: None,
    )


def alone(
    stop: Stop,
    runtime: Runtime,
    model: Callable[..., TowerModel] = ncf,
    *,
    compile: Compile,  # noqa: A002
) -> None:
    """Trains one network as `rec.train.hybrid` does."""
    network = model(device="meta")
    batches = loader(network)
    parallel, optimizer = hybrid_parallel(network, runtime, optimizer=ADAM)
    config = TrainConfig(epochs=FOREVER, compile=compile)
    train(parallel, optimizer, batches, runtime, config, log=lambda _: None, stop=stop)


def plain(stop: Stop, *, threads: int) -> None:
    """Trains one network in plain PyTorch."""
    network, loss = Plain(), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3, fused=True)
    batches = loader(ncf(shared=()))
    for epoch in itertools.count():
        batches.set_epoch(epoch)
        for batch in batches:
            torch.set_num_threads(threads)
            user, item = (batch.bags(name).values() for name in ("user_id", "item_id"))
            optimizer.zero_grad()
            loss(network(user, item, batch.dense), batch.labels).backward()
            optimizer.step()
            torch.set_num_threads(1)
            if stop():
                return


def milliseconds(
    trainings: Trainings, steps: int, options: Options, warm_up: int
) -> dict[str, list[float]]:
    times = trainings.seconds_per_step(steps, options.turns, warm_up=warm_up)
    trainings.close()
    return {name: [1e3 * seconds for seconds in turns] for name, turns in times.items()}


def all_members(milliseconds_of_one: Sequence[float], members: int) -> list[float]:
    return [members * each for each in milliseconds_of_one]


@contextlib.contextmanager
def one_rank() -> Iterator[Runtime]:
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    for name in ("torch", "torchrec", "fbgemm_gpu"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with Runtime.start("cpu", threads=1) as runtime:
        yield runtime


def size(options: Options) -> tuple[int, int, int]:
    """Members, steps of a turn, and steps that warm up."""
    return (2, 20, 5) if options.quick else (MEMBERS, 150, 30)


def stacked_eager(options: Options) -> Iterator[Row]:
    members, steps, warm_up = size(options)
    with one_rank() as runtime:
        sides = {
            "plain": lambda stop: plain(stop, threads=1),
            "plain, two threads": lambda stop: plain(stop, threads=2),
            "alone": lambda stop: alone(stop, runtime, compile="off"),
            "stack": lambda stop: stacked(stop, compiled=False, members=members),
            "one loader": lambda stop: stacked(
                stop, compiled=False, members=members, one_loader=True
            ),
        }
        times = milliseconds(Trainings(sides), steps, options, warm_up)
    fastest = [
        min(pair)
        for pair in zip(times["plain"], times["plain, two threads"], strict=True)
    ]
    beside = all_members(fastest, members)
    same_form = all_members(times["alone"], members)
    yield row("stacked-eager", times["stack"], "ms/step", baseline=beside, required=2.5)
    yield row("stacked-eager, same form", times["stack"], "ms/step", baseline=same_form)
    yield row(
        "stacked-eager, one loader", times["one loader"], "ms/step", baseline=beside
    )


def stacked_compiled(options: Options) -> Iterator[Row]:
    members, steps, warm_up = size(options)
    with one_rank() as runtime:
        sides = {
            "alone": lambda stop: alone(stop, runtime, compile="require"),
            "stack": lambda stop: stacked(stop, compiled=True, members=members),
            "one loader": lambda stop: stacked(
                stop, compiled=True, members=members, one_loader=True
            ),
        }
        times = milliseconds(Trainings(sides), steps, options, warm_up)
    one_after_another = all_members(times["alone"], members)
    yield row(
        "stacked-compiled",
        times["stack"],
        "ms/step",
        baseline=one_after_another,
        required=1.15,
    )
    yield row(
        "stacked-compiled, one loader",
        times["one loader"],
        "ms/step",
        baseline=one_after_another,
    )


class Pair:
    """Two processes that no process group joins: they meet at a store alone, as rank groups of a job do."""

    def __init__(self, path: str, rank: int) -> None:
        self._store, self.rank, self._meetings = dist.FileStore(path, 2), rank, 0
        self._store.set_timeout(datetime.timedelta(seconds=LIMIT_S))

    def meet(self) -> None:
        """Waits for the other process."""
        self._meetings += 1
        self._store.set(f"{self._meetings}/{self.rank}", "here")
        self._store.wait([f"{self._meetings}/{rank}" for rank in range(2)])

    def from_first(self, values: Sequence[int]) -> list[int]:
        """Returns the first process's numbers on both."""
        if self.rank == 0:
            self._store.set("values", json.dumps(values))
        return json.loads(self._store.get("values"))  # type: ignore[no-any-return]


def two_sides(
    runtime: Runtime, path: str, turns: int, steps: int
) -> dict[str, list[float]]:
    """Seconds of this process: of both networks in turn on the first, of both on each at once, of one on each."""
    pair = Pair(path, runtime.rank)
    dist.destroy_process_group()
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
    ):
        # without them this process is a job
        del os.environ[name]
    with one_rank() as alone_here:
        trainings = Trainings(
            {
                "towers": lambda stop: alone(stop, alone_here, towers, compile="off"),
                "ncf": lambda stop: alone(stop, alone_here, ncf, compile="off"),
            }
        )
        times = _three_ways(trainings, pair, turns, steps)
        trainings.close()
    # which the harness ends
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return times


def _three_ways(
    trainings: Trainings, pair: Pair, turns: int, steps: int
) -> dict[str, list[float]]:
    seconds = [
        statistics.median(turn)
        for turn in trainings.seconds_per_step(steps, 1).values()
    ]
    # both last as long
    counts = pair.from_first(
        [max(1, round(steps * max(seconds) / each)) for each in seconds]
    )
    names = ("towers", "ncf")

    def both() -> None:
        for name, count in zip(names, counts, strict=True):
            trainings.run(name, count)

    def nothing() -> None: ...

    sides = {
        "in sequence": both if pair.rank == 0 else nothing,
        "never talk": both,
        "at the same time": lambda: trainings.run(names[pair.rank], counts[pair.rank]),
    }
    return in_turn(sides, turns, before=pair.meet)


def two_networks(options: Options) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        times = slowest(
            on_ranks(
                two_sides,
                2,
                f"{folder}/store",
                options.turns,
                20 if options.quick else 150,
            )
        )
    ratios = zip(times["in sequence"], times["never talk"], strict=True)
    ceiling = statistics.median(2 * sequence / apart for sequence, apart in ratios)
    yield row(
        "two-networks",
        times["at the same time"],
        "s",
        baseline=times["in sequence"],
        required=0.9 * ceiling,
        ceiling=ceiling,
    )


ROWS = {
    "stacked-eager": stacked_eager,
    "stacked-compiled": stacked_compiled,
    "two-networks": two_networks,
}


if __name__ == "__main__":
    command_line(__doc__, ROWS, turns=3)
