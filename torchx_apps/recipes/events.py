"""Recipes for `rec.train.stream`: networks over the raw ids of a log's events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torchrec_ext.data.files.events_config import EventsConfig
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.ids.policy import Dynamic
from torchrec_ext.train.checkpoint.config import CheckpointConfig
from torchrec_ext.train.config import TrainConfig
from torchx_apps.recipes.two_tower import TwoTowerConfig, build_two_tower
from torchx_apps.tasks.job import IdsConfig, Job


def two_tower_of_events() -> Job:
    """A user tower and an item tower over raw ids, under a top NN; each event once, in order."""
    return Job(
        name="stream_two_tower",
        build=build_two_tower,
        model=TwoTowerConfig(),
        data=EventsConfig(),
        task=no_task,
        loader=LoaderConfig(batch_size=500),
        ids=IdsConfig(
            every=1,
            features={
                "user_id": Dynamic(capacity=100_000),
                "item_id": Dynamic(capacity=100_000),
            },
        ),
        optimizer=OptimizerConfig(tables_lr=0.25, dense_lr=2e-3),
        train=TrainConfig(epochs=1, log_every=50),
        checkpoint=CheckpointConfig(steps=100),
    )


def no_task(data: EventsConfig) -> NoReturn:
    """Refuses a log where rows are held out: its events are predicted as they come.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"data.folder={data.folder}: a log is trained by rec.train.stream, which publishes bundles in its run folder"
    )


EVENT_RECIPES: Mapping[str, Callable[[], Any]] = {"two_tower": two_tower_of_events}
