"""One policy for ids that are not in the table, with the same result under every sharding type."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.contracts import run_ranks
from tests.examples import ITEMS, META, USERS, small_model
from tests.sharded import Case, alone, check_equal, on_ranks
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.schema import DataError, Jagged, OutOfRange

SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")
STEPS, SIZE = 10, 16


def batches(
    policy: OutOfRange, known: bool, rank: int, world_size: int
) -> Iterator[TowerBatch]:
    """Batches in which about a third of the ids is negative or too large; with ``known`` these are 0 from the start."""
    schema = small_model(META).schema(out_of_range=policy)
    generator = torch.Generator().manual_seed(11)
    local = slice(rank * SIZE // world_size, (rank + 1) * SIZE // world_size)
    for _ in range(STEPS):
        users = torch.randint(-30, USERS + 30, (SIZE,), generator=generator)
        items = torch.randint(-9, ITEMS + 9, (SIZE,), generator=generator)
        if known:
            users[(users < 0) | (users >= USERS)] = 0
            items[(items < 0) | (items >= ITEMS)] = 0
        dense = torch.rand(2, SIZE, generator=generator)
        labels = torch.randint(2, (SIZE,), generator=generator).float()
        ids = {
            "user_id": Jagged(users[local]),
            "history": Jagged(items[local]),
            "item_id": Jagged(items.flip(0)[local]),
        }
        yield schema.assemble(
            ids,
            {"age": dense[0, local], "price": dense[1, local]},
            labels=labels[local],
            total_weight=SIZE / world_size,
        )


def case(sharding: str, *, known: bool) -> Case:
    return Case(
        small_model,
        partial(batches, "oov", known),
        OptimizerConfig(tables="sgd", tables_lr=0.1),
        PlanConfig(sharding=sharding),  # type: ignore[arg-type]
        STEPS,
    )


def test_oov_trains_row_0_and_no_other_under_every_sharding_type() -> None:
    cases = {sharding: case(sharding, known=False) for sharding in SHARDINGS}
    ranks = run_ranks(on_ranks, 2, cases)
    expected = alone(case("auto", known=True))
    for sharding in SHARDINGS:
        check_equal([rank[sharding] for rank in ranks], expected)


@pytest.mark.unit
def test_an_id_outside_of_its_table_is_refused_before_any_look_up() -> None:
    with pytest.raises(
        DataError,
        match=r"column 'user_id': id .* is outside table 'user_id' \(0 to 100;",
    ):
        next(batches("error", False, 0, 1))
