"""Records lie beside the checkpoints: those of a long run are as small as of a short one, and records come back."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.examples import small_model
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.run import (
    CheckpointConfig,
    Position,
    RunCheckpoints,
    read_records,
)

HERE = Runtime()


class Loader:
    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def set_epoch(self, epoch: int) -> None:
        pass

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        return {"step": step}

    def load_state_dict(self, state: Any) -> None:
        self.step = state["step"]


class Watch:
    def state_dict(self) -> dict[str, Any]:
        return {"best": None}

    def load_state_dict(self, state: Any) -> None:
        pass


def run() -> Any:
    """A run that stands still, with a model and an optimizer to save."""
    return SimpleNamespace(
        model=small_model(torch.device("cpu")),
        optimizer=None,
        runtime=HERE,
        at=Position(),
        settle=lambda: None,
        loader=Loader(),
        watch=Watch(),
        window=SimpleNamespace(sums=torch.zeros(3, dtype=torch.float64)),
    )


def record(number: int) -> dict[str, Any]:
    return {"kind": "train", "epoch": 1, "step": number, "loss": number / 7}


def records_of(path: str) -> list[dict[str, Any]] | None:
    """The records of the run that saved a checkpoint."""
    content = json.loads(Path(path, "manifest.json").read_text())["content"]
    return read_records(path, content["records"])


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize(
    "count", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
)
def test_records_do_not_grow_a_checkpoint_and_a_save_writes_the_last_of_them(
    count: int, tmp_path: Path
) -> None:
    checkpointer = Checkpointer(str(tmp_path), HERE, keep=9)
    checkpoints = RunCheckpoints(checkpointer, CheckpointConfig())
    state = run()
    sizes, written = [], []
    for end in (10, count, count + 10):
        history = state.at.history
        history += [record(number) for number in range(len(history), end)]
        state.at.step = end
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("rec*")}
        checkpoints.save(state)
        checkpointer.wait()
        after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("rec*")}
        sizes.append(size_of(Path(checkpointer.folder.path(end))))
        written.append(len(set(after.items()) - set(before.items())))
    assert max(sizes) - min(sizes) < 100, "digits of numbers alone"
    assert written[0] == 1
    assert written[1] == len(after)
    assert written[2] <= 2
    # Any of these checkpoints has the records up to its own step.
    for end in (10, count, count + 10):
        assert records_of(checkpointer.folder.path(end)) == state.at.history[:end]
    checkpointer.close()


def test_a_run_goes_on_with_its_records_and_without_damaged_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointer = Checkpointer(str(tmp_path), HERE, keep=9)
    first = run()
    first.at.history += [record(number) for number in range(5000)]
    first.at.step = 5000
    RunCheckpoints(checkpointer, CheckpointConfig()).save(first)
    checkpointer.wait()
    path = checkpointer.folder.path(5000)
    # A stream thins its records: what a later save writes is another file.
    again = run()
    checkpoints = RunCheckpoints(checkpointer, CheckpointConfig(), resume=path)
    again.at = checkpoints.restore(again)
    assert again.at.history == first.at.history
    again.at.history[:4000] = again.at.history[:4000:2]
    again.at.step += 1
    checkpoints.save(again)
    checkpointer.wait()
    newer = checkpointer.folder.path(5001)
    assert records_of(newer) == again.at.history
    assert records_of(path) is None
    victim = tmp_path / "records-000000.jsonl"
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(data)
    assert records_of(newer) is None
    # The checkpoint itself is whole: it is loaded, and a line says what is left out.
    state = run()
    restored = RunCheckpoints(checkpointer, CheckpointConfig(), resume=path)
    assert restored.restore(state).history == []
    assert "the records before step 5,000 are damaged or missing" in (
        capsys.readouterr().out
    )
    checkpointer.close()
