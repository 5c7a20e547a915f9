"""TorchRec's DLRM, unchanged, learns under adopt() what its own loop learns."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from torchrec_ext.adopt import CannotAdopt, adopt
from torchrec_ext.capture import executors

pytestmark = pytest.mark.slow
USERS, ITEMS, B, STEPS, D = 20_000, 10_000, 256, 12, 16
Batch = tuple[Tensor, ...]


def dlrm(
    length_per_key: list[int] | None,
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Tensor], list[Batch]]:
    """A model, its optimizer, its loss and batches."""
    torch.manual_seed(0)
    sizes = {"user_id": USERS, "item_id": ITEMS}
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=D, num_embeddings=size, feature_names=[name]
        )
        for name, size in sizes.items()
    ]
    model = DLRM(EmbeddingBagCollection(tables=tables), 4, [8, D], [8, 1])
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(size, (STEPS, B), generator=draw) for size in sizes.values()]
    dense = torch.rand(STEPS, B, 4, generator=draw)
    labels = torch.randint(2, (STEPS, B), generator=draw).float()

    def loss(dense: Tensor, user: Tensor, item: Tensor, label: Tensor) -> Tensor:
        ones = torch.ones(2 * B, dtype=torch.int32)
        lists = KeyedJaggedTensor(
            list(sizes),
            torch.cat([user, item]),
            lengths=ones,
            length_per_key=length_per_key,
        )
        logits = model(dense, lists).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, label)

    batches = list(zip(dense, *ids, labels, strict=True))
    # DLRM's sparse gradients are refused by torch's Adam.
    return model, torch.optim.SGD(model.parameters(), 1e-3), loss, batches


def test_torchrecs_dlrm_learns_what_its_own_loop_learns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executors, "compile_graph", lambda graph, examples: graph)
    model, optimizer, loss, batches = dlrm([B, B])
    own = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(*batch)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        own.append(float(value.detach()))
    other, optimizer, loss, batches = dlrm([B, B])
    step = adopt(other, optimizer, loss, compile="require")
    losses = [float(step(*batch)[0]) for batch in batches]
    assert losses == pytest.approx(own, abs=2e-5)
    assert step.describe().startswith("captured since step 3")
    assert "row by row" in step.describe()
    torch.testing.assert_close(
        other.state_dict(), model.state_dict(), rtol=0, atol=3e-3
    )


def test_a_jagged_tensor_that_must_ask_for_its_numbers_of_ids_is_refused_with_the_remedy() -> (
    None
):
    model, optimizer, loss, batches = dlrm(None)
    step = adopt(model, optimizer, loss, compile="require")
    with pytest.raises(
        CannotAdopt,
        match=r"jagged_tensor\.py:\d+ .*length_per_key=\[\.\.\.\], the numbers of ids",
    ):
        list(itertools.starmap(step, batches))
