"""why_slow on programs with a planted cause, and on programs without one.

    python benchmarks/diagnose.py [--only ROW ...] [--turns 5] [--quick]

A program is diagnosed once in each turn, in a process of its own, and all rows read what came of it.

`planted`: plain PyTorch programs, each with one cause of lost time, each diagnosed in a process of its own `--turns`
times; ours is the number whose first verdict is that cause. `healthy`: programs without a fault; ours is the number
with a finding above "small". `seconds`: what a diagnosis takes.
`planted-traceml` (only where named; it installs TraceML): the same programs and turns under TraceML, and how often its
verdict is that cause, see `diagnose_traceml.py`.
`overhead`: what every run measures of its own time, as a share of the seconds of its steps.
`others`, `others-healthy` (with `--studies`, or where named): programs that no rule was written for, see
`diagnose_others.py`: right first verdicts, and healthy ones with a finding above "small".
`foreign`: programs that nobody here wrote, see `diagnose_foreign.py`: a verdict each, and what the captured step gains.
`end-to-end`: the small Contextual NCF from its user's script to ours, remedy after remedy, and their product.
`--quick` diagnoses a few of the programs, once.
Last line: one JSON object.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import diagnose_foreign
import diagnose_others
import diagnose_traceml
import numpy as np
import torch
from harness import Options, Row, command_line, last_json, row
from small_model_baseline import (
    BATCH,
    NEGATIVES,
    SHAPES,
    Interactions,
    PlainNCF,
    Positives,
    positives,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torchrec_ext.diagnose import why_slow
from torchrec_ext.train.report.progress import Window

LIMIT_S = 240.0  # of one program


class Program(NamedTuple):
    """What is diagnosed, and a remedy of it that is measured, where there is one."""

    model: nn.Module
    optimizer: Any
    loss: Callable[..., Any]
    batches: Any
    more: dict[str, Any]


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batches_of(rows: int, width: int, count: int = 16) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(rows, width), torch.randint(2, (rows, 1)).float())
        for _ in range(count)
    ]


def plain(model: nn.Module, batches: Any, **more: Any) -> Program:
    loss_fn = nn.BCEWithLogitsLoss()
    return Program(
        model,
        torch.optim.Adam(model.parameters(), 1e-3),
        lambda x, y: loss_fn(model(x), y),
        batches,
        more,
    )


class Slept(Dataset[tuple[Tensor, Tensor]]):
    """Rows in memory; the first of each batch waits as a disk or a network would."""

    def __init__(self, seconds: float) -> None:
        self.x = torch.randn(50_000, 64)
        self.y = torch.randint(2, (50_000, 1)).float()
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        time.sleep(self.seconds)
        return [(self.x[rows], self.y[rows])]


def sleeping() -> Program:
    return plain(
        mlp(64, 128, 1),
        DataLoader(Slept(0.01), 256, shuffle=True, collate_fn=lambda rows: rows[0]),
    )


def concatenated(rows: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def ncf(shape: str, rows: int) -> Program:
    held = SHAPES[shape]
    kept = Positives(*(column[:rows] for column in positives(held)))
    model, loss_fn = PlainNCF(held.users, held.items), nn.BCEWithLogitsLoss()
    loader = DataLoader(
        Interactions(held.items, kept), BATCH, shuffle=True, collate_fn=concatenated
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return Program(
        model, optimizer, lambda u, i, c, y: loss_fn(model(u, i, c), y), loader, {}
    )


class Together(Interactions):
    """The same rows and draws, all rows of a batch in one call."""

    def __init__(self, items: int, rows: Positives) -> None:
        super().__init__(items, rows)
        self.taken = torch.zeros(int(self.user.max()) + 1, items + 1, dtype=torch.bool)
        self.taken[self.user, self.item] = True

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        user, item, context = self.user[rows], self.item[rows], self.context[rows]
        drawn = torch.randint(1, self.items + 1, (len(rows), NEGATIVES))
        while (wrong := self.taken[user[:, None], drawn]).any():
            drawn = torch.where(
                wrong, torch.randint_like(drawn, 1, self.items + 1), drawn
            )
        count = 1 + NEGATIVES
        labels = torch.tensor([1.0] + [0.0] * NEGATIVES).repeat(len(rows))
        items = torch.cat([item[:, None], drawn], 1).flatten()
        return [
            user.repeat_interleave(count),
            items,
            context.repeat_interleave(count, 0),
            labels,
        ]


def read_together(_: Program) -> DataLoader[Any]:
    held = SHAPES["small"]
    data = Together(
        held.items, Positives(*(column[:80_000] for column in positives(held)))
    )
    return DataLoader(data, BATCH, shuffle=True, collate_fn=lambda made: made)


class Tiny(nn.Module):
    """400 tiny ops."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, 1) logits."""
        x = self.first(x)
        for _ in range(100):
            x = x * 1.01 + 0.01
            x = torch.tanh(x) - 0.01
        return self.last(x)


