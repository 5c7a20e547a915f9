"""Two ranks on two simulated GPUs over NCCL train as two ranks on CPUs do."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.contracts import leave_group, run_ranks
from tests.simulated_gpu.laws.training import train
from torchrec_ext.distributed.runtime import Runtime

KINDS = {
    "data_parallel": ("plan.sharding=data_parallel",),
    "table_wise": ("plan.sharding=table_wise",),
    "row_wise": ("plan.sharding=row_wise",),
    "tower_parallel": ("plan.towers=user:0,item:1",),
    "semi_sync": ("sync.mode=semi_sync",),
    "local_sgd": ("sync.mode=local_sgd", "sync.every=4", "plan.sharding=data_parallel"),
}


def trained(runtime: Runtime, folder: Path, device: str) -> dict[str, Any]:
    """Every kind's losses on this rank, or what went wrong."""
    results: dict[str, Any] = {}
    for port, (kind, settings) in zip(leave_group(runtime, groups=len(KINDS)), KINDS.items(), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        try:
            results[kind] = train("two_tower", folder / kind, f"device={device}", "train.compile=off", *settings)
        except AssertionError as error:
            results[kind] = str(error)
    return results


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return {device: run_ranks(trained, 2, folder / device, device, timeout_s=300)[0] for device in ("cpu", "cuda")}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_on_two_devices_are_those_on_two_cpus(kind: str, losses: dict[str, dict[str, Any]]) -> None:
    assert len(losses["cpu"][kind]) > 1, losses["cpu"][kind]
    assert losses["cuda"][kind] == pytest.approx(losses["cpu"][kind], rel=0, abs=1e-5)
