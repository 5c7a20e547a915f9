"""Local SGD around a user's own step: what ranks average equals what is averaged by hand, over two gloo processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contracts import run_ranks
from tests.test_examples import TWO_RANKS, run
from torchrec_ext.adopt import adopt
from torchrec_ext.capture import executors
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import LocalSGD, UnevenStepsError

USERS, ITEMS, D, B, STEPS, EVERY = 900, 20, 4, 8, 14, 3
Batch = tuple[Tensor, ...]
Weights = dict[str, Tensor]


class Net(nn.Module):
    """A table that is moved row by row, one that is moved whole, a frozen one, and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, D)
        self.item = nn.Embedding(ITEMS, D)
        self.fixed = nn.Embedding(ITEMS, D)
        self.top = nn.Sequential(nn.Linear(2 * D, 4), nn.Tanh(), nn.Linear(4, 1))
        self.fixed.requires_grad_(False)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = self.item(item) + self.fixed(item)
        return self.top(torch.cat([self.user(user), rows], 1)).squeeze(1)  # type: ignore[no-any-return]


def made(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_of(model: nn.Module) -> Callable[..., Tensor]:
    return lambda user, item, label: F.binary_cross_entropy_with_logits(
        model(user, item), label
    )


def batches(rank: int, count: int = STEPS) -> Iterator[Batch]:
    draw = torch.Generator().manual_seed(rank)
    for _ in range(count):
        user, item = (
            torch.randint(rows, (B,), generator=draw) for rows in (USERS, ITEMS)
        )
        yield user, item, torch.randint(2, (B,), generator=draw).float()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        [weight for weight in model.parameters() if weight.requires_grad], 1e-2
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [weight for weight in model.parameters() if weight.requires_grad], 0.5
    )


def kept(model: nn.Module) -> Weights:
    return {name: value.clone() for name, value in model.state_dict().items()}


class OwnStep:
    """A plain step with the attributes of an adopted one."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self.optimizers = (optimizer,)
        self.after_step: list[Callable[[], None]] = []

    def __call__(self, *batch: Tensor) -> None:
        (optimizer,) = self.optimizers
        optimizer.zero_grad()
        loss_of(self._model)(*batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for call in self.after_step:
            call()


DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}
MODES: dict[
    str, tuple[Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any]]
] = {
    "local sgd": (adam, {"every": EVERY}),
    "diloco": (adam, {"every": EVERY, **DILOCO}),
    "every step": (sgd, {"every": 1}),
}


def ran(runtime: Runtime, name: str) -> tuple[Weights, str]:
    """The weights of a script of this rank, whose model begins with weights of its own."""
    optimizer_of, options = MODES[name]
    model = made(runtime.rank)
    optimizer = optimizer_of(model)
    step = adopt(model, optimizer, loss_of(model), compile="require")
    with LocalSGD(model, step, **options):
        for batch in batches(runtime.rank):
            step(*batch)
    return kept(model), step.describe()


def by_hand(name: str) -> Weights:
    """The same two replicas in one process, averaged by the papers' formulas."""
    optimizer_of, options = MODES[name]
    replicas = [made(), made()]
    optimizers = [optimizer_of(replica) for replica in replicas]
    anchor = [
        weight.detach().clone()
        for weight in replicas[0].parameters()
        if weight.requires_grad
    ]
    outer = torch.optim.SGD(anchor, 0.7, momentum=0.9, nesterov=True)
    both = [
        [weight for weight in replica.parameters() if weight.requires_grad]
        for replica in replicas
    ]
    for number, pair in enumerate(zip(batches(0), batches(1), strict=True), 1):
        for replica, optimizer, batch in zip(replicas, optimizers, pair, strict=True):
            OwnStep(replica, optimizer)(*batch)
        if number % options["every"] and number < STEPS:
            continue
        for start, *weights in zip(anchor, *both, strict=True):
            start.grad = start - torch.stack(
                [weight.detach() for weight in weights]
            ).mean(0)
        if "outer_lr" in options:
            outer.step()
        with torch.no_grad():
            for start, *weights in zip(anchor, *both, strict=True):
                start -= start.grad * ("outer_lr" not in options)  # type: ignore[operator]
                for weight in weights:
                    weight.copy_(start)
    return kept(replicas[0])


