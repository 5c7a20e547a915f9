"""scheduler(): learning rates over a run, by torch's own LambdaLR, also for the kernels of tables."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.train.config import Schedule


def scheduler(optimizer: HybridOptimizer, schedule: Schedule, steps: int) -> LambdaLR:
    """Builds the scheduler of all learning rates of a run, to be stepped after each step; it sets the first rates.

    TorchRec's WarmupOptimizer would keep its position outside of the state of a combined optimizer.

    Args:
        optimizer: optimizer from :func:`hybrid_parallel`, whose kernels take the new rate when gradients are set to
            zero.
        schedule: factor on the rates of tables and dense layers.
        steps: number of steps of the run.

    Raises:
        ValueError: the warm-up is longer than the run.
    """
    # Its rate would never be reached.
    if schedule.warmup >= steps:
        raise ValueError(
            f"schedule: warmup={schedule.warmup} steps, but the run has {steps}; a warm-up must end before the run"
        )
    return LambdaLR(optimizer, partial(schedule.factor, steps=steps))


def rates(optimizer: HybridOptimizer) -> dict[str, Any]:
    """Returns the learning rates of the first group of tables and of dense layers, for a record."""
    groups = {"tables_lr": optimizer.table_groups, "dense_lr": optimizer.dense_groups}
    return {name: group[0]["lr"] for name, group in groups.items() if group}
