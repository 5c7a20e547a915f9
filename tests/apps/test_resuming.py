"""What a rank that is asked to stop can see of the others, and which checkpoints several runs have in common."""

import json
import os
from functools import partial
from pathlib import Path

import pytest

from tests.examples import small_model
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.folder import CheckpointRanks
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.checkpoint.storage import CheckpointError
from torchx_apps.cli.link_watch import LinkWatch
from torchx_apps.jobs.resuming import (
    CHECKPOINTS,
    MEMBERS,
    a_neighbour_died,
    begun,
    check_recipe,
    checkpoint_to_export,
    ended,
    newest_networks,
    newest_run,
    where_to_begin,
)

pytestmark = pytest.mark.unit


def processes(folder: Path, *, alive: int, dead: int = 0) -> Path:
    """As Linux shows them: the children of this process's parent, and one that is nobody's."""
    lines = [
        f"{pid} (a (strange) name) {'Z' if pid > alive else 'S'} {os.getppid()} 1 1"
        for pid in range(1, alive + dead + 1)
    ]
    for pid, line in enumerate(
        [*lines, f"99 (other) S {os.getppid() + 1} 1 1"], start=1
    ):
        (folder / str(pid)).mkdir(parents=True)
        (folder / str(pid) / "stat").write_text(line)
    return folder


@pytest.mark.parametrize(
    ("alive", "dead", "expected"),
    [(2, 0, False), (1, 1, True), (1, 0, True), (3, 0, False), (0, 0, False)],
)
def test_a_rank_that_is_gone_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alive: int,
    dead: int,
    expected: bool,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert a_neighbour_died(processes(tmp_path, alive=alive, dead=dead)) == expected
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not a_neighbour_died(tmp_path), "without torchrun a rank has no neighbours"


