"""What the components become on clusters: Slurm's script and Kubernetes' job, which both train on this machine."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torchrec_ext.components import serve, train  # type: ignore[import-not-found]
from torchx.schedulers.api import Stream
from torchx.specs import AppDef, AppState
from torchx.specs.builders import materialize_appdef

from tests.contracts import free_ports
from torchx_apps.cli.process import MISTAKE, MISTAKE_FILE
from torchx_apps.launch.slurm import SlurmScheduler


def kubernetes_job(app: AppDef) -> dict[str, Any]:
    """The resource that `torchx run -s kubernetes` would create."""
    pytest.importorskip("kubernetes", reason="needs the extra kubernetes")
    from torchx_apps.launch.kubernetes import KubernetesScheduler

    made = KubernetesScheduler("test").submit_dryrun(app, {"queue": "default"})
    return dict(made.request.resource)


def slurm_script(app: AppDef) -> str:
    """What `torchx run -s slurm` would submit."""
    made = SlurmScheduler("test").submit_dryrun(
        app, {"partition": "gpu", "time": "02:00:00"}
    )
    return str(made.request.materialize())


def app_of(component: Callable[..., AppDef], *flags: str) -> AppDef:
    return materialize_appdef(component, list(flags))


def containers(job: dict[str, Any]) -> list[Any]:
    return [task["template"].spec.containers[0] for task in job["spec"]["tasks"]]


@pytest.mark.unit
def test_slurm_starts_one_agent_on_each_node_and_asks_for_what_was_asked() -> None:
    script = slurm_script(
        app_of(
            train.hybrid,
            "-j",
            "2x8",
            "--gpu",
            "8",
            "--cpu",
            "64",
            "--memMB",
            "400000",
            "--max_retries",
            "2",
        )
    )
    asked = [
        line.split() for line in script.splitlines() if line.startswith("#SBATCH --")
    ]
    assert len(asked) == 2
    for words in asked:
        assert {
            "--ntasks-per-node=1",
            "--gpus-per-task=8",
            "--cpus-per-task=64",
            "--mem=400000",
            "--requeue",
        } <= set(words)
        assert {"--partition=gpu", "--time=02:00:00"} <= set(words)
    assert script.count("python3 -m torchx_apps.agent --max_restarts 2 ") == 2
    assert (
        script.count("--rdzv_endpoint ${SLURM_JOB_NODELIST_HET_GROUP_0:=localhost}:0 ")
        == 2
    )
    assert all("--signal=TERM@60" in words for words in asked), (
        "the ranks save before the time limit"
    )


@pytest.mark.unit
def test_slurm_can_be_told_to_wait_for_another_job() -> None:
    given = {"partition": "gpu", "dependency": "afterok:7"}
    made = SlurmScheduler("test").submit_dryrun(app_of(train.hybrid), given)
    assert made.request.cmd == [
        "sbatch",
        "--parsable",
        "--dependency=afterok:7",
        "--kill-on-invalid-dep=yes",
    ]
    assert "dependency" not in " ".join(
        SlurmScheduler("test").submit_dryrun(app_of(train.hybrid), {}).request.cmd
    )


@pytest.mark.unit
def test_slurms_script_carries_any_value_of_a_variable() -> None:
    values = {
        "NCCL_SOCKET_IFNAME": "eth0,eth1",
        "A": 'it\'s $HOME "b" \\ c',
        "OMP_NUM_THREADS": "1",
    }
    script = slurm_script(train.hybrid(j="2x1", env=values))
    assert "--export" not in script
    lines = [line for line in script.splitlines() if line.startswith("export ")]
    shown = subprocess.run(
        ["bash", "-c", "\n".join([*lines, "env -0"])],
        env={"SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    received = dict(entry.partition("=")[::2] for entry in shown.split("\0"))
    assert values.items() <= received.items()
    assert received["PYTHONUNBUFFERED"] == "1"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(0, 0, False), (1, 0, True), (143, 1, True), (1, 2, False), (MISTAKE, 0, False)],
)
def test_slurms_script_requeues_a_fault_but_no_mistake(
    code: int, restarts: int, requeued: bool, tmp_path: Path
) -> None:
    # srun of several nodes ends with 143 where one has met a mistake: the agent's file
    # says so.
    mistake = f'> "${MISTAKE_FILE}"; exit 143' if code == MISTAKE else f"exit {code}"
    for command, line in (("srun", mistake), ("scontrol", "echo $@ > requeued")):
        (tmp_path / command).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / command).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    done = subprocess.run(
        ["bash", "-c", slurm_script(train.hybrid(max_retries=2))],
        env={**variables, "SLURM_JOB_ID": "7"},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == requeued
    assert not list(tmp_path.glob("*.mistake"))


# What Slurm's commands answer: a job of two nodes that runs, one that has ended, and no
# accounting.
SQUEUE = """#!/bin/sh
case "$*" in
  *"-j 7"*) echo "7+0|RUNNING|train-0|FOLDER|None"; echo "7+1|RUNNING|train-1|FOLDER|None";;
  *"-j 8"*) echo "8|PENDING|plan-0|FOLDER|Resources";;
  *"-u "*) for job in "7+0|RUNNING" "7+1|RUNNING" "8|PENDING"; do echo "$job|name|FOLDER|None"; done;;
  *) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
