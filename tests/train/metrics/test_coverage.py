"""Catalogue coverage over blocks and ranks, by hand."""

import pytest
import torch

from tests.contracts import run_ranks
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.metrics import Coverage

LISTS = torch.tensor(
    [
        [-torch.inf, 5.0, 4.0, 1.0, 0.0],
        [-torch.inf, 5.0, 1.0, 0.0, 4.0],
        [-torch.inf, 1.0, -torch.inf, 0.0, -torch.inf],
    ]
)


def covered(runtime: Runtime) -> dict[str, float]:
    made = Coverage(5, k=2)
    for row in range(runtime.rank, 3, runtime.world_size):
        made.update(LISTS[row : row + 1])
    made.compute(runtime)  # asking does not change the answer
    return made.compute(runtime)


def test_what_any_rank_showed_counts_once() -> None:
    for world_size in (1, 2):
        assert run_ranks(covered, world_size) == [{"coverage@2": 1.0}] * world_size


@pytest.mark.unit
def test_by_hand(device: torch.device) -> None:
    made = Coverage(5, k=2)
    assert made.compute(Runtime()) == {"coverage@2": 0.0}
    made.update(LISTS[:1].to(device))
    assert made.compute(Runtime()) == {"coverage@2": 0.5}
    made.update(torch.full((1, 5), -torch.inf, device=device))
    assert made.compute(Runtime()) == {"coverage@2": 0.5}, (
        "what is left out is not shown"
    )
    whole = Coverage(5, k=10, not_items=(0, 3))
    whole.update(LISTS[:1])
    assert whole.compute(Runtime()) == {"coverage@10": 1.0}, (
        "a list may be longer than the catalogue"
    )


@pytest.mark.unit
def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"num_items=5, k=0: both must be 1 or more"):
        Coverage(5, k=0)
    with pytest.raises(ValueError, match=r"scores: 5 columns, must be num_items=6"):
        Coverage(6).update(LISTS)
