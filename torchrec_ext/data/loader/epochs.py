"""Epochs: a loader's position in its stream of batches, saved and restored.

Share: a rank's rows of each global batch.

prefetched(): a thread builds the next batches while the caller uses this one.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torchrec_ext.needs_torch  # noqa: F401

import numpy as np
import torch
import torch.distributed as dist

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Int64
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.schema import DataError


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
_AHEAD_ON_GPU = 2
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


class Epochs(ABC):
    """A loader with batches that are functions of epoch and step, so it resumes at any step.

    Args:
        config: settings, of which ``batch_size``, ``drop_last``, ``prefetch`` and ``pin_memory`` are read here.
        count: number of rows or sequences in an epoch, over all ranks.
        what: unit of ``count``, for messages.

    Attributes:
        depth: number of batches that a thread builds ahead.
        epoch: the epoch that it is in.

    Raises:
        DataError: an epoch would have no step.
    """

    def __init__(self, config: LoaderConfig, count: int, what: str) -> None:
        self.config = config
        self._count = count
        on_gpu = torch.cuda.is_available() and not _is_cpu_rank()
        self._pin = on_gpu if config.pin_memory is None else config.pin_memory
        # On a CPU the thread and the step wait for each other at Python's lock, which
        # costs most models more than it hides.
        usual = _AHEAD_ON_GPU if on_gpu else 0
        self.depth = usual if config.prefetch is None else config.prefetch
        self.epoch = 0
        self._step = 0
        self._start = 0
        self._is_over = False
        if not len(self):
            raise DataError(
                f"{count} {what} with loader.batch_size={config.batch_size} and loader.drop_last={config.drop_last} "
                f"make no step; give more {what} or a smaller batch_size, or keep the last batch"
            )

    @property
    def num_samples(self) -> int:
        """Number of rows or sequences in an epoch, over all ranks."""
        return self._count

    @abstractmethod
    def epoch_batches(self, epoch: int, start: int) -> Iterator[TowerBatch]:
        """Yields the batches of an epoch from step ``start`` on."""

    @abstractmethod
    def stream_facts(self) -> dict[str, Any]:
        """Returns the settings and sizes behind the stream of samples, without the epoch."""

    def __len__(self) -> int:
        """Number of steps in an epoch, the same on every rank."""
        return self.config.num_steps(self._count)

    def set_epoch(self, epoch: int) -> None:
        """Starts ``epoch``, counted from 0, at its first step."""
        self.epoch = epoch
        self._step = 0
        self._start = 0
        self._is_over = False

    def __iter__(self) -> Iterator[TowerBatch]:
        """Yields the epoch's batches; once after :meth:`load_state_dict`, the remaining ones."""
        if self._is_over and self.config.shuffle:
            # As silent as with torch's DistributedSampler otherwise.
            warnings.warn(
                f"{type(self).__name__}: another pass over epoch {self.epoch}, in the same order; call "
                "set_epoch(epoch) before each pass",
                stacklevel=2,
            )
        start = self._start
        self._start = 0
        self._step = start
        batches = self.epoch_batches(self.epoch, start)
        # In the thread that builds batches, if there is one: pinning copies them.
        if self._pin:
            batches = (batch.pin_memory() for batch in batches)
        for step, batch in enumerate(prefetched(batches, self.depth), start=start + 1):
            # Here and not in the thread: batches that nobody has taken yet do not
            # count.
            self._step = step
            yield batch
        self._is_over = True

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Returns the position in the stream, as numbers, texts and tensors.

        Args:
            step: number of steps of this epoch that the caller has finished. A pipeline that fetches ahead must give
                it; by default it is the number of batches handed out (those that the prefetch thread has built
                do not count).
        """
        return {
            "epoch": self.epoch,
            "step": self._step if step is None else step,
            "stream": self.stream_facts(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the saved position, on any number of ranks.

        Raises:
            ValueError: the state belongs to another stream, whose remaining samples are different ones.
        """
        stream = self.stream_facts()
        changes = []
        # Facts that the state lacks are not compared: it may come from an earlier
        # version.
        for name, value in state["stream"].items():
            if value != stream.get(name):
                changes.append(f"{name} was {value!r} and is {stream.get(name)!r}")
        if changes:
            raise ValueError(
                f"cannot resume in the middle of an epoch: {', '.join(changes)}; restore these settings, or begin a "
                "new run with its weights (start.path)"
            )
        self.epoch = int(state["epoch"])
        self._step = int(state["step"])
        self._start = self._step
        self._is_over = False


def _is_cpu_rank() -> bool:
    """Whether this rank trains on the CPU, perhaps of a host with GPUs: pinned memory would cost a context of CUDA."""
    return dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO
