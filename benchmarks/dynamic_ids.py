"""Ids without end: what looking them up, admitting them and training with them costs; one thread, sides in turn.

    python benchmarks/dynamic_ids.py [--only find admit step] [--turns 5] [--quick]

`find`: 16,384 ids, of which 95 % are live, among 1 M live ones, uniform; the baselines are numpy's searchsorted over
the sorted ids, which an insertion would have to write anew, and a dictionary. `admit`: batches of 16,384 new ids into a
table of 1 M rows. `step`: train() on 4,096 rows with 4 features of 200,000 rows x 64, of which 150,000 live and 1 % of
the look-ups new, admitted every 8 steps, against the same training with static tables of as many rows, whose batches
hold rows; Adagrad by row, eager and captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from harness import Options, Repeated, Row, Trainings, command_line, in_turn, rates, row
from small_model import one_rank
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.batch import Jagged
from torchrec_ext.capture.policy import Compile
from torchrec_ext.data.loader.dynamic_ids import DynamicIdLoader
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.ids import Dynamic, DynamicIds
from torchrec_ext.models.tower_model import two_tower
from torchrec_ext.train.loop import TrainConfig, train

BATCH, LOOKUPS, LIVE = 4_096, 16_384, 1_000_000
NAMES, WIDTH, ROWS, CATALOGUE, EVERY = ("user", "place", "item", "brand"), 64, 200_000, 150_000, 8


def random_ids(*shape: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, shape)


def find(options: Options) -> Iterator[Row]:
    live = 20_000 if options.quick else LIVE
    known = random_ids(live)
    ids = DynamicIds({"item": Dynamic(capacity=live + 1)})
    ids.step({"item": known})
    wanted = torch.where(torch.rand(LOOKUPS) < 0.95, known[torch.randint(live, (LOOKUPS,))], random_ids(LOOKUPS))
    in_order = known.sort().values.numpy()
    numbers = dict(zip(known.tolist(), range(live), strict=True))

    def searched() -> None:
        values = wanted.numpy()
        places = np.minimum(np.searchsorted(in_order, values), live - 1)
        np.where(in_order[places] == values, places, -1)

    sides: dict[str, Callable[[], object]] = {
        "numpy.searchsorted": searched,
        "a dictionary": lambda: [numbers.get(each, 0) for each in wanted.tolist()],
        "ours": lambda: ids.rows({"item": wanted}),
    }
    seconds = in_turn(sides, options.turns, 2 if options.quick else 20)
    ours = [1e9 * each / LOOKUPS for each in seconds.pop("ours")]
    for name, each in seconds.items():
        baseline = [1e9 * turn / LOOKUPS for turn in each]
        yield row(f"find, against {name}", ours, "ns/id", baseline=baseline)


def admit(options: Options) -> Iterator[Row]:
    live = 40_000 if options.quick else LIVE
    batches = torch.split(random_ids(live), LOOKUPS)

    def fill() -> None:
        ids = DynamicIds({"item": Dynamic(capacity=live + 1)})
        for batch in batches:
            ids.step({"item": batch})

    yield row("admit", rates(live, in_turn({"ours": fill}, options.turns)["ours"]), "ids/s", better="more")


def step(options: Options) -> Iterator[Row]:
    for name, compile_mode in (("eager", "off"), ("captured", "require")):
        with one_rank() as runtime:
            torch.manual_seed(0)
            names = random_ids(len(NAMES), CATALOGUE)
            raw = list(drawn(names, 4 if options.quick else 64))
            sides = {kind: training(runtime, kind, names, raw, compile_mode) for kind in ("static", "dynamic")}  # type: ignore[arg-type]
            trainings = Trainings(sides)
            seconds = trainings.seconds_per_step(8 if options.quick else 96, options.turns, warm_up=24)
            trainings.close()
        yield row(
            f"step, {name}, admitted every {EVERY}",
            [1e3 * each for each in seconds["dynamic"]],
            "ms",
            baseline=[1e3 * each for each in seconds["static"]],
            baseline_by="static tables",
        )


def drawn(names: Tensor, count: int) -> Iterator[Tensor]:
    """Yields (4, B) ids: few of the known ones are frequent, and 1 % are new."""
    for _ in range(count):
        places = torch.exp(torch.rand(len(NAMES), BATCH) * np.log(CATALOGUE)).long().clamp(max=CATALOGUE) - 1
        known = torch.gather(names, 1, places * 7_919 % CATALOGUE)
        yield torch.where(torch.rand(known.shape) < 0.01, random_ids(*known.shape), known)


def training(runtime: Any, kind: str, names: Tensor, raw: list[Tensor], compile_mode: Compile) -> Any:
    """Returns a side of :class:`Trainings`; ``kind`` is ``static`` or ``dynamic``."""

    def table(name: str) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=ROWS, embedding_dim=WIDTH)

    model = two_tower([table("user"), table("place")], [table("item"), table("brand")], device=torch.device("meta"))
    adagrad = OptimizerConfig(tables="row_wise_adagrad", tables_lr=0.05)
    plan = plan_sharding(model, runtime, PlanConfig(sharding="table_wise"), optimizer=adagrad)
    schema = model.schema().with_dynamic(NAMES)
    parallel, optimizer = hybrid_parallel(model, runtime, plan=plan, optimizer=adagrad)
    labels = (torch.rand(BATCH) < 0.3).float()
    batches = []
    for ids in raw:
        values = ids.abs() % ROWS if kind == "static" else ids
        columns = {name: Jagged(values[number].contiguous()) for number, name in enumerate(NAMES)}
        batches.append(schema.assemble(columns, labels=labels))
    loader: Any = Repeated(batches)
    if kind == "dynamic":
        policies = {name: Dynamic(capacity=ROWS, admit_after=2) for name in NAMES}
        loader = DynamicIdLoader(loader, schema, policies, every=EVERY)
        # The catalogue is live before the first step.
        for _ in range(2 * EVERY):
            loader.ids.step(dict(zip(NAMES, names, strict=True)))
    config = TrainConfig(epochs=1, compile=compile_mode)
    return lambda stop: train(parallel, optimizer, loader, runtime, config, stop=stop)


ROWS_OF = {"find": find, "admit": admit, "step": step}


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(__doc__, ROWS_OF, turns=5, packages="numpy")
