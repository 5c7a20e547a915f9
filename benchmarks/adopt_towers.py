"""Rows `two-towers` of adopt.py: two sub-networks of a user's own module at the same time, by adopt_towers().

A plain nn.Module: a user network over 60 numbers and an item network over 40, each 512-256-64, and a small network on
top, 64-1; Adam and binary cross entropy, plain torch. All sides run in turn in one pair of processes of one thread:

    one process     the user's loop on one rank, the other rank idle
    two of them     the user's loop on both ranks at once, which never talk: the ceiling
    two-towers      adopt_towers() with {"user": 0, "item": 1}, the batch on both ranks; each rank's part captured
    ... eager       the same with compile="off"
    plain DDP       the user's loop with the model in DistributedDataParallel, half of the batch on each rank
"""

import statistics
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from typing import Any

import torch
import torch.distributed as dist
from harness import Options, Row, in_turn, on_ranks, rates, row, slowest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchrec_ext.adopt.towers.towers import adopt_towers
from torchrec_ext.distributed.runtime import Runtime

PROFILE, CONTENT, WIDTHS, TOP = 60, 40, (512, 256, 64), 64
# Rows of a step over all ranks, and how many times one process's rows a second are
# asked for.
SIZES = {4096: 1.7, 256: 1.3}


def mlp(*widths: int) -> nn.Sequential:
    return nn.Sequential(
        *(layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU()))
    )


class TwoTowers(nn.Module):
    """The user's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = mlp(PROFILE, *WIDTHS), mlp(CONTENT, *WIDTHS)
        self.top = nn.Sequential(mlp(2 * WIDTHS[-1], TOP), nn.Linear(TOP, 1))

    def forward(self, profile: Tensor, content: Tensor) -> Tensor:
        """(B,) logits."""
        return self.top(torch.cat([self.user(profile), self.item(content)], 1)).squeeze(
            1
        )  # type: ignore[no-any-return]


def script() -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Tensor]]:
    """The user's model, optimizer and loss, equal in every process."""
    torch.manual_seed(0)
    model, loss_fn = TwoTowers(), nn.BCEWithLogitsLoss()

    def loss(profile: Tensor, content: Tensor, label: Tensor) -> Tensor:
        return loss_fn(model(profile, content), label)  # type: ignore[no-any-return]

    return model, torch.optim.Adam(model.parameters(), lr=1e-3), loss


def batches(size: int) -> list[tuple[Tensor, ...]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, PROFILE, generator=draw),
            torch.randn(size, CONTENT, generator=draw),
            torch.rand(size, generator=draw).round(),
        )
        for _ in range(8)
    ]


def loop(
    optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], given: list[Any]
) -> Callable[[], None]:
    """The user's four lines."""
    feed = cycle(given)

    def step() -> None:
        optimizer.zero_grad()
        loss(*next(feed)).backward()
        optimizer.step()

    return step


def measured(runtime: Runtime, options: Options, size: int) -> dict[str, list[float]]:
    given = batches(size)
    _, optimizer, loss = script()
    plain = loop(optimizer, loss, given)
    model, optimizer, loss = script()
    feed = cycle(given)
    towers = {"user": 0, "item": 1}
    apart = adopt_towers(
        model, optimizer, loss, runtime, towers, given[0], compile="require"
    )
    model, optimizer, loss = script()
    eager = adopt_towers(
        model, optimizer, loss, runtime, towers, given[0], compile="off"
    )
    model, optimizer, _ = script()
    ddp, loss_fn = DistributedDataParallel(model), nn.BCEWithLogitsLoss()
    half = slice(runtime.rank * size // 2, (runtime.rank + 1) * size // 2)
    halves = [tuple(column[half] for column in batch) for batch in given]
    sides: dict[str, Callable[[], object]] = {
        "one process": plain if runtime.is_main else lambda: None,
        "two of them": plain,
        "two-towers": lambda: apart(*next(feed)),
        "two-towers, eager": lambda: eager(*next(feed)),
        "plain DDP": loop(optimizer, lambda u, i, y: loss_fn(ddp(u, i), y), halves),
    }
    inner = 4 if options.quick else max(8, 32_768 // size)
    return in_turn(sides, options.turns, inner, before=dist.barrier)


def rows(options: Options) -> Iterator[Row]:
    """Rows per second over both ranks."""
    for size, required in SIZES.items():
        seconds = slowest(on_ranks(measured, 2, options, size))
        one = rates(size, seconds["one process"])
        pairs = zip(seconds["one process"], seconds["two of them"], strict=True)
        ceiling = statistics.median(2 * alone / together for alone, together in pairs)
        for name, side, asked in (
            ("two-towers", "two-towers", required),
            ("two-towers, eager", "two-towers, eager", None),
            ("two-towers, plain DDP instead", "plain DDP", None),
        ):
            yield row(
                name if size == max(SIZES) else f"{name}, batch {size}",
                rates(size, seconds[side]),
                "rows/s",
                baseline=one,
                better="more",
                required=asked,
                ceiling=ceiling,
                machine="cores",
            )
