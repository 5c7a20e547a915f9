"""hybrid_parallel() of a user's model: first rows, order of features and one backward a step, under any plan."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.contracts import run_ranks
from tests.examples import META
from torchrec_ext.adopt.tables import adopt_tables
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig, TablePlan
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime

# More rows than are drawn at a time, and tables whose order no plan keeps.
ROWS = {"shop": 200, "user": 5_000, "hour": 24, "item": 4_200}
WIDTH = 8
SGD = OptimizerConfig(tables="sgd", tables_lr=0.1, dense="sgd", dense_lr=0.1)
MIXED = PlanConfig(
    tables={
        "shop": TablePlan(sharding="row_wise"),
        "user": TablePlan(sharding="table_wise"),
        "hour": TablePlan(sharding="data_parallel"),
        "item": TablePlan(sharding="row_wise"),
    }
)
PLANS = (
    MIXED,
    PlanConfig(sharding="table_wise"),
    PlanConfig(sharding="row_wise"),
    PlanConfig(sharding="data_parallel"),
    PlanConfig(
        tables={
            "shop": TablePlan(sharding="row_wise"),
            "user": TablePlan(sharding="table_wise"),
            "hour": TablePlan(sharding="row_wise"),
            "item": TablePlan(sharding="table_wise"),
        }
    ),
)
FIRST_IDS = torch.tensor([0, 7, 23])


def rows_of(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + ROWS[name])
    return torch.randn(ROWS[name], WIDTH, generator=generator)


class _WholeTable:
    """An init_fn that copies a whole table."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, weight: Tensor) -> Tensor:
        return weight.data.copy_(rows_of(self.name))


class Net(nn.Module):
    """The features of one collection as they come, side by side."""

    def __init__(
        self,
        device: torch.device,
        init_fn: Callable[[str], Any] | None = None,
        *,
        pooled: bool = True,
    ) -> None:
        super().__init__()
        kind: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
        tables = []
        for name, rows in ROWS.items():
            fill = {"init_fn": init_fn(name)} if init_fn else {}
            tables.append(
                kind(
                    name=name,
                    feature_names=[name],
                    num_embeddings=rows,
                    embedding_dim=WIDTH,
                    **fill,
                )
            )
        collection: Any = EmbeddingBagCollection if pooled else EmbeddingCollection
        self.pooled = pooled
        self.tables = collection(tables=tables, device=device)
        # Not contiguous.
        self.register_buffer("shift", torch.zeros(2, WIDTH)[:, 0])

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        output = self.tables(ids)
        if self.pooled:
            return output.values() + self.shift[1]  # type: ignore[no-any-return]
        return torch.cat([rows.values() for rows in output.values()], 1)


def ids_of(
    ids: Tensor = FIRST_IDS, names: Sequence[str] = tuple(ROWS)
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        list(names),
        ids.repeat(len(names)),
        lengths=torch.ones(len(ids) * len(names), dtype=torch.int32),
    )


def in_another_order() -> KeyedJaggedTensor:
    """What :func:`ids_of` gives, with other ids under a key that no table reads."""
    names = [*ROWS][::-1]
    other = KeyedJaggedTensor(
        ["other"], torch.tensor([9, 9]), lengths=torch.tensor([2, 0, 0]).int()
    )
    return KeyedJaggedTensor.concat([other, ids_of(names=names)])


def shard(model: nn.Module, runtime: Runtime, plan: PlanConfig, **settings: Any) -> Any:
    optimizer = settings.pop("optimizer", SGD)
    return hybrid_parallel(model, runtime, plan=plan, optimizer=optimizer, **settings)


def given_model(runtime: Runtime, way: str, pooled: bool) -> Net:
    if way == "init_fn":
        return Net(META, _WholeTable, pooled=pooled)
    # Each rank draws others; those of rank 0 are what all train.
    model = Net(torch.device("cpu"), pooled=pooled)
    if runtime.rank == 0:
        holders: Any = (
            model.tables.embedding_bags if pooled else model.tables.embeddings
        )
        with torch.no_grad():
            for name in ROWS:
                holders[name].weight.copy_(rows_of(name))
    return model


