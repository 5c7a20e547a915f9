"""A recipe learns the same on the device as on the CPU, eager and captured, and resumed as in one piece."""

from pathlib import Path

import pytest

from tests.simulated_gpu.laws.training import train
from tests.simulated_gpu.laws.waits import NEVER_CAPTURED
from torchx_apps.recipes import RECIPES

STEPS = 60
# Of sets whose epoch has 12 to 59 steps.
SHORT = ("multi_task", "ncf", "retrieval", "stream", "two_tower")
EPOCHS = {"contextual_ncf": 2, "n_tower": 5, "session": 4, **dict.fromkeys(SHORT, 3)}
# Attention of a GPU draws its dropout in another order than that of a CPU.
EQUAL = {"bst": ("model.dropout=0.0",)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_on_the_device_are_those_on_the_cpu(recipe: str, tmp_path: Path) -> None:
    epochs = f"train.epochs={EPOCHS.get(recipe, 1)}"
    settings = ("train.compile=off", epochs, *EQUAL.get(recipe, ()))
    losses = [
        train(recipe, tmp_path / device, f"device={device}", *settings)
        for device in ("cpu", "cuda")
    ]
    nearest = 1e-5
    if recipe == "bst":
        # Its attention rounds in another order as well, and a transformer makes of it
        # another number later. On some CPUs the third of these is 2.5e-5 apart already.
        losses = [values[:3] for values in losses]
        nearest = 5e-5
    else:
        assert len(losses[0]) >= STEPS // 4, "a record every 4 steps"
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=nearest)


@pytest.mark.parametrize(
    "recipe", [name for name in RECIPES if name not in NEVER_CAPTURED]
)
def test_losses_of_captured_steps_are_those_of_eager_ones(
    recipe: str, tmp_path: Path
) -> None:
    """By SGD: a captured step rounds otherwise, of which Adam makes 1e-4 within 24 steps of two_tower."""
    settings = [f"optimizer.{each}=sgd" for each in ("tables", "dense")]
    settings += [f"optimizer.{each}_lr=0.05" for each in ("tables", "dense")]
    settings += ["optimizer.tables_l2=0"]  # not of SGD
    settings += ["device=cuda", f"train.epochs={EPOCHS.get(recipe, 1)}"]
    if recipe in ("n_tower", "stream"):
        # A value beside the kink of a ReLU is on its other side after another rounding:
        # eager losses move by 2e-5 if the first weights do by 6e-8.
        settings.append("model.activation=tanh")
    eager, captured = (
        train(recipe, tmp_path / steps, f"train.compile={steps}", *settings)
        for steps in ("off", "require")
    )
    assert len(eager) >= STEPS // 4, "a record every 4 steps"
    assert captured == pytest.approx(eager, rel=0, abs=1e-5)


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
