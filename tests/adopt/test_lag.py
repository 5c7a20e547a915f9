"""Rows that are updated later: every reader sees them updated, whoever holds the memory, and nothing stays alive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchrec_ext.adopt.step as adopted
import torchrec_ext.capture.memory as memories
from tests.adopt.pairs import D, Pairs, logistic
from torchrec_ext.adopt import AdoptedStep, adopt, verify
from torchrec_ext.capture import executors, policy

USERS, ITEMS, B = 700, 300, 16
NEAR = 2e-3


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run as traced, op by op, and none is compared for its own sake."""
    monkeypatch.setattr(executors, "compile_graph", lambda graph, examples: graph)
    monkeypatch.setattr(verify, "FIRST", 0)
    monkeypatch.setattr(adopted.StepWatch, "_report", lambda watch: None)


def made(
    compile_: Any = "require",
) -> tuple[Any, AdoptedStep, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = Pairs(USERS, ITEMS)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return (
        model,
        adopt(model, optimizer, logistic(model), compile=compile_),
        optimizer,
    )


def batches(count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        user = torch.randint(USERS, (B,), generator=generator)
        item = torch.randint(ITEMS, (B,), generator=generator)
        yield user, item, torch.randint(2, (B,), generator=generator).float()


def trained(
    compile_: Any, after: Callable[[Any, int], Any], count: int = 30
) -> tuple[Any, AdoptedStep]:
    """Trains, and calls a function after each step."""
    model, step, _ = made(compile_)
    for number, batch in enumerate(batches(count)):
        step(*batch)
        after(model, number)
    return model, step


def assert_alike(model: Any, other: Any) -> None:
    for name, value in model.state_dict().items():
        assert torch.allclose(value, other.state_dict()[name], atol=NEAR), name


def test_rows_that_are_written_after_each_step_are_as_in_the_users_loop() -> None:
    def zero(model: Any, number: int) -> None:
        with torch.no_grad():
            model.item.weight[0] = 0
            model.user.weight[[3, 5]] = torch.full((2, D), 0.25)

    plain, _ = trained("off", zero)
    model, _ = trained("require", zero)
    assert_alike(plain, model)
    assert float(model.item.weight[0].detach().abs().max()) == 0.0


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture costs nothing and its steps take no time, so that readers alone decide."""
    for name, value in (
        ("CAPTURE_S", {"cpu": 0.0}),
        ("CAPTURE_S_PER_CALL", {"cpu": 0.0}),
        ("_PACE", 8),
    ):
        monkeypatch.setattr(adopted, name, value)
    monkeypatch.setattr(policy, "WATCHED", 4)
    monkeypatch.setattr(policy, "median_step", lambda seconds: 1e-9)
    monkeypatch.setattr(
        adopted.StepWatch,
        "_report",
        lambda watch: setattr(watch._policy, "is_reported", True),
    )


def test_readers_of_whole_tables_that_eat_the_gain_are_named_and_steps_go_eager(
    paced: None, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = {}
    for way in ("auto", "require"):
        _, step = trained(
            way, lambda model, number: number % 3 or float(model.item.weight.norm()), 40
        )
        ways[way] = step.describe()
    assert "test_lag.py" in ways["auto"]
    assert "all rows are updated after each step for it" in ways["auto"]
    assert ways["require"].startswith("captured")
    assert "lambda model, number" in capsys.readouterr().out


@pytest.mark.parametrize(
    "way", ["data", "numpy", "state_dict", "dlpack", "a frozen table"]
)
def test_memory_that_somebody_holds_is_as_after_eager_steps_at_any_time(
    way: str,
) -> None:
    found = []
    for compile_ in ("off", "require"):
        model, step, _ = made(compile_)
        kept: Any = {
            "data": lambda model: model.item.weight.data,
            "numpy": lambda model: model.item.weight.detach().numpy(),
            "state_dict": lambda model: model.state_dict()["item.weight"],
            "dlpack": lambda model: torch.from_dlpack(model.item.weight.detach()),
            "a frozen table": lambda model: nn.Embedding.from_pretrained(
                model.item.weight.data
            ),
        }[way]
        held, values = None, []
        for number, batch in enumerate(batches(20)):
            if number == 8:
                held = kept(model)
            step(*batch)
            if held is not None:
                rows = (
                    held.weight
                    if isinstance(held, nn.Embedding)
                    else torch.as_tensor(held)
                )
                values.append(rows.clone())
        found.append(torch.stack(values))
    assert torch.allclose(*found, atol=NEAR)


def test_two_steps_over_one_model_by_turns_learn_what_eager_ones_learn() -> None:
    found = []
    for compile_ in ("off", "require"):
        model, first, optimizer = made(compile_)

        def pull(
            user: Tensor, item: Tensor, label: Tensor, model: Any = model
        ) -> Tensor:
            scores = (
                (model.user(user) * model.item(item)).sum(1)
                + model.top.weight.sum()
                + model.top.bias
            )
            return F.binary_cross_entropy_with_logits(scores, label)

        second = adopt(model, optimizer, pull, compile=compile_)  # type: ignore[arg-type]
        losses = [
            float(step(*batch)[0]) for batch in batches(16) for step in (first, second)
        ]
        found.append((model.state_dict(), losses, optimizer.state_dict()))
    assert found[1][1] == pytest.approx(found[0][1], abs=NEAR)
    assert all(
        torch.allclose(value, found[1][0][name], atol=NEAR)
        for name, value in found[0][0].items()
    )
    assert {float(state["step"]) for state in found[1][2]["state"].values()} == {32.0}


def test_an_update_of_all_rows_that_is_interrupted_is_completed_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, _ = trained("off", lambda *_: None)
    model, _ = trained("require", lambda *_: None)
    monkeypatch.setattr(memories, "_BLOCK_ROWS", 100)
    caught_up, calls = memories.caught_up, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return caught_up(*args, **kwargs)

    monkeypatch.setattr(memories, "caught_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.state_dict()
    assert_alike(plain, model)


def test_a_thread_that_evaluates_during_a_capture_reads_what_it_should() -> None:
    model, step, _ = made()
    given, done, errors = list(batches(30)), threading.Event(), []

    def evaluate() -> None:
        try:
            while not done.is_set():
                with torch.no_grad():
                    assert model(*given[0][:2]).isfinite().all()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=evaluate)
    thread.start()
    for batch in given:
        step(*batch)
    done.set()
    thread.join()
    assert not errors
