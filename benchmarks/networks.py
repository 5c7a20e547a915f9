"""Several networks in one job: stacked against one after another, and at the same time against one after another.

    python benchmarks/networks.py [--only ROW ...] [--turns 3] [--quick]

`stacked`: eight Contextual NCFs of plain_ncf.py's small shape, 256 positives with 4 negatives each, dense Adam with a
rate for each, one thread, on batches that are ready: milliseconds of a step of all, as one `Stack`, against eight
adopted steps one after another. `capture_s`, of its first step, and `capture_s_of_eight` are seconds of compiling.
`two-networks`: a two-tower network and a Contextual NCF, seconds until both have made as many steps as last equally
long, each under train(): on a process of its own at the same time, as roles of one job, against one after the other.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from harness import (
    LIMIT_S,
    Trainings,
    command_line,
    in_turn,
    milliseconds,
    on_ranks,
    row,
    slowest,
)
from ncf import loader_of, network
from plain_ncf import SHAPES, PlainNCF, drawn, positives
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.adopt import adopt
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.models.tower_model import two_tower
from torchrec_ext.networks import Stack
from torchrec_ext.train.loop import TrainConfig, train

MEMBERS, SMALL = 8, SHAPES["small"]
RATES = [1e-3 * (1 + number) for number in range(MEMBERS)]
ADAM = OptimizerConfig(tables="adam", tables_lr=1e-3, dense="adam", dense_lr=1e-3)
NAMES = ("towers", "ncf")


def loss(network, user, item, context, label):
    """Of one network, as if it were alone."""
    return binary_cross_entropy_with_logits(network(user, item, context), label)


def networks():
    torch.manual_seed(0)
    return [PlainNCF(SMALL.users, SMALL.items) for _ in range(MEMBERS)]


def adopted_alone():
    steps = []
    for member, rate in zip(networks(), RATES, strict=True):
        optimizer = torch.optim.Adam(member.parameters(), rate)
        own = functools.partial(loss, member)
        steps.append(adopt(member, optimizer, own, compile="require"))
    return steps


def looped(steps, batches):
    def loop(stop):
        for batch in itertools.cycle(batches):
            for step in steps:
                step(*batch)
            if stop():
                return

    return loop


def stacked(options):
    draws = drawn(SMALL.items, positives(SMALL))
    batches = list(itertools.islice(draws, 8))
    several = adopted_alone()
    one = Stack(networks(), loss, RATES)
    start = time.perf_counter()
    one.step(*batches[0])
    first_s = time.perf_counter() - start
    sides = {"stack": looped([one.step], batches), "alone": looped(several, batches)}
    trainings = Trainings(sides)
    steps = 20 if options.quick else 150
    times = trainings.seconds_per_step(steps, options.turns, warm_up=10)
    trainings.close()
    more = {
        "capture_s": first_s,
        "capture_s_of_eight": sum(step.capture_s for step in several),
    }
    ours, baseline = (milliseconds(times[side]) for side in ("stack", "alone"))
    yield row("stacked", ours, "ms/step", baseline=baseline, **more)


def towers():
    sizes = {"user_id": SMALL.users, "item_id": SMALL.items + 1}
    tables = [
        EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=rows, embedding_dim=32
        )
        for name, rows in sizes.items()
    ]
    return two_tower(
        tables[:1],
        tables[1:],
        user_dense=[f"c{number}" for number in range(21)],
        tower_widths=(64, 32),
        top_widths=(32,),
        shared=("user",),
        device=torch.device("meta"),
    )


def training(runtime, model):
    """Returns the side that trains one network as `rec.train.hybrid` does."""
    batches = loader_of(SMALL, model)
    parallel, optimizer = hybrid_parallel(model, runtime, optimizer=ADAM)
    config = TrainConfig(epochs=1_000_000, compile="off")
    return lambda stop: train(parallel, optimizer, batches, runtime, config, stop=stop)


def together(runtime, own, counts, turns, barrier):
    """Seconds of this process: of each network while the other waits, and of both at the same time."""
    model = towers() if own == "towers" else network(SMALL)
    trainings = Trainings({own: training(runtime, model)})
    trainings.run(own, 20)
    steps = functools.partial(trainings.run, own, counts[own])
    sides = {name: steps if name == own else lambda: None for name in NAMES}
    meet = functools.partial(barrier.wait, LIMIT_S)
    times = in_turn({**sides, "at the same time": steps}, turns, before=meet)
    trainings.close()
    return times


def ran(counts, turns):
    """Runs both networks, each as a job of its own."""
    barrier = multiprocessing.get_context("spawn").Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(on_ranks, together, 1, own, counts, turns, barrier)
            for own in NAMES
        ]
        return slowest([job.result(LIMIT_S)[0] for job in jobs])


def two_networks(options):
    steps = 20 if options.quick else 150
    alone = ran(dict.fromkeys(NAMES, steps), 1)
    longest = max(max(alone[name]) for name in NAMES)
    # Both last as long.
    counts = {name: round(steps * longest / alone[name][0]) for name in NAMES}
    times = ran(counts, options.turns)
    pairs = zip(*(times[name] for name in NAMES), strict=True)
    sequence = [one + other for one, other in pairs]
    yield row("two-networks", times["at the same time"], "s", baseline=sequence)


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(__doc__, {"stacked": stacked, "two-networks": two_networks})
