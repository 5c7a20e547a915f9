"""examples/ncf_script.py with its loop adopted; model, Dataset, optimizer and loss are unchanged.

python examples/ncf_adopted.py [POSITIVES] [EPOCHS]
"""

import collections
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from torchrec_ext.adopt import Rows, Uniform, adopt

USERS, ITEMS, CONTEXT, NEGATIVES = 654, 1127, 21, 4


class Interactions(Dataset):
    def __init__(self, positives):
        rng = np.random.default_rng(0)
        self.user = torch.from_numpy(rng.integers(0, USERS, positives))
        self.item = torch.from_numpy(
            (ITEMS * rng.random(positives) ** 2.5).astype(np.int64)
        )
        self.context = torch.from_numpy(
            (rng.random((positives, CONTEXT)) < 0.3).astype(np.float32)
        )
        self.known = collections.defaultdict(set)
        for user, item in zip(self.user.tolist(), self.item.tolist(), strict=True):
            self.known[user].add(item)

    def __len__(self):
        return len(self.user)

    def __getitem__(self, row):
        user, items = int(self.user[row]), [int(self.item[row])]
        while len(items) < 1 + NEGATIVES:
            item = np.random.randint(0, ITEMS)
            if item not in self.known[user]:
                items.append(item)
        labels = torch.tensor([1.0] + [0.0] * NEGATIVES)
        return (
            torch.full((5,), user),
            torch.tensor(items),
            self.context[row].repeat(5, 1),
            labels,
        )


class ContextualNCF(nn.Module):
    def __init__(self):
        super().__init__()
        self.gmf_user, self.gmf_item = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.mlp_user, self.mlp_item = nn.Embedding(USERS, 32), nn.Embedding(ITEMS, 32)
        self.mlp = nn.Sequential(
            nn.Linear(64 + CONTEXT, 32),
            nn.ReLU(),
            nn.Linear(32, 16),
            nn.ReLU(),
            nn.Linear(16, 8),
        )
        self.head = nn.Linear(16, 1)

    def forward(self, user, item, context):
        gmf = self.gmf_user(user) * self.gmf_item(item)
        mlp = self.mlp(
            torch.cat([self.mlp_user(user), self.mlp_item(item), context], 1)
        )
        return self.head(torch.cat([gmf, mlp], 1)).squeeze(1)


def collate(rows):
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def main(positives=83_731, epochs=30):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data, model, loss_fn = (
        Interactions(positives),
        ContextualNCF(),
        nn.BCEWithLogitsLoss(),
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loader = DataLoader(data, batch_size=256, shuffle=True, collate_fn=collate)
    rows = Rows(
        {"user": data.user, "item": data.item, "context": data.context},
        256,
        negatives=Uniform(ITEMS, draws=NEGATIVES, exclude=("user", "item")),
    )
    print(rows.check(loader))  # once: all rows, in the time of an epoch of the loader
    step = adopt(
        model,
        optimizer,
        lambda *batch: loss_fn(model(*batch[:3]), batch[3]),
        compile="require",
    )
    for epoch in range(epochs):
        total = 0.0
        for loss in step.epoch(rows):
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(rows):.4f}")
    print(step.describe())
    torch.save(model.state_dict(), "ncf.pt")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
