"""Every optimizer, weight decay, clipping and exception: ranks and plans change nothing, over real gloo processes."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig

from tests.contracts import gather_state, run_ranks
from tests.examples import DIM, ITEMS, META, batches, small_model
from tests.sharded import Case, Learned, alone, assert_close, on_ranks
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig, Override
from torchrec_ext.distributed.optim.declared import apply_optimizer_in_backward
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig, TablePlan
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.modules.losses import bce

STEPS = 20
EXCEPTIONS = OptimizerConfig(
    tables="row_wise_adagrad",
    tables_lr=0.1,
    per_table={
        "user_id": Override(kind="adam", lr=0.02, l2=0.3),
        "item_*": Override(kind="sgd", lr=2),
    },
    per_layer={
        "towers.user": Override(kind="sgd", lr=0.05, weight_decay=0),
        "interaction": Override(lr=0.003, weight_decay=0.1),
        "*.bias": Override(weight_decay=0),
    },
    dense_weight_decay=0.2,
)


def cases(world_size: int) -> Iterator[tuple[str, PlanConfig, OptimizerConfig]]:
    """(name, plan, optimizer); of the sharding types one rank tries one, since it shards nothing."""
    shardings = (
        ("row_wise",)
        if world_size == 1
        else ("table_wise", "row_wise", "column_wise", "grid_shard")
    )
    for kind in ("adam", "lazy_adam"):
        yield kind, PlanConfig(), OptimizerConfig(tables=kind, tables_lr=0.02)  # type: ignore[arg-type]
    decayed = OptimizerConfig(
        tables="adam", tables_lr=0.02, tables_l2=0.1, dense_weight_decay=1.0
    )
    yield "decay", PlanConfig(), decayed
    for sharding in shardings:
        plan = PlanConfig(
            sharding=sharding,  # type: ignore[arg-type]
            tables={"user_id": TablePlan(sharding="data_parallel")},
        )
        # Equal rates, which would put the tables into one kernel if their optimizers
        # did not.
        mixed = OptimizerConfig(
            tables="sgd",
            tables_lr=0.05,
            per_table={
                "user_id": Override(kind="lazy_adam"),
                "history": Override(kind="adagrad"),
            },
            dense="sgd",
        )
        yield f"mixed, {sharding}", plan, mixed
    plan = PlanConfig(
        sharding="row_wise",
        tables={
            "user_id": TablePlan(sharding="data_parallel"),
            "item_id": TablePlan(sharding="table_wise"),
        },
    )
    yield "exceptions", plan, EXCEPTIONS
    clipped = OptimizerConfig(
        tables="sgd", tables_lr=1.0, dense="sgd", dense_lr=0.5, clip_norm=0.05
    )
    yield "clipped", PlanConfig(sharding="data_parallel"), clipped


def cases_of(world_size: int) -> dict[str, Case]:
    return {
        name: Case(small_model, partial(batches, STEPS), optimizer, plan, STEPS)
        for name, plan, optimizer in cases(world_size)
    }


def sharded(runtime: Runtime) -> dict[str, Learned]:
    return on_ranks(runtime, cases_of(runtime.world_size))


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def learned(request: pytest.FixtureRequest) -> Any:
    return request.param, run_ranks(sharded, request.param)


def test_every_optimizer_learns_the_same_on_any_number_of_ranks_as_unsharded(
    learned: Any,
) -> None:
    world_size, ranks = learned
    for name, case in cases_of(world_size).items():
        assert_close(ranks[0][name].state, alone(case).state, 1e-4)


def test_what_no_cpu_kernel_runs_is_kept_on_every_rank_and_the_rest_is_sharded_as_asked(
    learned: Any,
) -> None:
    _, (by_case, *_) = learned
    for kind in ("adam", "lazy_adam", "decay"):
        assert set(by_case[kind].kinds.values()) == {"data_parallel"}
    assert by_case["exceptions"].kinds == {
        "user_id": "data_parallel",
        "history": "row_wise",
        "item_id": "table_wise",
    }


class Sequences(nn.Module):
    """Items read one by one: the sum over a history, times the item."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        config = EmbeddingConfig(
            name="item_rows",
            feature_names=["history", "item_id"],
            num_embeddings=ITEMS,
            embedding_dim=DIM,
        )
        self.embeddings = EmbeddingCollection(tables=[config], device=device)

    def forward(self, batch: TowerBatch) -> Tensor:
        items = self.embeddings(batch.sparse)
        history = items["history"].to_padded_dense(4).sum(1)
        logits = (history * items["item_id"].values()).sum(1)
        return bce(logits, batch)