def refusals(runtime: Runtime) -> dict[str, str]:
    """What a rank raises where ranks differ, and where arguments do not fit."""
    found = {}
    model = made()
    step = OwnStep(model, sgd(model))
    try:
        with LocalSGD(model, step, every=2):
            for batch in batches(0, 4 + runtime.rank):
                step(*batch)
    except UnevenStepsError as error:
        found["steps"] = str(error)
    wider = nn.Linear(3 + runtime.rank, 1)
    other = nn.Linear(3, 1)

    def local(module: nn.Module, every: Any) -> Any:
        return LocalSGD(module, OwnStep(module, sgd(module)), every=every)

    def twice() -> None:
        with local(other, 2):
            local(other, 3).__enter__()

    for name, make in (
        ("models", lambda: local(wider, 2).__enter__()),
        (
            "ddp",
            lambda: LocalSGD(nn.parallel.DistributedDataParallel(model), step, every=2),
        ),
        ("empty", lambda: LocalSGD(nn.ReLU(), step, every=2)),
        ("other", lambda: LocalSGD(made(), step, every=2)),
        ("optimizer", lambda: LocalSGD(model, sgd(model), every=2)),  # type: ignore[arg-type]
        ("part", lambda: local(other, 1.5)),
        ("settings", lambda: local(other, 2 + runtime.rank).__enter__()),
        ("twice", twice),
    ):
        try:
            make()
        except ValueError as error:
            found[name] = str(error)
    return found


def of_rank(runtime: Runtime) -> dict[str, Any]:
    executors.compile_graph = lambda graph, examples: graph  # type: ignore[assignment]  # op by op
    torch.set_num_threads(1)
    return {
        "captured": {name: ran(runtime, name) for name in MODES},
        "refused": refusals(runtime),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(of_rank, 2)


def farthest(one: Weights, other: Weights) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("name", MODES)
def test_ranks_average_what_two_replicas_average_by_hand(
    ranks: list[dict[str, Any]], name: str
) -> None:
    (first, described), (second, _) = (rank["captured"][name] for rank in ranks)
    assert "captured since step 3" in described
    if name != "every step":  # Adam's table
        assert "user.weight" in described
        assert "row by row" in described
    assert farthest(first, second) == 0
    expected = by_hand(name)
    whole = [key for key in expected if key != "user.weight"]
    assert farthest({key: expected[key] for key in whole}, first) < 2e-5
    assert farthest(expected, first) < 2e-3
    assert farthest(kept(made()), first) > 0.01


def test_what_does_not_fit_is_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["refused"] for rank in ranks)
    assert first == second
    assert (
        "ranks have taken unequal numbers of steps, rank 0: 4, rank 1: 5"
        in first["steps"]
    )
    assert first["models"].startswith(
        "model, weight: (1, 3) on rank 0, (1, 4) on rank 1; give all ranks the same"
    )
    assert (
        first["ddp"]
        == "model: DistributedDataParallel averages gradients in every step; give its .module"
    )
    assert first["empty"].startswith("optimizer: it moves no parameter of the model")
    assert first["other"].startswith(
        "optimizer: it moves no parameter of the model, a Net; give the one"
    )
    for name, told in (
        ("optimizer", "optimizer: a SGD; give the step that adopt() returns, or take"),
        ("part", "every=1.5: must be a whole number of steps"),
        ("settings", "every: 2 on rank 0, 3 on rank 1; give all ranks the same"),
        ("twice", "model: its Linear is inside of another LocalSGD; leave that one"),
    ):
        assert first[name].startswith(told), name


def test_without_a_process_group_it_says_how_to_have_one() -> None:
    model = made()
    with pytest.raises(
        ValueError,
        match=r"there is no process group; start the script by torchrun, inside Runtime",
    ):
        LocalSGD(model, OwnStep(model, sgd(model)), every=2)


@pytest.mark.slow
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "ncf.pt"
    said = run("local_sgd_adopted", str(path), "4000", "2", launcher=tuple(TWO_RANKS))
    losses = [float(line.split()[-1]) for line in said.splitlines() if "epoch" in line]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert path.exists()
