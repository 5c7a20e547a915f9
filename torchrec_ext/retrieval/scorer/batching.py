"""MicroBatcher: what concurrent callers ask for goes through one function together; the queue before it is bounded."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


class QueueFullError(RuntimeError):
    """As many callers wait as may; ``capacity`` says how many."""

    def __init__(self, capacity: int) -> None:
        super().__init__(f"{capacity} requests wait already; come back later, or give the server more workers")
        self.capacity = capacity


@dataclass(frozen=True)
class _Waiting(Generic[Asked, Answered]):
    asked: Asked
    answer: Future[Answered]
    cost_s: float


class MicroBatcher(Generic[Asked, Answered]):
    """A thread that answers in batches.

    While one batch runs, the next collects, so batches grow with the load and a lone caller waits for nobody.
    ``max_wait_ms`` makes every batch wait for company; it pays only where one more in a batch costs next to nothing.
    Where one more costs as much as the first, ``max_cost_s`` ends the batch: what costs nothing passes by those that
    wait for the next.

    Args:
        answer: from a batch to one answer each, in order; an answer that is an exception is raised where it was asked
            for.
        max_batch: requests that go together; 1 or more.
        max_wait_ms: how long the first of a batch waits for others; 0 or more.
        capacity: requests that may wait; 1 or more.
        cost_s: estimate of the seconds that a request takes of its batch; 0 where not given.
        max_cost_s: of a batch, which has one request at least.

    Raises:
        ValueError: one of these is out of range.

    Example:
        >>> batcher = MicroBatcher(lambda asked: [2 * number for number in asked])
        >>> batcher.submit(21).result()
        42
        >>> batcher.close()
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Asked]], Sequence[Answered | Exception]],
        *,
        max_batch: int = 32,
        max_wait_ms: float = 0.0,
        capacity: int = 256,
        cost_s: Callable[[Asked], float] = lambda _: 0.0,
        max_cost_s: float = math.inf,
    ) -> None:
        for name, value, least in (
            ("max_batch", max_batch, 1),
            ("max_wait_ms", max_wait_ms, 0),
            ("capacity", capacity, 1),
        ):
            if not value >= least:
                raise ValueError(f"{name}={value}: must be {least} or more")
        self._answer, self._max_batch, self._max_wait_s, self._capacity = answer, max_batch, max_wait_ms / 1e3, capacity
        self._cost_s, self._max_cost_s = cost_s, max_cost_s
        self._waiting: deque[_Waiting[Asked, Answered]] = deque()
        self._running_s = 0.0
        self._change = threading.Condition()
        self._closing = False
        self._begun: float | None = None
        self._thread = threading.Thread(target=self._run, name="micro-batcher", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def backlog_s(self) -> float:
        """Estimate of the seconds that what waits, and what runs, takes."""
        with self._change:
            return self._running_s + sum(one.cost_s for one in self._waiting if not one.answer.cancelled())

    @property
    def busy_s(self) -> float:
        """For how many seconds the batch that runs now has been running; 0 where none is."""
        begun = self._begun
        return 0.0 if begun is None else time.monotonic() - begun

    def submit(self, asked: Asked) -> Future[Answered]:
        """The answer to come. Cancelling it while it waits takes it out of the queue.

        Raises:
            QueueFullError: as many wait as may.
            RuntimeError: the batcher is closed.
        """
        future: Future[Answered] = Future()
        cost_s = self._cost_s(asked)
        with self._change:
            if self._closing:
                raise RuntimeError("the batcher is closed")
            if len(self._waiting) >= self._capacity:
                self._waiting = deque(one for one in self._waiting if not one.answer.cancelled())
            if len(self._waiting) >= self._capacity:
                raise QueueFullError(self._capacity)
            self._waiting.append(_Waiting(asked, future, cost_s))
            self._change.notify()
        return future

    def close(self) -> None:
        """Answers what waits, then ends."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next():
            asked, futures = [one.asked for one in batch], [one.answer for one in batch]
            self._begun = time.monotonic()
            try:
                answers: Sequence[Answered | Exception] = self._answer(asked)
                assert len(answers) == len(asked), "one answer each"
            except Exception as error:
                answers = [error] * len(asked)
            self._begun = None
            for future, answer in zip(futures, answers, strict=True):
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def _next(self) -> list[_Waiting[Asked, Answered]]:
        """The next batch of those that still want an answer, or nothing at the end."""
        with self._change:
            self._running_s = 0.0
            while True:
                self._change.wait_for(lambda: self._waiting or self._closing)
                if self._max_wait_s and not self._closing:
                    end = time.monotonic() + self._max_wait_s
                    full = lambda: len(self._waiting) >= self._max_batch or self._closing  # noqa: E731
                    self._change.wait_for(full, timeout=max(0.0, end - time.monotonic()))
                if (batch := self._taken()) or (self._closing and not self._waiting):
                    return batch

    def _taken(self) -> list[_Waiting[Asked, Answered]]:
        """Out of the queue, the first of those that fit into one batch."""
        batch: list[_Waiting[Asked, Answered]] = []
        left: deque[_Waiting[Asked, Answered]] = deque()
        while self._waiting and len(batch) < self._max_batch:
            one = self._waiting.popleft()
            if batch and one.cost_s and self._running_s + one.cost_s > self._max_cost_s:
                left.append(one)
            elif one.answer.set_running_or_notify_cancel():
                batch.append(one)
                self._running_s += one.cost_s
        self._waiting = left + self._waiting
        return batch
