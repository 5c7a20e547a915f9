"""Rows `shared memory, ...` of hybrid.py: collectives over memory that two ranks share, against the same over gloo.

Each program is built twice in one pair of processes of one thread each, and the two take turns: a switch puts the
group's own gloo back for the baseline. `calm_gloo()` is on in both. Programs:

    NCF in DDP            a user's script: 943 x 1,682 embeddings of 32 and a network of 64-32-16 in
                          DistributedDataParallel with Adam, 1,280 rows a rank
    TorchRec's DMP        TorchRec alone: an EmbeddingBagCollection of 8 x 10,000 x 32, table-wise, Adagrad, 512 rows
    NeuMF every step      `train()` on MovieLens 100K, as in the row `sync every step`
    merged look-ups       a step of hybrid_parallel's model, and of `train()` with its pipeline

Rows `beside two busy processes` have two programs on the same cores that never wait: ranks that spin there would take
from each other what they wait for. Required is .97 of gloo.

Where the library of shared memory is not built (`python -m torchrec_ext.doctor --install`) the rows are left out.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, pairwise

import hybrid_look_ups
import hybrid_sync
import torch
import torch.distributed as dist
from harness import Options, Row, Trainings, has_data, on_ranks, row, slowest
from hybrid_training import Side, Stop, looping
from torch import Tensor, nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from torchrec_ext.distributed import share_memory
from torchrec_ext.distributed.runtime import Runtime, calm_gloo
from torchrec_ext.distributed.shared_memory.library import LibraryError, load
from torchrec_ext.distributed.sync_config import SyncConfig
from torchx_apps.jobs.setup import load_task, quieten_libraries

CPU = torch.device("cpu")
USERS, ITEMS, COLUMNS, TABLES, TABLE_ROWS = 943, 1682, 32, 8, 10_000
NCF_BATCH, BAGS_BATCH = 1280, 512


class Switch:
    """Puts the collectives of all ranks over gloo or over shared memory; every rank switches between the same two."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD
        self._gloo = self._group._get_backend(CPU)
        assert share_memory()
        self._shared = self._group._get_backend(CPU)

    def to(self, *, shared: bool) -> None:
        """Takes shared memory, or gloo."""
        kinds = dist.ProcessGroup.BackendType
        kind, backend = (
            (kinds.CUSTOM, self._shared) if shared else (kinds.GLOO, self._gloo)
        )
        self._group._register_backend(CPU, kind, backend)

    def over(self, side: Side, *, shared: bool) -> Side:
        """Returns ``side``, whose turns are over shared memory or over gloo."""

        def switched(stop: Stop) -> object:
            self.to(shared=shared)

            def after_step() -> bool:
                stopped = stop()
                # Another side may have had its turn meanwhile.
                self.to(shared=shared)
                return stopped

            return side(after_step)

        return switched


class Ncf(nn.Module):
    """A user's own network, whose tables are dense parameters like its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, COLUMNS)
        self.items = nn.Embedding(ITEMS, COLUMNS)
        widths = (2 * COLUMNS, 32, 16)
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
        self.top = nn.Sequential(
            *(each for pair in layers for each in pair), nn.Linear(16, 1)
        )

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Returns (B,) logits."""
        return self.top(torch.cat([self.users(users), self.items(items)], dim=1))[:, 0]  # type: ignore[no-any-return]


def ncf_in_ddp(rank: int) -> Side:
    torch.manual_seed(0)
    model = DistributedDataParallel(Ncf())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loss = nn.BCEWithLogitsLoss()
    generator = torch.Generator().manual_seed(rank)
    users, items = (
        torch.randint(count, (8, NCF_BATCH), generator=generator)
        for count in (USERS, ITEMS)
    )
    labels = torch.rand(8, NCF_BATCH, generator=generator).round()
    feed = cycle(range(8))

    def step() -> None:
        at = next(feed)
        optimizer.zero_grad()
        loss(model(users[at], items[at]), labels[at]).backward()
        optimizer.step()

    return looping(step)


def bags_in_dmp(rank: int) -> Side:
    torch.manual_seed(0)
    names = [f"table_{at}" for at in range(TABLES)]
    tables = [
        EmbeddingBagConfig(
            name=name,
            feature_names=[name],
            num_embeddings=TABLE_ROWS,
            embedding_dim=COLUMNS,
        )
        for name in names
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.01})
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        bags,
        per_param_sharding={
            name: table_wise(rank=at % 2) for at, name in enumerate(names)
        },
        sharder=sharder,  # type: ignore[arg-type]
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        bags,
        device=CPU,
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],  # type: ignore[list-item]
    )
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.ones(TABLES * BAGS_BATCH, dtype=torch.long)
    batches = [
        KeyedJaggedTensor(
            names,
            torch.randint(TABLE_ROWS, lengths.shape, generator=generator),
            lengths=lengths,
        )
        for _ in range(8)
    ]
    feed = cycle(batches)

    def step() -> None:
        model(next(feed)).values().square().mean().backward()

    return looping(step)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measured(runtime: Runtime, options: Options, steps: int) -> dict[str, list[float]]:
    """Seconds of a step of each program over gloo and over shared memory, by turn."""
    quieten_libraries()
    size = 64 if options.quick else hybrid_look_ups.BATCH
    job = hybrid_sync.job_of(SyncConfig(), 2, options.quick, hybrid_sync.ENDLESS)
    task = (
        load_task(job, runtime)
        if options.quick or has_data("shared-memory", "ml-100k")
        else None
    )
    sides: dict[str, tuple[Side, bool]] = {}
    for medium, shared in (("gloo", False), ("shared", True)):
        sides[f"NCF in DDP, {medium}"] = ncf_in_ddp(runtime.rank), shared
        sides[f"TorchRec's DMP, {medium}"] = bags_in_dmp(runtime.rank), shared
        if task is not None:
            sides[f"NeuMF every step, {medium}"] = (
                hybrid_sync.side(runtime, SyncConfig(), options, task)[0],
                shared,
            )
        for how in ("", ", pipelined"):
            side = hybrid_look_ups.side(runtime, size, pipelined=bool(how))
            sides[f"merged look-ups{how}, {medium}"] = side, shared
    switch = Switch()
    calm_gloo()
    trainings = Trainings(
        {
            name: switch.over(side, shared=shared)
            for name, (side, shared) in sides.items()
        },
        before=dist.barrier,
    )
    times = trainings.seconds_per_step(
        5 if options.quick else steps, options.turns, warm_up=20
    )
    trainings.close()
    return times


def rows(options: Options) -> Iterator[Row]:
    """One row for each program: milliseconds of the slower rank."""
    try:
        load()
    except LibraryError as error:
        print(f"shared-memory: left out: {error}", file=sys.stderr)
        return
    seconds = slowest(on_ranks(measured, 2, options, 200, collectives="gloo"))
    yield from _against_gloo(seconds, "", None)
    with busy_processes(2):
        seconds = slowest(on_ranks(measured, 2, options, 50, collectives="gloo"))
    yield from _against_gloo(seconds, ", beside two busy processes", 0.97)


def _against_gloo(
    seconds: dict[str, list[float]], where: str, required: float | None
) -> Iterator[Row]:
    for name in [
        name.removesuffix(", gloo") for name in seconds if name.endswith(", gloo")
    ]:
        gloo, shared = (
            [1e3 * turn for turn in seconds[f"{name}, {medium}"]]
            for medium in ("gloo", "shared")
        )
        yield row(
            f"shared memory, {name}, against gloo{where}",
            shared,
            "ms a step",
            baseline=gloo,
            required=required,
            machine="cores",
        )
