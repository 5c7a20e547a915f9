"""`torchx run rec.train.hybrid` over real processes: an own recipe trains, fails in words, and is started again."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.contracts import free_ports
from tests.launch.jobs import Launched, torchx_run
from tests.retrieval.small import Small

pytestmark = [pytest.mark.launch, pytest.mark.slow(minutes=0.5)]


def ran(folder: Path, recipe: str, *words: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(Path(__file__).with_name("my_recipe.py"), folder)
    flags = ["-j", "1x2", "--recipe", f"my_recipe.py:{recipe}", *words]
    return torchx_run(folder, "rec.train.hybrid", *flags)


def test_an_own_recipe_trains_with_its_settings(tmp_path: Path) -> None:
    words = ["--", "--run_dir", "out", "--train.epochs", "1", "--model.dropout", "0.1"]
    done = ran(tmp_path, "trained", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["train"]["epochs"], config["model"]["dropout"]) == (1, 0.1)
    assert "hr@10" in json.loads((tmp_path / "out" / "test.json").read_text())


def test_a_ranks_mistake_is_told_without_a_traceback_of_ours(tmp_path: Path) -> None:
    done = ran(tmp_path, "mistaken", "--", "--run_dir", "out")
    assert done.returncode == 1
    text = done.stdout + done.stderr
    assert "rank 1: the user tower has 3 tables and the item tower 4" in text
    assert "torchx_apps/jobs/training.py" not in text


def test_a_killed_rank_is_started_again(tmp_path: Path) -> None:
    words = ["--max_retries", "1", "--", "--run_dir", "out"]
    done = ran(tmp_path, "killed_once", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "summary.json").exists()


def test_a_bundle_is_served(tmp_path: Path) -> None:
    Small().write(tmp_path / "bundle")
    (port,) = free_ports(1)

    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return True
        except OSError:
            return False

    binaries = Path(sys.executable).parent
    words = ["run", "-s", "local_cwd", "rec.serve.http", "--port", str(port)]
    command = [str(binaries / "torchx"), *words, "--bundle", f"{tmp_path}/bundle"]
    path = os.pathsep.join([str(binaries), os.environ["PATH"]])
    with Launched(command, {"PATH": path}) as job:
        job.until(is_ready)
