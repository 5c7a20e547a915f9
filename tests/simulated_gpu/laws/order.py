"""Two streams touch one memory in an order, or it is found; a training keeps the order."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import simulated_cuda
import torch

from tests.simulated_gpu.laws.training import train
from torchrec_ext.observe.host_copy import HostCopy

PLANS = ("plan.sharding=data_parallel", "plan.sharding=table_wise")


@pytest.fixture
def unordered() -> Iterator[Any]:
    with simulated_cuda.observed() as events:
        yield lambda: [what for kind, what, _ in events if kind == "unordered"]


def test_a_copy_to_the_host_has_values_once_somebody_waits() -> None:
    host = torch.ones(4, device="cuda").to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert host.isnan().all()
    event.synchronize()
    assert host.tolist() == [1.0] * 4


def test_a_host_copy_has_the_values_of_another_device_than_the_current_one() -> None:
    copy = HostCopy(torch.ones(4, device="cuda:1"))
    assert torch.cuda.current_device() == 0
    assert copy.read().tolist() == [1.0] * 4


def test_a_stream_that_does_not_wait_is_found(unordered: Any) -> None:
    side, ones = torch.cuda.Stream(), torch.ones(4, device="cuda")
    with torch.cuda.stream(side):
        twice = ones * 2
    assert unordered() == ["aten::mul reads after a write of aten::fill_"]
    torch.cuda.current_stream().wait_stream(side)
    assert twice.sum().item() == 8
    assert len(unordered()) == 1


def test_memory_that_is_freed_while_another_stream_uses_it_is_found(
    unordered: Any,
) -> None:
    side = torch.cuda.Stream()
    for recorded in (True, False):
        ones = torch.ones(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ones.sum()
        if recorded:
            ones.record_stream(side)
        del ones
        assert unordered() == []
        torch.ones(4, device="cuda")
    assert len(unordered()) == 1
    assert "freed" in unordered()[0]


def test_operands_on_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(4, device="cuda:0") + torch.ones(4, device="cuda:1")
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        torch.ones(4, device="cuda:0") + torch.ones(4)
    assert (torch.ones(4, device="cuda:0").to("cuda:1") + 1).sum().item() == 8


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("compile_", ["off", "require"])
def test_a_training_keeps_the_order(
    plan: str, compile_: str, tmp_path: Path, unordered: Any
) -> None:
    settings = ("device=cuda", "loader.device=cuda", f"train.compile={compile_}", plan)
    train(
        "n_tower",
        tmp_path / "run",
        "optimizer.tables=adagrad",
        "optimizer.tables_l2=0",
        *settings,
    )
    assert unordered() == []
