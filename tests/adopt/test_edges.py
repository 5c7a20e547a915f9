"""What somebody may do around an adopted step: read gradients, interrupt a loss, drop steps, read all rows."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchrec_ext.adopt.step as adopted
from torchrec_ext.adopt import AdoptedStep, CannotAdopt, adopt
from torchrec_ext.capture import executors, policy

USERS, ITEMS, D, B = 300, 200, 4, 8  # rows that are moved row by row


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run as traced, op by op."""
    monkeypatch.setattr(executors, "compile_graph", lambda graph, examples: graph)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item = nn.Embedding(USERS, D), nn.Embedding(ITEMS, D)
        self.top = nn.Linear(2 * D, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = torch.cat([self.user(user), self.item(item)], 1)
        return self.top(rows).squeeze(1)  # type: ignore[no-any-return]


def batches(count: int) -> Iterator[tuple[Tensor, ...]]:
    draws = torch.Generator().manual_seed(1)
    for _ in range(count):
        user = torch.randint(USERS, (B,), generator=draws)
        item = torch.randint(ITEMS, (B,), generator=draws)
        yield user, item, torch.randint(2, (B,), generator=draws).float()


def loss_of(model: nn.Module) -> Callable[..., Tensor]:
    return lambda user, item, label: F.binary_cross_entropy_with_logits(
        model(user, item), label
    )


def made(compile_: Any = "require") -> tuple[Model, torch.optim.Optimizer, AdoptedStep]:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return model, optimizer, adopt(model, optimizer, loss_of(model), compile=compile_)


@pytest.mark.parametrize("compile_", ["off", "require"])
def test_gradients_are_gone_after_each_step(compile_: str) -> None:
    """Captured or eager: who reads one finds out in the first step. One of the user's own does not stay either."""
    model, _, step = made(compile_)
    for number, batch in enumerate(batches(10)):
        if number == 7:
            loss_of(model)(*batch).backward()  # type: ignore[no-untyped-call]
        step(*batch)
        assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    assert step.describe().startswith("captured" if compile_ == "require" else "eager")


def test_three_dropped_steps_die_and_leave_no_hook_on_the_optimizer() -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    alive = []
    for _ in range(3):
        step = adopt(model, optimizer, loss_of(model), compile="require")
        for batch in batches(5):
            step(*batch)
        assert step.describe().startswith("captured")
        alive.append(weakref.ref(step))
    del step
    gc.collect()
    assert [each() for each in alive] == [None] * 3
    hooks = [
        value for name, value in vars(optimizer).items() if name.endswith("_hooks")
    ]
    assert hooks
    assert not any(hooks)


@pytest.mark.parametrize("compile_", ["auto", "require"])
def test_an_interrupt_inside_the_loss_is_the_users_and_the_training_goes_on(
    compile_: Any,
) -> None:
    """An interrupted step writes nothing, and those after it are as in a loop without it."""
    weights = []
    for interrupts in (False, True):
        model = Model()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        inner, flags = loss_of(model), {"stop": False}

        def loss(*batch: Tensor, inner: Any = inner, flags: Any = flags) -> Tensor:
            if flags["stop"]:
                raise KeyboardInterrupt
            return inner(*batch)  # type: ignore[no-any-return]

        step = adopt(model, optimizer, loss, compile=compile_)
        for number, batch in enumerate(batches(14)):
            if interrupts and number in (1, 9):
                flags["stop"] = True
                with pytest.raises(KeyboardInterrupt):
                    step(*batch)
                flags["stop"] = False
            step(*batch)
        step.settle()
        weights.append([each.detach() for each in model.parameters()])
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=2e-3)


@pytest.mark.parametrize("compile_", ["auto", "require"])
def test_a_module_of_a_file_that_cannot_be_imported_is_captured_or_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile_: Any
) -> None:
    for name in ("CAPTURE_S", "CAPTURE_S_PER_CALL"):
        monkeypatch.setattr(adopted, name, {"cpu": 0.0})
    monkeypatch.setattr(policy, "WATCHED", 2)
    path = tmp_path / "own_model.py"
    path.write_text(
        "import torch\nfrom torch import nn\nSCALE = torch.ones(())\n\n\n"
        "class Scaled(nn.Module):\n    def forward(self, x):\n        return x * SCALE\n"
    )
    spec: Any = importlib.util.spec_from_file_location("own_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # never in sys.modules
    model = Model()
    model.top = nn.Sequential(model.top, module.Scaled())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    step = adopt(model, optimizer, loss_of(model), compile=compile_)

    def train() -> str:
        for batch in batches(8):
            step(*batch)
        return step.describe()

    if compile_ == "auto":
        why = train()
    else:
        with pytest.raises(CannotAdopt) as refused:
            train()
        why = str(refused.value)
    assert "'own_model' is not in sys.modules" in why
    assert "import it" in why
