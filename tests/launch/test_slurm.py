"""Jobs on a real Slurm of two nodes: `torchx run`, status, log, list and cancel; killed ranks, agents, time limits."""

import os
import re
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.launch.jobs import SETTINGS, Job, RunFiles
from tests.launch.slurm_cluster import NODES, NoPackagesError, SlurmCluster
from tests.launch.two_hosts import Network, missing
from tests.small_sets import write_ml_100k

pytestmark = [pytest.mark.launch, pytest.mark.slow(minutes=0.6)]
AGENT, RANK = "torchx_apps.agent", "torchx_apps.train"
# `auto` plans by hosts, so that one host and two would place the tables in two ways.
FIXED = (*SETTINGS, "plan.sharding=row_wise")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Network(1 + len(NODES)) as network:
        try:
            made = SlurmCluster(network, tmp_path_factory.mktemp("slurm"))
        except NoPackagesError as error:
            pytest.skip(str(error))
        with made as running:
            yield running


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run on this machine, under the agent alone, that nothing disturbed."""
    with Job(tmp_path_factory.mktemp("whole") / "run", settings=FIXED) as job:
        assert job.end() == 0, job.output
    return job


def submit(
    cluster: SlurmCluster, run: Path, *flags: str, retries: int = 0, cfg: str = ""
) -> str:
    settings = [f"--set={item}" for item in FIXED]
    words = [
        "rec.train.hybrid",
        "-j",
        "2x1",
        "--run_dir",
        str(run),
        "--max_retries",
        str(retries),
        *settings,
        *flags,
    ]
    return cluster.submit(*words, cfg=cfg)


def weights(run: Path) -> dict[str, bytes]:
    """The values of the last checkpoint, of weights and optimizer; its other files have times and ids of the save."""
    last = max((run / "checkpoints").glob("step-*"))
    return {file.name: file.read_bytes() for file in last.glob("*.distcp")}


def ended_alike(run: RunFiles, whole: Job) -> bool:
    return run.records() == whole.records() and run.figures() == whole.figures()


def test_two_nodes_train_what_one_machine_trains_byte_for_byte(
    cluster: SlurmCluster, whole: Job, tmp_path: Path
) -> None:
    # With a comma, at which `srun --export` would cut it.
    job = submit(cluster, tmp_path / "run", "--env", "PASSED_ON=eth0,eth1")
    assert (
        cluster.torchx("list", "-s", "slurm").stdout.count(f"slurm://torchx/{job} ")
        == 1
    )
    assert cluster.end(job) == "SUCCEEDED", cluster.files(job)
    assert len(weights(whole.run_dir)) == 2
    assert weights(tmp_path / "run") == weights(whole.run_dir)
    assert ended_alike(RunFiles(tmp_path / "run"), whole)
    assert "export PASSED_ON=eth0,eth1" in cluster.files(job)
    log = cluster.torchx("log", f"slurm://torchx/{job}/train/0").stdout
    assert "ranks: 2 on cpu over gloo" in log, "stdout"
    assert "train/0 " in log


def test_a_killed_rank_and_a_killed_agent_end_as_if_they_never_were(
    cluster: SlurmCluster, whole: Job, tmp_path: Path
) -> None:
    run = RunFiles(tmp_path / "run")
    job = submit(cluster, run.run_dir, retries=2)
    cluster.until(job, run.steps)
    (rank,) = cluster.processes(1, running=RANK)
    os.kill(rank, signal.SIGKILL)
    seen = run.steps()[-1]
    cluster.until(job, lambda: run.steps()[-1] > seen)
    assert cluster.restarts(job) == 0, "the agents start the ranks again"
    (agent,) = cluster.processes(2, running=AGENT)
    os.kill(agent, signal.SIGKILL)
    assert cluster.end(job) == "SUCCEEDED", cluster.files(job)
    assert cluster.restarts(job) == 1, "Slurm starts the agents again"
    assert ended_alike(run, whole)


def test_a_cancelled_job_saves_and_another_one_goes_on(
    cluster: SlurmCluster, whole: Job, tmp_path: Path
) -> None:
    run = RunFiles(tmp_path / "run")
    job = submit(cluster, run.run_dir)
    cluster.until(job, run.steps)
    done = cluster.torchx("cancel", f"slurm://torchx/{job}")
    assert (done.returncode, done.stderr) == (0, "")
    assert cluster.end(job) == "CANCELLED", cluster.files(job)
    assert not (run.run_dir / "summary.json").exists()
    job = submit(cluster, run.run_dir, "--resume", "auto")
    assert cluster.end(job) == "SUCCEEDED", cluster.files(job)
    assert ended_alike(run, whole)


def test_a_job_at_its_time_limit_saves_and_goes_on_from_there(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    run = RunFiles(tmp_path / "run")
    job = submit(
        cluster, run.run_dir, "--set=train.epochs=100000", retries=1, cfg="time=2"
    )
    resumed = f"resuming from {run.run_dir}"
    cluster.until(
        job,
        lambda: cluster.restarts(job) and resumed in cluster.files(job),
        seconds=400,
    )
    output = cluster.files(job)
    assert "TIME LIMIT" not in output, "it ended before Slurm would have killed it"
    cluster.torchx("cancel", f"slurm://torchx/{job}")
    assert cluster.end(job) == "CANCELLED"


def test_a_mistake_that_only_the_job_meets_is_the_last_word_and_not_tried_again(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path / "run", "--set=plan.memory_gb=0.0001", retries=2)
    assert cluster.end(job) == "FAILED"
    assert cluster.restarts(job) == 0
    assert cluster.files(job).count("attempts left") == 0
    log = cluster.torchx("log", f"slurm://torchx/{job}/train/0").stdout
    assert log.count("no sharding plan fits: tables with optimizer state need ") == 1
    assert "Traceback" not in log
    assert "job exited with code 200" in cluster.files(job)


def test_the_other_components_run_too_and_the_service_names_its_node(
    cluster: SlurmCluster, whole: Job, tmp_path: Path
) -> None:
    write_ml_100k(tmp_path)
    settings = [f"--set={item}" for item in FIXED]
    bundle = str(tmp_path / "bundle")
    files = [f"--set=config.folder={tmp_path / 'ml-100k'}", "--set=pictures=false"]
    jobs = [
        cluster.submit(
            "rec.serve.export", "--run", str(whole.run_dir), "--out", bundle
        ),
        cluster.submit("rec.data.preprocess", "--out", str(tmp_path / "ready"), *files),
        cluster.submit(
            "rec.train.networks",
            "--vary",
            "train.seed=0,1",
            "--run_dir",
            str(tmp_path / "networks"),
            *settings,
        ),
    ]
    for job in jobs:
        assert cluster.end(job) == "SUCCEEDED", cluster.files(job)
    job = cluster.submit(
        "rec.embed",
        "--bundle",
        bundle,
        "--tower",
        "query",
        "--out",
        str(tmp_path / "vectors"),
    )
    service = cluster.submit("rec.serve.http", "--bundle", bundle, "--host", "0.0.0.0")
    assert cluster.end(job) == "SUCCEEDED", cluster.files(job)
    made = (
        "bundle/manifest.json",
        "ready/summary.json",
        "networks/results.json",
        "vectors/CURRENT",
    )
    assert [file for file in made if not (tmp_path / file).exists()] == []
    cluster.until(
        service,
        lambda: re.search(
            r"at http://host[12]:8000/ with 1 worker", cluster.files(service)
        ),
    )
    cluster.torchx("cancel", f"slurm://torchx/{service}")
    assert cluster.end(service) == "CANCELLED"


def commands_of_the_page() -> list[str]:
    """The lines of docs/launch.md, under Slurm, that ask Slurm."""
    page = (Path(__file__).parents[2] / "docs" / "launch.md").read_text()
    return re.findall(
        r"^\.venv/bin/(torchx .*slurm.*)$",
        page.partition("## Slurm\n")[2].partition("\n## ")[0],
        re.M,
    )


def submit_chain(
    cluster: SlurmCluster, folder: Path, stages: Mapping[str, Sequence[str]]
) -> list[str]:
    """Submits the page's chain, in a folder, with settings for each component; returns the numbers of the jobs."""
    jobs: list[str] = []
    for line in commands_of_the_page()[5:]:
        line = re.sub(r"--(out|run|run_dir) (\S+)", rf"--\1 {folder}/\2", line).replace(
            "=gpu", "=main"
        )
        line = re.sub(r"afterok:\d+", lambda _: f"afterok:{jobs[-1]}", line).replace(
            "-j 2x8 --gpu 8", "-j 2x1"
        )
        words = shlex.split(
            line.replace("data.name=films", f"data.name={folder}/films"), comments=True
        )
        (name,) = set(words) & set(stages)
        done = cluster.run(*words, *(f"--set={key}" for key in stages[name]))
        assert done.returncode == 0, done.stderr
        jobs.append(done.stdout.strip().rpartition("/")[2])
    return jobs


