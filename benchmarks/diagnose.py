"""why_slow on programs with a planted cause, and on programs without one.

    python benchmarks/diagnose.py [--only ROW ...] [--turns 5] [--quick]

A program is diagnosed once in each turn, in a process of its own. `planted`: plain PyTorch programs, each with one
cause of lost time; ours is the share whose first verdict is that cause. `healthy`: programs without a fault; ours is
the number with a finding above "small". `seconds`: what a diagnosis takes. `--quick` diagnoses two of the programs,
once.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import command_line, last_json, row
from plain_ncf import (
    BATCH,
    SHAPES,
    Interactions,
    PlainNCF,
    Positives,
    concatenated,
    positives,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torchrec_ext.diagnose import why_slow

LIMIT_S = 240.0  # of one program


class Program(NamedTuple):
    """What is diagnosed."""

    model: nn.Module
    optimizer: Any
    loss: Callable[..., Any]
    batches: Any


def mlp(*widths):
    layers = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batches_of(rows, width, count=16):
    return [
        (torch.randn(rows, width), torch.randint(2, (rows, 1)).float())
        for _ in range(count)
    ]


def plain(model, batches):
    loss_fn = nn.BCEWithLogitsLoss()
    return Program(
        model,
        torch.optim.Adam(model.parameters(), 1e-3),
        lambda x, y: loss_fn(model(x), y),
        batches,
    )


class Arrays(Dataset[tuple[Tensor, Tensor]]):
    """Rows in memory, read a batch at a time; each batch first waits as a disk or a network would."""

    def __init__(self, rows, width, seconds=0.0):
        self.x = torch.randn(rows, width)
        self.y = torch.randint(2, (rows, 1)).float()
        self.seconds = seconds

    def __len__(self):
        return len(self.x)

    def __getitems__(self, rows):
        if self.seconds:
            time.sleep(self.seconds)
        return self.x[rows], self.y[rows]


def read_whole(data, batch):
    return DataLoader(data, batch, shuffle=True, collate_fn=lambda rows: rows)


def ncf():
    """Python per row, data in memory."""
    held = SHAPES["small"]
    kept = Positives(*(column[:80_000] for column in positives(held)))
    model, loss_fn = PlainNCF(held.users, held.items), nn.BCEWithLogitsLoss()
    data = Interactions(held.items, kept)
    loader = DataLoader(data, BATCH, shuffle=True, collate_fn=concatenated)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(user, item, context, label):
        return loss_fn(model(user, item, context), label)

    return Program(model, optimizer, loss, loader)


class Tiny(nn.Module):
    """400 tiny ops."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        """Returns (B, 1) logits."""
        x = self.first(x)
        for _ in range(100):
            x = x * 1.01 + 0.01
            x = torch.tanh(x) - 0.01
        return self.last(x)


class Wide(nn.Module):
    """A table of which a step reads few rows."""

    def __init__(self, rows, dim):
        super().__init__()
        self.table, self.top = nn.Embedding(rows, dim), mlp(dim, 32, 1)

    def forward(self, ids):
        """Returns (B, 1) logits."""
        return self.top(self.table(ids))


def swept(rows=12_400_000):
    return plain(
        Wide(rows, 1),
        [(torch.randint(rows, (1024,)), torch.ones(1024, 1)) for _ in range(16)],
    )


def oversubscribed():
    torch.set_num_threads(8)
    return plain(mlp(*[64] * 9, 1), batches_of(2048, 64))


def synced():
    model, loss_fn = mlp(64, 128, 1), nn.BCEWithLogitsLoss()

    def loss(x, y):
        logits = model(x)
        right = 0
        for row_number in range(200):
            right += int((logits[row_number, 0] > 0).item() == bool(y[row_number, 0]))
        return loss_fn(logits, y)

    return Program(
        model, torch.optim.Adam(model.parameters()), loss, batches_of(256, 64)
    )


PLANTED = {
    "a sleep in the loader": (
        lambda: plain(mlp(64, 128, 1), read_whole(Arrays(50_000, 64, 0.01), 256)),
        "loader_waits",
    ),
    "Python per row, data in memory": (ncf, "loader_rows"),
    "400 tiny ops": (lambda: plain(Tiny(), batches_of(64, 8)), "launches"),
    "dense Adam over 12.4 M rows": (swept, "untouched_rows"),
    "8 threads on few cores": (oversubscribed, "threads"),
    "an oversized MLP": (
        lambda: plain(mlp(256, 2048, 2048, 1), batches_of(256, 256)),
        "products",
    ),
    "values brought to Python": (synced, "host_syncs"),
}


HEALTHY = {
    "an MLP": lambda: plain(mlp(256, 1024, 1024, 1), batches_of(512, 256)),
    "an MLP, batches read whole": lambda: plain(
        mlp(256, 1024, 1024, 1), read_whole(Arrays(20_000, 256), 512)
    ),
}
QUICK = ("400 tiny ops", "an MLP")


def case(name, seed, budget_s):
    """Diagnoses a program in this process; its verdict is the last line."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    program = (PLANTED[name][0] if name in PLANTED else HEALTHY[name])()
    start = time.perf_counter()
    diagnosis = why_slow(*program, budget_s=budget_s)
    seconds = time.perf_counter() - start
    sizes = [(finding.cause, finding.size) for finding in diagnosis.findings]
    above = [cause for cause, size in sizes if size in ("large", "medium")]
    noisy = bool(diagnosis.noisy)
    made = {"verdict": diagnosis.verdict, "above": above, "noisy": noisy}
    print(json.dumps({**made, "seconds": seconds}))


def results(names, options):
    """Yields what was measured of each of the programs, turn by turn."""
    budget_s = 5.0 if options.quick else 25.0
    for turn in range(options.turns):
        for name in names:
            if options.quick and name not in QUICK:
                continue
            command = [sys.executable, __file__, "--case", name, turn, budget_s]
            made = last_json(command, limit_s=LIMIT_S)
            print(f"{name}: {made['verdict']}", file=sys.stderr)
            yield name, made


def planted(options):
    made = list(results(PLANTED, options))
    wrong = [
        f"{name}: {each['verdict']}"
        for name, each in made
        if each["verdict"] != PLANTED[name][1]
    ]
    share = 1 - len(wrong) / len(made)
    of = {"of": len(made), "wrong": wrong}
    yield row("planted", share, "right first verdicts", better="more", **of)
    yield row("seconds", [each["seconds"] for _, each in made], "s")


def healthy(options):
    made = list(results(HEALTHY, options))
    wrong = [name for name, each in made if each["above"] or each["noisy"]]
    unit = "of the runs with a finding above small"
    yield row("healthy", len(wrong), unit, of=len(made), wrong=wrong)


ROWS = {"planted": planted, "healthy": healthy}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        case(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        command_line(__doc__, ROWS, turns=5)
