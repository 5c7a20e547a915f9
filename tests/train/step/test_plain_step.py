"""A plain step trains what the pipeline's step of the sharded model trains, and leaves to it what it cannot do."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests.capture.runs import Given
from tests.capture.test_captured import distance, farthest, stepped, whole
from tests.contracts import gather_state, pipeline_alone, run_ranks
from tests.examples import META, batches, small_model
from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.loop import TrainConfig, train
from torchrec_ext.train.step.plain import PlainStep, mean_gradients

OPTIMIZERS: dict[str, OptimizerConfig] = {
    # by one kernel of torch
    "adam": OptimizerConfig(tables="adam", tables_lr=0.01, tables_l2=0.01),
    "adamw": OptimizerConfig(tables="adam", tables_lr=0.01, dense_weight_decay=0.1),
    "sgd": OptimizerConfig(
        tables="sgd",
        tables_lr=0.1,
        dense="sgd",
    ),
    "adagrad": OptimizerConfig(
        tables="adagrad", tables_lr=0.01, dense="adagrad", clip_norm=0.1
    ),
    "lazy_adam": OptimizerConfig(tables="lazy_adam", tables_lr=0.01),
}


def compared(
    runtime: Runtime, made: Any, given: list[TowerBatch], config: OptimizerConfig
) -> dict[str, float]:
    """How far losses, weights and state of plain steps are from those of the sharded model."""
    found = []
    for plain in (False, True):
        torch.manual_seed(0)
        unsharded = made()
        # A frozen layer stays as it is.
        next(unsharded.parameters()).requires_grad_(False)
        model, optimizer = hybrid_parallel(
            unsharded,
            runtime,
            plan=PlanConfig(sharding="data_parallel"),
            optimizer=config,
        )
        if plain:
            step = PlainStep(model, optimizer, together=runtime.world_size > 1)
            step.begin()
            losses = [step(batch).loss for batch in given[:-1]]
            # and the sharded model goes on from there
            losses.append(stepped(model, optimizer, given[-1]))
        else:
            losses = [stepped(model, optimizer, batch) for batch in given]
        states = {
            name: optimizer.state.get(parameter, {})
            for name, parameter in optimizer.params.items()
        }
        found.append((losses, gather_state(model), states))
    (losses, state, own), (other_losses, other_state, others) = found
    pairs = [
        (own[name][part], others[name][part]) for name in own for part in own[name]
    ]
    return {
        "loss": max(
            abs(float(one - other))
            for one, other in zip(losses, other_losses, strict=True)
        ),
        # They are gathered on rank 0.
        "weights": farthest(state, other_state) if runtime.is_main else 0.0,
        "state": max(
            (distance(whole(one), whole(other)) for one, other in pairs), default=0.0
        ),
    }


def of_a_run(runtime: Runtime, amp: Any) -> list[Any]:
    """The same run with plain steps and with the pipeline's."""
    found = []
    for road in (contextlib.nullcontext(), pipeline_alone()):
        model, optimizer = hybrid_parallel(
            small_model(META), runtime, optimizer=OPTIMIZERS["adam"]
        )
        config = TrainConfig(epochs=2, compile="off", amp=amp)
        with road:
            history = train(model, optimizer, Given(list(batches(8))), runtime, config)
        found.append(
            (
                gather_state(model),
                [record["loss"] for record in history if record["kind"] == "train"],
            )
        )
    return found


def laws(runtime: Runtime) -> dict[str, Any]:
    # As many ids as rows, and not one in each.
    uneven = next(
        batch
        for batch in batches(10_000, seed=1)
        if batch.sparse["history"].values().numel() == len(batch.labels)
    )
    given = [*batches(29), uneven, *batches(1)]
    return {
        "by optimizer": {
            name: compared(
                runtime,
                lambda: small_model(META),
                given,
                config,
            )
            for name, config in OPTIMIZERS.items()
        },
        "run": {amp: of_a_run(runtime, amp) for amp in ("off", "bf16")},
        "refused": refused(runtime),
    }


def refused(runtime: Runtime) -> str:
    parallel, optimizer = hybrid_parallel(
        small_model(META), runtime, plan=PlanConfig(sharding="table_wise")
    )
    with pytest.raises(CannotCaptureError) as told:
        PlainStep(parallel, optimizer)
    return str(told.value)


def of_two(runtime: Runtime) -> tuple[dict[str, float], list[Any]]:
    given = list(batches(8, rank=runtime.rank, world_size=2))
    far = compared(runtime, lambda: small_model(META), given, OPTIMIZERS["adam"])
    ones = torch.ones(3)
    grads = [ones * runtime.rank, None if runtime.rank else ones, None]
    return far, mean_gradients(grads, [ones] * 3)


def test_two_ranks_step_by_their_mean_gradients() -> None:
    for far, means in run_ranks(of_two, 2):
        assert max(far.values()) < 1e-5
        assert [None if each is None else each.tolist() for each in means] == [
            [0.5] * 3,
            [0.5] * 3,
            None,
        ]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_ranks(laws, 1, timeout_s=300)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_steps_equal_those_of_the_sharded_model(
    found: dict[str, Any], name: str
) -> None:
    assert max(found["by optimizer"][name].values()) < 1e-5


@pytest.mark.parametrize(("amp", "near"), [("off", 1e-5), ("bf16", 1e-3)])
def test_a_run_of_plain_steps_is_the_pipelines(
    found: dict[str, Any], amp: str, near: float
) -> None:
    (plain, losses), (piped, other_losses) = found["run"][amp]
    assert farthest(plain, piped) < near
    assert losses == pytest.approx(other_losses, abs=near)
    assert (losses == found["run"]["off"][0][1]) == (amp == "off")


def test_what_kernels_do_otherwise_is_left_to_them(found: dict[str, Any]) -> None:
    assert found["refused"] == "table 'user_id' is sharded, or not fp32"
