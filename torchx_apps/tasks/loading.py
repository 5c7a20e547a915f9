"""The functions that a recipe names as ``Job.task``; each imports torch and the data's readers when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_ext.data.datasets.config import DataConfig, LabelledConfig, SequenceConfig, StreamConfig

if TYPE_CHECKING:
    from torchx_apps.tasks.labelled import LabelledTask
    from torchx_apps.tasks.ranking import RankingTask
    from torchx_apps.tasks.sessions import SessionTask
    from torchx_apps.tasks.streamed import StreamedTask


def ranking_task(config: DataConfig, *, progress: bool = True) -> RankingTask:
    """Loads the set that ``config`` names, to be ranked."""
    from torchrec_ext.data.datasets.catalog import load_config
    from torchx_apps.tasks.ranking import RankingTask

    return RankingTask(load_config(config, progress=progress))


def labelled_task(config: LabelledConfig, *, progress: bool = True) -> LabelledTask:
    """Loads the rows that ``config`` names; nothing is downloaded, so there is no progress to show."""
    from torchrec_ext.data.datasets.labelled import load_labelled
    from torchx_apps.tasks.labelled import LabelledTask

    del progress
    return LabelledTask(load_labelled(config))


def session_task(config: SequenceConfig, *, progress: bool = True) -> SessionTask:
    """Loads the set that ``config`` names; nothing is downloaded, so there is no ``progress`` to show."""
    from torchrec_ext.data.datasets.sequences import load_sequences
    from torchx_apps.tasks.sessions import SessionTask

    del progress
    return SessionTask(load_sequences(config))


def streamed_task(config: StreamConfig, *, progress: bool = True) -> StreamedTask:
    """Opens the preprocessed rows that ``config`` names; nothing is downloaded, so there is no progress to show."""
    from torchrec_ext.data.datasets.streamed import load_streamed
    from torchx_apps.tasks.streamed import StreamedTask

    del progress
    return StreamedTask(load_streamed(config))
