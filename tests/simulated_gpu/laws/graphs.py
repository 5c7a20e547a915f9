"""Rules of CUDA graphs: each violation is found, and the project's captures keep all."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import simulated_cuda
import torch
from torch import Tensor

from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.executors import cuda_graph

PINNED = torch.ones(8).pin_memory() if torch.cuda.is_available() else torch.ones(8)


@pytest.fixture
def ones() -> Tensor:
    return torch.ones(8, device="cuda")


def captured(
    step: Callable[[], Any], mode: str = "thread_local"
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            step()
    finally:
        # A capture that failed leaves the generator waiting for its end.
        torch.cuda.default_generators[0].graphsafe_set_state(torch.Generator("cuda:0"))
    return graph


def elsewhere(step: Callable[[], Any]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        step()


def without_end(ones: Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ones.add_(1)


VIOLATIONS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "a value is read": ("_local_scalar_dense", lambda ones: ones.sum().item()),
    "a mask": ("aten::nonzero", lambda ones: ones[ones > 0]),
    "a copy to the host": ("copy to the host", lambda ones: ones.cpu()),
    "a copy from the host": (
        "copy to the device",
        lambda ones: ones.copy_(torch.ones(8)),
    ),
    "a copy from pinned memory": (
        "copy to the device",
        lambda ones: ones.copy_(PINNED, non_blocking=True),
    ),
    "the device is waited for": (
        "cudaDeviceSynchronize",
        lambda ones: torch.cuda.synchronize(),
    ),
    "memory outside of the pool": (
        "outside of the graph's memory pool",
        lambda ones: elsewhere(lambda: ones + 1),
    ),
    "a stream that is not joined": ("unjoined work", without_end),
    "a wait for work outside": (
        "a wait for work outside",
        lambda ones: torch.cuda.current_stream().wait_stream(
            torch.cuda.default_stream()
        ),
    ),
    "a generator that is not registered": (
        "not in capture mode",
        lambda ones: ones.bernoulli_(0.5, generator=torch.Generator("cuda")),
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_found(name: str, ones: Tensor) -> None:
    message, step = VIOLATIONS[name]
    with pytest.raises(RuntimeError) as error:
        captured(lambda: step(ones))
    assert message in f"{error.value} {error.value.__context__}"
    assert ones.tolist() == [1.0] * 8, "what a capture writes is written by its replays"


def test_a_call_of_another_thread_ends_a_capture_of_mode_global_alone(
    ones: Tensor,
) -> None:
    errors: list[Exception] = []

    def pin() -> None:
        try:
            torch.ones(8).pin_memory()
        except RuntimeError as error:
            errors.append(error)

    def step() -> None:
        thread = threading.Thread(target=pin)
        thread.start()
        thread.join()
        ones.add_(1)

    captured(step)
    assert not errors
    with pytest.raises(RuntimeError, match="previous error during capture"):
        captured(step, "global")
    assert "cudaHostAlloc" in str(errors[0])


def test_a_replay_that_reads_freed_memory_is_found(ones: Tensor) -> None:
    given = [torch.ones(8, device="cuda")]
    graph = captured(lambda: ones.add_(given[0]))
    graph.replay()
    assert ones.tolist() == [2.0] * 8
    given.clear()
    with pytest.raises(RuntimeError, match="memory that has been freed"):
        graph.replay()


def test_memory_is_put_back_after_what_a_step_that_waits_has_written(
    ones: Tensor,
) -> None:
    def step(weight: Tensor, given: Tensor) -> list[Tensor]:
        weight.add_(given)
        return [weight * float(weight.sum())]

    weight = torch.zeros(8, device="cuda")
    with (
        simulated_cuda.observed() as events,
        pytest.raises(CannotCaptureError, match="waits for the device"),
    ):
        cuda_graph(step, [weight], [ones])
    assert not weight.any()
    assert [what for kind, what, _ in events if kind == "unordered"] == []


def test_the_projects_graph_keeps_all_rules(ones: Tensor) -> None:
    weight = torch.zeros(8, device="cuda")
    side = torch.cuda.Stream()

    def step(weight: Tensor, given: Tensor) -> list[Tensor]:
        caller = torch.cuda.current_stream()
        side.wait_stream(caller)
        with torch.cuda.stream(side):
            noise = torch.nn.functional.dropout(given, 0.5)
        caller.wait_stream(side)
        noise.record_stream(caller)
        return [weight.add_(noise).sum()]

    # the example is freed
    run = cuda_graph(step, [weight], [torch.ones(8, device="cuda")])
    assert not weight.any()
    with simulated_cuda.observed() as events:
        first, second = run([ones])[0], run([ones])[0]
    assert events == []
    assert 0 < first.item() < second.item() == weight.sum().item()