def test_a_chain_of_three_jobs_makes_a_bundle(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    write_ml_100k(tmp_path)
    data = [f"config.folder={tmp_path / 'ml-100k'}", "pictures=false"]
    training = [
        "train.epochs=2",
        "train.compile=off",
        "plan.sharding=row_wise",
        "loader.batch_size=64",
    ]
    stages = {
        "rec.data.preprocess": data,
        "rec.train.hybrid": training,
        "rec.serve.export": [],
    }
    with cluster.held():
        jobs = submit_chain(cluster, tmp_path, stages)
        for job in jobs[
            1:
        ]:  # in the status a partition that is down may come before what a job waits for
            assert (
                "State: PENDING"
                in cluster.torchx("status", f"slurm://torchx/{job}").stdout
            )
            assert (
                "Dependency=afterok:"
                in cluster.run("scontrol", "show", "job", job).stdout
            )
    for job in jobs:
        assert cluster.end(job) == "SUCCEEDED", cluster.files(job)
    assert (tmp_path / "bundle" / "manifest.json").exists()


def test_a_chain_ends_with_the_job_that_fails(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    data = [f"config.folder={tmp_path / 'nowhere'}"]
    with cluster.held():
        jobs = submit_chain(
            cluster,
            tmp_path,
            {
                "rec.data.preprocess": data,
                "rec.train.hybrid": [],
                "rec.serve.export": [],
            },
        )
    assert [cluster.end(job) for job in jobs] == ["FAILED", "CANCELLED", "CANCELLED"], (
        cluster.files(jobs[0])
    )
    assert (
        str(tmp_path / "nowhere")
        in cluster.torchx("log", f"slurm://torchx/{jobs[0]}/preprocess/0").stdout
    )


def test_nodes_that_come_and_go_are_refused(cluster: SlurmCluster) -> None:
    done = cluster.torchx("run", "-s", "slurm", "rec.train.hybrid", "-j", "1:2x1")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "torchx run: error: -j 1:2x...: Slurm gives a job all of its nodes"
    )


def test_the_commands_of_the_page_work_as_they_stand(cluster: SlurmCluster) -> None:
    commands = commands_of_the_page()[:5]
    assert [command.split()[1] for command in commands] == [
        "run",
        "status",
        "log",
        "list",
        "cancel",
    ]
    submitted = cluster.run(*commands[0].split())
    assert submitted.returncode == 0, submitted.stderr
    address = submitted.stdout.strip()
    job = address.rpartition("/")[2]
    cluster.until(job, lambda: cluster.state(job) == "RUNNING")
    for command in commands[1:]:
        done = cluster.run(*command.replace("slurm://torchx/1", address).split())
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert cluster.end(job) == "CANCELLED", cluster.files(job)


def test_a_port_that_another_program_has_is_named(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    with cluster.listening(1, port=23_456):
        job = submit(cluster, tmp_path / "run", "--rdzv_port", "23456")
        assert cluster.end(job) == "FAILED"
    assert (
        "host1:23456, where the nodes would meet: another program listens on this port; "
        in cluster.files(job)
    )
    assert "Traceback" not in cluster.files(job)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--cpu", "64"],
            "--cpu 64: the partition's largest node has 4; ask for less, or for another one: -cfg",
        ),
        (["--memMB", "9000"], "--memMB 9000: the partition's largest node has 8000; "),
        (["-j", "1x1", "--gpu", "1"], "--gpu 1: the partition's largest node has 0; "),
        (
            ["-j", "3x1"],
            "-j: 3 nodes with 2 CPUs, 4096 MiB and 0 GPUs each, and the partition has 2 such nodes; ",
        ),
    ],
)
def test_a_job_that_no_node_can_run_is_refused_and_not_left_pending(
    flags: list[str], message: str, cluster: SlurmCluster
) -> None:
    jobs = ("squeue", "-h", "-t", "all", "-o", "%i")
    before = cluster.run(*jobs).stdout.split()
    done = cluster.torchx("run", "-s", "slurm", "rec.train.hybrid", *flags)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"torchx run: error: {message}")
    # Slurm forgets what has ended
    assert set(cluster.run(*jobs).stdout.split()) <= set(before)


def test_what_slurm_refuses_ends_with_slurms_words(cluster: SlurmCluster) -> None:
    done = cluster.torchx(
        "run", "-s", "slurm", "-cfg", "partition=none", "rec.data.preprocess"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "sbatch: error: Batch job submission failed: Invalid partition name specified"
    )


def test_a_job_that_slurm_does_not_know_is_one_line(cluster: SlurmCluster) -> None:
    for command in ("status", "log"):
        done = cluster.torchx(
            command, "slurm://torchx/99999" + ("/train/0" if command == "log" else "")
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "the scheduler knows no such job, or no longer\n"
