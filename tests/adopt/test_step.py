"""An adopted model learns what the user's own loop learns, whatever it is made of, or is refused by name."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import random
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchrec_ext
import torchrec_ext.adopt.step as adopted
from tests.adopt import pairs as pairs_of
from tests.adopt.pairs import D, logistic
from torchrec_ext.adopt import AdoptedStep, CannotAdopt, adopt, captures, verify
from torchrec_ext.adopt.reads import look_up
from torchrec_ext.capture import executors, policy
from torchrec_ext.capture.policy import TrainingDivergedError

# of the few rows, tables are moved whole
USERS, ITEMS, FEW, B, L = (700, 300, 20, 16, 3)
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

    model: Any
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


def lists(generator: torch.Generator, width: int = L) -> Batch:
    return torch.randint(FEW, (B, width), generator=generator), torch.randint(
        2, (B,), generator=generator
    ).float()


def adam(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), **{"lr": 1e-2, **options})]


def adagrad(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adagrad(model.parameters(), **{"lr": 0.05, **options})]


def sgd(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})]


def case(
    model: nn.Module,
    loss: Callable[..., Any] | None = None,
    *,
    by: Callable[[Any], list[torch.optim.Optimizer]] = sgd,
    batch: Callable[[torch.Generator], Batch] = pairs,
    **options: Any,
) -> Case:
    return Case(model, by(model), loss or logistic(model), batch, options, [])


class Pairs(pairs_of.Pairs):
    """Of few rows."""

    def __init__(self, users: int = FEW, items: int = FEW, **options: Any) -> None:
        super().__init__(users, items, **options)


def of_pairs(
    users: int = FEW,
    items: int = FEW,
    by: Callable[[Any], list[torch.optim.Optimizer]] = adam,
    options: dict[str, Any] | None = None,
    **made: Any,
) -> Case:
    """Pairs under some optimizer; ``made`` are further arguments of Pairs."""
    draw = functools.partial(pairs, users=users, items=items)
    return case(Pairs(users, items, **made), by=by, batch=draw, **(options or {}))


def adam_and(**options: Any) -> Callable[[], Case]:
    return lambda: of_pairs(USERS, ITEMS, by=lambda model: adam(model, **options))


def two_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adagrad([model.user.weight, model.item.weight], 0.05),
        torch.optim.Adam(model.top.parameters()),
    ]


def scheduled(kind: Callable[[Any], Any]) -> Case:
    made = of_pairs()
    return made._replace(schedulers=[kind(made.optimizers[0])])


def with_large_weights() -> Case:
    """Steps of SGD are far below the size of the weights."""
    made = of_pairs(USERS, ITEMS, by=lambda model: sgd(model, lr=1e-5))
    with torch.no_grad():
        made.model.item.weight += 30
    return made


class Bags(nn.Module):
    """Lists of one length and, one after the other, of any: pooled, weighted, padded, with ends."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(FEW, D, mode="mean")
        self.weighted = nn.EmbeddingBag(FEW, D, mode="sum")
        self.padded = nn.EmbeddingBag(FEW, D, mode="mean", padding_idx=0)
        self.ended = nn.EmbeddingBag(FEW, D, mode="sum", include_last_offset=True)
        self.top = nn.Linear(4 * D, 1)

    def forward(self, items: Tensor, starts: Tensor) -> Tensor:
        flat = items.view(-1)
        ends = torch.cat([starts, starts.new_tensor([B * L])])
        bags = [
            self.mean(items),
            self.weighted(items, None, (items + 1.0) / FEW),
            self.padded(flat, starts),
            self.ended(flat, ends),
        ]
        return self.top(torch.cat(bags, 1)).squeeze(1)  # type: ignore[no-any-return]


def ragged(generator: torch.Generator) -> Batch:
    """Lists of B x L items, and where lists of other lengths, some of them empty, begin in each batch."""
    items, label = lists(generator)
    inner = torch.randint(B * L, (B - 1,), generator=generator).sort().values
    return items, torch.cat([inner.new_zeros(1), inner]), label


class Plus(nn.Embedding):
    """A user's subclass with a forward of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 1.0


class Forms(nn.Module):
    """A subclass of a table, one that shares its weight, and tables that are plain parameters; padding."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(FEW, D, padding_idx=3), Plus(FEW, D)
        self.tied = nn.Embedding(FEW, D)
        self.tied.weight = self.user.weight
        self.indexed, self.looked_up = (
            nn.Parameter(torch.randn(FEW, D)) for _ in range(2)
        )

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        of_modules = self.user(user) * self.item(item) + self.tied(item)
        raw = self.indexed[user] * F.embedding(item, self.looked_up)
        return (of_modules + raw).sum(1)  # type: ignore[no-any-return]


