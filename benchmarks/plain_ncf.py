"""What users write: Contextual NCF in plain PyTorch, a Dataset that draws 4 negatives in __getitem__, dense Adam.

    python benchmarks/plain_ncf.py --shape small|full [--threads 1] [--fused] [--seconds 4]

small: 654 users x 1,127 items, 75 k parameters; full: 250,000 users x 61,261 items, 12.45 M parameters, 3.6 million
positives. It imports nothing of torchrec_ext. Last line: one JSON object with `instances_per_s`.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

NEGATIVES, BATCH, CONTEXT = 4, 256, 21
INSTANCES = BATCH * (1 + NEGATIVES)  # of a step


class Shape(NamedTuple):
    """Users, items and positives."""

    users: int
    items: int
    rows: int


class Positives(NamedTuple):
    """User, item (from 1) and context of every positive: (N,), (N,) int64 and (N, 21) float32."""

    user: np.ndarray
    item: np.ndarray
    context: np.ndarray


SHAPES = {"small": Shape(654, 1_127, 83_731), "full": Shape(250_000, 61_261, 3_647_614)}


def positives(shape):
    """Draws users uniformly, and items of which few are popular."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, shape.users, shape.rows)
    item = (
        np.minimum(
            (shape.items * rng.random(shape.rows) ** 2.5).astype(np.int64),
            shape.items - 1,
        )
        + 1
    )
    return Positives(
        user,
        item,
        (rng.random((shape.rows, CONTEXT), dtype=np.float32) < 0.3).astype(np.float32),
    )


class Interactions(Dataset[tuple[Tensor, ...]]):
    """A set per user, a loop per row."""

    def __init__(self, items, rows):
        self.items = items
        self.user, self.item, self.context = map(torch.from_numpy, rows)
        self.known = collections.defaultdict(set)
        for user, item in zip(self.user.tolist(), self.item.tolist(), strict=True):
            self.known[user].add(item)

    def __len__(self):
        return len(self.user)

    def __getitem__(self, row):
        user, chosen = int(self.user[row]), [int(self.item[row])]
        known = self.known[user]
        while len(chosen) < 1 + NEGATIVES:
            item = np.random.randint(1, self.items + 1)
            if item not in known:
                chosen.append(item)
        k = 1 + NEGATIVES
        labels = torch.tensor([1.0] + [0.0] * NEGATIVES)
        return (
            torch.full((k,), user),
            torch.tensor(chosen),
            self.context[row].repeat(k, 1),
            labels,
        )


def concatenated(rows):
    """Joins rows to a batch."""
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def drawn(items, rows):
    """Yields batches of users, items, contexts and labels, epoch after epoch."""
    data = Interactions(items, rows)
    while True:
        yield from DataLoader(
            data, BATCH, shuffle=True, drop_last=True, collate_fn=concatenated
        )


class PlainNCF(nn.Module):
    """The network as published: nn.Embedding and nn.Linear."""

    def __init__(self, users, items):
        super().__init__()
        self.gmf_user = nn.Embedding(users, 8)
        self.gmf_item = nn.Embedding(items + 1, 8)
        self.mlp_user = nn.Embedding(users, 32)
        self.mlp_item = nn.Embedding(items + 1, 32)
        layers = [
            nn.Linear(64 + CONTEXT, 32),
            nn.ReLU(),
            nn.Linear(32, 16),
            nn.ReLU(),
            nn.Linear(16, 8),
            nn.ReLU(),
        ]
        self.mlp, self.head = nn.Sequential(*layers), nn.Linear(16, 1)

    def forward(self, user, item, context):
        """Returns (B,) logits."""
        gmf = self.gmf_user(user) * self.gmf_item(item)
        mlp = self.mlp(
            torch.cat([self.mlp_user(user), self.mlp_item(item), context], dim=1)
        )
        return self.head(torch.cat([gmf, mlp], dim=1)).squeeze(1)  # type: ignore[no-any-return]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fused", action="store_true", help="Adam in one kernel")
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    torch.manual_seed(0)
    model, loss = PlainNCF(shape.users, shape.items), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=options.fused)
    count, start = -3 * INSTANCES, 0.0
    for user, item, context, label in drawn(shape.items, positives(shape)):
        if count == 0:
            start = time.perf_counter()
        elif count > 0 and time.perf_counter() - start > options.seconds:
            break
        optimizer.zero_grad()
        loss(model(user, item, context), label).backward()
        optimizer.step()
        count += INSTANCES
    print(json.dumps({"instances_per_s": round(count / (time.perf_counter() - start))}))


if __name__ == "__main__":
    main()
