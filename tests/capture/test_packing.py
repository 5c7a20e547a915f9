"""Batches whose lists grow: few layouts, each captured once, and a run that ends where the eager one does."""

from __future__ import annotations

import pytest
import torch

from tests.capture.runs import Ended, Few, Given, ended
from tests.capture.test_captured import farthest
from tests.contracts import run_ranks
from tests.examples import ITEMS, META, USERS, small_model
from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture.executors import as_it_is
from torchrec_ext.capture.lowering import Packer
from torchrec_ext.capture.policy import MOST_GRAPHS
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema import Jagged

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


def runs(runtime: Runtime) -> list[Ended]:
    loader = Given(growing(40))
    return [
        ended(runtime, loader, as_it_is, way, epochs=2)
        for way in ("off", "require", "auto")
    ]


def test_a_run_whose_lists_grow_is_captured_throughout_and_ends_where_the_eager_one_does() -> (
    None
):
    ((off, required, auto),) = run_ranks(runs, 1)
    for run in (required, auto):
        assert farthest(off.state, run.state) < 1e-3
        assert "not captured" not in run.said
    assert MOST_GRAPHS < required.captures + auto.captures <= 16


def too_many(runtime: Runtime) -> Ended:
    loader = Few([24, 24, 24, 8, 12, 16, 20])
    return ended(runtime, loader, as_it_is, "require")


def test_batches_of_too_many_sizes_are_told_with_their_sizes() -> None:
    (run,) = run_ranks(too_many, 1)
    assert "batches of more than 4 shapes; give them one batch_size" in run.error
