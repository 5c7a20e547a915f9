"""What goes wrong while a step is captured: the user's errors are raised, others told, and no step is made twice."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.test_captured import Few
from tests.contracts import gather_state, run_ranks
from tests.examples import META, small_model
from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture import policy
from torchrec_ext.capture.executors import StepExecutor, as_it_is, traced
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.modules.losses import bce
from torchrec_ext.train.loop import TrainConfig, train
from torchrec_ext.train.step import choose as steps

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


def end_of(
    runtime: Runtime,
    model: nn.Module,
    engine: StepExecutor,
    compile_: str,
    sizes: list[int] = SIZES,
) -> tuple[str, Any, str]:
    """The error that ended a run, if any, the weights, and what was said."""
    policy.PAYS_S, policy.WATCHED, policy.PATIENCE = {"cpu": 0.0}, 2, 0
    steps.engine_for = lambda _: (engine, "capturing")
    parallel, optimizer = hybrid_parallel(
        model, runtime, optimizer=OptimizerConfig(tables="adam", tables_lr=0.01)
    )
    said, error = io.StringIO(), ""
    with contextlib.redirect_stdout(said):
        try:
            train(
                parallel,
                optimizer,
                Few(sizes),
                runtime,
                TrainConfig(epochs=1, compile=compile_),
            )  # type: ignore[arg-type]
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
    return error, gather_state(parallel), said.getvalue()


def user_errors(runtime: Runtime) -> list[tuple[str, str]]:
    """Of a shape that comes first, and later, to a captured step; of a step that has run already."""
    found = []
    for compile_ in ("auto", "require"):
        for engine, size, sizes in (
            (tracing, 24, [12, 12, 24]),
            (tracing, 12, SIZES),
            (breaking, 12, [24, 24, 24, 12]),
        ):
            error, _, said = end_of(runtime, strict(size), engine, compile_, sizes)
            found.append((error, said))
    return found


def test_an_error_of_the_users_own_code_is_raised_as_it_is_and_not_taken_for_one_of_the_capture() -> (
    None
):
    (found,) = run_ranks(user_errors, 1)
    for error, said in found:
        assert error.startswith("ValueError: my loss takes no ")
        assert "not captured" not in said


def engine_errors(runtime: Runtime) -> list[tuple[str, Any, str]]:
    ways: list[tuple[StepExecutor, str]] = [
        (as_it_is, "off"),
        (refusing, "auto"),
        (refusing, "require"),
    ]
    found = [
        end_of(runtime, small_model(META), engine, compile_)
        for engine, compile_ in ways
    ]
    return [*found, end_of(runtime, small_model(META), breaking, "auto")]


def test_an_error_of_the_capture_alone_is_told_with_its_line_and_no_step_is_left_out_or_made_twice() -> (
    None
):
    ((plain, refused, required, broken),) = run_ranks(engine_errors, 1)
    assert plain[0] == refused[0] == ""
    assert all(torch.equal(refused[1][name], value) for name, value in plain[1].items())
    assert refused[2].count("not captured: RuntimeError at ") == 1
    assert "this engine takes nothing; training goes on without" in refused[2]
    assert required[0].startswith(
        "CannotCaptureError: train.compile=require: the training step cannot be captured: RuntimeError"
    )
    # the model itself has nothing against the batch
    assert broken[0] == "RuntimeError: index out of bounds: 0 <= tmp7 < 654"


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


def uneven(runtime: Runtime) -> list[tuple[str, Any, str]]:
    return [
        end_of(runtime, sometimes(12), engine, way)
        for engine, way in ((as_it_is, "off"), (once, "auto"), (once, "require"))
    ]


def test_a_step_after_which_parameters_stand_apart_ends_the_capture_and_not_the_run() -> (
    None
):
    ((plain, auto, required),) = run_ranks(uneven, 1)
    assert plain[0] == auto[0] == ""
    assert (
        auto[2].count(
            "not captured: some parameters have made 3 steps and others 4; training goes on without"
        )
        == 1
    )
    assert all(
        torch.allclose(auto[1][name], value, atol=1e-5)
        for name, value in plain[1].items()
    )
    assert required[0].startswith(
        "CannotCaptureError: train.compile=require: the training step cannot be captured: "
    )
