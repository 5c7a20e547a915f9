"""An adopted model learns what the user's own loop learns, whatever it is made of, or is refused by name."""

from __future__ import annotations

import ast
import copy
import difflib
import functools
import gc
import importlib.util
import io
import itertools
import random
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import networkx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchrec_ext.adopt.step as adopted
from torchrec_ext.adopt import (
    AdoptedStep,
    CannotAdopt,
    Rows,
    Uniform,
    adopt,
    captures,
    verify,
)
from torchrec_ext.capture import executors, policy
from torchrec_ext.capture.memory import StepMemory
from torchrec_ext.capture.policy import TrainingDivergedError

# of the few rows, tables are moved whole
USERS, ITEMS, FEW, D, B, L = (700, 300, 20, 4, 16, 3)
WHOLE, BY_ROW = 1e-6, 2e-3
Batch = tuple[Any, ...]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Steps run as traced, op by op, but where a test is marked to compile them; a capture always pays."""
    if "compiled" not in request.fixturenames:
        monkeypatch.setattr(executors, "compile_graph", lambda graph, examples: graph)
    for name in ("CAPTURE_S", "CAPTURE_S_PER_CALL"):
        monkeypatch.setattr(adopted, name, {"cpu": 0.0, "cuda": 0.0})
    monkeypatch.setattr(verify, "_CHECKED", 0.0)
    # which way is faster is no question here
    monkeypatch.setattr(adopted.StepWatch, "_report", lambda watch: None)


@pytest.fixture
def compiled() -> None:
    """Marks a test whose steps are compiled."""


class Case(NamedTuple):
    """A user's script: its model, optimizers, loss and batches."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    loss: Callable[..., Any]
    batch: Callable[[torch.Generator], Batch]
    options: dict[str, Any]
    schedulers: list[Any]


def pairs(generator: torch.Generator, users: int = FEW, items: int = FEW) -> Batch:
    return (
        torch.randint(users, (B,), generator=generator),
        torch.randint(items, (B,), generator=generator),
        torch.randint(2, (B,), generator=generator).float(),
    )


def lists(generator: torch.Generator) -> Batch:
    return torch.randint(FEW, (B, L), generator=generator), torch.randint(
        2, (B,), generator=generator
    ).float()


def adam(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), **{"lr": 1e-2, **options})]


def case(
    model: nn.Module,
    loss: Callable[..., Any],
    *,
    optimizers: list[torch.optim.Optimizer] | None = None,
    batch: Callable[[torch.Generator], Batch] = pairs,
    schedulers: Callable[[list[torch.optim.Optimizer]], list[Any]] = lambda _: [],
    **options: Any,
) -> Case:
    optimizers = optimizers or adam(model)
    return Case(model, optimizers, loss, batch, options, schedulers(optimizers))


class Pairs(nn.Module):
    """A user and an item, a network over both."""

    def __init__(
        self, users: int = FEW, items: int = FEW, sparse: bool = False, **item: Any
    ) -> None:
        super().__init__()
        self.user = nn.Embedding(users, D, sparse=sparse)
        self.item = nn.Embedding(items, D, sparse=sparse, **item)
        self.top = nn.Sequential(nn.Linear(2 * D, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.top(torch.cat([self.user(user), self.item(item)], 1)).squeeze(1)  # type: ignore[no-any-return]


def logistic(model: nn.Module) -> Callable[..., Tensor]:
    return lambda *batch: F.binary_cross_entropy_with_logits(
        model(*batch[:-1]), batch[-1]
    )


def of_pairs(users: int = FEW, **made: Any) -> Case:
    """Pairs under some optimizer; ``made`` are the arguments of Pairs, and ``by`` makes the optimizers."""
    by, options = made.pop("by", adam), made.pop("options", {})
    model = Pairs(users, **made)
    draw = lambda generator: pairs(generator, users, made.get("items", FEW))  # noqa: E731
    return case(model, logistic(model), optimizers=by(model), batch=draw, **options)


class Listed(nn.Module):
    """A list of items through some encoder."""

    def __init__(self, encoder: nn.Module, **item: Any) -> None:
        super().__init__()
        self.item, self.encoder = nn.Embedding(FEW, D, **item), encoder
        self.top = nn.Linear(D, 1)

    def forward(self, items: Tensor) -> Tensor:
        encoded = self.encoder(self.item(items))
        encoded = encoded[0] if isinstance(encoded, tuple) else encoded
        return self.top(encoded.mean(1)).squeeze(1)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner(rows, rows, rows)[0]  # type: ignore[no-any-return]


def listed(encoder: nn.Module, by: Callable[..., Any] = adam, **item: Any) -> Case:
    model = Listed(encoder, **item)
    return case(model, logistic(model), batch=lists, optimizers=by(model))


class Bags(nn.Module):
    def __init__(self, weighted: bool = False, **bag: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(FEW, D, **bag)
        self.top = nn.Linear(D, 1)
        self.weighted = weighted

    def forward(self, items: Tensor, starts: Tensor | None = None) -> Tensor:
        weights = (items + 1.0) / FEW if self.weighted else None
        return self.top(self.bag(items, starts, weights)).squeeze(1)  # type: ignore[no-any-return]


def bags(batch: Callable[[torch.Generator], Batch] = lists, **made: Any) -> Case:
    model = Bags(**made)
    return case(model, logistic(model), batch=batch)


def ragged(generator: torch.Generator, ends: bool = False) -> Batch:
    """B lists of other lengths in each batch, some of them empty, one after the other: ids, and where lists begin."""
    items, label = lists(generator)
    starts = torch.cat(
        [
            torch.zeros(1),
            torch.randint(B * L, (B - 1,), generator=generator).sort().values,
        ]
    ).long()
    return (
        items.view(-1),
        torch.cat([starts, torch.tensor([B * L])]) if ends else starts,
        label,
    )


class Plus(nn.Embedding):
    """A user's subclass with a forward of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 1.0


def replaced(name: str, module: Callable[[Pairs], nn.Module]) -> Case:
    made = of_pairs()
    setattr(made.model, name, module(made.model))  # type: ignore[arg-type]
    return case(made.model, made.loss, batch=made.batch)


class Raw(nn.Module):
    """A table that is a parameter, looked up by indices and by F.embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Parameter(torch.randn(FEW, D))
        self.item = nn.Parameter(torch.randn(FEW, D))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user[user] * F.embedding(item, self.item)).sum(1)


def raw() -> Case:
    model = Raw()
    return case(model, logistic(model))


class Softmax(nn.Module):
    """All items are scored: their table is read as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(FEW, D), nn.Embedding(FEW, D)

    def forward(self, user: Tensor) -> Tensor:
        return self.user(user) @ self.item.weight.T


def softmax() -> Case:
    model = Softmax()
    return case(model, lambda user, item, _: F.cross_entropy(model(user), item))


def tied() -> Case:
    made = of_pairs()
    made.model.item.weight = made.model.user.weight  # type: ignore[union-attr]
    return case(made.model, made.loss, batch=made.batch)


def two_optimizers() -> Case:
    made = of_pairs(USERS, sparse=True)
    model: Any = made.model
    by = [
        torch.optim.Adagrad([model.user.weight, model.item.weight], 0.05),
        torch.optim.Adam(model.top.parameters()),
    ]
    return case(model, made.loss, batch=made.batch, optimizers=by)


def scheduled(kind: Callable[[Any], Any]) -> Case:
    made = of_pairs()
    return case(
        made.model,
        made.loss,
        optimizers=made.optimizers,
        schedulers=lambda by: [kind(by[0])],
    )


class Machine(nn.Module):
    """A factorization machine over a list of tables, with offsets, and a first order beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(FEW, D + 1) for _ in range(2)])
        self.register_buffer("offset", torch.tensor([0, 1]))

    def forward(self, *ids: Tensor) -> Tensor:
        looked_up = zip(self.tables, ids, self.offset, strict=True)  # type: ignore[arg-type]
        rows = torch.stack([table((one + by) % FEW) for table, one, by in looked_up], 1)
        first, rows = rows[..., 0], rows[..., 1:]
        pairs = 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1)
        return pairs + first.sum(1)


