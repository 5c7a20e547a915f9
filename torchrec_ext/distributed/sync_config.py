"""SyncConfig: how often ranks exchange what.

This module imports no torch, so that a command line is checked at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

from torchrec_ext.schema.validation import check_choice, check_least

Mode = Literal["every_step", "local_sgd"]
Collectives = Literal["auto", "gloo", "shared_memory"]
_LOCAL = ("every", "outer_lr", "outer_momentum")


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Schedule of the exchanges between ranks.

    ``every_step``: the gradients of what every rank holds whole (dense layers, data_parallel tables) are averaged in
    each backward. ``local_sgd``: each rank steps by its own gradient, and weights are averaged every k steps, see
    :class:`LocalSGD`. With an outer rate or momentum it is DiLoCo.

    An evaluation, the end of an epoch and the end of training always find the ranks equal. A resumed run of
    ``local_sgd`` begins again from equal weights: a first step together, the moments that rank 0 had on every rank, no
    outer momentum; so it learns on, but not bit for bit as it would have without the stop.

    Args:
        mode: what is exchanged: gradients in each backward, or weights every k steps.
        every: k, steps between two averages of ``local_sgd``.
        outer_lr: learning rate of the outer optimizer of ``local_sgd``; DiLoCo takes 0.7.
        outer_momentum: momentum of the outer optimizer, Nesterov's; DiLoCo takes 0.9.
    """

    mode: Mode = "every_step"
    every: int = 32
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(Mode))
        check_local_steps(self.every, self.outer_lr, self.outer_momentum)
        for name in _LOCAL:
            value = getattr(self, name)
            default = getattr(type(self), name)
            if self.mode == "every_step" and value != default:
                raise ValueError(
                    f"{name}={value!r}: only for mode=local_sgd, but mode=every_step"
                )

    @property
    def takes_local_steps(self) -> bool:
        """Whether the dense layers of ranks differ between two exchanges."""
        return self.mode == "local_sgd"


def check_local_steps(every: int, outer_lr: float, outer_momentum: float) -> None:
    """Refuses settings of local steps that nothing can run.

    Raises:
        ValueError: the message names the setting.
    """
    if isinstance(every, bool) or not isinstance(every, Integral):
        raise ValueError(f"every={every!r:.60}: must be a whole number of steps")
    check_least("every", every)
    if not (math.isfinite(outer_lr) and outer_lr > 0):
        raise ValueError(f"outer_lr={outer_lr}: must be a positive number")
    if not 0 <= outer_momentum < 1:
        raise ValueError(
            f"outer_momentum={outer_momentum}: must be at least 0 and below 1"
        )
