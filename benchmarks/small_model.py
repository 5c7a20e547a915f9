"""Small networks: Contextual NCF trained by train(), against a user's script in plain PyTorch.

    python benchmarks/small_model.py [--only small full ...] [--turns 3] [--quick]

`small` and `full` (75 k and 12.45 M parameters): instances a second of train() with `train.compile=auto` and rows in
memory (`loader.device=cpu`), one thread, in turn with small_model_baseline.py in a process of its own. `..., against
fused Adam` has the script at its best: Adam in one kernel, with one thread or two, whichever was faster in a run
before. `..., against the script as written` has the script as users write it: plain Adam, one thread. Ours are the
steps of a whole epoch of 18.24 M instances, a share in each turn, and `epoch, small` and `epoch, full` the seconds of
that epoch in all: order, draws, records and ends of epochs included (the small network passes 43 times over its 83,731
positives), captures not: of the step, and, after 20 passes over few rows, of a pass's last batch, once a run each.
`small-2-ranks`: two processes that average their weights every 32 steps, against one; the ceiling is two processes that
never talk.
`torchrec-path`: train() without a captured step against a loop over nn.Embedding with dense Adam, plain or fused,
whichever is faster, both on the same 50 batches; once as the loader makes them, with the user and the context once for
a positive and its negatives, and once with all rows by themselves.
`larger-batches`, only where named: HR@10 on MovieLens 100K against speed as the batch grows.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import small_model_batches
import small_model_ranks
import torch
from harness import (
    Options,
    Repeated,
    Row,
    Trainings,
    command_line,
    last_json,
    rates,
    row,
)
from small_model_baseline import BATCH, NEGATIVES, SHAPES, PlainStep
from small_model_training import (
    Side,
    batches_of,
    instances,
    loader_of,
    network,
    training,
)

from torchrec_ext.capture.policy import PATIENCE
from torchrec_ext.distributed.runtime import Runtime

EPOCH = 3_647_614 * 5
INSTANCES = BATCH * (1 + NEGATIVES)  # of a step
# over rows of few steps: then the step of a pass's last batch is captured too
WARM_PASSES = PATIENCE + 2


@contextlib.contextmanager
def one_rank() -> Iterator[Runtime]:
    """A process group of one, whose trainings print nothing to stdout."""
    with (
        Runtime.start("cpu", threads=1) as runtime,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        yield runtime


class Script:
    """The user's script in processes of its own: at its best, and as written.

    Args:
        shape: ``small`` or ``full``.
        seconds: seconds that are counted in each run.

    ``rates``: instances a second by the form of the script, one for each turn.
    """

    def __init__(self, shape: str, seconds: float) -> None:
        baseline = Path(__file__).with_name("small_model_baseline.py")
        self._command: list[object] = [
            sys.executable,
            baseline,
            "--shape",
            shape,
            "--seconds",
            seconds,
        ]
        fused: list[list[object]] = [
            ["--fused", "--threads", threads] for threads in (1, 2)
        ]
        self._forms = {
            "fused Adam": max(fused, key=self._rate),
            "the script as written": [],
        }
        self.rates: dict[str, list[float]] = {form: [] for form in self._forms}

    def turn(self) -> None:
        """Runs each form once."""
        for form, flags in self._forms.items():
            self.rates[form].append(self._rate(flags))

    def rows(self, name: str, ours: list[float], required: float) -> Iterator[Row]:
        """Yields a row for each form.

        Args:
            name: name of the rows, to which the form is added.
            ours: our instances a second, one for each turn.
            required: our own target for the ratio to the script as written.
        """
        for form, flags in self._forms.items():
            yield row(
                f"{name}, against {form}",
                ours,
                "instances/s",
                baseline=self.rates[form],
                better="more",
                required=required if not flags else None,
                baseline_by=" ".join(map(str, ["small_model_baseline.py", *flags])),
            )

    def _rate(self, flags: list[object]) -> float:
        return float(last_json([*self._command, *flags])["instances_per_s"])


def throughput(
    name: str, required: float, required_epoch: float
) -> Callable[[Options], Iterator[Row]]:
    def rows(options: Options) -> Iterator[Row]:
        shape = SHAPES[name]
        steps = 100 if options.quick else -(-EPOCH // INSTANCES // options.turns)
        script, ours = Script(name, 1.0 if options.quick else 3.0), []
        with one_rank() as runtime:
            model = network(shape)
            loader = loader_of(shape, model)
            trainings = Trainings({"ours": training(model, loader, runtime)})
            for turn in range(options.turns):
                script.turn()
                warm_up = (
                    1
                    if turn
                    else 50
                    if options.quick or len(loader) > steps
                    else WARM_PASSES * len(loader)
                )
                ours += trainings.seconds_per_step(steps, 1, warm_up=warm_up)["ours"]
            trainings.close()
        yield from script.rows(name, rates(INSTANCES, ours), required)
        yield row(
            f"epoch, {name}",
            sum(ours) / len(ours) * EPOCH / INSTANCES,
            "s",
            required=required_epoch,
        )

    return rows


def plain(batches: list[Any], *, fused: bool) -> Side:
    """A loop over the batches with the user's network, as long as it is not stopped."""

    def loop(stop: Callable[[], bool]) -> None:
        step = PlainStep(SHAPES["small"], fused=fused)
        for batch in itertools.cycle(batches):
            step(*batch)
            if stop():
                return

    return loop


def torchrec_path(options: Options) -> Iterator[Row]:
    for name, shared in (
        ("torchrec-path", ("user",)),
        ("torchrec-path, rows not shared", ()),
    ):
        with one_rank() as runtime:
            model = network(SHAPES["small"], shared)
            batches = batches_of(SHAPES["small"], model, 50)
            given = [list(instances(batch)) for batch in batches]
            trainings = Trainings(
                {
                    "Adam": plain(given, fused=False),
                    "fused Adam": plain(given, fused=True),
                    "ours": training(model, Repeated(batches), runtime, capture="off"),
                }
            )
            seconds = trainings.seconds_per_step(
                20 if options.quick else 400, options.turns
            )
            trainings.close()
        ours = seconds.pop("ours")
        best = min(seconds, key=lambda side: sum(seconds[side]))
        yield row(
            name,
            rates(INSTANCES, ours),
            "instances/s",
            baseline=rates(INSTANCES, seconds[best]),
            better="more",
            required=1.0,
            baseline_by=f"nn.Embedding, {best}",
        )


ROWS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "small": throughput("small", 20.0, 10.0),
    "small-2-ranks": small_model_ranks.rows,
    "full": throughput("full", 40.0, 30.0),
    "torchrec-path": torchrec_path,
    "larger-batches": small_model_batches.rows,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(__doc__, ROWS, turns=3, packages="numpy", studies=["larger-batches"])
