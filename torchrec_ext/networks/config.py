"""Codistillation: how members of a stack learn from each other. This module imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Codistillation:
    """Members learn from each other's slightly old predictions (Anil et al. 2018, algorithm 1).

    Args:
        weight: weight of the peers' term beside the loss of the labels; 0 for none.
        burn_in: first steps without that term, in which the members become worth learning from.
        every: steps between two copies of all members; a copy costs the memory of the stack once more, and each step
            with peers one more forward.
    """

    weight: float = 0.0
    burn_in: int = 1000
    every: int = 100

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(
                f"weight={self.weight}: must be a number of 0 or more; 1 is usual"
            )
        if self.burn_in < 0:
            raise ValueError(f"burn_in={self.burn_in}: must be 0 steps or more")
        if self.every < 1:
            raise ValueError(f"every={self.every}: must be 1 step or more")
