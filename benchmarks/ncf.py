"""Contextual NCF: a user's script, against `adopt` in two lines and against the package's own model.

    python benchmarks/ncf.py [--only ROW ...] [--turns 3] [--quick]

The script is plain_ncf.py, in a process of its own, in turn with ours. `..., against fused Adam` has it at its best:
Adam in one kernel, with one thread or two, whichever was faster in a run before. `..., against the script as written`
has plain Adam and one thread. `small` and `full` have 75 k and 12.45 M parameters.

`ncf-small`, `ncf-full`: instances a second of the script's own model and Dataset, adopted by two lines. `..., as the
package's own`: the same against train() on the package's own model. `capturing, ...`: seconds of the capture, and
`pays_after`, the number of steps after which it has paid, against eager steps on the same ready batches.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

import numpy as np
import torch
from harness import (
    Trainings,
    command_line,
    last_json,
    one_rank,
    rates,
    row,
)
from plain_ncf import (
    BATCH,
    INSTANCES,
    NEGATIVES,
    SHAPES,
    PlainNCF,
    drawn,
    positives,
)
from torch import nn

from torchrec_ext.adopt import Rows, Uniform, adopt
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.models.ncf import ContextualNCF
from torchrec_ext.train.loop import TrainConfig, train


class Script:
    """The user's script in processes of its own: at its best, and as written.

    Args:
        shape: ``small`` or ``full``.
        quick: whether a run is short.

    ``rates``: instances a second by the form of the script, one for each turn.
    """

    def __init__(self, shape, *, quick):
        script = Path(__file__).with_name("plain_ncf.py")
        seconds = 1.0 if quick else 3.0
        self._command = [sys.executable, script, "--shape", shape, "--seconds", seconds]
        fused = [["--fused", "--threads", threads] for threads in (1, 2)]
        best = max(fused, key=self._rate)
        self._forms = {"fused Adam": best, "the script as written": []}
        self.rates = {form: [] for form in self._forms}

    def turn(self):
        """Runs each form once."""
        for form, flags in self._forms.items():
            self.rates[form].append(self._rate(flags))

    def rows(self, name, ours):
        """Yields a row for each form; ``ours`` are our seconds of a step, by turn."""
        for form, baseline in self.rates.items():
            yield instances(f"{name}, against {form}", ours, baseline)

    def _rate(self, flags):
        return float(last_json([*self._command, *flags])["instances_per_s"])


def instances(name, seconds, baseline, **more):
    """Returns a row of instances a second, of our seconds of a step."""
    ours = rates(INSTANCES, seconds)
    return row(name, ours, "instances/s", baseline=baseline, better="more", **more)


def adopted(shape, compile_="require"):
    """The user's network, adopted by two lines."""
    torch.manual_seed(0)
    model, criterion = PlainNCF(shape.users, shape.items), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(user, item, context, label):
        return criterion(model(user, item, context), label)  # type: ignore[no-any-return]

    return adopt(model, optimizer, loss, compile=compile_)


def columns_of(shape):
    """The user's Dataset as columns."""
    items = range(1, shape.items + 1)
    negatives = Uniform(items, draws=NEGATIVES, exclude=("user", "item"))
    return Rows(positives(shape)._asdict(), BATCH, negatives=negatives, drop_last=True)


def over_rows(step, rows):
    """Epochs of batches that are made inside the step."""

    def loop(stop):
        while True:
            for _ in step.epoch(rows):
                if stop():
                    return

    return loop


def eager_seconds(shape, steps):
    """Seconds of an eager step of the user's on a batch that is ready."""
    step = adopted(shape, compile_="off")
    batch = next(drawn(shape.items, positives(shape)))
    for _ in range(3):
        step(*batch)
    start = time.perf_counter()
    for _ in range(steps):
        step(*batch)
    return (time.perf_counter() - start) / steps


def network(shape):
    """Returns the package's own network, its tables on the meta device."""
    torch.manual_seed(0)
    context = [f"c{index}" for index in range(21)]
    sizes = (shape.users, shape.items + 1)
    meta = torch.device("meta")
    return ContextualNCF(*sizes, context_dense=context, shared=("user",), device=meta)


def loader_of(shape, model):
    """Returns a loader of the positives with 4 exact negatives each, 256 positives a step."""
    user, item, context = positives(shape)
    columns = {
        f"c{index}": Column(np.ascontiguousarray(values))
        for index, values in enumerate(context.T)
    }
    return ChunkLoader(
        Chunk({"user_id": Column(user), "item_id": Column(item), **columns}),
        model.schema(),
        config=LoaderConfig(batch_size=BATCH, negatives=NEGATIVES, device="cpu"),
        items=Chunk({"item_id": Column(np.arange(shape.items + 1))}),
        negatives=UniformNegatives(shape.items, user, item),
    )


def training(model, loader, runtime):
    """Returns a side of :class:`Trainings`: a call of train() that lasts until it is stopped."""
    adam = OptimizerConfig(tables="adam", tables_lr=1e-3, dense_lr=1e-3)
    parallel, optimizer = hybrid_parallel(model, runtime, optimizer=adam)
    config = TrainConfig(epochs=100_000)
    return lambda stop: train(parallel, optimizer, loader, runtime, config, stop=stop)


def adopted_ncf(name, options):
    """Rows of one size: against the script, against the package's own model, and the price of the capture."""
    if options.quick and name == "full":
        return
    shape, steps = SHAPES[name], 100 if options.quick else 3000
    script, ours, others = Script(name, quick=options.quick), [], []
    with one_rank() as runtime:
        step, model = adopted(shape), network(shape)
        own = training(model, loader_of(shape, model), runtime)
        trainings = Trainings(
            {"adopted": over_rows(step, columns_of(shape)), "own": own}
        )
        for turn in range(options.turns):
            script.turn()
            warm_up = 1 if turn else 50
            seconds = trainings.seconds_per_step(steps, 1, warm_up=warm_up)
            ours += seconds["adopted"]
            others += seconds["own"]
        trainings.close()
    yield from script.rows(f"ncf-{name}", ours)
    baseline = rates(INSTANCES, others)
    yield instances(f"ncf-{name}, as the package's own", ours, baseline)
    eager = eager_seconds(shape, 20 if options.quick or name == "full" else 400)
    capture_s = step.capture_s
    pays = round(capture_s / (eager - sum(ours) / len(ours)))
    yield row(f"capturing, {name}", capture_s, "s", pays_after=pays)


ROWS = {
    "ncf-small": functools.partial(adopted_ncf, "small"),
    "ncf-full": functools.partial(adopted_ncf, "full"),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(__doc__, ROWS, packages="numpy")