class Wide(nn.Module):
    """A table of which a step reads few rows."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(rows, dim), mlp(dim, 32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns (B, 1) logits."""
        return self.top(self.table(ids))


def swept(rows: int = 12_400_000) -> Program:
    return plain(
        Wide(rows, 1),
        [(torch.randint(rows, (1024,)), torch.ones(1024, 1)) for _ in range(16)],
    )


def oversubscribed() -> Program:
    torch.set_num_threads(8)
    return plain(mlp(*[64] * 9, 1), batches_of(2048, 64))


def synced() -> Program:
    model, loss_fn = mlp(64, 128, 1), nn.BCEWithLogitsLoss()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        right = 0
        for row_number in range(200):
            right += int((logits[row_number, 0] > 0).item() == bool(y[row_number, 0]))
        return loss_fn(logits, y)

    return Program(
        model, torch.optim.Adam(model.parameters()), loss, batches_of(256, 64), {}
    )


def evaluated() -> Program:
    model, held_out = mlp(64, 256, 256, 1), torch.randn(40_000, 64)

    def evaluate() -> float:
        with torch.no_grad():
            return float(model(held_out).mean())

    return plain(model, batches_of(256, 64), between={"evaluation": (evaluate, 20)})


def wide_layers() -> Program:
    return plain(mlp(256, 2048, 2048, 1), batches_of(256, 256))


PLANTED: dict[str, tuple[Callable[[], Program], str]] = {
    "a sleep in the loader": (sleeping, "loader_waits"),
    "Python per row, data in memory": (
        functools.partial(ncf, "small", 80_000),
        "loader_rows",
    ),
    "400 tiny ops": (lambda: plain(Tiny(), batches_of(64, 8)), "launches"),
    "dense Adam over 12.4 M rows": (swept, "untouched_rows"),
    "8 threads on few cores": (oversubscribed, "threads"),
    "an oversized MLP": (wide_layers, "products"),
    "values brought to Python": (synced, "host_syncs"),
    "an evaluation longer than the training": (evaluated, "between_steps"),
}


def two_towers() -> Program:
    """Tables whose touched rows alone move, towers of some width, batches that are ready."""
    users = nn.Embedding(20_000, 64, sparse=True)
    items = nn.Embedding(5_000, 64, sparse=True)
    towers = nn.ModuleList([mlp(64, 512, 256), mlp(64, 512, 256)])
    model, loss_fn = nn.ModuleList([users, items, towers]), nn.BCEWithLogitsLoss()
    optimizers = [
        torch.optim.SparseAdam([users.weight, items.weight]),
        torch.optim.Adam(towers.parameters()),
    ]
    batches = [
        (
            torch.randint(20_000, (4096,)),
            torch.randint(5_000, (4096,)),
            torch.randint(2, (4096,)).float(),
        )
        for _ in range(8)
    ]

    def loss(user: Tensor, item: Tensor, y: Tensor) -> Tensor:
        return loss_fn((towers[0](users(user)) * towers[1](items(item))).sum(1), y)

    return Program(model, optimizers, loss, batches, {})


class Arrays(Dataset[tuple[Tensor, Tensor]]):
    """Rows in memory, read a batch at a time."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(20_000, 256), torch.randint(2, (20_000, 1)).float()

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        return self.x[rows], self.y[rows]


HEALTHY: dict[str, Callable[[], Program]] = {
    "an MLP": lambda: plain(mlp(256, 1024, 1024, 1), batches_of(512, 256)),
    "an MLP, batches read whole": lambda: plain(
        mlp(256, 1024, 1024, 1),
        DataLoader(Arrays(), 512, shuffle=True, collate_fn=lambda rows: rows),
    ),
    "two towers": two_towers,
    "a deep MLP": lambda: plain(mlp(512, *[512] * 8, 1), batches_of(1024, 512)),
}


def usual(
    program: Program, loss: Callable[..., Any] | None = None
) -> Callable[..., None]:
    """The step of a program, with another loss where one is given."""
    optimizers = (
        program.optimizer
        if isinstance(program.optimizer, list)
        else [program.optimizer]
    )

    def step(*batch: Tensor) -> None:
        for each in optimizers:
            each.zero_grad()
        (loss or program.loss)(*batch).backward()
        for each in optimizers:
            each.step()

    return step


def made_of(name: str) -> Program:
    return PLANTED[name][0]() if name in PLANTED else HEALTHY[name]()


def case(name: str, seed: int, budget_s: float) -> None:
    """Diagnoses a program in this process; its verdict is the last line."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    program = made_of(name)
    start = time.perf_counter()
    diagnosis = why_slow(
        program.model,
        program.optimizer,
        program.loss,
        program.batches,
        budget_s=budget_s,
        **program.more,
    )
    seconds = time.perf_counter() - start
    print(diagnosis)
    above = [
        finding.cause
        for finding in diagnosis.findings
        if finding.size in ("large", "medium")
    ]
    made = {
        "verdict": diagnosis.verdict,
        "above": above,
        "seconds": seconds,
        "noisy": diagnosis.noisy,
    }
    print(json.dumps(made))