class Softmax(nn.Module):
    """All items are scored: their table is read as a matrix, and by ids too."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(FEW, D), nn.Embedding(ITEMS, D)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        scores = self.user(user) @ self.item.weight.T
        return scores * self.item(item).sum(1, keepdim=True)


def softmax() -> Case:
    model = Softmax()
    return case(model, lambda user, item, _: F.cross_entropy(model(user, item), item))


class Layers(nn.Module):
    """A list of items through layers that need care: running statistics, random numbers, mkldnn, parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(FEW, D, padding_idx=0)
        self.lstm = nn.LSTM(D, D, batch_first=True)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.norm, self.drop = nn.BatchNorm1d(D), nn.Dropout(0.3)
        self.top = nn.utils.parametrizations.weight_norm(nn.Linear(D, 1))

    def forward(self, items: Tensor) -> Tensor:
        rows, _ = self.lstm(self.item(items))
        rows, _ = self.attention(rows, rows, rows)
        return self.top(self.drop(self.norm(rows.mean(1)))).squeeze(1)  # type: ignore[no-any-return]


def pairwise() -> Case:
    """BPR, with outputs beside the loss, and a layer that no optimizer moves."""
    model = Pairs(USERS, ITEMS)

    def loss(user: Tensor, item: Tensor, negatives: Tensor) -> tuple[Tensor, Any]:
        users = model.user(user)
        positive = (users * model.item(item)).sum(1, keepdim=True)
        scores = (users[:, None] * model.item(negatives)).sum(2)
        auc = (positive > scores).float().mean()
        return -F.logsigmoid(positive - scores).mean(), {"auc": auc, "scores": scores}

    def draw(generator: torch.Generator) -> Batch:
        drawn = torch.randint(ITEMS, (B, 2), generator=generator)
        return *pairs(generator, USERS, ITEMS)[:2], drawn

    def by(model: Any) -> list[torch.optim.Optimizer]:
        return adam(nn.ModuleList([model.user, model.item]))

    return case(model, loss, batch=draw, by=by)


class Remembering(Pairs):
    """Its forward keeps what it computed."""

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        self.scores = super().forward(user, item)
        return self.scores


def odd() -> Case:
    """What a script may have besides: hooks, a spare layer, other types in batch and output."""
    model = Remembering()
    model.add_module("spare", nn.Linear(3, 3))
    model.user.register_forward_hook(lambda *_: None)

    def loss(user: Tensor, item: Tensor, label: Tensor, _: object) -> Any:
        return logistic(model)(user, item, label).view(1), {"n": 3.0}

    def draw(generator: torch.Generator) -> Batch:
        user, item, label = pairs(generator)
        return user.int(), item.int(), label, object()

    return case(model, loss, batch=draw, by=adam)


def read_by_a_package() -> Case:
    """A loss of this package's reads a table whole, without a gradient: its trace names no line of the user's."""
    source = """def loss(model, criterion, *batch):
        return criterion(*batch) * (1 + model.user.weight.detach().square().mean())"""
    defined: dict[str, Any] = {}
    exec(compile(source, torchrec_ext.__file__, "exec"), defined)
    made = of_pairs(USERS, ITEMS)
    loss = functools.partial(defined["loss"], made.model, made.loss)
    return made._replace(loss=loss)


class Reversed(torch.autograd.Function):
    """Hands a value on, and its gradient back with the other sign, as adversarial training does."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -0.3 * gradient


CASES: dict[str, Callable[[], Case]] = {
    "Adam": of_pairs,
    "Adam, row by row": adam_and(),
    "Adam with l2": adam_and(weight_decay=0.1),
    "AdamW": lambda: of_pairs(
        USERS,
        ITEMS,
        by=lambda model: [
            torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
        ],
    ),
    "Adagrad with l2": lambda: of_pairs(
        USERS, ITEMS, by=lambda model: adagrad(model, weight_decay=0.1)
    ),
    "Adagrad, sparse": lambda: of_pairs(USERS, ITEMS, by=adagrad, sparse=True),
    "SGD, sparse": lambda: of_pairs(USERS, ITEMS, by=sgd, sparse=True),
    "SGD of large weights": with_large_weights,
    "Adagrad and Adam": lambda: of_pairs(USERS, by=two_optimizers, sparse=True),
    "clipped": lambda: of_pairs(USERS, ITEMS, options={"clip_norm": 0.05}),
    "cosine": lambda: scheduled(
        lambda by: torch.optim.lr_scheduler.CosineAnnealingLR(by, 10)
    ),
    "padding, row by row": lambda: of_pairs(USERS, ITEMS, padding_idx=3),
    "bags": lambda: case(Bags(), batch=ragged),
    "forms of tables": lambda: case(Forms()),
    "all items": softmax,
    "layers": lambda: case(Layers(), batch=lists),
    "pairwise": pairwise,
    "odd": odd,
    "read by a package": read_by_a_package,
    "autograd.Function": lambda: times(Reversed.apply),
}


def batches(made: Case, count: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    return (made.batch(generator) for _ in range(count))


def made_anew(make: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    return make()


def own_step(made: Case, batch: Batch) -> float:
    """A step of the user's own loop."""
    for optimizer in made.optimizers:
        optimizer.zero_grad()
    result = made.loss(*batch)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    if clip := made.options.get("clip_norm"):
        nn.utils.clip_grad_norm_(made.model.parameters(), clip)
    for each in (*made.optimizers, *made.schedulers):
        each.step()
    return float(loss.detach())


