"""The quality benchmark: what it asks for exists, what it computes, and that it goes on where it was killed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torchx_apps.config import with_settings
from torchx_apps.recipes.by_name import load_recipe

ROOT = Path(__file__).parents[1]
SPEC: dict[str, Any] = json.loads((ROOT / "benchmarks" / "quality.json").read_text())
ROWS = {name: row for name, row in SPEC.items() if name != "quick"} | SPEC["quick"]

pytestmark = pytest.mark.unit


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "quality", ROOT / "benchmarks" / "quality.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "quality", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDERS", tmp_path / "runs")
    return module


@pytest.mark.parametrize("name", ROWS)
def test_every_run_is_a_recipe_with_settings_that_it_has(name: str) -> None:
    assert set(ROWS[name].get("reach_for", ROWS[name]["required"])) <= set(
        ROWS[name]["required"]
    )
    for run in ROWS[name].get("runs", {}).values():
        with_settings(load_recipe(run["recipe"]), run["set"])


def runs(**by_run: list[float]) -> dict[str, list[dict[str, Any]]]:
    return {
        run: [{"figures": {"auc": value}, "seconds": 1.0} for value in values]
        for run, values in by_run.items()
    }


def test_figures_are_means_gains_and_differences(quality: ModuleType) -> None:
    figures = quality.figures(
        {"required": {"auc": 0, "auc gain": 0}},
        runs(model=[0.8, 0.6], without=[0.5, 0.5]),
    )
    assert figures == pytest.approx({"auc": 0.7, "auc gain": 0.2})
    figures = quality.figures(
        {"required": {"auc difference": 0}}, runs(one=[0.8, 0.6], two=[0.7, 0.65])
    )
    assert figures == pytest.approx({"auc difference": 0.1})


@pytest.mark.parametrize(
    ("figure", "reached", "required", "tolerance", "ratio"),
    [
        ("auc", 0.9, 0.8, None, 1.125),
        ("log_loss", 0.2, 0.1, None, 0.5),
        ("hr@10 difference", 0.0, 0.005, None, 10.0),
        ("hr@10", 0.45315, 0.4531, 0.0001, 1.0),
        ("hr@10", 0.5, 0.4, 0.0001, 0.8),
    ],
)
def test_a_ratio_of_1_is_what_is_required(
    quality: ModuleType,
    figure: str,
    reached: float,
    required: float,
    tolerance: float | None,
    ratio: float,
) -> None:
    assert quality._ratio(figure, reached, required, tolerance) == pytest.approx(ratio)


def test_a_finished_run_is_not_trained_again_and_a_killed_one_is(
    quality: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trained: list[str] = []

    def follow(line: list[str], title: str, log: Path) -> None:
        if title == "Q, seed 1" and len(trained) == 1:
            trained.append("killed")
            raise KeyboardInterrupt
        trained.append(title)
        folder = Path(line[line.index("--run_dir") + 1])
        assert not folder.exists(), "what a killed run left would be refused"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(
            json.dumps({"test": {"auc": 0.5 + len(trained)}})
        )

    monkeypatch.setattr(
        quality,
        "_follow",
        lambda line, title, log: follow(line, title.replace(" model", ""), log),
    )
    monkeypatch.setattr(quality, "code_commit", lambda: "a")
    row = {
        "what": "",
        "seeds": 2,
        "runs": {"model": {"recipe": "ncf", "set": ["train.epochs=1"]}},
        "required": {"auc": 1.0},
    }
    with pytest.raises(KeyboardInterrupt):
        quality.measure("Q", row, None, quality.Results(tmp_path / "results.json"))
    (tmp_path / "runs" / "Q-model-1").mkdir()
    measured = quality.measure(
        "Q", row, None, quality.Results(tmp_path / "results.json")
    )
    assert trained == ["Q, seed 0", "killed", "Q, seed 1"]
    assert measured["reached"] == {"auc": 2.5}
    assert measured["ok"]
    changed = {**row, "runs": {"model": {"recipe": "ncf", "set": ["train.epochs=2"]}}}
    quality.measure("Q", changed, 1, quality.Results(tmp_path / "results.json"))
    assert len(trained) == 4, "another command is another run"


def test_another_commit_of_the_code_is_trained_again(
    quality: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trained: list[str] = []

    def follow(line: list[str], title: str, log: Path) -> None:
        trained.append(title)
        folder = Path(line[line.index("--run_dir") + 1])
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(
            json.dumps({"test": {"auc": float(len(trained))}})
        )

    monkeypatch.setattr(quality, "_follow", follow)
    row = {
        "what": "",
        "runs": {"model": {"recipe": "ncf", "set": []}},
        "required": {"auc": 1.0},
    }
    results = quality.Results(tmp_path / "results.json")
    for commit, expected in (
        ("a", 1.0),
        ("a", 1.0),
        ("b", 2.0),
        ("b+", 3.0),
        ("b+", 4.0),
    ):
        monkeypatch.setattr(quality, "code_commit", lambda commit=commit: commit)
        assert quality.measure("Q", row, None, results)["reached"] == {"auc": expected}
    assert [run["commit"] for run in results.runs()] == ["b+"], (
        "the newest run of a command is kept"
    )


def test_kept_runs_are_of_committed_code(quality: ModuleType) -> None:
    for run in quality.Results(quality.RESULTS).runs():
        assert set(run) - {"beside"} == {
            *quality.COMMAND,
            "commit",
            "figures",
            "seconds",
        }
        assert not run["commit"].endswith("+"), "figures of code that no commit holds"


def test_a_run_has_what_it_printed_beside(quality: ModuleType, tmp_path: Path) -> None:
    beside = {"popularity": {"hr@10": 0.25}, "ease": {"hr@10": 0.5}}
    (tmp_path / "summary.json").write_text(
        json.dumps({"test": {"hr@10": 0.75}, "seconds": 1.0, **beside})
    )
    assert quality.results_of(tmp_path) == ({"hr@10": 0.75}, beside)
    two = {
        "model": [
            {"beside": beside},
            {"beside": {"ease": {"hr@10": 0.75}, "popularity": {"hr@10": 0.25}}},
        ]
    }
    assert quality.beside_of(two, {"hr@10": 0.5}) == {
        "popularity": {"hr@10": 0.25},
        "ease": {"hr@10": 0.625},
    }
    assert quality.beside_of({"model": [{"figures": {}}]}, {"hr@10": 0.5}) == {}, (
        "a run of an earlier release"
    )
