"""Towers whose tables are looked up together: fewer exchanges, all else as in one process, over real gloo processes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.contracts import gather_state, run_ranks
from tests.examples import META
from tests.models.merged_models import batch, by_table, is_table, model
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.step.pipeline import make_pipeline, unpipelined

# Under Adagrad two updates of a row in one step would not equal one; under SGD, and
# with an eps like the gradients, errors of scale show too.
LEARNING = OptimizerConfig(
    tables="adagrad", tables_lr=0.1, dense="sgd", dense_lr=0.1, eps=0.01
)
SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")
STEPS = {"plain": 50, "shared": 8, "sequences": 8}


def batches(kind: str, pieces: list[int]) -> Iterator[TowerBatch]:
    return (batch(kind, step, pieces) for step in range(STEPS[kind]))


def trained(
    runtime: Runtime, kind: str, made: TowerModel, sharding: str
) -> dict[str, Any]:
    """Logits of every step, weights after the last, what no pipeline overlapped, and the all-to-alls of a step."""
    plan = plan_sharding(
        made, runtime, PlanConfig(sharding=sharding), optimizer=LEARNING
    )  # type: ignore[arg-type]
    parallel, optimizer = hybrid_parallel(
        made, runtime, plan=plan, optimizer=LEARNING, seed=3
    )
    pipeline = make_pipeline(parallel, optimizer, runtime.device)
    stream = batches(kind, [runtime.rank])
    logits, calls = [], []
    for _ in range(STEPS[kind]):
        counted = counting(lambda: logits.append(pipeline.progress(stream).logits))
        calls.append(counted)
    pipeline.detach()
    return {
        "logits": logits,
        "state": gather_state(parallel),
        "saved": set(model_state(parallel, optimizer).tensors),
        "missed": unpipelined(pipeline, parallel),
        # the first fills the pipeline, the last find no batch to begin
        "calls": calls[1:-2],
        "embedded": {
            name: parallel.module.embed(name, batch(kind, 0, [runtime.rank])).detach()
            for name in made.towers
        },  # type: ignore[operator]
    }


def counting(run: Callable[[], object]) -> int:
    """The all-to-alls that ``run`` starts on this rank; TorchRec starts all of them by this function."""
    calls, real = 0, dist.all_to_all_single

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args, **options)

    dist.all_to_all_single = counted
    try:
        run()
    finally:
        dist.all_to_all_single = real
    return calls


def apart_and_merged(runtime: Runtime) -> dict[str, Any]:
    apart = trained(runtime, "plain", model("plain", META), "table_wise")
    return {
        "apart": apart,
        "merged": trained(
            runtime, "plain", model("plain", META).merge_lookups(), "table_wise"
        ),
    }


def test_one_exchange_for_all_towers_learns_what_one_for_each_learns() -> None:
    """Two towers of 4 tables: 5 all-to-alls a step (sizes, lengths, ids, bags, gradients), not 9, or 10 unpipelined."""
    ranks = run_ranks(apart_and_merged, 2)
    for rank in ranks:
        assert set(rank["merged"]["calls"]) == {5}
        assert set(rank["apart"]["calls"]) == {9}
        assert rank["merged"]["missed"] == rank["apart"]["missed"] == []
        for first, second in zip(
            rank["merged"]["logits"], rank["apart"]["logits"], strict=True
        ):
            torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
        for tower, output in rank["apart"]["embedded"].items():
            torch.testing.assert_close(
                rank["merged"]["embedded"][tower], output, rtol=0, atol=1e-4
            )
        # so a checkpoint of one is one of the other
        assert rank["merged"]["saved"] == rank["apart"]["saved"] != set()
    merged, apart = (by_table(ranks[0][way]["state"]) for way in ("merged", "apart"))
    assert_close(merged, apart, "merged")


def unsharded(kind: str, pieces: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The first step's logits, and weights after the last, of all parts' rows in one process."""
    made = model(kind).merge_lookups()
    parameters = dict(made.named_parameters())
    tables = [value for name, value in parameters.items() if is_table(name)]
    dense = [value for name, value in parameters.items() if not is_table(name)]
    optimizers = [
        torch.optim.Adagrad(tables, lr=0.1, eps=0.01),
        torch.optim.SGD(dense, lr=0.1),
    ]
    first = made.logits(batch(kind, 0, pieces)).detach()
    for rows in batches(kind, pieces):
        for optimizer in optimizers:
            optimizer.zero_grad()
        made(rows)[0].backward()
        for optimizer in optimizers:
            optimizer.step()
    return first, {name: value.detach() for name, value in parameters.items()}


def under_every_sharding(
    runtime: Runtime, kind: str, shardings: tuple[str, ...]
) -> dict[str, Any]:
    return {
        sharding: trained(runtime, kind, model(kind, META).merge_lookups(), sharding)
        for sharding in shardings
    }


WHOLE_ROWS = SHARDINGS[:3]  # FBGEMM's dense kernel cannot hold what is read id by id


@pytest.mark.parametrize(
    ("kind", "shardings", "world_size"),
    [
        # B = 8 rows on each rank, and 24 of the tower that is shared
        ("shared", SHARDINGS, 2),
        ("sequences", WHOLE_ROWS, 2),
        pytest.param("shared", SHARDINGS, 1, marks=pytest.mark.slow),
        pytest.param("shared", SHARDINGS, 4, marks=pytest.mark.slow),
        pytest.param("sequences", WHOLE_ROWS, 4, marks=pytest.mark.slow),
    ],
)
def test_merged_and_sharded_equals_one_process(
    kind: str, shardings: tuple[str, ...], world_size: int
) -> None:
    first, expected = unsharded(kind, list(range(world_size)))
    ranks = run_ranks(under_every_sharding, world_size, kind, shardings)
    for sharding in shardings:
        assert [rank[sharding]["missed"] for rank in ranks] == [[]] * world_size, (
            sharding
        )
        logits = torch.cat([rank[sharding]["logits"][0] for rank in ranks])
        torch.testing.assert_close(
            logits,
            first,
            rtol=0,
            atol=1e-5,
            msg=lambda text, label=sharding: f"{label}: {text}",
        )
        assert_close(ranks[0][sharding]["state"], expected, sharding)


def assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], what: str
) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name],
            value,
            rtol=0,
            atol=1e-4,
            msg=lambda text, label=(what, name): f"{label}: {text}",
        )
