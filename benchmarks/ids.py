"""Ids without end: what admitting them and training with them costs; one thread, sides in turn.

    python benchmarks/ids.py [--only admit step] [--turns 5] [--quick]

`admit`: batches of 16,384 new ids into a table of 1 M rows. `step`: train() on 4,096 rows with 4 features of 200,000
rows x 64, of which 150,000 live and 1 % of the look-ups new, admitted every 8 steps when they come for the second time,
against the same training with static tables of as many rows, whose batches hold rows; Adagrad by row. Once eager with
eager look-ups, once eager with compiled ones, and once captured.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from harness import (
    Repeated,
    Trainings,
    command_line,
    in_turn,
    milliseconds,
    one_rank,
    rates,
    row,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.batch import Jagged
from torchrec_ext.data.loader.dynamic_ids import DynamicIdLoader
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.ids import Dynamic, DynamicIds
from torchrec_ext.models.tower_model import two_tower
from torchrec_ext.train.loop import TrainConfig, train

BATCH, LOOKUPS, LIVE = 4_096, 16_384, 1_000_000
NAMES = ("user", "place", "item", "brand")
WIDTH, ROWS, CATALOGUE, EVERY = 64, 200_000, 150_000, 8


def random_ids(*shape):
    return torch.randint(-(2**62), 2**62, shape)


def admit(options):
    live = 40_000 if options.quick else LIVE
    batches = torch.split(random_ids(live), LOOKUPS)

    def fill():
        ids = DynamicIds({"item": Dynamic(capacity=live + 1)})
        for batch in batches:
            ids.step({"item": batch})

    yield row(
        "admit",
        rates(live, in_turn({"ours": fill}, options.turns)["ours"]),
        "ids/s",
        better="more",
    )


def step(options):
    for name, mode in (("eager", "off"), ("captured", "require")):
        with one_rank() as runtime:
            torch.manual_seed(0)
            names = random_ids(len(NAMES), CATALOGUE)
            raw = list(drawn(names, 4 if options.quick else 64))
            config = TrainConfig(epochs=1, compile=mode)
            sides = {
                "static": training(runtime, static(raw), config),
                "dynamic": training(runtime, dynamic(names, raw), config),
            }
            trainings = Trainings(sides)
            steps = 8 if options.quick else 96
            seconds = trainings.seconds_per_step(steps, options.turns, warm_up=24)
            trainings.close()
        ours, baseline = (milliseconds(seconds[side]) for side in ("dynamic", "static"))
        name = f"step, {name}, admitted every {EVERY}"
        yield row(name, ours, "ms", baseline=baseline)


def drawn(names, count):
    """Yields (4, B) ids, of which few known ones are frequent, and 1 % are new; and a mask of these."""
    for _ in range(count):
        places = (
            torch.exp(torch.rand(len(NAMES), BATCH) * np.log(CATALOGUE))
            .long()
            .clamp(max=CATALOGUE)
            - 1
        )
        known = torch.gather(names, 1, places * 7_919 % CATALOGUE)
        is_new = torch.rand(known.shape) < 0.01
        yield torch.where(is_new, random_ids(*known.shape), known), is_new


class Batches(Repeated):
    """Batches of the same columns again and again; new ids come in two passes, and are others in the next two."""

    def __init__(
        self,
        schema,
        raw,
        *,
        changes,
    ):
        super().__init__(raw)
        self._schema, self.hook = schema.with_hook()
        self._changes = changes
        self._labels = (torch.rand(BATCH) < 0.3).float()

    def __iter__(self):
        for number in itertools.count():
            for ids, is_new in self._batches:
                if self._changes:
                    ids += is_new * (number % 2)
                columns = {
                    name: Jagged(row) for name, row in zip(NAMES, ids, strict=True)
                }
                yield self._schema.assemble(columns, labels=self._labels)


def static(raw):
    """Returns what makes the loader of batches that hold rows."""
    rows = [(ids.abs() % ROWS, is_new) for ids, is_new in raw]
    return lambda schema: Batches(schema, rows, changes=False)


def dynamic(names, raw):
    """Returns what makes the loader of raw ids."""

    def made(schema):
        policies = {name: Dynamic(capacity=ROWS, admit_after=2) for name in NAMES}
        batches = Batches(
            schema, [(ids.clone(), new) for ids, new in raw], changes=True
        )
        loader = DynamicIdLoader(batches, schema, policies, every=EVERY)
        # The catalogue is live before the first step.
        for _ in range(2 * EVERY):
            loader.ids.step(dict(zip(NAMES, names, strict=True)))
        return loader

    return made


def training(runtime, loader_of, config):
    """Returns a side of :class:`Trainings`."""
    tables = [
        EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=ROWS, embedding_dim=WIDTH
        )
        for name in NAMES
    ]
    model = two_tower(tables[:2], tables[2:], device=torch.device("meta"))
    adagrad = OptimizerConfig(tables="row_wise_adagrad", tables_lr=0.05)
    table_wise = PlanConfig(sharding="table_wise")
    plan = plan_sharding(model, runtime, table_wise, optimizer=adagrad)
    loader = loader_of(model.schema().with_dynamic(NAMES))
    parallel, optimizer = hybrid_parallel(model, runtime, plan=plan, optimizer=adagrad)
    return lambda stop: train(parallel, optimizer, loader, runtime, config, stop=stop)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = {"admit": admit, "step": step}
    command_line(__doc__, rows, turns=5, packages="numpy")
