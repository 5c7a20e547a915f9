"""A GPU: a user's own step, adopted, against the forms that its user could write; and recipes with a part and without.

    python benchmarks/gpu.py [--only ROW ...] [--turns 3] [--quick]

`adopted ...`: the network of plain_ncf.py (75 k and 12.45 M parameters) under dense Adam, on batches of the GPU, 1,280
and 16,384 rows. `as written` is Adam by default, `fused Adam` takes fused=True, `torch.compile` also compiles forward
and loss with mode="reduce-overhead". Recipes train `two_tower` on generated data, in turn without the part and with it;
`quality` has the figures of both models. Without a GPU all of it runs on the CPU, which says nothing of a GPU.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import command_line, output, row
from plain_ncf import CONTEXT, SHAPES, PlainNCF
from torch import Tensor, nn

from torchrec_ext.adopt import adopt

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICE = "cuda" if GPUS else "cpu"
FORMS = ("as written", "fused Adam", *(["torch.compile"] if GPUS else []))
SECONDS = 1.0  # of a turn
Batch = tuple[Tensor, ...]
Step = Callable[..., object]


def batches(shape, rows):
    """Draws 20 batches onto the device."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(20):
        user = torch.randint(shape.users, (rows,), generator=generator)
        item = torch.randint(1, shape.items, (rows,), generator=generator)
        context = (torch.rand(rows, CONTEXT, generator=generator) < 0.3).float()
        label = torch.randint(2, (rows,), generator=generator).float()
        made.append(tuple(tensor.to(DEVICE) for tensor in (user, item, context, label)))
    return made


def step_of(form, shape):
    """Returns a step of the network in one form."""
    torch.manual_seed(0)
    model = PlainNCF(shape.users, shape.items).to(DEVICE)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(
        model.parameters(), 1e-3, fused=form in ("fused Adam", "torch.compile")
    )

    def loss(user, item, context, label):
        return criterion(model(user, item, context), label)  # type: ignore[no-any-return]

    if form == "adopted":
        return adopt(model, optimizer, loss, compile="require")
    forward = (
        torch.compile(loss, mode="reduce-overhead") if form == "torch.compile" else loss
    )

    def step(*batch):
        optimizer.zero_grad()
        forward(*batch).backward()
        optimizer.step()

    return step


def microseconds(step, given, seconds):
    """Returns the time of a step, in microseconds, the device's work included."""
    count = 0
    _wait()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for batch in given:
            step(*batch)
        _wait()
        count += len(given)
    return 1e6 * (time.perf_counter() - start) / count


def _wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def adopted(name, rows, options):
    """Times the adopted step and each other form, in turn."""
    shape = SHAPES[name]
    given = batches(shape, 64 if options.quick else rows)
    steps = {form: step_of(form, shape) for form in ("adopted", *FORMS)}
    times = {form: [] for form in steps}
    for step in steps.values():
        for batch in given:
            step(*batch)
    seconds = 0.05 if options.quick else SECONDS
    for _ in range(options.turns):
        for form, step in steps.items():
            times[form].append(microseconds(step, given, seconds))
    for form in FORMS:
        what = f"adopted {name}, {rows:,} rows, against {form} ({DEVICE})"
        yield row(what, times["adopted"], "us/step", baseline=times[form])


HERE = {"loader.device": DEVICE}
EAGER, CAPTURED = {"train.compile": "off"}, {"train.compile": "require"}
# settings without the part and with it, and the ranks of the run with it
PARTS = {
    "resident data": (EAGER, EAGER | HERE, 1),
    "captured steps": (EAGER | HERE, CAPTURED | HERE, 1),
}
if GPUS > 1:
    PARTS["two ranks, NCCL"] = (EAGER | HERE, EAGER | HERE, 2)


def recipe(name, options):
    """Trains without a part and with it, in turn."""
    without, part, ranks = PARTS[name]
    turns = []
    for _ in range(options.turns):
        turns.append((trained(without, 1, options), trained(part, ranks, options)))
    quality = [each["test"] for each in turns[0]]
    baseline, ours = (
        [turn[side]["samples_per_s"] for turn in turns] for side in (0, 1)
    )
    more = {"better": "more", "quality": quality}
    yield row(name, ours, "samples/s", baseline=baseline, **more)


def trained(settings, ranks, options):
    """Returns the summary of one run."""
    words = {"recipe": "two_tower", "data.name": "planted", "export": "never"}
    words |= {"train.early_stop.metric": ""} | settings
    if options.quick:
        words |= {"train.epochs": "1", "data.users": "200", "data.items": "100"}
        words |= {"loader.batch_size": "256"}
    launch = f"-m torch.distributed.run --standalone --nproc_per_node={ranks}".split()
    with tempfile.TemporaryDirectory() as folder:
        words["run_dir"] = f"{folder}/run"
        app = [
            "-m",
            "torchx_apps.train",
            *(f"--{key}={value}" for key, value in words.items()),
        ]
        output([sys.executable, *(launch if ranks > 1 else []), *app])
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    return summary


ROWS = {
    f"{name}, {rows:,} rows": functools.partial(adopted, name, rows)
    for name in SHAPES
    for rows in (1_280, 16_384)
}
ROWS |= {name: functools.partial(recipe, name) for name in PARTS}


if __name__ == "__main__":
    command_line(__doc__, ROWS)
