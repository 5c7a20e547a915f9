"""A user's own nn.Module and Dataset, unchanged, trained through torchrec_ext.adopt, against the user's script.

    python benchmarks/adopt.py [--only ncf-small loader-kept ...] [--turns 3] [--quick]

`ncf-small` and `ncf-full` (75 k and 12.45 M parameters): instances a second of the model class and the Dataset of
small_model_baseline.py, adopted by two lines, in turn with the script in a process of its own: `..., against fused
Adam` and `..., against the script as written`, as in small_model.py. `ncf-small, as the package's own` and `ncf-full,
...`: the same against train() on the package's own model, in turn in one process. `loader-kept, small` and
`loader-kept, full`: the user's DataLoader stays as well, so that only the step is adopted; against the same forms of
the script. `capturing, ...`: seconds of the capture, with nothing compiled before, and
`pays_after`, the number of steps after which it has paid, against eager steps on the same ready batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from harness import Options, Row, Trainings, command_line, rates, row
from small_model import INSTANCES, Script, one_rank
from small_model_baseline import (
    BATCH,
    NEGATIVES,
    SHAPES,
    PlainNCF,
    Shape,
    drawn,
    positives,
)
from small_model_training import Side, loader_of, network, training
from torch import Tensor, nn

from torchrec_ext.adopt import AdoptedStep, Rows, Uniform, adopt
from torchrec_ext.capture.policy import Compile


def adopted(
    shape: Shape, rows: Rows | None = None, compile_: Compile = "require"
) -> AdoptedStep:
    """The user's network, adopted by two lines."""
    torch.manual_seed(0)
    model, criterion = PlainNCF(shape.users, shape.items), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(user: Tensor, item: Tensor, context: Tensor, label: Tensor) -> Tensor:
        return criterion(model(user, item, context), label)  # type: ignore[no-any-return]

    return adopt(model, optimizer, loss, rows=rows, compile=compile_)


def columns_of(shape: Shape) -> Rows:
    """The user's Dataset as columns."""
    items = range(1, shape.items + 1)
    negatives = Uniform(items, draws=NEGATIVES, exclude=("user", "item"))
    return Rows(positives(shape)._asdict(), BATCH, negatives=negatives, drop_last=True)


def over_rows(step: AdoptedStep) -> Side:
    """Epochs of batches that are made inside the step."""

    def loop(stop: Callable[[], bool]) -> None:
        while True:
            for _ in step.epoch():
                if stop():
                    return

    return loop


def over_loader(step: AdoptedStep, shape: Shape) -> Side:
    """Epochs of batches of the user's own DataLoader."""

    def loop(stop: Callable[[], bool]) -> None:
        for batch in drawn(shape.items, positives(shape)):
            step(*batch)
            if stop():
                return

    return loop


def ncf(name: str, required: float) -> Callable[[Options], Iterator[Row]]:
    """Rows of one size: against the script, against the package's own model, and the price of the capture."""

    def rows(options: Options) -> Iterator[Row]:
        shape, steps = SHAPES[name], 100 if options.quick else 3000
        script, ours, others = Script(name, 1.0 if options.quick else 3.0), [], []
        with one_rank() as runtime:
            step, model = adopted(shape, columns_of(shape)), network(shape)
            sides = {
                "adopted": over_rows(step),
                "own": training(model, loader_of(shape, model), runtime),
            }
            trainings = Trainings(sides)
            for turn in range(options.turns):
                script.turn()
                seconds = trainings.seconds_per_step(
                    steps, 1, warm_up=1 if turn else 50
                )
                ours += seconds["adopted"]
                others += seconds["own"]
            trainings.close()
        yield from script.rows(f"ncf-{name}", rates(INSTANCES, ours), required)
        yield row(
            f"ncf-{name}, as the package's own",
            rates(INSTANCES, ours),
            "instances/s",
            baseline=rates(INSTANCES, others),
            better="more",
            required=0.95,
        )
        eager = eager_seconds(shape, 20 if options.quick or name == "full" else 400)
        captured, figures = sum(ours) / len(ours), step.figures()
        pays = figures["capture_s"] / (eager - captured)
        yield row(
            f"capturing, {name}",
            figures["capture_s"],
            "s",
            pays_after=round(pays),
            eager_ms=round(eager * 1e3, 3),
        )

    return rows


def eager_seconds(shape: Shape, steps: int) -> float:
    """Seconds of an eager step of the user's on a batch that is ready."""
    step = adopted(shape, compile_="off")
    batch = next(drawn(shape.items, positives(shape)))
    for _ in range(3):
        step(*batch)
    start = time.perf_counter()
    for _ in range(steps):
        step(*batch)
    return (time.perf_counter() - start) / steps


def loader_kept(options: Options) -> Iterator[Row]:
    for name, required in (("small", 1.3), ("full", 7.0)):
        shape, steps = SHAPES[name], 20 if options.quick else 300
        script, ours = Script(name, 1.0 if options.quick else 3.0), []
        trainings = Trainings({"adopted": over_loader(adopted(shape), shape)})
        for turn in range(options.turns):
            script.turn()
            ours += trainings.seconds_per_step(steps, 1, warm_up=1 if turn else 30)[
                "adopted"
            ]
        trainings.close()
        yield from script.rows(f"loader-kept, {name}", rates(INSTANCES, ours), required)


ROWS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "ncf-small": ncf("small", 17.0),
    "ncf-full": ncf("full", 50.0),
    "loader-kept": loader_kept,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(__doc__, ROWS, turns=3, packages="numpy")
