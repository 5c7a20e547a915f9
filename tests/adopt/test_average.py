"""A moving average that adopted steps update is that of a loop with update_parameters, whenever somebody reads it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    update_bn,
)

import torchrec_ext.adopt.step as adopted
from torchrec_ext.adopt import CannotAdopt, adopt, verify
from torchrec_ext.adopt.average import StepAverage
from torchrec_ext.capture import executors, memory, policy

PAGE = Path(__file__).parents[2] / "docs" / "adopt.md"
USERS, ITEMS, D, B = 700, 300, 4, 16
STEPS = 60
NEAR = 1e-5

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda groups: torch.optim.Adam(groups, 1e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, 1e-3, weight_decay=0.5),
    "sgd": lambda groups: torch.optim.SGD(groups, 1e-2),
    "sgd with l2": lambda groups: torch.optim.SGD(groups, 1e-2, weight_decay=0.1),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, 1e-2),
    "adam with l2": lambda groups: torch.optim.Adam(groups, 1e-3, weight_decay=0.1),
}
AVERAGES: dict[str, dict[str, Any]] = {
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "slow ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9999)},
    "ema of each": {"avg_fn": get_ema_avg_fn(0.9)},
    "equal": {},
}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run as traced, op by op, a capture always pays, and few steps are compared."""
    monkeypatch.setattr(executors, "compile_graph", lambda graph, examples: graph)
    for name in ("CAPTURE_S", "CAPTURE_S_PER_CALL"):
        monkeypatch.setattr(adopted, name, {"cpu": 0.0})
    monkeypatch.setattr(policy, "WATCHED", 2)
    monkeypatch.setattr(verify, "_CHECKED", 0.0)
    monkeypatch.setattr(adopted.StepWatch, "_report", lambda watch: None)


class Towers(nn.Module):
    """Two tables, of which one has a padding row, a frozen layer, and a normalisation with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, D)
        self.item = nn.Embedding(ITEMS, D, padding_idx=0)
        self.scale = nn.Linear(2 * D, 2 * D)
        self.scale.requires_grad_(False)
        self.norm = nn.BatchNorm1d(2 * D)
        self.top = nn.Linear(2 * D, 1)
        self.factor = 1.0

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = self.norm(self.scale(torch.cat([self.user(user), self.item(item)], 1)))
        return self.top(rows).squeeze(1) * self.factor  # type: ignore[no-any-return]


class Run(NamedTuple):
    """A training: ``step`` is the eager loop's four lines and update_parameters, or an adopted step."""

    model: Any
    optimizer: torch.optim.Optimizer
    averaged: Any
    step: Any


def run(
    adopts: bool,
    optimizer: str = "adam",
    average: str = "ema",
    use_buffers: bool = False,
    **options: Any,
) -> Run:
    torch.manual_seed(0)
    model: Any = Towers()
    top = [*model.norm.parameters(), *model.top.parameters()]
    groups = [
        {"params": [model.user.weight, model.item.weight]},
        {"params": top, "lr": 3e-3},
    ]
    moves = OPTIMIZERS[optimizer](groups)
    averaged = AveragedModel(model, use_buffers=use_buffers, **AVERAGES[average])

    def loss(user: Tensor, item: Tensor, label: Tensor) -> Tensor:
        return F.mse_loss(model(user, item), label, reduction="sum")

    clip_norm = options.get("clip_norm", 0.0)

    def step(*batch: Tensor) -> tuple[Tensor, None]:
        moves.zero_grad()
        value = loss(*batch)
        value.backward()  # type: ignore[no-untyped-call]
        if clip_norm:
            nn.utils.clip_grad_norm_(
                [each for group in moves.param_groups for each in group["params"]],
                clip_norm,
            )
        moves.step()
        averaged.update_parameters(model)
        return value.detach(), None

    if not adopts:
        return Run(model, moves, averaged, step)
    return Run(
        model,
        moves,
        averaged,
        adopt(model, moves, loss, average=averaged, verify=1, **options),
    )


