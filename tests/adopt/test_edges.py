"""What somebody may do around an adopted step: read gradients, interrupt a loss, drop steps, use a file's module."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchrec_ext.adopt.step as adopted
from tests.adopt.pairs import Pairs, logistic
from tests.adopt.test_lag import ITEMS, USERS, batches, made, uncompiled
from torchrec_ext.adopt import CannotAdopt, adopt
from torchrec_ext.capture import policy
from torchrec_ext.ids import Dynamic, DynamicEmbeddings

__all__ = ["uncompiled"]  # a fixture of every test here


@pytest.mark.parametrize("compile_", ["off", "require"])
def test_gradients_are_gone_after_each_step(compile_: str) -> None:
    """Captured or eager: who reads one finds out in the first step. One of the user's own does not stay either."""
    model, step, _ = made(compile_)
    for number, batch in enumerate(batches(10)):
        if number == 7:
            logistic(model)(*batch).backward()  # type: ignore[no-untyped-call]
        step(*batch)
        assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    assert step.describe().startswith("captured" if compile_ == "require" else "eager")


def test_three_dropped_steps_die_and_leave_no_hook_and_no_row_behind() -> None:
    """Optimizers outlive them."""
    own, eager, _ = made("off")
    model, step, optimizer = made()
    alive = []
    for _ in range(3):
        step = adopt(model, optimizer, logistic(model), compile="require")
        for batch in batches(5):
            step(*batch)
            eager(*batch)
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
    torch.testing.assert_close(model.state_dict(), own.state_dict(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("compile_", ["auto", "require"])
def test_an_interrupt_inside_the_loss_is_the_users_and_the_training_goes_on(
    compile_: Any,
) -> None:
    """An interrupted step writes nothing, and those after it are as in a loop without it."""
    weights = []
    for interrupts in (False, True):
        model, _, optimizer = made("off")
        inner, flags = logistic(model), {"stop": False}

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


def test_a_module_of_a_file_that_cannot_be_imported_is_captured_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    model: Any = Pairs(USERS, ITEMS)
    model.top = nn.Sequential(model.top, module.Scaled())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    step = adopt(model, optimizer, logistic(model))
    for batch in batches(8):
        step(*batch)
    why = "'own_model' is not in sys.modules"
    # From torch 2.14 on Dynamo finds it.
    is_found = torch.__version__ >= "2.14"
    assert ("captured since" if is_found else why) in step.describe()


class Offsets(nn.Module):
    """Columns of ids in one table, each from its own row on, as RecBole's FMEmbedding has them in an array."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(30, 4), nn.Linear(8, 1)
        self.offsets = np.array([0, 10])

    def forward(self, ids: Tensor) -> Tensor:
        shifted = ids + ids.new_tensor(self.offsets).unsqueeze(0)
        return self.head(self.table(shifted).flatten(1)).squeeze(1)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_module_that_reads_an_array_of_numpy_is_captured() -> None:
    losses = []
    for compile_ in ("off", "require"):
        model = Offsets()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        step = adopt(
            model,
            optimizer,
            lambda ids, label, model=model: ((model(ids) - label) ** 2).mean(),
            compile=compile_,  # type: ignore[arg-type]
        )
        generator = torch.Generator().manual_seed(1)
        losses.append(
            [
                step(torch.randint(10, (8, 2), generator=generator), torch.ones(8))[0]
                for _ in range(8)
            ]
        )
        assert step.describe().startswith("captured") == (compile_ == "require")
    torch.testing.assert_close(losses[1], losses[0])


def test_dynamic_ids_are_refused_with_their_remedy_and_train_eagerly() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    ids = DynamicEmbeddings(model, optimizer, {"0": Dynamic(capacity=9)})

    def loss(items: Tensor) -> Tensor:
        return model(items).square().mean()  # type: ignore[no-any-return]

    named = r"'0' has dynamic ids, .* map the ids of each batch by DynamicIds"
    with pytest.raises(CannotAdopt, match=named) as error:
        adopt(model, optimizer, loss, compile="require")
    assert len(str(error.value)) <= 200
    step = adopt(model, optimizer, loss)
    for number in range(5):
        step(torch.tensor([[10**12 + number], [-7]]))
    assert "map the ids of each batch by DynamicIds" in step.describe()
    assert ids.ids.live == {"0": 6}
