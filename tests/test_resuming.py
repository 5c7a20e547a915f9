"""What a rank that is asked to stop can see of the others, and which checkpoints several runs have in common."""

import os
from pathlib import Path

import pytest

from torchx_apps.resuming import a_neighbour_died, ended, newest_networks

pytestmark = pytest.mark.unit


def processes(folder: Path, *, alive: int, dead: int = 0) -> Path:
    """As Linux shows them: the children of this process's parent, and one that is nobody's."""
    lines = [f"{pid} (a (strange) name) {'Z' if pid > alive else 'S'} {os.getppid()} 1 1" for pid in range(1, alive + dead + 1)]
    for pid, line in enumerate([*lines, f"99 (other) S {os.getppid() + 1} 1 1"], start=1):
        (folder / str(pid)).mkdir(parents=True)
        (folder / str(pid) / "stat").write_text(line)
    return folder


@pytest.mark.parametrize(("alive", "dead", "expected"), [(2, 0, False), (1, 1, True), (1, 0, True), (3, 0, False), (0, 0, False)])
def test_a_rank_that_is_gone_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: int, dead: int, expected: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert a_neighbour_died(processes(tmp_path, alive=alive, dead=dead)) == expected
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not a_neighbour_died(tmp_path), "without torchrun a rank has no neighbours"


def test_a_run_has_ended_when_it_was_tested_or_its_last_record_is_an_error(tmp_path: Path) -> None:
    assert not ended(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train"}\n')
    assert not ended(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train"}\n{"kind": "error"}\n')
    assert ended(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.json").write_text("{}")
    assert ended(tmp_path / "other")


def test_the_newest_job_of_several_networks_is_found_by_its_launch(tmp_path: Path) -> None:
    for name, launch in (("networks-ncf-1", "x"), ("networks-ncf-2", "y"), ("networks-two_tower-3", "y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "launch").write_text(f"{launch}\n")
    assert newest_networks("ncf", tmp_path) == tmp_path / "networks-ncf-2"
    assert newest_networks("ncf", tmp_path, launch="x") == tmp_path / "networks-ncf-1"
    assert newest_networks("session", tmp_path) is None