def machine() -> Case:
    model = Machine()
    return case(model, logistic(model))


def pairwise() -> Case:
    made = of_pairs(USERS, items=ITEMS)
    model: Any = made.model

    def loss(user: Tensor, item: Tensor, negatives: Tensor) -> tuple[Tensor, Any]:
        users = model.user(user)
        positive = (users * model.item(item)).sum(1, keepdim=True)
        scores = (users[:, None] * model.item(negatives)).sum(2)
        return -F.logsigmoid(positive - scores).mean(), {
            "auc": (positive > scores).float().mean(),
            "scores": scores,
        }

    def draw(generator: torch.Generator) -> Batch:
        return *pairs(generator, USERS, ITEMS)[:2], torch.randint(
            ITEMS, (B, 2), generator=generator
        )

    return case(
        model,
        loss,
        batch=draw,
        optimizers=adam(nn.ModuleList([model.user, model.item])),
    )


def normalised(layer: nn.Module) -> Case:
    made = of_pairs()
    made.model.top = nn.Sequential(
        nn.Linear(2 * D, 4, bias=False), layer, nn.Linear(4, 1)
    )
    return case(made.model, made.loss, batch=made.batch)


class Products(nn.Module):
    """Products of two fields, cut out of a matrix (B, 2, 2) by a mask that is always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(FEW, D), nn.Embedding(FEW, D)
        self.kept = torch.ones(2, 2).triu(1).bool()

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        fields = torch.stack([self.user(user), self.item(item)], 1)
        first = fields.masked_select((torch.arange(2) == 0)[:, None])
        products = torch.masked_select(fields @ fields.transpose(1, 2), self.kept)
        return products + first.view(len(user), -1).sum(1)


def of_a_package() -> Case:
    """A loss with a helper of a package whose functions Dynamo leaves out by its name."""
    made = of_pairs()
    weights = [0.5, [1.0, (0.25, 0.75)]]
    return case(
        made.model,
        lambda *batch: made.loss(*batch) * networkx.utils.flatten(weights)[2],
        batch=made.batch,
    )


def sgd(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})]


def adagrad(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adagrad(model.parameters(), **{"lr": 0.05, **options})]


def with_a_spare_layer(model: nn.Module) -> list[torch.optim.Optimizer]:
    model.add_module("spare", nn.Linear(3, 3))
    return adam(model)


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)]


BIG: dict[str, Any] = {"users": USERS, "items": ITEMS}
CASES: dict[str, Callable[[], Case]] = {
    "Adam": of_pairs,
    "Adam, row by row": lambda: of_pairs(**BIG),
    "Adam with l2": lambda: of_pairs(
        by=lambda model: adam(model, weight_decay=0.1), **BIG
    ),
    "Adam, betas without a closed form": lambda: of_pairs(
        by=lambda model: adam(model, betas=(0.9, 0.8)), **BIG
    ),
    "AdamW": lambda: of_pairs(by=adamw, **BIG),
    "Adagrad": lambda: of_pairs(by=adagrad),
    "Adam with a large eps": lambda: of_pairs(
        by=lambda model: adam(model, eps=1e-2), **BIG
    ),
    "Adagrad with l2": lambda: of_pairs(
        by=lambda model: adagrad(model, weight_decay=0.1), **BIG
    ),
    "Adagrad, sparse": lambda: of_pairs(by=adagrad, sparse=True, **BIG),
    "SGD": lambda: of_pairs(by=sgd, **BIG),
    "SGD, sparse": lambda: of_pairs(by=sgd, sparse=True, **BIG),
    "Adagrad and Adam": two_optimizers,
    "clipped": lambda: of_pairs(options={"clip_norm": 0.05}, **BIG),
    "cosine": lambda: scheduled(
        lambda by: torch.optim.lr_scheduler.CosineAnnealingLR(by, 10)
    ),
    "padding": lambda: of_pairs(padding_idx=3),
    "padding, row by row": lambda: of_pairs(padding_idx=3, **BIG),
    "bags, mean": lambda: bags(mode="mean"),
    "bags, weighted": lambda: bags(mode="sum", weighted=True),
    "ragged, mean, padding": lambda: bags(ragged, mode="mean", padding_idx=0),
    "ragged, ends": lambda: bags(
        functools.partial(ragged, ends=True), mode="sum", include_last_offset=True
    ),
    "tied tables": tied,
    "raw parameters": raw,
    "subclass": lambda: replaced("item", lambda _: Plus(FEW, D)),
    "all items": softmax,
    "LSTM": lambda: listed(nn.LSTM(D, D, batch_first=True)),
    # Not by Adam: the gradient of a key's bias is nothing but rounding, which makes
    # steps of full size.
    "attention": lambda: listed(Attention(), by=sgd, padding_idx=0),
    "weight norm": lambda: replaced(
        "top",
        lambda _: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(2 * D, 1))
        ),
    ),
    "dropout": lambda: normalised(nn.Dropout(0.3)),
    "batch norm": lambda: normalised(nn.BatchNorm1d(4)),
    "machine": machine,
    "pairwise": pairwise,
    "a helper of a package": of_a_package,
    "a mask that is kept": lambda: case((model := Products()), logistic(model)),
    "unused layer": lambda: of_pairs(by=with_a_spare_layer),
    "int32 ids": lambda: drawn(
        lambda batch: (*[ids.int() for ids in batch[:2]], batch[2])
    ),
    "a hook on a module": lambda: changed(
        lambda model, _: model.user.register_forward_hook(lambda *_: None)
    ),
    "kept by forward": lambda: of(Remembering),
    "a loss of one element": lambda: beside(
        lambda model, loss: lambda *batch: loss(*batch).view(1)
    ),
    "a float beside": lambda: beside(
        lambda model, loss: lambda *batch: (loss(*batch), {"n": 3.0})
    ),
    "an object in the batch": lambda: drawn(lambda batch: (*batch, object())),
}


def batches(made: Case, count: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    return (made.batch(generator) for _ in range(count))


def made_anew(make: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    return make()


def plainly(make: Callable[[], Case], count: int) -> tuple[Case, list[float]]:
    """The user's own loop."""
    made, losses = made_anew(make), []
    for number, batch in enumerate(batches(made, count)):
        torch.manual_seed(number)
        for optimizer in made.optimizers:
            optimizer.zero_grad()
        result = made.loss(*batch)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        if clip := made.options.get("clip_norm"):
            nn.utils.clip_grad_norm_(made.model.parameters(), clip)
        for each in (*made.optimizers, *made.schedulers):
            each.step()
        losses.append(float(loss.detach()))
    return made, losses


