"""float16 with a scaled loss learns what float32 learns, and leaves out a step whose gradients overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.capture.runs import Given
from tests.capture.test_captured import farthest
from tests.contracts import gather_state, pipeline_alone, run_ranks
from tests.examples import META, batches, small_model
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.train.loop import TrainConfig, train
from torchrec_ext.train.step.plain import PlainStep
from torchrec_ext.train.step.precision import LossScaling, forward_context

ADAM = OptimizerConfig(tables="adam", tables_lr=0.01)


def made(runtime: Runtime, sharding: str = "data_parallel") -> Any:
    model = small_model(META)
    return hybrid_parallel(
        model, runtime, plan=PlanConfig(sharding=sharding), optimizer=ADAM
    )


def trained(runtime: Runtime, **options: Any) -> tuple[Any, list[float]]:
    """The state after 30 steps, and the losses."""
    model, optimizer = made(runtime)
    given = Given(list(batches(30, rank=runtime.rank, world_size=runtime.world_size)))
    config = TrainConfig(epochs=1, log_every=10, **{"compile": "off", **options})
    return gather_state(model), [
        one["loss"]
        for one in train(model, optimizer, given, runtime, config)
        if one["kind"] == "train"
    ]


def overflown(runtime: Runtime) -> tuple[float, float, float]:
    """The factor after a step by far too large a one, how far it has moved the model, and how far 60 steps do."""
    model, optimizer = made(runtime)
    scaling = LossScaling(optimizer, runtime.device, first=2.0**50)
    context = forward_context("fp16", runtime.device)
    step = PlainStep(
        model,
        optimizer,
        context=context,
        scaling=scaling,
    )
    states, factors = [], []
    for at, batch in enumerate(batches(60)):
        if at in (0, 1):
            states.append(
                {
                    name: value.clone()
                    for name, value in (gather_state(model) or {}).items()
                }
            )
        step(batch)
        factors.append(scaling.factor)
    return (
        factors[0] / 2.0**50,
        farthest(*states),
        farthest(states[0], gather_state(model)),
    )


def refused(runtime: Runtime) -> list[str]:
    found = []
    model = small_model(META)
    parallel, optimizer = hybrid_parallel(
        model, runtime, plan=PlanConfig(sharding="table_wise")
    )
    with pytest.raises(ValueError, match="is sharded") as sharded:
        train(
            parallel,
            optimizer,
            Given(list(batches(2))),
            runtime,
            TrainConfig(amp="fp16"),
        )
    found.append(str(sharded.value))
    for sharding, options, sync in (
        ("data_parallel", {}, SyncConfig(mode="local_sgd", every=4)),
        ("data_parallel", {"compile": "require"}, SyncConfig()),
    ):
        with pytest.raises((ValueError, CannotCaptureError)) as told:
            train(
                *made(runtime, sharding),
                Given(list(batches(2))),
                runtime,
                TrainConfig(amp="fp16", **options),
                sync=sync,
            )  # type: ignore[arg-type]
        found.append(str(told.value))
    return found


def laws(runtime: Runtime) -> dict[str, Any]:
    ways: dict[str, dict[str, Any]] = {
        "fp32": {},
        "plain": {"amp": "fp16"},
    }
    found: dict[str, Any] = {
        name: trained(runtime, **options) for name, options in ways.items()
    }
    with pipeline_alone():
        found["piped"] = trained(runtime, amp="fp16")
    if runtime.world_size > 1 or runtime.device.type != "cpu":
        return found
    return {**found, "overflown": overflown(runtime), "refused": refused(runtime)}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_ranks(laws, 1, timeout_s=300)[0]  # type: ignore[no-any-return]


def nearly_as_float32(found: dict[str, Any]) -> None:
    (_, losses), (state, scaled) = found["fp32"], found["piped"]
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert scaled == pytest.approx(losses, rel=0.01)
    assert scaled != losses


def test_float16_learns_nearly_what_float32_learns(found: dict[str, Any]) -> None:
    nearly_as_float32(found)


def test_on_two_ranks_too() -> None:
    one, other = run_ranks(laws, 2, timeout_s=300)
    nearly_as_float32(one)
    assert one["piped"][1] == other["piped"][1]


def test_plain_steps_scale_as_the_pipeline_does(found: dict[str, Any]) -> None:
    assert farthest(found["plain"][0], found["piped"][0]) < 1e-3


def test_a_step_whose_gradients_overflow_moves_nothing_and_halves_the_factor(
    found: dict[str, Any],
) -> None:
    halved, moved, later = found["overflown"]
    assert halved == 0.5
    assert moved == 0
    assert later > 0.01


def test_what_cannot_be_scaled_is_refused(found: dict[str, Any]) -> None:
    sharded, apart, captured = found["refused"]
    assert "train.amp=fp16: table 'user_id' is sharded" in sharded
    assert "plan.sharding=data_parallel" in sharded
    assert "train.amp=fp16 with sync.mode=local_sgd: ranks must agree" in apart
    assert (
        "train.compile=require: the training step cannot be captured: train.amp=fp16 leaves out steps"
        in captured
    )


@pytest.mark.gpu
def test_on_a_gpu_too() -> None:
    with Runtime.start("cuda") as runtime:
        nearly_as_float32(laws(runtime))
