"""What goes wrong while a step is captured: the user's errors are raised, others told, and no step is made twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.runs import Ended, Few, ended
from tests.contracts import run_ranks
from tests.examples import META, small_model
from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture.executors import StepExecutor, as_it_is, traced
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.modules.losses import bce

REQUIRED = (
    "CannotCaptureError: train.compile=require: the training step cannot be captured: "
)
SIZES = [24, 24, 24, 12, 24, 24]  # two steps are watched, the third is captured


def strict(size: int) -> nn.Module:
    """A model that takes no batch of ``size`` rows."""

    def loss(logits: Tensor, batch: TowerBatch) -> Tensor:
        if len(batch) == size:
            raise ValueError(f"my loss takes no {len(batch)} rows")
        return bce(logits, batch)

    model = small_model(META)
    model.loss.function = loss
    return model


def tracing(step: Any, memory: list[Tensor], inputs: list[Tensor]) -> Any:
    traced(step, [*memory, *inputs])
    return as_it_is(step, memory, inputs)


def refusing(step: Any, memory: list[Tensor], inputs: list[Tensor]) -> Any:
    raise RuntimeError("this engine takes nothing")


def breaking(step: Any, memory: list[Tensor], inputs: list[Tensor]) -> Any:
    """Runs the first batch and fails on what follows, as a kernel does on an id that is out of range."""
    run, calls = as_it_is(step, memory, inputs), 0

    def once(inputs: Sequence[Tensor]) -> list[Tensor]:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError("index out of bounds: 0 <= tmp7 < 654")
        return run(inputs)

    return once


def user_errors(runtime: Runtime) -> list[Ended]:
    """Of a shape that comes first, and later, to a captured step; of a step that has run already."""
    found = []
    for way in ("auto", "require"):
        for engine, size, sizes in (
            (tracing, 24, [12, 12, 24]),
            (tracing, 12, SIZES),
            (breaking, 12, [24, 24, 24, 12]),
        ):
            found.append(ended(runtime, Few(sizes), engine, way, strict(size)))
    return found


def test_an_error_of_the_users_own_code_is_raised_as_it_is_and_not_taken_for_one_of_the_capture() -> (
    None
):
    (found,) = run_ranks(user_errors, 1)
    for run in found:
        assert run.error.startswith("ValueError: my loss takes no ")
        assert "not captured" not in run.said


def engine_errors(runtime: Runtime) -> list[Ended]:
    ways: list[tuple[StepExecutor, str]] = [
        (as_it_is, "off"),
        (refusing, "auto"),
        (refusing, "require"),
        (breaking, "auto"),
    ]
    return [ended(runtime, Few(SIZES), engine, way) for engine, way in ways]


def test_an_error_of_the_capture_alone_is_told_with_its_line_and_no_step_is_left_out_or_made_twice() -> (
    None
):
    ((plain, refused, required, broken),) = run_ranks(engine_errors, 1)
    assert plain.error == refused.error == ""
    assert all(
        torch.equal(refused.state[name], value) for name, value in plain.state.items()
    )
    assert refused.said.count("not captured: RuntimeError at ") == 1
    assert "this engine takes nothing; training goes on without" in refused.said
    assert required.error.startswith(f"{REQUIRED}RuntimeError")
    # the model itself has nothing against the batch
    assert broken.error == "RuntimeError: index out of bounds: 0 <= tmp7 < 654"


def sometimes(size: int) -> nn.Module:
    """A model of which batches of ``size`` rows give one parameter no gradient, so that it makes fewer steps."""
    model = small_model(META)
    model.loss.scale = nn.Parameter(torch.ones(()))

    def loss(logits: Tensor, batch: TowerBatch) -> Tensor:
        return bce(logits, batch) * (1.0 if len(batch) == size else model.loss.scale)

    model.loss.function = loss
    return model


def once(step: Any, memory: list[Tensor], inputs: list[Tensor]) -> Any:
    """Takes batches of 24 rows alone."""
    if not any(part.shape == (24,) for part in inputs):
        raise RuntimeError("this engine takes 24 rows")
    return as_it_is(step, memory, inputs)


def uneven(runtime: Runtime) -> list[Ended]:
    ways: list[tuple[StepExecutor, str]] = [
        (as_it_is, "off"),
        (once, "auto"),
        (once, "require"),
    ]
    return [ended(runtime, Few(SIZES), each, way, sometimes(12)) for each, way in ways]


def test_a_step_after_which_parameters_stand_apart_ends_the_capture_and_not_the_run() -> (
    None
):
    ((plain, auto, required),) = run_ranks(uneven, 1)
    assert plain.error == auto.error == ""
    text = r"not captured: '\S*scale' has made 3 steps and '\S+' 4; .*; training goes on without"
    assert len(re.findall(text, auto.said)) == 1
    for name, value in plain.state.items():
        assert torch.allclose(auto.state[name], value, atol=1e-5)
    assert required.error.startswith(REQUIRED)
