"""A rank that ends during training: the others stop within 30 seconds, with its error, in every mode."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.jobs import TORCHRUN

pytestmark = [pytest.mark.launch, pytest.mark.slow]

ENDS = {
    "killed_in_training": "exitcode  : -9 ",
    "mistaken_in_training": "rank 1: price: 7 rows have no currency; fill it in preprocessing",
}
# Ranks that talk in every step notice a dead one there; those of local SGD are far from
# their next meeting.
MODES = {
    "every step": ["sync.mode=every_step"],
    "local SGD": [
        "sync.mode=local_sgd",
        "sync.every=1000000",
        "train.log_every=1000000",
        "plan.sharding=data_parallel",
    ],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", ENDS)
def test_the_others_stop_within_30_seconds_with_its_error(
    tmp_path: Path, recipe: str, mode: str
) -> None:
    shutil.copy(Path(__file__).with_name("my_recipe.py"), tmp_path)
    command = [sys.executable, *TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "torchx_apps.train", "--run_dir", "out"]
    command += ["--recipe", f"my_recipe.py:{recipe}", *map("--{}".format, MODES[mode])]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    ended = time.time()
    assert done.returncode == 1
    assert (tmp_path / "died").exists(), done.stderr
    took = ended - float((tmp_path / "died").read_text())
    assert took < 30
    assert ENDS[recipe] in done.stderr
