"""ShardedBags: predictions and updates of a sharded EmbeddingBagCollection equal the unsharded one's, on gloo ranks."""

import os
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.contracts import gather_state, run_ranks
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sharders import BagSharder
from torchrec_ext.distributed.tables import initialise_tables

ROWS, WIDTH, LR = 30, 8, 0.5
PER_HOST = 2  # ranks: four are two hosts to table_row_wise
META, CPU = torch.device("meta"), torch.device("cpu")
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN


class Table(NamedTuple):
    """A table, how its bags are pooled, the features that read it, and its sharding type."""

    pooling: PoolingType
    features: tuple[str, ...]
    sharding: str


class Bags(nn.Module):
    def __init__(
        self, tables: Sequence[Table], device: torch.device, weighted: bool = False
    ) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=f"t{index}",
                feature_names=list(table.features),
                num_embeddings=ROWS,
                embedding_dim=WIDTH,
                pooling=table.pooling,
            )
            for index, table in enumerate(tables)
        ]
        self.bags = EmbeddingBagCollection(
            tables=configs, is_weighted=weighted, device=device
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        results = self.bags(features).to_dict()
        return torch.cat([results[name] for name in sorted(results)], dim=1)


def plan_of(model: Bags, tables: Sequence[Table], runtime: Runtime) -> ShardingPlan:
    kinds: dict[str, Any] = {
        "row_wise": row_wise(),
        "table_row_wise": table_row_wise(host_index=0),
        "column_wise": column_wise(ranks=[0, 1]),
        "data_parallel": data_parallel(),
        **{
            f"table_wise:{rank}": table_wise(rank=rank)
            for rank in range(runtime.world_size)
        },
    }
    plan = construct_module_sharding_plan(
        model.bags,
        per_param_sharding={
            f"t{index}": kinds[table.sharding] for index, table in enumerate(tables)
        },
        sharder=BagSharder(),
        local_size=PER_HOST,
        world_size=runtime.world_size,
        device_type="cpu",
    )
    for sharding in plan.values():
        sharding.compute_kernel = (
            "dense" if sharding.sharding_type == "data_parallel" else "fused"
        )
    return ShardingPlan(plan={"bags": plan})


def bags_of(
    tables: Sequence[Table], sizes: Sequence[int], seed: int
) -> list[KeyedJaggedTensor]:
    """A batch for each rank, of ``sizes`` rows; bags of 0 to 3 ids. Keys are in another order than features."""
    generator = torch.Generator().manual_seed(seed)
    keys = sorted({name for table in tables for name in table.features}, reverse=True)
    batches = []
    for size in sizes:
        lengths = torch.randint(0, 4, (len(keys) * size,), generator=generator)
        count = int(lengths.sum())
        batches.append(
            KeyedJaggedTensor(
                keys=keys,
                values=torch.randint(ROWS, (count,), generator=generator),
                # No table reads them, as its collection is not weighted.
                weights=torch.rand(count, generator=generator),
                lengths=lengths,
                stride=size,
            )
        )
    return batches


def loss_of(output: Tensor, rank: int) -> Tensor:
    """Each column and row has a gradient of its own."""
    rows = torch.arange(1, output.shape[0] + 1) * (rank + 1)
    return (output * rows[:, None] * torch.arange(1, output.shape[1] + 1)).sum() / 100


class Case(NamedTuple):
    tables: tuple[Table, ...]
    sizes: tuple[int, ...]


def sharded(
    runtime: Runtime, cases: Sequence[Case]
) -> list[tuple[list[Tensor], dict[str, Tensor] | None]]:
    """The predictions of two steps, and the tables after them."""
    os.environ.update(
        LOCAL_WORLD_SIZE=str(PER_HOST), LOCAL_RANK=str(runtime.rank % PER_HOST)
    )
    results = []
    for seed, case in enumerate(cases):
        model = Bags(case.tables, META)
        plan = plan_of(model, case.tables, runtime)
        parallel, optimizer = hybrid_parallel(
            model,
            runtime,
            plan=plan,
            optimizer=OptimizerConfig(tables="sgd", tables_lr=LR),
            seed=seed,
        )
        outputs = []
        for step in range(2):
            output = parallel(
                bags_of(case.tables, case.sizes, 10 * seed + step)[runtime.rank]
            )
            outputs.append(output.detach())
            optimizer.zero_grad()
            loss_of(output, runtime.rank).backward()
            optimizer.step()
        results.append((outputs, gather_state(parallel)))
    return results


def unsharded(case: Case, seed: int) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    model = Bags(case.tables, CPU)
    initialise_tables(model, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    steps = []
    for step in range(2):
        batches = bags_of(case.tables, case.sizes, 10 * seed + step)
        width = WIDTH * sum(len(table.features) for table in case.tables)
        # The unsharded collection of TorchRec takes no batch without rows.
        outputs = [
            model(bags) if bags.stride() else torch.zeros(0, width) for bags in batches
        ]
        optimizer.zero_grad()
        (
            sum(loss_of(output, rank) for rank, output in enumerate(outputs))
            / len(outputs)
        ).backward()  # type: ignore[union-attr]
        optimizer.step()
        steps.append([output.detach() for output in outputs])
    return steps, {name: value.detach() for name, value in model.named_parameters()}


def assert_law(cases: Sequence[Case]) -> None:
    ranks = run_ranks(sharded, len(cases[0].sizes), cases)
    for index, case in enumerate(cases):
        steps, state = unsharded(case, index)
        for rank, results in enumerate(ranks):
            for step, outputs in enumerate(steps):
                assert_close(
                    results[index][0][step],
                    outputs[rank],
                    f"{case}, rank {rank}, step {step}",
                )
        for name, value in state.items():
            assert_close(ranks[0][index][1][name], value, f"{case}, {name}")


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}"
    )


def refusals(runtime: Runtime) -> None:
    tables = (Table(SUM, ("a",), "row_wise"), Table(MEAN, ("b",), "row_wise"))
    with pytest.raises(ValueError, match="ranks have batches of 3, 5 rows"):
        sharded(runtime, [Case(tables, (3, 5))])
    with pytest.raises(ValueError, match="tables t1: pooled by MEAN with weights"):
        hybrid_parallel(Bags(tables, META, weighted=True), runtime)


def test_unequal_batches_and_means_of_weighted_bags_are_refused_on_all_ranks() -> None:
    run_ranks(refusals, 2)


def combinations(count: int, seed: int) -> list[Case]:
    """Tables of any pooling and sharding type, which share features."""
    draw = random.Random(seed)
    kinds = (
        "row_wise",
        "table_row_wise",
        "table_wise:0",
        "table_wise:1",
        "column_wise",
        "data_parallel",
    )
    return [
        Case(
            tuple(
                Table(
                    draw.choice([SUM, MEAN, MEAN]),
                    tuple(draw.sample("abc", draw.randint(1, 2))),
                    draw.choice(kinds),
                )
                for _ in range(draw.randint(2, 5))
            ),
            draw.choice([(3, 3), (4, 4)]),
        )
        for _ in range(count)
    ]


TWO_READERS = (
    Table(MEAN, ("a",), "row_wise"),
    Table(MEAN, ("b",), "table_wise:0"),
    Table(MEAN, ("b",), "table_wise:1"),
)


def test_a_mean_is_that_of_one_process_whichever_tables_share_its_feature() -> None:
    assert_law([Case(TWO_READERS, (4, 4)), *combinations(30, seed=0)])
