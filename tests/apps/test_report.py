"""A run that ends worse than its baseline says so, with the remedy, and so does its bundle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchx_apps.jobs import report
from torchx_apps.jobs.exporting import describe_bundle

pytestmark = pytest.mark.unit

CONSTANT = {"auc": 0.5, "log_loss": 0.042}


class Folder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, name: str, text: str) -> None:
        (self._path / name).write_text(text)


def finished(path: Path, figures: dict[str, float]) -> None:
    task: Any = SimpleNamespace(name="mine", asked="test rows", baseline_name="the same for all", best={})
    history = [{"kind": "train", "rows": 10, "rows_per_s": 100.0}]
    report.finish_training(Folder(path), task, figures, CONSTANT, "", history, 1.0, 100.0)  # type: ignore[arg-type]


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
        content={"coverage": {"items": 5}, "users": None},
        parity={"greatest_difference": 0.0},
        digest="0" * 64,
        certificate={"warning": warning},
    )
    assert describe_bundle(manifest, tmp_path).startswith(f"warning: {warning}\nbundle: ")


def test_a_model_that_is_better_is_told_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path, {"auc": 0.61, "log_loss": 0.040, "calibration": 1.1})
    assert "warning" not in capsys.readouterr().out
    assert report.read_warning(tmp_path) == {}
    assert report.read_warning(tmp_path / "nothing") == {}
