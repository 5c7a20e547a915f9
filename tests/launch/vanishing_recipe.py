"""A recipe that reads its training rows from files in ``rows``; test_vanished_file.py copies it beside them."""

import dataclasses
from dataclasses import dataclass

from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.sets import load_set
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train.loop import TrainConfig
from torchx_apps.recipes import Job, contextual_ncf
from torchx_apps.tasks.task import Task


@dataclass(frozen=True)
class FromFiles(Task):
    def loader(
        self, schema: BatchSchema, config: LoaderConfig, *, rank: int, world_size: int
    ) -> ChunkLoader:
        return ChunkLoader(
            ParquetSource("rows"),
            schema,
            config=self.with_roles(config),
            rank=rank,
            world_size=world_size,
        )


def task(config: DataConfig, *, progress: bool = True) -> FromFiles:
    return FromFiles(load_set(config, "labels"))


def job() -> Job:
    train = TrainConfig(epochs=30, eval_every=30, compile="off")
    return dataclasses.replace(
        contextual_ncf(),
        task=task,
        data=DataConfig(name="planted", ranked=0),
        train=train,
    )
