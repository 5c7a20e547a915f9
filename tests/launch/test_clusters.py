"""Real jobs on a Slurm cluster and through a Kubernetes API server with Volcano, where the environment names one.

``TORCHREC_EXT_SLURM`` is a command that runs its arguments on the login node, such as ``ssh login``; the nodes see
the temporary folder, and the environment's ``bin`` is in their PATH. ``TORCHREC_EXT_KUBE_VOLUME`` is the folder
of the volume `runs` of the namespace `ml`, in the cluster that ``KUBECONFIG`` names; its image is my_image:1.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.launch.jobs import SETTINGS, Job, RunFiles

SLURM = os.environ.get("TORCHREC_EXT_SLURM", "").split()
VOLUME = os.environ.get("TORCHREC_EXT_KUBE_VOLUME", "")
TORCHX = str(Path(sys.executable).parent / "torchx")
WORDS = [f"--{setting}" for setting in SETTINGS]
WAIT_S = 300

pytestmark = [pytest.mark.slow(minutes=5), pytest.mark.launch]


def say(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not after {WAIT_S} s: {what}"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    """The same training on two ranks of this machine."""
    with Job(tmp_path_factory.mktemp("here") / "run") as job:
        assert job.end() == 0, job.output
    return job


class Slurm:
    """Jobs of this test on a Slurm cluster, submitted by ``torchx run`` from one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def submit(self, run: str) -> str:
        """Submits a training on two nodes; returns the number of its job."""
        words = [TORCHX, "run", "-s", "slurm", "-cfg", "partition=main"]
        words += ["rec.train.hybrid", "-j", "2x1", "--rdzv_port", "29617", "--"]
        said = say([*SLURM, *words, "--run_dir", run, *WORDS], self.folder)
        # TorchX 0.7.0 asks sacct for the job that it has submitted; without accounting that ends in a traceback
        # which still names the job.
        numbers = re.findall(r"slurm://torchx/(\d+)|'-j', '(\d+)'", said)
        assert numbers, said
        return next(filter(None, numbers[-1]))

    def states(self, job: str) -> set[str]:
        return set(
            say(
                [*SLURM, "squeue", "-h", "-t", "all", "-j", job, "-o", "%T"],
                self.folder,
            ).split()
        )

    def wait_end(self, job: str) -> set[str]:
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        wait_for(lambda: bool(self.states(job)) and self.states(job) <= ended, job)
        return self.states(job)

    def output(self) -> str:
        return "\n".join(
            file.read_text() for file in sorted(self.folder.glob("slurm-*"))
        )


@pytest.mark.skipif(not SLURM, reason="TORCHREC_EXT_SLURM names no Slurm cluster")
def test_a_cancelled_job_on_two_slurm_nodes_goes_on_to_the_same_end(
    tmp_path: Path, uninterrupted: RunFiles
) -> None:
    slurm = Slurm(tmp_path)
    run = RunFiles(tmp_path / "run")
    first = slurm.submit(str(run.run_dir))
    wait_for(lambda: len(run.steps()) > 1, "a checkpoint")
    say([*SLURM, "scancel", first], tmp_path)
    assert slurm.wait_end(first) == {"CANCELLED"}
    kept = run.steps()
    assert kept
    assert not (run.run_dir / "summary.json").exists()
    second = slurm.submit(str(run.run_dir))
    assert slurm.wait_end(second) == {"COMPLETED"}, slurm.output()
    assert run.records() == uninterrupted.records()
    assert run.figures() == uninterrupted.figures()


@pytest.mark.skipif(
    not VOLUME, reason="TORCHREC_EXT_KUBE_VOLUME names no Kubernetes cluster"
)
def test_a_job_of_two_pods_trains_what_this_machine_trains(
    tmp_path: Path, uninterrupted: RunFiles
) -> None:
    name = f"two-{os.getpid()}"
    words = [TORCHX, "run", "-s", "kubernetes", "-cfg", "queue=default,namespace=ml"]
    words += ["--workspace=", "rec.train.hybrid", "--name", f"exp/{name}"]
    words += ["--image", "my_image:1", "-j", "2x1"]
    words += ["--mounts", "type=volume,src=runs,dst=/srv", "--"]
    said = say([*words, "--run_dir", f"/srv/{name}", *WORDS], tmp_path)
    handles = re.findall(r"kubernetes://\S+", said)
    assert handles, said
    run = RunFiles(Path(VOLUME) / name)
    wait_for(lambda: (run.run_dir / "summary.json").exists(), said)
    wait_for(
        lambda: "SUCCEEDED" in say([TORCHX, "status", handles[0]], tmp_path), "the end"
    )
    assert run.records() == uninterrupted.records()
    assert run.figures() == uninterrupted.figures()
