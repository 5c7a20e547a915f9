"""Small networks: Contextual NCF as users train it (a Dataset that draws negatives, dense Adam) against captured steps.

    python benchmarks/small_model.py [--only small full ...] [--repeats 5] [--quick] [--cpu_seconds] [--script FILE]

Every row measures both of its sides in one run, in turn, one thread each, medians of the turns. `--script` runs another
script as the baseline in processes of its own (it prints JSON with `instances_per_s` and takes `--shape` and
`--seconds`); else it is script() below. Ours is what `train.compile=require` runs on rows in memory: order, negatives,
forward, backward, Adam, and the look at each loss. `small-2-ranks` is two processes under local SGD against one, beside
two that never talk; `epoch-small` and `epoch-full` are whole epochs, sampling included; `torchrec-path` eager steps of
the sharded model against plain nn.Embedding with the same dense Adam, also without the batch's form in which a positive
and its negatives share the user's side; `sweep` is what the rule "whole or row by row" rests on; `larger-batches` is
HR@10 against speed as the batch grows. `--cpu_seconds` counts the thread's own seconds, for a machine that others use.
`--quick` makes all small, to see that it runs. Last line: one JSON object.
"""

import argparse
import collections
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import small_model_batches
import small_model_ranks
import torch
from small_model_network import NEGATIVES, SHAPES, Captured, one_rank, positives
from torch import nn
from torch.utils.data import DataLoader, Dataset

from torchrec_ext.distributed.tables import ROWS_PER_LOOKUP

EPOCH = 3_647_614 * 5
Row = dict[str, Any]
CLOCK = time.thread_time if "--cpu_seconds" in sys.argv else time.perf_counter


class Interactions(Dataset[tuple[torch.Tensor, ...]]):
    """What the user wrote: a set per user, a loop per row."""

    def __init__(self, shape: str) -> None:
        self.items = SHAPES[shape].items
        self.user, self.item, self.context = map(torch.from_numpy, positives(shape))
        self.known = collections.defaultdict(set)
        for user, item in zip(self.user.tolist(), self.item.tolist(), strict=True):
            self.known[user].add(item)

    def __len__(self) -> int:
        return len(self.user)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, ...]:
        user, chosen = int(self.user[row]), [int(self.item[row])]
        while len(chosen) < 1 + NEGATIVES:
            item = np.random.randint(1, self.items + 1)
            if item not in self.known[user]:
                chosen.append(item)
        k = 1 + NEGATIVES
        labels = torch.tensor([1.0] + [0.0] * NEGATIVES)
        return torch.full((k,), user), torch.tensor(chosen), self.context[row].repeat(k, 1), labels


