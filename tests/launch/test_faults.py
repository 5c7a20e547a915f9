"""Jobs that are killed, stopped or hang under the launcher lose nothing beyond the last checkpoint, and say how to go on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_torchx_run import environment, gone, wait_until

pytestmark = [pytest.mark.launch, pytest.mark.slow]

JOB = (
    "data.name=planted",
    "data.users=100",
    "data.items=80",
    "model.dropout=0.1",
    "train.epochs=6",
    "train.compile=off",
    "loader.batch_size=256",
    "checkpoint.steps=5",
)


def start(run_dir: Path, *flags: str, ranks: int = 2, restarts: int = 0, job: tuple[str, ...] = JOB) -> subprocess.Popen[str]:
    """The job under our agent, as the component starts it."""
    launch = ["-m", "torchx_apps.agent", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    settings = [word for item in job for word in ("--set", item)]
    command = [sys.executable, *launch, "-m", "torchx_apps.train", "--run-dir", str(run_dir), *settings, *flags]
    changes = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(command, env=environment(**changes), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def records(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [{name: value for name, value in record.items() if name != "rows_per_s"} for record in found]


def figures(run_dir: Path) -> Any:
    return json.loads((run_dir / "summary.json").read_text())["test"]


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    process = start(run_dir)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return run_dir


def test_ranks_killed_in_mid_epoch_end_as_if_they_never_were(whole: Path, tmp_path: Path) -> None:
    draw, run_dir = random.Random(0), tmp_path / "run"
    process = start(run_dir, restarts=9)
    for _ in range(4):
        before = len(list((run_dir / "checkpoints").glob("step-*"))) and max((run_dir / "checkpoints").glob("step-*")).name
        wait_until(lambda before=before: any(path.name > (before or "") for path in (run_dir / "checkpoints").glob("step-*[0-9]")))
        time.sleep(draw.random() * 0.5)
        pids = ranks_of(process)
        if process.poll() is not None or not pids:
            break
        os.kill(draw.choice(pids), signal.SIGKILL)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert out.count("resuming from") >= 1
    assert records(run_dir) == records(whole)
    assert figures(run_dir) == figures(whole)


def test_sigterm_saves_ends_with_143_and_goes_on_from_there(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir)
    wait_until(lambda: len(list((run_dir / "checkpoints").glob("step-*[0-9]"))) > 1)
    pids = ranks_of(process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert out.count("which is saved; go on with --resume auto") == 1
    assert gone(pids)
    process = start(run_dir, "--resume", "auto")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert records(run_dir) == records(whole)
    assert figures(run_dir) == figures(whole)


def test_a_launcher_killed_by_force_leaves_no_rank_and_loses_no_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir)
    wait_until(lambda: len(list((run_dir / "checkpoints").glob("step-*[0-9]"))) > 0)
    pids = ranks_of(process)
    assert len(pids) == 2
    process.kill()
    process.wait()
    wait_until(lambda: gone(pids), seconds=30)
    process = start(run_dir, "--resume", "auto", ranks=1)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "resuming from" in out


def test_a_rank_that_hangs_ends_the_job_with_its_own_line_first(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, "--set", "train.hang_s=5")
    wait_until(lambda: len(records(run_dir)) > 0)
    pids = ranks_of(process)
    victim = pids[1]
    os.kill(victim, signal.SIGSTOP)
    try:
        out, _ = process.communicate(timeout=300)
    finally:
        if not gone([victim]):
            os.kill(victim, signal.SIGCONT)
    assert process.returncode == 1, out
    assert "has made no step for" in out
    assert "go on with --resume auto" in out
    assert list(run_dir.glob("stacks-rank*.txt"))
    wait_until(lambda: gone(pids), seconds=60)


def test_a_second_run_into_the_same_folder_is_refused(whole: Path) -> None:
    process = start(whole)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "holds another run or is a file; choose another with --run-dir" in out
