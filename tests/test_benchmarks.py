"""The benchmarks: what a row says, that a round ends when a process dies, and that all of them run."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from torchrec_ext.stack import gpu_nodes

ROOT = Path(__file__).parents[1]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark("harness", monkeypatch)


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of benchmarks/, imported as its scripts import it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    # of the ranks that on_ranks starts
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    return importlib.import_module(name)


@pytest.mark.unit
def test_nothing_names_a_folder_beside_the_repository() -> None:
    """A figure or a test that another checkout cannot repeat; `.ci/run` alone takes its data from such a folder."""
    beside = re.compile(
        r'(\.\./|/work/)shared\b|parent\S* [/] "shared"|\bshared/(baselines|data|findings)\b'
    )
    folders = [
        path
        for name in ("benchmarks", "tests", "tools", "docs")
        for path in (ROOT / name).rglob("*")
    ]
    files = [path for path in folders if path.suffix in (".py", ".json", ".md")]
    for path in [
        ROOT / "Makefile",
        ROOT / "CONTRIBUTING.md",
        ROOT / "README.md",
        *files,
    ]:
        assert not beside.search(path.read_text()), path


@pytest.mark.unit
def test_every_limit_belongs_to_a_measured_row() -> None:
    for benchmark_, sentences in json.loads(
        (ROOT / "benchmarks" / "limits.json").read_text()
    ).items():
        rows = json.loads(
            (ROOT / "benchmarks" / "results" / f"{benchmark_}.json").read_text()
        )["rows"]
        assert set(sentences) <= {row["name"] for row in rows}, benchmark_
        assert all(len(sentence.split()) <= 25 for sentence in sentences.values()), (
            benchmark_
        )


@pytest.mark.unit
def test_pages_and_benchmarks_keep_our_own_targets_to_themselves(
    harness: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Readers get both sides, the ratio, its ceiling and the limit: no target, no miss, no number of a row."""
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        headers = re.findall(r"^(\|.*\|)\n\|---", path.read_text(), flags=re.MULTILINE)
        columns = {cell.strip() for header in headers for cell in header.split("|")}
        assert not columns & {"asked", "missed", "required"}, path
        assert not re.search(r"\bQ\d+\b", path.read_text()), path
    row = harness.row("r", [2.0], "s", baseline=[4.0], required=3.0)
    told = "\n".join(
        [capsys.readouterr().err, *benchmark("all", monkeypatch).table("b", [row])]
    )
    assert "2" in told
    assert not re.search("(?i)asked|missed|required", told)


@pytest.mark.unit
def test_a_row_without_its_data_set_is_left_out_and_one_line_says_why(
    harness: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "ml-100k").mkdir()
    monkeypatch.setenv("TORCHREC_EXT_DATA", str(tmp_path))
    assert harness.has_data("sync", "ml-100k")
    assert not harness.has_data("sync", "frappe")
    monkeypatch.delenv("TORCHREC_EXT_DATA")
    assert not harness.has_data("sync", "ml-100k")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[:2] for line in lines] == [["sync", " left out"]] * 2


@pytest.mark.unit
@pytest.mark.parametrize(
    ("ours", "baseline", "better", "required", "ratio", "held"),
    [
        ([2.0, 4.0, 1.0], [4.0, 4.0, 4.0], "less", 2.0, 2.0, True),
        ([2.0, 4.0, 1.0], [4.0, 4.0, 4.0], "more", 1.0, 0.5, False),
        (3.0, None, "less", 2.0, None, False),
        (3.0, None, "more", 2.0, None, True),
        (3.0, 3.0, "less", None, 1.0, None),
        (3.0, 0.0, "more", 2.0, None, True),
    ],
)
def test_a_ratio_says_how_many_times_better_ours_is(
    harness: ModuleType,
    ours: Any,
    baseline: Any,
    better: str,
    required: float | None,
    ratio: float | None,
    held: Any,
) -> None:
    row = harness.row(
        "r", ours, "s", baseline=baseline, better=better, required=required
    )
    assert (row["ratio"], row["held"]) == (ratio, held)
    assert row["low"] <= (ratio or row["ours"]) <= row["high"]


