"""A run in trackers: what was written is read again, by `torchx tracker` too; a tracker that fails ends no run."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torchx.cli.cmd_tracker import CmdTracker
from torchx.tracker.backend.fsspec import create

from tests.launch.jobs import torchx_run
from tests.small_sets import write_ml_100k
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
EVAL = [
    {"kind": "train", "epoch": 1, "step": 4, "loss": 0.5},
    {"kind": "eval", "epoch": 1, "step": 4, "hr@10": 0.25},
    {"kind": "eval", "epoch": 2, "step": 8, "hr@10": 0.5},
]
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
    return importlib.import_module("mlflow")


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


def torchx_tracker(*words: str) -> None:
    parser = argparse.ArgumentParser(prog="torchx tracker")
    CmdTracker().add_arguments(parser)
    options = parser.parse_args(words)
    options.func(options)


def track(folder: Path, config: Mapping[str, Any] = CONFIG) -> None:
    tracking = Tracking.start(folder, config)
    for record in EVAL:
        tracking.log(record)
    tracking.end()


def test_torchx_tracker_lists_runs_settings_figures_and_artifacts(
    folder: Path,
    fsspec_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure(monkeypatch, {"fsspec": fsspec_config}, TORCHX_PARENT_RUN_ID=PARENT)
    track(folder)

    def shown(*words: str) -> dict[str, str]:
        torchx_tracker("list", *words)
        rows = [
            line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:]
        ]
        return {key: (rest[0].strip() if rest else "") for key, *rest in rows}

    assert set(shown("jobs")) == {RUN}
    assert set(shown("jobs", "--parent-run-id", PARENT)) == {RUN}
    assert not shown("jobs", "--parent-run-id", "other")
    figures = {
        "eval.hr@10 at step 4": 0.25,
        "eval.hr@10 at step 8": 0.5,
        "test.hr@10": 0.625,
        "seconds": 1.5,
    }
    torchx_tracker("list", "metadata", RUN)
    lines = {
        " ".join(line.split()) for line in capsys.readouterr().out.splitlines()[2:]
    }
    assert lines == {
        f"{key} {value}"
        for key, value in {**SETTINGS, **figures, "data": "planted"}.items()
    }
    paths = {
        name: str(folder / name) for name in ("checkpoints", "summary.json", "plan.txt")
    }
    assert shown("artifacts", RUN) == {"run_folder": str(folder), **paths}


def test_a_tracker_that_fails_later_is_one_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, {f"{__name__}:Failing": tmp_path / "calls"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        track(folder)
    (line,) = [str(warning.message) for warning in caught]
    assert line == (
        f"tracker {__name__}:Failing: the server is gone; the run goes on, and no tracker hears more of it"
    )
    assert len((tmp_path / "calls").read_text()) == 2


@pytest.mark.parametrize(
    ("name", "config", "line"),
    [
        (
            "mlfow",
            None,
            "tracker mlfow: TorchX finds 0 of 1; [torchx:tracker] of .torchxconfig may name ",
        ),
        ("fsspec", "nowhere.conf", "tracker fsspec: cannot be reached: "),
        (
            "fsspec",
            "no_root.conf",
            "tracker fsspec: cannot be reached: Expects FSSpec tracker directory '/nowhere' to ",
        ),
        (
            f"{__name__}:needs_a_package",
            None,
            f"tracker {__name__}:needs_a_package: needs the package mlflow: pip install",
        ),
        (
            f"{__name__}:Failing",
            "calls",
            f"tracker {__name__}:Failing: cannot be reached: the server is gone; correct ",
        ),
    ],
)
def test_a_tracker_that_cannot_be_reached_at_the_start_is_one_line(
    name: str,
    config: str | None,
    line: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    Path("no_root.conf").write_text("protocol=file\nroot_path=/nowhere\n")
    Path("calls").write_text("x")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    configure(monkeypatch, {name: config})
    with pytest.raises(ValueError) as caught:
        Tracking.start(folder, CONFIG)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_run_that_nobody_tracks_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHX_TRACKERS", raising=False)
    (folder / "summary.json").unlink()  # as of a run that diverged
    track(folder)


PLANTED = {
    "data.name": "planted",
    "data.users": 60,
    "data.items": 50,
    "data.history_length": 5,
    "train.epochs": 1,
}


@pytest.mark.launch
@pytest.mark.slow
def test_every_member_of_a_job_is_a_run(tmp_path: Path, fsspec_config: Path) -> None:
    (tmp_path / ".torchxconfig").write_text(
        f"[torchx:tracker]\nfsspec =\n[tracker:fsspec]\nconfig = {fsspec_config}\n"
    )
    flags = {**PLANTED, "train.compile": "off", "run_dir": "out"}
    given = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    grid = ("--vary", "train.seed", "0", "1", "--", *given)
    done = torchx_run(tmp_path, "rec.train.networks", *grid)
    assert done.returncode == 0, done.stdout + done.stderr
    tracker = create(str(fsspec_config))
    runs = sorted(tracker.run_ids())
    assert [run.rpartition("/")[2] for run in runs] == ["seed=0", "seed=1"]
    assert len({run.rpartition("/")[0] for run in runs}) == 1
    for seed, run in enumerate(runs):
        folder = tmp_path / "out" / f"seed={seed}"
        summary = json.loads((folder / "summary.json").read_text())
        known = tracker.metadata(run)
        assert known["train.seed"] == seed
        assert known["test.hr@10"] == summary["test"]["hr@10"]
        assert tracker.artifacts(run)["run_folder"].path == str(folder)


@pytest.mark.slow
@pytest.mark.launch
def test_preprocessing_training_and_export_are_runs(
    tmp_path: Path, fsspec_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ml_100k(tmp_path)
    configure(monkeypatch, {"fsspec": fsspec_config}, OMP_NUM_THREADS="1")
    out = tmp_path / "out"
    data, run, bundle = (str(out / name) for name in ("data", "run", "bundle"))
    commands: dict[str, list[str]] = {
        "preprocess": [f"--config.folder={tmp_path / 'ml-100k'}", f"--out={data}"],
        "train": [
            *("--recipe=stream", f"--run_dir={run}", f"--data.name={data}"),
            *("--train.epochs=1", "--train.compile=off"),
        ],
        "export": [run, f"--out={bundle}"],
        "embed": [
            *(bundle, f"--out={out / 'vectors'}", "--tower=candidate"),
            *(f"--catalogue={data}/raw/items.parquet", "--id=item_id"),
        ],
    }
    for app, flags in commands.items():
        done = subprocess.run(
            [sys.executable, "-m", f"torchx_apps.{app}", *flags],
            env={**os.environ, "TORCHX_JOB_ID": f"{RUN}/{app}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    tracker = create(str(fsspec_config))
    assert set(tracker.run_ids()) == {f"{RUN}/{app}" for app in commands}

    def written(name: str) -> Any:
        return json.loads((out / name).read_text())

    known = {app: tracker.metadata(f"{RUN}/{app}") for app in commands}
    summary = written("data/summary.json")
    for name in ("rows", "vocab", "missing"):
        assert summary[name]
        figures = {key: known["preprocess"][f"{name}.{key}"] for key in summary[name]}
        assert figures == summary[name]
    assert known["train"]["test.auc"] == written("run/summary.json")["test"]["auc"]
    records = (out / "run/metrics.jsonl").read_text().splitlines()
    for record in (each for each in map(json.loads, records) if each["kind"] == "eval"):
        assert known["train"][f"eval.auc at step {record['step']}"] == record["auc"]
    manifest = written("bundle/manifest.json")
    assert known["export"]["bundle.items"] == manifest["content"]["items"]["rows"]
    expected = {"preprocess": ("data", data), "train": ("run_folder", run)}
    expected |= {"export": ("bundle", bundle), "embed": ("store", str(out / "vectors"))}
    for app, (name, path) in expected.items():
        assert tracker.artifacts(f"{RUN}/{app}")[name].path == path


def test_a_job_that_fails_is_a_run_with_its_error(
    tmp_path: Path, fsspec_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, {"fsspec": fsspec_config})
    with (
        pytest.raises(ValueError, match="no such column"),
        tracked(tmp_path / "out", {"a": {"b": 1}}, folder="data"),
    ):
        raise ValueError("no such column: user")
    assert create(str(fsspec_config)).metadata(RUN) == {
        "a.b": 1,
        "error": "no such column: user",
    }
