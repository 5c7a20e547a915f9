"""scheduler(): learning rates over a run, by torch's own LambdaLR, also for the kernels of tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.train.config import Schedule


def scheduler(
    optimizer: KeyedOptimizer, tables: Schedule, dense: Schedule, steps: int
) -> LambdaLR:
    """Builds the scheduler of all learning rates of a run, to be stepped after each step; it sets the first rates.

    TorchRec's WarmupOptimizer would give all groups one rate and keep its position outside of the state of a combined
    optimizer.

    Args:
        optimizer: optimizer from :func:`hybrid_parallel`; every group of another optimizer follows ``dense``.
        tables: schedule of all tables; kernels take the new rate when gradients are set to zero.
        dense: schedule of the dense layers.
        steps: number of steps of the run.

    Raises:
        ValueError: a warm-up is longer than the run.
    """
    for name, schedule in (("tables_schedule", tables), ("dense_schedule", dense)):
        # Its rate would never be reached.
        if schedule.warmup >= steps and schedule.changes:
            raise ValueError(
                f"{name}: warmup={schedule.warmup} steps, but the run has {steps}; a warm-up must end before the run"
            )
    table_groups: set[int] = set()
    if isinstance(optimizer, HybridOptimizer):
        table_groups = set(map(id, optimizer.table_groups))
    factors: list[Callable[[int], float]] = []
    for group in optimizer.param_groups:
        schedule = dense
        if id(group) in table_groups:
            schedule = tables
        # Not a lambda, which would read the schedule of the last group.
        factors.append(partial(schedule.factor, steps=steps))
    return LambdaLR(optimizer, factors)


def rates(optimizer: KeyedOptimizer) -> dict[str, Any]:
    """Returns the learning rates of the first group of tables and of dense layers, for a record."""
    if not isinstance(optimizer, HybridOptimizer):
        return {"dense_lr": optimizer.param_groups[0]["lr"]}
    groups = {"tables_lr": optimizer.table_groups, "dense_lr": optimizer.dense_groups}
    return {name: group[0]["lr"] for name, group in groups.items() if group}
