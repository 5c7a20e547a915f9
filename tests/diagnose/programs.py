"""Small training programs in plain PyTorch that tests diagnose."""

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

WIDTH, ROWS = 6, 160


class Clock:
    """A clock that programs move."""

    note = ""

    def __init__(self) -> None:
        self.now = self.computed = 0.0

    def __call__(self) -> float:
        return self.now

    def __enter__(self) -> "Clock":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def compute(self, milliseconds: float) -> None:
        self.now += milliseconds * 1e-3
        self.computed += milliseconds * 1e-3

    def sleep(self, milliseconds: float) -> None:
        self.now += milliseconds * 1e-3


class Drawn(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Rows that draw from every generator that a Dataset may use, and count how often they were read."""

    def __init__(self) -> None:
        self.x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        self.torch_generator = torch.Generator().manual_seed(2)
        self.numpy_generator = np.random.default_rng(3)
        self.held = {"random": random.Random(4), "legacy": np.random.RandomState(5)}
        self.reads = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        self.reads += 1
        draws = (
            float(torch.rand((), generator=self.torch_generator)),
            float(torch.rand(())),
            float(self.numpy_generator.random()),
            float(np.random.random()),
            self.held["random"].random(),
            float(self.held["legacy"].random()),
            random.random(),
        )
        ids = torch.tensor([row, int(sum(draws) * 50)])
        return ids, self.x[row] + sum(draws), torch.tensor([float(row % 2)])


class Everything(nn.Module):
    """Dropout, BatchNorm, a table, an attribute that forward counts up, and a list that it appends to."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2_000, 4)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH + 8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.calls, self.history, self.average = 0, [0.0], torch.zeros(1)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        made = self.layers(torch.cat([self.table(ids).flatten(1), x], 1))
        self.history.append(float(self.calls))
        self.average = 0.9 * self.average + 0.1 * made.detach().mean()
        return made


class Training(NamedTuple):
    """A program: its parts, and its own loop."""

    model: Everything
    optimizer: torch.optim.Optimizer
    schedule: Any
    loader: DataLoader[Any]
    loss: Callable[..., Tensor]
    step: Callable[..., None]
    losses: list[float]


def training(**more: Any) -> Training:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model, loss_fn = Everything(), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    data = Drawn()
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(6))
    loader = DataLoader(
        data, 16, sampler=sampler, generator=torch.Generator().manual_seed(7), **more
    )
    losses: list[float] = []
    count = 0

    def loss(ids: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(model(ids, x), y)

    def step(ids: Tensor, x: Tensor, y: Tensor) -> None:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        value = loss(ids, x, y)
        value.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(value.detach()) + count)

    return Training(model, optimizer, schedule, loader, loss, step, losses)


def trained(
    made: Training,
    diagnose: Callable[[Training], object],
    when: tuple[int, ...],
    steps: int = 26,
) -> None:
    """Trains, and diagnoses before the steps of these numbers."""

    def batches() -> Iterator[Any]:
        while True:
            yield from made.loader

    for number, batch in enumerate(batches()):
        if number in when:
            diagnose(made)
        if number == steps:
            return
        made.step(*batch)


def mlp(
    rows: int = 64, width: int = 8
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Tensor], list[Any]]:
    model = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))
    loss_fn = nn.MSELoss()
    batches = [(torch.randn(rows, width), torch.randn(rows, 1)) for _ in range(8)]
    return (
        model,
        torch.optim.SGD(model.parameters(), 1e-2),
        lambda x, y: loss_fn(model(x), y),
        batches,
    )
