"""Negatives: batches of 256 positives with 4 exact negatives each, against a Dataset that draws them in __getitem__.

    python benchmarks/negatives.py [--repeats 30] [--shapes small full]

One thread, both sides in turn, medians over the repeats; `--cpu_seconds` counts the thread's own seconds, for a machine
that others use. `exact` are whole TowerBatches from a ChunkLoader: KeyedJaggedTensors of user_id and item_id, context,
labels, log q, every value checked, the user and the context once per positive, as a shared tower reads them.
`exact-repeated` has them beside every candidate, as the baseline has. `exact-draws` is what the baseline hands out and
no more: four tensors (user, item, context, label). The other rows time a step of 1,024 positives: draws alone, torch
against numpy, and the in-batch loss against a bare product with cross entropy. Last line: one JSON object.
"""

import argparse
import collections
import importlib.metadata
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagConfig

from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.hard import HardNegatives
from torchrec_ext.data.negatives.known_pairs import KnownPairs
from torchrec_ext.data.negatives.on_device import sampler_on_device
from torchrec_ext.data.negatives.samplers import Negatives, PopularityNegatives, UniformNegatives
from torchrec_ext.modules.losses import in_batch_softmax
from torchrec_ext.modules.softmax import in_batch_negatives
from torchrec_ext.schema import BatchSchema

NEGATIVES, CONTEXT, BATCH, STEP = 4, 21, 256, 1024
SHAPES = {"small": (654, 1_127, 83_731), "full": (250_000, 61_261, 3_647_614)}
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
Batch = list[torch.Tensor]
CLOCK = time.thread_time if "--cpu_seconds" in sys.argv else time.perf_counter


def positives(shape: str) -> tuple[int, Rows]:
    """Number of items, and (users, items from 1, context) of every positive."""
    users, items, rows = SHAPES[shape]
    rng = np.random.default_rng(0)
    user = rng.integers(0, users, rows)
    item = np.minimum((items * rng.random(rows) ** 2.5).astype(np.int64), items - 1) + 1
    return items, (user, item, (rng.random((rows, CONTEXT), dtype=np.float32) < 0.3).astype(np.float32))


class RowByRow(Dataset[Batch]):
    """What users write: a set per user, a loop per row."""

    def __init__(self, items: int, rows: Rows) -> None:
        self.items = items
        self.user, self.item, self.context = (torch.from_numpy(column) for column in rows)
        self.known = collections.defaultdict(set)
        for user, item in zip(rows[0].tolist(), rows[1].tolist(), strict=True):
            self.known[user].add(item)

    def __len__(self) -> int:
        return len(self.user)

    def __getitem__(self, row: int) -> Batch:
        user, chosen = int(self.user[row]), [int(self.item[row])]
        known = self.known[user]
        while len(chosen) < 1 + NEGATIVES:
            item = np.random.randint(1, self.items + 1)
            if item not in known:
                chosen.append(item)
        k = 1 + NEGATIVES
        labels = torch.tensor([1.0] + [0.0] * NEGATIVES)
        return [torch.full((k,), user), torch.tensor(chosen), self.context[row].repeat(k, 1), labels]


def row_by_row(items: int, rows: Rows) -> Iterator[Batch]:
    def collate(batch: list[Batch]) -> Batch:
        return [torch.cat(column) for column in zip(*batch, strict=True)]

    data = RowByRow(items, rows)
    while True:
        yield from DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=collate)


def vectorised(rows: Rows, sampler: Negatives) -> Iterator[Batch]:
    """The same four tensors, from whole columns."""
    user, item, context = rows
    width = 1 + NEGATIVES
    label = torch.zeros(BATCH, width)
    label[:, 0] = 1
    for epoch in itertools.count():
        order = np.random.default_rng(epoch).permutation(len(user))
        for at in range(0, len(user) - BATCH + 1, BATCH):
            places = order[at : at + BATCH]
            users = user[places]
            ids = np.concatenate([item[places][:, None], sampler.draw(users, places, epoch, NEGATIVES).ids], axis=1)
            features = torch.from_numpy(context[places]).repeat_interleave(width, dim=0)
            yield [
                torch.from_numpy(users.repeat(width)),
                torch.from_numpy(ids.ravel()),
                features,
                label.ravel().clone(),
            ]


def loaded(items: int, rows: Rows, sampler: Negatives, *, repeated: bool) -> Iterator[object]:
    """TowerBatches of the same rows, users and context once per positive or ``repeated`` beside each candidate."""
    user, item, context = rows
    columns = {f"c{place}": Column(np.ascontiguousarray(context[:, place])) for place in range(CONTEXT)}
    chunk = Chunk({"user_id": Column(user), "item_id": Column(item), **columns})
    tables = [
        EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=size, embedding_dim=8)
        for name, size in (("user_id", int(user.max()) + 1), ("item_id", items + 1))
    ]
    schema = BatchSchema.from_tables(tables, dense=list(columns), shared=[] if repeated else ["user_id", *columns])
    config = LoaderConfig(batch_size=BATCH, negatives=NEGATIVES, drop_last=True, prefetch=0)
    catalogue = Chunk({"item_id": Column(np.arange(items + 1))})
    loader = ChunkLoader(chunk, schema, config=config, items=catalogue, negatives=sampler)
    while True:
        yield from loader


