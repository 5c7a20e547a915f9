"""Micro-batches: everyone gets the own answer, together where they come together, and no more wait than may."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError

import pytest

from torchrec_ext.retrieval.scorer.batching import MicroBatcher, QueueFullError

pytestmark = pytest.mark.unit


class Slow:
    """Doubles numbers, a batch at a time, when it is let."""

    def __init__(self) -> None:
        self.let, self.begun = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, asked: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(asked))
        self.begun.set()
        self.let.wait(10)
        return [ValueError(f"{one} is odd") if one % 2 else 2 * one for one in asked]


def test_what_comes_while_a_batch_runs_goes_together_and_each_gets_its_own() -> None:
    slow = Slow()
    batcher = MicroBatcher(slow, max_batch=3)
    first = batcher.submit(0)
    assert slow.begun.wait(10)
    others = [batcher.submit(number) for number in (2, 3, 4, 6)]
    assert len(batcher) == 4
    slow.let.set()
    assert [
        future.result(10) for future in (first, others[0], others[2], others[3])
    ] == [0, 4, 8, 12]
    with pytest.raises(ValueError, match="3 is odd"):
        others[1].result(10)
    batcher.close()
    assert slow.batches == [[0], [2, 3, 4], [6]]


def test_a_full_queue_refuses_and_one_who_went_away_makes_room() -> None:
    slow = Slow()
    batcher = MicroBatcher(slow, capacity=2)
    first = batcher.submit(0)
    assert slow.begun.wait(10)
    gone, stays = batcher.submit(2), batcher.submit(4)
    with pytest.raises(QueueFullError, match=r"^2 requests wait already"):
        batcher.submit(6)
    assert gone.cancel()
    late = batcher.submit(8)
    slow.let.set()
    assert [first.result(10), stays.result(10), late.result(10)] == [0, 8, 16]
    with pytest.raises(CancelledError):
        gone.result(10)
    batcher.close()
    assert slow.batches == [[0], [4, 8]]


def test_a_wait_gathers_a_batch_and_ends_early_when_it_is_full() -> None:
    slow = Slow()
    slow.let.set()
    batcher = MicroBatcher(slow, max_batch=2, max_wait_ms=60_000)
    start = time.monotonic()
    assert [future.result(30) for future in [batcher.submit(2), batcher.submit(4)]] == [
        4,
        8,
    ]
    assert time.monotonic() - start < 30
    assert slow.batches == [[2, 4]]
    batcher.close()


def test_a_batch_that_fails_as_a_whole_tells_all_and_the_next_is_answered() -> None:
    answers = iter([RuntimeError("out of memory"), [1]])

    def answer(asked: Sequence[int]) -> list[int | Exception]:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    batcher = MicroBatcher(answer)
    with pytest.raises(RuntimeError, match="out of memory"):
        batcher.submit(1).result(10)
    assert batcher.submit(2).result(10) == 1
    batcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit(3)


def test_a_request_that_fails_its_batch_is_the_only_one_that_fails() -> None:
    slow = Slow()

    def answer(asked: Sequence[int]) -> Sequence[int]:
        slow(asked)
        return [12 // each for each in asked]

    batcher = MicroBatcher(answer)
    first = batcher.submit(1)
    assert slow.begun.wait(10)
    rest = [batcher.submit(number) for number in (2, 0, 3)]
    slow.let.set()
    assert [first.result(10), rest[0].result(10), rest[2].result(10)] == [12, 6, 4]
    with pytest.raises(ZeroDivisionError):
        rest[1].result(10)
    batcher.close()


@pytest.mark.parametrize(
    ("name", "value"), [("max_batch", 0), ("max_wait_ms", -1), ("capacity", 0)]
)
def test_a_number_out_of_range_is_told(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value}: must be"):
        MicroBatcher(lambda asked: asked, **{name: value})  # type: ignore[arg-type]


def test_how_long_a_batch_has_been_running_is_told() -> None:
    slow = Slow()
    batcher = MicroBatcher(slow)
    assert batcher.busy_s == 0
    asked = batcher.submit(2)
    assert slow.begun.wait(10)
    first = batcher.busy_s
    assert 0 < first < batcher.busy_s
    slow.let.set()
    asked.result(10)
    batcher.close()
    assert batcher.busy_s == 0
