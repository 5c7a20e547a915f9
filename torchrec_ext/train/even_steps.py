"""Every rank takes as many steps: unequal loaders are told before the first one, on all ranks, instead of a hang in the last."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Protocol

import torch.distributed as dist

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import UnevenStepsError


class SizedBatches(Sized, Protocol):
    """Batches whose number is known."""

    def __iter__(self) -> Iterator[TowerBatch]: ...


def check_even(loader: Sized, runtime: Runtime) -> None:
    """All ranks call it.

    Raises:
        UnevenStepsError: the ranks' loaders are not of one length; the same message on every rank.
    """
    lengths = [0] * runtime.world_size
    dist.all_gather_object(lengths, len(loader))
    if len(set(lengths)) > 1:
        told = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
        raise UnevenStepsError(
            f"loader: ranks have unequal numbers of batches in an epoch, {told}: every rank must have as many, since each waits "
            "for the others in every step; pad the last batches with rows of weight 0, or drop them"
        )


def exactly(loader: SizedBatches, *, after: int = 0) -> Iterator[TowerBatch]:
    """The batches of an epoch that remain ``after`` so many of them.

    Raises:
        UnevenStepsError: they are not ``len(loader)``, as was promised to the other ranks. It ends this rank at once, and thereby
            the others, which would wait for it.
    """
    number = after
    for number, batch in enumerate(loader, after + 1):
        if number > len(loader):
            break
        yield batch
    if number != len(loader):
        given = f"only {number}" if number < len(loader) else "more"
        raise UnevenStepsError(
            f"loader: len(loader) is {len(loader)}, but it gave {given} batches: other ranks count on its length"
        )
