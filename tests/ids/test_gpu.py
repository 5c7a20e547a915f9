"""Dynamic ids on a GPU: the map equals a dictionary."""

from __future__ import annotations

import pytest
import torch

from tests.ids.test_dynamic import POLICIES, equals_a_dictionary

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:table 'users'|table 'items'")
@pytest.mark.parametrize("name", ["second sight", "fewer rows than a batch has ids"])
def test_the_map_on_the_gpu_equals_a_dictionary(name: str) -> None:
    counts = equals_a_dictionary(
        *POLICIES[name], batches=20, size=240, device=torch.device("cuda")
    )
    assert counts["admitted"] > 0
    assert counts["evicted"] > 0
