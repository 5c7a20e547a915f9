"""SIGTERM: a scheduler's signals within five seconds count as one, and process 1 does not ignore them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contracts import _CONTEXT
from torchx_apps import process as ending
from torchx_apps.jobs.resuming import asked_to_stop

SLOW_TORCH = "import pathlib, time\npathlib.Path({mark!r}).touch()\ntime.sleep(60)\n"


def signalled(times: int, later: bool, noted: str) -> None:
    with asked_to_stop() as asked:
        assert not asked()
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
        assert asked()
        Path(noted).touch()  # the run saves
        if later:
            ending.SAME_S = 0
            os.kill(os.getpid(), signal.SIGTERM)
            Path(noted).unlink()


@pytest.mark.parametrize(
    ("times", "later", "ends"),
    [(1, False, 0), (4, False, 0), (2, True, -signal.SIGTERM)],
)
def test_what_follows_within_five_seconds_is_the_same_signal(
    times: int, later: bool, ends: int, tmp_path: Path
) -> None:
    process = _CONTEXT.Process(
        target=signalled, args=(times, later, str(tmp_path / "saved"))
    )
    process.start()
    process.join()
    assert process.exitcode == ends
    assert (tmp_path / "saved").exists()


def isolated() -> list[str]:
    """The command that makes the next one process 1 of a namespace of its own."""
    unshare = ["unshare", "--fork", "--pid", "--kill-child"]
    if (
        not shutil.which("unshare")
        or subprocess.run(
            [*unshare, "true"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("needs a PID namespace: Linux, util-linux, and to be root")
    return unshare


@pytest.mark.launch
def test_process_1_ends_at_once_while_torch_is_imported(tmp_path: Path) -> None:
    prefix = isolated()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(
        SLOW_TORCH.format(mark=str(tmp_path / "begun"))
    )
    run = tmp_path / "RUN"
    run.mkdir()
    (run / "config.json").write_text(
        '{"name": "two_tower", "build": "torchx_apps.recipes:build_two_tower", "task": "torchx_apps.recipes:task"}'
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()]),
    }
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "torchx_apps.export", "RUN"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
    )
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "begun").exists():
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.02)
        (child,) = (
            Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        )
        os.kill(int(child), signal.SIGTERM)
        assert process.wait(20) == 143
    finally:
        process.kill()
        process.wait()