def with_adopt(
    make: Callable[[], Case], count: int, random_captured: bool = True, **options: Any
) -> tuple[Case, list[float], AdoptedStep]:
    """The same loop with an adopted step; captured steps draw as eager ones do where a test asks for it."""
    made, losses = made_anew(make), []
    step = adopt(
        made.model,
        made.optimizers,
        made.loss,
        **{"compile": "require", **made.options, **options},
    )
    for number, batch in enumerate(batches(made, count)):
        torch.manual_seed(number)
        loss, _ = step(*batch)
        for each in made.schedulers:
            each.step()
        losses.append(float(loss))
    return made, losses, step


def states(made: Case) -> dict[str, Tensor]:
    """Weights, buffers and optimizers' state by name."""
    found = dict(made.model.state_dict())
    for number, optimizer in enumerate(made.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            found |= {
                f"{number}/{index}/{key}": torch.as_tensor(value)
                for key, value in state.items()
            }
    return found


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other)
    assert all(
        one[name].shape == other[name].shape and one[name].dtype == other[name].dtype
        for name in one
    )
    return max(
        float((one[name].double() - other[name].double()).abs().max()) for name in one
    )


def check(name: str, count: int) -> None:
    plain, losses = plainly(CASES[name], count)
    made, others, step = with_adopt(CASES[name], count)
    assert step.describe().startswith("captured since step 3"), step.describe()
    if name in ("AdamW", "SGD", "clipped"):
        # Decay of all rows and a limited norm leave tables row by row.
        assert "moved row by row: user.weight, item.weight" in step.describe()
    within = WHOLE
    if "row by row" in step.describe() and name != "SGD":
        # Decay is the product of all skipped steps; Adam's eps counts as of the first
        # of them.
        within = BY_ROW if "Adam" in type(made.optimizers[0]).__name__ else 10 * WHOLE
    assert others == pytest.approx(losses, rel=2e-6, abs=max(within / 10, 2e-6))
    assert farthest(states(plain), states(made)) < within


@pytest.mark.parametrize("name", CASES)
def test_an_adopted_model_learns_what_the_users_own_loop_learns(name: str) -> None:
    check(name, 7)


def test_a_step_is_captured_while_autograd_looks_for_anomalies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with torch.autograd.set_detect_anomaly(True):
        check("Adam, row by row", 7)
        assert torch.is_anomaly_enabled()
    assert "set_detect_anomaly is on" in capsys.readouterr().out


class Remembering(Pairs):
    """Its forward keeps what it computed."""

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        self.scores = super().forward(user, item)
        return self.scores


class Branching(Pairs):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        scores = super().forward(user, item)
        if scores.sum() > 0:
            return scores * 2
        return scores


class Selecting(Pairs):
    """Selects by a mask of the batch, or of random numbers."""

    drawn = False

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        mask = torch.rand(D) < 0.5 if self.drawn else (user > FEW // 2)[:, None]
        return super().forward(user, item) + self.user(user).masked_select(mask).sum()


class SelectingAtRandom(Selecting):
    drawn = True


class Unique(Pairs):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return super().forward(user, item) + len(torch.unique(user))


class Noisy(Pairs):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return super().forward(user, item) * (1.0 if random.random() < 0.5 else 2.0)


class OverAGraph(Pairs):
    """LightGCN's product: the neighbours of each item, by a sparse matrix."""

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        matrix = NEIGHBOURS
        items = torch.sparse.mm(matrix, self.item.weight)
        return (self.user(user) * F.embedding(item, items)).sum(1)


NEIGHBOURS = torch.eye(FEW).to_sparse()


class Packed(Pairs):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.item(item)[:, None], torch.ones(B), batch_first=True
        )
        return packed.data.sum(1) + super().forward(user, item)


class Rewriting(Pairs):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        with torch.no_grad():
            self.user.weight.clamp_(-1, 1)
        return super().forward(user, item)


def of(kind: type[Pairs], **made: Any) -> Case:
    model = kind(**made)
    return case(model, logistic(model))


def changed(change: Callable[[Any, list[torch.optim.Optimizer]], Any]) -> Case:
    made = of_pairs()
    change(made.model, made.optimizers)
    return made


def by(kind: Callable[[Any], torch.optim.Optimizer], **made: Any) -> Case:
    return of_pairs(by=lambda model: [kind(model.parameters())], **made)


def outside() -> Case:
    made, scale = of_pairs(), nn.Parameter(torch.ones(()))
    return case(made.model, lambda *batch: made.loss(*batch) * scale)


def twice() -> Case:
    made = of_pairs()
    return case(
        made.model, made.loss, optimizers=[*adam(made.model), *adam(made.model)]
    )


def beside(loss_of: Callable[[Any, Callable[..., Any]], Callable[..., Any]]) -> Case:
    made = of_pairs()
    return case(made.model, loss_of(made.model, made.loss))


def backward(made: Case) -> Callable[..., Any]:
    def loss(*batch: Any) -> Tensor:
        made.loss(*batch).backward()
        return made.loss(*batch)  # type: ignore[no-any-return]

    return loss


def drawn(change: Callable[[Batch], Batch]) -> Case:
    made = of_pairs()
    loss = lambda user, item, label, *rest: made.loss(user, item, label)  # noqa: E731
    return case(made.model, loss, batch=lambda generator: change(made.batch(generator)))


