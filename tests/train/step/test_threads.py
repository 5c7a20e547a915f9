"""The number of threads is measured on steps that count: none is left out, none is made twice."""

import os
from collections.abc import Iterable, Iterator
from unittest import mock

import pytest
import torch

from tests.contracts import run_ranks
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.step.choose import numbers, pin, with_best_threads

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    yield
    torch.set_num_threads(before)
    os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("given", [2, 5, 400])
def test_every_item_is_trained_on_once_in_order_and_the_fastest_number_stays(
    given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(
        "torchrec_ext.train.step.choose.time.perf_counter", lambda: clock[0]
    )

    def run(items: Iterable[int]) -> Iterator[int]:
        for item in items:
            clock[0] += {1: 3e-3, 2: 1e-3, 4: 9e-3}[torch.get_num_threads()]
            yield item

    torch.set_num_threads(1)
    items, said = iter(range(given)), []
    made = list(with_best_threads(items, run, Runtime(), said.append))
    assert [*made, *items] == list(range(given))
    assert len(said) == 1
    if given == 400:
        assert torch.get_num_threads() == 2
        assert said[0].startswith("threads: 2 (a step with 1: ")


def test_what_is_tried_ends_with_all_cores() -> None:
    assert [numbers(cores) for cores in (1, 2, 3, 8)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
    ]


def pinned(runtime: Runtime) -> tuple[list[int], set[int]]:
    return pin(runtime), os.sched_getaffinity(0)


@pytest.mark.launch
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_processes_of_a_host_are_pinned_to_cores_of_their_own() -> None:
    (first, on_first), (second, on_second) = run_ranks(pinned, 2)
    assert set(first) == on_first
    assert set(second) == on_second
    assert not set(first) & set(second)


def pinned_apart(runtime: Runtime) -> list[int]:
    """What a rank of two takes that a launcher has bound to four of eight cores."""
    bound = {4 * runtime.local_rank + core for core in range(4)}
    with mock.patch.object(os, "sched_getaffinity", return_value=bound):
        return pin(runtime)


@pytest.mark.launch
def test_ranks_that_a_launcher_has_bound_keep_all_cores_that_it_gave_them() -> None:
    assert run_ranks(pinned_apart, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_epoch_that_is_over_before_anything_was_measured_leaves_the_number_as_it_was() -> (
    None
):
    torch.set_num_threads(2)
    said: list[str] = []
    # what is slow once takes them all
    assert list(with_best_threads(iter(range(3)), iter, Runtime(), said.append)) == [
        0,
        1,
        2,
    ]
    assert torch.get_num_threads() == 2
    assert said[0].startswith(
        "threads: 2 (as before: the epoch was over before a step could be measured)"
    )
