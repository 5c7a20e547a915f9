"""Recipes of a user's own; the launch tests copy this file into a folder that is not the clone."""

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

Build = Callable[[TwoTowerConfig, Prepared], TowerModel]


def mistake(config: TwoTowerConfig, data: Prepared) -> TowerModel:
    if os.environ["RANK"] == "1":
        raise ValueError(
            "the user tower has 3 tables and the item tower 4; give both the same"
        )
    return build_two_tower(config, data)


def killed(config: TwoTowerConfig, data: Prepared) -> TowerModel:
    """Dies on rank 1 the first time."""
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return build_two_tower(config, data)


def job(build: Build) -> Job:
    """Two epochs of a second."""
    data = DataConfig(name="planted", users=60, items=50, history_length=5)
    return dataclasses.replace(
        two_tower(), build=build, data=data, train=TrainConfig(epochs=2)
    )


def mistaken() -> Job:
    return job(mistake)


def killed_once() -> Job:
    return job(killed)


def trained() -> Job:
    return job(build_two_tower)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("price: 7 rows have no currency; fill it in preprocessing")


def dying(end: Callable[[], None]) -> Job:
    """A job far longer than a test waits, whose rank 1 ends from its 8th step on and writes the time."""

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

    return dataclasses.replace(job(build), train=TrainConfig(epochs=100_000))


def killed_in_training() -> Job:
    return dying(kill)


def mistaken_in_training() -> Job:
    return dying(fail)
