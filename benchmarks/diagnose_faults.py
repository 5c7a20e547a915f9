"""Programs with a fault that no rule was written for, and what removes it: the first of diagnose_others.py.

An audit of why_slow described them before its rules were there, and they are written anew from these descriptions.
Each is a step function in plain PyTorch with one fault: the causes that are right names of it, the remedy whose gain
is compared, and the step without the fault.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

ROWS = 256
Step = Callable[..., Any]


class Case(NamedTuple):
    """A program: its step and batches, and those without the fault, where it has one."""

    step: Step
    batches: Any
    mended: Step | None = None
    mended_batches: Any = None


class Fault(NamedTuple):
    """A program with a fault.

    Args:
        make: makes it.
        causes: causes that name it.
    """

    make: Callable[[], Case]
    causes: tuple[str, ...]


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batches_of(
    width: int, rows: int = ROWS, dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(rows, width, dtype=dtype), torch.randint(2, (rows, 1)).to(dtype)) for _ in range(16)
    ]  # fmt: skip


def training(
    model: nn.Module, then: Callable[[Tensor], object] = lambda loss: None
) -> Step:
    """Returns the usual step on x and y, which calls a function with its loss at its end."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
        then(loss)

    return step


# ------------------------------------------------------------------ the loader computes


WORDS = [f"word{number}" for number in range(5_000)]
VOCABULARY = {word: number for number, word in enumerate(WORDS)}


class Sentences(Dataset[tuple[str, int]]):
    """Texts of 24 words."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.texts = [
            " ".join(WORDS[each] for each in draw.integers(0, 5_000, 24))
            for _ in range(8_000)
        ]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, row: int) -> tuple[str, int]:
        return self.texts[row], row % 2


def tokenised(rows: list[tuple[str, int]]) -> tuple[Tensor, Tensor]:
    ids = []
    for text, _ in rows:
        words = text.lower().replace(",", " ").replace(".", " ").split()
        ids.append([VOCABULARY.get(word, 0) for word in words])
    return torch.tensor(ids), torch.tensor([float(label) for _, label in rows])[:, None]


class Bag(nn.Module):
    """A bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.EmbeddingBag(5_000, 32), mlp(32, 32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns (B, 1) logits."""
        return self.top(self.table(ids))


def tokenising() -> Case:
    data = Sentences()
    step = training(Bag())
    ids, labels = tokenised([data[row] for row in range(len(data))])
    ready = [
        (ids[row : row + ROWS], labels[row : row + ROWS])
        for row in range(0, len(data) - ROWS, ROWS)
    ]
    return Case(
        step, DataLoader(data, ROWS, shuffle=True, collate_fn=tokenised), step, ready
    )


class Frame(Dataset[tuple[Tensor, Tensor]]):
    """Rows of a pandas frame, one by one."""

    def __init__(self) -> None:
        import pandas

        names = [f"feature{number}" for number in range(32)]
        self.frame = pandas.DataFrame(
            np.random.randn(20_000, 32).astype(np.float32), columns=names
        )
        self.frame["label"] = np.random.randint(0, 2, 20_000).astype(np.float32)

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        values = torch.tensor(self.frame.iloc[row].to_numpy())
        return values[:-1], values[-1:]


class WholeFrame(Frame):
    """The rows of a batch at once."""

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        values = torch.from_numpy(self.frame.iloc[rows].to_numpy())
        return values[:, :-1], values[:, -1:]


def data_frame() -> Case:
    step = training(mlp(32, 64, 1))
    together = DataLoader(
        WholeFrame(), ROWS, shuffle=True, collate_fn=lambda batch: batch
    )
    return Case(step, DataLoader(Frame(), ROWS, shuffle=True), step, together)


class Lines(IterableDataset[tuple[Tensor, Tensor]]):
    """Lines of a CSV file, each parsed when it is read."""

    def __init__(self) -> None:
        values = np.random.randn(20_000, 33).round(4)
        self.text = "\n".join(",".join(map(str, row)) for row in values)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for line in io.StringIO(self.text):
            values = [float(value) for value in line.split(",")]
            yield torch.tensor(values[:-1]), torch.tensor([float(values[-1] > 0)])


def csv_lines() -> Case:
    data = Lines()
    step = training(mlp(32, 64, 1))
    return Case(step, DataLoader(data, ROWS), step, list(DataLoader(data, ROWS)))


# ------------------------------------------------------------ the step holds on its own


def callback() -> Case:
    model = mlp(64, 128, 1)
    return Case(
        training(model, lambda loss: time.sleep(0.02)), batches_of(64), training(model)
    )


def figures_read() -> Case:
    """Five figures of each weight, its gradient and its moments."""
    model = mlp(64, 64, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    figures: dict[str, list[float]] = {}
    count = 0

    def trained(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()

    def log() -> None:
        for name, each in model.named_parameters():
            moments = optimizer.state[each]
            for held in (
                each.detach(),
                each.grad,
                moments["exp_avg"],
                moments["exp_avg_sq"],
            ):
                if held is not None:
                    of_all = (
                        held.norm(),
                        held.mean(),
                        held.amax(),
                        held.amin(),
                        held.sum(),
                    )
                    figures[name] = [figure.item() for figure in of_all]

    def step(x: Tensor, y: Tensor) -> None:
        trained(x, y)
        log()

    def seldom(x: Tensor, y: Tensor) -> None:
        nonlocal count
        trained(x, y)
        count += 1
        if count % 100 == 0:
            log()

    return Case(step, batches_of(64), seldom)


class Rows(nn.Module):
    """A table with a network on top of it."""

    def __init__(self, rows: int, dim: int = 32) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(rows, dim, sparse=True), mlp(dim, 32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns (B, 1) logits."""
        return self.top(self.table(ids))


def id_batches(rows: int, count: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randint(rows, (count,)), torch.randint(2, (count, 1)).float())
        for _ in range(16)
    ]


