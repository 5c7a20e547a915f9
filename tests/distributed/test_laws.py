"""Sharded equals unsharded, for every sharding type and number of ranks, over real gloo processes."""

import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contracts import gather_state, run_ranks
from tests.examples import META, batches, small_model
from tests.sharded import Case, Learned, alone, assert_close, check_equal, on_ranks
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import fill_tables, local_shards

BY_HOST = ("table_row_wise", "grid_shard")
SHARDINGS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_column_wise",
    "data_parallel",
    *BY_HOST,
)
STEPS = 20


# With SGD an error of scale shows: doubled gradients would move the tables by much more
# than the tolerance. One sum a row is that of unsharded rows while these are whole.
OPTIMIZERS = {
    "adagrad": OptimizerConfig(tables="adagrad", tables_lr=0.1),
    "sgd": OptimizerConfig(tables="sgd", tables_lr=5.0, dense="sgd", dense_lr=0.5),
    "row_wise_adagrad": OptimizerConfig(tables="row_wise_adagrad", tables_lr=0.1),
}
CASES = [
    *product(("adagrad", "sgd"), SHARDINGS),
    *product(["row_wise_adagrad"], ("table_wise", "row_wise", "data_parallel")),
]
Found = dict[Any, Learned]


def of(kind: str, sharding: str) -> Case:
    plan = PlanConfig(sharding=sharding)  # type: ignore[arg-type]
    return Case(small_model, partial(batches, STEPS), OPTIMIZERS[kind], plan, STEPS)


def all_sharded(
    runtime: Runtime, cases: Sequence[tuple[str, str]], local: int = 0
) -> tuple[Found, dict[str, Any]]:
    """Each case, and tables filled under each sharding; on hosts of ``local`` ranks if that is given."""
    if local:
        # TorchRec reads them from the environment.
        os.environ.update(
            LOCAL_WORLD_SIZE=str(local), LOCAL_RANK=str(runtime.rank % local)
        )
        runtime = dataclasses.replace(runtime, local_world_size=local)
    found = on_ranks(runtime, {case: of(*case) for case in cases})
    kinds = sorted({sharding for _, sharding in cases})
    return found, {sharding: filled(runtime, sharding) for sharding in kinds}


@pytest.fixture(scope="module", params=[1, 2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Any:
    return run_ranks(all_sharded, request.param, CASES, timeout_s=240)


@pytest.fixture(scope="module")
def expected() -> dict[str, Learned]:
    return {kind: alone(of(kind, "auto")) for kind in OPTIMIZERS}


def check_case(case: tuple[str, str], ranks: Any, expected: Learned) -> None:
    found = [learned[case] for learned, _ in ranks]
    assert set(found[0].kinds.values()) == {case[1]}
    first = torch.cat([rank.logits[0] for rank in found])
    torch.testing.assert_close(first, expected.logits[0], rtol=0, atol=1e-5)
    check_equal(found, expected)
    assert all(rank.pipelined == 1 for rank in found), "both towers' as one"
    for name, value in ranks[0][1][case[1]].items():
        if "embedding_bags" in name:
            assert torch.equal(value, _numbered(0, *value.shape)), "a row is elsewhere"


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_sharded_equals_unsharded(
    case: tuple[str, str], ranks: Any, expected: dict[str, Learned]
) -> None:
    check_case(case, ranks, expected[case[0]])


@pytest.mark.parametrize(
    ("world_size", "local"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_sharded_by_host_equals_unsharded(
    world_size: int, local: int, expected: dict[str, Learned]
) -> None:
    cases = [("sgd", sharding) for sharding in BY_HOST]
    ranks = run_ranks(all_sharded, world_size, cases, local)
    for case in cases:
        check_case(case, ranks, expected["sgd"])


def test_the_seed_alone_decides_the_first_tables(
    ranks: Any, expected: dict[str, Learned]
) -> None:
    first = expected["sgd"].first
    for learned in ranks[0][0].values():
        assert_close(learned.first, first, 0.0)
    tables = [value for name, value in first.items() if "embedding_bags" in name]
    assert len(tables) == 3
    assert all(len(value.unique()) > value.numel() // 2 for value in tables)


def filled(runtime: Runtime, sharding: str) -> dict[str, Tensor] | None:
    model = small_model(META)
    parallel, _ = hybrid_parallel(model, runtime, plan=PlanConfig(sharding=sharding))
    fill_tables(
        parallel,
        lambda fqn, config, start, stop: _numbered(start, stop, config.embedding_dim),
    )
    return gather_state(parallel)


def _numbered(start: int, stop: int, width: int) -> Tensor:
    return (
        torch.arange(start, stop).float()[:, None] * 100 + torch.arange(width).float()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
def test_rows_off_the_gpu_train_as_those_on_it(kernel: str) -> None:
    states = []
    for chosen in ("fused", kernel):
        with Runtime.start("cuda") as runtime:
            model = small_model(META)
            factor = 0.1 if chosen == "fused_uvm_caching" else 0.0
            config = PlanConfig(
                sharding="table_wise", kernel=chosen, cache_load_factor=factor
            )  # type: ignore[arg-type]
            parallel, keyed = hybrid_parallel(model, runtime, plan=config, seed=7)
            for step, batch in enumerate(batches(6)):
                keyed.zero_grad()
                parallel(batch.to(runtime.device))[0].backward()
                keyed.step()
                if step == 2:
                    # what is written into the tables is what the next step reads
                    for shard in local_shards(parallel):
                        shard.tensor.mul_(0.5)
            states.append(gather_state(parallel))
    assert_close(states[1], states[0], 1e-5)