def interleaved(repeats: int, inner: int, *calls: Callable[[], object]) -> list[float]:
    """The median seconds of each call, `inner` in a row, all calls in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):  # the first round warms up
        for call, found in zip(calls, times, strict=True):
            start = CLOCK()
            for _ in range(inner):
                call()
            found.append((CLOCK() - start) / inner)
    return [statistics.median(found[1:]) for found in times]


def row(name: str, ours: float, baseline: float | None = None, required: float | None = None) -> dict[str, object]:
    """Milliseconds per batch; ``ratio`` is how many times faster ours is."""
    return {
        "name": name,
        "baseline": None if baseline is None else round(baseline * 1e3, 4),
        "ours": round(ours * 1e3, 4),
        "unit": "ms/batch",
        "ratio": None if baseline is None else round(baseline / ours, 1),
        "required": required,
        "ceiling": None,
    }


def exact_rows(shape: str, items: int, rows: Rows, repeats: int) -> Iterator[dict[str, object]]:
    start = time.perf_counter()
    uniform = UniformNegatives(items, rows[0], rows[1])
    built = time.perf_counter() - start
    popular = PopularityNegatives(items, rows[0], rows[1])
    start = time.perf_counter()
    streams = {
        "baseline": row_by_row(items, rows),
        "exact": loaded(items, rows, uniform, repeated=False),
        "exact-popularity": loaded(items, rows, popular, repeated=False),
        "exact-repeated": loaded(items, rows, uniform, repeated=True),
        "exact-draws": vectorised(rows, uniform),
    }
    next(streams["baseline"])
    print(
        f"{shape}: known pairs built in {built:.2f} s; the baseline's sets and first batch in "
        f"{time.perf_counter() - start:.2f} s"
    )
    theirs, *ours = interleaved(repeats, 5, *(stream.__next__ for stream in streams.values()))
    for name, seconds in zip(list(streams)[1:], ours, strict=True):
        yield row(f"{name}, {shape}", seconds, theirs, 25.0 if name in ("exact", "exact-draws") else None)
    yield from step_rows(shape, rows, uniform, popular, repeats)


def step_rows(
    shape: str, rows: Rows, uniform: UniformNegatives, popular: PopularityNegatives, repeats: int
) -> Iterator[dict[str, object]]:
    """Draws alone, for STEP positives: numpy against torch on the CPU, and hard ones."""
    places = np.random.default_rng(1).permutation(len(rows[0]))[:STEP]
    users = rows[0][places]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = (torch.from_numpy(users).to(device), torch.from_numpy(places).to(device))
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for name, sampler in (("uniform", uniform), ("popularity", popular)):
        drawer = sampler_on_device(sampler, device)
        plain, ours = interleaved(
            repeats,
            5,
            lambda sampler=sampler: sampler.draw(users, places, 0, NEGATIVES),
            lambda drawer=drawer: (drawer.draw(*there, 0, NEGATIVES), wait()),
        )
        yield row(f"draw-{name}, numpy, {shape}", plain)
        yield row(f"draw-{name}, torch on {device.type}, {shape}", ours, plain)
    hard = HardNegatives(uniform, k=50)
    vectors = torch.randn(uniform.known.num_items + 1, 16)
    some = np.unique(users)
    start = time.perf_counter()
    queries = torch.randn(uniform.known.num_users, 16)
    hard.refresh(lambda of: (queries[of] @ vectors.T).topk(200).indices.numpy(), some, block=256)
    print(f"{shape}: hard negatives of {len(some)} users refreshed in {time.perf_counter() - start:.2f} s")
    yield row(f"draw-hard, numpy, {shape}", interleaved(repeats, 5, lambda: hard.draw(users, places, 0, NEGATIVES))[0])


def in_batch_rows(known: KnownPairs, rows: Rows, repeats: int) -> Iterator[dict[str, object]]:
    """Times the whole loss of STEP queries with STEP candidates, against the bare product and cross entropy."""
    users, ids = torch.from_numpy(rows[0][:STEP]), torch.from_numpy(rows[1][:STEP])
    queries, items = torch.randn(STEP, 64, requires_grad=True), torch.randn(STEP, 64, requires_grad=True)
    weights, log_q = torch.ones(STEP), torch.zeros(STEP)

    def is_known(drawn: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(known.contains(users.numpy()[:, None], drawn.numpy()))

    def loss(known_items: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        negatives = in_batch_negatives(items, ids, log_q=log_q, is_known=known_items)
        in_batch_softmax(queries, negatives, weights=weights, total_weight=weights.sum(), temperature=0.1).backward()

    def bare() -> None:
        torch.nn.functional.cross_entropy(queries @ items.T / 0.1, torch.arange(STEP)).backward()

    plain, corrected, masked = interleaved(repeats, 1, bare, loss, lambda: loss(is_known))
    yield row(f"in-batch, {STEP}, correction and hits", corrected, plain)
    yield row(f"in-batch, {STEP}, also known items", masked, plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--cpu_seconds", action="store_true", help="of this thread, where others use the machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: list[dict[str, object]] = []
    for shape in options.shapes:
        items, rows = positives(shape)
        found += exact_rows(shape, items, rows, options.repeats)
        if shape == options.shapes[0]:
            found += in_batch_rows(KnownPairs(items, rows[0], rows[1]), rows, options.repeats)
    for entry in found:
        print(f"{entry['name']:60s} {entry['ours']:9.4f} ms" + (f"  {entry['ratio']:7.1f}x" if entry["ratio"] else ""))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "torchrec", "torchrec-ext")}
    print(
        json.dumps(
            {
                "benchmark": "negatives",
                "clock": CLOCK.__name__,
                "versions": versions,
                "cores": len(os.sched_getaffinity(0)),
                "rows": found,
            }
        )
    )


if __name__ == "__main__":
    main()
