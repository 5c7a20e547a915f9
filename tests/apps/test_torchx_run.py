"""Our `torchx run` up to what it would launch: flags keep their order, mistakes are reported before anything runs."""

import argparse
import re
import shlex
import sys
from pathlib import Path

import pytest

from torchx_apps.launch.slurm import SlurmScheduler
from torchx_apps.torchx_run import JobRunner, Run

pytestmark = pytest.mark.unit

CLONE = Path(__file__).parents[2]


@pytest.fixture
def in_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose .torchxconfig names the component; TorchX would look for it where TorchX was imported."""
    monkeypatch.chdir(CLONE)
    monkeypatch.setenv("TORCHXCONFIG", str(CLONE / ".torchxconfig"))


def run(*words: str) -> None:
    """`torchx run` with these words."""
    parser = argparse.ArgumentParser(prog="torchx run")
    command = Run()
    command.add_arguments(parser)
    command.run(
        parser.parse_args([*words], namespace=argparse.Namespace(log_level="INFO"))
    )


def launched(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The command of the job that `torchx run --dryrun` would start."""
    run("--dryrun", *words)
    # long strings are broken into lines
    printed = re.sub(r"['\"]\n\s*['\"]", "", capsys.readouterr().out)
    return next(line for line in printed.splitlines() if "torchx_apps.train" in line)


def overrides(command: str) -> list[str]:
    return re.findall(r"--set=([\w.]+=\w+)", command)


@pytest.mark.parametrize(
    "typed",
    [
        "--set a=1 --set b=2",
        "--set a=1 -- -j 1x3 --set b=2",
        "--set=a=1 rec.train.hybrid --set b=2",
        "--set a=1 rec.train.hybrid -j 1x3 --set=b=2 --recipe ncf",
        "rec.train.hybrid --set a=1 -j 1x3 --set b=2",
        "rec.train.hybrid --set a=1 -- --set b=2 --dry-run",
        "--set a=1 rec.train.hybrid -- --dry-run --set b=2",
        "--set b=1 --set a=1 rec.train.hybrid --set b=1 --set b=2",
    ],
)
@pytest.mark.usefixtures("in_the_clone")
def test_every_override_is_launched_in_the_order_typed(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = launched(capsys, *shlex.split(typed))
    assert overrides(command)[-1] == "b=2"
    assert set(overrides(command)) >= {"a=1", "b=2"}
    assert overrides(command).index("a=1") < overrides(command).index("b=2")
    for flag, words in (
        ("-j 1x3", "--nproc_per_node 3 "),
        ("--recipe ncf", "--recipe ncf"),
        ("--dry-run", "--dry-run"),
    ):
        assert (words in command) == (flag in typed)


def test_a_scheduler_without_its_package_is_told_in_one_line_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("kubernetes", "kubernetes.client", "kubernetes.client.models"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    with pytest.raises(SystemExit, match=r"^1$"):
        run(
            "-s",
            "kubernetes",
            "-cfg",
            "queue=default",
            "--workspace=",
            "--dryrun",
            "rec.train.hybrid",
            "--image",
            "my_image:1",
        )
    printed = capsys.readouterr()
    install = (
        "pip install 'torchrec-ext[kubernetes]', or in the clone -e '.[kubernetes]'"
    )
    message = f"-s kubernetes needs the extra kubernetes: {install}"
    assert (printed.out, printed.err.splitlines()[-1]) == ("", message)
    assert "Traceback" not in printed.err


def test_docker_that_does_not_answer_is_one_line_with_the_way_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("kubernetes", reason="needs the extra kubernetes")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(SystemExit, match=r"^1$"):
        run(
            "-s",
            "kubernetes",
            "-cfg",
            "queue=default",
            "--dryrun",
            "rec.train.hybrid",
            "--image",
            "my_image:1",
        )
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        'Docker, which does not answer on this machine; write --workspace "" to run --image as it is'
        in line
    )


def test_a_job_whose_state_cannot_be_read_is_submitted_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ConnectionError("the server is away")

    monkeypatch.setattr(SlurmScheduler, "describe", broken)
    with JobRunner(
        "torchx", {"slurm": lambda session_name, **_: SlurmScheduler(session_name)}
    ) as jobs:
        assert jobs.status("slurm://torchx/7") is None
    line = "note: slurm://torchx/7 is submitted, but its state cannot be read: the server is away\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    "words", ["rec.train.hybrid --name a/b/c", "rec.serve.export --run a --name b/c"]
)
def test_a_name_with_a_slash_is_refused(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(*words.split())
    assert (
        "the job would be called 'b/c', and a job's name has no slash"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "topology", ["1x99999", pytest.param("99999x1", marks=pytest.mark.slow)]
)
def test_more_ranks_than_the_machine_has_memory_for_are_refused_at_once(
    topology: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        run("rec.train.hybrid", "-j", topology)
    assert capsys.readouterr().err.startswith(
        "99999 ranks on one machine: they need 25,000 GiB before they read any data, and it"
    )
