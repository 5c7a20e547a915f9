"""Towers apart equal one process: weights, optimizer state, evaluation and checkpoint, over real gloo processes."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchrec_ext.adopt.step as adopted
from tests.contracts import run_ranks
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.towers.towers import adopt_towers
from torchrec_ext.capture import executors, policy
from torchrec_ext.distributed.runtime import Runtime

ROOT = Path(__file__).parents[2]
ITEMS, STEPS = 30, 20
Batch = tuple[Any, ...]


class Items(nn.Module):
    """A tower with a table, which returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ITEMS, 6)
        self.net = nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU()
        )

    def forward(self, item: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table(item)
        return self.net(rows.mean(1)), rows


class Net(nn.Module):
    """A user's model: two towers, and a small network over both."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
        self.item = Items()
        self.top = nn.Sequential(nn.Linear(12 + 18, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, profile: Tensor, item: Tensor) -> Tensor:
        user = self.user(profile)
        pooled, rows = self.item(item)
        return self.top(torch.cat([user, pooled, rows.flatten(1)], 1)).squeeze(1)


class Sliced(Net):
    """A model that cuts one matrix into its towers' columns, by name."""

    def forward(self, profile: Tensor, item: Tensor) -> Tensor:
        both = {"profile": profile * 2.0, "item": item % ITEMS}
        user = self.user(input=both["profile"])
        pooled, rows = self.item(both["item"])
        return self.top(torch.cat([user, pooled, rows.flatten(1)], 1)).squeeze(1)


class Three(nn.Module):
    """Three towers over a dictionary of columns, and nothing trained on top but a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
                for name in "abc"
            }
        )
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, columns: dict[str, Tensor]) -> Tensor:
        a, b, c = (self.towers[name](columns[name]) for name in "abc")
        return self.scale * (a * b * c).sum(1)


class Large(nn.Module):
    """A tower with a table of sparse gradients, and a table outside of the towers that is summed over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Linear(5, 4)
        self.item = nn.EmbeddingBag(ITEMS, 4, mode="mean", sparse=True)
        self.bias = nn.Embedding(2**18, 1)

    def forward(self, profile: Tensor, item: Tensor) -> Tensor:
        return (self.user(profile) * self.item(item)).sum(1) + self.bias(
            item[:, 0]
        ).squeeze(1)


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


def batches(count: int, rows: int = 24, later: int = 0) -> Iterator[Batch]:
    """Batches of some rows, of which the second half have more."""
    generator = torch.Generator().manual_seed(1)
    for index in range(count):
        rows += later if index == count // 2 else 0
        yield (
            torch.randn(rows, 5, generator=generator),
            torch.randint(ITEMS, (rows, 3), generator=generator),
            torch.randint(2, (rows,), generator=generator).float(),
        )


def losses_of(model: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    def loss(profile: Tensor, item: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(profile, item)
        return nn.functional.binary_cross_entropy_with_logits(
            logits, label
        ), logits.detach()

    return loss


def losses_of_columns(model: nn.Module) -> Callable[..., Tensor]:
    def loss(profile: Tensor, item: Tensor, label: Tensor) -> Tensor:
        return nn.functional.mse_loss(
            model({"a": profile, "b": profile, "c": profile}), label
        )

    return loss


MODELS: dict[
    str, tuple[Callable[[], nn.Module], Callable[..., Any], dict[str, int]]
] = {
    "two": (Net, losses_of, {"user": 0, "item": 1}),
    "computed": (Sliced, losses_of, {"user": 1, "item": 0}),
    "large": (Large, losses_of, {"user": 0, "item": 1}),
    "three": (Three, losses_of_columns, {"towers.a": 1, "towers.b": 0, "towers.c": 1}),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-3),
    "plain": lambda p: torch.optim.SGD(p, 0.1),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
}


CLIPPED = 0.05


def limit_norm(grads: list[Tensor], limit: float) -> None:
    """torch.nn.utils.clip_grad_norm_, which does not take sparse gradients."""
    squares = [
        (grad.coalesce().values() if grad.is_sparse else grad).square().sum()
        for grad in grads
    ]
    for grad in grads:
        grad.mul_((limit / (torch.stack(squares).sum().sqrt() + 1e-6)).clamp(max=1.0))


def plain(name: str, kind: str, rows: int, clip_norm: float = 0.0) -> dict[str, Any]:
    make, loss_fn, _ = MODELS[name]
    model = seeded(make)
    optimizer, loss = OPTIMIZERS[kind](model.parameters()), loss_fn(model)
    losses = []
    for batch in batches(STEPS, rows, 9):
        optimizer.zero_grad()
        result = loss(*batch)
        value = result[0] if isinstance(result, tuple) else result
        value.backward()
        if clip_norm:
            limit_norm(
                [p.grad for p in model.parameters() if p.grad is not None], clip_norm
            )
        optimizer.step()
        losses.append(float(value.detach()))
    return {"losses": losses, **saved(model, optimizer, loss_fn)}


def saved(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[..., Any]
) -> dict[str, Any]:
    """What a user's script saves, and an evaluation."""
    model.eval()
    (batch,) = batches(1, 7)
    with torch.no_grad():
        result = loss_fn(model)(*batch)
    model.train()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "evaluated": result,
    }


def apart(
    runtime: Runtime, name: str, kind: str, rows: int, **options: Any
) -> dict[str, Any]:
    make, loss_fn, towers = MODELS[name]
    model = seeded(make)
    optimizer, loss = OPTIMIZERS[kind](model.parameters()), loss_fn(model)
    (example,) = batches(1, rows)
    untouched = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    placed = {path: rank % runtime.world_size for path, rank in towers.items()}
    compiled = options.pop("compiled", False)
    if not compiled:
        executors.compile_graph = lambda graph, examples: graph
    step = adopt_towers(model, optimizer, loss, runtime, placed, example, **options)
    assert torch.equal(state, torch.get_rng_state())
    assert_close(model.state_dict(), untouched, 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    results = [step(*batch) for batch in batches(STEPS, rows, 9)]
    step.settle()
    return {
        "losses": [float(value) for value, _ in results],
        "aux": results[-1][1],
        "share": (step.share(rows + 9).start, step.share(rows + 9).stop),
        "text": step.describe(),
        "way": step.adopted.describe(),
        "computed": [tower.computed for tower in step.split.towers],
        **saved(model, optimizer, loss_fn),
    }


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


APART = [
    ("two", 2, 24, "sgd"),
    pytest.param("two", 3, 25, "adam", marks=pytest.mark.slow),
    ("two", 1, 24, "sgd"),
    ("computed", 2, 25, "sgd"),
    ("large", 2, 24, "plain"),
    pytest.param("three", 3, 20, "sgd", marks=pytest.mark.slow),
    ("three", 2, 9, "adam"),
]


@pytest.mark.parametrize(("name", "world_size", "rows", "kind"), APART)
def test_towers_apart_equal_one_process(
    name: str, world_size: int, rows: int, kind: str
) -> None:
    """Also with rows that ranks cannot share equally, or more than the example has; Adam magnifies roundings."""
    expected, tolerance = plain(name, kind, rows), 1e-4 if kind == "adam" else 1e-6
    ranks = run_ranks(apart, world_size, name, kind, rows)
    for result in ranks:
        assert_close(
            torch.tensor(result["losses"]), torch.tensor(expected["losses"]), tolerance
        )
        assert_close(result["model"], expected["model"], tolerance)
        assert_close(result["evaluated"], expected["evaluated"], tolerance)
        assert (
            result["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
        )
        assert_close(
            result["optimizer"]["state"], expected["optimizer"]["state"], tolerance
        )
        assert result["computed"] == [name == "computed"] * len(result["computed"])
        assert f"{world_size} rank(s)" in result["text"]
    shares = [result["share"] for result in ranks]
    assert [start for start, _ in shares] + [rows + 9] == [0] + [
        stop for _, stop in shares
    ]
    if name != "three":
        assert [len(result["aux"]) for result in ranks] == [
            stop - start for start, stop in shares
        ]


# Captured steps run as traced, op by op, but in the slow test.
CAPTURED: list[tuple[str, int, int, str, dict[str, Any]]] = [
    ("two", 2, 24, "adam", {"clip_norm": CLIPPED}),
    pytest.param("computed", 2, 25, "plain", {}, marks=pytest.mark.slow),
    pytest.param("large", 2, 24, "plain", {}, marks=pytest.mark.slow),
    pytest.param("three", 3, 20, "adam", {}, marks=pytest.mark.slow),
    pytest.param("two", 1, 24, "adam", {"clip_norm": CLIPPED}, marks=pytest.mark.slow),
    pytest.param("two", 2, 24, "adam", {"compiled": True}, marks=pytest.mark.slow),
    pytest.param("large", 2, 24, "plain", {"compiled": True}, marks=pytest.mark.slow),
    pytest.param(
        "three",
        3,
        20,
        "plain",
        {"compiled": True, "clip_norm": CLIPPED},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("name", "world_size", "rows", "kind", "options"), CAPTURED)
def test_captured_towers_apart_equal_one_process(
    name: str, world_size: int, rows: int, kind: str, options: dict[str, Any]
) -> None:
    """Also where a batch outgrows the exchange; the first three captured steps are compared with eager ones."""
    expected = plain(name, kind, rows, options.get("clip_norm", 0.0))
    tolerance = 1e-4 if kind == "adam" else 1e-6
    for result in run_ranks(
        partial(apart, compile="require", **options),
        world_size,
        name,
        kind,
        rows,
        timeout_s=400,
    ):
        assert result["way"].startswith("captured since step 3")
        assert_close(
            torch.tensor(result["losses"]), torch.tensor(expected["losses"]), tolerance
        )
        assert_close(result["model"], expected["model"], tolerance)
        assert_close(result["evaluated"], expected["evaluated"], tolerance)
        assert_close(
            result["optimizer"]["state"], expected["optimizer"]["state"], tolerance
        )


@pytest.mark.parametrize(
    ("name", "kind"),
    [("two", "sgd"), pytest.param("large", "plain", marks=pytest.mark.slow)],
)
def test_the_norm_of_all_ranks_gradients_is_limited_as_in_one_process(
    name: str, kind: str
) -> None:
    expected = plain(name, kind, 24, CLIPPED)
    unlimited = plain(name, kind, 24)
    assert abs(expected["losses"][-1] - unlimited["losses"][-1]) > 1e-3
    for result in run_ranks(
        partial(apart, compile="off", clip_norm=CLIPPED), 2, name, kind, 24
    ):
        assert_close(
            torch.tensor(result["losses"]), torch.tensor(expected["losses"]), 1e-6
        )
        assert_close(result["model"], expected["model"], 1e-6)


def bce(model: nn.Module) -> Callable[..., Tensor]:
    return lambda profile, item, label: nn.functional.binary_cross_entropy_with_logits(
        model(profile, item), label
    )


class Dense(nn.Module):
    """Two towers over one matrix, which the cases below change."""

    def __init__(self, **changed: nn.Module) -> None:
        super().__init__()
        self.user, self.item = nn.Linear(5, 4), nn.Linear(5, 4)
        self.top = nn.Linear(4, 1)
        for name, module in changed.items():
            setattr(self, name, module)

    def forward(self, profile: Tensor, item: Tensor) -> Tensor:
        return self.top(self.user(profile) * self.item(profile)).squeeze(1)


def case(
    make: Callable[[], nn.Module] = Dense, **changed: Any
) -> Callable[[Runtime], None]:
    """Adopts a model that is changed in one thing."""

    def attempt(runtime: Runtime) -> None:
        model = seeded(make)
        optimizer = changed.get(
            "optimizer", lambda values: torch.optim.SGD(values, 0.1)
        )(model.parameters())
        loss = changed.get("loss", bce)(model)
        (example,) = batches(1)
        example = changed.get("example", lambda batch: batch)(example)
        adopt_towers(
            model,
            optimizer,
            loss,
            runtime,
            changed.get("towers", {"user": 0, "item": 1}),
            example,
        )

    return attempt


def forward_of(
    forward: Callable[..., Tensor], **modules: Callable[[], nn.Module]
) -> Callable[[], nn.Module]:
    """Makes a Dense whose forward is another."""

    def make() -> nn.Module:
        return type("Changed", (Dense,), {"forward": forward})(
            **{name: module() for name, module in modules.items()}
        )

    return make


def tower_of(forward: Callable[..., Any]) -> Callable[[], nn.Module]:
    """Makes a Dense whose tower `item` has another forward."""
    return lambda: Dense(item=type("Item", (nn.Linear,), {"forward": forward})(5, 4))


def twice(self: Any, profile: Tensor, item: Tensor) -> Tensor:
    return self.top(
        self.user(profile) * self.item(profile) + self.item(profile * 2)
    ).squeeze(1)


def not_whole(self: Any, profile: Tensor, item: Tensor) -> Tensor:
    return self.top(
        self.user(profile) * nn.functional.linear(profile, self.item.weight)
    ).squeeze(1)


def of_a_table(self: Any, profile: Tensor, item: Tensor) -> Tensor:
    return self.top(self.user(self.table(item[:, 0])) * self.item(profile)).squeeze(1)


def of_a_tower(self: Any, profile: Tensor, item: Tensor) -> Tensor:
    user = self.user(profile)
    return self.top(
        user * self.item(profile + user.detach().sum(1, keepdim=True))
    ).squeeze(1)


def noisy(self: Any, profile: Tensor, item: Tensor) -> Tensor:
    return self.top(
        self.user(profile + torch.randn_like(profile)) * self.item(profile)
    ).squeeze(1)


def with_average(self: Any, profile: Tensor, item: Tensor) -> Tensor:
    self.top.average.mul_(0.9).add_(0.1 * profile.mean())
    return self.top(self.user(profile) * self.item(profile)).squeeze(1)


def by_rank(self: Any, profile: Tensor, item: Tensor) -> Tensor:
    return self.top(self.user(profile) * self.item(profile)).squeeze(1) * (
        1 + torch.distributed.get_rank()
    )


def with_table(self: Any, profile: Tensor, item: Tensor) -> Tensor:
    return self.top(self.user(profile) * self.item(profile)).squeeze(1) + self.table(
        item[:, 0]
    ).sum(1)


def count_calls(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return nn.Linear.forward(self, x)


class Averaging(nn.Linear):
    average: Tensor

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("average", torch.zeros(()))


def tied() -> nn.Module:
    model = Dense()
    model.item.weight = model.user.weight
    return model


def hooked() -> nn.Module:
    model = Dense()
    model.item.register_forward_hook(lambda *_: None)
    return model


def in_batch(model: Any) -> Callable[..., Tensor]:
    def loss(profile: Tensor, item: Tensor, label: Tensor) -> Tensor:
        scores = model.user(profile) @ model.item(profile).T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))

    return loss


def weighted(model: Any) -> Callable[..., Tensor]:
    def loss(profile: Tensor, item: Tensor, label: Tensor) -> Tensor:
        rows = nn.functional.binary_cross_entropy_with_logits(
            model(profile, item), label, reduction="none"
        )
        weights = item[:, 0].float()
        return (rows * weights).sum() / weights.sum()

    return loss


def summed(model: Any) -> Callable[..., Tensor]:
    return lambda profile, item, label: bce(model)(profile, item, label) * len(label)


def in_bfloat16(model: Any) -> Callable[..., Tensor]:
    return torch.autocast("cpu", torch.bfloat16)(bce(model))  # type: ignore[no-any-return]


def by_row(model: Any) -> Callable[..., Tensor]:
    return lambda profile, item, label: model(profile, item) - label


def penalty(model: Any) -> Callable[..., Tensor]:
    return lambda *batch: (
        bce(model)(*batch) + 1e-3 * sum(p.square().sum() for p in model.parameters())
    )


def infinite(model: Any) -> Callable[..., Tensor]:
    return lambda *batch: bce(model)(*batch) / 0.0


def wrapped() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Dense())


def raising_on_one(model: Any) -> Callable[..., Tensor]:
    def loss(*batch: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 1:
            raise KeyError("a column")
        return bce(model)(*batch)

    return loss


def of_rank(values: Callable[[int], Any]) -> Callable[[Runtime], None]:
    return lambda runtime: case(**values(runtime.rank))(runtime)


LINE = r"tests/adopt/test_towers\.py:\d+"
REFUSED: dict[str, tuple[Callable[[Runtime], None], str]] = {
    "twice": (
        case(forward_of(twice)),
        rf"tower 'item' is called 2 times \(.*{LINE}, .*{LINE}\): call it once with all",
    ),
    "not called": (
        case(forward_of(not_whole)),
        "tower 'item' is not called by the loss function: .*self.item",
    ),
    "reads a table": (
        case(forward_of(of_a_table, table=lambda: nn.Embedding(ITEMS, 5))),
        rf"{LINE}: tower 'user' reads what forward computes with parameters.*name the module around both",
    ),
    "reads a tower": (
        case(forward_of(of_a_tower)),
        rf"{LINE}: tower 'item' reads what forward computes",
    ),
    "random": (
        case(forward_of(noisy)),
        "the loss draws random numbers in eval mode too",
    ),
    "shared": (
        case(tied),
        "'user.weight' and 'item.weight' are one tensor, but not of one rank: put the towers",
    ),
    "shared with the top": (
        case(tied, towers={"user": 0}),
        "'user.weight' and 'item.weight' are one tensor, but not of one rank",
    ),
    "batch norm": (
        case(lambda: Dense(top=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))),
        r"'top.0' is a BatchNorm1d outside of the towers, .*move it into a tower, or take LayerNorm",
    ),
    "buffer": (
        case(forward_of(with_average, top=Averaging)),
        "forward changes the buffer 'top.average' outside",
    ),
    "attribute": (
        case(tower_of(count_calls)),
        "forward sets the attribute 'item.calls', of which ranks would have",
    ),
    "no rows": (
        case(tower_of(lambda self, x: nn.Linear.forward(self, x).mean(0))),
        rf"{LINE}: tower 'item' returns \(4,\) torch.float32, must be a float tensor \(24, ...\) with a row",
    ),
    "integers": (
        case(tower_of(lambda self, x: nn.Linear.forward(self, x).long())),
        r"tower 'item' returns \(24, 4\) torch.int64, must be a float tensor",
    ),
    "an object": (
        case(
            tower_of(
                lambda self, x: torch.distributions.Normal(
                    nn.Linear.forward(self, x), 1
                ).mean.tolist()[0][0]
            )
        ),
        "tower 'item' returns a float, must be a float tensor",
    ),
    "hooks": (
        case(hooked),
        "tower 'item' has hooks, which would run on every rank: put them on a module in it",
    ),
    "autocast": (
        case(loss=in_bfloat16),
        rf"{LINE}: tower 'user' is called under torch.autocast, .*: enter autocast within the tower's",
    ),
    "in-batch": (
        case(loss=in_batch),
        r"the loss is not a mean over rows: .*one that compares or weights rows",
    ),
    "weighted": (
        case(loss=weighted),
        "the loss is not a mean over rows: .*or weights rows needs all on one rank",
    ),
    "summed": (
        case(loss=summed),
        r"the loss is a sum over rows: .*divide it by the rows \(reduction='mean'\)",
    ),
    "by row": (
        case(loss=by_row),
        r"the loss function returns a tensor \(24,\), must be the loss, \(\), or",
    ),
    "infinite": (
        case(loss=infinite),
        "the loss of the example is inf: give a batch whose loss is finite",
    ),
    "penalty": (
        case(loss=penalty),
        r"parameter '(user|item).weight' is read outside of its tower .*weight_decay",
    ),
    "by rank": (
        case(forward_of(by_rank)),
        "the gradient of '(user|item).weight' is not that of one process",
    ),
    "sparse top": (
        case(forward_of(with_table, table=lambda: nn.Embedding(ITEMS, 4, sparse=True))),
        "parameter 'table.weight' outside of the towers has a sparse gradient: give its table sparse=False",
    ),
    "ddp": (
        case(wrapped),
        "the model is a DistributedDataParallel, .*: give its model.module",
    ),
    "lbfgs": (
        case(optimizer=torch.optim.LBFGS),
        "the optimizer is LBFGS, which calls the loss several times",
    ),
    "no tower": (
        case(towers={}),
        r"towers=\{\}: name a sub-network and its rank, as in \{'user': 0, 'item': 1\}",
    ),
    "path": (
        case(towers={"usr": 0}),
        "towers: the model has no module 'usr'; it has user, item, top, and what is in",
    ),
    "rank": (
        case(towers={"user": 0, "item": 2}),
        "towers: 'item' is on rank 2, but the job has ranks 0 to 1",
    ),
    "nested": (
        case(
            lambda: Dense(item=nn.Sequential(nn.Linear(5, 4))),
            towers={"item": 0, "item.0": 1},
        ),
        "towers: 'item.0' is within 'item': name one of them",
    ),
    "few rows": (
        case(example=lambda batch: [value[:3] for value in batch]),
        r"the example has 3 row\(s\): give a real batch, of 4 rows or more",
    ),
    "other rows": (
        case(example=lambda batch: (*batch[:2], batch[2][:5])),
        r"leaf 2 of the batch has the shape \(5,\), the first has 24 rows: every tensor of a batch has one row",
    ),
    "other widths": (
        of_rank(
            lambda rank: {"make": lambda: Dense(user=nn.Linear(5, 4, bias=not rank))}
        ),
        "ranks 0 and 1 differ in the number of parameters and buffers: 6 and 5; all ranks need the same: call",
    ),
    "other weights": (
        of_rank(lambda rank: {"make": lambda: redrawn_by(rank)}),
        "ranks 0 and 1 differ in the values of 'user.weight': .*torch.manual_seed with one seed before",
    ),
    "other optimizers": (
        of_rank(
            lambda rank: {
                "optimizer": lambda values: torch.optim.SGD(values, 0.1 + rank)
            }
        ),
        "ranks 0 and 1 differ in lr of parameter group 0: 0.1 and 1.1",
    ),
    "other examples": (
        of_rank(
            lambda rank: {
                "example": lambda batch: [
                    value.flip(0) if rank else value for value in batch
                ]
            }
        ),
        "ranks 0 and 1 differ in the example: 24 rows",
    ),
    "one raises": (case(loss=raising_on_one), r"KeyError: 'a column'|^'a column'"),
}


def redrawn_by(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return Dense()


def refusals(runtime: Runtime) -> dict[str, str]:
    texts = {}
    for name, (attempt, _) in REFUSED.items():
        try:
            attempt(runtime)
            texts[name] = "adopted"
        except (CannotAdopt, KeyError) as error:
            texts[name] = str(error)
    return texts


def test_what_cannot_be_taken_apart_is_refused_by_name_on_all_ranks() -> None:
    """None of them hangs, and the ranks stay in step: each case is the next collective of the same processes."""
    for texts in run_ranks(refusals, 2):
        for name, (_, pattern) in REFUSED.items():
            assert re.search(pattern, texts[name], re.DOTALL), (name, texts[name])


class Frail(nn.Linear):
    """A tower that raises where a batch is marked."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x[0, 0]) == 99.0:
            raise ArithmeticError("a marked batch")
        return super().forward(x)


def frail() -> nn.Module:
    return Dense(item=Frail(5, 4))


def strict(model: Any) -> Callable[..., Tensor]:
    def loss(profile: Tensor, item: Tensor, label: Tensor) -> Tensor:
        if float(label.max()) > 1:
            raise ArithmeticError("a label above 1")
        return bce(model)(profile, item, label)

    return loss


def marked(batch: Batch, rows: slice, leaf: int, value: float) -> Batch:
    changed = [tensor.clone() for tensor in batch]
    changed[leaf][rows] = value
    return tuple(changed)


def disturbed(runtime: Runtime) -> dict[str, Any]:
    """What each rank raises in steps that cannot be made, and the weights where the others are made."""
    model = seeded(frail)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = list(batches(8))
    step = adopt_towers(
        model, optimizer, strict(model), runtime, {"user": 0, "item": 1}, given[0]
    )
    texts: dict[str, str] = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            texts[name] = "went through"
        except (ValueError, ArithmeticError) as error:
            texts[name] = f"{type(error).__name__}: {error}"

    first, rank = given[0], runtime.rank
    attempt("tower", lambda: step(*marked(first, slice(0, 1), 0, 99.0)))
    step(*given[1])
    attempt(
        "loss of the last rows", lambda: step(*marked(first, slice(23, 24), 2, 2.0))
    )
    step(*given[2])
    attempt("other rows", lambda: step(*(value[: 24 - rank] for value in first)))
    attempt("other order", lambda: step(*(value.roll(rank, 0) for value in first)))
    attempt("dtype", lambda: step(first[0].double(), *first[1:]))
    attempt("structure", lambda: step(*first, None))
    attempt("no rows", lambda: step(*(value[:0] for value in first)))
    attempt("not a number", lambda: step(*marked(first, slice(3, 4), 0, float("nan"))))
    attempt("mode", lambda: (model.train(rank == 0), step(*first)))
    model.train()
    attempt("settle", lambda: step.settle() if rank else step(*first))
    step(*given[3])
    step(*(value[:1] for value in given[4]))  # fewer rows than ranks
    attempt("state_dict", model.state_dict)
    attempt("optimizer.state_dict", optimizer.state_dict)
    attempt("evaluation", lambda: model(*first[:2]))
    attempt("copy", lambda: copy.deepcopy(model))
    step.settle()
    copied = copy.deepcopy(model)
    assert_close(copied.state_dict(), model.state_dict(), 0)
    step(*given[5])
    assert_close(copied(*first[:2]).shape, torch.Size([24]), 0)
    step.settle()
    return {"texts": texts, "model": model.state_dict()}


def test_a_step_that_one_rank_cannot_make_is_made_by_none() -> None:
    model = seeded(frail)
    optimizer, loss = torch.optim.SGD(model.parameters(), 0.1), strict(model)
    given = list(batches(8))
    for batch in (
        given[1],
        given[2],
        given[3],
        tuple(value[:1] for value in given[4]),
        given[5],
    ):
        optimizer.zero_grad()
        loss(*batch).backward()
        optimizer.step()
    ranks = run_ranks(disturbed, 2)
    for rank, result in enumerate(ranks):
        assert_close(result["model"], model.state_dict(), 1e-6)
        other = 1 - rank
        kept = f"CannotAdopt: rank {rank} has old weights of "
        tower = ["user", "item"][other]
        stale = rf"{kept}'{tower}' \(trained on rank {other}\): call step.settle\(\) on all ranks"
        expected = {
            "tower": "ArithmeticError: a mark"
            if rank
            else "CannotAdopt: step 1: rank 1 raised ArithmeticError: a mark",
            "loss of the last rows": "ArithmeticError: a label"
            if rank
            else "step 3: rank 1 raised ArithmeticError: a",
            "other rows": r"CannotAdopt: step 5: ranks have different batches \(of 24, 23 rows\).*the same whole batch",
            "other order": r"CannotAdopt: step 6: ranks have different batches \(of 24, 24 rows\)",
            "dtype": r"CannotAdopt: step 7: leaf 0 of the batch is 2-d torch.float64 on cpu, but was 2-d torch.float",
            "structure": r"CannotAdopt: step 8: the batch has the structure .*, the example had",
            "no rows": r"CannotAdopt: leaf 0 of the batch has the shape \(0, 5\), the first has 0 rows",
            "not a number": r"GradientNotFiniteError: the loss of step 10 is nan; no weight was changed",
            "mode": r"CannotAdopt: step 11: ranks have different batches .*or modes; .*all in train or all in eval",
            "settle": r"ranks came to different calls \(a step, settle\(\)\): every rank makes the same number",
            "state_dict": stale,
            "optimizer.state_dict": stale,
            "evaluation": stale,
            "copy": stale,
        }
        for name, pattern in expected.items():
            assert re.search(pattern, result["texts"][name]), (
                name,
                result["texts"][name],
            )


def captured_and_disturbed(runtime: Runtime, ways: tuple[Any, Any]) -> dict[str, Any]:
    """Captured steps on some ranks alone, and steps that cannot be made between them."""
    executors.compile_graph = lambda graph, examples: graph
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = list(batches(9))
    step = adopt_towers(
        model,
        optimizer,
        losses_of(model),
        runtime,
        {"user": 0, "item": 1},
        given[0],
        compile=ways[runtime.rank],
    )
    texts: dict[str, str] = {}

    def attempt(name: str, *batch: Tensor) -> None:
        try:
            step(*batch)
            texts[name] = "went through"
        except (ValueError, IndexError) as error:
            texts[name] = f"{type(error).__name__}: {error}"

    for batch in given[:7]:
        step(*batch)
    attempt("not a number", *marked(given[7], slice(3, 4), 0, float("nan")))
    attempt("id", *marked(given[7], slice(0, 1), 1, ITEMS + 5))
    attempt("other rows", *(value[: 24 - runtime.rank] for value in given[7]))
    for batch in given[7:]:
        step(*batch)
    step.settle()
    return {"texts": texts, "model": model.state_dict(), "way": step.adopted.describe()}


@pytest.mark.parametrize(
    "ways",
    [pytest.param(("require", "require"), marks=pytest.mark.slow), ("require", "off")],
    ids=["both", "one"],
)
def test_a_captured_step_that_one_rank_cannot_make_is_made_by_none(
    ways: tuple[str, str],
) -> None:
    """The batch statistics of the tower's normalisation count its steps, also those that another rank ends."""
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches(9):
        optimizer.zero_grad()
        losses_of(model)(*batch)[0].backward()
        optimizer.step()
    learned = dict(model.named_parameters())
    for rank, result in enumerate(run_ranks(captured_and_disturbed, 2, ways)):
        assert result["way"].startswith(
            "captured since step 3" if ways[rank] == "require" else "eager"
        )
        assert_close(
            {name: result["model"][name] for name in learned},
            {k: v.data for k, v in learned.items()},
            1e-6,
        )
        expected = {
            "not a number": "GradientNotFiniteError: the loss of step 8 is nan; no weight was changed",
            "id": "IndexError: index out of range"
            if rank
            else "CannotAdopt: step 9: rank 1 raised IndexError: index",
            "other rows": r"CannotAdopt: step 10: ranks have different batches \(of 24, 23 rows\)",
        }
        for name, pattern in expected.items():
            assert re.search(pattern, result["texts"][name]), (
                name,
                result["texts"][name],
            )


def captured_when_it_pays(runtime: Runtime) -> dict[str, Any]:
    """The default: rank 1 alone finds that a capture is due."""
    executors.compile_graph = lambda graph, examples: graph
    adopted.CAPTURE_S = {"cpu": 1e9 if runtime.rank == 0 else 0.0}
    adopted.CAPTURE_S_PER_CALL = {"cpu": 0.0}
    model = seeded(Dense)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = list(batches(policy.WATCHED + 6))
    step = adopt_towers(
        model,
        optimizer,
        bce(model),
        runtime,
        {"user": 0, "item": 1},
        given[0],
        verify=1,
    )
    ways = [step.adopted._trace is not None for batch in given if step(*batch)]
    step.settle()
    return {"ways": ways, "text": step.adopted.describe(), "model": model.state_dict()}


def test_all_ranks_capture_before_the_same_step_once_one_of_them_finds_it_due() -> None:
    model = seeded(Dense)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches(policy.WATCHED + 6):
        optimizer.zero_grad()
        bce(model)(*batch).backward()
        optimizer.step()
    ranks = run_ranks(captured_when_it_pays, 2)
    first, second = (result["ways"] for result in ranks)
    assert first == second
    assert first[0] is False
    assert first[-1] is True
    for result in ranks:
        assert_close(result["model"], model.state_dict(), 1e-6)


class In16Bits(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def top_in_16_bits(model: Any) -> Callable[..., Tensor]:
    def loss(profile: Tensor, item: Tensor, label: Tensor) -> Tensor:
        both = model.user(profile) * model.item(profile)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.top(both)
        return nn.functional.binary_cross_entropy_with_logits(
            logits.squeeze(1).float(), label
        )

    return loss


def in_16_bits(runtime: Runtime | None) -> list[float]:
    model = seeded(lambda: Dense(user=In16Bits(5, 4), item=In16Bits(5, 4)))
    optimizer, loss = torch.optim.SGD(model.parameters(), 0.5), top_in_16_bits(model)
    if runtime is not None:
        step = adopt_towers(
            model, optimizer, loss, runtime, {"user": 0, "item": 1}, next(batches(1))
        )
        return [float(step(*batch)[0]) for batch in [*batches(1)] * STEPS]
    losses = []
    for batch in [*batches(1)] * STEPS:
        optimizer.zero_grad()
        value = loss(*batch)
        value.backward()
        optimizer.step()
        losses.append(float(value))
    return losses


@pytest.mark.slow
def test_towers_in_16_bits_apart_learn_what_one_process_learns() -> None:
    """Outputs travel in 16 bits, and each rank rounds the gradients of its rows alone."""
    whole = in_16_bits(None)
    assert whole[-1] < whole[0] - 0.02, "it learns"
    for losses in run_ranks(in_16_bits, 2):
        assert losses == pytest.approx(whole, abs=4e-3)


def momentum_on_one(runtime: Runtime) -> str:
    """A tower whose optimizer has no captured form, and one whose has."""
    executors.compile_graph = lambda graph, examples: graph
    model = seeded(Dense)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    given = next(batches(1))
    wrong = (
        {"clip_norm": -1.0},
        {"compile": "yes"},
        {"verify": 0.5},
        {"compile": "require"},
    )
    texts = []
    for options in wrong:
        try:
            adopt_towers(
                model,
                optimizer,
                bce(model),
                runtime,
                {"user": 0, "item": 1},
                given,
                **options,
            )  # type: ignore[arg-type]
        except CannotAdopt as error:
            texts.append(str(error))
    return "\n".join(
        [
            *texts,
            adopt_towers(
                model, optimizer, bce(model), runtime, {"user": 0}, given
            ).adopted.describe(),
        ]
    )


def test_what_has_no_captured_form_stays_eager_or_is_refused_where_a_capture_is_required() -> (
    None
):
    for text in run_ranks(momentum_on_one, 2):
        expected = [
            "clip_norm=-1.0: must be a number of 0 or more",
            "compile='yes': must be 'auto', 'off' or 'require'",
            "verify=0.5: must be a number of steps, 0 or more",
            "compile='require': SGD with momentum=0.9 has no captured form; set momentum=0, or take Adam with",
            "eager: SGD with momentum=0.9 has no captured form",
        ]
        assert [
            line.startswith(start)
            for line, start in zip(text.splitlines(), expected, strict=True)
        ] == [True] * 5


def left_alone(runtime: Runtime) -> str:
    model = seeded(Dense)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = list(batches(2))
    step = adopt_towers(
        model, optimizer, bce(model), runtime, {"user": 0, "item": 1}, given[0]
    )
    step(*given[0])
    if runtime.rank == 1:
        return ""
    with pytest.raises(
        RuntimeError, match="step 2: a rank did not come to the exchange within 300 s"
    ) as error:
        step(*given[1])
    return str(error.value)


def test_a_rank_that_ends_is_missed_by_the_others() -> None:
    assert "fewer steps" in run_ranks(left_alone, 2)[0]


class Dropping(Dense):
    def forward(self, profile: Tensor, item: Tensor) -> Tensor:
        dropped = nn.functional.dropout(
            self.user(profile) * self.item(profile), 0.5, self.training
        )
        return self.top(dropped).squeeze(1)


def with_dropout(runtime: Runtime) -> tuple[str, float, float]:
    model = seeded(Dropping)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    step = adopt_towers(
        model, optimizer, bce(model), runtime, {"user": 0, "item": 0}, next(batches(1))
    )
    (batch,) = batches(1)
    losses = [float(step(*batch)[0].detach()) for _ in range(150)]
    return step.describe(), losses[0], losses[-1]


def test_dropout_is_drawn_by_each_rank_and_said_so() -> None:
    """Both towers on one rank: the other takes its rows of the top alone."""
    for text, first, last in run_ranks(with_dropout, 2):
        assert (
            "the loss draws random numbers: each rank draws its own, not those of one process"
            in text
        )
        assert "rank 0: user, item" in text
        assert "rank 1: no tower" in text
        assert last < 0.8 * first


@pytest.mark.slow
@pytest.mark.launch
def test_the_example_under_torchrun_trains_as_the_script_does(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed, weights = [], []
    for name, launcher in (("towers_script", []), ("towers_adopted", torchrun)):
        command = [
            sys.executable,
            *launcher,
            f"examples/{name}.py",
            str(tmp_path / f"{name}.pt"),
        ]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout.splitlines())
        weights.append(torch.load(tmp_path / f"{name}.pt"))
    assert printed[1][0].startswith("adopt_towers: ")
    losses = [
        [float(figure) for figure in re.findall(r"\d\.\d{5}", lines[-1])]
        for lines in printed
    ]
    assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), 3e-5)
    # Adam, whose first steps are as long for gradients near rounding
    assert_close(weights[1], weights[0], 1e-3)
