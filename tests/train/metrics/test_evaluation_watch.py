"""A watched evaluation says how far it is and what would make it cheaper; an unwatched one says nothing."""

from __future__ import annotations

import pytest

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.metrics import (
    EvaluationStoppedError,
    EvaluationWatch,
    watched,
    watching,
)

pytestmark = pytest.mark.unit


class Clock:
    """Time that passes by ``seconds`` for each block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self._seconds = 0.0, seconds
        monkeypatch.setattr(
            "torchrec_ext.train.metrics.evaluation_watch.time.perf_counter",
            lambda: self.now,
        )

    def blocks(self, count: int) -> list[int]:
        found = []
        for block in watched(range(count), count, cheaper="a product is cheaper"):
            found.append(block)
            self.now += self._seconds
        return found


def test_a_long_evaluation_is_foreseen_after_its_first_block_and_told_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    clock = Clock(monkeypatch, 4.0)
    with watching(EvaluationWatch(Runtime(), say=said.append)):
        assert clock.blocks(30) == list(range(30))
    assert said[0] == "this evaluation takes about 2 min; a product is cheaper"
    # after four blocks and twelve seconds more
    assert said[1] == "evaluating: 13%, 2 min left"
    assert said[-1].startswith("evaluating: 9")
    assert len(said) == 1 + 116 // 12


def test_a_short_one_and_one_that_nobody_watches_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    clock = Clock(monkeypatch, 0.01)
    with watching(EvaluationWatch(Runtime(), say=said.append)):
        assert clock.blocks(500) == list(range(500))
    assert Clock(monkeypatch, 100.0).blocks(3) == [0, 1, 2]
    assert said == []


def test_it_ends_at_the_next_look_after_it_was_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, made = Clock(monkeypatch, 0.1), list[int]()

    def evaluate() -> None:
        for block in watched(range(100), 100):
            made.append(block)
            clock.now += 0.1

    with (
        watching(EvaluationWatch(Runtime(), stop=lambda: len(made) >= 7)),
        pytest.raises(EvaluationStoppedError),
    ):
        evaluate()
    assert 7 <= len(made) <= 12  # it looks twice a second
