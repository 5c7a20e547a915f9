"""A folder that only some of the ranks see is refused on all of them, before anything is saved."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from tests.contracts import run_ranks
from tests.examples import small_model
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.checkpoint.storage import CheckpointError


def saved_as_on_a_host_of_its_own(
    runtime: Runtime, folder: str, checkpoints: str
) -> str:
    """Saves a step where each rank stands in another folder; what went wrong."""
    home = Path(folder, f"host{runtime.rank}")
    home.mkdir()
    os.chdir(home)
    try:
        checkpointer = Checkpointer(checkpoints, runtime)
        checkpointer.save(1, model_state(small_model(torch.device("cpu"))))
        checkpointer.close()
    except ValueError as error:
        return str(error)
    return "saved"


def test_a_folder_of_each_host_is_refused_on_all_ranks_with_the_remedy(
    tmp_path: Path,
) -> None:
    for told in run_ranks(
        saved_as_on_a_host_of_its_own, 2, str(tmp_path), "runs/a/checkpoints"
    ):
        assert "runs/a/checkpoints': rank 1 cannot see what rank 0 writes" in told
        assert "give a folder that all hosts share: --run_dir" in told
    assert not list(tmp_path.rglob("step-*")), "nothing was saved"
    assert not list(tmp_path.rglob(".shared-*")), "no leftovers"


@pytest.mark.unit
def test_an_address_that_cannot_be_written_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        # as a driver's own error, which is no OSError
        raise RuntimeError("AccessDenied")

    monkeypatch.setattr(MemoryFileSystem, "_open", refuse)
    with pytest.raises(
        CheckpointError,
        match=r"^folder 'memory://x' cannot be written: RuntimeError\(AccessDenied\); check the ",
    ):
        Checkpointer("memory://x", Runtime())