SCALER = torch.amp.GradScaler("cpu")
REFUSED: dict[str, tuple[Callable[[], Case], str]] = {
    "max_norm": (
        lambda: of_pairs(max_norm=1.0),
        r"'item' \(.*test_step.py:\d+\) has max_norm=1, .*leave it out",
    ),
    "frequency": (
        lambda: of_pairs(scale_grad_by_freq=True),
        r"'item' \(.*\) has scale_grad_by_freq=True.*leave it out",
    ),
    "amsgrad": (
        lambda: by(lambda p: torch.optim.Adam(p, amsgrad=True)),
        "Adam with amsgrad=True .*set amsgrad=False",
    ),
    "momentum": (
        lambda: by(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        "SGD with momentum=0.9 .*momentum=0",
    ),
    "maximize": (
        lambda: by(lambda p: torch.optim.Adam(p, maximize=True)),
        "maximize=True .*negate the loss",
    ),
    "RMSprop": (
        lambda: by(torch.optim.RMSprop),
        "the optimizer RMSprop has no captured form; .*Adam, AdamW, Adagrad",
    ),
    "SparseAdam": (
        lambda: case(
            (model := nn.ModuleDict({"a": nn.Embedding(FEW, 1, sparse=True)})),
            lambda user, item, label: (
                (model["a"](user).squeeze(1) - label).square().mean()
            ),
            optimizers=[torch.optim.SparseAdam(model.parameters())],
        ),
        "the optimizer SparseAdam has no captured form; torch.optim.Adam",
    ),
    "tensor lr": (
        lambda: by(lambda p: torch.optim.Adam(p, torch.tensor(1e-2))),
        "a tensor for lr; give a float",
    ),
    "hook on a weight": (
        lambda: changed(
            lambda model, _: model.user.weight.register_hook(lambda grad: grad * 2)
        ),
        r"'user.weight' \(.*\) has a hook on its gradient",
    ),
    "step replaced": (
        lambda: changed(
            lambda _, optimizers: setattr(
                optimizers[0], "step", types.MethodType(lambda o: None, 0)
            )
        ),
        "Adam.step was replaced",
    ),
    "outside the model": (
        outside,
        r"test_step.py:\d+ .* requires a gradient and is not the model's",
    ),
    "two optimizers": (twice, r"'user.weight' \(.*\) is moved by two optimizers"),
    "double": (
        lambda: changed(lambda model, _: model.double()),
        "is torch.float64; .*call model.float",
    ),
    "wrapped": (
        lambda: case((model := nn.DataParallel(Pairs())), logistic(model)),
        "'' .*is a DataParallel: adopt its .module",
    ),
    "branch": (
        lambda: of(Branching),
        r"test_step.py:\d+ \(if scores.sum\(\) > 0:\) depends on values",
    ),
    "a random mask": (
        lambda: of(SelectingAtRandom),
        r"test_step.py:\d+ \(.*masked_select.*\) depends on values",
    ),
    "unique": (
        lambda: of(Unique),
        r"test_step.py:\d+ \(return super.*\) depends on values",
    ),
    "random": (
        lambda: of(Noisy),
        r"test_step.py:\d+ \(.*random.random.*\) (cannot be traced by torch.compile|depends on values)",
    ),
    "sparse matrix": (
        lambda: of(OverAGraph),
        r"test_step.py:\d+ \(items = .*\) reads a sparse matrix, .*product is F.embedding_bag\(columns, dense, row",
    ),
    "packed": (
        lambda: of(Packed),
        r"test_step.py:\d+ \(packed = .*\) cannot be traced by torch.compile \(it leaves out pack_padded_seq",
    ),
    "weights written": (
        lambda: of(Rewriting),
        "writes into a weight or into the batch",
    ),
    "backward": (
        lambda: beside(lambda model, loss: backward(of_pairs()._replace(loss=loss))),
        r"calls backward\(\)",
    ),
    "list kept": (
        lambda: beside(
            lambda model, loss: (
                lambda *batch, kept=[]: (kept.append(1), loss(*batch))[1]
            )
        ),
        r"test_step.py:\d+ .* changes from step to step",
    ),
    "scaler": (
        lambda: beside(lambda model, loss: lambda *batch: SCALER.scale(loss(*batch))),
        "the loss is scaled by a GradScaler; return the loss itself",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_captured_form_is_refused_by_name_with_line_and_remedy(
    name: str,
) -> None:
    make, text = REFUSED[name]
    with pytest.raises(CannotAdopt, match=f"(?s)compile='require': .*{text}"):
        with_adopt(make, 9)


@pytest.mark.parametrize("name", ["max_norm", "momentum", "branch"])
def test_it_stays_eager_unless_required_equal_to_the_bit_and_says_so(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "WATCHED", 3)
    make, _ = REFUSED[name]
    plain, losses = plainly(make, 8)
    made, others, step = with_adopt(make, 8, compile="auto")
    assert losses == others
    assert farthest(states(plain), states(made)) == 0
    said = capsys.readouterr().out
    assert said.count("adopt: the step stays eager: ") == 1
    assert step.describe().startswith("eager: ")


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"model": "no"}, "model is a str; give an nn.Module"),
    ({"optimizer": [1]}, "optimizer is a int; give a torch.optim.Optimizer"),
    ({"optimizer": []}, "there is no optimizer"),
    ({"loss": 3}, "loss is a int; give a function"),
    ({"clip_norm": -1.0}, "clip_norm=-1.0: must be a number of 0 or more"),
    ({"clip_norm": float("nan")}, "clip_norm=nan: must be a number"),
    (
        {
            "model": (sparse := nn.Embedding(FEW, 1, sparse=True)),
            "optimizer": sgd(sparse),
            "clip_norm": 1.0,
        },
        r"clip_norm=1: the gradient of 'weight'.* is sparse, and .*; make the table with sparse=False",
    ),
    ({"compile": "yes"}, "compile='yes': must be 'auto', 'off' or 'require'"),
    ({"verify": -1}, "verify=-1: must be a number of steps"),
    (
        {
            "compile": "require",
            "autocast": lambda: torch.autocast("cpu", torch.float16),
        },
        "computes in float16, whose gradients need a GradScaler; take torch.bfloat16",
    ),
]


@pytest.mark.parametrize(("wrong", "text"), ARGUMENTS)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], text: str) -> None:
    made = of_pairs()
    arguments = {
        "model": made.model,
        "optimizer": made.optimizers,
        "loss": made.loss,
        **wrong,
    }
    model, optimizer, loss = (
        arguments.pop(name) for name in ("model", "optimizer", "loss")
    )
    with pytest.raises(CannotAdopt, match=text):
        adopt(model, optimizer, loss, **arguments)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda *_: 3.0, "the loss function returned a float; return the loss"),
        (
            lambda user, *_: torch.ones(3, requires_grad=True),
            r"the loss has the shape \(3,\); return one number",
        ),
        (lambda *_: torch.ones(()), "the loss does not depend on a parameter"),
    ],
)
def test_a_loss_that_is_none_is_refused_at_the_first_step(loss: Any, text: str) -> None:
    made = of_pairs()
    with pytest.raises(CannotAdopt, match=text):
        adopt(made.model, made.optimizers, loss)(*next(batches(made, 1)))


def test_eager_steps_are_the_users_own_to_the_bit() -> None:
    for name in (
        "dropout",
        "Adagrad and Adam",
        "clipped",
        "LSTM",
    ):
        plain, losses = plainly(CASES[name], 6)
        made, others, _ = with_adopt(CASES[name], 6, compile="auto")
        assert others == losses
        assert farthest(states(plain), states(made)) == 0


