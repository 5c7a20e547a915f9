"""A run that ends worse than its baseline says so, with the remedy, and so does its bundle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.files import summary
from torchx_apps.jobs import report
from torchx_apps.jobs.exporting import describe_bundle

pytestmark = pytest.mark.unit

CONSTANT = {"auc": 0.5, "log_loss": 0.042}


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.test: dict[str, dict[str, float]] = {}

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)


def trained(
    data: float = 0.0, ranks: float | None = None, seconds: float = 100.0
) -> report.Trained:
    """A training whose steps took 100 s in all."""
    record = {"kind": "train", "rows": 1_000, "rows_per_s": 10.0, "data_wait": data}
    record |= (
        {} if ranks is None else {"ranks_wait": ranks, "waits": [[data, ranks]] * 2}
    )
    return report.Trained(history=[record], seconds=seconds)


def finished(
    path: Path, figures: dict[str, float], of: report.Trained | None = None
) -> None:
    task: Any = SimpleNamespace(
        name="mine", heading="test rows", baseline_name="the same for all", best={}
    )
    tested = report.Tested(figures, CONSTANT, "", [10.0, 30.0])
    report.finish_training(Folder(path), task, tested, of or trained())  # type: ignore[arg-type]


def test_a_model_that_is_worse_than_a_constant_is_told_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(tmp_path, {"auc": 0.61, "log_loss": 0.321, "ne": 7.6, "calibration": 38.0})
    output = capsys.readouterr().out
    warning = report.read_warning(tmp_path)["warning"]
    assert f"warning: {warning}" in output
    assert warning.startswith(
        "this model is worse than the same for all by log_loss (0.3210 against 0.0420); it predicts 38 times the "
        "positives that there are; train longer"
    )
    assert "train.early_stop.metric=log_loss" in warning
    manifest: Any = SimpleNamespace(
        content={"items": {"rows": 5}, "users": None, "index": {"kind": "exact"}},
        parity={"greatest_difference": 0.0, "allowed": 1e-4},
        digest="0" * 64,
        certificate={"warning": warning},
    )
    assert describe_bundle(manifest, tmp_path).startswith(
        f"warning: {warning}\nbundle: "
    )


def test_a_model_that_is_better_is_told_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(tmp_path, {"auc": 0.61, "log_loss": 0.040, "calibration": 1.1})
    assert "warning" not in capsys.readouterr().out
    assert report.read_warning(tmp_path) == {}
    assert report.read_warning(tmp_path / "nothing") == {}


def test_the_last_line_says_where_the_steps_time_went_and_the_picture_gets_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(tmp_path, {"auc": 0.7}, trained(0.1, 0.5, 125.0))
    output = capsys.readouterr().out
    line = (
        "10.0% of the steps' time waiting for data, 50.0% in collectives, 40.0% "
        "computing; the largest rank took 30 MiB"
    )
    assert line in output
    ended = summary(tmp_path)
    assert ended["shares"] == {
        "data": 0.1,
        "ranks": 0.5,
        "compute": pytest.approx(0.4),
    }
    assert ended["peak_memory_mib"] == 30.0
