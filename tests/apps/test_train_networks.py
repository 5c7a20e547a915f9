"""A grid: its members are roles of one job, each an ordinary training; one table from their own records."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torchrec_ext.components import (  # type: ignore[import-not-found]
    train as components,
)
from torchx.runner import get_runner
from torchx.specs import AppDef
from torchx.specs.builders import materialize_appdef

from tests.files import records
from torchx_apps import train, train_networks
from torchx_apps.networks.members import members_of
from torchx_apps.networks.report import compare

TINY = [
    "--data.name=planted",
    "--data.users=60",
    "--data.items=50",
    "--data.history_length=5",
    "--train.epochs=2",
    "--train.eval_every=1",
    "--loader.batch_size=256",
    "--model.tower_widths=8",
    "--model.top_widths=8",
    "--train.compile=off",
]


def job(*words: str) -> AppDef:
    return materialize_appdef(components.networks, list(words))


@pytest.mark.unit
def test_a_grid_is_all_combinations() -> None:
    grid = ["optimizer.dense_lr", "1e-3", "3e-3", "model.tower_widths", "64", "128,64"]
    assert [(member.name, member.words[-1]) for member in members_of(grid)] == [
        ("dense_lr=1e-3_tower_widths=64", "64"),
        ("dense_lr=1e-3_tower_widths=128-64", "128,64"),
        ("dense_lr=3e-3_tower_widths=64", "64"),
        ("dense_lr=3e-3_tower_widths=128-64", "128,64"),
    ]
    # Names of sets, which are one number.
    assert len(members_of(["data.name", "2024_01", "202401", "01", "1"])) == 4
    (only,) = members_of(["device", "cpu"])
    assert only.words == ("--device", "cpu")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no member: give --vary KEY VALUE VALUE"),
        (
            ["--vary", "train.seed=0,1"],
            "--vary: train.seed=0,1 is neither a key nor a value",
        ),
        (["--vary", "train.seed"], "--vary train.seed: has no value"),
        (["--vary", "3", "4"], "--vary: 3 is neither a key nor a value"),
        (
            ["--vary", "train.seed", "1", "1"],
            "--vary train.seed: 1 stands there twice",
        ),
        (
            ["--vary", "optimizer.dense_lr", "1e-3", "0.001"],
            "--vary optimizer.dense_lr: 0.001 stands there twice",
        ),
        (["--vary", "run_dir", "a", "b"], "--vary run_dir: each member has a folder"),
        (
            ["--vary", "train.seed", "0", "1", "-j", "1x2"],
            "--vary: -j is neither a key nor a value",
        ),
        (["--", "--vary", "train.seed", "0"], "--vary stands before --"),
        (
            ["-j", "2x1", "--vary", "train.seed", "0"],
            "-j 2x1: a member of a grid is on one node, as in -j 1x1",
        ),
        (["-j", "1:2x1", "--vary", "train.seed", "0"], "-j 1:2x1: a member"),
        (["--vary", "train.sed", "0"], "did you mean --train.seed"),
        (["--vary", "optimizer.dense_lr", "fast"], "--optimizer.dense_lr"),
        (["--vary", "loader.batch_size", "0"], "batch_size=0: must be 1 or more"),
        (["--vary", "train.seed", "0", "--", "--stack", "auto"], "--stack"),
    ],
)
def test_a_mistake_ends_the_launcher_in_one_line(words: list[str], told: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(told)) as ended:
        job(*words)
    line = str(ended.value.code)
    assert "\n" not in line
    assert len(line) <= 200


@pytest.mark.unit
def test_every_member_is_a_role_with_a_run_folder_beside_the_others() -> None:
    made = job(
        *("--cpu", "3", "--max_retries", "2", "--vary", "train.seed", "0", "1"),
        *("--", "--data.name", "planted", "--run_dir", "out/grid"),
    )
    assert [role.name for role in made.roles] == ["seed-0", "seed-1"]
    for seed, role in enumerate(made.roles):
        command = role.args[-1]
        assert "--nnodes 1 --nproc_per_node 1 " in command
        assert command.endswith(
            "-m torchx_apps.train_networks --members seed=0 seed=1 --recipe two_tower "
            f"--run_dir out/grid/seed={seed} --data.name planted --train.seed {seed}"
        )
        assert (role.resource.cpu, role.max_retries) == (3, 2)
    folders = set()
    for role in job("--vary", "train.seed", "0", "1").roles:
        folders.add(re.findall(r"--run_dir (runs/networks-\S+)/", role.args[-1])[0])
    assert len(folders) == 1


@pytest.mark.unit
def test_slurm_gets_a_part_of_one_job_for_each_member() -> None:
    words = ["--vary", "train.seed", "0", "1", "--", "--run_dir", "/runs/grid"]
    with get_runner() as runner:
        cfg = {"partition": "main"}
        script = str(
            runner.dryrun_component("rec.train.networks", words, "slurm", cfg=cfg)
        )
    assert script.count("#SBATCH hetjob") == 1
    assert re.findall(r"--job-name=(\S+)", script) == ["seed-0-0", "seed-1-0"]
    assert script.count("/runs/grid/seed=") == 2


def write_run(
    path: Path,
    seed: int,
    auc: float,
    test: float,
    *,
    last: str = "",
    lr: float = 0.1,
    data: str = "planted",
) -> None:
    """A run folder as a training writes it, whose last record is of a kind; one that has not ended has no summary."""
    path.mkdir(parents=True)
    config = {
        "name": "mine",
        "data": {"name": data},
        "train": {"seed": seed, "early_stop": {"metric": ""}},
        "optimizer": {"dense_lr": lr},
        "checkpoint": {"folder": str(path)},
    }
    (path / "config.json").write_text(json.dumps(config))
    records: list[dict[str, Any]] = [
        {"kind": "steps", "epoch": 1, "step": 1},
        {"kind": "train", "epoch": 2, "step": 4, "loss": 0.5},
        {"kind": "eval", "epoch": 2, "step": 4, "auc": auc},
    ]
    if last == "error":
        records.append({"kind": last, "epoch": 2, "message": "the loss is nan"})
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if not last:
        summary = {"seconds": 1.5, "test": {"auc": test}}
        (path / "summary.json").write_text(json.dumps(summary))


@pytest.mark.unit
def test_the_best_is_chosen_on_validation_and_never_one_that_has_not_ended_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "grid"
    write_run(grid / "a", 0, 0.7, test=0.9)
    write_run(grid / "b", 1, 0.8, test=0.6)
    write_run(grid / "c", 2, 0.95, test=0.9, last="error")
    write_run(grid / "d", 3, 0.99, test=0.9, last="eval")
    compare([grid / name for name in ("none", "a", "b", "c", "d")], grid)
    said = capsys.readouterr().out
    assert "none: has not begun" in said
    assert "best: b (*), by validation auc" in said
    assert "c: the loss is nan" in said
    written = json.loads((grid / "results.json").read_text())
    assert written["best"] == "b"
    left = {path.name for path in grid.iterdir() if path.is_file()}
    assert left == {"results.txt", "results.json"}
    text = (grid / "results.txt").read_text()
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert lines[0] == [
        *("member", "train.seed", "validation auc", "test auc"),
        *("epochs", "ended", "seconds"),
    ]
    assert lines[3] == ["b *", "1", "0.8000", "0.6000", "2", "all epochs", "1.5"]
    assert [line[-2] for line in lines[4:6]] == ["diverged", "not ended"]
    # Those that have not ended well do not count: 0.75 is the mean of 0.7 and 0.8.
    assert lines[6] == ["mean ± std", "0.7500 ± 0.0707", "0.7500 ± 0.2121"]
    # They are not seeds of one network.
    write_run(grid / "e", 4, 0.7, test=0.9, lr=0.2)
    compare([grid / name for name in ("a", "e")], grid)
    assert "±" not in (grid / "results.txt").read_text()
    # Figures of different data say nothing of each other.
    write_run(grid / "f", 4, 0.7, test=0.9, data="ads")
    assert compare([grid / name for name in ("a", "f")], grid) is None
    assert "no best: the members have different data" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"typo: no run has begun there"):
        compare([grid / "typo"], grid)


def test_a_member_is_an_ordinary_training_and_the_last_one_makes_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHX_JOB_ID", raising=False)
    grid = tmp_path / "grid"
    names = ["seed=0", "seed=1"]

    def member(seed: int) -> int:
        words = ["--members", *names, "--run_dir", str(grid / names[seed])]
        return train_networks.main([*words, *TINY, "--train.seed", str(seed)])

    assert member(0) == 0
    assert not (grid / "results.txt").exists()
    assert member(1) == 0
    said = capsys.readouterr().out
    assert "best: seed=" in said
    assert f"the same command with --run_dir {grid} goes on" in said
    alone = ["--run_dir", str(tmp_path / "alone"), "--train.seed", "1"]
    assert train.main([*TINY, *alone]) == 0
    assert records(grid / "seed=1") == records(tmp_path / "alone")
    written = json.loads((grid / "results.json").read_text())
    assert [each["name"] for each in written["members"]] == names
    before = records(grid / "seed=1")
    # Started again by a job, in which both end at once.
    monkeypatch.setenv("TORCHX_JOB_ID", "local_cwd://torchx/train-1")
    assert member(1) == member(0) == 0
    said = capsys.readouterr().out
    assert "seed=1: has ended already" in said
    assert said.count("best: seed=") == 1
    assert records(grid / "seed=1") == before


def test_a_member_that_diverges_is_a_row_and_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--members", "lr=nan", "--run_dir", str(tmp_path / "lr=nan"), *TINY]
    rates = ["--optimizer.tables_lr=1e30", "--optimizer.dense_lr=1e30"]
    assert train_networks.main([*words, *rates, "--optimizer.tables=sgd"]) == 0
    written = json.loads((tmp_path / "results.json").read_text())
    assert (written["best"], written["members"][0]["ended"]) == (None, "diverged")
    assert written["members"][0]["message"] in capsys.readouterr().out
