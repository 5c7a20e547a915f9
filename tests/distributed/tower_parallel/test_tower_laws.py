"""Towers of every kind under TorchRec's model parallelism and pipeline: sharded on 2 ranks equals unsharded."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingConfig
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from tests.contracts import gather_state, run_ranks
from tests.examples import DIM, ITEMS, META, USERS, batches, redrawn, table
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig, Sharding
from torchrec_ext.distributed.plan.draft import PlanError
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sharders import possible
from torchrec_ext.distributed.tables import initialise_tables, local_shards
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import interaction_layer
from torchrec_ext.modules.tower import Tower
from torchrec_ext.train.step.pipeline import make_pipeline, unpipelined

STEPS = 20
RATES = OptimizerConfig(tables="sgd", tables_lr=2.0, dense="sgd", dense_lr=0.1)


def listed(name: str, rows: int = 9) -> EmbeddingConfig:
    return EmbeddingConfig(
        name=name, feature_names=[name], num_embeddings=rows, embedding_dim=DIM
    )


def model(kind: str, device: torch.device | None = None) -> TowerModel:
    """The features of :func:`batches`, and towers with all that a Tower can have: normalisation, or half precision."""
    options: dict[str, Any] = {
        "activation": "gelu",
        "normalization": kind,
        "residual": True,
        "device": device,
    }
    if kind in ("FP16", "FP32"):
        tables = [
            table(name, rows, data_type=DataType[kind])
            for name, rows in (("user_id", USERS), ("history", ITEMS))
        ]
        options |= {"normalization": "layer"}
    else:
        tables = [table("user_id", USERS), listed("history", ITEMS)]  # type: ignore[list-item]
    towers = {
        "user": Tower(tables, [16, 16, 8], dense=["age"], **options),
        "item": Tower(
            [table("item_id", ITEMS)], [16, 16, 8], dense=["price"], **options
        ),
    }
    made = TowerModel(
        towers,
        interaction_layer(
            "deepfm", [8, 8], [16], normalization=options["normalization"]
        ),
    )
    return redrawn(made)


def unsharded(kind: str) -> dict[str, Tensor]:
    made = model(kind)
    initialise_tables(made, seed=7)
    tables = [p for name, p in made.named_parameters() if is_table(name)]
    dense = [p for name, p in made.named_parameters() if not is_table(name)]
    optimizers = [
        torch.optim.SGD(tables, lr=RATES.tables_lr),
        torch.optim.SGD(dense, lr=RATES.dense_lr),
    ]
    for batch in batches(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        made(batch)[0].backward()
        for optimizer in optimizers:
            optimizer.step()
    return {
        **{name: p.detach() for name, p in made.named_parameters()},
        **buffers(made),
    }


def is_table(name: str) -> bool:
    return "embeddings." in name


def buffers(made: nn.Module) -> dict[str, Tensor]:
    """The running statistics of batch normalisation."""
    return {
        name: value.clone() for name, value in made.named_buffers() if "running" in name
    }


def sharded(runtime: Runtime, kind: str, sharding: str) -> dict[str, Any]:
    made = model(kind, META)
    plan = plan_sharding(made, runtime, PlanConfig(sharding=sharding), optimizer=RATES)  # type: ignore[arg-type]
    parallel, optimizer = hybrid_parallel(
        made, runtime, plan=plan, optimizer=RATES, seed=7
    )
    pipeline = make_pipeline(parallel, optimizer, runtime.device)
    local = batches(STEPS, rank=runtime.rank, world_size=runtime.world_size)
    outputs = [pipeline.progress(local) for _ in range(STEPS)]
    return {
        "types": {
            shard.config.name: shard.tensor.dtype for shard in local_shards(parallel)
        },
        "logits": outputs[-1].logits.dtype,
        "buffers": buffers(get_unwrapped_module(parallel)),
        "state": gather_state(parallel),
        "unpipelined": unpipelined(pipeline, parallel),
    }


@pytest.mark.parametrize("kind", ["none", "layer", "batch"])
@pytest.mark.parametrize("sharding", ["row_wise", "auto"])
def test_attention_residuals_and_normalisation_train_as_unsharded(
    kind: str, sharding: str
) -> None:
    ranks = run_ranks(sharded, 2, kind, sharding)
    assert [rank["unpipelined"] for rank in ranks] == [[], []]
    expected = unsharded(kind)
    for rank in ranks:
        # running statistics on every rank, since each rank evaluates with its own
        assert len(rank["buffers"]) == (10 if kind == "batch" else 0)
        for name, value in rank["buffers"].items():
            torch.testing.assert_close(
                value,
                expected.pop(name) if rank is ranks[1] else expected[name],
                rtol=0,
                atol=1e-4,
            )
    state = ranks[0]["state"]
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            state[name],
            value,
            rtol=0,
            atol=1e-4,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise", "auto"])
def test_half_precision_tables_train_and_stay_half(sharding: str) -> None:
    """FBGEMM rounds what it stores, so 20 steps end within a twentieth of the way from where plain float32 ends."""
    ranks = run_ranks(sharded, 2, "FP16", sharding)
    types = {name: kind for rank in ranks for name, kind in rank["types"].items()}
    assert types == {
        "user_id": torch.float16,
        "history": torch.float16,
        "item_id": torch.float32,
    }
    assert ranks[0]["logits"] == torch.float32
    first = model("FP32")
    initialise_tables(first, seed=7)
    start = dict(first.named_parameters())
    state, expected = ranks[0]["state"], unsharded("FP32")
    error = torch.cat(
        [(state[name] - value).flatten() for name, value in expected.items()]
    ).norm()
    moved = torch.cat(
        [(value - start[name]).detach().flatten() for name, value in expected.items()]
    ).norm()
    assert error < 0.05 * moved


@pytest.mark.unit
@pytest.mark.parametrize(
    ("made", "sharding", "text"),
    [
        (
            table("t", 9, data_type=DataType.BF16),
            "auto",
            "data_type=BF16: FBGEMM's kernels train FP32 and FP16 tables on a cpu",
        ),
        (
            table("t", 9, data_type=DataType.INT8),
            "table_wise",
            "data_type=INT8: FBGEMM's kernels train FP32 and FP16 tables on a cpu",
        ),
        (
            table("t", 9, data_type=DataType.FP16),
            "data_parallel",
            "half precision, where eps=1e-8 is 0 and rows become NaN",
        ),
        (
            listed("t"),
            "data_parallel",
            "it is read id by id, where FBGEMM's dense kernel adds up the ids of a row and then fails",
        ),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_before_the_first_step(
    made: BaseEmbeddingConfig, sharding: Sharding, text: str
) -> None:
    tower = Tower([made], [4], device=META)
    with pytest.raises(PlanError) as error:
        plan_sharding(tower, Runtime(), PlanConfig(sharding=sharding))
    assert "table 't': " in str(error.value)
    assert text in str(error.value)


@pytest.mark.unit
def test_the_planner_may_choose_whatever_is_possible() -> None:
    assert possible(table("t", 9), "cpu") is None
    for made, device in (
        (listed("t"), "cpu"),
        (table("t", 9, data_type=DataType.FP16), "cuda"),
    ):
        types = possible(made, device)
        assert types is not None
        assert {"table_wise", "row_wise", "column_wise"} <= set(types)
        assert "data_parallel" not in types
    assert possible(listed("t"), "cuda") is None
