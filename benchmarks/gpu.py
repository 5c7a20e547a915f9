"""A GPU: a user's own step, adopted, against the forms that its user could write; and recipes with a part and without.

    python benchmarks/gpu.py [--only ROW ...] [--turns 3] [--quick]

`adopted ...`: the network of plain_ncf.py (75 k and 12.45 M parameters) under dense Adam, on batches of the GPU, 1,280
and 16,384 rows. `as written` is Adam by default, `fused Adam` takes fused=True, `torch.compile` also compiles forward
and loss with mode="reduce-overhead", `by hand` is one CUDA graph of eager kernels with fused Adam. `combined` adopts
with inductor's combo_kernels. `drawn ...`: the adopted step draws its negatives and takes its rows itself, against
torch.compile on batches that are ready; `epoch_s`, of 18.24 M instances. `wide ...`: 26 tables of 100,000 x 64 under an
MLP, in fp32, tf32 and bf16. Rows of NCF and `wide` need torch alone. Recipes train `two_tower`, in turn without the
part and with it; `quality` has the figures of both. Without a GPU all runs on the CPU, which says nothing of a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from harness import command_line, output, row
from plain_ncf import CONTEXT, NEGATIVES, SHAPES, PlainNCF, positives
from torch import nn
from torch.profiler import ProfilerActivity, profile

from torchrec_ext.adopt import Rows, Uniform, adopt
from torchrec_ext.capture import executors

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICE = "cuda" if GPUS else "cpu"
FORMS = ("as written", "fused Adam", *(["torch.compile", "by hand"] if GPUS else []))
BEST = "torch.compile" if GPUS else "fused Adam"
SECONDS = 1.0  # of a turn


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


def step_of(form, model, *, autocast=nullcontext):
    """Returns a step of a network, whose last argument is the label, in one form."""
    criterion = nn.BCEWithLogitsLoss()
    fused = form in ("fused Adam", "torch.compile", "by hand")
    optimizer = torch.optim.Adam(
        model.parameters(), 1e-3, fused=fused, capturable=form == "by hand"
    )

    def loss(*batch):
        return criterion(model(*batch[:-1]), batch[-1])

    if form in ("adopted", "combined"):
        step = adopt(model, optimizer, loss, autocast=autocast, compile="require")
        return combined(step) if form == "combined" else step
    forward = (
        torch.compile(loss, mode="reduce-overhead") if form == "torch.compile" else loss
    )

    def step(*batch):
        optimizer.zero_grad(set_to_none=form != "by hand")
        with autocast():
            value = forward(*batch)
        value.backward()
        optimizer.step()

    return by_hand(step) if form == "by hand" else step


def combined(step):
    """Returns a step that inductor compiles, in one of its calls, with combo_kernels."""

    def run(*batch):
        executors._INDUCTOR["cuda"]["combo_kernels"] = True
        step(*batch)
        executors._INDUCTOR["cuda"]["combo_kernels"] = False

    return run


def by_hand(step):
    """Returns a step as one CUDA graph, captured with its first batch."""
    held = []

    def replay(*batch):
        if not held:
            held.extend(each.clone() for each in batch)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step(*held)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step(*held)
            held.append(graph)
        for buffer, each in zip(held, batch, strict=False):
            buffer.copy_(each)
        held[-1].replay()

    return replay


def ncf(shape):
    """Returns the network of plain_ncf.py."""
    torch.manual_seed(0)
    return PlainNCF(shape.users, shape.items).to(DEVICE)


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


def kernels(step, batch):
    """Returns the number of kernels of a step on a GPU, by torch.profiler; None on a CPU."""
    if not GPUS:
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(*batch)
        _wait()
    return len(profiler.events())


def compared(what, steps, given, options, **more):
    """Times steps on the same batches in turn, and yields the first against each other."""
    times = {form: [] for form in steps}
    for step in steps.values():
        for batch in given:
            step(*batch)
    seconds = 0.05 if options.quick else SECONDS
    for _ in range(options.turns):
        for form, step in steps.items():
            times[form].append(microseconds(step, given, seconds))
    ours, *others = steps
    more["kernels"] = kernels(steps[ours], given[0])
    for form in others:
        name = f"{what}, against {form} ({DEVICE})"
        yield row(name, times[ours], "us/step", baseline=times[form], **more)


def adopted(name, rows, options):
    """Times the adopted step and each other form, in turn."""
    shape = SHAPES[name]
    given = batches(shape, 64 if options.quick else rows)
    forms = ("adopted", *FORMS, *(["combined"] if GPUS else []))
    steps = {form: step_of(form, ncf(shape)) for form in forms}
    yield from compared(f"adopted {name}, {rows:,} rows", steps, given, options)


def drawn(name, rows, options):
    """Times adopted steps that draw their negatives, against those of torch.compile that are given batches."""
    shape = SHAPES[name]
    user, item, context = positives(shape)
    negatives = Uniform(
        range(1, shape.items + 1), draws=NEGATIVES, exclude=("user", "item")
    )
    columns = {"user": user, "item": item, "context": context}
    size = 64 if options.quick else rows // (1 + NEGATIVES)
    held = Rows(columns, size, negatives=negatives, drop_last=True)
    step = step_of("adopted", ncf(shape))
    epochs = itertools.chain.from_iterable(step.epoch(held) for _ in itertools.count())
    steps = {
        "drawn": lambda *_: next(epochs),
        BEST: step_of(BEST, ncf(shape)),
    }
    what = f"drawn {name}, {rows:,} rows"
    for made in compared(what, steps, batches(shape, size * (1 + NEGATIVES)), options):
        yield made | {"epoch_s": made["ours"] * 18.24 / rows}


class Wide(nn.Module):
    """26 tables and an MLP."""

    def __init__(self, ids):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ids, 64) for _ in range(26))
        layers = []
        for before, after in itertools.pairwise((26 * 64, 1024, 512, 256)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(256, 1))

    def forward(self, ids):
        """Returns (B,) logits of (B, 26) ids."""
        columns = ids.split(1, 1)
        vectors = [
            table(each) for table, each in zip(self.tables, columns, strict=True)
        ]
        return self.mlp(torch.cat(vectors, 1)).squeeze(1)


def wide(precision, options):
    """Times the wide network in one precision, adopted and by torch.compile."""
    ids, rows = (100, 64) if options.quick else (100_000, 16_384)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    autocast = nullcontext
    if precision == "bf16":
        autocast = functools.partial(torch.autocast, DEVICE, torch.bfloat16)
    given = [
        (torch.randint(ids, (rows, 26), device=DEVICE), torch.rand(rows, device=DEVICE))
        for _ in range(4)
    ]
    steps = {}
    for form in ("adopted", BEST):
        torch.manual_seed(0)
        steps[form] = step_of(form, Wide(ids).to(DEVICE), autocast=autocast)
    for made in compared(f"wide, {precision}", steps, given, options):
        yield made | {"rows_per_s": 1e6 * rows / made["ours"]}


HERE = {"loader.device": DEVICE}
EAGER, CAPTURED = {"train.compile": "off"}, {"train.compile": "require"}
# settings without the part and with it
PARTS = {
    "resident data": (EAGER, EAGER | HERE),
    "captured steps": (EAGER | HERE, CAPTURED | HERE),
}


def recipe(name, options):
    """Trains without a part and with it, in turn."""
    turns = []
    for _ in range(options.turns):
        turns.append([trained(settings, options) for settings in PARTS[name]])
    quality = [each["test"] for each in turns[0]]
    baseline, ours = (
        [turn[side]["samples_per_s"] for turn in turns] for side in (0, 1)
    )
    more = {"better": "more", "quality": quality}
    yield row(name, ours, "samples/s", baseline=baseline, **more)


def trained(settings, options):
    """Returns the summary of one run."""
    words = {"recipe": "two_tower", "data.name": "planted", "export": "never"}
    words |= {"train.early_stop.metric": ""} | settings
    if options.quick:
        words |= {"train.epochs": "1", "data.users": "200", "data.items": "100"}
        words |= {"loader.batch_size": "256"}
    with tempfile.TemporaryDirectory() as folder:
        words["run_dir"] = f"{folder}/run"
        app = [
            "-m",
            "torchx_apps.train",
            *(f"--{key}={value}" for key, value in words.items()),
        ]
        output([sys.executable, *app])
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    return summary


ROWS = {
    f"{name}, {rows:,} rows": functools.partial(adopted, name, rows)
    for name in SHAPES
    for rows in (1_280, 16_384)
}
ROWS |= {
    f"drawn {name}, {rows:,} rows": functools.partial(drawn, name, rows)
    for name in SHAPES
    for rows in (1_280, 16_384)
}
ROWS |= {
    f"wide, {each}": functools.partial(wide, each) for each in ("fp32", "tf32", "bf16")
}
if importlib.util.find_spec("torchrec"):
    ROWS |= {name: functools.partial(recipe, name) for name in PARTS}


if __name__ == "__main__":
    command_line(__doc__, ROWS)
