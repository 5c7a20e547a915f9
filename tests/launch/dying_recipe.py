"""Recipes in which rank 1 ends during training; test_dead_rank.py copies this file out of the clone."""

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.train.loop import TrainConfig
from torchx_apps.recipes import Job, TwoTowerConfig, build_two_tower, two_tower


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def mistaken() -> None:
    raise ValueError("price: 7 rows have no currency; fill it in preprocessing")


def dying(end: Callable[[], None]) -> Job:
    """A job far longer than the test waits, whose rank 1 ends from its 8th step on and writes the time."""

    def build(config: TwoTowerConfig, data: Prepared) -> TowerModel:
        model = build_two_tower(config, data)
        calls: list[int] = []

        def count(*_: Any) -> None:
            calls.append(1)
            # before the 12th, after which steps are captured and call no hook
            if os.environ["RANK"] == "1" and len(calls) >= 8:
                # again, where a step that is being captured swallows it
                Path("died").write_text(str(time.time()))
                end()

        model.interaction.register_forward_pre_hook(count)
        return model

    data = DataConfig(name="planted", users=60, items=50, history_length=5)
    return dataclasses.replace(
        two_tower(), build=build, data=data, train=TrainConfig(epochs=100_000)
    )


def killed_in_training() -> Job:
    return dying(killed)


def mistaken_in_training() -> Job:
    return dying(mistaken)
