"""On the loader's batches, padding included, the mean of the ranks' losses is one rank's loss of the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.loader.test_loader import ITEMS, loader_of
from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.losses import (
    bce,
    bpr,
    sampled_softmax,
)

SIZE = 21  # with 8 positives a step, the last one has 5


def ids(batch: TowerBatch, name: str) -> Tensor:
    """(B,) ids, 0 for padding."""
    return batch.sparse[name].to_padded_dense(1)[:, 0].long()


def tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(rows, 4, generator=generator, dtype=torch.float64)
        for rows in (SIZE, ITEMS + 1)
    )  # type: ignore[return-value]


def of_groups(name: str, rank: int, world_size: int) -> list[float]:
    users, items = tables()
    functions: dict[str, Any] = {
        "sampled_softmax": functools.partial(
            sampled_softmax, negatives=3, temperature=0.5
        ),
        "bpr": functools.partial(bpr, negatives=3),
        "bce": bce,
    }
    losses = []
    for batch in loader_of(
        SIZE, rank, world_size, negatives=3, sampling="popularity", weight="weight"
    ):
        logits = (users[ids(batch, "user_id")] * items[ids(batch, "item_id")]).sum(
            dim=1
        )
        made = functions[name](logits if name != "bce" else logits.float(), batch)
        losses.append(float(made))
    return losses


@pytest.mark.unit
@pytest.mark.parametrize(
    "name",
    [
        "sampled_softmax",
        "bpr",
        "bce",
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_of_rows(name: str, world_size: int) -> None:
    ranks = [of_groups(name, rank, world_size) for rank in range(world_size)]
    whole = of_groups(name, 0, 1)
    assert [
        sum(step) / world_size for step in zip(*ranks, strict=True)
    ] == pytest.approx(whole, rel=1e-6)
    assert len(whole) == 3
    assert len(set(whole)) == 3
