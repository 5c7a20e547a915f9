"""The functions that a recipe names as ``Job.task``; each imports torch and the data's readers when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_ext.data.config import PLANTED, DataConfig, Form

if TYPE_CHECKING:
    from torchx_apps.tasks.task import Task


def _task(config: DataConfig, form: Form) -> Task:
    from torchrec_ext.data.sets import load_set
    from torchx_apps.tasks.task import Task

    return Task(load_set(config, form))


def ranking_task(config: DataConfig) -> Task:
    """Loads the positives of the set of ``config``, to be ranked."""
    return _task(config, "pairs")


def labelled_task(config: DataConfig) -> Task:
    """Opens the labelled rows of ``config``, of any number; generated ones depend on user and item alone."""
    return _task(config, "labels")


def session_task(config: DataConfig) -> Task:
    """Opens the sessions of ``config``."""
    return _task(config, "sessions")


def logged_task(config: DataConfig) -> Task:
    """Opens the preprocessed rows of ``config``; generated ones have sessions, which predict the next click."""
    from torchrec_ext.data.planted import planted_log_set
    from torchrec_ext.data.sets import open_set
    from torchx_apps.tasks.task import Task

    if config.name != PLANTED:
        return labelled_task(config)
    return Task(open_set(planted_log_set(seed=config.seed), config, "labels"))
