"""Schedules: known factors, and that tables in kernels follow the same rates as an unsharded model set by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contracts import gather_state, run_ranks
from tests.examples import META, batches, small_model
from tests.train.test_loop import Batches
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.train.config import Schedule
from torchrec_ext.train.loop import TrainConfig, train


def factors(schedule: Schedule, steps: int) -> list[float]:
    return [schedule.factor(step, steps) for step in range(steps)]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), [1, 1, 1, 1, 1]),
        (Schedule(warmup=4), [0.25, 0.5, 0.75, 1, 1]),
        (Schedule(kind="linear"), [1, 0.75, 0.5, 0.25, 0]),
        (
            Schedule(kind="cosine"),
            [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0],
        ),
        (Schedule(kind="cosine", warmup=2), [0.5, 1, 1, 0.5, 0]),
    ],
)
def test_each_kind_has_the_factors_of_its_closed_form(
    schedule: Schedule, expected: list[float]
) -> None:
    assert factors(schedule, 5) == pytest.approx(expected, abs=1e-12)


OPTIMIZER = OptimizerConfig(tables="sgd", tables_lr=2.0, dense="sgd", dense_lr=0.5)
STEPS = 12


def scheduled(runtime: Runtime, sharding: str, config: TrainConfig) -> Any:
    model = small_model(META)
    parallel, optimizer = hybrid_parallel(
        model, runtime, plan=PlanConfig(sharding=sharding), optimizer=OPTIMIZER, seed=7
    )
    try:
        history = train(
            parallel,
            optimizer,
            Batches(runtime, STEPS // config.epochs),
            runtime,
            config,
        )
    except ValueError as error:
        return str(error)
    rates = [(record["tables_lr"], record["dense_lr"]) for record in history]
    return {"state": gather_state(parallel), "rates": rates}


def by_hand(epochs: int, schedule: Schedule) -> dict[str, Tensor]:
    model = small_model()
    initialise_tables(model, seed=7)
    for step, batch in enumerate(
        [batch for _ in range(epochs) for batch in batches(STEPS // epochs)]
    ):
        model.zero_grad()
        model(batch)[0].backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_table = "embedding_bags" in name
                factor = factors(schedule, STEPS)[step]
                parameter -= (2.0 if is_table else 0.5) * factor * parameter.grad
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("sharding", "schedule"),
    [
        ("row_wise", Schedule(kind="linear", warmup=3)),
        ("data_parallel", Schedule(kind="linear")),
    ],
)
def test_tables_and_dense_layers_follow_the_schedule_as_an_unsharded_model_set_by_hand(
    sharding: str, schedule: Schedule
) -> None:
    config = TrainConfig(epochs=2, log_every=1, schedule=schedule)
    first = run_ranks(scheduled, 2, sharding, config)[0]
    for name, value in by_hand(2, schedule).items():
        torch.testing.assert_close(
            first["state"][name],
            value,
            rtol=0,
            atol=1e-4,
            msg=lambda text, at=name: f"{at}: {text}",
        )
    expected = [(2 * factor, 0.5 * factor) for factor in factors(schedule, STEPS)]
    assert first["rates"] == [pytest.approx(pair) for pair in expected]


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    config = TrainConfig(epochs=1, schedule=Schedule(warmup=STEPS))
    told = run_ranks(scheduled, 1, "table_wise", config)[0]
    assert (
        told
        == "schedule: warmup=12 steps, but the run has 12; a warm-up must end before the run"
    )
