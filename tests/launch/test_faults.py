"""Jobs that are killed, stopped or hang lose nothing before their last checkpoint, and say how to resume."""

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobs import SETTINGS, Job, gone
from torchrec_ext.train.checkpoint.folder import MANIFEST_NAME

pytestmark = [pytest.mark.launch, pytest.mark.slow(minutes=0.4)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run on two ranks that nothing disturbed."""
    with Job(tmp_path_factory.mktemp("whole") / "run") as job:
        assert job.end() == 0, job.output
    return job


def test_ranks_killed_in_mid_epoch_end_as_if_they_never_were(
    whole: Job, tmp_path: Path
) -> None:
    draw, kills, seen = random.Random(0), 0, 0
    with Job(tmp_path / "run", restarts=9) as job:
        for _ in range(3):
            job.until(
                lambda seen=seen: (
                    job.process.poll() is not None
                    or any(step > seen for step in job.steps())
                )
            )
            time.sleep(draw.random() * 0.5)
            seen, ranks = max(job.steps()), job.ranks()
            if job.process.poll() is not None or not ranks:
                break
            os.kill(draw.choice(ranks), signal.SIGKILL)
            kills += 1
        assert job.end() == 0, job.output
        assert kills >= 2
        assert job.output.count("resuming from") >= kills
        assert job.records() == whole.records()
        assert job.figures() == whole.figures()


def test_sigterm_saves_and_the_run_goes_on_from_there(
    whole: Job, tmp_path: Path
) -> None:
    with Job(tmp_path / "run") as job:
        job.until(lambda: len(job.steps()) > 1)
        ranks = job.ranks()
        job.process.send_signal(signal.SIGTERM)
        assert job.end(60) != 0, job.output
        assert job.output.count("which is saved; go on with the same --run_dir") == 1
        assert gone(ranks, 5)
    with Job(tmp_path / "run") as job:
        assert job.end() == 0, job.output
        assert job.records() == whole.records()
        assert job.figures() == whole.figures()


def test_torchrun_killed_by_force_leaves_no_process_and_loses_no_checkpoint(
    tmp_path: Path,
) -> None:
    with Job(tmp_path / "run") as job:
        job.until(job.steps)
        assert len(job.ranks()) == 2
        left = job.descendants()
        job.process.kill()
        assert gone(left, 30)
        last = max(job.steps())
    with Job(tmp_path / "run", ranks=1) as job:
        assert job.end() == 0, job.output
        assert (
            f"resuming from {tmp_path}/run/checkpoints/step-{last:010d}" in job.output
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_with_a_killed_rank_says_how_to_resume(rank: int, tmp_path: Path) -> None:
    with Job(tmp_path / "run") as job:
        job.until(lambda: len(job.steps()) > 1)
        os.kill(job.ranks()[rank], signal.SIGKILL)
        assert job.end() != 0
        line = f"give the same command with --run_dir {tmp_path}/run"
        assert job.output.count(line) == 1, job.output


@pytest.mark.parametrize(
    ("stopped", "moment"),
    [
        (1, "loader.batch_size=4096"),
        (1, "train.eval_every=999"),
        (0, "train.eval_every=999"),
    ],
    ids=["in an evaluation", "in a step", "the first rank"],
)
def test_a_rank_that_is_stopped_ends_the_job_by_the_collectives_time_out(
    stopped: int, moment: str, tmp_path: Path
) -> None:
    # One step between two evaluations, or no evaluation; and never a save, which may
    # take its time.
    often = (
        "train.epochs=999",
        "checkpoint.steps=0",
        "checkpoint.epochs=0",
        "train.log_every=5",
        moment,
    )
    with Job(
        tmp_path / "run", "--train.hang_s=20", settings=(*SETTINGS, *often)
    ) as job:
        job.until(lambda: len(job.records()) > 3)
        ranks = job.ranks()
        os.kill(ranks[stopped], signal.SIGSTOP)
        assert job.end(150) == 1, job.output
        assert re.search("time[d ]?.?out", job.output, re.IGNORECASE), job.output
        stacks = tmp_path / "run" / f"stacks-rank{1 - stopped}.txt"
        # In a pause, such as an evaluation, a rank may take its time.
        assert moment == "loader.batch_size=4096" or stacks.stat().st_size
        assert gone(ranks, 30)


def test_the_same_command_again_ends_with_the_same_figures(whole: Job) -> None:
    before = whole.figures()
    with Job(whole.run_dir) as job:
        assert job.end() == 0, job.output
        assert "resuming from" in job.output
        assert job.figures() == before


@contextlib.contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[None]:
    """Mounts a small file system at ``folder``."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    if (
        os.geteuid()
        or subprocess.run(mount, check=False, capture_output=True).returncode
    ):
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_ends_the_job_in_words_and_the_last_checkpoint_goes_on(
    whole: Job, tmp_path: Path
) -> None:
    folder = tmp_path / "disk" / "checkpoints"
    kept = (f"--checkpoint.folder={folder}", "--checkpoint.keep=99")
    size = sum(
        file.stat().st_size for file in (whole.run_dir / "checkpoints").glob("*/*")
    ) // len(whole.steps())
    with small_disk(tmp_path / "disk", 4 * size // 1024):
        with Job(tmp_path / "run", *kept) as job:
            assert job.end() == 1, job.output
            lines = job.output.splitlines()
            remedy = "no space is left; make room, or lower checkpoint.keep"
            assert any("step-" in line and remedy in line for line in lines), job.output
            whole_ones = folder.glob(f"step-*[0-9]/{MANIFEST_NAME}")
            good = sorted(path.parent.name for path in whole_ones)
            assert 2 <= len(good) <= 4
            assert gone(job.descendants(), 5)
        subprocess.run(
            ["mount", "-o", "remount,size=100m", str(tmp_path / "disk")], check=True
        )
        with Job(tmp_path / "run", *kept) as job:
            assert job.end() == 0, job.output
            assert f"resuming from {folder}/{good[-1]}" in job.output
            assert job.records() == whole.records()
            assert job.figures() == whole.figures()
