"""What the rows of hybrid.py share: a model trained by `train()` on batches in memory, as one side of `Trainings`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness import Repeated
from torch import nn

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.loop import TrainConfig, train

Stop = Callable[[], bool]
Side = Callable[[Stop], object]


def training(
    model: nn.Module,
    runtime: Runtime,
    batches: Sequence[TowerBatch],
    plan: PlanConfig,
    optimizer: OptimizerConfig,
    *,
    config: TrainConfig | None = None,
) -> Side:
    """Shards ``model``, and returns the side that trains it by `train()`, with its checks, gate and pipeline.

    Args:
        model: unsharded model.
        runtime: rank and device of this process.
        batches: batches of this rank, taken again and again.
        plan: sharding of tables and towers.
        optimizer: optimizers of tables and dense layers.
        config: settings of the loop; a command's where not given.
    """
    sharding = plan_sharding(
        model, runtime, plan, optimizer=optimizer, batch_size=len(batches[0])
    )
    sharded, own = hybrid_parallel(model, runtime, plan=sharding, optimizer=optimizer)
    settings = config or TrainConfig(epochs=1)
    return lambda stop: train(
        sharded, own, Repeated(batches), runtime, settings, stop=stop
    )


def looping(step: Callable[[], object]) -> Side:
    """Returns the side that calls ``step`` until it is stopped: a loop of one's own."""

    def side(stop: Stop) -> None:
        while not stop():
            step()

    return side