def batches(count: int = STEPS) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        user = torch.randint(USERS, (B,), generator=generator)
        item = torch.randint(ITEMS, (B,), generator=generator)
        yield user, item, torch.randn(B, generator=generator)


def assert_alike(model: nn.Module, other: nn.Module, near: float = NEAR) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(
            other.state_dict()[name], value, rtol=0, atol=near, msg=name
        )


def both(
    after: Callable[[Run, int], Any] = lambda *_: None, count: int = 30, **options: Any
) -> tuple[Run, Run]:
    """Trains the loop and the adopted step, and calls a function after each step."""
    runs = run(False, **options), run(True, **options)
    for each in runs:
        for number, batch in enumerate(batches(count)):
            each.step(*batch)
            after(each, number)
    return runs


def is_row_by_row(each: Run) -> bool:
    return set(each.step._captures.current.step.row_tables) == {
        "user.weight",
        "item.weight",
    }


@pytest.mark.parametrize(
    ("optimizer", "average"),
    [
        ("adam", "ema"),
        ("adamw", "equal"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                *((name, "ema") for name in [*OPTIMIZERS][1:]),
                ("adamw", "slow ema"),
                ("sgd", "ema of each"),
            )
        ),
    ],
)
def test_averages_are_those_of_the_eager_loop(optimizer: str, average: str) -> None:
    plain, ours = both(count=STEPS, optimizer=optimizer, average=average)
    assert is_row_by_row(ours) == (optimizer != "adam with l2")
    assert ours.step._captures.current.lag.count == 0
    assert_alike(plain.averaged, ours.averaged)
    assert_alike(plain.model, ours.model)


def test_eager_steps_average_bit_for_bit() -> None:
    plain, ours = both(count=10, compile="off", use_buffers=True)
    for name, value in plain.averaged.state_dict().items():
        assert torch.equal(value, ours.averaged.state_dict()[name]), name


def test_buffers_are_averaged_if_use_buffers_says_so() -> None:
    plain, ours = both(use_buffers=True, count=20)
    assert_alike(plain.averaged, ours.averaged)


def test_averages_of_clipped_steps_under_a_schedule_and_of_a_layer_that_thaws() -> None:
    def after(each: Run, number: int) -> None:
        each.optimizer.param_groups[0]["lr"] *= 0.97
        if number == 10:
            with torch.no_grad():
                each.model.scale.weight.mul_(1.1)

    plain, ours = both(after, clip_norm=1.0, optimizer="adamw")
    assert is_row_by_row(ours)
    assert_alike(plain.averaged, ours.averaged)


def test_rows_that_decay_faster_than_their_average_are_updated_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_MOST_LOST_DIGITS", 0.005)
    plain, ours = both(optimizer="sgd with l2", average="slow ema")
    assert ours.step._captures.current.source.memory.unsettled < 20
    assert_alike(plain.averaged, ours.averaged)


def test_an_average_is_up_to_date_whenever_somebody_reads_it() -> None:
    found: dict[int, list[Tensor]] = {}
    user, item, _ = next(batches(1))

    def after(each: Run, number: int) -> None:
        if number % 10 == 7:
            each.averaged.eval()
            with torch.no_grad():
                update_bn([], each.averaged)
                found.setdefault(id(each), []).append(each.averaged(user, item))
        if number % 10 == 9:
            found[id(each)].append(
                copy.deepcopy(each.averaged).module.item.weight.detach()
            )
            found[id(each)].append(
                each.averaged.state_dict()["module.user.weight"].clone()
            )
        assert int(each.averaged.n_averaged) == number + 1

    plain, ours = both(after)
    for value, other in zip(found[id(plain)], found[id(ours)], strict=True):
        torch.testing.assert_close(other, value, rtol=0, atol=NEAR)


