"""watched(): the blocks of an evaluation, between which it shows progress, predicts its cost, and stops on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchrec_ext.distributed.runtime import Runtime

Block = TypeVar("Block")
LOOK_S = 0.5  # seconds between two looks at whether a rank was asked to stop
SAY_S = 10.0  # seconds between two lines
LONG_S = 60.0  # seconds from which on an evaluation's cost is told beforehand


class EvaluationStoppedError(Exception):
    """A rank was asked to stop; raised on every rank after the same block."""


class EvaluationWatch:
    """Watches an evaluation between its blocks; every rank has one.

    Args:
        runtime: rank and device of this process.
        stop: returns whether this rank was asked to stop.
        say: receives, on rank 0, lines for the user.
    """

    def __init__(
        self, runtime: Runtime, *, stop: Callable[[], bool] | None = None, say: Callable[[str], None] = print
    ) -> None:
        self._runtime, self._stop, self._say = runtime, stop, say

    def over(self, blocks: Iterable[Block], total: int, cheaper: str) -> Iterator[Block]:
        """Yields the blocks of an evaluation, and watches it in between; see :func:`watched`."""
        left, missing = iter(blocks), object()
        start = shown = time.perf_counter()
        looked, every, foreseen = 0, 1, False
        for number in range(1, total + 1):
            block: Any = next(left, missing)
            if block is not missing:
                yield block
            if number - looked < every and number < total:
                continue
            looked, now = number, time.perf_counter()
            each = self._look((now - start) / number)
            every, rest = max(1, int(LOOK_S / max(each, 1e-9))), each * (total - number)
            if not foreseen and rest > LONG_S:
                foreseen, shown = True, now
                self._tell(f"this evaluation takes about {_readable(rest)}; {cheaper}")
            elif now - shown >= SAY_S:
                shown = now
                self._tell(f"evaluating: {number / total:.0%}, {_readable(rest)} left")
        yield from left

    def _look(self, seconds: float) -> float:
        """Returns the seconds that a block takes on the slowest rank."""
        asked = self._stop is not None and self._stop()
        if self._runtime.world_size > 1:
            worst = torch.tensor([seconds, float(asked)], dtype=torch.float64, device=self._runtime.device)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            seconds, asked = worst[0].item(), bool(worst[1])
        if asked:
            raise EvaluationStoppedError
        return seconds

    def _tell(self, text: str) -> None:
        if self._runtime.is_main:
            self._say(text)


_CURRENT: ContextVar[EvaluationWatch | None] = ContextVar("evaluation", default=None)


@contextmanager
def watching(watch: EvaluationWatch) -> Iterator[None]:
    """Makes ``watch`` watch all evaluations inside it."""
    before = _CURRENT.set(watch)
    try:
        yield
    finally:
        _CURRENT.reset(before)


def watched(
    blocks: Iterable[Block], total: int, *, cheaper: str = "train.eval_every evaluates less often"
) -> Iterator[Block]:
    """Yields the blocks of this rank's share of an evaluation, which a loop's :class:`EvaluationWatch` may watch.

    All ranks call it, and agree about twice a second, whatever number of blocks each has.

    Args:
        blocks: blocks of this rank, at most ``total``.
        total: the most blocks that any rank has, the same on every rank.
        cheaper: advice that makes it cheaper, for a line about an evaluation of over a minute.

    Raises:
        EvaluationStoppedError: a rank was asked to stop.
    """
    watch = _CURRENT.get()
    yield from blocks if watch is None else watch.over(blocks, total, cheaper)


def _readable(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
