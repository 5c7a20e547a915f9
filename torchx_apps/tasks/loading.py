"""The functions that a recipe names as ``Job.task``; each imports torch and the data's readers when it is called."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torchrec_ext.data.datasets.config import DataConfig

if TYPE_CHECKING:
    from torchx_apps.tasks.ranking import RankingTask
    from torchx_apps.tasks.sessions import SessionTask
    from torchx_apps.tasks.streamed import StreamedTask


def ranking_task(config: DataConfig, *, progress: bool = True) -> RankingTask:
    """Loads the positives of the set of ``config``, to be ranked."""
    from torchrec_ext.data.datasets.sets import load_set
    from torchrec_ext.data.datasets.streamed import interactions_of
    from torchx_apps.tasks.ranking import RankingTask

    return RankingTask(interactions_of(load_set(config, "pairs", progress=progress)))


def labelled_task(config: DataConfig, *, progress: bool = True) -> StreamedTask:
    """Opens the labelled rows of ``config``."""
    from torchrec_ext.data.datasets.sets import load_set
    from torchx_apps.tasks.streamed import StreamedTask

    return StreamedTask(load_set(config, "labels", progress=progress))


def session_task(config: DataConfig, *, progress: bool = True) -> SessionTask:
    """Opens the sessions of ``config``."""
    from torchrec_ext.data.datasets.sets import load_set
    from torchx_apps.tasks.sessions import SessionTask

    return SessionTask(load_set(config, "sessions", progress=progress))


# The rows of a log of any size are labelled rows.
streamed_task = labelled_task


def logged_task(
    config: DataConfig, *, progress: bool = True, sessions: bool = True
) -> StreamedTask:
    """Opens the preprocessed rows of ``config``; generated ones have sessions, which predict the next click."""
    from torchrec_ext.data.datasets import synthetic
    from torchrec_ext.data.datasets.streamed import load_streamed
    from torchx_apps.tasks.streamed import StreamedTask

    del progress
    generate = partial(synthetic.planted_log_folder, sessions=sessions)
    return StreamedTask(load_streamed(config, generate=generate))


def multi_label_task(config: DataConfig, *, progress: bool = True) -> StreamedTask:
    """Opens the preprocessed rows of ``config``; generated ones have two labels, which depend on user and item."""
    return logged_task(config, progress=progress, sessions=False)
