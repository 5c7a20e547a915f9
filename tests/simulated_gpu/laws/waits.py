"""How often the host waits for the device in a step, by recipe and place, held at the numbers of waits.json.

SIMULATED_GPU_RENEW=1 with tests/simulated_gpu/test_laws.py writes the file anew.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import simulated_cuda

from tests.simulated_gpu.laws.training import train
from torchrec_ext.train import loop
from torchx_apps.recipes import RECIPES

FILE = Path(__file__).parents[1] / "waits.json"
EAGER = "train.compile=off"
CAPTURED = "train.compile=require"
ON_DEVICE = "loader.device=cuda"
# These two decide by values how long their sequences are, so they have no captured
# step.
NEVER_CAPTURED = ("bst", "session")
# A set in files has no rows on the device, and sequences are dealt out on the host.
HOST_ROWS = ("multi_task", "stream", "session")


def runs() -> dict[str, tuple[str, ...]]:
    kinds: dict[str, tuple[str, ...]] = {}
    for recipe in RECIPES:
        for steps in (EAGER, *(() if recipe in NEVER_CAPTURED else (CAPTURED,))):
            for rows in ((), *(() if recipe in HOST_ROWS else ((ON_DEVICE,),))):
                kinds[" ".join((recipe, steps, *rows))] = (steps, *rows)
    return kinds


@pytest.mark.parametrize("name", runs())
def test_a_step_waits_no_more_often_than_it_did(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []
    after_step = loop.TrainingRun._after_step

    def mark(run: loop.TrainingRun, output: Any) -> None:
        after_step(run, output)
        ends.append(len(events))

    monkeypatch.setattr(loop.TrainingRun, "_after_step", mark)
    recipe = name.split()[0]
    with simulated_cuda.observed() as events:
        train(
            recipe,
            tmp_path / "run",
            "device=cuda",
            "train.log_every=1000000",
            *runs()[name],
        )
    # Of the second half, when steps are captured; the last step of an epoch waits for
    # its record.
    first, last = len(ends) // 2, len(ends) - 2
    assert last - first >= 2, f"{len(ends)} steps are too few"
    places = Counter(
        f"{what} at {place.partition(':')[0]}"
        for kind, what, place in events[ends[first] : ends[last]]
        if kind == "sync"
    )
    waits = {
        place: round(count / (last - first), 2)
        for place, count in sorted(places.items())
    }
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    if "SIMULATED_GPU_RENEW" in os.environ:
        FILE.write_text(
            json.dumps({**stored, name: waits}, indent=1, sort_keys=True) + "\n"
        )
        return
    lines = Counter(
        (what, place)
        for kind, what, place in events[ends[first] : ends[last]]
        if kind == "sync"
    )
    assert waits == stored[name], (
        f"waits a step by line: {lines}; see the docstring of this file"
    )


def test_captured_steps_wait_for_nothing() -> None:
    stored = json.loads(FILE.read_text())
    assert stored.keys() == runs().keys()
    for name, waits in stored.items():
        if CAPTURED in name:
            assert waits == {}, name
