"""prefetched(): the next batches are built by a thread while the caller uses this one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")
_END = object()


def prefetched(source: Iterator[T], depth: int) -> Iterator[T]:
    """What ``source`` yields, in the same order, up to ``depth`` elements ahead of the caller.

    An exception in the thread is raised in the caller, in its place in the order and without waiting for a timeout. The thread ends
    when the iterator is exhausted, closed or garbage-collected.

    Args:
        source: is advanced in the thread only.
        depth: elements kept ready; 0 means no thread.
    """
    if not depth:
        yield from source
        return
    ready: queue.Queue[tuple[object, BaseException | None]] = queue.Queue(maxsize=depth)
    stop = threading.Event()
    thread = threading.Thread(target=_fill, args=(source, ready, stop), name="torchrec_ext-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            element, error = ready.get()
            if error is not None:
                raise error
            if element is _END:
                return
            yield element  # type: ignore[misc]
    finally:
        stop.set()
        while thread.is_alive():  # it may be waiting to hand over its last element, and then the end
            while not ready.empty():
                ready.get_nowait()
            thread.join(0.001)


def _fill(source: Iterator[T], ready: queue.Queue[tuple[object, BaseException | None]], stop: threading.Event) -> None:
    try:
        for element in source:
            if stop.is_set():
                return
            ready.put((element, None))
        ready.put((_END, None))
    except BaseException as error:  # the caller decides what to do with it
        ready.put((None, error))
