"""Several networks in one job: stacked against a loop over them, and at the same time against one after the other.

    python benchmarks/networks.py [--only ROW ...] [--repeats 15] [--quick] [--cpu_seconds]

`stacked-eager` and `stacked-compiled`: 8 small Contextual NCF networks (654 users, 1,127 items, 74,673 parameters), 256
positives with 4 negatives each, a batch of its own for each network, one thread, dense Adam; a step of all eight. The
baselines are a loop over the networks as users write them (nn.Embedding, the context beside every row,
torch.optim.Adam), and a loop over eight whole steps, each compiled as the stack's is. `stacked-eager, same form` is
against a loop over our own networks, who compute the user's side once for a positive and its negatives, with fused
Adam: what stacking alone gives. `two-networks`: a two-tower network and a Contextual NCF, each with its own loader,
trained on two processes against one after the other in one; both last as long. The ceiling is what two processes reach
that never talk. `one-reader`: a batch built by each rank for itself, against built by one and handed to the other over
gloo: whether rank groups should share a reader. Sides run in turn, medians. `--cpu_seconds` counts the thread's own
seconds, for a machine that others use. Last line: one JSON object.
"""

import argparse
import copy
import importlib.metadata
import itertools
import json
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from hybrid_ranks import Row, in_turn, on_ranks, row
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.ncf import ContextualNCF
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.networks.compiled import CompiledStep
from torchrec_ext.networks.optimizer import StackedOptimizer
from torchrec_ext.networks.stack import Stack
from torchrec_ext.schema import Jagged

USERS, ITEMS, CONTEXT, MEMBERS, POSITIVES, NEGATIVES = 654, 1_127, 21, 8, 256, 4
COLUMNS = [f"c{place}" for place in range(CONTEXT)]
ADAM = OptimizerConfig(tables="adam", tables_lr=1e-3, dense="adam", dense_lr=1e-3)
CLOCK = time.thread_time if "--cpu_seconds" in sys.argv else time.perf_counter


class Plain(nn.Module):
    """The network as in the question that it comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.gmf_user, self.gmf_item = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.mlp_user, self.mlp_item = nn.Embedding(USERS, 32), nn.Embedding(ITEMS, 32)
        layers = [nn.Linear(64 + CONTEXT, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU()]
        self.mlp, self.head = nn.Sequential(*layers), nn.Linear(16, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """(B,) logits."""
        gmf = self.gmf_user(user) * self.gmf_item(item)
        mlp = self.mlp(torch.cat([self.mlp_user(user), self.mlp_item(item), context], 1))
        return self.head(torch.cat([gmf, mlp], 1)).squeeze(1)  # type: ignore[no-any-return]


def ours(users: int = USERS, items: int = ITEMS) -> ContextualNCF:
    return ContextualNCF(users, items, context_dense=COLUMNS, shared=("user",))


def drawn(seed: int) -> tuple[list[torch.Tensor], TowerBatch]:
    """One batch in both forms."""
    draw = torch.Generator().manual_seed(seed)
    rows = POSITIVES * (1 + NEGATIVES)
    user = torch.randint(USERS, (POSITIVES,), generator=draw)
    item = (ITEMS * torch.rand(rows, generator=draw) ** 2.5).long().clamp(max=ITEMS - 1)
    context = (torch.rand(POSITIVES, CONTEXT, generator=draw) < 0.3).float()
    label = torch.tensor([1.0] + [0.0] * NEGATIVES).repeat(POSITIVES)
    batch = (
        ours()
        .schema()
        .assemble(
            {"user_id": Jagged(user), "item_id": Jagged(item)},
            dict(zip(COLUMNS, context.unbind(1), strict=True)),
            labels=label,
            index=1 + NEGATIVES,
            shared_rows=torch.arange(POSITIVES),
        )
    )
    width = 1 + NEGATIVES
    return [user.repeat_interleave(width), item, context.repeat_interleave(width, 0), label], batch


def loop_over_plain(batches: list[list[torch.Tensor]]) -> Callable[[], None]:
    networks = [Plain() for _ in batches]
    optimizers = [torch.optim.Adam(network.parameters(), 1e-3) for network in networks]
    loss = nn.BCEWithLogitsLoss()

    def step() -> None:
        for network, optimizer, (user, item, context, label) in zip(networks, optimizers, batches, strict=True):
            optimizer.zero_grad()
            loss(network(user, item, context), label).backward()
            optimizer.step()

    return step


def loop_over_ours(batches: list[TowerBatch]) -> Callable[[], None]:
    networks = [ours() for _ in batches]
    optimizers = [torch.optim.Adam(network.parameters(), 1e-3, fused=True) for network in networks]

    def step() -> None:
        for network, optimizer, batch in zip(networks, optimizers, batches, strict=True):
            optimizer.zero_grad()
            network(batch)[0].backward()
            optimizer.step()

    return step


def stacked(networks: Mapping[str, nn.Module], batches: list[TowerBatch], *, compiled: bool) -> Callable[[], object]:
    stack = Stack(networks)
    optimizer = StackedOptimizer(stack, dict.fromkeys(networks, ADAM))

    def step() -> None:
        stack.backward(batches)
        optimizer.step()

    step()
    if not compiled:
        return step
    whole = CompiledStep(stack, optimizer)
    return lambda: whole(batches)


def side_by_side(sides: Mapping[str, Callable[[], object]], repeats: int, inner: int = 5) -> dict[str, float]:
    """The median seconds of a step of each, ``inner`` in a row as in training, all sides in turn."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):  # the first round warms up, and compiles
        for name, call in sides.items():
            start = CLOCK()
            for _ in range(inner):
                call()
            times[name].append((CLOCK() - start) / inner)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def stacked_eager(options: argparse.Namespace) -> Iterator[Row]:
    plain, batches = map(list, zip(*(drawn(seed) for seed in range(options.members)), strict=True))
    networks = {str(seed): ours() for seed in range(options.members)}
    sides = {
        "loop": loop_over_plain(plain),
        "same form": loop_over_ours(batches),
        "stack": stacked(networks, batches, compiled=False),
    }
    found = {name: seconds * 1e3 for name, seconds in side_by_side(sides, options.repeats).items()}
    yield row("stacked-eager", found["loop"], found["stack"], "ms/step", found["loop"] / found["stack"], 2.5)
    yield row(
        "stacked-eager, same form", found["same form"], found["stack"], "ms/step", found["same form"] / found["stack"]
    )


