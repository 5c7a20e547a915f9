"""Batches whose lists grow: few layouts, each captured once, and a run that ends where the eager one does."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch

from tests.capture.test_captured import Few, farthest
from tests.contracts import gather_state, run_ranks
from tests.examples import ITEMS, META, USERS, small_model
from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture import policy
from torchrec_ext.capture.captured import MOST_GRAPHS
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.executors import as_it_is
from torchrec_ext.capture.lowering import Packer
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema import Jagged
from torchrec_ext.train.loop import TrainConfig, train
from torchrec_ext.train.step import choose as steps

ROWS = 24


def growing(count: int, rows: int = ROWS) -> list[TowerBatch]:
    """Batches of one size whose histories hold one id each at first, and in the last batch ``count``."""
    schema, made = small_model(META).schema(), []
    generator = torch.Generator().manual_seed(0)
    for length in range(1, count + 1):
        lengths = torch.full((rows,), length)
        made.append(
            schema.assemble(
                {
                    "user_id": Jagged(
                        torch.randint(USERS, (rows,), generator=generator)
                    ),
                    "history": Jagged(
                        torch.randint(ITEMS, (rows * length,), generator=generator),
                        lengths,
                    ),
                    "item_id": Jagged(
                        torch.randint(ITEMS, (rows,), generator=generator)
                    ),
                },
                {
                    "age": torch.rand(rows, generator=generator),
                    "price": torch.rand(rows, generator=generator),
                },
                labels=torch.randint(2, (rows,), generator=generator).float(),
                weights=torch.ones(rows),
                total_weight=float(rows),
            )
        )
    return made


class Growing(Few):
    def __init__(self, count: int) -> None:
        self._batches = growing(count)


@pytest.mark.unit
def test_lists_that_grow_a_hundredfold_make_few_layouts_and_never_an_earlier_one_again() -> (
    None
):
    packer, seen = Packer(), []
    for batch in [*growing(100), *growing(100)]:
        layout, tensors = packer.pack(batch)
        again = layout.batch(tensors)
        assert torch.equal(
            again.bags("history").lengths(), batch.bags("history").lengths()
        )
        if not seen or layout != seen[-1]:
            assert layout not in seen
            seen.append(layout)
    assert len(seen) <= 8  # 1, then doubled from 64 up to 2,400 ids or more
    assert len({layout.sizes for layout in seen}) == 1


def runs(runtime: Runtime) -> tuple[list[Any], int, list[str]]:
    """Weights of an eager run and of two captured ones, how often the latter captured, and what they said."""
    policy.PAYS_S, policy.WATCHED = {"cpu": 0.0}, 2
    states, said, captures = [], [], 0

    def counting(step: Any, memory: Any, inputs: Any) -> Any:
        nonlocal captures
        captures += 1
        return as_it_is(step, memory, inputs)

    steps.engine_for = lambda _: (counting, "capturing")
    for compile_ in ("off", "require", "auto"):
        model, optimizer = hybrid_parallel(
            small_model(META),
            runtime,
            optimizer=OptimizerConfig(tables="adam", tables_lr=0.01),
        )
        spoken = io.StringIO()
        with contextlib.redirect_stdout(spoken):
            train(
                model,
                optimizer,
                Growing(40),
                runtime,
                TrainConfig(epochs=2, compile=compile_),
            )  # type: ignore[arg-type]
        states.append(gather_state(model))
        said.append(spoken.getvalue())
    return states, captures, said


def test_a_run_whose_lists_grow_is_captured_throughout_and_ends_where_the_eager_one_does() -> (
    None
):
    ((states, captures, said),) = run_ranks(runs, 1)
    assert farthest(states[0], states[1]) < 1e-3
    assert farthest(states[0], states[2]) < 1e-3
    assert MOST_GRAPHS < captures <= 16  # of both runs
    assert not any("not captured" in text for text in said)


def too_many(runtime: Runtime) -> str:
    policy.PAYS_S = {"cpu": 0.0}
    policy.WATCHED = 2
    steps.engine_for = lambda _: (as_it_is, "capturing")
    model, optimizer = hybrid_parallel(small_model(META), runtime)
    with pytest.raises(CannotCaptureError) as error:
        train(
            model,
            optimizer,
            Few([24, 24, 24, 8, 12, 16, 20]),
            runtime,
            TrainConfig(epochs=1, compile="require"),
        )  # type: ignore[arg-type]
    return str(error.value)


def test_batches_of_too_many_sizes_are_told_with_their_sizes() -> None:
    (text,) = run_ranks(too_many, 1)
    assert (
        "batches of more than 4 shapes, of 8, 12, 16, 20, 24 rows; give them one batch_size"
        in text
    )
