"""TorchRec's own DLRM, its tables sharded over the ranks by hybrid_parallel(), on rows whose answer is known.

torchrun --standalone --nproc-per-node 2 examples/dlrm_hybrid.py [STEPS]

A user clicks an item of the same kind, one of four, and a tenth of the labels is wrong. No model does better than a log
loss of .325; without the tables it is .611.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain

from torchrec_ext import (
    OptimizerConfig,
    PlanConfig,
    Runtime,
    explain,
    hybrid_parallel,
    plan_sharding,
)

USERS, ITEMS, KINDS, WIDTH, ROWS = 4_000, 1_000, 4, 16, 2_048


def network() -> DLRMTrain:
    """Returns the network as TorchRec has it; tables on the meta device take no memory before they are sharded."""
    tables = [
        EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=rows, embedding_dim=WIDTH
        )
        for name, rows in (("user", USERS), ("item", ITEMS))
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    return DLRMTrain(
        DLRM(
            bags,
            dense_in_features=2,
            dense_arch_layer_sizes=[16, WIDTH],
            over_arch_layer_sizes=[32, 1],
        )
    )


def batches(steps: int, seed: int) -> Iterator[Batch]:
    """Yields a rank's batches of users, items, two numbers and clicks."""
    draws = torch.Generator().manual_seed(seed)

    def ids(rows: int) -> Tensor:
        return torch.randint(rows, (ROWS,), generator=draws)

    for _ in range(steps):
        user, item = ids(USERS), ids(ITEMS)
        is_wrong = torch.rand(ROWS, generator=draws) < 0.1
        clicked = (user % KINDS == item % KINDS) ^ is_wrong
        one_each = torch.ones(2 * ROWS, dtype=torch.int)
        values = KeyedJaggedTensor(
            ["user", "item"], torch.cat([user, item]), lengths=one_each
        )
        yield Batch(torch.randn(ROWS, 2, generator=draws), values, clicked.int())


def main(runtime: Runtime, steps: int = 300) -> None:
    """Trains, and prints the plan and the log loss of rows that nobody has seen."""
    torch.manual_seed(0)
    model = network()
    rates = OptimizerConfig(tables="adagrad", tables_lr=0.3, dense_lr=3e-3)
    # Without a plan, tables as small as these have a copy on each rank.
    plan = plan_sharding(
        model,
        runtime,
        PlanConfig(sharding="row_wise"),
        optimizer=rates,
        batch_size=ROWS,
    )
    sharded, optimizer = hybrid_parallel(model, runtime, plan=plan, optimizer=rates)
    if runtime.is_main:
        print(explain(plan, model, runtime.world_size))
    pipeline = TrainPipelineSparseDist(sharded, optimizer, runtime.device)
    rows = batches(steps, seed=runtime.rank)
    for _ in range(steps):
        pipeline.progress(rows)
    pipeline.detach().eval()  # TorchRec replaced the forward of its modules
    with torch.no_grad():
        loss, _ = sharded(next(batches(1, seed=1_000)).to(runtime.device))
    if runtime.is_main:
        print(f"held out log loss {loss.item():.4f}")


if __name__ == "__main__":
    with Runtime.start() as started:
        main(started, *map(int, sys.argv[1:]))
