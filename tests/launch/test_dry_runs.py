"""What each component becomes on each scheduler, compared with what is stored in dry_runs/, to the letter.

A change that is meant is written by `.venv/bin/python -m tests.launch.test_dry_runs`, and read in the diff.
"""

import contextlib
import difflib
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import pytest
from torchx.specs.finder import get_components

from torchx_apps.launch.commands import schedulers
from torchx_apps.torchx_run import JobRunner, gather_overrides

pytestmark = pytest.mark.unit

STORED = Path(__file__).with_name("dry_runs")
COMPONENTS = (
    "rec.train.hybrid -j 2x4 --gpu 4 --max_retries 3 --run_dir /runs/a --set train.seed=1 --set train.epochs=2",
    "rec.train.hybrid -j 1:3x2 --recipe ncf",
    "rec.train.networks --vary train.seed=0,1 -j 1x2 --run_dir /runs/n",
    "rec.train.stream --log /data/clicks --run_dir /runs/s --resume auto --max_retries 3",
    "rec.data.preprocess --recipe clicks --out /runs/ready",
    "rec.serve.export --run /runs/a --out /runs/b",
    "rec.serve.http --bundle /runs/b --host 0.0.0.0 --workers 2",
    "rec.embed --bundle /runs/b --catalogue /data/i --id i --out /runs/v",
)
SHARED = "--image my_image:1 --env NCCL_SOCKET_IFNAME=eth0 --mounts type=volume,src=runs,dst=/runs"
CFG: Mapping[str, Mapping[str, str]] = {
    "local_cwd": {"log_dir": "/logs"},
    "slurm": {"partition": "main", "time": "02:00:00"},
    "kubernetes": {
        "queue": "default",
        "namespace": "ml",
        "secret": "keys",
        "run_as": "10001",
    },
}


@contextlib.contextmanager
def same_everywhere() -> Iterator[None]:
    """An empty folder, no settings of this machine, and a job's name without its chance ending."""
    before = Path.cwd()
    variables = {"PATH": "/bin"} | {
        name: os.environ[name] for name in ("HOME", "USER") if name in os.environ
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("torchx.schedulers.ids.random_id", return_value="id"),
    ):
        os.chdir(folder)
        try:
            with mock.patch.dict(os.environ, variables, clear=True):
                yield
        finally:
            os.chdir(before)


def dry_runs(scheduler: str) -> str:
    """What `torchx run --dryrun` says of every component."""
    pages = []
    with same_everywhere(), JobRunner("torchx", schedulers()) as runner:
        for line in COMPONENTS:
            name, *flags = gather_overrides([*shlex.split(line)])
            behind = flags.index("--") if "--" in flags else len(flags)
            words = [*flags[:behind], *SHARED.split(), *flags[behind:]]
            try:
                info: object = runner.dryrun_component(
                    name, words, scheduler, cfg=dict(CFG[scheduler])
                )
            except ValueError as error:
                info = f"refused: {error}"
            pages.append(
                f"=== {line}\n{str(info).replace(os.getcwd(), 'FOLDER').strip()}\n"
            )
    return "\n".join(pages)


@pytest.mark.parametrize("scheduler", CFG)
def test_dry_runs_are_those_that_are_stored(scheduler: str) -> None:
    if scheduler == "kubernetes":
        pytest.importorskip("kubernetes", reason="needs the extra kubernetes")
    stored = (STORED / f"{scheduler}.txt").read_text()
    changed = "\n".join(
        difflib.unified_diff(
            stored.splitlines(), dry_runs(scheduler).splitlines(), "stored", "now"
        )
    )
    assert not changed, (
        f"if that is meant: .venv/bin/python -m tests.launch.test_dry_runs\n{changed}"
    )


def test_every_component_is_stored() -> None:
    assert {name for name in get_components() if name.startswith("rec.")} == {
        line.split()[0] for line in COMPONENTS
    }


if __name__ == "__main__":
    STORED.mkdir(exist_ok=True)
    for each in CFG:
        (STORED / f"{each}.txt").write_text(dry_runs(each))
