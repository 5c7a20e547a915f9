"""What a run leaves on disk, and how an unusable folder is told."""

import json
import sys
from pathlib import Path

import pytest

from torchrec_ext.train.report.progress import RunFolder, RunFolderError

pytestmark = pytest.mark.unit

RECORDS = [
    {
        "kind": "train",
        "epoch": 0,
        "step": 5,
        "loss": 0.7,
        "rows": 80,
        "rows_per_s": 1000.0,
    },
    {"kind": "eval", "epoch": 0, "step": 5, "auc": 0.6, "hr@10": 0.2},
    {
        "kind": "train",
        "epoch": 1,
        "step": 10,
        "loss": 0.5,
        "rows": 80,
        "rows_per_s": 1200.0,
    },
    {"kind": "eval", "epoch": 1, "step": 10, "auc": 0.7, "hr@10": 0.3},
]


def events(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: {event.step: event.value for event in found.Scalars(tag)}
        for tag in found.Tags()["scalars"]
    }


def test_a_run_can_be_read_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b", {"seed": 3, "path": Path("x")})
    for record in RECORDS:
        folder.log(record)
        assert (
            json.loads((folder.path / "metrics.jsonl").read_text().splitlines()[-1])
            == record
        ), "not later than it is known"
    folder.write("plan.txt", "every rank")
    folder.close()
    assert json.loads((folder.path / "config.json").read_text()) == {
        "seed": 3,
        "path": "x",
    }
    assert [
        json.loads(line)
        for line in (folder.path / "metrics.jsonl").read_text().splitlines()
    ] == RECORDS
    assert (folder.path / "plan.txt").read_text() == "every rank\n"
    found = events(folder.path / "tensorboard")
    assert found["train/loss"] == {5: pytest.approx(0.7), 10: pytest.approx(0.5)}
    assert found["eval/hr@10"] == {5: pytest.approx(0.2), 10: pytest.approx(0.3)}


def test_a_folder_with_another_run_is_left_alone(tmp_path: Path) -> None:
    RunFolder(tmp_path, {"first": True}).close()
    with pytest.raises(
        RunFolderError, match=f"run folder '{tmp_path}' holds another run .*--run_dir"
    ):
        RunFolder(tmp_path, {"second": True})
    assert json.loads((tmp_path / "config.json").read_text()) == {"first": True}
    RunFolder(tmp_path, {"restarted": True}, replace=True).close()
    assert json.loads((tmp_path / "config.json").read_text()) == {"restarted": True}


def test_a_missing_extra_leaves_the_folder_to_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(
            RunFolderError, match=r"pip install 'torchrec-ext\[report\]'"
        ):
            RunFolder(tmp_path / "run", {})
    RunFolder(tmp_path / "run", {}).close()


def test_every_line_is_json_even_if_no_step_had_a_loss(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {})
    record = {**RECORDS[0], "loss": float("nan")}
    folder.log(record)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse) == {**record, "loss": None}
    folder.close()
