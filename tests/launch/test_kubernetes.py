"""Jobs on a real Kubernetes API server: `torchx run`, status, log, list and cancel; a killed pod, a late node."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobs import SETTINGS, Job, RunFiles
from tests.launch.kubernetes_cluster import KubernetesCluster, missing_programs
from tests.launch.two_hosts import Network, missing

pytestmark = [pytest.mark.launch, pytest.mark.slow(minutes=1)]
# `auto` plans by hosts, so that one host and two would place the tables in two ways.
FIXED = (*SETTINGS, "plan.sharding=row_wise")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesCluster]:
    pytest.importorskip("kubernetes", reason="needs the extra kubernetes")
    reason = missing_programs() or missing()
    if reason:
        pytest.skip(reason)
    with (
        Network(3) as network,
        KubernetesCluster(network, tmp_path_factory.mktemp("kubernetes")) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run on this machine, under the agent alone, that nothing disturbed."""
    with Job(tmp_path_factory.mktemp("whole") / "run", settings=FIXED) as job:
        assert job.end() == 0, job.output
    return job


def submit(
    cluster: KubernetesCluster, run: str, *flags: str, j: str = "2x1", retries: int = 0
) -> tuple[str, RunFiles]:
    settings = [f"--set={item}" for item in FIXED]
    words = [
        "rec.train.hybrid",
        "-j",
        j,
        "--run_dir",
        f"/mnt/{run}",
        "--max_retries",
        str(retries),
    ]
    return cluster.submit(*words, *settings, *flags), RunFiles(cluster.claim / run)


def weights(run: Path) -> dict[str, bytes]:
    last = max((run / "checkpoints").glob("step-*"))
    return {file.name: file.read_bytes() for file in last.glob("*.distcp")}


def ended_alike(run: RunFiles, whole: Job) -> bool:
    return run.records() == whole.records() and run.figures() == whole.figures()


def test_two_pods_train_what_one_machine_trains_byte_for_byte(
    cluster: KubernetesCluster, whole: Job
) -> None:
    with cluster.held("train-1"):  # the first node waits for it
        job, run = submit(cluster, "whole")
        cluster.until(job, lambda: cluster.state(job) == "RUNNING")
        assert f"{job} " in cluster.torchx("list", "-s", "kubernetes").stdout
    assert cluster.end(job) == "SUCCEEDED", cluster.files(job)
    assert weights(run.run_dir) == weights(whole.run_dir)
    assert ended_alike(run, whole)
    log = cluster.torchx("log", f"{job}/train/0").stdout
    assert "ranks: 2 on cpu over gloo" in log
    assert "b'" not in log


def test_a_killed_pod_ends_as_if_it_never_was(
    cluster: KubernetesCluster, whole: Job
) -> None:
    job, run = submit(cluster, "killed", retries=1)
    cluster.until(job, run.steps)
    cluster.kill(job, 1)
    assert cluster.end(job) == "SUCCEEDED", cluster.files(job)
    assert "resuming from" in cluster.files(job)
    assert ended_alike(run, whole)


def test_a_cancelled_job_saves_and_another_one_goes_on(
    cluster: KubernetesCluster, whole: Job
) -> None:
    job, run = submit(cluster, "cancelled")
    cluster.until(job, run.steps)
    assert (
        cluster.torchx("cancel", job).returncode,
        cluster.torchx("status", job).stderr,
    ) == (
        0,
        "the scheduler knows no such job, or no longer\n",
    )
    again, _ = submit(cluster, "cancelled", "--resume", "auto")
    assert cluster.end(again) == "SUCCEEDED", cluster.files(again)
    assert "resuming from" in cluster.files(again)
    assert ended_alike(run, whole)


def test_an_elastic_job_begins_with_one_node_and_goes_on_with_two(
    cluster: KubernetesCluster,
) -> None:
    flags = ["--set=train.epochs=100000", "--env", "PET_RDZV_CONF=last_call_timeout:5"]
    with cluster.held("train-1"):
        job, run = submit(cluster, "elastic", *flags, j="1:2x1")
        cluster.until(job, run.steps)
    cluster.until(job, lambda: "resuming from" in cluster.files(job))
    ranks = re.findall(r"^ranks: (\d)", cluster.files(job), re.MULTILINE)
    cluster.torchx("cancel", job)
    assert ranks == ["1", "2"]


def test_a_mistake_that_only_the_job_meets_is_not_tried_again(
    cluster: KubernetesCluster,
) -> None:
    job, _ = submit(cluster, "mistake", "--set=plan.memory_gb=0.0001", retries=2)
    assert cluster.end(job) == "FAILED"
    log = cluster.torchx("log", f"{job}/train/0").stdout
    assert log.count("no sharding plan fits: tables with optimizer state need ") == 1
    assert "Traceback" not in log


def test_what_the_cluster_lacks_or_refuses_is_one_line(
    cluster: KubernetesCluster,
) -> None:
    for flags, user, line in (
        (
            ["--mounts", "type=volume,src=none,dst=/mnt"],
            "admin",
            "--mounts src=none: namespace ml has no Persistent",
        ),
        (
            [],
            "guest",
            "-s kubernetes: the cluster refuses the job: jobs.batch.volcano.sh is forbidden: User",
        ),
    ):
        done = cluster.run("rec.data.preprocess", *flags, user=user)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(f"torchx run: error: {line}"), (
            done.stderr
        )
    for words in (
        ["list", "-s", "kubernetes"],
        ["cancel", "kubernetes://torchx/ml:none"],
    ):
        done = cluster.torchx(*words, user="guest")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert "is forbidden: User" in done.stderr


def test_a_user_who_is_not_root_runs_on_a_root_folder_that_is_read_only(
    cluster: KubernetesCluster,
) -> None:
    training = [
        "rec.train.hybrid",
        *("-j", "1x1"),
        *("--set", "data.name=planted"),
        *("--set", "train.epochs=1"),
        *("--run_dir", "/mnt/run"),
    ]
    job = cluster.submit(*training, cfg="run_as=10001")
    assert cluster.end(job) == "SUCCEEDED", cluster.files(job)
    made = cluster.claim / "run" / "summary.json"
    assert json.loads(made.read_text())
    assert made.stat().st_uid == 10001
