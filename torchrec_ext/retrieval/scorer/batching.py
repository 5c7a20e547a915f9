"""MicroBatcher: collects concurrent requests in a bounded queue and answers them in batches."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


class QueueFullError(RuntimeError):
    """The queue is full: ``capacity`` requests are already waiting."""

    def __init__(self, capacity: int) -> None:
        super().__init__(
            f"{capacity} requests wait already; come back later, or give the server more workers"
        )
        self.capacity = capacity


@dataclass(frozen=True)
class _Waiting(Generic[RequestT, AnswerT]):
    request: RequestT
    answer: Future[AnswerT]
    cost_s: float


class MicroBatcher(Generic[RequestT, AnswerT]):
    """Answers requests in batches, in a thread of its own.

    The next batch collects while one runs, so batches grow with the load and a lone caller waits for nobody.
    ``max_wait_ms`` makes every batch wait for more requests. This pays only if a further request costs next to nothing.
    If each request costs as much as the first, limit a batch by ``max_cost_s``. Requests without cost overtake those
    postponed to the next batch.

    Args:
        answer: function from a batch to one answer each, in order. If an answer is an exception, the caller's future
            raises it.
        max_batch: requests in one batch, 1 or more.
        max_wait_ms: milliseconds that the first request of a batch waits for others, 0 or more.
        capacity: requests that may wait, 1 or more.
        cost_s: estimates the seconds that a request adds to its batch; 0 by default.
        max_cost_s: most seconds of cost in a batch of two or more requests.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> batcher = MicroBatcher(lambda asked: [2 * number for number in asked])
        >>> batcher.submit(21).result()
        42
        >>> batcher.close()
    """

    def __init__(
        self,
        answer: Callable[[Sequence[RequestT]], Sequence[AnswerT | Exception]],
        *,
        max_batch: int = 32,
        max_wait_ms: float = 0.0,
        capacity: int = 256,
        cost_s: Callable[[RequestT], float] = lambda _: 0.0,
        max_cost_s: float = math.inf,
    ) -> None:
        for name, value, least in (
            ("max_batch", max_batch, 1),
            ("max_wait_ms", max_wait_ms, 0),
            ("capacity", capacity, 1),
        ):
            if not value >= least:
                raise ValueError(f"{name}={value}: must be {least} or more")
        self._answer = answer
        self._max_batch = max_batch
        self._max_wait_s = max_wait_ms / 1e3
        self._capacity = capacity
        self._cost_s = cost_s
        self._max_cost_s = max_cost_s
        self._waiting: deque[_Waiting[RequestT, AnswerT]] = deque()
        self._running_s = 0.0
        # One condition for every change: a request came, or the batcher closes.
        self._change = threading.Condition()
        self._closing = False
        self._batch_start: float | None = None
        self._thread = threading.Thread(
            target=self._run, name="micro-batcher", daemon=True
        )
        self._thread.start()

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    @property
    def backlog_s(self) -> float:
        """Estimated seconds for the waiting and running requests."""
        with self._change:
            return self._running_s + sum(
                each.cost_s for each in self._waiting if not each.answer.cancelled()
            )

    @property
    def busy_s(self) -> float:
        """Running time of the current batch in seconds; 0 without one."""
        # Without the lock, and read once, because the thread sets it to None between
        # two reads.
        start = self._batch_start
        return 0.0 if start is None else time.monotonic() - start

    def submit(self, request: RequestT) -> Future[AnswerT]:
        """Queues a request and returns a future of its answer. Cancel the future to remove a waiting request.

        Raises:
            QueueFullError: ``capacity`` requests are waiting.
            RuntimeError: the batcher is closed.
        """
        future: Future[AnswerT] = Future()
        # Outside of the lock: an estimate must not hold up the batches.
        cost_s = self._cost_s(request)
        with self._change:
            if self._closing:
                raise RuntimeError("the batcher is closed")
            # Cancelled requests still take room: clear them out before refusing a live
            # one.
            if len(self._waiting) >= self._capacity:
                self._waiting = deque(
                    each for each in self._waiting if not each.answer.cancelled()
                )
            if len(self._waiting) >= self._capacity:
                raise QueueFullError(self._capacity)
            self._waiting.append(_Waiting(request, future, cost_s))
            self._change.notify()
        return future

    def close(self) -> None:
        """Answers the waiting requests, then ends the thread."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next():
            requests = [each.request for each in batch]
            futures = [each.answer for each in batch]
            # Read by busy_s in another thread, to notice a batch that hangs.
            self._batch_start = time.monotonic()
            answers = self._answer_batch(requests)
            self._batch_start = None
            for future, answer in zip(futures, answers, strict=True):
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def _answer_batch(
        self, requests: Sequence[RequestT]
    ) -> Sequence[AnswerT | Exception]:
        """Answers a batch. If it fails, answers one by one, so that each request gets its own error."""
        try:
            answers = self._answer(requests)
            assert len(answers) == len(requests), "one answer each"
        # Whatever it is: an error of one request must not end the thread, on which all
        # others wait.
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [self._answer_batch([each])[0] for each in requests]
        return answers

    def _next(self) -> list[_Waiting[RequestT, AnswerT]]:
        """Waits for the next batch; empty at the end."""
        with self._change:
            self._running_s = 0.0
            while True:
                self._change.wait_for(lambda: self._waiting or self._closing)
                if self._max_wait_s and not self._closing:
                    end = time.monotonic() + self._max_wait_s
                    full = lambda: (  # noqa: E731
                        len(self._waiting) >= self._max_batch or self._closing
                    )
                    self._change.wait_for(
                        full, timeout=max(0.0, end - time.monotonic())
                    )
                # The first requests that fit into one batch, without the cancelled
                # ones: none, if all of them were.
                batch: list[_Waiting[RequestT, AnswerT]] = []
                later: deque[_Waiting[RequestT, AnswerT]] = deque()
                while self._waiting and len(batch) < self._max_batch:
                    waiting = self._waiting.popleft()
                    if (
                        batch
                        and waiting.cost_s
                        and self._running_s + waiting.cost_s > self._max_cost_s
                    ):
                        later.append(waiting)
                    elif waiting.answer.set_running_or_notify_cancel():
                        batch.append(waiting)
                        self._running_s += waiting.cost_s
                # In front, so that a request that did not fit is the first of the next
                # batch.
                self._waiting = later + self._waiting
                if batch or (self._closing and not self._waiting):
                    return batch
