"""SyncConfig: how often ranks exchange what. MODES: the sync modes that ``sync.mode`` can name.

This module imports no torch, so that a command line is checked at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from torchrec_ext.exports import Registry, entry
from torchrec_ext.schema.validation import check_choice, check_least

OptimizerState = Literal["keep", "average"]
Collectives = Literal["auto", "gloo", "shared_memory"]
_LOCAL = ("every", "warmup", "optimizer_state")
# A line says where a class is, and in which attributes of EveryStep it differs from it.
MODES = Registry(
    {
        "every_step": entry("torchrec_ext.distributed.sync:EveryStep"),
        "local_sgd": entry(
            "torchrec_ext.distributed.sync:LocalSGD",
            agrees_every_step=False,
            least_warmup=1,
            settings=_LOCAL,
        ),
        "diloco": entry(
            "torchrec_ext.distributed.sync:DiLoCo",
            agrees_every_step=False,
            least_warmup=1,
            settings=(*_LOCAL, "outer_lr", "outer_momentum"),
        ),
        "semi_sync": entry(
            "torchrec_ext.distributed.sync:SemiSync",
            agrees_every_step=False,
            looks_ahead=True,
            settings=("warmup", "stash_gradients"),
        ),
    },
    agrees_every_step=True,
    looks_ahead=False,
    least_warmup=0,
    settings=(),
)
if TYPE_CHECKING:
    Mode = str
else:
    # The command line offers these values.
    Mode = Literal[tuple(MODES)]


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Schedule of the exchanges between ranks.

    ``every_step``: the gradients of what every rank holds whole (dense layers, data_parallel tables) are averaged in
    each backward. ``local_sgd``: each rank steps by its own gradient, and weights are averaged every k steps
    (:class:`LocalSGD`). ``diloco``: local steps too, and an outer optimizer takes their mean change as its gradient
    (:class:`DiLoCo`). ``semi_sync``: TorchRec's TrainPipelineSemiSync: rows of the next batch are looked up before this
    one's backward has changed them, so that their exchange overlaps with it; a prediction sees tables that are one step
    old, and never older.

    An evaluation, the end of an epoch and the end of training always find the ranks equal. A resumed run of
    ``local_sgd`` and ``diloco`` begins again from equal weights: a first step together, the moments that rank 0 had on
    every rank, no outer momentum; so it learns on, but not bit for bit as it would have without the stop.

    Args:
        mode: schedule of exchanges: gradients in each backward, weights every k steps, or rows a step ahead.
        every: k, steps between two averages in ``local_sgd`` and ``diloco``.
        warmup: steps as ``every_step`` before the other modes begin. Where not given, 0 for ``semi_sync``; for
            ``local_sgd`` and ``diloco`` 1, the least, because DDP records its graph in the first step.
        optimizer_state: whether ``local_sgd`` and ``diloco`` ``keep`` each rank's moments or ``average`` them too.
        outer_lr: learning rate of the outer optimizer of ``diloco``.
        outer_momentum: momentum of the outer optimizer of ``diloco``; Nesterov's where it is not 0.
        stash_gradients: whether dense layers are one step old in ``semi_sync`` too, each moved by the gradient of the
            batch before.
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
        check_choice("mode", self.mode, MODES)
        check_choice("optimizer_state", self.optimizer_state, get_args(OptimizerState))
        if self.every < 1:
            raise ValueError(f"every={self.every}: must be 1 step or more")
        check_least("table_copies", self.table_copies)
        check_least("tables_every", self.tables_every)
        if self.tables_every > 1 and self.table_copies == 1:
            raise ValueError(
                f"tables_every={self.tables_every}: only for table_copies of 2 or more"
            )
        if self.warmup is not None and self.warmup < 0:
            raise ValueError(f"warmup={self.warmup}: must be 0 steps or more")
        if MODES.facts(self.mode).least_warmup:
            check_warmup(self.together)
        if not (math.isfinite(self.outer_lr) and self.outer_lr > 0):
            raise ValueError(f"outer_lr={self.outer_lr}: must be a positive number")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"outer_momentum={self.outer_momentum}: must be at least 0 and below 1"
            )
        self._refuse_unread_settings()

    def _refuse_unread_settings(self) -> None:
        """Refuses a value for a setting of another mode."""
        names: dict[str, None] = {}
        for mode in MODES:
            names |= dict.fromkeys(MODES.facts(mode).settings)
        for name in names:
            value = getattr(self, name)
            # Saved runs record warmup=0 for every mode.
            if name == "warmup" and value == 0:
                continue
            default = type(self).__dataclass_fields__[name].default
            if name not in MODES.facts(self.mode).settings and value != default:
                readers = " or ".join(
                    key for key in MODES if name in MODES.facts(key).settings
                )
                raise ValueError(
                    f"{name}={value!r}: only for mode={readers}, but mode={self.mode}"
                )

    @property
    def together(self) -> int:
        """Steps taken together by all ranks before the mode begins."""
        if self.warmup is not None:
            return self.warmup
        return int(MODES.facts(self.mode).least_warmup)

    @property
    def agrees_every_step(self) -> bool:
        """Whether each step leaves all ranks with equal weights for the next; see :class:`EveryStep`."""
        return bool(MODES.facts(self.mode).agrees_every_step)

    @property
    def looks_ahead(self) -> bool:
        """Whether rows of the next batch are looked up before this one's backward; see :class:`EveryStep`."""
        return bool(MODES.facts(self.mode).looks_ahead)

    @property
    def takes_local_steps(self) -> bool:
        """Whether the dense layers of ranks differ between two exchanges."""
        return not (self.agrees_every_step or self.looks_ahead)

    def table_ranks(self, world_size: int) -> int:
        """Returns the number of ranks per copy of the tables.

        Raises:
            ValueError: ``world_size`` is not a multiple of :attr:`table_copies`.

        Example:
            >>> SyncConfig(table_copies=2).table_ranks(8)
            4
        """
        if world_size % self.table_copies:
            raise ValueError(
                f"sync.table_copies={self.table_copies}: must divide the number of ranks, {world_size}"
            )
        return world_size // self.table_copies


def check_warmup(steps: int) -> None:
    """Refuses a local mode from the first step on.

    Raises:
        ValueError: no step is taken together.
    """
    if steps < 1:
        modes = " and ".join(name for name in MODES if MODES.facts(name).least_warmup)
        raise ValueError(
            f"warmup={steps}: must be 1 step or more for {modes}: ranks take their first step together, because DDP "
            "records its graph in it"
        )
