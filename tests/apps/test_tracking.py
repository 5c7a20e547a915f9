"""A run in trackers: what was written is read again, by `torchx tracker` too; a tracker that fails ends no run."""

import importlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torchx.tracker.backend.fsspec import create

from torchx_apps.jobs.tracking import Tracking, tracked

RUN = "local_cwd://torchx/train-1"
PARENT = "slurm://torchx/7"
CONFIG = {
    "name": "two_tower",
    "train": {"epochs": 2, "amp": "off"},
    "model": {"widths": (64, 32)},
    "device": None,
}
SETTINGS = {
    "name": "two_tower",
    "train.epochs": 2,
    "train.amp": "off",
    "model.widths": "(64, 32)",
    "device": "None",
}
SUMMARY = {"data": "planted", "test": {"hr@10": 0.625}, "seconds": 1.5}


class Failing:
    """A tracker that fails from the second call on; ``config`` counts the calls, in a file."""

    def __init__(self, config: str) -> None:
        self._count = Path(config)

    def add_metadata(self, run_id: str, **values: object) -> None:
        calls = len(self._count.read_text()) if self._count.exists() else 0
        self._count.write_text("x" * (calls + 1))
        if calls:
            raise ConnectionError("the server is gone\nand a second line")

    def add_artifact(
        self, run_id: str, name: str, path: str, metadata: object = None
    ) -> None:
        pass


def needs_a_package(config: str | None) -> object:
    """A tracker whose package is not installed."""
    return importlib.import_module("no_such_package")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder of a run that has ended."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    (run / "plan.txt").touch()
    return run


@pytest.fixture
def fsspec_config(tmp_path: Path) -> Path:
    (tmp_path / "tracking").mkdir()
    config = tmp_path / "tracking.conf"
    config.write_text(f"protocol=file\nroot_path={tmp_path / 'tracking'}\n")
    return config


def configure(
    monkeypatch: pytest.MonkeyPatch,
    trackers: Mapping[str, Path | str | None],
    **variables: str,
) -> None:
    """The variables that `torchx run` gives a job."""
    from torchx.tracker.api import AppRun, tracker_config_env_var_name

    # TorchX reads the variables once a process.
    AppRun.run_from_env.cache_clear()
    monkeypatch.setenv("TORCHX_TRACKERS", ",".join(trackers))
    monkeypatch.setenv("TORCHX_JOB_ID", RUN)
    for name, config in trackers.items():
        if config is not None:
            monkeypatch.setenv(tracker_config_env_var_name(name), str(config))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def track(folder: Path, config: Mapping[str, Any] = CONFIG) -> None:
    Tracking(folder, config).end()


def test_settings_figures_and_artifacts_of_a_run_are_written(
    folder: Path, fsspec_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, {"fsspec": fsspec_config}, TORCHX_PARENT_RUN_ID=PARENT)
    track(folder)
    tracker = create(str(fsspec_config))
    assert list(tracker.run_ids(parent_run_id=PARENT)) == [RUN]
    figures = {
        "test.hr@10": 0.625,
        "seconds": 1.5,
    }
    assert tracker.metadata(RUN) == {**SETTINGS, **figures, "data": "planted"}
    names = ("checkpoints", "summary.json", "plan.txt")
    paths = {name: str(folder / name) for name in names}
    artifacts = {name: each.path for name, each in tracker.artifacts(RUN).items()}
    assert artifacts == {"run_folder": str(folder), **paths}


def test_a_tracker_that_fails_later_is_one_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, {f"{__name__}:Failing": tmp_path / "calls"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        track(folder)
    (line,) = [str(warning.message) for warning in caught]
    assert line == (
        f"tracker {__name__}:Failing: the server is gone; the job has ended well, its folder has all"
    )
    assert len((tmp_path / "calls").read_text()) == 2


def test_a_tracker_that_cannot_be_reached_at_the_start_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "calls").write_text("x")
    for name, reason in {
        "mlfow": "TorchX finds 0 of 1 by their names",
        "fsspec": "",
        f"{__name__}:needs_a_package": "No module named",
        f"{__name__}:Failing": "the server is gone",
    }.items():
        configure(monkeypatch, {name: tmp_path / "calls"})
        with pytest.raises(ValueError) as caught:
            Tracking(folder, CONFIG)
        line = str(caught.value)
        assert line.startswith(f"tracker {name}: cannot be reached: {reason}")
        assert "\n" not in line
        assert len(line) <= 250


def test_a_job_without_training_has_its_settings_and_figures(
    tmp_path: Path, fsspec_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, {"fsspec": fsspec_config})
    with tracked(tmp_path / "out", {"a": {"b": 1}}, folder="data") as figures:
        figures["rows"] = 7
    assert create(str(fsspec_config)).metadata(RUN) == {"a.b": 1, "rows": 7}
