"""Two networks that learn at the same time, alone and from each other: one loss over one ModuleList.

python examples/two_networks.py [EPOCHS]

A user clicks items of the same kind, and a fifth of the labels is wrong: no network has a log loss below .500. An epoch
has the same rows each time, so that a network alone learns wrong labels by heart. Both train in one step, each by its
own learning rate.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from torchrec_ext import adopt

USERS, ITEMS, KINDS, ROWS, STEPS = 500, 200, 4, 512, 100
RATES = {"calm": 1e-2, "bold": 2e-2}


class Network(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.user = nn.Embedding(USERS, 16)
        self.item = nn.Embedding(ITEMS, 16)
        self.bias = nn.Parameter(torch.zeros(()))
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(1) + self.bias


def rows(seed):
    draws = torch.Generator().manual_seed(seed)
    user = torch.randint(USERS, (ROWS,), generator=draws)
    item = torch.randint(ITEMS, (ROWS,), generator=draws)
    is_wrong = torch.rand(ROWS, generator=draws) < 0.2
    clicked = (user % KINDS == item % KINDS) ^ is_wrong
    return user, item, clicked.float()


def log_losses(epochs, weight):
    """Trains both networks, and returns the log loss of each on rows that neither has seen."""
    networks = nn.ModuleList(Network(seed) for seed in range(len(RATES)))
    groups = [
        {"params": network.parameters(), "lr": rate}
        for network, rate in zip(networks, RATES.values(), strict=True)
    ]

    def loss(user, item, label):
        calm, bold = (network(user, item) for network in networks)
        total = bce(calm, label) + bce(bold, label)
        # Each is also drawn towards the other's prediction, which gets no gradient by this term.
        return total + weight * (
            bce(calm, bold.detach().sigmoid()) + bce(bold, calm.detach().sigmoid())
        )

    step = adopt(networks, torch.optim.Adam(groups), loss)
    for number in range(epochs * STEPS):
        step(*rows(number % STEPS))
    user, item, label = rows(1_000_000)
    with torch.no_grad():
        return {
            name: round(bce(network(user, item), label).item(), 4)
            for name, network in zip(RATES, networks, strict=True)
        }


def main(epochs=6):
    torch.set_num_threads(1)
    print("log loss, alone          ", log_losses(epochs, 0.0))
    print("log loss, from each other", log_losses(epochs, 1.0))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