def plainly(make: Callable[[], Case], count: int) -> tuple[Case, list[float]]:
    """The user's own loop."""
    made, losses = made_anew(make), []
    for number, batch in enumerate(batches(made, count)):
        torch.manual_seed(number)
        losses.append(own_step(made, batch))
    return made, losses


def with_adopt(
    make: Callable[[], Case], count: int, **options: Any
) -> tuple[Case, list[float], AdoptedStep]:
    """The same loop with an adopted step."""
    made, losses = made_anew(make), []
    options = {"compile": "require", **made.options, **options}
    step = adopt(made.model, made.optimizers, made.loss, **options)
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
            for key, value in state.items():
                found[f"{number}/{index}/{key}"] = torch.as_tensor(value)
    return found


def assert_same(one: Case, other: Case, within: float = 0.0) -> None:
    torch.testing.assert_close(states(one), states(other), rtol=0, atol=within)


def check(name: str, count: int) -> None:
    plain, losses = plainly(CASES[name], count)
    made, others, step = with_adopt(CASES[name], count)
    described = step.describe()
    assert described.startswith("captured since step 3"), described
    if name == "all items":
        line = r"test_step.py:\d+ \(scores = self.user"
        assert re.search(rf"as a dense layer: item.weight \(.*{line}", described)
    if name == "read by a package":
        assert "as a dense layer: user.weight" in described
    if name in ("AdamW", "SGD of large weights", "clipped"):
        # Decay of all rows and a limited norm leave tables row by row.
        assert "moved row by row: user.weight, item.weight" in described
    within = WHOLE
    if "row by row" in described:
        # Decay is the product of all skipped steps; Adam's eps counts as of the first
        # of them.
        within = BY_ROW if "Adam" in type(made.optimizers[0]).__name__ else 10 * WHOLE
    assert others == pytest.approx(losses, rel=2e-6, abs=max(within / 10, 2e-6))
    assert_same(plain, made, within)


@pytest.mark.parametrize("name", CASES)
def test_an_adopted_model_learns_what_the_users_own_loop_learns(name: str) -> None:
    check(name, 7)


def test_a_step_is_captured_while_autograd_looks_for_anomalies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """RecBole's sequential models switch it on at their import."""
    with torch.autograd.set_detect_anomaly(True):
        check("Adagrad, sparse", 7)
        assert torch.is_anomaly_enabled()
    assert "set_detect_anomaly is on" in capsys.readouterr().out


