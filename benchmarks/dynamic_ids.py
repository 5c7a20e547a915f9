"""Ids without end: what looking them up, admitting them and training with them costs; one thread, sides in turn.

    python benchmarks/dynamic_ids.py [--only find admit step drift fresh] [--turns 5] [--quick]

`find`: 16,384 ids, of which 95 % are live, among 1 M live ones, uniform; the baselines are numpy's
searchsorted over the sorted ids, which an insertion would have to write anew, and a dictionary.
`admit`: batches of 16,384 new ids into a table of 1 M rows. `step`: train() on 4,096 rows with 4 features of 200,000
rows x 64, of which 150,000 live and 1 % of the look-ups new, admitted every 8 steps when they come for the second time,
against the same training with static tables of as many rows, whose batches hold rows; Adagrad by row. Once eager
and once captured.
`drift`: log loss, test-then-train over the last three quarters of 2 M events on items that appear and fade, with rows
for a tenth of those that come; one seed a turn. Beside it: a row for every item, the hash trick, and a
vocabulary of the first tenth of the events with one row for all others. `tfra`, only where named: vectors of 16,384 ids
out of 1 M x 64, and 16,384 new ids with their vectors, by TensorFlow Recommenders Addons in the Python that TFRA_PYTHON
names, and by ours with an nn.Embedding; 1 thread each. Its 0.8.1 needs `pip install tensorflow-cpu==2.16.2 "numpy<2"
tf-keras==2.16.0 typeguard` and then itself with --no-deps. `fresh`, only where named: from an
event to the first answer that knows it, see fresh.py.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from fresh import fresh
from harness import Options, Repeated, Row, Trainings, command_line, in_turn, rates, row
from small_model import one_rank
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.batch import Jagged
from torchrec_ext.capture.policy import Compile
from torchrec_ext.data.loader.dynamic_ids import DynamicIdLoader
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.ids import Dynamic, DynamicIds
from torchrec_ext.ids.index import mixed
from torchrec_ext.models.tower_model import two_tower
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train.loop import TrainConfig, train

BATCH, LOOKUPS, LIVE = 4_096, 16_384, 1_000_000
NAMES = ("user", "place", "item", "brand")
WIDTH = 64
ROWS = 200_000
CATALOGUE = 150_000
EVERY = 8


def random_ids(*shape: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, shape)


def find(options: Options) -> Iterator[Row]:
    live = 20_000 if options.quick else LIVE
    known = random_ids(live)
    ids = DynamicIds({"item": Dynamic(capacity=live + 1)})
    ids.step({"item": known})
    wanted = torch.where(
        torch.rand(LOOKUPS) < 0.95,
        known[torch.randint(live, (LOOKUPS,))],
        random_ids(LOOKUPS),
    )
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

    yield row(
        "admit",
        rates(live, in_turn({"ours": fill}, options.turns)["ours"]),
        "ids/s",
        better="more",
    )


def step(options: Options) -> Iterator[Row]:
    for name, compile_mode in (("eager", "off"), ("captured", "require")):
        with one_rank() as runtime:
            torch.manual_seed(0)
            names = random_ids(len(NAMES), CATALOGUE)
            raw = list(drawn(names, 4 if options.quick else 64))
            sides = {
                kind: training(runtime, kind, names, raw, compile_mode)  # type: ignore[arg-type]
                for kind in ("static", "dynamic")
            }
            trainings = Trainings(sides)
            seconds = trainings.seconds_per_step(
                8 if options.quick else 96, options.turns, warm_up=24
            )
            trainings.close()
        yield row(
            f"step, {name}, admitted every {EVERY}",
            [1e3 * each for each in seconds["dynamic"]],
            "ms",
            baseline=[1e3 * each for each in seconds["static"]],
            baseline_by="static tables",
        )


def drawn(names: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
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
        schema: BatchSchema,
        raw: Sequence[tuple[Tensor, Tensor]],
        *,
        changes: bool,
    ) -> None:
        super().__init__(raw)
        self._schema, self.hook = schema.with_hook()
        self._changes = changes
        self._labels = (torch.rand(BATCH) < 0.3).float()

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count():
            for ids, is_new in self._batches:
                if self._changes:
                    ids += is_new * (number % 2)
                columns = {
                    name: Jagged(row) for name, row in zip(NAMES, ids, strict=True)
                }
                yield self._schema.assemble(columns, labels=self._labels)


def training(
    runtime: Any,
    kind: str,
    names: Tensor,
    raw: list[tuple[Tensor, Tensor]],
    compile_mode: Compile,
) -> Any:
    """Returns a side of :class:`Trainings`; ``kind`` is ``static`` or ``dynamic``."""

    def table(name: str) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=ROWS, embedding_dim=WIDTH
        )

    model = two_tower(
        [table("user"), table("place")],
        [table("item"), table("brand")],
        device=torch.device("meta"),
    )
    adagrad = OptimizerConfig(tables="row_wise_adagrad", tables_lr=0.05)
    plan = plan_sharding(
        model, runtime, PlanConfig(sharding="table_wise"), optimizer=adagrad
    )
    schema = model.schema().with_dynamic(NAMES)
    parallel, optimizer = hybrid_parallel(model, runtime, plan=plan, optimizer=adagrad)
    if kind == "static":
        static = [(ids.abs() % ROWS, is_new) for ids, is_new in raw]
        loader: Any = Batches(schema, static, changes=False)
    else:
        policies = {name: Dynamic(capacity=ROWS, admit_after=2) for name in NAMES}
        own = [(ids.clone(), is_new) for ids, is_new in raw]
        loader = DynamicIdLoader(
            Batches(schema, own, changes=True), schema, policies, every=EVERY
        )
        # The catalogue is live before the first step.
        for _ in range(2 * EVERY):
            loader.ids.step(dict(zip(NAMES, names, strict=True)))
    config = TrainConfig(epochs=1, compile=compile_mode)
    return lambda stop: train(parallel, optimizer, loader, runtime, config, stop=stop)


SEGMENTS, CATEGORIES, FACTORS, ITEMS, AT_FIRST = 64, 50, 16, 100_000, 20_000


class Stream:
    """Events of a planted model: (item, segment, label) of a step; items appear over the whole stream, and fade."""

    def __init__(self, seed: int, steps: int, size: int) -> None:
        self.steps = steps
        self._size = size
        self._random = np.random.default_rng(seed)
        self._draw = torch.Generator().manual_seed(seed)
        born = self._random.random(ITEMS - AT_FIRST) * steps
        self._born = np.sort(np.concatenate([np.zeros(AT_FIRST), born]))
        self._life = self._random.exponential(
            steps * AT_FIRST / (ITEMS - AT_FIRST), ITEMS
        )
        self._popular = self._random.pareto(1.1, ITEMS) + 0.1
        self.category = torch.from_numpy(self._random.integers(0, CATEGORIES, ITEMS))
        self.ids = torch.from_numpy(self._random.integers(-(2**62), 2**62, ITEMS))
        of_category = torch.randn(CATEGORIES, FACTORS, generator=self._draw) * 0.4
        self._vectors = (
            torch.randn(ITEMS, FACTORS, generator=self._draw) * 0.45
            + of_category[self.category]
        )
        self._bias = torch.randn(ITEMS, generator=self._draw) * 0.6 - 1.2
        self._segments = torch.randn(SEGMENTS, FACTORS, generator=self._draw) * 0.6

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for number in range(self.steps):
            if number % 20 == 0:
                age = number - self._born
                weights = np.where(
                    age >= 0,
                    self._popular * np.exp(-np.maximum(age, 0) / self._life),
                    0,
                )
                shares = np.cumsum(weights) / weights.sum()
            places = np.searchsorted(shares, self._random.random(self._size))
            item = torch.from_numpy(np.minimum(places, ITEMS - 1))
            segment = torch.randint(SEGMENTS, (self._size,), generator=self._draw)
            score = self._bias[item] + (
                self._vectors[item] * self._segments[segment]
            ).sum(1)
            yield (
                item,
                segment,
                (
                    torch.rand(self._size, generator=self._draw) < torch.sigmoid(score)
                ).float(),
            )


class Factorization:
    """A vector and a bias for each item's row and category, and a vector for each segment; Adagrad by row."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tables = [
            torch.zeros(rows, FACTORS + 1),
            torch.zeros(CATEGORIES, FACTORS + 1),
        ]
        self.tables.append(
            torch.randn(SEGMENTS, FACTORS + 1, generator=generator) * 0.3
        )
        self.sums = [torch.zeros(len(table)) for table in self.tables]

    def losses(self, *ids: Tensor, label: Tensor) -> Tensor:
        """Log loss of each event, before the step on them."""
        rows, categories, segments = (
            table[each] for table, each in zip(self.tables, ids, strict=True)
        )
        vector = rows + categories
        segments[:, FACTORS] = 1.0
        score = (vector * segments).sum(1) - 1.2
        pull = (torch.sigmoid(score) - label)[:, None]
        gradients = (pull * segments, pull * segments, pull * vector)
        for table, sums, each, gradient in zip(
            self.tables, self.sums, ids, gradients, strict=True
        ):
            read, place = torch.unique(each, return_inverse=True)
            summed = torch.zeros(len(read), FACTORS + 1).index_add_(0, place, gradient)
            sums[read] += summed.square().mean(1)
            table[read] -= 0.15 * summed / (sums[read].sqrt() + 1e-6)[:, None]
        return nn.functional.binary_cross_entropy_with_logits(
            score, label, reduction="none"
        )


