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

_Block = TypeVar("_Block")
# Seconds between two checks for a stop request on any rank.
LOOK_S = 0.5
# Seconds between two progress lines.
SAY_S = 10.0
# An evaluation longer than this is announced with its expected cost.
LONG_S = 60.0


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
        self,
        runtime: Runtime,
        *,
        stop: Callable[[], bool] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._runtime = runtime
        self._stop = stop
        self._say = say

    def over(
        self, blocks: Iterable[_Block], total: int, cheaper: str
    ) -> Iterator[_Block]:
        """Yields the blocks of an evaluation, and watches it in between; see :func:`watched`."""
        remaining_blocks = iter(blocks)
        no_block = object()
        start = last_line_at = time.perf_counter()
        last_checked = 0
        check_every = 1
        warned = False
        for number in range(1, total + 1):
            block: Any = next(remaining_blocks, no_block)
            if block is not no_block:
                yield block
            if number - last_checked < check_every and number < total:
                continue
            # The interval is counted in blocks, not in seconds, so that all ranks check
            # after the same block.
            last_checked = number
            now = time.perf_counter()
            block_s = self._check_ranks((now - start) / number)
            check_every = max(1, int(LOOK_S / max(block_s, 1e-9)))
            remaining_s = block_s * (total - number)
            if not warned and remaining_s > LONG_S:
                warned = True
                last_line_at = now
                self._say_on_main(
                    f"this evaluation takes about {_readable(remaining_s)}; {cheaper}"
                )
            elif now - last_line_at >= SAY_S:
                last_line_at = now
                self._say_on_main(
                    f"evaluating: {number / total:.0%}, {_readable(remaining_s)} left"
                )
        # There are none, unless total was too low.
        yield from remaining_blocks

    def _check_ranks(self, seconds: float) -> float:
        """Returns the seconds per block of the slowest rank; raises on every rank if one was asked to stop."""
        stop_requested = self._stop is not None and self._stop()
        if self._runtime.world_size > 1:
            slowest = torch.tensor(
                [seconds, float(stop_requested)],
                dtype=torch.float64,
                device=self._runtime.device,
            )
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds = slowest[0].item()
            stop_requested = bool(slowest[1])
        if stop_requested:
            raise EvaluationStoppedError
        return seconds

    def _say_on_main(self, text: str) -> None:
        if self._runtime.is_main:
            self._say(text)


_CURRENT: ContextVar[EvaluationWatch | None] = ContextVar("evaluation", default=None)


@contextmanager
def watching(watch: EvaluationWatch) -> Iterator[None]:
    """Lets ``watch`` follow all evaluations in this context."""
    token = _CURRENT.set(watch)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def watched(
    blocks: Iterable[_Block],
    total: int,
    *,
    cheaper: str = "train.eval_every evaluates less often",
) -> Iterator[_Block]:
    """Yields the blocks of this rank's share of an evaluation, watched by the loop's :class:`EvaluationWatch`.

    All ranks call it. They agree about twice a second, also if their numbers of blocks differ.

    Args:
        blocks: blocks of this rank, at most ``total``.
        total: the most blocks that any rank has, the same on every rank.
        cheaper: advice for a cheaper evaluation, printed if this one takes over a minute.

    Raises:
        EvaluationStoppedError: a rank was asked to stop.
    """
    watch = _CURRENT.get()
    if watch is not None:
        blocks = watch.over(blocks, total, cheaper)
    yield from blocks


def _readable(seconds: float) -> str:
    if seconds >= 90:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s"
