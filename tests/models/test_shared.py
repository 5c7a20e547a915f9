"""A tower that runs once per shared row gives the logits and the gradients of the plain form, sharded or not."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig

from tests.contracts import gather_state, run_ranks
from tests.examples import ITEMS, META, USERS, gradients, redrawn, table
from tests.models.merged_models import by_table
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.losses import bce
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import DataError, Jagged
from torchrec_ext.train.step.pipeline import make_pipeline, unpipelined

QUERIES, WIDTH = 6, 4


def model(shared: tuple[str, ...], device: torch.device | None = None) -> TowerModel:
    towers = {
        "user": Tower(
            [table("user_id", USERS), table("history", ITEMS)],
            [16, 8],
            dense=["age"],
        ),
        "item": Tower([table("item_id", ITEMS)], [16, 8], dense=["price"]),
    }
    made = TowerModel(towers, TopMLP([8, 8]), shared=shared, device=device)
    return redrawn(made, 0, tables=3 if device is None else None)


def batches(
    count: int, shared: bool, rank: int = 0, world_size: int = 1
) -> Iterator[TowerBatch]:
    schema = model(("user",) if shared else (), META).schema()
    generator = torch.Generator().manual_seed(5)
    times = 1 if shared else WIDTH
    for _ in range(count):
        users = torch.randint(USERS, (QUERIES,), generator=generator)
        history = torch.randint(ITEMS, (QUERIES, 3), generator=generator)
        age = torch.rand(QUERIES, generator=generator)
        items = torch.randint(ITEMS, (QUERIES, WIDTH), generator=generator)
        price = torch.rand(QUERIES, WIDTH, generator=generator)
        labels = torch.randint(2, (QUERIES, WIDTH), generator=generator).float()
        local = slice(rank * QUERIES // world_size, (rank + 1) * QUERIES // world_size)
        queries = local.stop - local.start
        yield schema.assemble(
            {
                "user_id": Jagged(users[local].repeat_interleave(times)),
                "history": Jagged(
                    history[local].repeat_interleave(times, 0).reshape(-1),
                    torch.full((queries * times,), 3, dtype=torch.int32),
                ),
                "item_id": Jagged(items[local].reshape(-1)),
            },
            {
                "age": age[local].repeat_interleave(times),
                "price": price[local].reshape(-1),
            },
            labels=labels[local].reshape(-1),
            total_weight=QUERIES * WIDTH / world_size,
            index=torch.arange(queries).repeat_interleave(WIDTH) if shared else None,
            shared_rows=torch.arange(queries) if shared else None,
        )


@pytest.mark.unit
def test_shared_equals_plain() -> None:
    logits, grads = gradients(model(()), next(batches(1, shared=False)))
    shared_logits, shared_grads = gradients(
        model(("user",)), next(batches(1, shared=True))
    )
    torch.testing.assert_close(shared_logits, logits, rtol=0, atol=1e-6)
    # A table's path says which rows read it.
    grads, shared_grads = by_table(grads), by_table(shared_grads)
    assert shared_grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(shared_grads[name], grad, rtol=0, atol=1e-6)


@pytest.mark.unit
def test_a_shared_tower_runs_on_the_shared_rows() -> None:
    batch = next(batches(1, shared=True))
    assert model(("user",)).embed("user", batch).shape == (QUERIES, 8)
    assert batch.shared is not None
    assert batch.shared.sparse.keys() == ["user_id", "history"]
    assert batch.sparse.keys() == ["item_id"]
    assert len(batch) == QUERIES * WIDTH


@pytest.mark.unit
def test_without_an_index_every_row_is_its_own() -> None:
    schema = model(("user",)).schema()
    sparse = {name: Jagged(torch.tensor([1, 2])) for name in schema.keys}
    dense = {"age": torch.zeros(2), "price": torch.zeros(2)}
    batch = schema.assemble(sparse, dense, labels=torch.zeros(2))
    assert batch.shared is not None
    assert batch.shared.index.tolist() == [0, 1]
    assert batch.to(torch.device("cpu")).shared is not None
    assert batch.shared.sparse.stride() == 2


@pytest.mark.unit
def test_an_index_outside_the_shared_rows_is_refused() -> None:
    schema = model(("user",)).schema()
    sparse = {name: Jagged(torch.tensor([1, 2])) for name in schema.keys}
    with pytest.raises(
        DataError,
        match=r"index of shape \(2,\): must be \(B,\) = \(2,\), places from 0 to 1",
    ):
        schema.assemble(
            sparse,
            {"age": torch.zeros(2), "price": torch.zeros(2)},
            labels=torch.zeros(2),
            index=torch.tensor([0, 2]),
            shared_rows=torch.arange(2),
        )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("shared", "text"),
    [
        (
            ("users",),
            "shared names ['users'], which are not towers; the towers are ['user', 'item']",
        )
    ],
)
def test_a_wrong_name_is_refused(shared: tuple[str, ...], text: str) -> None:
    with pytest.raises(ValueError) as error:
        model(shared)
    assert text in str(error.value)


@pytest.mark.unit
def test_a_feature_of_a_shared_and_of_another_tower_is_refused() -> None:
    towers = {
        name: Tower(
            [
                EmbeddingBagConfig(
                    name=name, feature_names=["city"], num_embeddings=5, embedding_dim=4
                )
            ],
            [4],
        )
        for name in ("user", "item")
    }
    with pytest.raises(
        ValueError,
        match=r"features \['city'\] are read by a shared tower and by another",
    ):
        TowerModel(towers, TopMLP([4, 4]), shared=["user"])


def branching_loss(logits: Tensor, batch: TowerBatch) -> Tensor:
    if bool((batch.labels > 0).any()):
        return bce(logits, batch)
    return logits.square().mean()


def with_a_branch(runtime: Runtime) -> tuple[float, list[str]]:
    made = TowerModel(
        dict(model(("user",), META).towers.items()),
        TopMLP([8, 8]),
        shared=["user"],
        loss=branching_loss,
        device=META,
    )
    parallel, optimizer = hybrid_parallel(made, runtime)
    pipeline = make_pipeline(parallel, optimizer, runtime.device)
    output = pipeline.progress(batches(3, shared=True))
    return float(output.loss), unpipelined(pipeline, parallel)


def test_a_loss_that_branches_on_values_keeps_the_towers_pipelined() -> None:
    loss, missed = run_ranks(with_a_branch, 1)[0]
    assert 0 < loss < 2
    assert missed == []


def trained(
    runtime: Runtime, shared: bool, sharding: str
) -> tuple[dict[str, Tensor] | None, list[str]]:
    made = model(("user",) if shared else (), META)
    plan = plan_sharding(made, runtime, PlanConfig(sharding=sharding))  # type: ignore[arg-type]
    parallel, optimizer = hybrid_parallel(
        made, runtime, plan=plan, optimizer=OptimizerConfig(tables_lr=0.1), seed=3
    )
    pipeline = make_pipeline(parallel, optimizer, runtime.device)
    stream = batches(20, shared, runtime.rank, runtime.world_size)
    for _ in range(20):
        pipeline.progress(stream)
    return gather_state(parallel), unpipelined(pipeline, parallel)


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "data_parallel"])
def test_shared_equals_plain_when_sharded(sharding: str) -> None:
    plain, _ = run_ranks(trained, 1, False, sharding)[0]
    shared, missed = run_ranks(trained, 2, True, sharding)[0]
    assert missed == []
    shared = by_table(shared)
    for name, value in by_table(plain).items():
        torch.testing.assert_close(shared[name], value, rtol=0, atol=1e-4)