def test_a_padding_row_that_is_zeroed_after_each_step_leaves_the_others_for_later() -> (
    None
):
    def after(each: Run, _: int) -> None:
        with torch.no_grad():
            each.model.item.weight[0] = 0
            each.model.user.weight[3] = 0.5

    plain, ours = both(after)
    assert ours.step._captures.current.lag.count == 0
    assert_alike(plain.averaged, ours.averaged)


def test_weights_that_are_swapped_in_and_back_leave_training_as_it_was() -> None:
    def after(each: Run, number: int) -> None:
        if number % 10 == 8:
            kept = copy.deepcopy(each.model.state_dict())
            each.model.load_state_dict(each.averaged.module.state_dict())
            each.model.load_state_dict(kept)

    plain, ours = both(after)
    assert_alike(plain.averaged, ours.averaged)


def test_a_checkpoint_resumes_in_a_new_run_and_in_the_same_one() -> None:
    plain, ours = both()
    saved = copy.deepcopy(
        [each.state_dict() for each in (ours.model, ours.optimizer, ours.averaged)]
    )
    for batch in list(batches())[30:40]:
        ours.step(*batch)
    resumed = run(True)
    for each in (ours, resumed):
        for target, state in zip(
            (each.model, each.optimizer, each.averaged),
            copy.deepcopy(saved),
            strict=True,
        ):
            target.load_state_dict(state)
    for each in (plain, ours, resumed):
        for batch in list(batches())[30:]:
            each.step(*batch)
    assert int(resumed.averaged.n_averaged) == int(ours.averaged.n_averaged) == STEPS
    assert_alike(plain.averaged, ours.averaged)
    assert_alike(plain.averaged, resumed.averaged)


def test_an_average_that_begins_anew_begins_with_a_copy() -> None:
    def after(each: Run, number: int) -> None:
        if number == 10:
            each.averaged.n_averaged.zero_()

    plain, ours = both(after, average="slow ema")
    assert_alike(plain.averaged, ours.averaged)


def test_a_step_that_fails_counts_for_nothing() -> None:
    def after(each: Run, number: int) -> None:
        if number in (0, 20):
            each.model.factor = "no number"
            with pytest.raises(TypeError):
                each.step(*next(batches(1)))
            each.model.factor = 1.0

    plain, ours = both(after)
    assert is_row_by_row(ours)
    assert int(ours.averaged.n_averaged) == 30
    assert_alike(plain.averaged, ours.averaged)


