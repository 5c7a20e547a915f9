"""Two ranks on two simulated GPUs over NCCL train as two ranks on CPUs do."""

from pathlib import Path

import pytest
import torch

from tests.contracts import leave_group, run_ranks
from tests.simulated_gpu.laws.training import train
from torchrec_ext.distributed.runtime import Runtime

KINDS = {
    "data_parallel": ("plan.sharding=data_parallel",),
    "table_wise": ("plan.sharding=table_wise",),
    "row_wise": ("plan.sharding=row_wise",),
    "local_sgd": ("sync.mode=local_sgd", "sync.every=4", "plan.sharding=data_parallel"),
    "dynamic_ids": (
        "ids.features.user_id.capacity=100",
        "ids.features.item_id.capacity=90",
        "plan.sharding=row_wise",
    ),
}


def trained(runtime: Runtime, folder: Path, device: str, kind: str) -> list[float]:
    leave_group(runtime)
    losses = train(
        "two_tower",
        folder / device,
        f"device={device}",
        "train.compile=off",
        *KINDS[kind],
    )
    assert (torch.cuda.max_memory_allocated() > 0) == (device == "cuda")
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_losses_on_two_devices_are_those_on_two_cpus(kind: str, tmp_path: Path) -> None:
    losses = [
        run_ranks(trained, 2, tmp_path, device, kind)[0] for device in ("cpu", "cuda")
    ]
    assert len(losses[0]) > 1
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=1e-5)
