"""A stack of K networks: each learns what it learns alone, by its own rate, eager and adopted; one that stops stays."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrec_ext.adopt import adopt
from torchrec_ext.networks import Stack

USERS, ITEMS, ROWS, STEPS = 60, 40, 32, 12
RATES = [1e-3, 3e-3, 1e-2]


class NCF(nn.Module):
    """A table that most steps read whole, one of which they read some rows, a bag, and layers."""

    def __init__(self, seed: int, width: int = 8, users: int = USERS) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.user = nn.Embedding(users, 8)
        self.item = nn.Embedding(ITEMS, 8, padding_idx=0)
        self.genre = nn.EmbeddingBag(9, 4, mode="sum")
        self.norm = nn.LayerNorm(20)
        self.mlp = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        genres = torch.stack([item % 9, user % 9], 1)
        found = torch.cat([self.user(user), self.item(item), self.genre(genres)], 1)
        return self.mlp(self.norm(found)).squeeze(1)  # type: ignore[no-any-return]


def loss(network: Any, user: Tensor, item: Tensor, label: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(network(user, item), label)


def batches(steps: int = STEPS) -> Iterator[tuple[Tensor, ...]]:
    draws = torch.Generator().manual_seed(1)
    for _ in range(steps):
        user = torch.randint(USERS, (ROWS,), generator=draws)
        item = torch.randint(ITEMS, (ROWS,), generator=draws)
        yield user, item, (user % 3 == item % 3).float()


# An eps above rounding: a step of Adam is as long for a gradient of 1e-9 as for others.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda groups: torch.optim.Adam(groups, 1e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, 1e-3, weight_decay=0.1, eps=1e-6),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, 1e-3),
    "momentum": lambda groups: torch.optim.SGD(groups, 1e-3, momentum=0.9),
}


def alone(name: str, stop: dict[int, int] | None = None) -> tuple[list[Any], Tensor]:
    """Networks that are trained one after another, and their losses (STEPS, K)."""
    networks = [NCF(seed) for seed in range(len(RATES))]
    losses = []
    for number, (network, rate) in enumerate(zip(networks, RATES, strict=True)):
        optimizer = OPTIMIZERS[name]([{"params": network.parameters(), "lr": rate}])
        own = []
        for step, batch in enumerate(batches()):
            value = loss(network, *batch)
            own.append(float(value.detach()))
            if stop and step >= stop.get(number, STEPS):
                continue
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        losses.append(own)
    return networks, torch.tensor(losses).T


def farthest(networks: list[Any], others: list[Any]) -> float:
    gaps = []
    for one, other in zip(networks, others, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            gaps.append(float((a - b).detach().abs().max()))
    return max(gaps)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_equals_separate_with_rates_of_their_own(name: str) -> None:
    expected, expected_losses = alone(name)
    networks = [NCF(seed) for seed in range(len(RATES))]
    stacked = Stack(networks, loss)
    optimizer = OPTIMIZERS[name](stacked.groups(RATES))
    losses = []
    for batch in batches():
        values = stacked(*batch)
        optimizer.zero_grad()
        values.sum().backward()
        optimizer.step()
        losses.append(values.detach())
    assert float((torch.stack(losses) - expected_losses).abs().max()) < 2e-6
    assert farthest(networks, expected) < 2e-6
    assert networks[0].state_dict().keys() == expected[0].state_dict().keys()


@pytest.mark.slow(minutes=0.5)
@pytest.mark.parametrize("name", ["adam", "adagrad"])
def test_an_adopted_stack_equals_separate_and_a_member_that_stops_stays(
    name: str,
) -> None:
    stop = {1: 5}
    expected, expected_losses = alone(name, stop)
    networks = [NCF(seed) for seed in range(len(RATES))]
    stacked = Stack(networks, loss)
    optimizer = OPTIMIZERS[name](stacked.groups(RATES))

    def total(*batch: Tensor) -> tuple[Tensor, Tensor]:
        values = stacked(*batch)
        return values.sum(), values

    step = adopt(stacked, optimizer, total, compile="require")
    losses = []
    for number, batch in enumerate(batches()):
        if number == 5:
            stacked.stop(optimizer, 1)
            compiled = step.figures()["capture_s"]
            kept = copy.deepcopy(networks[1].state_dict())
        _, values = step(*batch)
        losses.append(values.clone())
    assert step.describe().startswith("captured")
    assert step.figures()["capture_s"] == compiled, "nothing is compiled anew"
    assert float((torch.stack(losses) - expected_losses).abs().max()) < 2e-6
    assert farthest(networks, expected) < 2e-6
    for key, value in networks[1].state_dict().items():
        assert torch.equal(value, kept[key])


def test_dropout_differs_between_members_and_an_evaluation_has_none() -> None:
    networks = [nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1)) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    stacked = Stack(networks, lambda network, x: network(x).sum())
    first, other = stacked(torch.ones(4, 64)).tolist()
    assert first != other
    stacked.eval()
    first, other = stacked(torch.ones(4, 64)).tolist()
    assert first == other


class Scaled(nn.Linear):
    def __init__(self, scale: float) -> None:
        super().__init__(3, 1)
        self.scale = scale


SHARED = nn.Linear(3, 1)


@pytest.mark.parametrize(
    ("networks", "told"),
    [
        (lambda: [NCF(0)], "1 networks: a stack has two or more"),
        (
            lambda: [NCF(0), NCF(1, width=9)],
            "mlp.0.out_features is 9 in network 1, 8 in network 0",
        ),
        (
            lambda: [NCF(0), NCF(1), NCF(2, users=61)],
            "user.num_embeddings is 61 in network 2, 60 in network 0",
        ),
        (
            lambda: [Scaled(1.0), Scaled(2.0)],
            "scale is 2.0 in network 1, 1.0 in network 0",
        ),
        (
            lambda: [nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 1))],
            "the network is Sequential in network 1, Linear in network 0",
        ),
        (lambda: [SHARED, SHARED], "two networks share a weight"),
        (
            lambda: [nn.BatchNorm1d(3), nn.BatchNorm1d(3)],
            "is a BatchNorm1d, whose running statistics a stack would lose",
        ),
        (
            lambda: [nn.Embedding(3, 2, max_norm=1.0) for _ in range(2)],
            "has max_norm=1, which rewrites rows in forward",
        ),
    ],
)
def test_networks_that_are_not_of_one_shape_are_refused(
    networks: Callable[[], list[nn.Module]], told: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as refused:
        Stack(networks(), loss)
    assert len(str(refused.value)) <= 200


def test_a_member_without_a_group_of_its_own_cannot_stop() -> None:
    stacked = Stack([NCF(0), NCF(1)], loss)
    together = torch.optim.Adam(stacked.parameters(), 1e-3)
    with pytest.raises(ValueError, match="member 0 shares a group with others"):
        stacked.stop(together, 0)
    other = torch.optim.Adam(NCF(2).parameters(), 1e-3)
    with pytest.raises(ValueError, match="the optimizer has no group of member 1"):
        stacked.stop(other, 1)
    with pytest.raises(ValueError, match="3 rates for 2 members"):
        stacked.groups(RATES)
