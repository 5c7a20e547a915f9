"""What went wrong in other implementations of ids without end does not here; each test names the thread."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchrec_ext.ids import Dynamic, DynamicEmbeddings, DynamicIds

pytestmark = pytest.mark.unit


def test_steps_without_a_new_id_and_without_an_id() -> None:
    """NVIDIA/recsys-examples #292: a batch of which no key was to be written crashed the kernel."""
    ids = DynamicIds(
        {"a": Dynamic(capacity=9, ttl=2), "b": Dynamic(capacity=9, admit_after=2)}
    )
    nothing = torch.empty(0, dtype=torch.int64)
    ids.step({"a": torch.tensor([5, 6]), "b": nothing})
    for batch in (
        {"a": torch.tensor([6, 5])},
        {"a": nothing, "b": nothing},
        {"b": torch.empty(3, 0).long()},
    ):
        rows, notes = ids.step(batch)
        assert notes == ()
        assert [rows[name].shape for name in batch] == [
            values.shape for values in batch.values()
        ]
    assert ids.rows({"a": torch.tensor([7]), "b": nothing})["a"].tolist() == [0], (
        "nothing but misses"
    )


def test_an_id_that_comes_again_has_no_optimizer_state_of_before() -> None:
    """pytorch/FBGEMM #5965: what the state of a row is that was evicted and is read again."""
    torch.manual_seed(0)
    model = nn.Embedding(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    root = nn.ModuleDict({"item": model})
    ids = DynamicEmbeddings(root, optimizer, {"item": Dynamic(capacity=3, share=0.1)})
    for item in (1, 2, 2, 3, 3, 1):  # 1 is evicted by 3
        optimizer.zero_grad()
        row = int(ids.ids.rows({"item": torch.tensor([item])})["item"])
        vectors = model(torch.tensor([item]))
        if not row:
            row = int(ids.ids.rows({"item": torch.tensor([item])})["item"])
            for state in ("exp_avg", "exp_avg_sq"):
                assert (not optimizer.state and item == 1) or not optimizer.state[
                    model.weight
                ][state][row].any()
        vectors.sum().backward()
        optimizer.step()
    assert ids.ids.counts["admitted"] == 4
