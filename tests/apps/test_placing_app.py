"""`plan.towers=auto` from the command line to the run folder."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contracts import run_ranks
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.train.report.progress import RunFolder
from torchx_apps.config import with_settings
from torchx_apps.jobs.report import report_steps
from torchx_apps.jobs.setup import load_task, place_towers, why_on_every_rank
from torchx_apps.recipes import Job, two_tower_job

SMALL = (
    "data.name=planted",
    "data.users=60",
    "data.items=50",
    "plan.towers=auto",
    "loader.batch_size=256",
)


def small_job(*overrides: str) -> Job:
    job: Job = with_settings(two_tower_job(), [*SMALL, *overrides])
    return job


def placed(runtime: Runtime, folder: str) -> dict[str, Any]:
    job = small_job()
    task = load_task(job, runtime)
    model = job.build(job.model, task.data)
    chosen, decision = place_towers(job, task, model, runtime)
    assert decision is not None
    if runtime.is_main:
        history = [
            {"kind": "train", "step": step, "rows": 1000, "rows_per_s": rate}
            for step, rate in ((2, 1e3), (6, 1e4), (10, 1e4))
        ]
        run = RunFolder(Path(folder) / "run", {})
        report_steps(run, decision, history)
        run.close()
    return {
        "plan": chosen.plan,
        "taken": decision.taken,
        "as it was": place_towers(
            dataclasses.replace(job, plan=chosen.plan), task, model, runtime
        )[1],
    }


@pytest.mark.slow
def test_every_rank_gets_the_same_plan_and_the_folder_the_measured_step(
    tmp_path: Path,
) -> None:
    pytest.importorskip(
        "matplotlib", reason="needs matplotlib: pip install 'torchrec-ext[report]'"
    )
    first, second = run_ranks(placed, 2, str(tmp_path), timeout_s=300)
    assert first == second
    assert first["plan"].towers == first["taken"].towers
    assert first["as it was"] is None, "what is placed already is not measured"
    report = json.loads((tmp_path / "run/placement.json").read_text())
    # of steps 3 to 6 and 7 to 10; the first two are not counted
    assert report["measured_ms"] == 1000 / 1e4 / 4 * 1e3
    assert report["candidates"][0]["towers"] == first["taken"].towers


@pytest.mark.unit
@pytest.mark.parametrize(
    ("sync", "message"),
    [
        (SyncConfig(), ""),
        (
            SyncConfig(mode="local_sgd"),
            "sync.mode=local_sgd averages towers that every rank has",
        ),
    ],
)
def test_what_needs_all_towers_on_every_rank_is_told(
    sync: SyncConfig, message: str
) -> None:
    assert why_on_every_rank(dataclasses.replace(small_job(), sync=sync)) == message


@pytest.mark.unit
def test_one_rank_has_nothing_to_choose() -> None:
    job = small_job()
    assert place_towers(job, None, None, Runtime()) == (job, None)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.launch
def test_as_a_user_runs_it(tmp_path: Path) -> None:
    overrides = [
        f"--{item}" for item in (*SMALL, "train.epochs=1", "train.log_every=2")
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "-m",
        "torchx_apps.train",
    ]
    done = subprocess.run(
        [*command, *overrides, "--run_dir", "run"],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("towers           tables")[1:3]
    assert "measured ms" not in before
    assert "taken" in before
    assert "measured ms" in after
    assert " ms a step" in (tmp_path / "run/plan.txt").read_text()
    assert json.loads((tmp_path / "run/placement.json").read_text())["measured_ms"] > 0