class PlainNCF(nn.Module):
    """The user's network: nn.Embedding and nn.Linear."""

    def __init__(self, users: int, items: int, context: int) -> None:
        super().__init__()
        self.gmf_user, self.gmf_item = nn.Embedding(users, 8), nn.Embedding(items + 1, 8)
        self.mlp_user, self.mlp_item = nn.Embedding(users, 32), nn.Embedding(items + 1, 32)
        self.mlp = nn.Sequential(
            nn.Linear(64 + context, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU()
        )
        self.head = nn.Linear(16, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """(B,) logits."""
        gmf = self.gmf_user(user) * self.gmf_item(item)
        mlp = self.mlp(torch.cat([self.mlp_user(user), self.mlp_item(item), context], dim=1))
        return self.head(torch.cat([gmf, mlp], dim=1)).squeeze(1)  # type: ignore[no-any-return]


class Plain:
    """Steps of the user's network with dense Adam on given batches."""

    def __init__(self, shape: str) -> None:
        torch.manual_seed(0)
        self.model = PlainNCF(SHAPES[shape].users, SHAPES[shape].items, SHAPES[shape].context)
        self.optimizer, self.loss = torch.optim.Adam(self.model.parameters(), 1e-3), nn.BCEWithLogitsLoss()

    def step(self, user: torch.Tensor, item: torch.Tensor, context: torch.Tensor, labels: torch.Tensor) -> int:
        """Trains on a batch; its instances."""
        self.optimizer.zero_grad()
        self.loss(self.model(user, item, context), labels).backward()
        self.optimizer.step()
        return len(labels)


def script(shape: str) -> Callable[[int], float]:
    """The user's script: rows through DataLoader, then a step; called with a number of steps, returns rows a second."""
    side, data = Plain(shape), Interactions(shape)

    def collate(rows: list[Any]) -> list[torch.Tensor]:
        return [torch.cat(column) for column in zip(*rows, strict=True)]

    def batches() -> Iterator[list[torch.Tensor]]:
        while True:
            yield from DataLoader(data, batch_size=256, shuffle=True, drop_last=True, collate_fn=collate)

    given = batches()
    return lambda steps: rate(lambda: side.step(*next(given)), steps)


def rate(step: Callable[[], int], steps: int) -> float:
    start = CLOCK()
    count = sum(step() for _ in range(steps))
    return count / (CLOCK() - start)


def other_script(path: str, shape: str, seconds: float) -> Callable[[int], float]:
    """A script of its own process; how many steps it makes is its own business."""

    def run(_: int) -> float:
        command = [sys.executable, path, "--shape", shape, "--seconds", str(seconds)]
        said = subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        return float(json.loads(said.stdout.splitlines()[-1])["instances_per_s"])

    return run


def in_turn(repeats: int, sides: dict[str, tuple[Callable[[int], float], int]]) -> dict[str, float]:
    """The median rate of each side over the turns, the first of which warms up."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, (run, steps) in sides.items():
            found[name].append(run(steps))
    return {name: statistics.median(rates[1:]) for name, rates in found.items()}


def row(
    name: str, baseline: float | None, ours: float, unit: str, ratio: float | None, required: Any, ceiling: Any = None
) -> Row:
    digits = 4 if ours < 100 else 0
    return {
        "name": name,
        "baseline": None if baseline is None else round(baseline, digits),
        "ours": round(ours, digits),
        "unit": unit,
        "ratio": None if ratio is None else round(ratio, 2),
        "required": required,
        "ceiling": ceiling,
    }


def throughput(shape: str, required: float, ceiling: float | None) -> Callable[[argparse.Namespace], Iterator[Row]]:
    def rows(options: argparse.Namespace) -> Iterator[Row]:
        steps = {"small": (20, 300), "full": (8, 200)}[shape]
        theirs = other_script(options.script, shape, 4.0) if options.script else script(shape)
        with one_rank() as runtime:
            ours = Captured(shape, runtime)
            run = {
                "script": (theirs, steps[0]),
                "ours": (lambda count: rate(ours.step, count), 10 if options.quick else steps[1]),
            }
            found = in_turn(options.repeats, run)
        print(f"{shape}: {ours.said}", file=sys.stderr)
        yield row(
            shape, found["script"], found["ours"], "instances/s", found["ours"] / found["script"], required, ceiling
        )

    return rows


def epoch(shape: str, required: float, ceiling: float) -> Callable[[argparse.Namespace], Iterator[Row]]:
    """18,238,070 instances: the small network goes over its 83,731 positives as often as makes so many."""

    def rows(options: argparse.Namespace) -> Iterator[Row]:
        with one_rank() as runtime:
            ours = Captured(shape, runtime)
            ours.step()
            start, seen = CLOCK(), 0
            while seen < (100_000 if options.quick else EPOCH):
                seen += ours.step()
            seconds = (CLOCK() - start) * EPOCH / seen
        yield row(f"epoch, {shape}", None, seconds, "s", None, required, ceiling)

    return rows


def torchrec_path(options: argparse.Namespace) -> Iterator[Row]:
    """Eager steps of the sharded model against eager nn.Embedding: the same rows, negatives given, dense Adam in both.

    Once as its loader makes batches, user and context once for a positive and its negatives, and once with all rows by
    themselves.
    """
    for name, shared in (("torchrec-path", ("user",)), ("torchrec-path, rows not shared", ())):
        with one_rank() as runtime:
            ours, plain = Captured("small", runtime, shared=shared), Plain("small")
            eager, given = ours.uncompiled(), ours.plain_batches(50)
            batches = iter(lambda given=given: given[np.random.randint(50)], None)  # type: ignore[misc]
            sides = {
                "plain": (lambda n, side=plain, batches=batches: rate(lambda: side.step(*next(batches)), n), 50),
                "ours": (lambda n, eager=eager: rate(eager, n), 50),
            }
            found = in_turn(options.repeats, sides)
        ratio = found["plain"] / found["ours"]
        yield row(name, found["plain"], found["ours"], "instances/s", ratio, "at most 1.15 times")


def sweep(options: argparse.Namespace) -> Iterator[Row]:
    """Milliseconds of a step, tables moved whole or row by row, as the tables' rows per look-up of a step grow."""
    for times in (1, ROWS_PER_LOOKUP, 4 * ROWS_PER_LOOKUP):
        with one_rank() as runtime:
            ways = [
                Captured("small", runtime, rows=1280 * times, rule=lambda *_, by_row=by_row: by_row)
                for by_row in (False, True)
            ]
            run = {
                str(at): (lambda n, way=way: rate(way.step, n), 10 if options.quick else 100)
                for at, way in enumerate(ways)
            }
            whole, by_row = in_turn(options.repeats, run).values()
        yield row(
            f"sweep, {times} rows per look-up", 6.4e6 / whole / 5, 6.4e6 / by_row / 5, "ms/step", by_row / whole, None
        )


ROWS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "small": throughput("small", 15.0, 26.0),
    "small-2-ranks": small_model_ranks.rows,
    "full": throughput("full", 30.0, None),
    "epoch-small": epoch("small", 15.0, 7.0),
    "epoch-full": epoch("full", 45.0, 19.0),
    "torchrec-path": torchrec_path,
    "sweep": sweep,
    "larger-batches": small_model_batches.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs")
    parser.add_argument("--cpu_seconds", action="store_true", help="of this thread, where others use the machine")
    parser.add_argument("--script", help="the baseline's own file, for small and full")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for entry in (row for name in options.only for row in ROWS[name](options)):
        found.append(entry)
        print(
            f"{entry['name']:32s} {entry['ours']:14,.2f} {entry['unit']}"
            + (f"  {entry['ratio']}x" if entry["ratio"] else ""),
            flush=True,
        )
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "torchrec", "torchrec-ext")}
    what = {
        "benchmark": "small_model",
        "clock": CLOCK.__name__,
        "versions": versions,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps({**what, "rows": found}))


if __name__ == "__main__":
    main()