esac
"""


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmScheduler:
    """Slurm without accounting, whose jobs were submitted in another folder."""
    (tmp_path / "submitted").mkdir()
    scripts = {
        "squeue": SQUEUE.replace("FOLDER", str(tmp_path / "submitted")),
        "sacct": "#!/bin/sh\necho Slurm accounting storage is disabled >&2\nexit 1\n",
    }
    for command, script in scripts.items():
        (tmp_path / command).write_text(script)
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return SlurmScheduler("test")


@pytest.mark.unit
def test_slurm_without_accounting_tells_states_from_its_queue(
    scheduler: SlurmScheduler,
) -> None:
    running, waiting = scheduler.describe("7"), scheduler.describe("8")
    assert (running.state, running.roles[0].name, running.roles[0].num_replicas) == (
        AppState.RUNNING,
        "train",
        2,
    )
    assert (waiting.state, waiting.msg) == (AppState.PENDING, "PENDING (Resources)")
    assert scheduler.describe("9") is None
    assert [(job.app_id, job.state) for job in scheduler.list()] == [
        ("7", AppState.RUNNING),
        ("8", AppState.PENDING),
    ]


@pytest.mark.unit
@pytest.mark.parametrize("accounting", [False, True])
def test_a_state_that_a_newer_slurm_has_is_told(
    scheduler: SlurmScheduler, tmp_path: Path, accounting: bool
) -> None:
    states = {
        "LAUNCH_FAILED": AppState.FAILED,
        "EXPEDITING": AppState.PENDING,
        "TO_COME": AppState.UNKNOWN,
    }
    for state, expected in states.items():
        entry = f"7|{state}|train-0|/|None"
        (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '{entry}'\n")
        if accounting:
            (tmp_path / "sacct").write_text(
                f"#!/bin/sh\nprintf '7|{state}\\n6|CANCELLED by 1000\\n'\n"
            )
        job = scheduler.describe("7")
        assert job is not None
        assert (job.state, job.roles_statuses[0].replicas[0].state) == (
            expected,
            expected,
        )
        listed = (
            [("7", expected), ("6", AppState.CANCELLED)]
            if accounting
            else [("7", expected)]
        )
        assert [(each.app_id, each.state) for each in scheduler.list()] == listed


@pytest.mark.unit
def test_the_partition_whose_nodes_are_asked_for_is_the_one_that_sbatch_takes(
    scheduler: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sinfo").write_text(
        "#!/bin/sh\nprintf 'small*|1|100|(null)\\nlarge|64|900000|(null)\\n'\n"
    )
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setattr(
        "torchx.schedulers.slurm_scheduler.SlurmScheduler.schedule", lambda *_: "7"
    )
    info = scheduler.submit_dryrun(app_of(train.hybrid, "--cpu", "8"), {})
    with pytest.raises(
        ValueError, match="--cpu 8: the partition's largest node has 1; ask for less"
    ):
        scheduler.schedule(info)
    monkeypatch.setenv("SBATCH_PARTITION", "large")
    assert scheduler.schedule(info) == "7"


@pytest.mark.unit
def test_a_job_that_slurm_has_forgotten_is_told_by_its_files(
    scheduler: SlurmScheduler, tmp_path: Path
) -> None:
    for code, state in (("0", AppState.SUCCEEDED), ("200", AppState.FAILED)):
        (tmp_path / "slurm-9.out").write_text(
            f"+ echo 'job exited with code {code}'\njob exited with code {code}\n"
        )
        (tmp_path / "slurm-9-train-0.out").write_text("hr@10 0.5\n")
        job = scheduler.describe("9")
        assert (job.state, [role.name for role in job.roles]) == (state, ["train"])


@pytest.mark.unit
def test_slurms_log_has_both_streams_and_does_not_wait_for_the_end(
    scheduler: SlurmScheduler, tmp_path: Path
) -> None:
    (tmp_path / "submitted" / "slurm-7-train-0.out").write_text("hr@10 0.5\n")
    (tmp_path / "submitted" / "slurm-7-train-0.err").write_text(
        "rank 0: mistake\nrank 0: "
    )
    assert list(scheduler.log_iter("7", "train", 0)) == [
        "hr@10 0.5\n",
        "rank 0: mistake\n",
        "rank 0: ",
    ]
    assert list(scheduler.log_iter("7", "train", 0, streams=Stream.STDOUT)) == [
        "hr@10 0.5\n"
    ]
    assert list(scheduler.log_iter("7", "train", 0, regex="mist")) == [
        "rank 0: mistake\n"
    ]
    assert list(scheduler.log_iter("7", "train", 1)) == []
    tail = scheduler.log_iter("7", "train", 0, should_tail=True)
    assert {next(iter(tail)) for _ in range(3)} == {
        "hr@10 0.5\n",
        "rank 0: mistake\n",
        "rank 0: ",
    }


@pytest.mark.unit
def test_kubernetes_gives_each_node_its_gpus_mounts_and_the_first_nodes_name() -> None:
    app = app_of(
        train.hybrid, "-j", "2x4", "--gpu", "4", "--image", "my_image:1", "--max_retries", "3",
        "--mounts", "type=volume,src=runs,dst=/runs", "--run_dir", "/runs/a",
    )  # fmt: skip
    job = kubernetes_job(app)
    first, second = containers(job)
    assert job["spec"]["maxRetry"] == 4, "Volcano counts the first start"
    assert {pod.image for pod in (first, second)} == {"my_image:1"}
    assert all(pod.resources.limits["nvidia.com/gpu"] == "4" for pod in (first, second))
    assert all(
        "/runs" in {mount.mount_path for mount in pod.volume_mounts}
        for pod in (first, second)
    )
    assert "VC_TRAIN_0_HOSTS" in second.command[-1]  # which Volcano fills in
    assert second.command[-1].endswith(
        "-m torchx_apps.train --recipe two_tower --run-dir=/runs/a"
    )
    assert ":0 " in second.command[-1]
    assert not first.ports
    given = containers(
        kubernetes_job(
            app_of(
                train.hybrid,
                "-j",
                "2x4",
                "--rdzv_port",
                "29500",
                "--image",
                "my_image:1",
            )
        )
    )
    assert [port.container_port for pod in given for port in pod.ports] == [
        29500,
        29500,
    ]


@pytest.mark.unit
def test_a_service_on_kubernetes_opens_its_port() -> None:
    (container,) = containers(
        kubernetes_job(
            app_of(
                serve.http,
                "--bundle",
                "/bundles/a",
                "--port",
                "80",
                "--image",
                "my_image:1",
            )
        )
    )
    assert [port.container_port for port in container.ports] == [80]


@pytest.mark.launch
@pytest.mark.slow
def test_the_commands_of_kubernetes_train_on_two_nodes(tmp_path: Path) -> None:
    job = kubernetes_job(tiny(tmp_path / "run"))
    nodes = [container.command for container in containers(job)]
    variables = {
        entry.name: entry.value
        for container in containers(job)
        for entry in container.env
    }
    output = all_run(nodes, {**variables, "VC_TRAIN_0_HOSTS": "localhost"}, tmp_path)
    assert "ranks: 2 on cpu over gloo" in output
    assert (tmp_path / "run" / "summary.json").exists()


# What `srun a : b` does with a job of two parts, where there is no Slurm: both at once,
# and its status is the worst.
SRUN = """
import itertools, subprocess, sys
parts = [list(words) for between, words in itertools.groupby(sys.argv[1:], lambda word: word == ":") if not between]
commands = [list(itertools.dropwhile(lambda word: word.startswith("--"), words)) for words in parts]
running = [subprocess.Popen(command) for command in commands]
sys.exit(max(process.wait() for process in running))
"""


@pytest.mark.launch
@pytest.mark.slow
def test_slurms_script_trains_on_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.write_text(f"#!{sys.executable}\n" + SRUN)
    srun.chmod(0o755)
    (tmp_path / "job.sh").write_text(slurm_script(tiny(tmp_path / "run")))
    slurm = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "localhost",
        "PATH": f"{srun.parent}{os.pathsep}{with_python()}",
    }
    output = all_run([["bash", str(tmp_path / "job.sh")]], slurm, tmp_path)
    assert "ranks: 2 on cpu over gloo" in output
    assert output.count("plan.sharding=auto: made for 2 hosts; ") == 1
    assert "job exited with code 0" in output
    assert (tmp_path / "run" / "summary.json").exists()


def tiny(run: Path) -> AppDef:
    """Two nodes of one rank, on generated data."""
    settings = {
        "data.name": "planted",
        "data.users": 60,
        "data.items": 50,
        "data.history_length": 5,
        "train.epochs": 1,
    }
    flags = [f"--set={key}={value}" for key, value in settings.items()]
    (port,) = free_ports(1)
    return app_of(
        train.hybrid,
        "-j",
        "2x1",
        "--rdzv_port",
        str(port),
        "--run_dir",
        str(run),
        "--",
        *flags,
    )


def with_python() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def all_run(
    commands: Sequence[Sequence[str]], variables: dict[str, str], folder: Path
) -> str:
    """What they print, all at once, each in a folder of its own."""
    nodes = []
    for index, command in enumerate(commands):
        (folder / f"node{index}").mkdir()
        environment = {**os.environ, "PATH": with_python(), **variables}
        nodes.append(
            subprocess.Popen(
                list(command),
                cwd=folder / f"node{index}",
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    output = "\n".join(node.communicate(timeout=240)[0] for node in nodes)
    assert [node.returncode for node in nodes] == [0] * len(nodes), output
    return output
