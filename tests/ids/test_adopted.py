"""adopt(ids=): captured steps of a model with dynamic ids equal the eager loop with DynamicEmbeddings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.swa_utils import AveragedModel

import torchrec_ext.adopt.step as adopted
from torchrec_ext.adopt import CannotAdopt, Rows, adopt, verify
from torchrec_ext.capture import executors
from torchrec_ext.ids import Dynamic, DynamicEmbeddings

WIDTH, SIZE, STEPS, DRIFT = 4, 16, 14, 60
# Of the few, tables are moved whole.
FEW, MANY = 70, 340
# Adam's rows are updated in closed form, which differs where a gradient is near its
# eps.
WITHIN = {"sgd": 0.0, "adagrad": 1e-6, "adam": 2e-3, "adamw": 2e-3}
Batch = tuple[Tensor, ...]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.05),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.05, weight_decay=0.1),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.5),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run as traced, op by op; a capture always pays."""
    monkeypatch.setattr(executors, "compile_graph", lambda graph, examples: graph)
    for name in ("CAPTURE_S", "CAPTURE_S_PER_CALL"):
        monkeypatch.setattr(adopted, name, {"cpu": 0.0, "cuda": 0.0})
    monkeypatch.setattr(verify, "_CHECKED", 0.0)
    monkeypatch.setattr(adopted.StepWatch, "_report", lambda watch: None)


class Model(nn.Module):
    """Users, and items that are looked up twice: a padded history, and a candidate that forward cuts out."""

    def __init__(self, rows: int, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(rows, WIDTH, sparse=sparse)
        self.item = nn.Embedding(rows, WIDTH, padding_idx=0, sparse=sparse)
        self.top = nn.Linear(WIDTH, 1, bias=not sparse)

    def forward(self, user: Tensor, items: Tensor) -> Tensor:
        history = self.item(items[:, 1:]).mean(1)
        return self.top(self.user(user) * self.item(items[:, 0]) + history).squeeze(1)  # type: ignore[no-any-return]


def batches(count: int = STEPS) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    names = torch.randint(1, 2**62, (2, 90 + DRIFT * count), generator=generator)
    for first in range(0, DRIFT * count, DRIFT):
        places = (torch.rand(SIZE, 4, generator=generator) * 90).long() + first
        items = names[1][places]
        items[:, 3] = 0
        yield (
            names[0][places[:, 0]],
            items,
            torch.randint(2, (SIZE,), generator=generator).float(),
        )


def made(
    kind: str, rows: int
) -> tuple[Model, torch.optim.Optimizer, Callable[..., Tensor]]:
    model = Model(rows)
    loss = (  # noqa: E731
        lambda *batch: binary_cross_entropy_with_logits(model(*batch[:-1]), batch[-1])
    )
    return model, OPTIMIZERS[kind](model.parameters()), loss


def policies(rows: int, **settings: Any) -> dict[str, Dynamic]:
    return {
        name: Dynamic(capacity=rows, share=1 / 16, **settings)
        for name in ("user", "item")
    }


def eager(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Tensor],
    given: Iterator[Batch],
) -> list[float]:
    losses = []
    for batch in given:
        optimizer.zero_grad()
        value = loss(*batch)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def assert_same(
    one: tuple[Any, Any, Any], two: tuple[Any, Any, Any], within: float
) -> None:
    """The maps of two runs to the bit, and the weights and the state."""
    (model, optimizer, ids), (other, other_optimizer, other_ids) = one, two
    for name, table in ids.state_dict()["tables"].items():
        for key, value in table.items():
            saved = other_ids.state_dict()["tables"][name][key]
            assert (
                torch.equal(value, saved)
                if isinstance(value, Tensor)
                else value == saved
            ), (name, key)
    assert ids.ids.counts == other_ids.ids.counts
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, other.state_dict()[name], rtol=0, atol=within), (
            name
        )
    states = (optimizer.state_dict()["state"], other_optimizer.state_dict()["state"])
    for index, state in states[0].items():
        for key, value in state.items():
            assert torch.allclose(
                torch.as_tensor(value), states[1][index][key], rtol=0, atol=within
            ), (index, key)


@pytest.mark.parametrize(
    ("kind", "rows", "every"),
    [
        ("adam", FEW, 1),
        pytest.param("adam", MANY, 1, marks=pytest.mark.slow),
        pytest.param("adamw", MANY, 1, marks=pytest.mark.slow),
        ("sgd", MANY, 3),
        ("adagrad", MANY, 1),
    ],
)
def test_captured_steps_equal_the_loop_with_dynamic_embeddings(
    kind: str, rows: int, every: int
) -> None:
    model, optimizer, loss = made(kind, rows)
    ids = DynamicEmbeddings(model, optimizer, policies(rows), every=every)
    losses = eager(model, optimizer, loss, batches())
    other, other_optimizer, other_loss = made(kind, rows)
    other_ids = DynamicEmbeddings(other, other_optimizer, policies(rows), every=every)
    step = adopt(
        other, other_optimizer, other_loss, ids=other_ids, compile="require", verify=2
    )
    other_losses = [float(step(*batch)[0]) for batch in batches()]
    assert step.describe().startswith("captured since step 3"), step.describe()
    assert ("row by row" in step.describe()) == (rows == MANY)
    assert ids.ids.counts["evicted"] > 20
    assert other_losses == pytest.approx(losses, rel=1e-5)
    assert_same(
        (model, optimizer, ids), (other, other_optimizer, other_ids), WITHIN[kind]
    )


