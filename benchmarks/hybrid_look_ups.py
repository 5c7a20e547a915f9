"""Two towers whose steps are mostly look-ups and their exchange, for the rows of hybrid_shared_memory.py.

Two towers of 4 tables x 32 columns, one id each per row, 512 rows on each of two ranks, table_wise, Adagrad; each tower
one layer of 32, dot product.
"""

from itertools import cycle

import torch
from hybrid_training import Side, looping, training
from torchrec import EmbeddingBagConfig

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.schema import Jagged

TABLES, ROWS, COLUMNS, BATCH = 4, 10_000, 32, 512
OPTIMIZER = OptimizerConfig(tables="adagrad", dense="adam")


def model() -> TowerModel:
    def tables(tower: str) -> list[EmbeddingBagConfig]:
        names = [f"{tower}_{at}" for at in range(TABLES)]
        return [
            EmbeddingBagConfig(
                name=name,
                feature_names=[name],
                num_embeddings=ROWS,
                embedding_dim=COLUMNS,
            )
            for name in names
        ]

    return two_tower(
        tables("user"),
        tables("item"),
        tower_widths=(32,),
        interaction="dot",
        device=torch.device("meta"),
    )


def batches(size: int, seed: int) -> list[TowerBatch]:
    """Eight batches of ``size`` rows."""
    schema = model().schema()
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(8):
        ids = {
            name: Jagged(torch.randint(ROWS, (size,), generator=generator))
            for name in schema.keys
        }
        made.append(
            schema.assemble(
                ids, labels=torch.randint(2, (size,), generator=generator).float()
            )
        )
    return made


def side(runtime: Runtime, size: int, *, pipelined: bool) -> Side:
    """A step of `train()` with TorchRec's pipeline, or one of hybrid_parallel's model in a plain loop."""
    made = model()
    own, config = batches(size, runtime.rank), PlanConfig(sharding="table_wise")
    if pipelined:
        return training(made, runtime, own, config, OPTIMIZER)
    plan = plan_sharding(made, runtime, config, optimizer=OPTIMIZER)
    parallel, optimizer = hybrid_parallel(made, runtime, plan=plan, optimizer=OPTIMIZER)
    feed = cycle(own)

    def step() -> None:
        optimizer.zero_grad()
        parallel(next(feed))[0].backward()
        optimizer.step()

    return looping(step)
