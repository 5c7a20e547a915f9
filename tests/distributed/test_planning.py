"""Plans that are made, shown, refused in numbers, and the same refusal on every rank."""

import time

import pytest
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import ParameterConstraints

from tests.contracts import run_ranks
from tests.examples import META, small_model, table
from torchrec_ext.distributed.explain import explain
from torchrec_ext.distributed.planning import PlanConfig, PlanError, plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import two_tower

CPU = Runtime()
TWO_RANKS = Runtime(world_size=2, local_world_size=2)


@pytest.mark.unit
def test_a_sharding_type_per_table() -> None:
    config = PlanConfig(sharding="data_parallel", tables=("history=row_wise",))
    assert config.by_table(["user_id", "history"]) == {"user_id": "data_parallel", "history": "row_wise"}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"sharding": "rowwise"}, "sharding: sharding 'rowwise' must be one of auto, data_parallel"),
        ({"tables": ("a=rows",)}, "tables: 'a=rows': sharding 'rows' must be one of"),
        ({"memory_gb": -1.0}, "memory_gb=-1.0: must be positive"),
        ({"reserve": 1.0}, "reserve=1.0: must be at least 0 and below 1"),
    ],
)
def test_a_wrong_setting_is_named(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError) as error:
        PlanConfig(**arguments)  # type: ignore[arg-type]
    assert text in str(error.value)


@pytest.mark.unit
def test_an_exception_for_a_table_that_is_not_there() -> None:
    with pytest.raises(
        ValueError, match=r"tables: 'genre=row_wise' names no table of the model; its tables are user_id, history, item_id"
    ):
        plan_sharding(small_model(META), CPU, PlanConfig(tables=("genre=row_wise",)))


def test_constraints_of_torchrec_win() -> None:
    model = small_model(META)
    constraints = {"item_id": ParameterConstraints(sharding_types=["data_parallel"])}
    plan = plan_sharding(model, CPU, PlanConfig(sharding="table_wise"), constraints=constraints)
    kinds = {name: kind.sharding_type for module in plan.plan.values() for name, kind in module.items()}  # type: ignore[attr-defined]
    assert kinds == {"user_id": "table_wise", "history": "table_wise", "item_id": "data_parallel"}


def plan_text(runtime: Runtime, sharding: str) -> str:
    model = small_model(META)
    plan = plan_sharding(model, runtime, PlanConfig(sharding=sharding))  # type: ignore[arg-type]
    return explain(plan, model, runtime.world_size)


def test_explain_says_what_lies_where() -> None:
    rows = run_ranks(plan_text, 2, "row_wise")
    assert rows[0] == rows[1]
    assert "user_id  101 x 16" in rows[0]
    assert "rank 0 rows 0-50; rank 1 rows 51-100" in rows[0]
    columns = run_ranks(plan_text, 2, "column_wise")[0]
    assert "rank 0 columns 0-7; rank 1 columns 8-15" in columns
    replicated = run_ranks(plan_text, 2, "data_parallel")[0]
    assert replicated.count("every rank") == 3
    size = (101 + 50 + 50) * 16 * 4 / 1024**2
    assert f"rank 0: {size:.2f} MiB, rank 1: {size:.2f} MiB" in replicated


def refused(runtime: Runtime) -> tuple[str, float]:
    giant = EmbeddingBagConfig(name="ad_id", feature_names=["ad_id"], num_embeddings=300_000_000, embedding_dim=64)
    model = two_tower([giant], [table("item_id", 50)], device=META)
    start = time.monotonic()
    try:
        plan_sharding(model, runtime, PlanConfig(memory_gb=8))
    except PlanError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


def test_a_table_that_does_not_fit_is_refused_in_numbers_on_every_rank() -> None:
    outcomes = run_ranks(refused, 2)
    assert outcomes[0][0] == outcomes[1][0]
    text, _ = outcomes[0]
    weights_and_state = 300_000_000 * 64 * 8 / 1024**3
    assert f"the largest table, 'ad_id', needs {weights_and_state:.2f} GiB" in text
    assert "2 rank(s) of 8.00 GiB have 16.00 GiB" in text
    assert "at least 18 ranks of this size" in text


@pytest.mark.unit
def test_small_sizes_are_refused_in_numbers_too() -> None:
    with pytest.raises(PlanError) as error:
        plan_sharding(small_model(META), CPU, PlanConfig(memory_gb=0.00001))
    assert "need 25.12 KiB; 1 rank(s) of 10.49 KiB have 10.49 KiB, and the largest table, 'user_id', needs 12.62 KiB" in str(
        error.value
    )


def broken(runtime: Runtime) -> str:
    try:
        plan_sharding(small_model(META), runtime, constraints={"item_id": "not a constraint"})  # type: ignore[dict-item]
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_planner_that_breaks_on_rank_0_raises_on_every_rank() -> None:
    first, second = run_ranks(broken, 2, timeout_s=60)
    assert first == second
    assert first.startswith("the planner failed on rank 0: AttributeError: ")
