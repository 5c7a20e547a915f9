"""`torchx run rec.train.hybrid` over real processes: exit codes, last lines, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        not any(point.name == "run" for point in entry_points(group="torchx.cli.cmds")),
        reason="`torchx run` of this package is not registered: pip install -e . again",
    ),
]

RECIPE = """
import dataclasses, os, time
from torchx_apps.recipes import two_tower

def mistake(job):
    if os.environ["RANK"] == "1":
        raise ValueError("the user tower has 3 tables and the item tower 4; give both the same")

def bug(job):
    if os.environ["RANK"] == "1":
        raise KeyError("tower")

def once(job):
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)

def forever(job):
    open(f"pid{os.environ['RANK']}", "w").write(str(os.getpid()))
    time.sleep(300)

def recipe(build):
    return lambda: dataclasses.replace(two_tower(), build=build)

mistaken, bugged, killed_once, endless = map(recipe, (mistake, bug, once, forever))
"""

TORCHX = [str(Path(sys.executable).with_name("torchx")), "run"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is not the clone: no .torchxconfig, the package found because it is installed."""
    (tmp_path / "my_recipe.py").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def endless(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    command = [*TORCHX, "rec.train.hybrid", "--recipe", "my_recipe.py:endless"]
    process = subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
    files = [folder / "pid0", folder / "pid1"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    yield process, [int(file.read_text()) for file in files]
    process.kill()


def environment() -> dict[str, str]:
    """As of a user who did not activate the venv."""
    bin_folder = str(Path(sys.executable).parent)
    folders = [f for f in os.environ["PATH"].split(os.pathsep) if f != bin_folder]
    return {**os.environ, "PATH": os.pathsep.join(folders)}


def torchx_run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*TORCHX, *flags]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still waiting after {seconds} s"
        time.sleep(0.1)


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_two_ranks_train_with_repeated_overrides(folder: Path) -> None:
    flags = ["--recipe", "two_tower", "--set", "loader.batch_size=4096", "--set", "data.name=planted", "-j", "1x2"]
    done = torchx_run(folder, "rec.train.hybrid", *flags)
    assert done.returncode == 0, done.stderr
    assert "2 rank(s), batch size 4096" in done.stderr


def test_a_bare_torchx_run_in_the_clone_trains() -> None:
    done = torchx_run(Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert "recipe two_tower: 2 rank(s)" in done.stderr


def test_a_users_mistake_on_one_rank_is_the_last_line_once(folder: Path) -> None:
    done = torchx_run(folder, "rec.train.hybrid", "--recipe", "my_recipe.py:mistaken")
    last = "rank 1: the user tower has 3 tables and the item tower 4; give both the same"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == last
    assert (done.stdout + done.stderr).count("the user tower has") == 1
    assert "Traceback" not in done.stderr


def test_a_bug_on_one_rank_ends_with_its_traceback_once(folder: Path) -> None:
    done = torchx_run(folder, "rec.train.hybrid", "--recipe", "my_recipe.py:bugged")
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1] == "rank 1: KeyError: 'tower'"
    assert lines[-2].strip() == 'raise KeyError("tower")'
    assert done.stderr.count("Traceback") == 1


def test_a_mistake_on_another_node_is_the_last_line_once(folder: Path) -> None:
    done = torchx_run(folder, "rec.train.hybrid", "-j", "2x1", "--recipe", "my_recipe.py:mistaken")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("rank 1: the user tower has 3 tables")
    assert done.stderr.count("the user tower has") == 1


def test_a_mistake_that_every_rank_makes_is_told_once(folder: Path) -> None:
    done = torchx_run(folder, "rec.train.hybrid", "--set", "loader.batchsize=3", "--set", "data.name=planted")
    assert done.returncode == 1
    assert "--set loader.batchsize=3: there is no key 'batchsize'; did you mean 'batch_size'?" in done.stderr.splitlines()[-1]
    assert done.stderr.count("there is no key") == 1


def test_a_killed_rank_is_started_again(folder: Path) -> None:
    flags = ["--recipe", "my_recipe.py:killed_once", "--max_retries", "1"]
    done = torchx_run(folder, "rec.train.hybrid", *flags)
    assert done.returncode == 0, done.stderr
    assert "2 rank(s)" in done.stderr


def test_a_bad_j_shows_usage_and_what_was_given(folder: Path) -> None:
    done = torchx_run(folder, "rec.train.hybrid", "-j", "1y2")
    assert done.returncode == 2
    assert "usage: torchx run" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("such as -j 1x2 or -j 2:4x8")
    assert "-j 1y2:" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_stops_every_rank(endless: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, ranks = endless
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "torchx run: stopped by SIGINT; no rank is left"
    assert gone(ranks)
    assert "Traceback" not in stderr


def test_a_killed_torchx_leaves_no_rank_behind(endless: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, ranks = endless
    process.kill()
    wait_until(lambda: gone(ranks), seconds=30)
