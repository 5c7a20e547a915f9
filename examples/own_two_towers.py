"""A two-tower network in plain PyTorch, from its training to a ranking: adopt(), export(), Scorer.

python examples/own_two_towers.py [FOLDER [STEPS]]; the bundle is written to FOLDER.

The network, the optimizer and the loop are a user's. adopt() makes one compiled function of a step once it pays.
export() writes the towers apart with every item's vector stored. A Scorer ranks the catalogue without the item tower. A
user clicks items of the same kind, one of eight, so the ten best items of a user are known.
"""

import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor, nn

from torchrec_ext import Bundle, Scorer, adopt, export
from torchrec_ext.retrieval import (
    Catalogue,
    NamedUsers,
    RecommendRequest,
)

USERS, ITEMS, KINDS, ROWS = 800, 200, 8, 1_024


def tower(rows: int) -> nn.Sequential:
    """Returns an embedding and two layers, for one column of ids."""
    return nn.Sequential(
        nn.Embedding(rows, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)
    )


class TwoTowers(nn.Module):
    """A user's id and an item's to the logit of a click, (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = tower(USERS), tower(ITEMS)
        self.top = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Returns (B,) logits of (B,) ids."""
        users, items = self.user(user), self.item(item)
        return self.top(torch.cat([users, items, users * items], dim=1)).squeeze(1)


def train(model: TwoTowers, steps: int) -> float:
    """Trains the model, and returns the last loss."""
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = adopt(
        model, optimizer, lambda user, item, click: criterion(model(user, item), click)
    )
    for _ in range(steps):
        user, item = torch.randint(USERS, (ROWS,)), torch.randint(ITEMS, (ROWS,))
        loss, _ = step(user, item, (user % KINDS == item % KINDS).float())
    return float(loss)


def write_bundle(model: TwoTowers, folder: Path) -> None:
    """Writes the trained model with its catalogue and its users."""
    users, items = torch.arange(USERS), torch.arange(ITEMS)
    export(
        model,
        folder,
        catalogue=Catalogue(
            ids=items.numpy(),
            features=pa.table({"item": items.numpy()}),
            titles=[f"item {item} of kind {item % KINDS}" for item in items.tolist()],
        ),
        users=NamedUsers(
            key="user",
            ids=users.numpy(),
            features=pa.table({"user": users.numpy()}),
            unknown={"user": 0},
        ),
        overwrite=True,
    )


def main(folder: Path, steps: int = 1_000) -> None:
    """Trains, exports and ranks."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = TwoTowers()
    print(f"loss {train(model, steps):.4f}")
    model.eval()
    write_bundle(model, folder)
    scorer = Scorer(Bundle.load(folder))
    best = scorer.recommend(RecommendRequest(user={"user": 3}, k=10, titles=True))
    print("user 3, of kind 3:", *best.titles, sep="\n  ")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(
            Path(sys.argv[1] if len(sys.argv) > 1 else temporary) / "bundle",
            *map(int, sys.argv[2:]),
        )