def stacked_compiled(options: argparse.Namespace) -> Iterator[Row]:
    torch._dynamo.config.recompile_limit = 8 * (options.members + 1)  # one code is compiled for each network
    batches = [drawn(seed)[1] for seed in range(options.members)]
    networks = {str(seed): ours() for seed in range(options.members)}
    alone = [
        stacked({name: copy.deepcopy(network)}, [batch], compiled=True)
        for (name, network), batch in zip(networks.items(), batches, strict=True)
    ]
    sides = {"loop": lambda: [step() for step in alone], "stack": stacked(networks, batches, compiled=True)}
    found = {name: seconds * 1e3 for name, seconds in side_by_side(sides, options.repeats).items()}
    yield row("stacked-compiled", found["loop"], found["stack"], "ms/step", found["loop"] / found["stack"], 1.15)


def loader(model: TowerModel, rows: int, users: int, items: int) -> ChunkLoader:
    """Random rows with exact negatives, the user and the context of each once."""
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, users, rows), rng.integers(1, items, rows)
    dense = {name: Column((rng.random(rows, dtype=np.float32) < 0.3).astype(np.float32)) for name in COLUMNS}
    chunk = Chunk({"user_id": Column(user), "item_id": Column(item), **dense})
    catalogue = Chunk({"item_id": Column(np.arange(items))})
    config = LoaderConfig(batch_size=POSITIVES, negatives=NEGATIVES, prefetch=0, drop_last=True)
    sampler = UniformNegatives(items - 1, user, item)
    return ChunkLoader(chunk, model.schema(), config=config, items=catalogue, negatives=sampler)


def tower() -> TowerModel:
    tables = [
        EmbeddingBagConfig(name=n, feature_names=[n], num_embeddings=r, embedding_dim=32)
        for n, r in (("user_id", USERS), ("item_id", ITEMS))
    ]
    return two_tower(
        tables[:1], tables[1:], user_dense=COLUMNS, tower_widths=(64, 32), top_widths=(32,), shared=("user",)
    )


