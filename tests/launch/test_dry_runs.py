"""What TorchX's own schedulers make of the components, by the text of a dry run."""

from pathlib import Path

import pytest
import yaml
from torchx.runner import get_runner

pytestmark = pytest.mark.unit
JOB = ["-j", "2x4", "--gpu", "4", "--max_retries", "3", "--rdzv_port", "29501"]
WORDS = ["--", "--run_dir", "/runs/a", "--train.epochs", "2"]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dry_run(scheduler: str, component: str, *words: str, **cfg: str) -> str:
    with get_runner() as runner:
        return str(runner.dryrun_component(component, list(words), scheduler, cfg=cfg))


def test_slurm_starts_torchrun_once_on_each_node() -> None:
    script = dry_run("slurm", "rec.train.hybrid", *JOB, *WORDS, partition="main")
    assert script.count("--job-name=train-") == 2
    assert script.count("-m torchx_apps.train --recipe two_tower --run_dir") == 2
    assert "--nnodes 2 --nproc_per_node 4" in script
    assert ":29501" in script
    assert "TORCHX_MAX_RETRIES=3" in script


def test_kubernetes_gets_a_task_for_each_node_with_its_volume() -> None:
    pytest.importorskip("kubernetes", reason="needs the extra kubernetes")
    words = ["--image", "my_image:1", "--mounts", "type=volume,src=runs,dst=/runs"]
    job = yaml.safe_load(
        dry_run("kubernetes", "rec.train.hybrid", *JOB, *words, *WORDS, queue="default")
    )
    tasks = job["spec"]["tasks"]
    assert [task["maxRetry"] for task in tasks] == [3, 3]
    pod = tasks[0]["template"]["spec"]
    assert pod["containers"][0]["image"] == "my_image:1"
    assert {"name": "mount-0", "persistentVolumeClaim": {"claimName": "runs"}} in pod[
        "volumes"
    ]
