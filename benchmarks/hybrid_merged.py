"""Rows `collectives` and `merged` of hybrid.py: the tables of two towers looked up together, against tower by tower.

Two towers of 4 tables x 32 columns, one id each per row, 512 rows on each of two ranks, table_wise, Adagrad; each tower
one layer of 32, dot product, so that a step is mostly look-ups and their exchange. Sides in turn in one pair of
processes:

    apart     each tower looks up its own tables
    merged    the same model after TowerModel.merge_lookups()

`merged, pipelined` is a step of `train()`, which every command runs: with its loss check and
TorchRec's TrainPipelineSparseDist, which already sends the sizes of all collections as one. `merged` is a step of
hybrid_parallel's model in a plain loop of one's own, without pipeline or checks. `collectives` counts the all-to-alls
that a step of each starts, and as `all_reduces` those that Python code starts besides DistributedDataParallel's.
"""

import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from harness import Options, Row, Trainings, on_ranks, row, slowest
from hybrid_training import Side, Stop, looping, training
from torchrec import EmbeddingBagConfig

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.schema import Jagged

TABLES, ROWS, COLUMNS, BATCH = 4, 10_000, 32, 512
OPTIMIZER = OptimizerConfig(tables="adagrad", dense="adam")


def model() -> TowerModel:
    def tables(tower: str) -> list[EmbeddingBagConfig]:
        names = [f"{tower}_{at}" for at in range(TABLES)]
        return [
            EmbeddingBagConfig(
                name=name,
                feature_names=[name],
                num_embeddings=ROWS,
                embedding_dim=COLUMNS,
            )
            for name in names
        ]

    return two_tower(
        tables("user"),
        tables("item"),
        tower_widths=(32,),
        interaction="dot",
        device=torch.device("meta"),
    )


def batches(size: int, seed: int) -> list[TowerBatch]:
    """Eight batches of ``size`` rows."""
    schema = model().schema()
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(8):
        ids = {
            name: Jagged(torch.randint(ROWS, (size,), generator=generator))
            for name in schema.keys
        }
        made.append(
            schema.assemble(
                ids, labels=torch.randint(2, (size,), generator=generator).float()
            )
        )
    return made


def side(runtime: Runtime, size: int, *, merged: bool, pipelined: bool) -> Side:
    made = model().merge_lookups() if merged else model()
    own, config = batches(size, runtime.rank), PlanConfig(sharding="table_wise")
    if pipelined:
        return training(made, runtime, own, config, OPTIMIZER)
    plan = plan_sharding(made, runtime, config, optimizer=OPTIMIZER)
    parallel, optimizer = hybrid_parallel(made, runtime, plan=plan, optimizer=OPTIMIZER)
    feed = cycle(own)

    def step() -> None:
        optimizer.zero_grad()
        parallel(next(feed))[0].backward()
        optimizer.step()

    return looping(step)


class Collectives:
    """Counts the collectives that each thread starts, so those of each training; TorchRec starts them by these names.

    Attributes:
        by_step: for each side, what one step has started, by function; filled while it runs.
    """

    NAMES = ("all_to_all_single", "all_reduce")

    def __init__(self) -> None:
        self._calls: Counter[tuple[int, str]] = Counter()
        self.by_step: dict[str, list[dict[str, int]]] = {}
        for name in self.NAMES:
            setattr(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self._calls[threading.get_ident(), name] += 1
            return real(*args, **options)

        return counted

    def watching(self, name: str, side: Side) -> Side:
        """Returns ``side``, whose steps are counted under ``name``."""
        steps = self.by_step[name] = []

        def watched(stop: Stop) -> object:
            before: dict[str, int] = {}

            def after_step() -> bool:
                calls = {
                    name: self._calls[threading.get_ident(), name]
                    for name in self.NAMES
                }
                steps.append(
                    {name: count - before.get(name, 0) for name, count in calls.items()}
                )
                before.update(calls)
                return stop()

            return side(after_step)

        return watched

    def of_a_step(self, name: str, function: str) -> float:
        """Returns how often a step of a side starts a collective; the first steps fill the pipeline."""
        return statistics.median(step[function] for step in self.by_step[name])


def measured(
    runtime: Runtime, options: Options
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    size = 64 if options.quick else BATCH
    counts = Collectives()
    sides = {
        f"{name}{how}": side(
            runtime, size, merged=name == "merged", pipelined=bool(how)
        )
        for how in ("", ", pipelined")
        for name in ("apart", "merged")
    }
    sides = {name: counts.watching(name, made) for name, made in sides.items()}
    trainings = Trainings(sides, before=dist.barrier)
    times = trainings.seconds_per_step(
        5 if options.quick else 100, options.turns, warm_up=10
    )
    trainings.close()
    return times, {
        name: {kind: counts.of_a_step(name, kind) for kind in counts.NAMES}
        for name in sides
    }


def rows(options: Options) -> Iterator[Row]:
    """All-to-alls of a step, and milliseconds of the slower rank."""
    ranks = on_ranks(measured, 2, options)
    seconds, calls = slowest([times for times, _ in ranks]), ranks[0][1]
    for how, required in (("", 2.0), (", pipelined", None)):
        apart, merged = calls[f"apart{how}"], calls[f"merged{how}"]
        reduced = {
            name: counts["all_reduce"]
            for name, counts in (("apart", apart), ("merged", merged))
        }
        yield row(
            f"collectives{how}",
            merged["all_to_all_single"],
            "all-to-alls a step",
            baseline=apart["all_to_all_single"],
            required=required,
            all_reduces=reduced,
        )
    for how, required in (("", None), (", pipelined", 1.4)):
        apart_ms, merged_ms = (
            [1e3 * turn for turn in seconds[f"{name}{how}"]]
            for name in ("apart", "merged")
        )
        yield row(
            f"merged{how}", merged_ms, "ms a step", baseline=apart_ms, required=required
        )
