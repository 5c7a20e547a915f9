from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from torchrec_ext.data.loader.prefetch import prefetched

pytestmark = pytest.mark.unit


BEFORE: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _of_other_tests() -> None:
    """Threads that another file's tests have left in this process are not counted."""
    BEFORE.update(threading.enumerate())


def threads() -> set[threading.Thread]:
    return {
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("torchrec_ext-prefetch")
    } - BEFORE


def endless() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def failing() -> Iterator[int]:
    yield 0
    raise RuntimeError("row group 3 is damaged")


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_order_is_kept_and_the_thread_ends(depth: int) -> None:
    assert list(prefetched(iter(range(50)), depth)) == list(range(50))
    assert not threads()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_exception_reaches_the_caller_in_its_place(depth: int) -> None:
    iterator = prefetched(failing(), depth)
    assert next(iterator) == 0
    with pytest.raises(RuntimeError, match="row group 3 is damaged"):
        next(iterator)
    assert not threads()


def test_the_thread_dies_when_the_iterator_is_closed_or_forgotten() -> None:
    closed = prefetched(endless(), 2)
    next(closed)
    closed.close()  # type: ignore[attr-defined]
    assert not threads()
    forgotten = prefetched(endless(), 2)
    next(forgotten)
    assert len(threads()) == 1
    del forgotten
    gc.collect()
    assert not threads()


def test_the_thread_runs_no_further_ahead_than_it_may() -> None:
    built: list[int] = []

    def source() -> Iterator[int]:
        for number in range(100):
            built.append(number)
            yield number

    iterator = prefetched(source(), 2)
    next(iterator)
    time.sleep(0.1)
    assert len(built) <= 3, "one handed out, two ready"
    iterator.close()  # type: ignore[attr-defined]
