"""Short runs of recipes in this process."""

from pathlib import Path

import torch.distributed as dist

from tests.files import records
from torchx_apps import train as train_app

QUICK = (
    "data.name=planted",
    "export=never",
    "train.early_stop.metric=",
    "train.epochs=1",
    "train.log_every=4",
)
# Sets that are small enough for a run of seconds; the recipes not named here are small
# as they are.
SMALL = ("data.users=200", "data.items=100", "loader.batch_size=256")
SIZES = {
    "ncf": SMALL,
    "two_tower": SMALL,
    "retrieval": SMALL,
    "n_tower": ("loader.batch_size=2048",),
    **dict.fromkeys(("bst", "multi_task", "stream"), ("loader.batch_size=1024",)),
}


def train(
    recipe: str, folder: Path, *settings: str, flags: tuple[str, ...] = ()
) -> list[float]:
    """Trains a recipe, and returns the losses of its records."""
    words = [f"--{setting}" for setting in (*QUICK, *SIZES.get(recipe, ()), *settings)]
    try:
        code = train_app.main(
            ["--recipe", recipe, "--run_dir", str(folder), *words, *flags]
        )
    finally:
        if dist.is_initialized():  # an error of a run must not fail the next one
            dist.destroy_process_group()
    assert code == 0, f"{recipe} {settings}: exit {code}"
    return [record["loss"] for record in records(folder, "train")]
