"""Several networks in one job: stacked against one after another, and at the same time against one after another.

    python benchmarks/networks.py [--only ROW ...] [--turns 3] [--quick]

`stacked`: eight Contextual NCFs of a small set (654 users, 1,127 items, 21 columns of context, 74,673 parameters), 256
positives with 4 negatives each, dense Adam with a rate for each, one thread, on batches that are ready: milliseconds of
a step of all, as one `Stack`, against eight adopted steps one after another. `capture_s`, of its first step, and
`capture_s_of_eight` are seconds of compiling. `instances_per_s` counts each member's.
`two-networks`: a two-tower network and a Contextual NCF, seconds until both have made as many steps as last equally
long, each under `train()`: on a process of its own at the same time, as roles of one job, against one after the other.
Its ceiling is what two processes reach that never talk. Last line: one JSON object.
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
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from small_model_baseline import SHAPES, PlainNCF, drawn, positives
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.adopt import AdoptedStep, adopt
from torchrec_ext.capture.policy import Compile
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.ncf import ContextualNCF
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.networks import Stack
from torchrec_ext.train.config import TrainConfig
from torchrec_ext.train.loop import train

USERS, ITEMS, CONTEXT, COUNT, POSITIVES, NEGATIVES = 654, 1_127, 21, 83_731, 256, 4
MEMBERS = 8
RATES = [1e-3 * (1 + number) for number in range(MEMBERS)]
COLUMNS = [f"c{number}" for number in range(CONTEXT)]
ADAM = OptimizerConfig(tables="adam", tables_lr=1e-3, dense="adam", dense_lr=1e-3)
FOREVER = 1_000_000  # epochs

Stop = Callable[[], bool]


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


@contextlib.contextmanager
def one_rank() -> Iterator[Runtime]:
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    for name in ("torch", "torchrec", "fbgemm_gpu"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with Runtime.start("cpu", threads=1) as runtime:
        yield runtime


def loss(
    network: Any, user: Tensor, item: Tensor, context: Tensor, label: Tensor
) -> Tensor:
    """Of one network, as if it were alone."""
    return binary_cross_entropy_with_logits(network(user, item, context), label)


def ready(count: int) -> list[list[Tensor]]:
    """Batches of the user's DataLoader."""
    shape = SHAPES["small"]
    batches = drawn(shape.items, positives(shape))
    return [next(batches) for _ in range(count)]


def networks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        PlainNCF(SHAPES["small"].users, SHAPES["small"].items) for _ in range(MEMBERS)
    ]


def adopted_alone() -> list[AdoptedStep]:
    steps = []
    for network, rate in zip(networks(), RATES, strict=True):
        optimizer = torch.optim.Adam(network.parameters(), rate)
        own = functools.partial(loss, network)
        steps.append(adopt(network, optimizer, own, compile="require"))
    return steps


def looped(
    steps: Sequence[Callable[..., Any]], batches: list[list[Tensor]]
) -> Callable[[Stop], None]:
    def loop(stop: Stop) -> None:
        for batch in itertools.cycle(batches):
            for step in steps:
                step(*batch)
            if stop():
                return

    return loop


def stacked(options: Options) -> Iterator[Row]:
    batches = ready(8)
    several = adopted_alone()
    one = Stack(networks(), loss, RATES)
    start = time.perf_counter()
    one.step(*batches[0])
    first_s = time.perf_counter() - start
    sides = {"stack": looped([one.step], batches), "alone": looped(several, batches)}
    trainings = Trainings(sides)
    times = trainings.seconds_per_step(
        20 if options.quick else 150, options.turns, warm_up=10
    )
    trainings.close()
    instances = MEMBERS * len(batches[0][-1])
    yield row(
        "stacked",
        [1e3 * each for each in times["stack"]],
        "ms/step",
        baseline=[1e3 * each for each in times["alone"]],
        instances_per_s=round(instances / statistics.median(times["stack"])),
        capture_s=first_s,
        capture_s_of_eight=sum(step.figures()["capture_s"] for step in several),
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


ROWS = {"stacked": stacked, "two-networks": two_networks}


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(__doc__, ROWS, turns=3)
