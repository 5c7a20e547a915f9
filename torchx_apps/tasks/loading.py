"""The functions that a recipe names as ``Job.task``; each imports torch and the data's readers when it is called."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torchrec_ext.data.config import DataConfig, Form

if TYPE_CHECKING:
    from torchx_apps.tasks.task import Task


def _task(config: DataConfig, form: Form, progress: bool) -> Task:
    from torchrec_ext.data.sets import load_set
    from torchx_apps.tasks.task import Task

    return Task(load_set(config, form, progress=progress))


def ranking_task(config: DataConfig, *, progress: bool = True) -> Task:
    """Loads the positives of the set of ``config``, to be ranked."""
    return _task(config, "pairs", progress)


def labelled_task(config: DataConfig, *, progress: bool = True) -> Task:
    """Opens the labelled rows of ``config``, of any number."""
    return _task(config, "labels", progress)


def session_task(config: DataConfig, *, progress: bool = True) -> Task:
    """Opens the sessions of ``config``."""
    return _task(config, "sessions", progress)


def logged_task(
    config: DataConfig, *, progress: bool = True, sessions: bool = True
) -> Task:
    """Opens the preprocessed rows of ``config``; generated ones have sessions, which predict the next click."""
    from torchrec_ext.data.planted import planted_log_folder
    from torchrec_ext.data.prepared import load_prepared
    from torchx_apps.tasks.task import Task

    del progress
    generate = partial(planted_log_folder, sessions=sessions)
    return Task(load_prepared(config, generate=generate))


def multi_label_task(config: DataConfig, *, progress: bool = True) -> Task:
    """Opens the preprocessed rows of ``config``; generated ones have two labels, which depend on user and item."""
    return logged_task(config, progress=progress, sessions=False)