@pytest.mark.parametrize("gain", [3.0, 1 / 3])
def test_a_capture_stays_if_it_pays(
    gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(executors, "compile_graph", lambda graph, examples: graph)
    for name in ("CAPTURE_S", "CAPTURE_S_PER_CALL"):
        monkeypatch.setattr(adopted, name, {"cpu": 0.0, "cuda": 0.0})
    monkeypatch.setattr(policy, "WATCHED", 4)
    monkeypatch.setattr(
        policy, "median_step", lambda seconds: 1e-3 * (gain if len(seconds) == 4 else 1)
    )
    *_, step = with_adopt(of_pairs, 20, compile="auto")
    expected = "captured since step 5; " if gain > 1 else "eager: "
    assert step.describe().startswith(expected)


def adopted_case(**options: Any) -> tuple[Case, AdoptedStep, Iterator[Batch]]:
    """A model of two tables moved row by row, after its capture."""
    made = made_anew(CASES["Adam, row by row"])
    step = adopt(made.model, made.optimizers, made.loss, compile="require", **options)
    given = batches(made, 200)
    for batch in itertools.islice(given, 8):
        step(*batch)
    assert "row by row" in step.describe()
    return made, step, given


def read_as(way: str, made: Case) -> Tensor:
    """The users' rows, by one of the ways in which somebody may read them."""
    model: Any = made.model
    ids = torch.arange(USERS)
    with torch.no_grad():
        return {  # type: ignore[no-any-return]
            "state_dict": lambda: model.state_dict()["user.weight"],
            "submodule": lambda: model.user.state_dict()["weight"],
            "forward": lambda: model.user(ids),
            "matrix": lambda: model.user.weight @ torch.eye(D),
            "data": lambda: model.user.weight.data,
            "numpy": lambda: torch.from_numpy(model.user.weight.detach().numpy()),
            "copy": lambda: copy.deepcopy(model).user.weight,
            "saved": lambda: saved(model).user.weight,
            "other state": lambda: (
                made.optimizers[0].state_dict() and model.user.weight
            ),
        }[way]().clone()


def saved(model: nn.Module) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


WAYS = [
    "state_dict",
    "submodule",
    "forward",
    "matrix",
    "data",
    "numpy",
    "copy",
    "saved",
    "other state",
]


def test_whoever_reads_a_weight_or_a_state_reads_it_with_all_rows_caught_up() -> None:
    plain, _ = plainly(CASES["Adam, row by row"], 8 + 2 * len(WAYS))
    made, step, given = adopted_case()
    references = plainly_at(
        CASES["Adam, row by row"], [8 + 2 * (index + 1) for index in range(len(WAYS))]
    )
    for way, reference in zip(WAYS, references, strict=True):
        for batch in itertools.islice(given, 2):
            step(*batch)
        assert type(made.model.user.weight) is not nn.Parameter  # type: ignore[union-attr]
        assert float((read_as(way, made) - reference).abs().max()) < BY_ROW, way
        assert type(made.model.user.weight) is nn.Parameter  # type: ignore[union-attr]
    state = made.optimizers[0].state[made.model.user.weight]  # type: ignore[index, union-attr]
    step(*next(given))
    assert type(state["exp_avg"]) is not Tensor
    assert float(state["step"]) == 8 + 2 * len(WAYS) + 1
    assert type(state["exp_avg"]) is Tensor
    assert farthest(states(plain), states(plain)) == 0


def plainly_at(make: Callable[[], Case], counts: list[int]) -> list[Tensor]:
    return [
        plainly(make, count)[0].model.state_dict()["user.weight"] for count in counts
    ]


def test_who_writes_a_weight_writes_over_rows_that_are_caught_up() -> None:
    made, step, given = adopted_case(verify=0)
    other = made_anew(CASES["Adam, row by row"])
    with torch.no_grad():
        for batch in itertools.islice(given, 4):
            step(*batch)
            made.model.user.weight.mul_(0.5)  # type: ignore[union-attr, operator]
    generator = torch.Generator().manual_seed(1)
    for number in range(12):
        other.optimizers[0].zero_grad()
        other.loss(*other.batch(generator)).backward()
        other.optimizers[0].step()
        if number >= 8:
            with torch.no_grad():
                other.model.user.weight.mul_(0.5)  # type: ignore[union-attr, operator]
    assert farthest(states(made), states(other)) < BY_ROW


@pytest.mark.parametrize(
    "fresh", [False, True], ids=["the same objects", "new objects"]
)
@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("Adam", "Adagrad and Adam")
        ),
        "Adam, row by row",
    ],
)
def test_a_resumed_run_equals_one_that_never_stopped(name: str, fresh: bool) -> None:
    made, losses, _ = with_adopt(CASES[name], 14)
    half, _, step = with_adopt(CASES[name], 9)
    kept = copy.deepcopy(
        [half.model.state_dict(), *[each.state_dict() for each in half.optimizers]]
    )
    if fresh:
        half = made_anew(CASES[name])
        step = adopt(half.model, half.optimizers, half.loss, compile="require")
    else:
        for batch in itertools.islice(batches(half, 20), 15, 18):
            step(*batch)
    half.model.load_state_dict(kept[0])
    for optimizer, state in zip(half.optimizers, kept[1:], strict=True):
        optimizer.load_state_dict(state)
    again = [
        float(step(*batch)[0]) for batch in itertools.islice(batches(half, 14), 9, None)
    ]
    within = BY_ROW if "row by row" in step.describe() else WHOLE
    assert again == pytest.approx(losses[9:], abs=within)
    assert farthest(states(made), states(half)) < within
    if not fresh:
        assert type(half.optimizers[-1].state_dict()["param_groups"][0]["lr"]) is float
        assert step.describe().startswith("captured since step 3")


def test_a_loaded_learning_rate_and_a_scheduler_take_effect() -> None:
    made, step, given = adopted_case()
    state = made.optimizers[0].state_dict()
    state["param_groups"][0]["lr"] = 0.0
    made.optimizers[0].load_state_dict(state)
    before = made.model.top[0].weight.clone()  # type: ignore[index, union-attr, operator]
    step(*next(given))
    assert torch.equal(before, made.model.top[0].weight)  # type: ignore[index, union-attr, arg-type]
    made.optimizers[0].param_groups[0]["lr"] = 0.1
    step(*next(given))
    assert not torch.equal(before, made.model.top[0].weight)  # type: ignore[index, union-attr, arg-type]


class Tempered(Pairs):
    """Its forward reads a number that somebody may change."""

    temperature = 1.0

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return super().forward(user, item) * self.temperature


def test_a_number_that_changes_in_every_step_ends_the_capture_and_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopted, "GRAPHS", 3)
    monkeypatch.setattr(captures, "GRAPHS", 3)
    monkeypatch.setattr(policy, "WATCHED", 2)
    found = []
    for compile_ in ("off", "auto"):
        torch.manual_seed(0)
        model: Any = Tempered()
        step = adopt(model, adam(model), logistic(model), compile=compile_)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(2)
        for number in range(12):
            model.temperature = 1.0 + number / 10
            step(*pairs(generator))
        found.append(model.state_dict())
    assert (
        "'temperature' changes from step to step; give it to the step as a tensor"
        in capsys.readouterr().out
    )
    assert farthest(*found) < WHOLE


def test_settings_that_a_scheduler_cycles_are_refused() -> None:
    one = lambda by: torch.optim.lr_scheduler.OneCycleLR(by, 0.1, total_steps=50)  # noqa: E731
    with pytest.raises(
        CannotAdopt,
        match=r"a setting of the optimizer other than lr .*cycle_momentum=False",
    ):
        with_adopt(lambda: scheduled(one), 6)


def test_batches_of_other_shapes_and_types_are_captured_or_eager_and_learn_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for compile_, patience in (("off", 0), ("auto", 0), ("auto", 3)):
        monkeypatch.setattr(policy, "PATIENCE", patience)
        torch.manual_seed(0)
        model = Pairs(USERS, ITEMS)
        step = adopt(model, adam(model), logistic(model), compile=compile_)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(2)
        for number in range(30):
            user, item, label = pairs(generator, USERS, ITEMS)
            size = 7 if number % 5 == 4 else B
            user = user.int() if number % 7 == 6 else user
            # not contiguous
            item = torch.stack([item, item], 1)[:, 0] if number % 3 else item
            step(user[:size], item[:size], label[:size])
        found.append((model.state_dict(), step))
    for state, step in found[1:]:
        assert step.describe().startswith("captured")
        assert farthest(found[0][0], state) < BY_ROW
    printed = capsys.readouterr().out
    assert printed.count("adopt: ... ") == 2
    assert printed.count("adopt: compiled one more step in ") > 1


