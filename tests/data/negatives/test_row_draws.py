"""Draws by torch ops are those of numpy, id by id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchrec_ext.adopt.rows.law import Law, NegativeDraws, Popular, Uniform
from torchrec_ext.capture import policy
from torchrec_ext.data.negatives import known_pairs

ROWS, USERS, ITEMS = 3_000, 40, 60
PAIRS = ("user", "item")


def columns(items: range = range(ITEMS)) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(5)
    user = rng.integers(1, USERS, ROWS)
    # User 0 has taken all items but one, which only the second number finds.
    user[: ITEMS - 1] = 0
    item = rng.integers(0, ITEMS, ROWS)
    item[: ITEMS - 1] = np.arange(ITEMS - 1)
    # The last user has the first and the last one, and all free ones lie between.
    user[-600:] = USERS
    item[-600:] = [0, ITEMS - 1] * 300
    numbers = torch.from_numpy(item) * items.step + items.start
    return {"user": torch.from_numpy(user), "item": numbers}


LAWS: dict[str, tuple[Law, dict[str, Any]]] = {
    "pairs of two columns": (Uniform(ITEMS, draws=4, exclude=PAIRS), columns()),
    "nothing excluded": (Uniform(ITEMS, draws=3), columns()),
    "ids with gaps": (
        Uniform(range(10, 10 + 3 * ITEMS, 3), draws=2, exclude=PAIRS),
        columns(range(10, 10 + 3 * ITEMS, 3)),
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_torch_draws_the_ids_of_numpy(name: str, device: torch.device) -> None:
    law, of_rows = LAWS[name]
    draws = NegativeDraws(law, of_rows, seed=11)
    assert draws.tensors is not None
    tensors = [each.to(device) for each in draws.tensors]
    rows = torch.randperm(ROWS)
    ways = [draws.draw_in_step]
    if device.type == "cuda" and policy.HAS_TRITON:
        # As it is fused into a step.
        ways.append(torch.compile(draws.draw_in_step, fullgraph=True))
    for way in ways:
        for epoch in (0, 3):
            (expected,) = draws.draw(rows.numpy(), epoch)
            keys = draws.keys(epoch).to(device)
            (found,) = way(rows.to(device), keys, tensors)
            assert found.tolist() == expected.tolist()
        (found,) = way(rows.to(device), draws.keys(0).to(device), tensors)
        assert (found.cpu().numpy() != expected).any()


def test_other_draws_stay_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rows = columns()
    popular = Popular(ITEMS, counted="item", exclude=PAIRS)
    assert NegativeDraws(popular, of_rows).tensors is None
    monkeypatch.setattr(known_pairs, "MOST_BITS", 8)
    assert NegativeDraws(Uniform(ITEMS, exclude=PAIRS), of_rows).tensors is None


def test_what_no_row_has_is_not_drawn_by_popularity() -> None:
    law = Popular(9 * ITEMS, counted="item", exponent=0.1)
    (drawn,) = NegativeDraws(law, columns()).draw(np.arange(ROWS), 0)
    assert drawn.max() < ITEMS
