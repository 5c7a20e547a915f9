"""Together: what the ranks of a job learn from each other around a checkpoint, over a process group of its own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchrec_ext.distributed.runtime import Runtime

_TIMEOUT = timedelta(minutes=30)  # a rank may write for as long


class Together:
    """Every rank makes one and calls each method alike, from one thread at a time.

    Args:
        runtime: this process's place in the job.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.rank, self.ranks = runtime.rank, runtime.world_size
        self.group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if runtime.world_size > 1 else None

    def gathered(self, value: Any) -> list[Any]:
        """The value of each rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def on_main(self, action: Callable[[], Any]) -> Any:
        """What ``action`` returns on rank 0, or raises there, on every rank."""
        outcome: Any = None
        if self.rank == 0:
            try:
                outcome = action()
            except Exception as error:
                outcome = error
        outcome = self.gathered(outcome)[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