def first_outputs(runtime: Runtime) -> list[tuple[str, Tensor]]:
    outputs = []
    for plan in PLANS:
        for way in ("rows", "init_fn"):
            for pooled in (True, False):
                # Refused on a CPU for rows by id.
                if not pooled and plan in (MIXED, PLANS[3]):
                    continue
                model = given_model(runtime, way, pooled)
                model.shift.fill_(runtime.rank)
                sharded, _ = shard(model, runtime, plan)
                for ids in (ids_of(), in_another_order()):
                    case = f"{plan}, {way}, pooled={pooled}, {ids.keys()}"
                    outputs.append((case, sharded(ids).detach()))
    return outputs


@pytest.mark.parametrize("world_size", [1, 2])
def test_given_rows_are_kept_and_features_are_in_the_order_of_the_unsharded_collection(
    world_size: int,
) -> None:
    expected = torch.cat([rows_of(name)[FIRST_IDS] for name in ROWS], 1)
    for outputs in run_ranks(first_outputs, world_size):
        for case, output in outputs:
            assert torch.equal(output, expected), case


def drawn(runtime: Runtime) -> list[Tensor]:
    # Its values depend on the shape of the whole table.
    models = [Net(META, lambda _: nn.init.xavier_uniform_) for _ in PLANS]
    outputs = []
    for model, plan in zip(models, PLANS, strict=True):
        sharded, _ = shard(model, runtime, plan, seed=3)
        outputs.append(sharded(ids_of()).detach())
    return outputs


def test_an_init_fn_draws_the_same_whole_table_on_any_plan_and_number_of_ranks() -> (
    None
):
    outputs = [*run_ranks(drawn, 1)[0], *run_ranks(drawn, 2)[1]]
    for output in outputs:
        assert torch.equal(output, outputs[0])
    bound = (6 / (ROWS["user"] + WIDTH)) ** 0.5
    users = outputs[0][:, WIDTH : 2 * WIDTH]
    assert users.abs().max() <= bound
    assert users.abs().max() > bound / 2


def partly_on_meta(runtime: Runtime) -> None:
    device = torch.device("cpu") if runtime.rank == 0 else META
    named = r"tables\.embedding_bags\..* on one kind of device"
    with pytest.raises(ValueError, match=named):
        shard(Net(device), runtime, PLANS[2])


def test_rows_on_some_ranks_alone_are_refused_by_name() -> None:
    run_ranks(partly_on_meta, 2)


def differing(runtime: Runtime) -> list[str]:
    """What is said of ranks with other tables or settings, of other models' plans, and of a batch without a feature."""
    rank = runtime.rank
    own = Net(META)
    table = EmbeddingBagConfig(
        name="shop", feature_names=["shop"], num_embeddings=9 + rank, embedding_dim=8
    )
    sizes = Net(META)
    sizes.tables = EmbeddingBagCollection([table], device=META)
    rates = OptimizerConfig(tables="sgd", tables_lr=0.1 + rank)
    types = PLANS[1 + rank]
    whole = plan_sharding(own, runtime)
    same = Net(META)
    same.tables = EmbeddingBagCollection(
        [dataclasses.replace(table, num_embeddings=9)], device=META
    )
    calls: list[Callable[[], Any]] = [
        lambda: shard(sizes, runtime, PLANS[1]),
        lambda: shard(own, runtime, PLANS[1], optimizer=rates),
        lambda: shard(own, runtime, types),
        lambda: shard(own, runtime, PLANS[1], seed=rank),
        lambda: hybrid_parallel(same, runtime, plan=whole, optimizer=SGD),
    ]
    said = []
    for call in calls:
        with pytest.raises(ValueError, match="") as error:
            call()
        said.append(str(error.value))
    sharded, _ = shard(Net(META), runtime, PLANS[1])
    sharded(ids_of())
    with pytest.raises(ValueError, match="") as error:
        sharded(ids_of(names=("shop", "hour", "item")))
    return [*said, str(error.value)]