def trained(model: TowerModel) -> Callable[[int], None]:
    """From a number of steps to training as long, on batches that a loader of its own builds meanwhile."""
    stack = Stack({"a": model})
    optimizer = StackedOptimizer(stack, {"a": ADAM})
    stream = itertools.chain.from_iterable(itertools.repeat(loader(model, 200 * POSITIVES, USERS, ITEMS)))

    def train(steps: int) -> None:
        for batch in itertools.islice(stream, steps):
            stack.backward([batch])
            optimizer.step()

    return train


def two_sides(runtime: Runtime, repeats: int, steps: int) -> dict[str, float]:
    """Seconds of this rank: of both networks in turn on rank 0, of both on each rank at once, of one on each."""
    train = [trained(tower()), trained(ours())]
    times = []
    for network in train:
        network(3)  # traces it
        start = time.perf_counter()
        network(steps)
        times.append(time.perf_counter() - start)
    both = torch.tensor(times)
    torch.distributed.broadcast(both, src=0)
    ratio = float(both[0] / both[1])  # as many more steps of the faster as make both last as long
    counts = [steps, max(1, round(steps * ratio))] if ratio > 1 else [max(1, round(steps / ratio)), steps]

    def in_sequence() -> None:
        for network, count in zip(train, counts, strict=True):
            network(count)

    def own() -> None:
        train[runtime.rank](counts[runtime.rank])

    def nothing() -> None: ...

    sides = {
        "in sequence": in_sequence if runtime.rank == 0 else nothing,
        "never talk": in_sequence,
        "at the same time": own,
    }
    return in_turn(sides, repeats, 1)


def two_networks(options: argparse.Namespace) -> Iterator[Row]:
    steps = 10 if options.quick else 100
    by_rank = on_ranks(two_sides, 2, max(2, options.repeats // 3), steps)
    found = {name: max(times[name] for times in by_rank) for name in by_rank[0]}
    ceiling = 2 * found["in sequence"] / found["never talk"]
    ratio = found["in sequence"] / found["at the same time"]
    yield row("two-networks", found["in sequence"], found["at the same time"], "s", ratio, 0.9 * ceiling, ceiling)


def built_and_handed(runtime: Runtime, repeats: int) -> dict[str, float]:
    """Seconds of a batch on this rank: built on both; handed over; and built by rank 0 and handed over."""
    stream = itertools.chain.from_iterable(itertools.repeat(loader(ours(), 200 * POSITIVES, USERS, ITEMS)))
    made = next(stream)

    def hand_over(batch: TowerBatch | None) -> TowerBatch:
        told = (
            torch.frombuffer(bytearray(pickle.dumps(batch)), dtype=torch.uint8) if runtime.rank == 0 else torch.empty(0)
        )
        size = torch.tensor([len(told)])
        torch.distributed.broadcast(size, src=0)
        received = told if runtime.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        torch.distributed.broadcast(received, src=0)
        return batch if batch is not None else pickle.loads(received.numpy().tobytes())

    def build_and_hand_over() -> None:
        hand_over(next(stream) if runtime.rank == 0 else None)

    sides = {
        "build": lambda: next(stream),
        "hand over": lambda: hand_over(made if runtime.rank == 0 else None),
        "both": build_and_hand_over,
    }
    return in_turn(sides, repeats, 20)


def one_reader(options: argparse.Namespace) -> Iterator[Row]:
    by_rank = on_ranks(built_and_handed, 2, options.repeats)
    found = {name: 1e3 * max(times[name] for times in by_rank) for name in by_rank[0]}
    told = float(f"{found['hand over']:.4g}")
    yield row(
        "one-reader", found["build"], found["both"], "ms/batch", found["build"] / found["both"], handing_over_ms=told
    )


ROWS = {
    "stacked-eager": stacked_eager,
    "stacked-compiled": stacked_compiled,
    "two-networks": two_networks,
    "one-reader": one_reader,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="2 members, few repeats: to see that it runs")
    parser.add_argument("--cpu_seconds", action="store_true", help="of this thread, where others use the machine")
    options = parser.parse_args()
    options.members = 2 if options.quick else MEMBERS
    options.repeats = 3 if options.quick else options.repeats
    torch.set_num_threads(1)
    found = [entry for name in options.only for entry in ROWS[name](options)]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchrec")}
    cores = len(os.sched_getaffinity(0))
    print(
        json.dumps(
            {"benchmark": "networks", "clock": CLOCK.__name__, "versions": versions, "cores": cores, "rows": found}
        )
    )


if __name__ == "__main__":
    main()