def drift(options: Options) -> Iterator[Row]:
    steps = 100 if options.quick else 1_953
    means: dict[str, list[float]] = {}
    for seed in range(options.turns):
        stream = Stream(seed, steps, 1_024)
        distinct = len(torch.unique(torch.cat([item for item, _, _ in stream])))
        for name, value in log_losses(
            Stream(seed, steps, 1_024), distinct // 10
        ).items():
            means.setdefault(name, []).append(value)
    ours = means.pop("dynamic")
    for name, values in means.items():
        gain = float(np.median(np.subtract(values, ours)))
        yield row(
            f"drift, rows for 10 %, against {name}",
            ours,
            "log loss",
            baseline=values,
            gain=round(gain, 5),
        )


def log_losses(stream: Stream, capacity: int) -> dict[str, float]:
    """Mean log loss of the last three quarters by what gives items their rows."""
    ids = DynamicIds({"item": Dynamic(capacity=capacity)})
    vocabulary = torch.zeros(ITEMS, dtype=torch.int64)
    rows = {
        "a row for every item": ITEMS,
        "the hash trick": capacity,
        "one unknown row": ITEMS,
        "dynamic": capacity,
    }
    models = {name: Factorization(count) for name, count in rows.items()}
    sums = dict.fromkeys(models, 0.0)
    for number, (item, segment, label) in enumerate(stream):
        if number < stream.steps // 10:
            vocabulary[item] = item
        given, notes = ids.step({"item": stream.ids[item]})
        for note in notes:
            models["dynamic"].tables[0][note.rows] = 0.0
            models["dynamic"].sums[0][note.rows] = 0.0
        hashed = mixed(stream.ids[item]).abs() % capacity
        rows_of = dict(
            zip(models, (item, hashed, vocabulary[item], given["item"]), strict=True)
        )
        for name, model in models.items():
            losses = model.losses(
                rows_of[name], stream.category[item], segment, label=label
            )
            if number >= stream.steps // 4:
                sums[name] += float(losses.mean())
    return {
        name: total / (stream.steps - stream.steps // 4) for name, total in sums.items()
    }


TFRA = """
import sys, time
import numpy as np
import tensorflow as tf
import tensorflow_recommenders_addons as tfra
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
live, size, width = map(int, sys.argv[1:])
random = np.random.default_rng(0)
ids = random.integers(-2**62, 2**62, live)
table = tfra.dynamic_embedding.get_variable("table", tf.int64, tf.float32, dim=width, init_size=2 * live)
vectors = tf.zeros((size, width))
for start in range(0, live - size + 1, size):
    table.upsert(tf.constant(ids[start : start + size]), vectors)
print("ready", flush=True)
for what in sys.stdin:
    known = what.strip() == "look-ups"
    keys = random.choice(ids, size) if known else random.integers(-2**62, 2**62, size)
    keys = tf.constant(keys)
    start = time.perf_counter()
    table.lookup(keys).numpy() if known else table.upsert(keys, vectors)
    print(time.perf_counter() - start, flush=True)
"""


def tfra(options: Options) -> Iterator[Row]:
    live = 40_000 if options.quick else LIVE
    known = random_ids(live)
    ids = DynamicIds({"item": Dynamic(capacity=2 * live)})
    table = nn.Embedding(2 * live, WIDTH)
    for piece in torch.split(known, LOOKUPS):
        ids.step({"item": piece})
    command = [
        os.environ["TFRA_PYTHON"],
        "-c",
        TFRA,
        str(live),
        str(LOOKUPS),
        str(WIDTH),
    ]
    settings = os.environ | {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=settings
    ) as process:
        assert process.stdin
        assert process.stdout
        for line in process.stdout:  # which TFRA writes to as well
            if line == "ready\n":
                break
        for what in ("look-ups", "admissions"):
            sides: dict[str, list[float]] = {"ours": [], "theirs": []}
            for turn in range(10 * options.turns + 3):
                print(what, file=process.stdin, flush=True)
                theirs = float(process.stdout.readline())
                wanted = (
                    known[torch.randint(live, (LOOKUPS,))]
                    if what == "look-ups"
                    else random_ids(LOOKUPS)
                )
                start = time.perf_counter()
                with torch.no_grad():
                    if what == "look-ups":
                        table(ids.rows({"item": wanted})["item"])
                    else:
                        for note in ids.step({"item": wanted})[1]:
                            table.weight[note.rows] = 0.0
                ours = time.perf_counter() - start
                if turn >= 3:
                    sides["ours"].append(1e9 * ours / LOOKUPS)
                    sides["theirs"].append(1e9 * theirs / LOOKUPS)
            yield row(
                f"{what}, against TFRA",
                sides["ours"],
                "ns/id",
                baseline=sides["theirs"],
            )
        process.stdin.close()


ROWS_OF = {
    "find": find,
    "admit": admit,
    "step": step,
    "drift": drift,
    "tfra": tfra,
    "fresh": fresh,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(__doc__, ROWS_OF, turns=5, packages="numpy", studies=("tfra", "fresh"))
