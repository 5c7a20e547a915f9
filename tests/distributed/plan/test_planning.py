"""Plans that are made, shown, refused in numbers, and the same refusal on every rank."""

import unittest.mock
from typing import Any

import pytest
import torch
from torchrec import (
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.planner.types import Storage

from tests.contracts import run_ranks
from tests.examples import META, small_model, table
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.plan.config import PlanConfig, TablePlan
from torchrec_ext.distributed.plan.draft import PlanError
from torchrec_ext.distributed.plan.explain import explain
from torchrec_ext.distributed.plan.planner import (
    SMALL_WEIGHTS,
    plan_sharding,
    small_tables_whole,
)
from torchrec_ext.distributed.plan.storage import state_storage
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel, two_tower

CPU = Runtime()
TWO_RANKS = Runtime(world_size=2, local_world_size=2)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"sharding": "rowwise"},
            "sharding='rowwise': must be one of auto, data_parallel",
        ),
        (
            {"tables": {"a": TablePlan(kernel="fused_uvm", cache_load_factor=0.1)}},
            "cache_load_factor=0.1: only for kernel=fused_uvm_caching",
        ),
        (
            {"kernel": "uvm"},
            "kernel='uvm': must be one of auto, dense, fused, fused_uvm, fused_uvm_caching",
        ),
        (
            {"cache_load_factor": 1.5},
            "cache_load_factor=1.5: must be a share of the rows, 0 to 1",
        ),
        (
            {"kernel": "fused", "cache_load_factor": 0.5},
            "cache_load_factor=0.5: only for kernel=fused_uvm_caching, not kernel=fused",
        ),
        ({"tables": ("a=row_wise",)}, "write {'ad_id': TablePlan(sharding="),
        ({"tables": {"a": "row_wise"}}, "'a' has 'row_wise'; write {'a': TablePlan("),
        ({"memory_gb": -1.0}, "memory_gb=-1.0: must be positive"),
        ({"reserve": 1.0}, "reserve=1.0: must be at least 0 and below 1"),
    ],
)
def test_a_wrong_setting_is_named(arguments: dict[str, object], text: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        PlanConfig(**arguments)  # type: ignore[arg-type]
    assert text in str(error.value)


@pytest.mark.unit
def test_what_a_table_leaves_out_is_that_of_every_table() -> None:
    config = PlanConfig(
        kernel="fused_uvm_caching",
        cache_load_factor=0.3,
        tables={
            "a": TablePlan(sharding="row_wise"),
            "b": TablePlan(sharding="table_wise", kernel="fused"),
            "c": TablePlan(cache_load_factor=0.1),
            "d": TablePlan(sharding="grid_shard", kernel="fused_uvm"),
        },
    )
    assert config.choices(list("abcde")) == {
        "a": ("row_wise", "fused_uvm_caching", 0.3),
        "b": ("table_wise", "fused", 0.0),
        "c": ("auto", "fused_uvm_caching", 0.1),
        "d": ("grid_shard", "fused_uvm", 0.0),
        "e": ("auto", "fused_uvm_caching", 0.3),
    }


def of_width(dim: int) -> TowerModel:
    wide = EmbeddingBagConfig(
        name="a", feature_names=["a"], num_embeddings=9, embedding_dim=dim
    )
    return two_tower([wide], [table("b", 9)], device=META)


def read_by_id() -> torch.nn.Module:
    item = EmbeddingConfig(
        name="item", feature_names=["item"], num_embeddings=50, embedding_dim=16
    )
    return torch.nn.ModuleDict(
        {"item": EmbeddingCollection(tables=[item], device=META)}
    )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make", "config", "text"),
    [
        (
            lambda: small_model(META),
            {"tables": {"genre": TablePlan(sharding="row_wise")}},
            "tables.genre: is no table of the model; its tables are user_id, history,",
        ),
        *(
            (
                lambda: small_model(META),
                config,
                "combination after applying user provided constraints for user_id; another",
            )
            for config in (
                {"kernel": "fused_uvm"},
                {"kernel": "dense", "sharding": "row_wise"},
                {"kernel": "fused", "sharding": "data_parallel"},
            )
        ),
        (
            lambda: small_model(META),
            {"memory_gb": 0.00001},
            "2 rank(s) of 8.91 KiB: tables with state take 25.12 KiB",
        ),
        *(
            (
                read_by_id,
                {"sharding": sharding},
                "combination after applying user provided constraints for item; another",
            )
            for sharding in ("table_row_wise", "grid_shard", "table_column_wise")
        ),
        (
            lambda: of_width(4),
            {"sharding": "column_wise"},
            "table 'a': 4 columns cannot be split over 2 ranks into equal multiples",
        ),
        (
            lambda: of_width(30),
            {},
            "table 'a': embedding_dim=30 must be a multiple of 4",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    make: Any, config: dict[str, Any], text: str
) -> None:
    with (
        unittest.mock.patch("torch.distributed.broadcast_object_list"),
        pytest.raises(ValueError) as error,
    ):
        plan_sharding(make(), TWO_RANKS, PlanConfig(**config))
    assert text in str(error.value)
    assert len(str(error.value)) <= 200


@pytest.mark.unit
@pytest.mark.parametrize(
    ("kind", "kernel", "device", "gpu", "host"),
    [
        ("sgd", "fused", "cuda", 0, 0),
        ("adagrad", "fused", "cuda", 4 * 80, 0),
        ("lazy_adam", "fused", "cuda", 8 * 80, 0),
        ("lazy_adam", "fused_uvm", "cuda", 0, 8 * 80),
        # FBGEMM keeps a number per row on the GPU.
        ("row_wise_adagrad", "fused_uvm_caching", "cuda", 4 * 10, 0),
        ("adagrad", "fused", "cpu", 0, 4 * 80),
    ],
)
def test_state_of_a_shard_is_counted_where_fbgemm_allocates_it(
    kind: Any, kernel: str, device: str, gpu: int, host: int
) -> None:
    config = OptimizerConfig(tables=kind)
    choice = config.for_tables(small_model(META))["user_id"]
    expected = Storage(hbm=gpu, ddr=host)
    assert state_storage(choice, (10, 8), kernel, device) == expected


@pytest.mark.unit
def test_a_cache_has_rows_as_wide_as_its_widest_table() -> None:
    def config(rows: int, dim: int) -> EmbeddingBagConfig:
        name = f"{rows} x {dim}"
        return EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=rows, embedding_dim=dim
        )

    def plan(*tables: EmbeddingBagConfig) -> None:
        model = two_tower(list(tables), [table("b", 9)], device=META)
        gpus = Runtime(world_size=8, local_world_size=8, device=torch.device("cuda"))
        cached = PlanConfig(
            sharding="row_wise",
            kernel="fused_uvm_caching",
            cache_load_factor=0.1,
            memory_gb=1,
        )
        plan_sharding(model, gpus, cached, optimizer=OptimizerConfig(tables="sgd"))

    here = "torchrec_ext.distributed.plan.planner"
    with (
        unittest.mock.patch("torch.distributed.broadcast_object_list"),
        unittest.mock.patch(f"{here}.available_memory", return_value=2**40),
    ):
        plan(config(300_000_000, 8))
        tables = config(300_000_000, 8), config(1_000_000, 128)
        fault = r"no sharding plan fits 8 rank\(s\) of .* add ranks or plan\.memory_gb"
        with pytest.raises(PlanError, match=rf"{fault}$"):
            plan(*tables)


def plan_text(runtime: Runtime, sharding: str) -> str:
    model = small_model(META)
    plan = plan_sharding(model, runtime, PlanConfig(sharding=sharding))  # type: ignore[arg-type]
    adam = OptimizerConfig(tables="adam")
    return explain(plan, model, runtime.world_size, optimizer=adam)


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
    # Adam holds two numbers for each weight.
    both = ", ".join(f"rank {rank}: {2 * size:.2f} MiB" for rank in (0, 1))
    assert replicated.endswith(f"optimizer state on {both}")


def broken(runtime: Runtime) -> str:
    fault = AttributeError("no planner")
    with (
        unittest.mock.patch(
            "torchrec_ext.distributed.plan.planner.draft", side_effect=fault
        ),
        pytest.raises(RuntimeError) as error,
    ):
        plan_sharding(small_model(META), runtime)
    return str(error.value)


def test_a_planner_that_breaks_on_rank_0_raises_the_same_on_every_rank() -> None:
    # A rank that is not told waits for the collectives' own limit, which is longer than
    # this one.
    first, second = run_ranks(broken, 2, timeout_s=60)
    assert first == second
    assert first.startswith("the planner failed on rank 0: AttributeError: ")


def towers_of(rows: int) -> TowerModel:
    return two_tower([table("user_id", rows)], [table("item_id", 9)], device=META)


@pytest.mark.unit
def test_tables_that_are_small_together_are_whole_on_every_rank_where_that_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    adagrad = OptimizerConfig()
    dim = table("user_id", 9).embedding_dim
    at_the_limit = towers_of(SMALL_WEIGHTS // dim - 9)
    for model in (small_model(META), at_the_limit):
        whole = small_tables_whole(model, TWO_RANKS, PlanConfig(), adagrad)
        with unittest.mock.patch("torch.distributed.broadcast_object_list"):
            plan = plan_sharding(model, TWO_RANKS, whole)
        kinds = {
            kind.sharding_type
            for module in plan.plan.values()
            for kind in module.values()
        }  # type: ignore[attr-defined]
        assert kinds == {"data_parallel"}
    assert "Sharding spec not found" not in caplog.text
    free = PlanConfig()
    for model, runtime, config, optimizer in (
        (towers_of(SMALL_WEIGHTS // dim), TWO_RANKS, free, adagrad),
        (at_the_limit, CPU, free, adagrad),
        (
            at_the_limit,
            Runtime(world_size=2, local_world_size=2, device=torch.device("cuda")),
            free,
            adagrad,
        ),
        (
            at_the_limit,
            TWO_RANKS,
            PlanConfig(tables={"user_id": TablePlan(sharding="row_wise")}),
            adagrad,
        ),
        (at_the_limit, TWO_RANKS, free, OptimizerConfig(clip_norm=1.0)),
    ):
        assert small_tables_whole(model, runtime, config, optimizer) is config
