"""Share: a rank's rows of each global batch; order_of(): the order of rows in memory.

prefetched(): a thread builds the next batches while the caller uses this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.loader.config import LoaderConfig


@dataclass(frozen=True, kw_only=True)
class Share:
    """The contiguous part of rank r of R in each global batch; sizes differ by one row at most.

    Args:
        rank: r.
        world_size: R.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank={self.rank} of world_size={self.world_size}: rank must be 0 to {self.world_size - 1}"
            )

    def part(self, count: int) -> slice:
        """Returns the rank's rows in a global batch of ``count`` rows."""
        return slice(
            self.rank * count // self.world_size,
            (self.rank + 1) * count // self.world_size,
        )

    def dealt(self, lengths: Int64) -> Int64:
        """Returns the rank's rows in a global batch, as many as :meth:`part` has, so that all ranks' lengths are alike.

        The longest rows go to the ranks in turn, and the next ones back again.

        Example:
            >>> [Share(rank=rank, world_size=2).dealt(np.array([9, 1, 5, 2])).tolist() for rank in (0, 1)]
            [[0, 1], [2, 3]]
        """
        ranks = self.world_size
        sizes = np.diff(np.arange(ranks + 1) * len(lengths) // ranks)
        # By rounds: the ranks in order, then backwards; in the last one those with a row more.
        rounds = np.arange(sizes.max(initial=0))[:, None]
        order = np.where(rounds % 2, np.arange(ranks)[::-1], np.arange(ranks))
        owners = order[rounds < sizes[order]]
        longest = np.argsort(-lengths, kind="stable")
        return np.sort(longest[owners == self.rank])

    def rows(self, batch_size: int) -> int:
        """Returns the number of rows of the rank's batch, padding included: the same on every rank."""
        return -(-batch_size // self.world_size)


def order_of(config: LoaderConfig, num_rows: int, epoch: int) -> Int64:
    """Returns (num_rows,) the row numbers of a set in memory, in the order of ``epoch``."""
    if not config.shuffle:
        return np.arange(num_rows)
    return np.random.Generator(np.random.PCG64([config.seed, epoch])).permutation(
        num_rows
    )


T = TypeVar("T")
_END = object()


def prefetched(source: Iterator[T], depth: int) -> Iterator[T]:
    """Yields the elements of ``source`` in order; a thread makes up to ``depth`` of them ahead of the caller.

    An exception in the thread is raised in the caller once the elements before it are consumed. The thread ends when
    the iterator is exhausted, closed or garbage-collected.

    Args:
        source: iterator, advanced in the thread only.
        depth: number of elements kept ready; 0 means no thread.
    """
    if not depth:
        yield from source
        return
    thread = ThreadPoolExecutor(1, "torchrec_ext-prefetch")
    ahead: deque[Future[Any]] = deque()
    try:
        while True:
            while len(ahead) <= depth:
                ahead.append(thread.submit(next, source, _END))
            element = ahead.popleft().result()
            if element is _END:
                return
            yield element
    finally:
        thread.shutdown(cancel_futures=True)
