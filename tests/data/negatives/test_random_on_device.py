"""Random numbers are on a device what they are in numpy."""

import numpy as np
import pytest
import torch

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