def test_an_evaluation_and_a_resumed_run_between_captured_steps() -> None:
    rows = MANY
    model, optimizer, loss = made("adam", rows)
    step = adopt(
        model, optimizer, loss, ids=policies(rows, admit_after=2), compile="require"
    )
    given = list(batches())
    for batch in given[:8]:
        step(*batch)
    model.eval()
    before = copy.deepcopy(step.ids.state_dict())  # type: ignore[union-attr]
    with torch.no_grad():
        model(given[9][0], given[9][1])
    model.train()
    assert step.ids.state_dict()["counts"] == before["counts"]  # type: ignore[union-attr]
    other, other_optimizer, other_loss = made("adam", rows)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed = adopt(
        other,
        other_optimizer,
        other_loss,
        ids=policies(rows, admit_after=2),
        compile="require",
    )
    resumed.ids.load_state_dict(before)  # type: ignore[union-attr]
    for batch in given[8:]:
        step(*batch)
        resumed(*batch)
    assert step.describe().startswith("captured")
    assert_same(
        (model, optimizer, step.ids),
        (other, other_optimizer, resumed.ids),
        WITHIN["adam"],
    )


def test_rows_make_batches_of_raw_ids_inside_the_step() -> None:
    user, items, label = (torch.cat(column) for column in zip(*batches(), strict=True))

    def take(row: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return row["user"], row["items"], row["label"]

    def trained(compile_: Any) -> Any:
        model, optimizer, loss = made("sgd", MANY)
        rows = Rows({"user": user, "items": items, "label": label}, SIZE, make=take)
        step = adopt(
            model, optimizer, loss, rows=rows, ids=policies(MANY), compile=compile_
        )
        for _ in step.epoch():
            pass
        return model, optimizer, step

    model, optimizer, step = trained("off")
    other, other_optimizer, other_step = trained("require")
    assert other_step.describe().startswith("captured")
    assert_same(
        (model, optimizer, step.ids), (other, other_optimizer, other_step.ids), 0.0
    )


def test_sparse_adam_stays_eager_and_says_so() -> None:
    model = Model(FEW, sparse=True)
    model.top.requires_grad_(False)
    optimizer = torch.optim.SparseAdam([model.user.weight, model.item.weight])
    loss = (  # noqa: E731
        lambda *batch: binary_cross_entropy_with_logits(model(*batch[:-1]), batch[-1])
    )
    step = adopt(model, optimizer, loss, ids=policies(FEW))
    for batch in batches(8):
        step(*batch)
    assert "the optimizer SparseAdam has no captured form" in step.describe()
    assert step.ids.ids.counts["evicted"] > 0  # type: ignore[union-attr]


class FromWeights(Model):
    def forward(self, user: Tensor, items: Tensor) -> Tensor:
        return super().forward(user + self.top.weight.sum().long(), items)


class Drawn(Model):
    def forward(self, user: Tensor, items: Tensor) -> Tensor:
        return super().forward(user + torch.randint_like(user, 3), items)


@pytest.mark.parametrize("kind", [FromWeights, Drawn])
def test_ids_that_are_not_of_the_batch_are_refused_by_line(kind: type[Model]) -> None:
    model = kind(FEW)
    loss = (  # noqa: E731
        lambda *batch: binary_cross_entropy_with_logits(model(*batch[:-1]), batch[-1])
    )
    step = adopt(
        model,
        OPTIMIZERS["sgd"](model.parameters()),
        loss,
        ids=policies(FEW),
        compile="require",
    )
    first, second, third = batches(3)
    step(*first)
    step(*second)
    with pytest.raises(
        CannotAdopt,
        match=r"test_adopted.py:\d+ .*: dynamic ids must come from the batch alone",
    ):
        step(*third)


def test_what_cannot_be_combined_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, loss = made("sgd", FEW)
    with pytest.raises(
        CannotAdopt, match="ids= with average=: the average of a row would go on"
    ):
        adopt(model, optimizer, loss, ids=policies(FEW), average=AveragedModel(model))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(
        CannotAdopt, match="ids= on several ranks: local SGD would average rows"
    ):
        adopt(model, optimizer, loss, ids=policies(FEW))
