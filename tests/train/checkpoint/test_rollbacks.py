"""A run that goes back to an earlier step, is killed and restarted, ends as that branch does without a kill."""

from __future__ import annotations

import hashlib
import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.train.checkpoint.test_killed import Attempt
from torchrec_ext.train.checkpoint.folder import CheckpointFolder

RANKS, PLAN, EPOCHS = 2, "row_wise", 2


def digest(found: Any) -> str:
    sha = hashlib.sha256()
    for name, value in sorted(found["state"].items()):
        sha.update(name.encode() + value.numpy().tobytes())
    return sha.hexdigest()


def has_saved(folder: CheckpointFolder, step: int) -> bool:
    """Whether the newest checkpoint is of ``step`` or later."""
    return folder.steps()[0] >= step


@pytest.mark.parametrize("trials", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_gone_back_killed_and_restarted_a_branch_ends_as_if_never_killed(
    tmp_path: Path, trials: int
) -> None:
    draw = random.Random(trials)
    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    with Attempt(
        here, "first", RANKS, PLAN, resume=False, keep=9, epochs=EPOCHS
    ) as attempt:
        ends = {digest(attempt.result())}
    folder = CheckpointFolder(str(here / "checkpoints"))
    saved: set[int] = set()  # steps that a killed branch had saved
    for trial in range(1, trials + 1):
        steps = folder.steps()
        back = draw.choice(steps[1:])
        # Another branch, for it learns at another rate; with fewer to keep it prunes.
        settings = {
            "rate": draw.uniform(0.02, 0.3),
            "keep": draw.choice([5, 7, 9]),
            "epochs": EPOCHS,
        }
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(here / "checkpoints", other / "checkpoints")
        unkilled = CheckpointFolder(str(other / "checkpoints"))
        with Attempt(
            other, "unkilled", RANKS, PLAN, resume=unkilled.path(back), **settings
        ) as attempt:
            expected = digest(attempt.result())
        with Attempt(
            here, f"killed{trial}", RANKS, PLAN, resume=folder.path(back), **settings
        ) as attempt:
            ahead = [here / f"checkpoints/step-{s:010d}" for s in steps if s > back]
            attempt.until(lambda ahead=ahead: not any(path.exists() for path in ahead))
            attempt.until(
                partial(has_saved, folder, back + draw.randrange(steps[0] - back))
            )
            time.sleep(draw.random() * 0.05)
            attempt.kill(
                list(range(RANKS)) if draw.random() < 0.5 else [draw.randrange(RANKS)]
            )
            ended = attempt.ended()
        left = folder.steps()
        with Attempt(
            here, f"again{trial}", RANKS, PLAN, resume=True, **settings
        ) as attempt:
            found = digest(attempt.result())
        assert found == expected, (trial, back, left)
        assert folder.steps() == unkilled.steps(), (trial, back, left)
        aside = {int(path.name[-10:]) for path in here.glob("checkpoints/aside-*")}
        assert aside >= {step for step in steps if step > back}
        ends.add(found)
        saved.add(left[0] - back)
        print(
            f"{trial}: from {steps} back to {back}, killed {'after its end' if ended else 'with ' + str(left)}, "
            f"restarted: {folder.steps()} and the digest {found[:8]} of the branch that was not killed",
            flush=True,
        )
    assert len(ends) == trials + 1, "every branch has an end of its own"
    assert trials < 3 or len(saved) > 2
