"""Row `small-tables` of hybrid.py, a study: up to which size tables are better on every rank than sharded.

Two towers of 3 equal tables, one id each per row, each tower 64-32, dot product, Adagrad; 512 rows on
each of two ranks, steps of `train()` in turn. The baseline has plan.sharding=table_wise, ours data_parallel; a row for
each size. `small_tables_whole` (torchrec_ext/distributed/plan/planner.py) takes its limit from here.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from harness import Options, Row, Trainings, on_ranks, row, slowest
from hybrid_training import training
from torchrec import EmbeddingBagConfig

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.schema import Jagged

TABLES, BATCH = 3, 512
SIZES = (
    (100, 8),
    (1_000, 8),
    (1_000, 64),
    (3_000, 64),
    (10_000, 16),
    (10_000, 64),
    (30_000, 64),
    (100_000, 8),
)
KINDS = ("table_wise", "data_parallel")
META = torch.device("meta")


def model(rows: int, dim: int) -> TowerModel:
    def tables(tower: str) -> list[EmbeddingBagConfig]:
        names = [f"{tower}_{number}" for number in range(TABLES)]
        return [
            EmbeddingBagConfig(
                name=name, feature_names=[name], num_embeddings=rows, embedding_dim=dim
            )
            for name in names
        ]

    return two_tower(
        tables("user"),
        tables("item"),
        tower_widths=(64, 32),
        interaction="dot",
        device=META,
    )


def batches(rows: int, dim: int, seed: int) -> list[TowerBatch]:
    """Four batches."""
    schema, generator = model(rows, dim).schema(), torch.Generator().manual_seed(seed)
    made = []
    for _ in range(4):
        ids = {
            name: Jagged(torch.randint(rows, (BATCH,), generator=generator))
            for name in schema.keys
        }
        made.append(
            schema.assemble(
                ids, labels=torch.randint(2, (BATCH,), generator=generator).float()
            )
        )
    return made


def measured(
    runtime: Runtime, options: Options, sizes: tuple[tuple[int, int], ...]
) -> list[dict[str, list[float]]]:
    optimizer = OptimizerConfig(tables="adagrad", dense="adam")
    results = []
    for rows, dim in sizes:
        own = batches(rows, dim, runtime.rank)
        sides = {
            kind: training(
                model(rows, dim), runtime, own, PlanConfig(sharding=kind), optimizer
            )
            for kind in KINDS
        }
        trainings = Trainings(sides, before=dist.barrier)
        results.append(
            trainings.seconds_per_step(
                4 if options.quick else 30, options.turns, warm_up=8
            )
        )
        trainings.close()
    return results


def rows(options: Options) -> Iterator[Row]:
    """Milliseconds of a step of the slower rank."""
    sizes = SIZES[:2] if options.quick else SIZES
    ranks = on_ranks(measured, 2, options, sizes)
    for index, (height, dim) in enumerate(sizes):
        seconds = slowest([rank[index] for rank in ranks])
        sharded, whole = ([1e3 * turn for turn in seconds[kind]] for kind in KINDS)
        weights = 2 * TABLES * height * dim
        yield row(
            f"small-tables, {height:,} x {dim}",
            whole,
            "ms a step",
            baseline=sharded,
            weights=weights,
        )
