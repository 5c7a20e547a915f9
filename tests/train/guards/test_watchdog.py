"""A rank without a step leaves its stacks; one that makes steps, or takes its time as it may, leaves nothing."""

import time
from pathlib import Path

import pytest

from torchrec_ext.train.guards.watchdog import Watchdog

pytestmark = pytest.mark.unit


def stuck_in_a_loader(file: Path) -> None:
    """Where the user's own code does not come back."""
    while not file.stat().st_size:
        time.sleep(0.01)


def test_a_rank_that_hangs_leaves_its_stacks(tmp_path: Path) -> None:
    file = tmp_path / "run" / "stacks-rank3.txt"
    with Watchdog(3, 0.2, tmp_path / "run") as watchdog:
        watchdog.beat()
        stuck_in_a_loader(file)
    assert "in stuck_in_a_loader" in file.read_text()


def test_a_rank_that_makes_steps_or_takes_its_time_leaves_nothing(
    tmp_path: Path,
) -> None:
    with Watchdog(0, 5.0, tmp_path) as watchdog:
        for _ in range(100):
            watchdog.beat()
        watchdog.pause()
        time.sleep(0.05)
    # Another run in the same process has a watchdog of its own.
    with Watchdog(0, 0.01, tmp_path) as watchdog:
        watchdog.beat()
        watchdog.pause()
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())


def test_a_limit_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"after_s=0\.0: must be positive"):
        Watchdog(0, 0.0, tmp_path)
