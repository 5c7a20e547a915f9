"""Row `chooser` of hybrid.py: what plan.towers=auto chooses.

`chooser`: ten generated shapes of two towers on two ranks. For each the chooser tries and decides, as a command does
before its training; then every candidate trains by `train()` with the whole model, all in turn. `ours` of the first row
counts the shapes where the taken one was the fastest, or slower by less than 5 %, by which two equal candidates differ
from run to run; `strict` those where it was the fastest by any difference. The second row is the greatest difference of
a taken candidate's tried step from the measured one, as a share of the measured one.
"""

import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import Options, Row, Trainings, on_ranks, row, slowest
from hybrid_training import Side, training
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.autotune.choose import Candidate, as_config, auto_plan
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.schema import Jagged
from torchrec_ext.train.loop import checked_steps

SHAPES, CLOSE = 10, 1.05
IN_A_ROW_MS = 200.0  # of one candidate before it is the next one's turn
AUTO = PlanConfig(towers="auto")
OPTIMIZER = OptimizerConfig(tables="row_wise_adagrad", dense="adam")


class Table(NamedTuple):
    """A table, and the ids of a row on average."""

    rows: int
    dim: int
    ids: int


class Shape(NamedTuple):
    """Two towers; ``batch`` rows over all ranks, and so many rows of the item for each of the user."""

    batch: int
    user: list[Table]
    item: list[Table]
    widths: tuple[int, ...]
    repeats: int


def shapes(count: int, quick: bool) -> list[Shape]:
    """The same ones in every run."""
    draw = random.Random(0)
    made = []
    for place in range(count):
        widths = draw.choice([(64,), (256, 64), (512, 256, 64), (1024, 512, 32)])
        rows = [1_000] if quick else [1_000, 20_000, 200_000]
        user, item = (
            [
                Table(
                    draw.choice(rows),
                    draw.choice([16, 32, 64]),
                    draw.choice([1, 1, 1, 10, 20]),
                )
                for _ in range(draw.randint(1, 6))
            ]
            for _ in range(2)
        )
        made.append(
            Shape(
                256 if quick else draw.choice([1024, 2048, 4096]),
                user,
                item,
                widths,
                4 if place % 4 == 3 else 1,
            )
        )
    return made


def model(shape: Shape) -> TowerModel:
    def tables(side: str, sizes: list[Table]) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(
                name=f"{side}{place}",
                feature_names=[f"{side}{place}"],
                num_embeddings=size.rows,
                embedding_dim=size.dim,
                pooling=PoolingType.MEAN,
            )
            for place, size in enumerate(sizes)
        ]

    return two_tower(
        tables("user", shape.user),
        tables("item", shape.item),
        tower_widths=shape.widths,
        shared=("user",) if shape.repeats > 1 else (),
        device=torch.device("meta"),
    )


def batches(
    shape: Shape, made: TowerModel, runtime: Runtime, count: int = 4
) -> list[TowerBatch]:
    """Some of this rank's batches; ids as popular as they are in logs."""
    generator = torch.Generator().manual_seed(runtime.rank)
    rows, schema = shape.batch // runtime.world_size, made.schema()
    sides = [("user", shape.user, rows // shape.repeats), ("item", shape.item, rows)]

    def bags(size: Table, height: int) -> Jagged:
        lengths = torch.full((height,), size.ids)
        if size.ids > 1:
            lengths = torch.randint(0, 2 * size.ids + 1, (height,), generator=generator)
        ids = torch.rand(int(lengths.sum()), generator=generator) ** 3 * size.rows
        return Jagged(ids.long(), lengths)

    return [
        schema.assemble(
            {
                f"{side}{place}": bags(size, height)
                for side, sizes, height in sides
                for place, size in enumerate(sizes)
            },
            labels=torch.rand(rows, generator=generator).round(),
            index=shape.repeats if shape.repeats > 1 else None,
            shared_rows=torch.arange(rows // shape.repeats)
            if shape.repeats > 1
            else None,
        )
        for _ in range(count)
    ]


def side(shape: Shape, runtime: Runtime, own: list[TowerBatch], one: Candidate) -> Side:
    return training(model(shape), runtime, own, as_config(AUTO, one), OPTIMIZER)


def decided(runtime: Runtime, options: Options, count: int) -> list[dict[str, Any]]:
    """Returns for each shape the candidates, the decision's seconds, and each candidate's seconds of a step by turn."""
    made = []
    for shape in shapes(count, options.quick):
        start = time.perf_counter()
        unsharded = model(shape)
        own = batches(shape, unsharded, runtime)
        _, decision = auto_plan(
            unsharded,
            own[0],
            runtime,
            AUTO,
            OPTIMIZER,
            more=own[1:],
            steps=checked_steps,
        )
        took = time.perf_counter() - start
        possible = [one for one in decision.candidates if not one.refused]
        names = [f"{one.towers} {one.sharding}" for one in possible]
        sides = {
            name: side(shape, runtime, own, one)
            for name, one in zip(names, possible, strict=True)
        }
        trainings = Trainings(sides, before=dist.barrier)
        steps = min(max(int(IN_A_ROW_MS / decision.taken.trial_ms), 2), 20)
        times = trainings.seconds_per_step(steps, options.turns, warm_up=2)
        trainings.close()
        foreseen = {
            name: one.trial_ms for name, one in zip(names, possible, strict=True)
        }
        made.append({"took": took, "foreseen": foreseen, "seconds": times})
    return made


def chooser(options: Options) -> Iterator[Row]:
    """Which candidate is taken, and how near its tried step is to the measured one."""
    count = 3 if options.quick else SHAPES
    ranks = on_ranks(decided, 2, options, count)
    best, strict, errors = 0, 0, []
    for index in range(count):
        one = ranks[0][index]
        turns = slowest([rank[index]["seconds"] for rank in ranks])
        ms = {name: 1e3 * statistics.median(seconds) for name, seconds in turns.items()}
        taken, fastest = next(iter(ms)), min(ms, key=lambda name: ms[name])
        strict += taken == fastest
        best += ms[taken] <= CLOSE * ms[fastest]
        errors.append(abs(one["foreseen"][taken] / ms[taken] - 1))
        steps = ", ".join(
            f"{name} tried {one['foreseen'][name]:.1f} measured {ms[name]:.1f}"
            for name in ms
        )
        print(
            f"shape {index}, decided in {one['took']:.1f} s: {steps}; fastest {fastest}",
            file=sys.stderr,
        )
    yield row(
        "chooser",
        best,
        "shapes",
        better="more",
        required=0.9 * count,
        of=count,
        strict=strict,
    )
    yield row(
        "chooser, foreseen step",
        max(errors),
        "share of the measured step",
        required=0.25,
        median=round(statistics.median(errors), 3),
        within=sum(error <= 0.25 for error in errors),
        seconds=round(statistics.median(one["took"] for one in ranks[0]), 1),
    )
