"""Towers on streams of their own: the same results, the order of waits, and on a GPU two towers at the same time."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.examples import batches, gradients, small_model
from torchrec_ext.distributed.streams import TowerStreams, on_streams
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.train.report.trace import _named_in_trace, overlap, read_spans

pytestmark = pytest.mark.unit


def small(device: torch.device) -> TowerModel:
    return small_model().to(device)


def test_outputs_and_gradients_are_those_of_one_stream(device: torch.device) -> None:
    (batch,) = batches(1)
    batch = batch.to(device)
    alone = gradients(small(device), batch)
    model = small(device)
    outcome = on_streams(model, device)
    assert isinstance(outcome, str) == (device.type == "cpu")
    logits, results = gradients(model, batch)
    torch.testing.assert_close(logits, alone[0])
    assert results.keys() == alone[1].keys()
    for name, gradient in results.items():
        torch.testing.assert_close(gradient, alone[1][name])


def test_a_cpu_says_that_it_has_none() -> None:
    model = small_model()
    assert (
        on_streams(model, torch.device("cpu"))
        == "streams: the towers run one after the other: cpu has no streams"
    )
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )
    assert "no two towers" in str(
        on_streams(torch.nn.Linear(2, 2), torch.device("cuda"))
    )


class Cuda:
    """Streams by name that write down who waits for whom; to wait on the host is not among what they can do."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.names = itertools.chain(["user", "item"])
        self.current = self.Stream("caller")

    def Stream(self, name: str | None = None) -> Any:  # noqa: N802 -- torch's name
        cuda, label = self, name or next(self.names)

        class Made:
            def wait_stream(self, other: Any) -> None:
                cuda.log.append(f"{label} waits for {other}")

            def __str__(self) -> str:
                return label

        return Made()

    def current_stream(self) -> Any:
        return self.current

    def set_stream(self, stream: Any) -> None:
        self.current = stream
        self.log.append(f"on {stream}")


def test_no_tower_waits_for_another_and_the_caller_waits_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, model = Cuda(), small_model()
    handed: list[str] = []
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: handed.append(str(stream))
    )
    streams = TowerStreams(model.towers, cuda)  # type: ignore[arg-type]
    (batch,) = batches(1)
    loss, _ = model(batch)
    forward = [
        *("user waits for caller", "on user", "on caller"),
        *("item waits for caller", "on item", "on caller"),
        *("caller waits for user", "caller waits for item"),
    ]
    assert cuda.log == forward
    assert handed == ["caller", "caller"], (
        "the allocator knows that the outputs are read there"
    )
    loss.backward()
    assert set(cuda.log[len(forward) :]) == {
        "caller waits for user",
        "caller waits for item",
    }
    cuda.log.clear()
    streams.remove()
    model(batch)
    assert cuda.log == []


def test_a_tower_that_raises_leaves_the_callers_stream() -> None:
    cuda, model = Cuda(), small_model()
    TowerStreams(model.towers, cuda)  # type: ignore[arg-type]
    model.towers["user"].mlp.register_forward_hook(lambda *_: 1 / 0)  # type: ignore[union-attr]
    (batch,) = batches(1)
    with pytest.raises(ZeroDivisionError):
        model(batch)
    assert str(cuda.current) == "caller"


def at_once(model: TowerModel, folder: Path) -> float:
    """The share of towers' time in which both ran, by the profiler's trace, each delayed for some ms on the GPU."""
    (batch,) = batches(1)
    batch = batch.to(torch.device("cuda"))
    for tower in model.towers.values():
        tower.mlp.register_forward_pre_hook(lambda *_: torch.cuda._sleep(20_000_000))  # type: ignore[union-attr]
    model(batch)
    handles = [
        handle
        for name, tower in model.towers.items()
        for handle in _named_in_trace(name, tower)
    ]
    with torch.profiler.profile() as profile:
        model(batch)
        torch.cuda.synchronize()
    for handle in handles:
        handle.remove()
    profile.export_chrome_trace(str(folder / "trace.json"))
    return overlap(
        [read_spans(json.loads((folder / "trace.json").read_text())["traceEvents"])]
    )["towers_at_once"]


@pytest.mark.gpu
def test_a_trace_shows_two_towers_at_the_same_time(tmp_path: Path) -> None:
    device = torch.device("cuda")
    assert at_once(small(device), tmp_path) == 0
    beside = small(device)
    assert isinstance(on_streams(beside, device), TowerStreams)
    assert at_once(beside, tmp_path) > 0.7