def padded(generator: torch.Generator, width: int) -> Batch:
    ids = torch.randint(FEW, (B, width), generator=generator)
    return ids, torch.randint(2, (B,), generator=generator).float()


def test_of_many_widths_some_are_captured_and_the_rest_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "PATIENCE", 2)
    found = []
    for compile_ in ("off", "auto"):
        torch.manual_seed(0)
        model = Listed(nn.Identity(), padding_idx=0)
        step = adopt(model, adam(model), logistic(model), compile=compile_)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(2)
        losses = []
        for number in range(120):
            losses.append(float(step(*padded(generator, 1 + number % 12))[0]))
        found.append((losses, step.describe()))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-5)
    assert found[1][1].startswith("captured since step 13")
    assert "batches of more than 4 shapes" in found[1][1]
    assert "tensor 0 is (16, " in found[1][1]
    step = adopt(model, adam(model), logistic(model), compile="require")
    for width in range(1, 7):
        step(*padded(generator, width))
    with pytest.raises(CannotAdopt, match="batches of more than 4 shapes"):
        step(*padded(generator, 7))


def test_tensors_around_the_loss_are_read_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "WATCHED", 2)
    monkeypatch.setattr(policy, "PATIENCE", 0)
    made, weights = of_pairs(), torch.ones(B)
    loss = lambda user, item, label: (  # noqa: E731
        F.binary_cross_entropy_with_logits(
            made.model(user, item), label, weight=weights
        )
    )
    step = adopt(made.model, made.optimizers, loss)
    given = batches(made, 30)
    for batch in itertools.islice(given, 6):
        step(*batch)
    weights.zero_()
    assert float(step(*next(given))[0]) == 0.0
    weights = torch.ones(B)  # another, of which the captured step knows nothing
    assert float(step(*next(given))[0]) > 0.0
    assert step.describe().startswith("captured since step 3")


def read_around(made: Case, compile_: Any) -> list[float]:
    """A loop whose loss reads the variables of the loop."""
    step = adopt(
        made.model, made.optimizers, lambda: made.loss(*current[0]), compile=compile_
    )
    losses = []
    for current in ([batch] for batch in batches(made, 30)):
        losses.append(float(step()[0]) if current else 0.0)
    return losses


def test_a_batch_that_is_read_around_the_loss_is_not_taken_for_a_constant() -> None:
    losses = []
    for compile_ in ("off", "auto"):
        losses.append(read_around(made_anew(of_pairs), compile_))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_step_of_sgd_far_below_the_size_of_its_weights_is_no_difference() -> None:
    def make() -> Case:
        made = of_pairs(by=lambda model: sgd(model, lr=1e-5), **BIG)
        with torch.no_grad():
            made.model.item.weight += 30  # type: ignore[union-attr, operator]
        return made

    _, losses, step = with_adopt(make, 9)
    assert step.describe().startswith("captured since step 3")
    assert losses == pytest.approx(plainly(make, 9)[1], abs=1e-6)


def test_a_captured_step_that_differs_from_the_eager_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(graph: torch.fx.GraphModule, examples: Any) -> Any:
        def run(*tensors: Tensor) -> Any:
            result = graph(*tensors)
            weight = next(
                tensor
                for tensor in tensors
                if isinstance(tensor, nn.Parameter) and tensor.shape == (4, 2 * D)
            )
            weight.detach().mul_(1.01)
            return result

        return run

    monkeypatch.setattr(executors, "compile_graph", wrong)
    text = (
        r"differs from the eager one on the same batch in the weights of 'top.0.weight'"
    )
    with pytest.raises(CannotAdopt, match=text):
        with_adopt(of_pairs, 6)
    plain, losses = plainly(of_pairs, 6)
    monkeypatch.setattr(policy, "WATCHED", 2)
    made, others, step = with_adopt(of_pairs, 6, compile="auto")
    assert text in step.describe()
    assert losses == others
    assert farthest(states(plain), states(made)) == 0


class Differences(nn.Module):
    """Reads directions of differences that are little above rounding: a change of the last bit turns them."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.top = nn.Embedding(ITEMS, D), nn.Linear(D, 1)
        self.register_buffer(
            "anchor", self.item.weight.detach() * (1 + 2e-6 * torch.rand(ITEMS, D))
        )

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        anchor: Tensor = self.anchor  # type: ignore[assignment]
        return self.top(
            F.normalize(self.item(item) - F.embedding(item, anchor))
        ).squeeze(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("share", [1.0, 1.01])
def test_a_step_that_rounding_changes_is_compared_within_what_rounding_changes(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step that rounds weights another way is the eager one; one whose dense weights are off is not."""

    def rounded(graph: torch.fx.GraphModule, examples: Any) -> Any:
        def run(*tensors: Tensor) -> Any:
            item = next(
                tensor
                for tensor in tensors
                if isinstance(tensor, nn.Parameter) and tensor.shape == (ITEMS, D)
            )
            item.detach().mul_(1 + 2.0**-23 * torch.randint(-1, 2, item.shape))
            result = graph(*tensors)
            for tensor in tensors:
                if isinstance(tensor, nn.Parameter) and tensor.shape == (1, D):
                    tensor.detach().mul_(share)
            return result

        return run

    def make() -> Case:
        torch.manual_seed(0)
        model = Differences()
        return case(
            model,
            logistic(model),
            batch=lambda g: pairs(g, USERS, ITEMS),
            optimizers=adam(model, lr=1e-8),
        )

    monkeypatch.setattr(executors, "compile_graph", rounded)
    monkeypatch.setattr(policy, "WATCHED", 2)
    *_, step = with_adopt(make, 9, compile="auto")
    assert ("differs from the eager one" in step.describe()) == (share != 1)


@pytest.mark.parametrize("captured", [False, True])
def test_a_loss_that_is_not_finite_ends_the_run_with_its_step(captured: bool) -> None:
    made = made_anew(of_pairs)
    step = adopt(
        made.model, made.optimizers, made.loss, compile="require" if captured else "off"
    )
    given = batches(made, 20)
    for batch in itertools.islice(given, 7):
        step(*batch)
    user, item, label = next(given)
    written = (
        "the update of this step was written"
        if captured
        else "nothing was written by this step"
    )
    with pytest.raises(
        TrainingDivergedError,
        match=f"the loss is nan at step 8: {written}; look for values",
    ):
        step(user, item, label / 0 * 0)


