"""One policy for ids that are not in the table, with the same result under every sharding type."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.contracts import gather_state, run_ranks
from tests.examples import ITEMS, META, USERS, small_model
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.schema import DataError, Jagged, OutOfRange
from torchrec_ext.train.step.pipeline import make_pipeline

SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")
STEPS, SIZE = 10, 16


def batches(
    policy: OutOfRange, rank: int, world_size: int, known: bool = False
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
            "item_id": Jagged(items[local].flip(0)),
        }
        yield schema.assemble(
            ids,
            {"age": dense[0, local], "price": dense[1, local]},
            labels=labels[local],
            total_weight=SIZE / world_size,
        )


def trained(
    runtime: Runtime, sharding: str, policy: OutOfRange, known: bool
) -> dict[str, Tensor] | str | None:
    model = small_model(META)
    plan = plan_sharding(model, runtime, PlanConfig(sharding=sharding))  # type: ignore[arg-type]
    parallel, optimizer = hybrid_parallel(
        model,
        runtime,
        plan=plan,
        optimizer=OptimizerConfig(tables="sgd", tables_lr=0.1),
    )
    pipeline = make_pipeline(parallel, optimizer, runtime.device)
    try:
        stream = batches(policy, runtime.rank, runtime.world_size, known)
        for _ in range(STEPS):
            pipeline.progress(stream)
    except DataError as error:
        return str(error)
    return gather_state(parallel)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_oov_trains_row_0_and_no_other_under_every_sharding_type(sharding: str) -> None:
    mapped = run_ranks(trained, 2, sharding, "oov", False)[0]
    expected = run_ranks(trained, 2, "table_wise", "error", True)[0]
    for name, value in expected.items():
        torch.testing.assert_close(mapped[name], value, rtol=0, atol=1e-5)


def test_error_says_the_same_under_every_sharding_type() -> None:
    texts = {
        run_ranks(trained, 1, sharding, "error", False)[0] for sharding in SHARDINGS
    }
    assert len(texts) == 1
    (text,) = texts
    assert "column 'user_id': id " in text
    assert "is outside table 'user_id' (0 to 100;" in text
