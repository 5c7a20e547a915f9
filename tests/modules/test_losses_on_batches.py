"""On the loader's batches, padding included, the mean of the ranks' losses is the loss of one rank with the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.contracts import run_ranks
from tests.data.test_loader import ITEMS, loader_of
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.known_pairs import KnownPairs
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.modules.in_batch import in_batch_negatives
from torchrec_ext.modules.losses import in_batch_softmax, sampled_softmax

SIZE = 21  # with 8 positives a step, the last one has 5


def ids(batch: TowerBatch, name: str) -> Tensor:
    """(B,) ids, 0 for padding."""
    return batch.sparse[name].to_padded_dense(1)[:, 0].long()


def tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in (SIZE, ITEMS + 1))  # type: ignore[return-value]


def sampled(rank: int, world_size: int) -> list[float]:
    users, items = tables()
    losses = []
    for batch in loader_of(SIZE, rank, world_size, negatives=3, sampling="popularity", weight="weight"):
        logits = (users[ids(batch, "user_id")] * items[ids(batch, "item_id")]).sum(dim=1)
        losses.append(float(sampled_softmax(logits, batch, negatives=3, temperature=0.5)))
    return losses


@pytest.mark.unit
@pytest.mark.parametrize("world_size", [2, 3])
def test_sampled_softmax(world_size: int) -> None:
    ranks = [sampled(rank, world_size) for rank in range(world_size)]
    assert [sum(step) / world_size for step in zip(*ranks, strict=True)] == pytest.approx(sampled(0, 1), rel=1e-6)


def in_batch(runtime: Runtime) -> list[float]:
    users, items = tables()
    loader = loader_of(SIZE, runtime.rank, runtime.world_size, negatives=0, weight="weight")
    known = KnownPairs(ITEMS, torch.arange(SIZE).numpy() // 3, torch.arange(SIZE).numpy() % ITEMS + 1)
    losses = []
    for batch in loader:
        who, what = ids(batch, "user_id"), ids(batch, "item_id")

        def is_known(drawn: Tensor, who: Tensor = who) -> Tensor:
            return torch.from_numpy(known.contains(who.numpy()[:, None], drawn.numpy()))

        negatives = in_batch_negatives(items[what], what, log_q=-what.double(), is_known=is_known)
        loss = in_batch_softmax(users[who], negatives, weights=batch.weights, total_weight=batch.total_weight, temperature=0.5)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("world_size", [2, 3])
def test_in_batch_softmax(world_size: int) -> None:
    expected = in_batch(Runtime(rank=0, local_rank=0, world_size=1, local_world_size=1))
    ranks = run_ranks(in_batch, world_size)
    assert [sum(step) / world_size for step in zip(*ranks, strict=True)] == pytest.approx(expected, rel=1e-6)
