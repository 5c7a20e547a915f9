"""Rows `collectives` and `merged` of hybrid.py: the tables of two towers looked up together, against tower by tower.

Two towers of 4 tables x 32 columns, one id each per row, 512 rows on each of two ranks, table_wise, Adagrad; each tower
one layer of 32, dot product, so that a step is mostly look-ups and their exchange. Sides in turn in one pair of
processes:

    apart     each tower looks up its own tables
    merged    the same model after TowerModel.merge_lookups()

`merged` is a step of hybrid_parallel's model as a loop of one's own runs it; `merged, pipelined` the same under
TorchRec's TrainPipelineSparseDist, which already sends the sizes of all collections as one. `collectives` counts the
all-to-alls of a step.
"""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from hybrid_ranks import Options, Row, in_turn, on_ranks, row
from torchrec import EmbeddingBagConfig

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.schema import Jagged
from torchrec_ext.train.step.pipeline import make_pipeline

TABLES, ROWS, COLUMNS, BATCH = 4, 10_000, 32, 512
OPTIMIZER = OptimizerConfig(tables="adagrad", dense="adam")


def model() -> TowerModel:
    def tables(tower: str) -> list[EmbeddingBagConfig]:
        names = [f"{tower}_{at}" for at in range(TABLES)]
        return [
            EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=ROWS, embedding_dim=COLUMNS)
            for name in names
        ]

    return two_tower(tables("user"), tables("item"), tower_widths=(32,), interaction="dot", device=torch.device("meta"))


def batches(size: int, seed: int) -> Iterator[TowerBatch]:
    """Eight batches again and again."""
    schema = model().schema()
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(8):
        ids = {name: Jagged(torch.randint(ROWS, (size,), generator=generator)) for name in schema.keys}
        found.append(schema.assemble(ids, labels=torch.randint(2, (size,), generator=generator).float()))
    return cycle(found)


def side(runtime: Runtime, size: int, *, merged: bool, pipelined: bool) -> Callable[[], None]:
    made = model().merge_lookups() if merged else model()
    plan = plan_sharding(made, runtime, PlanConfig(sharding="table_wise"), optimizer=OPTIMIZER)
    parallel, optimizer = hybrid_parallel(made, runtime, plan=plan, optimizer=OPTIMIZER)
    feed = batches(size, runtime.rank)
    if pipelined:
        pipeline = make_pipeline(parallel, optimizer, runtime.device)
        return lambda: pipeline.progress(feed)

    def step() -> None:
        optimizer.zero_grad()
        parallel(next(feed))[0].backward()
        optimizer.step()

    return step


def collectives(step: Callable[[], None]) -> int:
    """The all-to-alls that one step starts on this rank; TorchRec starts all of them by this function."""
    calls, real = 0, dist.all_to_all_single

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args, **options)

    dist.all_to_all_single = counted
    step()
    dist.all_to_all_single = real
    return calls


def measured(runtime: Runtime, options: Options) -> tuple[dict[str, float], dict[str, int]]:
    size = 64 if options.quick else BATCH
    sides = {
        f"{name}{how}": side(runtime, size, merged=name == "merged", pipelined=bool(how))
        for how in ("", ", pipelined")
        for name in ("apart", "merged")
    }
    times = in_turn(sides, options.repeats, inner=2 if options.quick else 20)
    return times, {name: collectives(step) for name, step in sides.items()}


def rows(options: Options) -> Iterator[Row]:
    """All-to-alls of a step, and milliseconds of the slower rank."""
    ranks = on_ranks(measured, 2, options)
    calls = ranks[0][1]
    seconds = {name: max(times[name] for times, _ in ranks) for name in ranks[0][0]}
    for how, required in (("", 2.0), (", pipelined", None)):
        apart, merged = calls[f"apart{how}"], calls[f"merged{how}"]
        yield row(f"collectives{how}", apart, merged, "all-to-alls a step", apart / merged, required)
    for how, required in (("", 1.4), (", pipelined", None)):
        apart, merged = seconds[f"apart{how}"], seconds[f"merged{how}"]
        yield row(f"merged{how}", 1e3 * apart, 1e3 * merged, "ms a step", apart / merged, required)