@pytest.mark.parametrize(
    ("users", "wrong", "computed"),
    [(USERS, -1, False), (FEW, "rows", False), (USERS, "rows", True)],
    ids=["row by row", "whole", "computed"],
)
def test_after_an_id_out_of_range_the_next_batch_goes_on_as_in_the_users_loop(
    users: int, wrong: int | str, computed: bool
) -> None:
    """The user's own error, with table and id as its cause; weights and state as without that batch."""
    number = users if wrong == "rows" else -1
    made = made_anew(lambda: of_pairs(users))
    loss = made.loss
    if computed:
        made = made._replace(loss=lambda u, *rest: loss((u[:, None] * 1)[:, 0], *rest))
    step = adopt(made.model, made.optimizers, made.loss, compile="require")
    for count, batch in enumerate(batches(made, 20)):
        torch.manual_seed(count)
        if count == 8:
            before = copy.deepcopy(states(made))
            user = batch[0].clone()
            user[-1] = number  # type: ignore[call-overload]
            with pytest.raises(IndexError, match="index out of range in self") as error:
                step(user, *batch[1:])
            assert str(error.value.__cause__) == (
                f"'user.weight' has no row {number}: ids must be 0 to {users - 1}; nothing was written by this step"
            )
            torch.testing.assert_close(states(made), before, rtol=0, atol=0)
        step(*batch)
    assert step.describe().startswith("captured since step 3")
    own, _ = plainly(lambda: of_pairs(users), 20)
    torch.testing.assert_close(states(made), states(own), rtol=1e-3, atol=1e-4)


def test_a_dropped_step_dies_and_leaves_weights_and_state_as_in_the_users_loop() -> (
    None
):
    """Optimizers outlive it, and rows were behind."""
    made, step, _ = adopted_case()
    alive = weakref.ref(step)
    del step
    gc.collect()
    assert alive() is None
    own, _ = plainly(CASES["Adam, row by row"], 8)
    torch.testing.assert_close(states(made), states(own), rtol=1e-3, atol=1e-4)
    for optimizer, others in zip(made.optimizers, own.optimizers, strict=True):
        optimizer.load_state_dict(others.state_dict())
    made.loss(*next(batches(made, 1))).backward()
    made.optimizers[0].step()


def test_the_users_modules_are_as_before_and_can_be_adopted_again() -> None:
    made, step, given = adopted_case()
    step(*next(given))
    adopt(made.model, made.optimizers, made.loss, compile="require")
    step(*next(given))
    assert all("forward" not in vars(module) for module in made.model.modules())
    step.settle()
    assert [type(each) for each in made.model.parameters()] == [nn.Parameter] * 6
    assert made.model.state_dict().keys() == Pairs().state_dict().keys()


@pytest.mark.slow
def test_a_compiled_step_learns_the_same(compiled: None) -> None:
    check("padding, row by row", 9)


def in_16_bits() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def test_layers_compute_in_16_bits_and_weights_stay_as_they_are() -> None:
    losses = []
    for compile_ in ("off", "require"):
        made, of_run, _ = with_adopt(of_pairs, 8, compile=compile_, autocast=in_16_bits)
        assert {each.dtype for each in made.model.parameters()} == {torch.float32}
        losses.append(of_run)
    exact = with_adopt(of_pairs, 8)[1]
    assert losses[0] != exact
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)


def test_a_table_that_is_moved_as_a_dense_layer_is_said_with_its_reason() -> None:
    *_, step = with_adopt(softmax, 3)
    text = r"as a dense layer: item.weight \(.*test_step.py:\d+ \(return self.user\(user\) @ self.item.weight.T\)\)"
    assert re.search(text, step.describe())


@st.composite
def models(draw: st.DrawFn) -> Callable[[], Case]:
    """A small model: tables of some sizes and kinds, a network, an optimizer, and perhaps something refused."""
    users, width = draw(st.sampled_from([FEW, USERS])), draw(st.sampled_from([1, 3, 4]))
    kind = draw(st.sampled_from(["Adam", "AdamW", "Adagrad", "SGD"]))
    decay = draw(st.sampled_from([0.0, 0.1]))
    padding = draw(st.sampled_from([None, 0, -1]))
    options = draw(
        st.sampled_from(
            [{}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}, {}, {}, {}]
        )
    )
    matrix, tie, frozen_table, clip = (draw(st.booleans()) for _ in range(4))
    # Normalised over one number, a row is 0 but for rounding, which is then all of the
    # gradient of LayerNorm's weight.
    layers = draw(
        st.lists(
            st.sampled_from(["Linear", "ReLU", "Sigmoid", *["LayerNorm"][: width - 1]]),
            max_size=4,
        )
    )

    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user = nn.Embedding(users, width, padding_idx=padding, **options)
            self.item = nn.Embedding(users, width)
            self.bag = nn.EmbeddingBag(users, width, mode="mean")
            made = {
                "Linear": lambda: nn.Linear(width, width),
                "LayerNorm": lambda: nn.LayerNorm(width),
            }
            self.top = nn.Sequential(
                *[made.get(layer, getattr(nn, layer))() for layer in layers]
            )
            if tie:
                self.item.weight = self.user.weight
            self.bag.requires_grad_(not frozen_table)

        def forward(self, user: Tensor, items: Tensor) -> Tensor:
            rows = self.top(self.user(user) + self.bag(items))
            scores = (rows * self.item(items[:, 0])).sum(1)
            return (
                scores + self.user.weight.square().sum(1).mean() if matrix else scores
            )

    def make() -> Case:
        model = Drawn()
        optimizer = getattr(torch.optim, kind)(
            model.parameters(), 1e-2, weight_decay=decay
        )

        def batch(generator: torch.Generator) -> Batch:
            user, items = (
                torch.randint(users, shape, generator=generator)
                for shape in ((B,), (B, L))
            )
            return user, items, torch.randint(2, (B,), generator=generator).float()

        return case(
            model,
            logistic(model),
            optimizers=[optimizer],
            batch=batch,
            **({"clip_norm": 0.1} if clip else {}),
        )

    return make


def tables(model: nn.Module) -> list[nn.Embedding]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def equal_or_refused(make: Callable[[], Case], count: int) -> None:
    plain, losses = plainly(make, count)
    if any(
        module.max_norm or module.scale_grad_by_freq
        for module in tables(made_anew(make).model)
    ):
        with pytest.raises(CannotAdopt, match=r"max_norm|scale_grad_by_freq"):
            with_adopt(make, count)
        return
    made, others, step = with_adopt(make, count)
    within = BY_ROW if "row by row" in step.describe() else 2e-5
    assert others == pytest.approx(losses, abs=within)
    assert (
        farthest(dict(plain.model.state_dict()), dict(made.model.state_dict()))
        < 2 * within
    )


@settings(max_examples=4, derandomize=True)
@given(make=models())
def test_a_generated_model_is_equal_or_refused(make: Callable[[], Case]) -> None:
    equal_or_refused(make, 7)


@pytest.mark.slow
@settings(max_examples=200)
@given(make=models())
def test_many_generated_models_are_equal_or_refused(make: Callable[[], Case]) -> None:
    equal_or_refused(make, 12)


def rows_of_pairs(size: int = 90) -> Any:
    """Columns of a Dataset, of which a row gives a user's item and two others."""
    generator = torch.Generator().manual_seed(5)
    columns = {
        "user": torch.randint(USERS, (size,), generator=generator),
        "item": torch.randint(FEW, (size,), generator=generator),
    }
    negatives = Uniform(FEW, draws=2, exclude=("user", "item"))
    return Rows(columns, B, negatives=negatives, seed=3)


