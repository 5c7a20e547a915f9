"""Schedule: how learning rates change over a run, by torch's own LambdaLR, the tables' inside their kernels included."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from torch.optim.lr_scheduler import LambdaLR
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.distributed.hybrid_optimizer import HybridOptimizer

Kind = Literal["constant", "linear", "cosine", "inverse_sqrt", "step"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A factor on the learning rate, by step.

    The rate rises in equal parts over ``warmup`` steps to the whole of what the optimizer was given, then follows ``kind``:
    ``constant``; ``linear`` or ``cosine`` down to ``floor`` at the last step; ``inverse_sqrt``, sqrt(warmup / step) (Vaswani et al.
    2017); ``step``, times ``gamma`` every ``every`` steps.

    Args:
        kind: of the part after the warm-up.
        warmup: steps; the first has 1 / warmup of the rate.
        floor: of ``linear`` and ``cosine``, 0 to 1.
        every: steps between two drops of ``step``.
        gamma: of ``step``.
    """

    kind: Kind = "constant"
    warmup: int = 0
    floor: float = 0.0
    every: int = 0
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r}: must be one of {', '.join(get_args(Kind))}")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup}: must be 0 steps or more")
        for name in ("floor", "gamma"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be between 0 and 1")
        if self.kind == "step" and self.every < 1:
            raise ValueError(f"every={self.every}: the kind step needs the number of steps between two drops, 1 or more")

    @property
    def changes(self) -> bool:
        """Whether it is anything but 1 throughout."""
        return self.kind != "constant" or self.warmup > 0

    def factor(self, step: int, steps: int) -> float:
        """The factor of a step.

        Args:
            step: counted from 0.
            steps: of the whole run.

        Example:
            >>> [round(Schedule(kind="linear", warmup=2).factor(step, 6), 2) for step in range(6)]
            [0.5, 1.0, 1.0, 0.67, 0.33, 0.0]
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        after, last = step - self.warmup, max(steps - 1 - self.warmup, 1)
        if self.kind == "inverse_sqrt":
            return math.sqrt(max(self.warmup, 1) / max(step + 1, 1))
        if self.kind == "step":
            return self.gamma ** (after // self.every)
        done = min(after / last, 1.0)
        left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[self.kind]
        return self.floor + (1 - self.floor) * left


def scheduler(optimizer: KeyedOptimizer, tables: Schedule, dense: Schedule, steps: int) -> LambdaLR:
    """The scheduler of all learning rates of a run, to be stepped after each step; the first step's are set at once.

    TorchRec's WarmupOptimizer would give all groups one rate and keep its place outside of the state of a combined optimizer.

    Args:
        optimizer: from :func:`hybrid_parallel`; every group of another one follows ``dense``.
        tables: of all tables. Those in kernels take the new rate when gradients are set to zero.
        dense: of the dense layers.
        steps: of the whole run.

    Raises:
        ValueError: a warm-up that is longer than the run.
    """
    for name, schedule in (("tables_schedule", tables), ("dense_schedule", dense)):
        if schedule.warmup >= steps and schedule.changes:
            raise ValueError(f"{name}: warmup={schedule.warmup} steps, but the run has {steps}; a warm-up must end before the run")
    of_tables = {id(group) for group in optimizer.table_groups} if isinstance(optimizer, HybridOptimizer) else set()
    schedules = [tables if id(group) in of_tables else dense for group in optimizer.param_groups]
    return LambdaLR(optimizer, [partial(schedule.factor, steps=steps) for schedule in schedules])


def rates(optimizer: KeyedOptimizer) -> dict[str, Any]:
    """The learning rates of the first group of tables and of dense layers, as a record shows them."""
    if not isinstance(optimizer, HybridOptimizer):
        return {"dense_lr": optimizer.param_groups[0]["lr"]}
    groups = {"tables_lr": optimizer.table_groups, "dense_lr": optimizer.dense_groups}
    return {name: group[0]["lr"] for name, group in groups.items() if group}