@pytest.mark.parametrize("is_bag", [False, True])
def test_padding_counts_from_the_end_of_a_table_as_by_torch(is_bag: bool) -> None:
    weight = torch.randn(FEW, D, requires_grad=True)
    ids = torch.tensor([[1, FEW - 1], [0, 3]])
    function = F.embedding_bag if is_bag else F.embedding
    expected = function(ids, weight, padding_idx=-1)  # type: ignore[operator]
    read = functools.partial(F.embedding, weight=weight)
    ours = look_up(read, {"weight": weight, "padding_idx": -1}, ids, is_bag)
    torch.testing.assert_close(ours, expected)
    gradients = [torch.autograd.grad(each.sum(), weight) for each in (ours, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_a_compiled_step_learns_the_same(compiled: None) -> None:
    check("padding, row by row", 9)


class Pairwise(Pairs):
    """FuxiCTR's DLRM: the products of pairs of features, which a frozen mask chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(1, 1)
        above = torch.triu(torch.ones(2, 2), 1).bool()
        self.pairs = nn.Parameter(above, requires_grad=False)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        features = torch.stack([self.user(user), self.item(item)], 1)
        products = features @ features.transpose(1, 2)
        chosen = torch.masked_select(products, self.pairs).view(-1, 1)
        return self.top(chosen).squeeze(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("changed_at", [0, 6])
def test_pairs_that_a_frozen_mask_chooses_are_captured_and_a_change_takes_effect(
    changed_at: int,
) -> None:
    results = []
    for way in ("off", "require"):
        torch.manual_seed(0)
        made = case(Pairwise(), by=adam)
        model = made.model
        step = adopt(model, made.optimizers, made.loss, compile=way)
        draw = torch.Generator().manual_seed(1)
        for number in range(1, 12):
            if number == changed_at:
                model.pairs.copy_(torch.tensor([[True, False], [False, False]]))
            step(*made.batch(draw))
        if way == "require":
            assert step.describe().startswith("captured since step ")
        results.append(model.state_dict())
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


# ------------------------------------------------------------------- what is refused


class Branching(Pairs):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        scores = super().forward(user, item)
        if scores.sum() > 0:
            return scores * 2
        return scores


class Noisy(Pairs):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return super().forward(user, item) * (1.0 if random.random() < 0.5 else 2.0)


NEIGHBOURS = torch.eye(FEW).to_sparse()


class OverAGraph(Pairs):
    """LightGCN's product: the neighbours of each item, by a sparse matrix."""

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        items = torch.sparse.mm(NEIGHBOURS, self.item.weight)
        return (self.user(user) * F.embedding(item, items)).sum(1)


class Packed(Pairs):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.item(item)[:, None], torch.ones(B), batch_first=True
        )
        return packed.data.sum(1) + super().forward(user, item)


class Dictionary(Pairs):
    """RecBole's RippleNet: ids of a batch are keys of a dict, which a trace knows as tensors."""

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        near = {number: number // 2 for number in range(FEW)}
        other = torch.tensor([near[each] for each in item.numpy()])
        return super().forward(user, other)


class Thawing(Pairs):
    """Reads a table from its second step on, as one that was frozen before."""

    is_frozen = True

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        scores = self.top(torch.cat([self.user(user)] * 2, 1)).squeeze(1)
        if not self.is_frozen:
            scores = scores + super().forward(user, item)
        self.is_frozen = False
        return scores  # type: ignore[no-any-return]


class Rewriting(Pairs):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        with torch.no_grad():
            self.user.weight.clamp_(-1, 1)
        return super().forward(user, item)


def changed(change: Callable[[Any, Any], Any]) -> Case:
    made = of_pairs()
    change(made.model, made.optimizers[0])
    return made


def by(kind: Callable[[Any], torch.optim.Optimizer]) -> Case:
    return of_pairs(by=lambda model: [kind(model.parameters())])


def times(factor: Any) -> Case:
    made = of_pairs()
    return made._replace(loss=lambda *batch: factor(made.loss(*batch)))


def backward(made: Case) -> Case:
    def loss(*batch: Any) -> Tensor:
        made.loss(*batch).backward()
        return made.loss(*batch)  # type: ignore[no-any-return]

    return made._replace(loss=loss)


OUTSIDE = nn.Parameter(torch.ones(()))
HERE = r"test_step.py:\d+ "
REFUSED: dict[str, tuple[Callable[[], Case], str]] = {
    "max_norm": (
        lambda: of_pairs(max_norm=1.0),
        rf"'item' \(.*{HERE[:-1]}\) has max_norm=1, .*leave it out",
    ),
    "momentum": (
        lambda: by(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        "SGD with momentum=0.9 .*momentum=0",
    ),
    "RMSprop": (
        lambda: by(torch.optim.RMSprop),
        "the optimizer RMSprop has no captured form; .*Adam, AdamW, Adagrad",
    ),
    "SparseAdam": (
        lambda: by(torch.optim.SparseAdam),
        "the optimizer SparseAdam has no captured form; torch.optim.Adam",
    ),
    "tensor lr": (
        lambda: by(lambda p: torch.optim.Adam(p, torch.tensor(1e-2))),
        "a tensor for lr; give a float",
    ),
    "cycled settings": (
        lambda: scheduled(
            lambda by: torch.optim.lr_scheduler.OneCycleLR(by, 0.1, total_steps=50)
        ),
        r"a setting of the optimizer other than lr .*cycle_momentum=False",
    ),
    "hook on a weight": (
        lambda: changed(lambda model, _: model.user.weight.register_hook(torch.neg)),
        r"'user.weight' \(.*\) has a hook on its gradient",
    ),
    "step replaced": (
        lambda: changed(
            lambda _, one: setattr(one, "step", types.MethodType(lambda o: None, 0))
        ),
        "Adam.step was replaced",
    ),
    "outside the model": (
        lambda: times(lambda loss: loss * OUTSIDE),
        rf"{HERE}.* requires a gradient and is not the model's",
    ),
    "two optimizers": (
        lambda: of_pairs(by=lambda model: [*adam(model), *adam(model)]),
        r"'user.weight' \(.*\) is moved by two optimizers",
    ),
    "double": (
        lambda: changed(lambda model, _: model.double()),
        "is torch.float64; .*call model.float",
    ),
    "wrapped": (
        lambda: case(nn.DataParallel(Pairs())),
        "'' .*is a DataParallel: adopt its .module",
    ),
    "branch": (
        lambda: case(Branching()),
        rf"{HERE}\(if scores.sum\(\) > 0:\) depends on values",
    ),
    "random": (
        lambda: case(Noisy()),
        rf"{HERE}\(return super.*\) (cannot be traced by torch.compile|depends on values)",
    ),
    "sparse matrix": (
        lambda: case(OverAGraph()),
        rf"{HERE}\(items = .*\) reads a sparse matrix; take F.embedding_bag\(columns, dense, row",
    ),
    "checkpoint": (
        lambda: times(lambda loss: checkpoint(torch.neg, loss, use_reentrant=False)),
        rf"{HERE}.* gives torch a function to call, as .*checkpoint; call it yourself",
    ),
    "keys": (
        lambda: case(Dictionary()),
        r"in its trace it raises TypeError\(.unhashable type|other = torch.tensor\(.* cannot be traced",
    ),
    "packed": (
        lambda: case(Packed()),
        rf"{HERE}\(packed = .*\) cannot be traced by torch.compile \(it leaves out pack_padded_seq",
    ),
    "thawing": (
        lambda: case(Thawing(), by=adam),
        r"'item.weight' has made 1 steps and '\S+' 2; .*read all in each step",
    ),
    "weights written": (
        lambda: case(Rewriting()),
        "writes into a weight or into the batch",
    ),
    "backward": (lambda: backward(of_pairs()), r"calls backward\(\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_captured_form_is_refused_by_name_with_line_and_remedy(
    name: str,
) -> None:
    make, text = REFUSED[name]
    with pytest.raises(
        CannotAdopt, match=f"(?s)compile='require': .*{text}"
    ) as refusal:
        with_adopt(make, 9)
    # Of a file with a path of usual length.
    assert len(str(refusal.value).replace(__file__, "x" * 40)) <= 200


@pytest.mark.parametrize("name", ["momentum", "branch"])
def test_it_stays_eager_unless_required_equal_to_the_bit_and_says_so(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "WATCHED", 3)
    make, _ = REFUSED[name]
    plain, losses = plainly(make, 8)
    made, others, step = with_adopt(make, 8, compile="auto")
    assert losses == others
    assert_same(plain, made)
    assert capsys.readouterr().out.count("adopt: the step stays eager: ") == 1
    assert step.describe().startswith("eager: ")


@pytest.mark.parametrize("name", ["layers", "Adagrad and Adam", "clipped"])
def test_eager_steps_are_the_users_own_to_the_bit(name: str) -> None:
    plain, losses = plainly(CASES[name], 6)
    made, others, _ = with_adopt(CASES[name], 6, compile="auto")
    assert others == losses
    assert_same(plain, made)


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"model": "no"}, "model is a str: must be an nn.Module"),
    ({"optimizer": [1]}, "optimizer is a int: must be a torch.optim.Optimizer"),
    ({"optimizer": None}, "optimizer is a NoneType: must be a torch.optim.Optimizer"),
    ({"optimizer": []}, "optimizer=\\[\\]: give a torch.optim.Optimizer"),
    ({"loss": lambda *_: 3.0}, "the loss function returned a float; return the loss"),
    (
        {"loss": lambda *_: torch.ones(3, requires_grad=True)},
        r"the loss has the shape \(3,\); return one number",
    ),
    ({"clip_norm": -1.0}, "clip_norm=-1.0: must be a number of 0 or more"),
    ({"clip_norm": "1"}, "clip_norm='1': must be a number of 0 or more"),
    (
        {"autocast": torch.autocast("cpu", torch.bfloat16)},
        "autocast is a autocast: must make a context: autocast=lambda",
    ),
    ({"compile": "yes"}, "compile='yes': must be 'auto', 'off' or 'require'"),
    (
        {
            "compile": "require",
            "autocast": lambda: torch.autocast("cpu", torch.float16),
        },
        "computes in float16, whose gradients need a GradScaler; take torch.bfloat16",
    ),
]


@pytest.mark.parametrize(("wrong", "text"), ARGUMENTS)
def test_wrong_arguments_and_losses_are_refused(
    wrong: dict[str, Any], text: str
) -> None:
    made = of_pairs()
    arguments = {"model": made.model, "optimizer": made.optimizers, "loss": made.loss}
    with pytest.raises(CannotAdopt, match=text):
        adopt(**{**arguments, **wrong})(*next(batches(made, 1)))


# ------------------------------------------------------- what others read and write


def adopted_case(**options: Any) -> tuple[Case, AdoptedStep, Iterator[Batch]]:
    """A model of two tables moved row by row, after its capture."""
    made = made_anew(CASES["Adam, row by row"])
    step = adopt(made.model, made.optimizers, made.loss, compile="require", **options)
    given = batches(made, 200)
    for batch in itertools.islice(given, 8):
        step(*batch)
    assert "row by row" in step.describe()
    return made, step, given


def saved(model: nn.Module) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


# The users' rows, by ways in which somebody may read them.
READERS: dict[str, Callable[[Any, Case], Tensor]] = {
    "state_dict": lambda model, _: model.state_dict()["user.weight"],
    "submodule": lambda model, _: model.user.state_dict()["weight"],
    "forward": lambda model, _: model.user(torch.arange(USERS)),
    "matrix": lambda model, _: model.user.weight @ torch.eye(D),
    "data": lambda model, _: model.user.weight.data,
    "numpy": lambda model, _: torch.from_numpy(model.user.weight.detach().numpy()),
    "copy": lambda model, _: copy.deepcopy(model).user.weight,
    "saved": lambda model, _: saved(model).user.weight,
    "other state": lambda model, made: (
        made.optimizers[0].state_dict() and model.user.weight
    ),
}


def test_whoever_reads_a_weight_or_a_state_reads_it_with_all_rows_caught_up() -> None:
    made, step, given = adopted_case()
    own, _ = plainly(CASES["Adam, row by row"], 8)
    model = made.model
    for way, read in READERS.items():
        for batch in itertools.islice(given, 2):
            step(*batch)
            own_step(own, batch)
        assert type(model.user.weight) is not nn.Parameter
        with torch.no_grad():
            rows = read(model, made).clone()
        assert float((rows - own.model.user.weight.detach()).abs().max()) < BY_ROW, way
        assert type(model.user.weight) is nn.Parameter
    step(*next(given))
    state = made.optimizers[0].state[model.user.weight]
    step(*next(given))
    assert type(state["exp_avg"]) is not Tensor
    assert float(state["step"]) == 8 + 2 * len(READERS) + 2
    assert type(state["exp_avg"]) is Tensor


@functools.cache
def uninterrupted(name: str) -> tuple[Case, list[float]]:
    made, losses, _ = with_adopt(CASES[name], 14)
    return made, losses


@pytest.mark.parametrize(
    "fresh", [False, True], ids=["the same objects", "new objects"]
)
@pytest.mark.parametrize(
    "name",
    ["Adam, row by row", pytest.param("Adagrad and Adam", marks=pytest.mark.slow)],
)
def test_a_resumed_run_equals_one_that_never_stopped(name: str, fresh: bool) -> None:
    made, losses = uninterrupted(name)
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
    for each, state in zip([half.model, *half.optimizers], kept, strict=True):
        each.load_state_dict(state)
    rest = itertools.islice(batches(half, 14), 9, None)
    again = [float(step(*batch)[0]) for batch in rest]
    within = BY_ROW if "row by row" in step.describe() else WHOLE
    assert again == pytest.approx(losses[9:], abs=within)
    assert_same(made, half, within)
    if not fresh:
        assert type(half.optimizers[-1].state_dict()["param_groups"][0]["lr"]) is float
        assert step.describe().startswith("captured since step 3")


# --------------------------------------------------------- what changes between steps


class Tempered(Pairs):
    """Its forward reads a number that somebody may change."""

    temperature = 1.0

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return super().forward(user, item) * self.temperature


def both_ways(
    make: Callable[[], Case], loop: Callable[[Case, AdoptedStep], list[float]]
) -> tuple[list[float], list[float], AdoptedStep]:
    """Runs a user's loop eagerly and captured: the losses of both, and the captured step."""
    found = []
    for compile_ in ("off", "auto"):
        made = made_anew(make)
        step = adopt(made.model, made.optimizers, made.loss, compile=compile_)  # type: ignore[arg-type]
        found.append((made, loop(made, step)))
    (plain, eager), (made, captured) = found
    assert_same(plain, made, BY_ROW)
    return eager, captured, step


def test_steps_whose_number_changes_in_each_stay_eager_and_its_line_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "MOST_STATES", 3)
    monkeypatch.setattr(policy, "WATCHED", 2)

    def loop(made: Case, step: AdoptedStep) -> list[float]:
        losses = []
        for number, batch in enumerate(batches(made, 12)):
            made.model.temperature = 1.0 + number / 10
            losses.append(float(step(*batch)[0]))
        return losses

    eager, captured, step = both_ways(lambda: case(Tempered()), loop)
    # Each step has had another one, so that none is captured any more.
    assert step.describe().startswith("eager")
    text = (
        r"test_step.py:\d+ \(return super.*: a value changes from step to step; give it"
    )
    assert re.search(text, capsys.readouterr().out)
    assert captured == pytest.approx(eager, abs=WHOLE)


