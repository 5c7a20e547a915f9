"""The items that users have taken, and random numbers, are on a device what they are in numpy."""

import numpy as np
import pytest
import torch

from torchrec_ext.data.negatives import known_items as module
from torchrec_ext.data.negatives.known_pairs import KnownPairs
from torchrec_ext.data.negatives.random import device_uniform, stream, uniform

pytestmark = pytest.mark.unit


def test_the_random_numbers_are_the_same(device: torch.device) -> None:
    positions = np.array([0, 1, 5, 1 << 40, (1 << 62) + 3])[:, None]
    draws = np.arange(1000)
    for seed in (0, 1, -1, 1 << 70, (1 << 63) + 5):
        key = stream(seed, 3, 1)
        made = device_uniform(
            key,
            torch.from_numpy(positions).to(device),
            torch.from_numpy(draws).to(device),
        )
        assert np.array_equal(made.cpu().numpy(), uniform(key, positions, draws))


@pytest.mark.parametrize("most_bits", [1 << 28, 1])
def test_known_items_of_a_batch_are_those_of_the_pairs(
    most_bits: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(module, "MOST_BITS", most_bits)
    rng = np.random.default_rng(1)
    known = KnownPairs(37, rng.integers(9, size=100), rng.integers(1, 38, size=100))
    users = rng.integers(-1, 12, size=20)
    items = np.r_[rng.integers(0, 38, size=40), 5, 5, 99]
    made = module.KnownItems(known).to(device)
    assert not made.state_dict()
    found = made(torch.from_numpy(users).to(device), torch.from_numpy(items).to(device))
    assert np.array_equal(
        found.cpu().numpy(),
        known.contains(users[:, None], np.where(items < 38, items, 0)),
    )
    nobody = module.KnownItems(KnownPairs(37, users[:0], users[:0])).to(device)
    assert not nobody(
        torch.arange(3, device=device), torch.arange(4, device=device)
    ).any()
