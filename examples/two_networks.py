"""Two networks that learn at the same time, alone and from each other: train_stack() and Codistillation.

python examples/two_networks.py [EPOCHS]

Their tables lie together and their layers are batched, so that one step trains both, each by its own learning rate. A
user clicks items of the same kind, and a fifth of the labels is wrong: no network has a log loss below .500.
"""

import sys
from collections.abc import Iterator

import torch
from torch import nn
from torchrec import EmbeddingBagConfig

from torchrec_ext import OptimizerConfig, TowerBatch, two_tower
from torchrec_ext.networks import Codistillation, Member, train_stack
from torchrec_ext.schema import BatchSchema, Jagged
from torchrec_ext.train import TrainConfig

USERS, ITEMS, KINDS, ROWS, STEPS = 500, 200, 4, 512, 100
RATES = {"calm": 0.05, "bold": 0.2}


class Clicks:
    """A loader: batches of a user, an item and a click, the same for both networks."""

    def __init__(self, schema: BatchSchema) -> None:
        self.schema, self.epoch = schema, 0

    def __len__(self) -> int:
        return STEPS

    def set_epoch(self, epoch: int) -> None:
        """Chooses the rows of an epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[TowerBatch]:
        draws = torch.Generator().manual_seed(self.epoch)
        for _ in range(STEPS):
            user = torch.randint(USERS, (ROWS,), generator=draws)
            item = torch.randint(ITEMS, (ROWS,), generator=draws)
            is_wrong = torch.rand(ROWS, generator=draws) < 0.2
            clicked = (user % KINDS == item % KINDS) ^ is_wrong
            yield self.schema.assemble(
                {"user": Jagged(user), "item": Jagged(item)}, labels=clicked.float()
            )


def network(seed: int) -> nn.Module:
    """Returns one of the networks."""
    torch.manual_seed(seed)
    user, item = (
        EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=rows, embedding_dim=16
        )
        for name, rows in (("user", USERS), ("item", ITEMS))
    )
    return two_tower(
        [user],
        [item],
        tower_widths=(32, 16),
        interaction="dot",
        device=torch.device("cpu"),
    )


def log_losses(epochs: int, codistillation: Codistillation | None) -> dict[str, float]:
    """Trains both networks, and returns the log loss of each on rows that neither has seen."""
    networks = {name: network(seed) for seed, name in enumerate(RATES)}
    rows = Clicks(networks["calm"].schema())  # type: ignore[operator]
    members = {}
    for name, each in networks.items():
        optimizer = OptimizerConfig(
            tables="adagrad", tables_lr=RATES[name], dense_lr=3e-3
        )
        train = TrainConfig(epochs=epochs, log_every=STEPS, compile="off")
        members[name] = Member(
            network=each, loader=rows, optimizer=optimizer, train=train
        )
    train_stack(
        members, **({"codistillation": codistillation} if codistillation else {})
    )
    rows.set_epoch(1_000)
    unseen = next(iter(rows))
    return {
        name: round(each.eval()(unseen)[0].item(), 4) for name, each in networks.items()
    }


def main(epochs: int = 4) -> None:
    """Trains the pair twice."""
    torch.set_num_threads(1)
    print("log loss, alone          ", log_losses(epochs, None))
    teaching = Codistillation(weight=1.0, burn_in=STEPS, every=25)
    print("log loss, from each other", log_losses(epochs, teaching))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