@pytest.mark.parametrize("patience", [0, 3])
def test_batches_of_other_shapes_and_types_are_captured_or_eager_and_learn_the_same(
    patience: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "PATIENCE", patience)

    def loop(made: Case, step: AdoptedStep) -> list[float]:
        losses = []
        for number, (user, item, label) in enumerate(batches(made, 30)):
            size = 7 if number % 5 == 4 else B
            user = user.int() if number % 7 == 6 else user
            losses.append(float(step(user[:size], item[:size], label[:size])[0]))
        return losses

    def make() -> Case:
        return of_pairs(USERS, ITEMS, by=adagrad)

    eager, captured, step = both_ways(make, loop)
    assert captured == pytest.approx(eager, abs=10 * WHOLE)
    assert step.describe().startswith("captured")
    printed = capsys.readouterr().out
    assert printed.count("adopt: ... ") == 1
    assert "adopt: compiled one more step in " in printed


@pytest.mark.parametrize("widths", [7, 50])
def test_of_many_widths_some_are_captured_and_the_rest_is_named_with_the_remedy(
    widths: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(policy, "PATIENCE", 2)
    monkeypatch.setattr(captures, "_MOST_RARE", 8)
    generator = torch.Generator().manual_seed(2)
    given = [lists(generator, 1 + number % widths) for number in range(50)]

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item, self.top = nn.Embedding(FEW, D, padding_idx=0), nn.Linear(D, 1)

        def forward(self, items: Tensor) -> Tensor:
            return self.top(self.item(items).mean(1)).squeeze(1)  # type: ignore[no-any-return]

    def loop(_: Case, step: AdoptedStep) -> list[float]:
        return [float(step(*batch)[0]) for batch in given]

    eager, captured, step = both_ways(lambda: case(Listed()), loop)
    assert captured == pytest.approx(eager, abs=1e-5)
    assert step.describe().startswith("captured since step 13")
    assert "batches of more than 4 shapes" in step.describe()
    assert "as this one of (16, " in step.describe()
    assert capsys.readouterr().out.count("batches of more than 4 shapes") == 1
    made = case(Listed())
    step = adopt(made.model, made.optimizers, made.loss, compile="require")
    with pytest.raises(CannotAdopt, match="batches of more than 4 shapes"):
        loop(made, step)


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
    eager, captured = (read_around(made_anew(of_pairs), way) for way in ("off", "auto"))
    assert captured == pytest.approx(eager, abs=1e-6)


# --------------------------------------------------------------------- what goes wrong


Executor = Callable[[Any, Any], Callable[..., Any]]


def around(before: Callable[..., Any], after: Callable[..., Any]) -> Executor:
    """An executor that changes weights, by their shapes, before and after each step."""

    def compile_graph(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*tensors: Tensor) -> Any:
            weights = {
                tuple(each.shape): each.detach()
                for each in tensors
                if isinstance(each, nn.Parameter)
            }
            before(weights)
            result = graph(*tensors)
            after(weights)
            return result

        return run

    return compile_graph


def test_a_captured_step_that_differs_from_the_eager_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = around(lambda _: None, lambda weights: weights[1, 2 * D].mul_(1.01))
    monkeypatch.setattr(executors, "compile_graph", wrong)
    text = (
        r"differs from the eager one on the same batch in the weights of 'top.weight'"
    )
    with pytest.raises(CannotAdopt, match=text):
        with_adopt(of_pairs, 6)
    plain, losses = plainly(of_pairs, 6)
    monkeypatch.setattr(policy, "WATCHED", 2)
    made, others, step = with_adopt(of_pairs, 6, compile="auto")
    assert text in step.describe()
    assert losses == others
    assert_same(plain, made)


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

    def rounded(weights: Any) -> None:
        shift = torch.randint(-1, 2, (ITEMS, D))
        weights[ITEMS, D].mul_(1 + 2.0**-23 * shift)

    def make() -> Case:
        draw = functools.partial(pairs, users=USERS, items=ITEMS)
        return case(Differences(), batch=draw, by=lambda model: adam(model, lr=1e-8))

    executor = around(rounded, lambda weights: weights[1, D].mul_(share))
    monkeypatch.setattr(executors, "compile_graph", executor)
    monkeypatch.setattr(policy, "WATCHED", 2)
    *_, step = with_adopt(make, 9, compile="auto")
    assert ("differs from the eager one" in step.describe()) == (share != 1)


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


@pytest.mark.parametrize("captured", [False, True])
def test_a_loss_that_is_not_finite_ends_the_run_with_its_step(captured: bool) -> None:
    made = made_anew(of_pairs)
    way: Any = "require" if captured else "off"
    step = adopt(made.model, made.optimizers, made.loss, compile=way)
    given = batches(made, 20)
    for batch in itertools.islice(given, 7):
        step(*batch)
    user, item, label = next(given)
    written = "the update of this step" if captured else "nothing"
    bad = ", and 'user.weight' is not finite" if captured else " by this step"
    text = f"the loss is nan at step 8: {written} was written{bad}; look for values"
    with pytest.raises(TrainingDivergedError, match=text):
        step(user, item, label / 0 * 0)


@pytest.mark.parametrize(
    ("users", "wrong", "computed"),
    [(USERS, -1, False), (FEW, FEW, False), (USERS, USERS, True)],
    ids=["row by row", "whole", "computed"],
)
def test_after_an_id_out_of_range_the_next_batch_goes_on_as_in_the_users_loop(
    users: int, wrong: int, computed: bool
) -> None:
    """The user's own error, with table and id as its cause; weights and state as without that batch."""
    made = made_anew(lambda: of_pairs(users))
    loss = made.loss
    if computed:
        made = made._replace(loss=lambda u, *rest: loss((u[:, None] * 1)[:, 0], *rest))
    step = adopt(made.model, made.optimizers, made.loss, compile="require")
    for count, batch in enumerate(batches(made, 20)):
        if count == 8:
            before = copy.deepcopy(states(made))
            user = batch[0].clone()
            user[-1] = wrong
            with pytest.raises(IndexError, match="index out of range in self") as error:
                step(user, *batch[1:])
            assert str(error.value.__cause__) == (
                f"'user.weight' has no row {wrong}: ids must be 0 to {users - 1}; nothing was written by this step"
            )
            torch.testing.assert_close(states(made), before, rtol=0, atol=0)
        step(*batch)
    assert step.describe().startswith("captured since step 3")
    own, _ = plainly(lambda: of_pairs(users), 20)
    torch.testing.assert_close(states(made), states(own), rtol=1e-3, atol=1e-4)


def in_16_bits() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def test_layers_compute_in_16_bits_and_weights_stay_as_they_are() -> None:
    losses = []
    for compile_ in ("off", "require"):
        made, of_run, _ = with_adopt(of_pairs, 8, compile=compile_, autocast=in_16_bits)
        assert {each.dtype for each in made.model.parameters()} == {torch.float32}
        losses.append(of_run)
    assert losses[0] != plainly(of_pairs, 8)[1]
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)