READ_ONE_BY_ONE = [
    OptimizerConfig(tables="adagrad", tables_lr=0.1),
    OptimizerConfig(tables="sgd", tables_lr=0.1),
]


def sequences(runtime: Runtime) -> list[Tensor]:
    """The table after 20 steps of a loop of one's own, for each optimizer; the planner chooses."""
    learned = []
    for optimizer in READ_ONE_BY_ONE:
        model = Sequences(META)
        parallel, keyed = hybrid_parallel(model, runtime, optimizer=optimizer, seed=7)
        for batch in batches(STEPS, rank=runtime.rank, world_size=runtime.world_size):
            loss = parallel(batch)
            keyed.zero_grad()  # after the forward, as some loops have it
            loss.backward()
            keyed.step()
        learned.append(
            (gather_state(parallel) or {}).get("embeddings.embeddings.item_rows.weight")
        )
    return learned


@pytest.mark.parametrize("world_size", [1, 2])
def test_tables_that_are_read_id_by_id_learn_the_same_as_unsharded(
    world_size: int,
) -> None:
    for optimizer, learned in zip(
        READ_ONE_BY_ONE, run_ranks(sequences, world_size)[0], strict=True
    ):
        model = Sequences()
        initialise_tables(model, seed=7)
        (table,), (choice,) = model.parameters(), optimizer.for_tables(model).values()
        make, arguments = choice.unfused()
        plain = make([table], **arguments)
        for batch in batches(STEPS):
            plain.zero_grad()
            model(batch).backward()
            plain.step()
        torch.testing.assert_close(
            learned,
            table.detach(),
            rtol=0,
            atol=1e-4,
            msg=lambda text, label=choice: f"{label}: {text}",
        )


REFUSED: list[tuple[Any, OptimizerConfig, str]] = [
    (
        small_model,
        OptimizerConfig(per_table={"item_id": Override(kind="lazy_adam")}),
        "table 'item_id': FBGEMM has no kernel of lazy_adam for the cpu; set plan.tables.item_id.sharding=",
    ),
    (
        small_model,
        OptimizerConfig(per_table={"item_id": Override(kind="adam", weight_decay=0.1)}),
        "table 'item_id': weight_decay=0.1 is of dense layers without l2; a table takes l2",
    ),
    (
        small_model,
        OptimizerConfig(dense="sgd", dense_weight_decay=0.1),
        "': weight_decay=0.1 with the optimizer sgd; choose adam",
    ),
    (
        Sequences,
        OptimizerConfig(tables="adam"),
        "table 'item_rows': FBGEMM has no kernel of adam for the cpu; set optimizer.per_table.item_rows.kind=adagrad, "
        "optimizer.per_table.item_rows.lr=0.05, or read it by an EmbeddingBag",
    ),
]


def refused(runtime: Runtime) -> list[str]:
    messages = []
    for make, optimizer, _ in REFUSED:
        model = make(META)
        plan = plan_sharding(model, runtime, PlanConfig(sharding="table_wise"))
        with pytest.raises(ValueError) as error:
            hybrid_parallel(model, runtime, plan=plan, optimizer=optimizer)
        messages.append(str(error.value))
    return messages


def test_a_sharded_table_without_a_kernel_is_refused_before_anything_is_sharded() -> (
    None
):
    (messages,) = run_ranks(refused, 1)
    for message, (_, _, part) in zip(messages, REFUSED, strict=True):
        assert part in message
        assert len(message) <= 200


def declared(runtime: Runtime) -> None:
    model = small_model(META).requires_grad_(False)
    frozen = "table 'user_id': requires_grad=False, .* optimizer.per_table.user_id.lr=0"
    with pytest.raises(ValueError, match=frozen):
        hybrid_parallel(model, runtime)
    model.requires_grad_()
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.7})
    told = "^table 'user_id': apply_optimizer_in_backward has declared"
    with pytest.raises(ValueError, match=told):
        hybrid_parallel(model, runtime)


def test_a_frozen_table_and_a_declared_optimizer_are_refused() -> None:
    run_ranks(declared, 1)
