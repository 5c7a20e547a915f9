"""What the components become on clusters: Slurm's script and Kubernetes' job, which both train on this machine."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torchrec_ext.components import serve, train  # type: ignore[import-not-found]
from torchx.schedulers.slurm_scheduler import create_scheduler as slurm_scheduler
from torchx.specs import AppDef
from torchx.specs.builders import materialize_appdef


def kubernetes_job(app: AppDef) -> dict[str, Any]:
    """The resource that `torchx run -s kubernetes` would create."""
    pytest.importorskip("kubernetes", reason="needs the extra kubernetes")
    from torchx.schedulers.kubernetes_scheduler import create_scheduler

    made = create_scheduler("test").submit_dryrun(app, {"queue": "default"})
    return dict(made.request.resource)


def slurm_script(app: AppDef) -> str:
    """What `torchx run -s slurm` would submit."""
    made = slurm_scheduler("test").submit_dryrun(app, {"partition": "gpu", "time": "02:00:00"})
    return str(made.request.materialize())


def app_of(component: Callable[..., AppDef], *flags: str) -> AppDef:
    return materialize_appdef(component, list(flags))


def containers(job: dict[str, Any]) -> list[Any]:
    return [task["template"].spec.containers[0] for task in job["spec"]["tasks"]]


@pytest.mark.unit
def test_slurm_starts_one_agent_on_each_node_and_asks_for_what_was_asked() -> None:
    script = slurm_script(
        app_of(train.hybrid, "-j", "2x8", "--gpu", "8", "--cpu", "64", "--memMB", "400000", "--max_retries", "2")
    )
    asked = [line.split() for line in script.splitlines() if line.startswith("#SBATCH --")]
    assert len(asked) == 2
    for words in asked:
        assert {"--ntasks-per-node=1", "--gpus-per-task=8", "--cpus-per-task=64", "--mem=400000", "--requeue"} <= set(
            words
        )
        assert {"--partition=gpu", "--time=02:00:00"} <= set(words)
    assert script.count("python3 -m torchx_apps.agent --max_restarts 2 ") == 2
    assert script.count("--rdzv_endpoint ${SLURM_JOB_NODELIST_HET_GROUP_0:=localhost}:0 ") == 2


@pytest.mark.unit
def test_kubernetes_gives_each_node_its_gpus_mounts_and_the_first_nodes_name() -> None:
    app = app_of(
        train.hybrid, "-j", "2x4", "--gpu", "4", "--image", "my_image:1", "--max_retries", "3",
        "--mounts", "type=volume,src=runs,dst=/runs", "--run_dir", "/runs/a",
    )  # fmt: skip
    job = kubernetes_job(app)
    first, second = containers(job)
    assert job["spec"]["maxRetry"] == 3
    assert {pod.image for pod in (first, second)} == {"my_image:1"}
    assert all(pod.resources.limits["nvidia.com/gpu"] == "4" for pod in (first, second))
    assert all("/runs" in {mount.mount_path for mount in pod.volume_mounts} for pod in (first, second))
    assert "VC_TRAIN_0_HOSTS" in second.command[-1]  # which Volcano fills in
    assert second.command[-1].endswith("-m torchx_apps.train --recipe two_tower --run-dir=/runs/a")
    assert ":0 " in second.command[-1]
    assert not first.ports
    given = containers(
        kubernetes_job(app_of(train.hybrid, "-j", "2x4", "--rdzv_port", "29500", "--image", "my_image:1"))
    )
    assert [port.container_port for pod in given for port in pod.ports] == [29500, 29500]


@pytest.mark.unit
def test_a_service_on_kubernetes_opens_its_port() -> None:
    (container,) = containers(
        kubernetes_job(app_of(serve.http, "--bundle", "/bundles/a", "--port", "80", "--image", "my_image:1"))
    )
    assert [port.container_port for port in container.ports] == [80]


@pytest.mark.launch
@pytest.mark.slow
def test_the_commands_of_kubernetes_train_on_two_nodes(tmp_path: Path) -> None:
    job = kubernetes_job(tiny(tmp_path / "run", port=29731))
    nodes = [container.command for container in containers(job)]
    variables = {entry.name: entry.value for container in containers(job) for entry in container.env}
    output = all_run(nodes, {**variables, "VC_TRAIN_0_HOSTS": "localhost"}, tmp_path)
    assert "ranks: 2 on cpu over gloo" in output
    assert (tmp_path / "run" / "summary.json").exists()


# What `srun a : b` does with a job of two parts, where there is no Slurm: both at once, and its status is the worst.
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
    (tmp_path / "job.sh").write_text(slurm_script(tiny(tmp_path / "run", port=29732)))
    slurm = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "localhost",
        "PATH": f"{srun.parent}{os.pathsep}{with_python()}",
    }
    output = all_run([["bash", str(tmp_path / "job.sh")]], slurm, tmp_path)
    assert "ranks: 2 on cpu over gloo" in output
    assert "job exited with code 0" in output
    assert (tmp_path / "run" / "summary.json").exists()


def tiny(run: Path, *, port: int) -> AppDef:
    """Two nodes of one rank, on generated data."""
    settings = {"data.name": "planted", "data.users": 60, "data.items": 50, "data.history_length": 5, "train.epochs": 1}
    flags = [f"--set={key}={value}" for key, value in settings.items()]
    return app_of(train.hybrid, "-j", "2x1", "--rdzv_port", str(port), "--run_dir", str(run), "--", *flags)


def with_python() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def all_run(commands: Sequence[Sequence[str]], variables: dict[str, str], folder: Path) -> str:
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
