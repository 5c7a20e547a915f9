from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from itertools import islice

import pytest

from torchrec_ext.data.loader import epochs
from torchrec_ext.data.loader.epochs import BuiltAhead, prefetched

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
        if thread.name == "torchrec_ext-prefetch"
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


def test_closing_just_before_the_end_does_not_wait_for_ever() -> None:
    iterator = prefetched(iter(range(3)), 1)
    next(iterator)
    # 1 is ready, and the thread waits to hand over 2, after which it has the end to
    # hand over
    time.sleep(0.05)
    closer = threading.Thread(target=iterator.close, daemon=True)  # type: ignore[attr-defined]
    closer.start()
    closer.join(5)
    assert not closer.is_alive()


def test_the_thread_runs_no_further_ahead_than_it_may() -> None:
    built: list[int] = []

    def source() -> Iterator[int]:
        for number in range(100):
            built.append(number)
            yield number

    iterator = prefetched(source(), 2)
    next(iterator)
    time.sleep(0.1)
    assert len(built) <= 4, "one handed out, two ready, one waiting for its place"
    iterator.close()  # type: ignore[attr-defined]


class Clock:
    """Seconds of the caller's thread, in which a batch is built where no thread does, and a step takes longer with one.

    Args:
        build: seconds to build a batch.
        step: seconds of a step.
        beside: seconds of a step beside a thread that builds batches.
    """

    def __init__(self, build: float, step: float, beside: float) -> None:
        self.now, self._build, self._step, self._beside = 0.0, build, step, beside

    def perf_counter(self) -> float:
        return self.now

    def source(self) -> Iterator[int]:
        number = 0
        while True:
            if threading.current_thread().name != "torchrec_ext-prefetch":
                self.now += self._build
            yield number
            number += 1

    def step(self, ahead: BuiltAhead, number: int) -> None:
        turn = number // BuiltAhead.STEPS
        with_thread = (
            (turn % 4 in (1, 2)) if turn < 2 * BuiltAhead.PAIRS else bool(ahead.depth)
        )
        assert with_thread or not threads()
        self.now += self._beside if with_thread else self._step


@pytest.mark.parametrize(("beside", "depth"), [(1.0, 2), (1.1, 2), (1.3, 0), (2.0, 0)])
def test_what_is_faster_is_kept_and_the_batches_are_the_same(
    monkeypatch: pytest.MonkeyPatch, beside: float, depth: int
) -> None:
    clock, ahead = Clock(0.2, 1.0, beside), BuiltAhead(None)
    monkeypatch.setattr(epochs, "time", clock)
    trial = 2 * BuiltAhead.STEPS * BuiltAhead.PAIRS
    for taken, number in enumerate(islice(ahead.of(clock.source()), trial + 40)):
        assert number == taken
        assert ahead.depth == (None if taken < trial else depth)
        clock.step(ahead, number)
    gc.collect()
    assert not threads()


def test_what_is_given_is_not_measured() -> None:
    for given in (0, 3):
        ahead = BuiltAhead(given)
        assert list(ahead.of(iter(range(400)))) == list(range(400))
        assert ahead.depth == given


def test_a_turn_that_the_end_of_an_epoch_cuts_short_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, ahead = Clock(0.2, 1.0, 2.0), BuiltAhead(None)
    monkeypatch.setattr(epochs, "time", clock)
    long = 2 * BuiltAhead.STEPS
    for _ in range(BuiltAhead.PAIRS):
        assert ahead.depth is None
        for length in (0, 5, long - 1, long):  # all but the last tell nothing
            for _ in ahead.of(iter(range(length))):
                clock.now += 1.0
    assert ahead.depth is not None
