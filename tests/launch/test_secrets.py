"""A secret of the shell that submits is shown nowhere: not in the request, by `ps`, in logs or in the run folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.jobs import Launched

pytestmark = pytest.mark.launch

PLANTED = "hunter2-planted"
SECRETS = dict.fromkeys(
    ("REDIS_PASSWORD", "TORCHREC_EXT_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"),
    PLANTED,
)
TORCHX = [str(Path(sys.executable).with_name("torchx")), "run"]
TINY = (
    "data.name=planted",
    "data.users=60",
    "data.items=50",
    "data.history_length=5",
    "train.epochs=1",
    "train.compile=off",
)


def commands() -> str:
    """The command lines of all processes, as `ps` shows them."""
    lines = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(process.read_text(errors="replace").replace("\0", " "))
        except OSError:  # it has ended
            continue
    return "\n".join(lines)


def environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:  # it has ended
        return ""


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (
            ["local_cwd"],
            ["rec.serve.http", "--bundle", "b", "--vectors", "users"],
        ),
        (
            ["slurm"],
            [
                "rec.embed",
                "--bundle",
                "b",
                "--tower",
                "query",
                "--out",
                "users",
            ],
        ),
        (
            ["kubernetes", "-cfg", "queue=q,secret=keys"],
            ["rec.train.hybrid", "--image", "my_image:1"],
        ),
    ],
)
def test_what_is_submitted_does_not_hold_the_secrets(
    scheduler: list[str], words: list[str], tmp_path: Path
) -> None:
    if scheduler[0] == "kubernetes":
        pytest.importorskip("kubernetes", reason="needs the extra kubernetes")
    done = subprocess.run(
        [*TORCHX, "-s", *scheduler, "--workspace=", "--dryrun", *words],
        cwd=tmp_path,
        env={**os.environ, **SECRETS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "=== SCHEDULER REQUEST ===" in done.stdout
    assert PLANTED not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_job_shows_the_secrets_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [f"--set={item}" for item in TINY]
    seen = []
    with Launched(
        [*TORCHX, "rec.train.hybrid", "-j", "1x1", "--run_dir", "run", *settings],
        SECRETS,
    ) as job:
        job.until(
            lambda: any(
                f"REDIS_PASSWORD={PLANTED}" in environment(rank) for rank in job.ranks()
            )
        )
        seen.append(commands())
        assert job.end() == 0, job.output
        seen.append(job.output)
    assert PLANTED not in "\n".join(seen)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"config.json", "summary.json"} <= {file.name for file in files}
    assert [file for file in files if PLANTED.encode() in file.read_bytes()] == []
