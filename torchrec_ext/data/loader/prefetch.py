"""prefetched(): a thread builds the next batches while the caller uses this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

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