def halves(averages: Any, values: Any, _: Any) -> None:
    for average, value in zip(averages, values, strict=True):
        average.copy_((average + value) / 2)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "module": (
        lambda averaged: setattr(averaged, "module", copy.deepcopy(averaged.module)),
        "a weight of the average",
    ),
    "data": (
        lambda averaged: setattr(
            averaged.module.item.weight, "data", torch.ones(ITEMS, D)
        ),
        "a weight of the",
    ),
    "count": (
        lambda averaged: averaged.load_state_dict(
            copy.deepcopy(averaged.state_dict()), assign=True
        ),
        "a weight",
    ),
    "decay": (
        lambda averaged: setattr(averaged, "multi_avg_fn", get_ema_multi_avg_fn(0.5)),
        "the rule of the average",
    ),
    "rule": (
        lambda averaged: setattr(averaged, "multi_avg_fn", halves),
        "the rule of the average",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_somebody_replaces_is_seen(name: str) -> None:
    model = Towers()
    averaged = AveragedModel(model, **AVERAGES["ema"])
    average = StepAverage(averaged, model)
    assert not average.change()
    change, message = CHANGES[name]
    change(averaged)
    assert average.change().startswith(message)


@pytest.mark.parametrize("name", ["data", "rule"])
def test_what_somebody_replaces_is_averaged_from_then_on(name: str) -> None:
    change, _ = CHANGES[name]
    plain, ours = both(
        lambda each, number: change(each.averaged) if number == 10 else None, count=30
    )
    assert_alike(plain.averaged, ours.averaged)
    assert ours.step.describe().startswith(
        "captured" if name == "data" else "eager: average is made by halves()"
    )


def test_a_call_of_update_parameters_besides_is_refused_and_a_copy_takes_it() -> None:
    _, ours = both(count=5)
    with pytest.raises(CannotAdopt, match="leave the call out") as error:
        ours.averaged.update_parameters(ours.model)
    assert len(str(error.value)) < 200
    assert int(ours.averaged.n_averaged) == 5
    other = copy.deepcopy(ours.averaged)
    other.update_parameters(ours.model)
    assert type(other) is AveragedModel
    assert int(other.n_averaged) == 6
    equal = run(True, average="equal").averaged
    assert type(pickle.loads(pickle.dumps(equal))) is AveragedModel


def test_a_loss_that_reads_the_average_stays_eager() -> None:
    ours = run(True)
    teacher = ours.averaged.requires_grad_(False)

    def loss(user: Tensor, item: Tensor, label: Tensor) -> Tensor:
        return F.mse_loss(ours.model(user, item), label) + F.mse_loss(
            ours.model(user, item), teacher(user, item)
        )

    step = adopt(ours.model, ours.optimizer, loss, average=ours.averaged)
    for batch in batches(4):
        step(*batch)
    assert (
        "eager: the loss reads the average of 'user.weight'; leave average= out"
        in step.describe()
    )
    assert int(ours.averaged.n_averaged) == 4


def of_another_model() -> Any:
    return AveragedModel(nn.Linear(2, 2))


def of_more_rows() -> Any:
    model: Any = Towers()
    model.user = nn.Embedding(USERS + 1, D)
    return AveragedModel(model)


def by(function: Any) -> Callable[[], Any]:
    return lambda: AveragedModel(Towers(), multi_avg_fn=function)


@pytest.mark.parametrize(
    ("average", "message"),
    [
        (
            lambda: Towers(),
            "average is a Towers; give torch.optim.swa_utils.AveragedModel",
        ),
        (lambda: 0.9, "average is a float"),
        (lambda: type("Own", (AveragedModel,), {})(Towers()), "average is a Own"),
        (
            of_another_model,
            "average has 'user.weight' as none and the model as (700, 4) torch.float32 on cpu",
        ),
        (
            of_more_rows,
            "average has 'user.weight' as (701, 4) torch.float32 on cpu and the model as (700, 4)",
        ),
        (
            lambda: AveragedModel(Towers()).double(),
            "average has 'user.weight' as (700, 4) torch.float64 on cpu and",
        ),
        (
            by(lambda mine, theirs, count: None),
            "average is made by <lambda>(), which a captured step does not know",
        ),
        (
            by(get_ema_multi_avg_fn(0)),
            "average has decay=0; must be a number between 0 and 1, such as .999",
        ),
        (by(get_ema_multi_avg_fn(1.0)), "average has decay=1.0"),
        (by(get_ema_multi_avg_fn(float("nan"))), "average has decay=nan"),
    ],
)
def test_an_average_that_steps_do_not_know_is_refused(
    average: Callable[[], Any], message: str
) -> None:
    model = Towers()
    with pytest.raises(CannotAdopt) as error:
        adopt(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            lambda: None,
            average=average(),
        )
    assert message in str(error.value)
    assert len(str(error.value)) < 200


def test_the_pages_example_is_captured_row_by_row() -> None:
    example = PAGE.read_text().partition("```py\naveraged = ")[2].partition("```")[0]
    model = Towers()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    names = {**globals(), "model": model, "optimizer": optimizer}
    names["loss"] = lambda user, item, label: F.mse_loss(model(user, item), label)
    exec("averaged = " + example, names)
    for batch in batches(4):
        names["step"](*batch)
    assert "moved row by row: user.weight, item.weight" in names["step"].describe()
    assert int(names["averaged"].n_averaged) == 4
