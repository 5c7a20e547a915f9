"""A catalogue in which half of the items are new each day, and four ways to give their ids rows of one table.

    python examples/new_ids_each_day.py [--days 10] [--events 100000] [--picture ids.png]

Each day is first predicted and then trained, by the network and the loop below. The table has 4,000 rows, and 2,000
items are there on each day, 11,000 in ten days. Ids are random 64-bit numbers. The ways:

    dynamic        DynamicEmbeddings: an id gets a row at first sight, and the least frequent one makes room
    hash trick     an id reads row `id % rows`, which it shares with others
    first day's    the ids of the first day have rows, all others read one row for the unknown
    without an end a row for every id that ever comes, which no table has in the end
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from torchrec_ext.ids import Dynamic, DynamicEmbeddings

USERS, ITEMS, ROWS, WIDTH, BATCH = 2_000, 2_000, 4_000, 16, 256
Rows = Callable[[Tensor], Tensor]


class Network(nn.Module):
    """The usual one: an embedding each, their product, and a bias of the item."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item = nn.Embedding(USERS, WIDTH), nn.Embedding(rows, WIDTH)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)
        self.top = nn.Sequential(nn.Linear(3 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Returns (B,) logits."""
        users, items = self.user(user), self.item(item)
        return self.top(torch.cat([users, items, users * items], dim=1)).squeeze(1)  # type: ignore[no-any-return]


def log(days: int, events: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the users, items and clicks of each day."""
    random = torch.Generator().manual_seed(1)
    names = torch.randint(-(2**62), 2**62, (ITEMS * (days + 1) // 2,), generator=random)
    taste, look = (
        torch.randn(USERS, 4, generator=random),
        torch.randn(len(names), 4, generator=random),
    )
    appeal = torch.randn(len(names), generator=random)
    for day in range(days):
        user = torch.randint(USERS, (events,), generator=random)
        # Few items are popular; tomorrow the older half is gone.
        item = (
            torch.rand(events, generator=random) ** 3 * ITEMS
        ).long() * 7919 % ITEMS + day * ITEMS // 2
        chance = torch.sigmoid(
            (taste[user] * look[item]).sum(1) + 2 * appeal[item] - 0.5
        )
        yield user, names[item], (torch.rand(events, generator=random) < chance).float()


def losses(
    days: list[tuple[Tensor, Tensor, Tensor]],
    network: Network,
    rows: Rows,
    *,
    dynamic: bool,
) -> list[float]:
    """Returns the mean log loss of each day, predicted before that day was trained."""
    optimizer = torch.optim.Adagrad(network.parameters(), lr=0.05)
    if dynamic:
        DynamicEmbeddings(network, optimizer, {"item": Dynamic(capacity=ROWS)})
    result = []
    for user, item, click in days:
        network.eval()
        with torch.no_grad():
            result.append(
                float(
                    binary_cross_entropy_with_logits(network(user, rows(item)), click)
                )
            )
        network.train()
        for start in range(0, len(user), BATCH):
            batch = slice(start, start + BATCH)
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(
                network(user[batch], rows(item[batch])), click[batch]
            ).backward()
            optimizer.step()
    return result


def vocabulary(ids: Tensor) -> Rows:
    """Returns the rows 1, 2, ... of known ``ids``, and row 0 for all others."""
    known = ids.unique()

    def rows(item: Tensor) -> Tensor:
        place = torch.searchsorted(known, item).clamp(max=len(known) - 1)
        return torch.where(known[place] == item, place + 1, 0)

    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--days", type=int, default=10)
    parser.add_argument("--events", type=int, default=100_000, help="a day's")
    parser.add_argument(
        "--picture", type=Path, help="a PNG of the log loss by day; needs matplotlib"
    )
    options = parser.parse_args()
    if options.days < 2 or options.events < 1:
        parser.error(
            f"--days {options.days} --events {options.events}: at least 2 days of 1 event"
        )
    days = list(log(options.days, options.events))
    every_id = torch.cat([item for _, item, _ in days])
    by_way = {
        "dynamic": losses(days, Network(ROWS), lambda item: item, dynamic=True),
        "hash trick": losses(
            days, Network(ROWS), lambda item: item % ROWS, dynamic=False
        ),
        "first day's": losses(
            days, Network(ROWS), vocabulary(days[0][1]), dynamic=False
        ),
        "without an end": losses(
            days,
            Network(1 + len(every_id.unique())),
            vocabulary(every_id),
            dynamic=False,
        ),
    }
    print("log loss of each day, before it is trained")
    for way, values in by_way.items():
        mean = sum(values[1:]) / (len(values) - 1)
        print(
            f"{way:15}",
            " ".join(f"{value:.4f}" for value in values),
            f" mean from the second day on {mean:.4f}",
        )
    if options.picture:
        draw(by_way, options.picture)


def draw(by_way: dict[str, list[float]], path: Path) -> None:
    """Draws the log loss of each way by day, from the second on."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    means = {}
    for way, values in by_way.items():
        days = range(2, len(values) + 1)
        is_limit = way == "without an end"
        axes.plot(
            days,
            values[1:],
            label=way,
            linestyle="--" if is_limit else "-",
            color="0.5" if is_limit else None,
        )
        means[way] = sum(values[1:]) / len(days)
    axes.set(xlabel="day", ylabel="log loss, before the day is trained")
    ways = ", ".join(f"{way} {mean:.3f}" for way, mean in means.items())
    axes.set_title(
        f"Half of the items are new each day; {ROWS:,} rows\nmean log loss: {ways}",
        fontsize="medium",
    )
    figure.legend(loc="outside lower center", ncols=len(by_way))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
