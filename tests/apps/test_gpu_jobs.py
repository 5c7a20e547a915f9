"""On a GPU, the recipes' jobs run from the data to the bundle, with the options that have code of their own there."""

from pathlib import Path

import pytest

from tests.files import records
from torchx_apps import train

pytestmark = pytest.mark.gpu
DATA = ("data.name=planted", "data.users=300", "data.items=150", "train.epochs=2")
FEATURES = ("data.name=planted", "train.epochs=1", "train.early_stop.metric=")
IDS = (
    "ids.features.user_id.capacity=100",
    "ids.features.user_id.admit_after=2",
    "ids.features.item_id.capacity=90",
    "ids.every=4",
)
ON_DEVICE = "loader.device=cuda"
JOBS = {
    "two_tower, eager": ("two_tower", (*DATA, "train.compile=off")),
    "two_tower, captured": ("two_tower", (*DATA, "train.compile=require", ON_DEVICE)),
    "two_tower, captured, rows from the host": (
        "two_tower",
        (*DATA, "train.compile=require"),
    ),
    "two_tower, dynamic ids": ("two_tower", (*DATA, *IDS, "train.compile=off")),
    "two_tower, dynamic ids, captured": (
        "two_tower",
        (*DATA, *IDS, "train.compile=require"),
    ),
    "two_tower, captured, bf16": (
        "two_tower",
        (*DATA, "train.compile=require", ON_DEVICE, "train.amp=bf16"),
    ),
    "two_tower, UVM": (
        "two_tower",
        (*DATA, "plan.kernel=fused_uvm_caching", "plan.sharding=table_wise"),
    ),
    "ncf, dynamic ids, captured": ("ncf", (*DATA, *IDS, "train.compile=require")),
    "session, captured where it can": (
        "session",
        (*FEATURES, "data.users=300", "data.items=150", "train.compile=auto"),
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_trains_exports_and_goes_on(name: str, tmp_path: Path) -> None:
    recipe, settings = JOBS[name]
    flags = [
        "--recipe",
        recipe,
        "--run_dir",
        str(tmp_path / "run"),
        "--export=require",
    ]
    flags += [f"--{each}" for each in settings]
    assert train.main([*flags, "--device=cuda"]) == 0
    assert (tmp_path / "run" / "bundle").exists()
    steps = records(tmp_path / "run", "train")[-1]["step"]
    assert train.main([*flags, "--device=cuda", "--train.epochs=3"]) == 0
    assert records(tmp_path / "run", "train")[-1]["step"] > steps
