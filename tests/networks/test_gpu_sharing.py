"""What is said of processes that share a GPU; and, on a GPU, that a stack trains there as on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.networks.members import SHARED, batch, greatest_difference, network
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.networks.gpu_sharing import gpu_sharing, mps_is_running
from torchrec_ext.networks.optimizer import StackedOptimizer
from torchrec_ext.networks.stack import Stack

CUDA = torch.device("cuda", 0)


@pytest.mark.unit
def test_nothing_is_said_on_the_cpu_or_where_each_has_its_own() -> None:
    assert gpu_sharing(torch.device("cpu"), 4, {}) is None
    assert gpu_sharing(CUDA, 1, {}) is None


@pytest.mark.unit
def test_without_mps_the_remedy_is_told(tmp_path: Path) -> None:
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not mps_is_running(environ)
    said = gpu_sharing(CUDA, 3, environ)
    assert said is not None
    assert said.startswith(
        f"note: 3 processes share cuda:0 without MPS (looked in CUDA_MPS_PIPE_DIRECTORY={tmp_path})"
    )
    assert "nvidia-cuda-mps-control -d" in said


@pytest.mark.unit
def test_with_mps_the_share_of_each_is_told(tmp_path: Path) -> None:
    (tmp_path / "control").touch()
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=33 would give each its part" in str(
        gpu_sharing(CUDA, 3, environ)
    )
    limited = {**environ, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    assert str(gpu_sharing(CUDA, 2, limited)).endswith(
        "each with at most 50 % of the multiprocessors"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_a_stack_learns_the_same_on_a_gpu(kind: Any) -> None:
    config = OptimizerConfig(
        tables=kind,
        dense="adam" if kind == "adagrad" else kind,
        tables_lr=0.05,
        dense_lr=0.02,
    )
    states = []
    for device in (torch.device("cpu"), CUDA):
        stack = Stack(
            {name: network(SHARED, seed=at).to(device) for at, name in enumerate("ab")}
        )
        optimizer = StackedOptimizer(stack, {"a": config, "b": config})
        for step in range(20):
            stack.backward([batch(SHARED, step).to(device)] * 2)
            optimizer.step()
        states.append(
            {name: value.cpu() for name, value in stack.state_of("b").items()}
        )
    assert greatest_difference(*states) < (1e-5 if kind == "sgd" else 1e-3)
