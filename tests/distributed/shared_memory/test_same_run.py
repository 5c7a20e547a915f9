"""A run of two ranks learns the same over shared memory as over gloo, to the last bit."""

import json
import os
from pathlib import Path
from typing import Any

from tests.contracts import leave_group, run_ranks
from tests.distributed.shared_memory.conftest import needs_library
from tests.settings import with_settings
from torchrec_ext.distributed.runtime import Runtime
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe

SETTINGS = (
    *(
        "data.name=planted",
        "data.users=300",
        "data.items=100",
        "loader.batch_size=256",
        "train.epochs=1",
    ),
    *("plan.sharding=row_wise", "checkpoint.epochs=0"),
)


def run_twice(runtime: Runtime, root: Path) -> None:
    for port, collectives in zip(
        leave_group(runtime, groups=2), ("gloo", "shared_memory"), strict=True
    ):
        os.environ["MASTER_PORT"] = str(port)
        job = with_settings(
            load_recipe("two_tower"), [*SETTINGS, f"collectives={collectives}"]
        )
        run_training(job, root / collectives)


def learned(run: Path) -> tuple[list[Any], dict[str, Any]]:
    """The losses and figures on the way, and the summary's."""
    records = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [
        {name: value for name, value in record.items() if "loss" in name or "@" in name}
        for record in records
    ]
    return losses, json.loads((run / "summary.json").read_text())["test"]


@needs_library
def test_losses_and_figures_are_those_over_gloo(tmp_path: Path) -> None:
    run_ranks(run_twice, 2, tmp_path)
    losses, figures = learned(tmp_path / "gloo")
    assert len(losses) > 1
    assert figures["hr@10"] > 0
    assert learned(tmp_path / "shared_memory") == (losses, figures)
    over = [
        json.loads((tmp_path / name / "summary.json").read_text())["collectives"]
        for name in ("gloo", "shared_memory")
    ]
    assert over == ["gloo", "gloo and shared memory"]