@functools.cache
def result_of(name: str, turn: int, quick: bool) -> dict[str, Any]:
    """Returns what a process of its own measured of a program, which all rows read."""
    budget_s = 5.0 if quick else 25.0
    made = last_json(
        [sys.executable, __file__, "--case", name, turn, budget_s], limit_s=LIMIT_S
    )
    print(
        f"{name}: {made['verdict']}, {made['seconds']:.0f} s {made['noisy']}",
        file=sys.stderr,
        flush=True,
    )
    return dict(made)


def runs(names: Sequence[str], options: Options) -> Iterator[tuple[str, int]]:
    """Yields each of the programs, turn by turn."""
    for turn in range(1 if options.quick else options.turns):
        yield from (
            (name, turn) for name in names if not options.quick or name in QUICK
        )


def results(
    names: Sequence[str], options: Options
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields what was measured of each of the programs, turn by turn."""
    for name, turn in runs(names, options):
        yield name, result_of(name, turn, options.quick)


def overhead(options: Options) -> Iterator[Row]:
    """Steps of two ranks, and beside these what counting their waits takes."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "-m",
            "torchx_apps.train",
        ]
        words += [
            "--recipe",
            "n_tower",
            "--data.name=planted",
            "--train.compile=off",
        ]
        words += [
            f"--train.epochs={1 if options.quick else 6}",
            "--run_dir",
            str(run),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, *words],
            check=True,
            timeout=LIMIT_S,
            stdout=sys.stderr,
            env=environment,
        )
        records = [
            json.loads(line)
            for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
    train = [record for record in records if record["kind"] == "train"]
    seconds = sum(record["rows"] / record["rows_per_s"] for record in train)
    steps = train[-1]["step"]
    many = 20_000
    runtime: Any = SimpleNamespace(world_size=2, device=torch.device("cpu"))
    shares = []
    for _ in range(options.turns):
        window, batches = Window(runtime), itertools.repeat(0)
        start = time.perf_counter()
        for _ in range(many):
            window.fetch(batches)
        middle = time.perf_counter()
        for _ in range(many):
            next(batches)
        end = time.perf_counter()
        fetch_s = (2 * middle - start - end) / many
        shares.append(fetch_s * steps / seconds)
    yield row(
        "overhead",
        shares,
        "of the steps' seconds",
        required=0.01,
        fetch_us=fetch_s * 1e6,
    )


def planted(options: Options) -> Iterator[Row]:
    wrong: list[str] = []
    count, seconds = 0, []
    for name, made in results([*PLANTED], options):
        count += 1
        seconds.append(made["seconds"])
        if made["verdict"] != PLANTED[name][1]:
            wrong.append(f"{name}: {made['verdict']}")
    share = (count - len(wrong)) / count
    yield row(
        "planted",
        share,
        "right first verdicts",
        better="more",
        required=39 / 40,
        of=count,
        wrong=wrong,
    )
    yield row("seconds", seconds, "s", required=60.0)


def planted_traceml(options: Options) -> Iterator[Row]:
    """Yields the share of right verdicts, TraceML's beside ours, and all of its verdicts; nothing without TraceML."""
    command = diagnose_traceml.installed()
    if command is None:
        return
    names = [*PLANTED]
    right, verdicts = 0, dict[str, list[str]]()
    for name, turn in runs(names, options):
        verdict = diagnose_traceml.verdict(command, name, turn, options.quick)
        right += diagnose_traceml.names(PLANTED[name][1], verdict)
        verdicts.setdefault(name, []).append(verdict)
        print(f"TraceML, {name}: {verdicts[name][-1]}", file=sys.stderr, flush=True)
    ours = [
        made["verdict"] == PLANTED[name][1] for name, made in results(names, options)
    ]
    shares = sum(ours) / len(ours), right / len(ours)
    more = {"of": len(ours), "verdicts": verdicts, "version": diagnose_traceml.PACKAGE}
    yield row(
        "planted-traceml",
        shares[0],
        "right first verdicts",
        baseline=shares[1],
        better="more",
        **more,
    )


def healthy(options: Options) -> Iterator[Row]:
    above: list[str] = []
    count = 0
    for name, made in results([*HEALTHY], options):
        count += 1
        above += (
            [f"{name}: {', '.join(made['above'])}"]
            if made["above"] or made["noisy"]
            else []
        )
    yield row(
        "healthy",
        len(above),
        "of the runs with a finding above small",
        required=0,
        of=count,
        wrong=above,
    )


ROWS = {
    "planted": planted,
    "planted-traceml": planted_traceml,
    "healthy": healthy,
    "overhead": overhead,
    "foreign": diagnose_foreign.foreign,
    "others": diagnose_others.others,
    "others-healthy": diagnose_others.others_healthy,
    "end-to-end": diagnose_foreign.end_to_end,
}
QUICK = ("400 tiny ops", "an MLP")
STUDIES = ("planted-traceml", "others", "others-healthy")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        case(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        command_line(__doc__, ROWS, turns=5, studies=STUDIES)