def sparse_rows(rows: int) -> tuple[nn.Module, Step, list[Any]]:
    """Returns a table whose optimizer moves the rows that are read, its step, and a list for copies."""
    model = Rows(rows)
    tables = torch.optim.SparseAdam(model.table.parameters())
    layers = torch.optim.Adam(model.top.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        tables.zero_grad()
        layers.zero_grad()
        F.binary_cross_entropy_with_logits(model(x), y).backward()
        tables.step()
        layers.step()

    return model, step, []


def copied() -> Case:
    model, step, best = sparse_rows(200_000)

    def copying(x: Tensor, y: Tensor) -> None:
        step(x, y)
        best[:] = [copy.deepcopy(model)]

    return Case(copying, id_batches(200_000), step)


def json_lines() -> Case:
    model = mlp(64, 128, 64)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    written: list[str] = []

    def trained(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        vectors = model(x)
        vectors.square().mean().backward()
        optimizer.step()
        return vectors.detach()

    def step(x: Tensor, y: Tensor) -> None:
        written[:] = [json.dumps({"vectors": trained(x, y).tolist()})]

    return Case(step, batches_of(64), trained)


def saved() -> Case:
    model, step, _ = sparse_rows(400_000)
    path = Path(tempfile.mkdtemp()) / "last.pt"
    count = 0

    def saving(x: Tensor, y: Tensor) -> None:
        nonlocal count
        step(x, y)
        count += 1
        if count % 10 == 0:
            torch.save(model.state_dict(), path)

    return Case(saving, id_batches(400_000), step)


def mean_of_list() -> Case:
    model = mlp(64, 128, 1)
    losses, mean = [0.7] * 200_000, []

    def log(loss: Tensor) -> None:
        mean[:] = [np.mean(losses)]

    return Case(training(model, log), batches_of(64), training(model))


def collected() -> Case:
    model = mlp(64, 128, 1)
    held = [{"number": number, "row": [number]} for number in range(600_000)]
    kept: list[Any] = []

    def keep(
        loss: Tensor,
    ) -> None:
        # what lives until the next collection, as of a log or a replay buffer
        value = loss.detach()
        kept.append([{"loss": value} for _ in range(2_000)])
        del kept[:-200]

    trained = training(model, keep)

    def step(x: Tensor, y: Tensor) -> None:
        assert held
        trained(x, y)

    def without(x: Tensor, y: Tensor) -> None:
        gc.disable()
        step(x, y)
        gc.enable()

    return Case(step, batches_of(64), without)


# ----------------------------------------------------------------- ops that need not be


def all_items() -> Case:
    items, model = nn.Embedding(60_000, 32), nn.Embedding(5_000, 32)
    optimizer = torch.optim.SGD([*items.parameters(), *model.parameters()], 0.1)

    def trained(loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
        def step(user: Tensor, item: Tensor) -> None:
            optimizer.zero_grad()
            loss(model(user), item).backward()
            optimizer.step()

        return step

    def whole(vectors: Tensor, item: Tensor) -> Tensor:
        return F.cross_entropy(vectors @ items.weight.T, item)

    def sampled(vectors: Tensor, item: Tensor) -> Tensor:
        drawn = items(torch.randint(60_000, (1_024,)))
        right = (vectors * items(item)).sum(1, keepdim=True)
        logits = torch.cat([right, vectors @ drawn.T], 1)
        return F.cross_entropy(logits, torch.zeros(len(item), dtype=torch.int64))

    batches = [
        (torch.randint(5_000, (128,)), torch.randint(60_000, (128,))) for _ in range(16)
    ]
    return Case(trained(whole), batches, trained(sampled))


def double() -> Case:
    def made(dtype: torch.dtype) -> Step:
        return training(mlp(128, 512, 512, 1).to(dtype))

    single = made(torch.float32)
    batches = batches_of(128, dtype=torch.float64)
    return Case(made(torch.float64), batches, lambda x, y: single(x.float(), y.float()))


def anomaly() -> Case:
    model = mlp(64, *[64] * 20, 1)
    trained = training(model)

    def step(x: Tensor, y: Tensor) -> None:
        with torch.autograd.set_detect_anomaly(True):
            trained(x, y)

    return Case(step, batches_of(64), trained)


def profiler() -> Case:
    trained = training(mlp(64, *[64] * 20, 1))

    def profiles() -> Generator[
        None, bool, None
    ]:  # which is not put back, since torch's own switch is not either
        wanted = yield
        while True:
            while not wanted:
                wanted = yield
            with torch.profiler.profile(record_shapes=True, with_stack=True):
                while wanted:
                    wanted = yield

    switch = profiles()
    next(switch)

    def step(x: Tensor, y: Tensor) -> None:
        switch.send(True)
        trained(x, y)

    def without(x: Tensor, y: Tensor) -> None:
        switch.send(False)
        trained(x, y)

    return Case(step, batches_of(64), without)


def graph_of_all() -> Case:
    users, items = 6_000, 8_000
    nodes = users + items
    ends = torch.stack(
        [torch.randint(users, (150_000,)), users + torch.randint(items, (150_000,))]
    )
    both = torch.cat([ends, ends.flip(0)], 1)
    graph = torch.sparse_coo_tensor(
        both, torch.full((300_000,), 0.02), (nodes, nodes)
    ).coalesce()
    table = nn.Embedding(nodes, 32)
    optimizer = torch.optim.Adam(table.parameters(), 1e-3)

    def step(user: Tensor, item: Tensor, other: Tensor) -> None:
        optimizer.zero_grad()
        layers = [table.weight]
        for _ in range(3):
            layers.append(torch.sparse.mm(graph, layers[-1]))
        vectors = torch.stack(layers).mean(0)
        difference = (
            vectors[user] * (vectors[users + item] - vectors[users + other])
        ).sum(1)
        (-F.logsigmoid(difference).mean()).backward()
        optimizer.step()

    batches = [
        (
            torch.randint(users, (ROWS,)),
            torch.randint(items, (ROWS,)),
            torch.randint(items, (ROWS,)),
        )
        for _ in range(16)
    ]
    larger = [
        tuple(map(torch.cat, zip(*batches[at : at + 4], strict=True)))
        for at in range(0, 16, 4)
    ]
    return Case(step, batches, step, larger)


def groups() -> Case:
    model = mlp(32, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def trained(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
        def step(x: Tensor, y: Tensor, group: Tensor) -> None:
            optimizer.zero_grad()
            loss(model(x).squeeze(1), y, group).backward()
            optimizer.step()

        return step

    def one_by_one(score: Tensor, y: Tensor, group: Tensor) -> Tensor:
        total = score.new_zeros(())
        for number in range(400):
            mask = (group == number).float()
            total = total + ((score - y).square() * mask).sum() / mask.sum().clamp(
                min=1
            )
        return total / 400

    def at_once(score: Tensor, y: Tensor, group: Tensor) -> Tensor:
        sums = score.new_zeros(400).index_add(0, group, (score - y).square())
        counts = torch.bincount(group, minlength=400).clamp(min=1)
        return (sums / counts).mean()

    batches = [
        (torch.randn(1_024, 32), torch.randn(1_024), torch.randint(400, (1_024,))) for _ in range(16)
    ]  # fmt: skip
    return Case(trained(one_by_one), batches, trained(at_once))


def normalised() -> Case:
    table, top = nn.Embedding(60_000, 32), mlp(32, 32, 1)
    optimizer = torch.optim.SGD([*table.parameters(), *top.parameters()], 0.1)

    def trained(vectors: Callable[[Tensor], Tensor]) -> Step:
        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(top(vectors(x)), y).backward()
            optimizer.step()

        return step

    return Case(
        trained(lambda ids: F.normalize(table.weight, dim=1)[ids]),
        id_batches(60_000),
        trained(lambda ids: F.normalize(table(ids), dim=1)),
    )


FAULTS: dict[str, Fault] = {
    "tokenising in collate_fn": Fault(tokenising, ("loader_rows",)),
    "rows of a pandas frame": Fault(data_frame, ("loader_rows",)),
    "CSV lines parsed in an IterableDataset": Fault(csv_lines, ("loader_rows",)),
    "a callback that sleeps": Fault(callback, ("your_line",)),
    "figures read one by one": Fault(figures_read, ("host_syncs",)),
    "a deep copy of the model in each step": Fault(copied, ("your_line",)),
    "vectors written as JSON in each step": Fault(json_lines, ("your_line",)),
    "a checkpoint every tenth step": Fault(saved, ("your_line",)),
    "the mean of a list of 200,000": Fault(mean_of_list, ("your_line",)),
    "many objects to collect": Fault(collected, ("your_line",)),
    "a softmax over 60,000 items": Fault(all_items, ("your_line",)),
    "64-bit floats": Fault(double, ("your_line",)),
    "anomaly mode": Fault(anomaly, ("your_line",)),
    "a profiler left on": Fault(profiler, ("your_line",)),
    "LightGCN's graph in each batch": Fault(graph_of_all, ("4 times the batch",)),
    "a loop over 400 groups": Fault(groups, ("launches",)),
    "F.normalize of a whole table": Fault(normalised, ("your_line",)),
}
