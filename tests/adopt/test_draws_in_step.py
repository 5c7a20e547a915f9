"""Steps that draw their negatives themselves, as on a GPU, train like those for which numpy draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torchrec_ext.adopt import AdoptedStep, Rows, Uniform, adopt
from torchrec_ext.adopt.source import RowsOnDevice
from torchrec_ext.capture import executors

USERS, ITEMS, ROWS = 30, 50, 400


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item = nn.Embedding(USERS, 4), nn.Embedding(ITEMS, 4)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) * self.item(item)).sum(1)


def rows() -> Rows:
    generator = torch.Generator().manual_seed(1)
    user = torch.randint(USERS, (ROWS,), generator=generator)
    item = torch.randint(ITEMS, (ROWS,), generator=generator)
    negatives = Uniform(ITEMS, draws=4, exclude=("user", "item"))
    return Rows({"user": user, "item": item}, 32, negatives=negatives, seed=2)


def step_on(given: Rows) -> AdoptedStep:
    model = Pairs()
    loss = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return adopt(
        model,
        optimizer,
        lambda user, item, label: loss(model(user, item), label),
        rows=given,
        compile="require",
    )


def test_the_losses_are_those_of_steps_for_which_numpy_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Op by op: what inductor makes of it is no question here.
    monkeypatch.setattr(executors, "compile_graph", lambda graph, examples: graph)
    step = step_on(rows())
    expected = [float(loss) for _ in range(3) for loss in step.epoch()]
    monkeypatch.setattr(
        "torchrec_ext.adopt.step.RowsOnDevice",
        lambda each, device: RowsOnDevice(each, device, draws_inside=True),
    )
    given = rows()
    step = step_on(given)
    losses = [float(loss) for _ in range(2) for loss in step.epoch()]
    # Interrupted in mid-epoch, and resumed by another process's rows.
    epoch = step.epoch()
    losses += [float(next(epoch)) for _ in range(5)]
    resumed = rows()
    resumed.load_state_dict(given.state_dict())
    losses += [float(loss) for loss in step.epoch(resumed)]
    assert step.describe().startswith("captured")
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