@pytest.mark.unit
def test_rounds_are_merged_by_medians_and_the_whole_range(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [
        [harness.row("r", ours, "s", baseline=[8.0, 8.0], required=3.0)]
        for ours in ([1, 2], [4, 4], [2, 8])
    ]
    (merged,) = benchmark("all", monkeypatch).merge(rounds)
    assert (merged["ratio"], merged["low"], merged["high"], merged["held"]) == (
        2.5,
        1,
        8,
        False,
    )


@pytest.mark.unit
def test_a_round_without_a_ratio_leaves_none(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [
        [harness.row("r", 3.0, "s", baseline=baseline, better="more")]
        for baseline in (1.0, 0.0, 2.0)
    ]
    (merged,) = benchmark("all", monkeypatch).merge(rounds)
    assert (merged["baseline"], merged["ours"], merged["ratio"]) == (1.0, 3.0, None)


@pytest.mark.unit
def test_each_planted_cause_is_looked_up_among_the_verdicts_of_traceml(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diagnose, traceml = (
        benchmark(name, monkeypatch) for name in ("diagnose", "diagnose_traceml")
    )
    assert {cause for _, cause in diagnose.PLANTED.values()} == set(traceml.NAMED)
    assert traceml.names("products", "COMPUTE_BOUND backward")
    assert traceml.names("untouched_rows", "COMPUTE_BOUND optimizer")
    assert not traceml.names("untouched_rows", "COMPUTE_BOUND backward")
    assert not traceml.names("launches", "COMPUTE_BOUND forward")


@pytest.mark.slow
def test_without_traceml_its_row_is_left_out_and_one_line_says_why(
    tmp_path: Path,
) -> None:
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
    }
    command = [
        sys.executable,
        "benchmarks/diagnose.py",
        "--only",
        "planted-traceml",
        "--quick",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["rows"] == []
    (line,) = [
        line for line in done.stderr.splitlines() if line.startswith("planted-traceml")
    ]
    assert line.startswith(
        "planted-traceml: left out: ERROR: No matching distribution found for traceml-ai=="
    )


@pytest.mark.slow
def test_what_is_kept_in_every_epoch_counts_as_growth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    growth, kept = benchmark("loader", monkeypatch).growth, []
    batch = 2**20
    leaking, _ = growth(lambda epoch: kept.append(np.ones(batch, np.int8)))
    steady, _ = growth(lambda epoch: np.ones(batch, np.int8))
    assert leaking > 20 * batch / 1e6 > 1 > steady


def killed(runtime: Any) -> None:
    """A rank that dies without a word, and one that waits for it."""
    if runtime.rank:
        os._exit(7)
    time.sleep(600)


def silent(_: object) -> None:
    """A rank that never answers."""
    time.sleep(600)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        pytest.param(
            killed, "killed: rank 1 ended with exit code 7", marks=pytest.mark.slow
        ),
        pytest.param(
            silent,
            "silent: no result of rank 0, 1 within the limit",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_dead_rank_is_named_and_a_silent_one_is_not_waited_for(
    harness: ModuleType, function: Callable[..., None], message: str
) -> None:
    limit = 6.0 if function is silent else 120.0
    with pytest.raises(RuntimeError, match=message):
        harness.on_ranks(function, 2, limit_s=limit)


@pytest.mark.unit
def test_a_child_that_fails_says_its_last_words(harness: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)exit code 3:.*no such folder"):
        harness.last_json(
            [
                sys.executable,
                "-c",
                "import sys; print('no such folder', file=sys.stderr); sys.exit(3)",
            ]
        )
    with pytest.raises(RuntimeError, match="not done after 1 s"):
        harness.last_json(
            [sys.executable, "-c", "import time; time.sleep(60)"], limit_s=1
        )
    assert harness.last_json(
        [sys.executable, "-c", "print('hello'); print('[1]')"]
    ) == [1]


@pytest.mark.unit
def test_trainings_take_turns_and_one_that_fails_or_ends_says_so(
    harness: ModuleType,
) -> None:
    steps: list[str] = []

    def training(name: str, count: int) -> Callable[[Callable[[], bool]], None]:
        def train(stop: Callable[[], bool]) -> None:
            for step in range(count):
                steps.append(name)
                if name == "broken" and step == 2:
                    raise ValueError("a rule")
                if stop():
                    return

        return train

    turns = harness.Trainings({name: training(name, 100) for name in "ab"})
    times = turns.seconds_per_step(3, 2, warm_up=2)
    assert "".join(steps) == "aabb" + 2 * "aaabbb"
    assert [len(each) for each in times.values()] == [2, 2]
    turns.close()
    with pytest.raises(ValueError, match="a rule"):
        harness.Trainings({"broken": training("broken", 100)}).seconds_per_step(3, 2)
    with pytest.raises(
        RuntimeError, match="short: its training ended before its turns did"
    ):
        harness.Trainings({"short": training("short", 4)}).seconds_per_step(3, 2)


@pytest.mark.unit
def test_where_stop_is_asked_more_often_the_loader_counts_the_steps(
    harness: ModuleType,
) -> None:
    loader = harness.Counted(harness.Repeated([0.01]))

    def train(stop: Callable[[], bool]) -> None:
        for batch in loader:
            time.sleep(batch)
            if stop() or stop():
                return

    (seconds,) = harness.Trainings(
        {"a": train}, loaders={"a": loader}
    ).seconds_per_step(20, 1, warm_up=2)["a"]
    assert loader.count <= 12, "20 calls of stop are 10 steps"
    assert seconds >= 0.01


@pytest.mark.launch
def test_make_gpu_without_a_gpu_says_so_in_one_line_and_installs_nothing(
    tmp_path: Path,
) -> None:
    if gpu_nodes():
        pytest.skip("this machine has a GPU")
    for name in (
        "Makefile",
        "pyproject.toml",
        "torchrec_ext/__init__.py",
        "torchrec_ext/stack.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "torchrec_ext" / "__init__.py").write_text("")
    # Of a `make test` around this test, neither its flags nor its variables, such as
    # STACK.
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL")
    }
    done = subprocess.run(
        ["make", "gpu"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, "make's own, of a recipe that ended with 1"
    assert (
        done.stdout
        == "make gpu: this machine has no NVIDIA GPU (no /dev/nvidia0): run it on one that has\n"
    )
    assert not (tmp_path / ".venv").exists()


@pytest.mark.slow
def test_the_rows_of_a_gpu_run_without_one_at_small_sizes(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "benchmarks/gpu.py",
        "--quick",
        "--results",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert len(result["rows"]) + len(result["left_out"]) == 5
    assert not result["failed"]


@pytest.mark.slow(minutes=15)
def test_every_benchmark_runs(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "benchmarks/all.py",
        "--quick",
        "--results",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = {
        path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")
    }
    kept = {
        path.stem: json.loads(path.read_text())
        for path in (ROOT / "benchmarks" / "results").glob("*.json")
    }
    for result in results.values():
        assert result["machine"]
        assert len({row["name"] for row in result["rows"]}) == len(result["rows"]), (
            "two rows of one name"
        )
    assert set(results) >= {
        name for name in kept if name != "quality" and not name.endswith("-studies")
    }


def test_a_gpu_run_goes_on_where_it_stopped_and_begins_nothing_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = benchmark("gpu", monkeypatch)
    about = {"commit": "a", "device": "cpu", "gpus": 0, "versions": {}}
    results = gpu.Results(tmp_path, about)
    turn = gpu.Turn(10.0, 20.0, {"auc": (0.5, 0.5)})
    results.rows = {"resident data": gpu.compared("resident data", [turn, turn])}
    results.tests = {"a": "passed", "b": "failure"}
    results.write_rows({"resident data": [turn, turn]})
    assert gpu.Results(tmp_path, about).earlier("gpu")["turns"] == {
        "resident data": 2 * [[10.0, 20.0, {"auc": [0.5, 0.5]}]]
    }
    assert gpu.Results(tmp_path, {**about, "commit": "b"}).earlier("gpu") == {}
    budget = gpu.Budget(60.0)
    with budget.timed("resident data"):
        pass
    assert budget.has("resident data")
    budget._took["captured steps"] = 100.0
    assert not budget.has("captured steps")
    page = results.summary(budget.left_out)
    assert "1 failure, 1 passed" in page
    assert "| resident data | 20 | 10 | 2.00 | 2 |" in page
    assert "- captured steps: no time was left" in page