# -------------------------------------------------------------------- generated models


CHOICES: dict[str, list[Any]] = {
    "users": [FEW, USERS],
    "width": [1, 3, 4],
    "optimizer": ["Adam", "AdamW", "Adagrad", "SGD"],
    "weight_decay": [0.0, 0.1],
    "padding_idx": [None, 0, -1],
    "max_norm": [None, None, None, 0.5],
    "layers": [[], ["Linear", "ReLU"], ["LayerNorm", "Sigmoid", "Linear"]],
    "as_a_matrix": [False, True],
    "is_tied": [False, True],
    "is_frozen": [False, True],
    "clip_norm": [0.0, 0.1],
}
LAYERS = {"Linear": lambda width: nn.Linear(width, width), "LayerNorm": nn.LayerNorm}


class Generated(nn.Module):
    """Tables of some sizes and kinds, and a network."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        super().__init__()
        size = chosen["users"], chosen["width"]
        options = {name: chosen[name] for name in ("padding_idx", "max_norm")}
        self.user, self.item = nn.Embedding(*size, **options), nn.Embedding(*size)
        self.bag = nn.EmbeddingBag(*size, mode="mean")
        layers = []
        for name in chosen["layers"]:
            # Normalised over one number, a row is 0 but for rounding, which is then all
            # of the gradient of LayerNorm's weight.
            if name != "LayerNorm" or chosen["width"] > 1:
                make = LAYERS.get(name, lambda _, name=name: getattr(nn, name)())
                layers.append(make(chosen["width"]))
        self.top = nn.Sequential(*layers)
        if chosen["is_tied"]:
            self.item.weight = self.user.weight
        self.bag.requires_grad_(not chosen["is_frozen"])
        self.as_a_matrix = chosen["as_a_matrix"]

    def forward(self, user: Tensor, items: Tensor) -> Tensor:
        rows = self.top(self.user(user) + self.bag(items))
        scores: Tensor = (rows * self.item(items[:, 0])).sum(1)
        if self.as_a_matrix:
            scores = scores + self.user.weight.square().sum(1).mean()
        return scores


CHOSEN = {name: st.sampled_from(choices) for name, choices in CHOICES.items()}


@pytest.mark.slow
@settings(max_examples=200)
@given(chosen=st.fixed_dictionaries(CHOSEN))
def test_a_generated_model_is_equal_or_refused(chosen: dict[str, Any]) -> None:
    def batch(generator: torch.Generator) -> Batch:
        user, _, label = pairs(generator, chosen["users"])
        return user, torch.randint(chosen["users"], (B, L), generator=generator), label

    def by(model: nn.Module) -> list[torch.optim.Optimizer]:
        kind = getattr(torch.optim, chosen["optimizer"])
        return [kind(model.parameters(), 1e-2, weight_decay=chosen["weight_decay"])]

    def make() -> Case:
        clip_norm = chosen["clip_norm"]
        return case(Generated(chosen), batch=batch, by=by, clip_norm=clip_norm)

    if chosen["max_norm"]:
        with pytest.raises(CannotAdopt, match="max_norm"):
            with_adopt(make, 12)
        return
    plain, losses = plainly(make, 12)
    made, others, step = with_adopt(make, 12)
    within = BY_ROW if "row by row" in step.describe() else 2e-5
    assert others == pytest.approx(losses, abs=within)
    ours, theirs = made.model.state_dict(), plain.model.state_dict()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2 * within)
