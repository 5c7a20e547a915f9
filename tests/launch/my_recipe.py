"""Recipes of a user's own; the launch tests copy this file into a folder that is not the clone."""

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from torchrec_ext.data.datasets.config import DataConfig
from torchrec_ext.data.datasets.interactions import InteractionData
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.train.loop import TrainConfig
from torchx_apps.recipes import Job, TwoTowerConfig, build_two_tower, two_tower

Build = Callable[[TwoTowerConfig, InteractionData], TowerModel]


def mistake(config: TwoTowerConfig, data: InteractionData) -> TowerModel:
    if os.environ["RANK"] == "1":
        raise ValueError(
            "the user tower has 3 tables and the item tower 4; give both the same"
        )
    return build_two_tower(config, data)


def bug(config: TwoTowerConfig, data: InteractionData) -> TowerModel:
    if os.environ["RANK"] == "1":
        raise KeyError("tower")
    return build_two_tower(config, data)


def killed(config: TwoTowerConfig, data: InteractionData) -> TowerModel:
    """Dies on rank 1 the first time."""
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return build_two_tower(config, data)


def wait(config: TwoTowerConfig, data: InteractionData) -> TowerModel:
    Path(f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(300)
    return build_two_tower(config, data)


def one_user_too_few(config: TwoTowerConfig, data: InteractionData) -> TowerModel:
    """The table has no row for the last user, whom one rank meets before the others."""
    return build_two_tower(
        config,
        dataclasses.replace(
            data, vocab={**data.vocab, "user_id": data.vocab["user_id"] - 1}
        ),
    )


def job(build: Build) -> Job:
    """Two epochs of a second."""
    data = DataConfig(name="planted", users=60, items=50, history_length=5)
    return dataclasses.replace(
        two_tower(), build=build, data=data, train=TrainConfig(epochs=2)
    )


def mistaken() -> Job:
    return job(mistake)


def bugged() -> Job:
    return job(bug)


def killed_once() -> Job:
    return job(killed)


def endless() -> Job:
    return job(wait)


def id_out_of_range() -> Job:
    return job(one_user_too_few)