def test_a_run_has_ended_when_it_was_tested_or_its_last_record_is_an_error(
    tmp_path: Path,
) -> None:
    assert not ended(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train"}\n')
    assert not ended(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train"}\n{"kind": "error"}\n')
    assert ended(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.json").write_text("{}")
    assert ended(tmp_path / "other")


def test_the_newest_job_of_several_networks_is_found_by_its_launch(
    tmp_path: Path,
) -> None:
    for name, launch in (
        ("networks-ncf-1", "x"),
        ("networks-ncf-2", "y"),
        ("networks-two_tower-3", "y"),
    ):
        (tmp_path / name / "member").mkdir(parents=True)
        (tmp_path / name / "launch").write_text(f"{launch}\n")
        recipe = name.split("-")[1]
        (tmp_path / name / "member" / "config.json").write_text(
            json.dumps({"name": recipe})
        )
    # Of a recipe whose name begins alike.
    (tmp_path / "networks-ncf-wide-4" / "member").mkdir(parents=True)
    (tmp_path / "networks-ncf-wide-4" / "launch").write_text("y\n")
    (tmp_path / "networks-ncf-wide-4" / "member" / "config.json").write_text(
        json.dumps({"name": "ncf-wide"})
    )
    assert newest_networks("ncf", tmp_path) == tmp_path / "networks-ncf-2"
    assert newest_networks("ncf", tmp_path, launch="x") == tmp_path / "networks-ncf-1"
    assert newest_networks("session", tmp_path) is None


def begun_run(runs: Path, name: str, launch: str, recipe: str = "a") -> Path:
    """A run folder with a checkpoint."""
    (runs / name / "checkpoints" / "step-0000000005").mkdir(parents=True)
    (runs / name / "checkpoints" / "step-0000000005" / "manifest.json").touch()
    (runs / name / "launch").write_text(f"{launch}\n")
    (runs / name / "config.json").write_text(json.dumps({"name": recipe}))
    return runs / name


def test_auto_takes_the_run_of_this_recipe_that_was_saved_last(tmp_path: Path) -> None:
    begun_run(tmp_path, "a-baseline", "x")
    newest = begun_run(tmp_path, "a-20260101-120000", "x")
    begun_run(tmp_path, "a-wide-20260102-120000", "x", recipe="a-wide")
    assert newest_run("a", tmp_path) == newest
    assert newest_run("a-wide", tmp_path) == tmp_path / "a-wide-20260102-120000"
    assert newest_run("b", tmp_path) is None
    (newest / "config.json").unlink()
    assert newest_run("a", tmp_path) == tmp_path / "a-baseline", "nobody knows whose"


def test_a_run_of_another_recipe_is_not_gone_on_with(tmp_path: Path) -> None:
    other = begun_run(tmp_path, "b-1", "x", recipe="b")
    rule = "--resume PATH: is a run of recipe 'b', not of 'a'; give a run of 'a', or"
    with pytest.raises(CheckpointError, match=rule):
        check_recipe("--resume PATH", other, "a")
    check_recipe("--resume PATH", other, "b")
    check_recipe("--resume PATH", tmp_path, "a")
    with pytest.raises(CheckpointError, match="recipe 'b', not of 'a'"):
        check_recipe("--run-dir PATH", tmp_path, "a", configs=MEMBERS)


def test_a_launch_knows_the_run_that_it_has_begun_though_no_torchrun_counts_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = partial(newest_run, "a", tmp_path)
    mine = begun_run(tmp_path, "a-1", "mine")
    other = begun_run(tmp_path, "a-2", "other")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    for run_dir in (None, mine):
        assert where_to_begin(run_dir, "never", newest, "a", counted=False) == (
            mine,
            True,
        )
    assert where_to_begin(other, "never", newest, "a", counted=False) == (other, False)
    assert where_to_begin(other, "never", newest, "a", counted=True) == (other, True)
    assert where_to_begin(tmp_path / "new", "auto", newest, "a", counted=False) == (
        tmp_path / "new",
        False,
    )
    (mine / "summary.json").touch()
    assert not begun(mine), "it was trained to its end"


def test_launches_without_an_id_of_their_own_are_told_apart_by_the_count_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, run = partial(newest_run, "a", tmp_path), begun_run(tmp_path, "a-1", "none")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert where_to_begin(run, "never", newest, "a", counted=False) == (run, False)
    assert where_to_begin(None, "auto", newest, "a", counted=False) == (run, False)
    assert where_to_begin(None, "never", newest, "a", counted=True) == (run, True)
    folder, again = where_to_begin(None, "never", newest, "a", counted=False)
    assert folder.parent == Path("runs")
    assert not again


def test_a_node_is_lost_when_its_ranks_are_gone_and_the_others_out_of_reach() -> None:
    ranks, reached, now = 0, False, 0.0
    watch = LinkWatch(lambda: ranks, lambda: reached, after_s=15)

    def lost(seconds: float) -> bool:
        nonlocal now
        now += seconds
        return watch.lost(now)

    assert not any(lost(10) for _ in range(9)), (
        "the first node may start later than this one"
    )
    ranks = 1
    assert not any(lost(10) for _ in range(9)), "a rank may still save"
    ranks = 0
    assert not lost(10)
    reached = True
    assert not lost(10), "it waits for another host to join"
    reached = False
    assert not lost(10)
    assert not lost(10)
    assert lost(10)


def test_best_last_and_steps_of_a_run_are_found_and_others_told(tmp_path: Path) -> None:
    model, together = small_model(), CheckpointRanks(Runtime())
    checkpointer = Checkpointer(str(tmp_path / CHECKPOINTS), Runtime())
    for step in (3, 6):
        checkpointer.save(step, model_state(model))
    checkpointer.wait()

    def found(which: str | None, **options: bool) -> tuple[int, str]:
        path, text = checkpoint_to_export(str(tmp_path), which, together, **options)
        return int(path[-10:]), text

    assert found(None) == found("last") == (6, "the last")
    with pytest.raises(
        CheckpointError,
        match=r"--checkpoint best: no evaluation of this run was marked .* one of the steps 3, 6",
    ):
        found("best")
    checkpointer.mark_best(3, {"best": 0.9})
    checkpointer.close()
    assert found(None) == found("best") == (3, "the best")
    assert found(None, restores=False) == found("last") == (6, "the last")
    assert found("6") == (6, "of step 6")
    assert found(str(tmp_path / CHECKPOINTS / "step-0000000003"))[0] == 3
    path, text = checkpoint_to_export(
        str(tmp_path / CHECKPOINTS / "step-0000000003"), None, together
    )
    assert (int(path[-10:]), text) == (3, "the named")
    with pytest.raises(
        CheckpointError,
        match=r"--checkpoint 5: there is no such checkpoint; give best, last or one of the steps 3, 6",
    ):
        found("5")
