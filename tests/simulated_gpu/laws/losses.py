"""A recipe learns the same on the device as on the CPU, eager and captured, and resumed as in one piece."""

from pathlib import Path

import pytest

from tests.simulated_gpu.laws.training import train
from tests.simulated_gpu.laws.waits import NEVER_CAPTURED
from torchx_apps.recipes import RECIPES

STEPS = 60
# Of sets whose epoch has 16 to 47 steps.
SHORT = ("multi_task", "n_tower", "ncf", "retrieval", "two_tower")
EPOCHS = {"session": 4, "stream": 2, **dict.fromkeys(SHORT, 3)}
# Attention of a GPU draws its dropout in another order than that of a CPU.
EQUAL = {"bst": ("model.dropout=0.0",)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_on_the_device_are_those_on_the_cpu(recipe: str, tmp_path: Path) -> None:
    settings = (f"train.epochs={EPOCHS.get(recipe, 1)}", *EQUAL.get(recipe, ()))
    ways = ["cpu off", "cuda off"]
    if recipe not in NEVER_CAPTURED:
        ways.append("cuda require")
    losses = []
    for way in ways:
        device, steps = way.split()
        of_way = (f"device={device}", f"train.compile={steps}", *settings)
        losses.append(train(recipe, tmp_path / way, *of_way))
    nearest = 1e-5
    if recipe == "bst":
        # Its attention rounds in another order as well, and a transformer makes of it
        # another number later. On some CPUs the third of these is 2.5e-5 apart already.
        losses = [values[:3] for values in losses]
        nearest = 5e-5
    else:
        assert len(losses[0]) >= STEPS // 4, "a record every 4 steps"
    for values in losses[1:]:
        assert values == pytest.approx(losses[0], rel=0, abs=nearest)


@pytest.mark.parametrize("dropout", ["0.0", "0.3"])
@pytest.mark.parametrize("steps", ["off", "require"])
def test_a_resumed_run_is_the_uninterrupted_one(
    steps: str, dropout: str, tmp_path: Path
) -> None:
    settings = (
        "device=cuda",
        "loader.device=cuda",
        "checkpoint.epochs=1",
        f"train.compile={steps}",
        f"model.dropout={dropout}",
    )
    whole = train("two_tower", tmp_path / "whole", *settings, "train.epochs=3")
    train("two_tower", tmp_path / "cut", *settings, "train.epochs=2")
    resumed = train("two_tower", tmp_path / "cut", *settings, "train.epochs=3")
    assert resumed == pytest.approx(whole, rel=0, abs=1e-6)
