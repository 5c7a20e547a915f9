"""A trace of some steps: one file for each rank, of the steps that are trained, and nothing else changes."""

import gzip
import json
from pathlib import Path
from typing import Any

import torch

from tests.contracts import gather_state, run_ranks
from tests.examples import META, small_model
from tests.train.test_loop import Batches
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.config import TrainConfig
from torchrec_ext.train.loop import train
from torchrec_ext.train.report.trace import SKIP

STEPS = 2


def trained(runtime: Runtime, folder: str, steps: int) -> dict[str, torch.Tensor]:
    """The weights after two epochs of which some steps are traced."""
    parallel, optimizer = hybrid_parallel(small_model(META), runtime)
    config = TrainConfig(epochs=2, trace_steps=steps)
    train(
        parallel,
        optimizer,
        Batches(runtime, 4),
        runtime,
        config,
        trace_folder=folder,
    )
    return gather_state(parallel) or {}


def test_each_rank_writes_one_trace_of_the_steps_that_are_trained(
    tmp_path: Path,
) -> None:
    traced = run_ranks(trained, 2, str(tmp_path / "trace"), STEPS)[0]
    plain = run_ranks(trained, 2, str(tmp_path / "none"), 0)[0]
    for name, value in plain.items():
        assert torch.equal(traced[name], value), name
    assert not (tmp_path / "none").exists()
    files = sorted((tmp_path / "trace").iterdir())
    assert [path.name.split(".")[0] for path in files] == ["rank-0", "rank-1"]
    for number, path in enumerate(files):
        found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        # For Holistic Trace Analysis, which compares ranks.
        assert found["distributedInfo"]["rank"] == number
        names = [event.get("name", "") for event in found["traceEvents"]]
        steps = {name for name in names if name.startswith("ProfilerStep#")}
        assert steps == {f"ProfilerStep#{SKIP + step}" for step in range(STEPS)}
        assert any(name.startswith("aten::") for name in names)