def test_ranks_that_differ_and_plans_of_other_models_are_refused() -> None:
    expected = [
        "table 'shop': 9 x 8 on rank 0, 10 x 8 on rank 1; give all ranks the same",
        "optimizer.tables_lr: 0.1 on rank 0, 1.1 on rank 1; give all ranks the same",
        "plan.sharding: 'table_wise' on rank 0, 'row_wise' on rank 1; give all ranks",
        "seed: 0 on rank 0, 1 on rank 1; give all ranks the same",
        "for 'tables', where the model has shop; make one of this model by plan_sharding",
        "the batch lacks the features user of the first one; it has shop, hour, item",
    ]
    for messages in run_ranks(differing, 2)[:1]:
        for message, words in zip(messages, expected, strict=True):
            assert words in message
            assert len(message) <= 200


def managed(runtime: Runtime) -> None:
    """What is said of a model whose ids TorchRec maps inside of it, after one with nothing to train."""
    table = EmbeddingBagConfig(
        name="item", feature_names=["item"], num_embeddings=50, embedding_dim=8
    )
    module = MCHManagedCollisionModule(
        zch_size=50,
        device=torch.device("cpu"),
        eviction_policy=LFU_EvictionPolicy(),
        eviction_interval=1,
        input_hash_size=10_000,
    )
    bags = EmbeddingBagCollection([table], device=META)
    ids = ManagedCollisionCollection({"item": module}, [table])
    with pytest.raises(ValueError, match="model: ReLU has no parameters"):
        hybrid_parallel(nn.ReLU(), runtime)
    model = nn.Sequential(ManagedCollisionEmbeddingBagCollection(bags, ids))
    named = "^'0' has TorchRec's managed .*DynamicIds"
    with pytest.raises(ValueError, match=named) as error:
        hybrid_parallel(model, runtime, optimizer=SGD)
    assert len(str(error.value)) <= 200


def test_managed_collision_and_no_parameters_are_refused_by_name() -> None:
    run_ranks(managed, 1)


def one_name(runtime: Runtime) -> None:
    towers = {
        "user": nn.ModuleDict({"e": nn.Embedding(8, 4)}),
        "item": nn.ModuleDict({"e": nn.Embedding(8, 4)}),
    }
    for tower in towers.values():
        adopt_tables(tower)
    named = "'user.e.collection' and 'item.e.collection' both have a table 'e'"
    with pytest.raises(ValueError, match=named) as error:
        hybrid_parallel(nn.ModuleDict(towers), runtime, optimizer=SGD)
    assert len(str(error.value)) <= 200


def test_tables_of_one_name_are_refused() -> None:
    run_ranks(one_name, 1)


def accumulated(runtime: Runtime, kind: str) -> None:
    optimizer = OptimizerConfig(tables=kind, tables_lr=0.1)  # type: ignore[arg-type]
    # Each table on one rank alone: the ranks without it refuse too.
    model = Net(META)
    plan = PlanConfig(sharding="table_wise")
    sharded, hybrid = shard(model, runtime, plan, optimizer=optimizer)
    for _ in range(2):
        hybrid.zero_grad()
        # Two look-ups in one backward are no accumulation.
        (sharded(ids_of()).sum() + sharded(ids_of()).sum()).backward()
        hybrid.step()
    sharded(ids_of()).sum().backward()
    refusal = r"table '\w+': .*backward.*optimizer\.step\(\).*data_parallel$"
    with pytest.raises(ValueError, match=refusal):
        sharded(ids_of()).sum().backward()
    # Gradients that were dropped do not accumulate.
    hybrid.step()
    sharded(ids_of()).sum().backward()
    hybrid.zero_grad()
    hybrid.step()


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "row_wise_adagrad"])
def test_a_second_backward_before_the_step_is_refused_for_every_fused_optimizer(
    kind: str,
) -> None:
    run_ranks(accumulated, 2, kind)
