"""What is served is what was trained, for every kind of model, alone and in a batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.retrieval.kinds import (
    ITEMS,
    KINDS,
    MOST,
    columns_of,
    exported,
    made,
    table,
    trained,
)

PRODUCTS = (
    "dot",
    "cosine",
    "gmf",
    "weighted",
    "session tower",
    "next item",
    "retrieval",
)
SESSIONS = ("bst", "session tower", "next item")


@pytest.mark.parametrize("kind", KINDS)
def test_served_equals_trained(kind: str, tmp_path: Path) -> None:
    model = made(kind)
    bundle = exported(kind, tmp_path / "bundle", model)
    assert model.training
    assert bundle.metric == ("product" if kind in PRODUCTS else "top_nn")
    most = MOST if kind.startswith(SESSIONS) else None
    queries = table(columns_of(model, "user"))
    users = [0, 3, 7, 11, 13, 17, 29]
    several = bundle.query.embed(queries.take(users))
    for place, user in enumerate(users):
        expected = trained(model, [user] * ITEMS, range(ITEMS), most).numpy()
        allowed = 1e-5 * np.abs(expected).max() + 1e-6
        if kind == "half":
            allowed *= 20
        alone = bundle.query.embed(queries.slice(user, 1))[0]
        for query in (alone, several[place]):
            served = bundle.logits(query, np.arange(ITEMS))
            np.testing.assert_allclose(served, expected, rtol=0, atol=allowed)
            if bundle.metric == "product":
                products = bundle.rows @ query
                np.testing.assert_allclose(products, expected, rtol=0, atol=allowed)
        again = bundle.candidate.embed(table(columns_of(model, "item")).slice(user, 1))
        np.testing.assert_allclose(again[0], bundle.rows[user], atol=1e-5)
    assert torch.is_grad_enabled()
