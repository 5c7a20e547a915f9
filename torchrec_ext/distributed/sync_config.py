"""SyncConfig: how often ranks exchange what."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Mode = Literal["every_step", "local_sgd", "diloco", "semi_sync"]
OptimizerState = Literal["keep", "average"]
LOCAL = ("local_sgd", "diloco")


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How often ranks exchange what.

    ``every_step``: the gradients of what every rank holds whole (dense layers, data_parallel tables) are averaged in
    each backward. ``local_sgd``: each rank moves by its own, and weights are averaged every k steps
    (:class:`LocalSGD`). ``diloco``: likewise, and an outer optimizer takes their mean change as its gradient
    (:class:`DiLoCo`). ``semi_sync``: TorchRec's TrainPipelineSemiSync: rows of the next batch are looked up before this
    one's backward has moved them, so that their exchange overlaps with it; a prediction sees tables that are one step
    old, and never older.

    An evaluation, the end of an epoch and the end of training always find the ranks equal. A resumed run of
    ``local_sgd`` and ``diloco`` begins anew at equal weights: a first step together, the moments that rank 0 had on
    every rank, no outer momentum; so it learns on, but not bit for bit as it would have without the stop.

    Args:
        mode: see above.
        every: of ``local_sgd`` and ``diloco``, k: steps between two averages.
        warmup: steps as ``every_step`` before the other modes begin. Where not given, 0 for ``semi_sync``; for
            ``local_sgd`` and ``diloco`` 1, the least, because DDP records its graph in the first step.
        optimizer_state: of ``local_sgd`` and ``diloco``: ``keep`` each rank's moments, or ``average`` them too.
        outer_lr: of ``diloco``.
        outer_momentum: of ``diloco``; Nesterov's where it is not 0.
        stash_gradients: of ``semi_sync``: dense layers are one step old too, each moved by the gradient of the batch
            before.
        table_copies: copies of the sharded tables (TorchRec's 2D parallelism, DMPCollection): R / table_copies ranks
            shard each, and exchange rows among themselves alone. 1 for one copy over all ranks.
        tables_every: steps between two averages of the copies and their optimizer state.
    """

    mode: Mode = "every_step"
    every: int = 32
    warmup: int | None = None
    optimizer_state: OptimizerState = "keep"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    stash_gradients: bool = False
    table_copies: int = 1
    tables_every: int = 1

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode={self.mode!r}: must be one of {', '.join(get_args(Mode))}")
        if self.optimizer_state not in get_args(OptimizerState):
            raise ValueError(
                f"optimizer_state={self.optimizer_state!r}: must be one of {', '.join(get_args(OptimizerState))}"
            )
        if self.every < 1:
            raise ValueError(f"every={self.every}: must be 1 step or more")
        for name in ("table_copies", "tables_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        if self.tables_every > 1 and self.table_copies == 1:
            raise ValueError(f"tables_every={self.tables_every}: only for table_copies of 2 or more")
        if self.warmup is not None and self.warmup < 0:
            raise ValueError(f"warmup={self.warmup}: must be 0 steps or more")
        if self.mode in LOCAL:
            check_warmup(self.together)
        if not (math.isfinite(self.outer_lr) and self.outer_lr > 0):
            raise ValueError(f"outer_lr={self.outer_lr}: must be a positive number")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum={self.outer_momentum}: must be at least 0 and below 1")
        self._refuse_what_would_do_nothing()

    def _refuse_what_would_do_nothing(self) -> None:
        belongs = {"optimizer_state": LOCAL, "outer_lr": ("diloco",), "outer_momentum": ("diloco",), "every": LOCAL}
        belongs |= {"stash_gradients": ("semi_sync",), "warmup": (*LOCAL, "semi_sync")}
        for name, modes in belongs.items():
            value = getattr(self, name)
            if name == "warmup" and value == 0:  # as saved runs say it of every mode
                continue
            if self.mode not in modes and value != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"{name}={value!r}: only for mode={' or '.join(modes)}, but mode={self.mode}")

    @property
    def together(self) -> int:
        """The steps that ranks take together before the mode begins."""
        return int(self.mode in LOCAL) if self.warmup is None else self.warmup

    def table_ranks(self, world_size: int) -> int:
        """The ranks that shard one copy of the tables.

        Raises:
            ValueError: ``world_size`` is no multiple of :attr:`table_copies`.

        Example:
            >>> SyncConfig(table_copies=2).table_ranks(8)
            4
        """
        if world_size % self.table_copies:
            raise ValueError(f"sync.table_copies={self.table_copies}: must divide the number of ranks, {world_size}")
        return world_size // self.table_copies


def check_warmup(steps: int) -> None:
    """Refuses a local mode that begins with the first step.

    Raises:
        ValueError: no step is taken together.
    """
    if steps < 1:
        raise ValueError(
            f"warmup={steps}: must be 1 step or more for {' and '.join(LOCAL)}: ranks take their first step together, "
            "because DDP "
            "records its graph in it"
        )