def test_batches_made_inside_the_step_are_those_of_a_loader_and_equal_ids_are_looked_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up: dict[str, list[int]] = {}
    choose = StepMemory.choose
    monkeypatch.setattr(
        StepMemory,
        "choose",
        lambda memory, lookups, rule: (
            looked_up.update(lookups),
            choose(memory, lookups, rule),
        ),
    )
    found = []
    for compile_, inside in (("off", False), ("off", True), ("require", True)):
        torch.manual_seed(0)
        model = Pairs(USERS, FEW)
        step = adopt(
            model, adam(model), logistic(model), rows=rows_of_pairs(), compile=compile_
        )  # type: ignore[arg-type]
        rows = rows_of_pairs()
        losses = [
            float(loss)
            for _ in range(3)
            for loss in (step.epoch() if inside else map(step_of(step), rows))
        ]
        found.append((losses, model.state_dict()))
    assert len(found[0][0]) == 18  # the last batch of an epoch has 10 rows
    assert found[0][0] == found[1][0]
    assert found[2][0] == pytest.approx(found[0][0], abs=1e-5)
    assert farthest(found[0][1], found[1][1]) == 0
    assert farthest(found[0][1], found[2][1]) < BY_ROW
    assert looked_up == {"user.weight": B, "item.weight": 3 * B}


class Concatenated(nn.Module):
    """A layer over what is looked up by ids that repeat, by others, and a column of numbers that repeats."""

    def __init__(self, change: Callable[..., Tensor]) -> None:
        super().__init__()
        self.user = nn.Embedding(FEW, 8)
        self.item = nn.Embedding(FEW, D)
        self.change = change
        self.top = nn.Sequential(nn.Linear(8 + D + 8, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, user: Tensor, item: Tensor, context: Tensor) -> Tensor:
        return self.top(self.change(self.user(user), self.item(item), context)).squeeze(
            1
        )  # type: ignore[no-any-return]


def doubled(*columns: Tensor) -> Tensor:
    rows = torch.cat(columns, 1)
    rows[1] *= 2.0
    return rows


JOINED: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "concatenated": (lambda *columns: torch.cat(columns, 1), True),
    "written": (doubled, False),
}


@pytest.mark.parametrize("name", JOINED)
def test_a_layer_multiplies_rows_that_repeat_once_and_learns_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    columns = {
        "user": torch.randint(FEW, (40,), generator=generator),
        "item": torch.randint(FEW, (40,), generator=generator),
        "context": torch.randn(40, 8, generator=generator),
    }
    negatives = Uniform(FEW, draws=4)
    change, once = JOINED[name]
    multiplied: list[Any] = []

    def compile_graph(graph: Any, _: Any) -> Any:
        products = [
            node.meta["example_value"].shape
            for node in graph.graph.nodes
            if node.target is F.linear
        ]
        multiplied.extend(tuple(shape) for shape in products)
        return graph

    monkeypatch.setattr(executors, "compile_graph", compile_graph)
    weights, losses = [], []
    for way in ("off", "require"):
        torch.manual_seed(0)
        model = Concatenated(change)
        loss = (  # noqa: E731
            lambda *batch, model=model: F.binary_cross_entropy_with_logits(
                model(*batch[:3]), batch[3]
            )
        )
        rows = Rows(columns, 8, negatives=negatives, positive="item", seed=3)
        step = adopt(
            model,
            torch.optim.Adam(model.parameters(), 1e-2),
            loss,
            rows=rows,
            compile=way,
        )  # type: ignore[arg-type]
        losses.append([float(each) for _ in range(4) for each in step.epoch()])
        weights.append(
            {key: value.clone() for key, value in model.state_dict().items()}
        )
    assert losses[1] == pytest.approx(losses[0], abs=2e-6)
    assert farthest(*weights) < 1e-5
    assert ((8, 6) in multiplied) == once


def step_of(step: AdoptedStep) -> Callable[[Batch], Tensor]:
    return lambda batch: step(*batch)[0]


def script() -> tuple[nn.Module, torch.optim.Optimizer, Any, AdoptedStep]:
    """A user's script from its first line to its loop."""
    torch.manual_seed(0)
    model, rows = Pairs(USERS, FEW), rows_of_pairs()
    (optimizer,) = adam(model)
    return (
        model,
        optimizer,
        rows,
        adopt(model, optimizer, logistic(model), rows=rows, compile="require"),
    )


def test_a_script_that_is_stopped_in_mid_epoch_ends_with_the_weights_of_one_that_is_not() -> (
    None
):
    model, optimizer, rows, step = script()
    losses = [float(loss) for _ in range(3) for loss in step.epoch()]
    whole = states(Case(model, [optimizer], step, None, {}, []))  # type: ignore[arg-type]
    model, optimizer, rows, step = script()
    begun = [
        float(loss)
        for loss in itertools.chain(step.epoch(), itertools.islice(step.epoch(), 3))
    ]
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), rows.state_dict()], file)
    model, optimizer, rows, step = script()
    for each, state in zip(
        (model, optimizer, rows), torch.load(io.BytesIO(file.getvalue())), strict=True
    ):
        each.load_state_dict(state)
    begun += [float(loss) for _ in range(2) for loss in step.epoch()]
    assert len(losses) == len(begun) == 18
    assert begun == pytest.approx(losses, abs=1e-5)
    assert (
        farthest(whole, states(Case(model, [optimizer], step, None, {}, []))) < BY_ROW
    )  # type: ignore[arg-type]
    assert "user.weight" in step.describe()
    assert "row by row" in step.describe()


def test_an_epoch_without_rows_is_refused() -> None:
    made = of_pairs()
    with pytest.raises(
        CannotAdopt, match=r"epoch\(\) has no rows; give adopt\(..., rows=Rows\("
    ):
        next(adopt(made.model, made.optimizers, made.loss).epoch())


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_second_users_script_is_adopted_by_a_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Unparsed, each statement is one line, however the files are formatted.
    texts = [
        ast.unparse(ast.parse((EXAMPLES / name).read_text().split('"""', 2)[2]))
        for name in ("ncf_script.py", "ncf_adopted.py")
    ]
    lines = list(difflib.unified_diff(*[text.splitlines() for text in texts], n=0))
    added = [line for line in lines[2:] if line.startswith("+") and line.strip("+ ")]
    assert (
        len([line for line in added if "import" not in line and "print" not in line])
        == 3
    )
    monkeypatch.chdir(tmp_path)
    kept = []
    for name in ("ncf_script", "ncf_adopted"):
        spec: Any = importlib.util.spec_from_file_location(
            name, EXAMPLES / f"{name}.py"
        )
        monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
        spec.loader.exec_module(sys.modules[name])
        sys.modules[name].main(2_000, 3)
        kept.append(torch.load("ncf.pt"))
    said = capsys.readouterr().out
    losses = [
        float(line.split()[-1])
        for line in said.splitlines()
        if line.startswith("epoch ")
    ]
    assert losses[:3] == pytest.approx(losses[3:], rel=0.05)
    assert losses[0] > losses[2]
    assert "adopt: compiling the training step" in said
    assert [list(state) for state in kept[:1]] == [list(state) for state in kept[1:]]
