"""The functions that a recipe names as ``Job.task``; each imports torch and the data's readers when it is called."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torchrec_ext.data.datasets.config import (
    DataConfig,
    LabelledConfig,
    SequenceConfig,
    StreamConfig,
)

if TYPE_CHECKING:
    from torchrec_ext.data.datasets.streamed import StreamedData
    from torchx_apps.tasks.labelled import LabelledTask
    from torchx_apps.tasks.ranking import RankingTask
    from torchx_apps.tasks.sessions import SessionTask
    from torchx_apps.tasks.streamed import StreamedTask


def _prepared(
    config: DataConfig | LabelledConfig | SequenceConfig, *, labels: bool = True
) -> StreamedData | None:
    """Opens the folder of ``config`` if rec.data.preprocess wrote it; None for any other set."""
    from torchrec_ext.data.datasets.streamed import load_streamed, prepared_folder

    if prepared_folder(config.name, config.folder) is None:
        return None
    return load_streamed(
        StreamConfig(name=config.name, folder=config.folder), labels=labels
    )


def ranking_task(config: DataConfig, *, progress: bool = True) -> RankingTask:
    """Loads the set of ``config``, to be ranked.

    Raises:
        ValueError: ``config`` asks for what the preprocessing of the folder has decided.
    """
    from torchrec_ext.data.datasets.catalog import load_config
    from torchrec_ext.data.datasets.streamed import interactions_of
    from torchx_apps.tasks.ranking import RankingTask

    prepared = _prepared(config, labels=False)
    if prepared is None:
        return RankingTask(load_config(config, progress=progress))
    if config.context or not config.validation:
        raise ValueError(
            f"data.name={config.name} was written by rec.data.preprocess, whose recipe decides on "
            "context and validation; leave out data.context and data.validation"
        )
    return RankingTask(interactions_of(prepared))


def labelled_task(config: LabelledConfig, *, progress: bool = True) -> LabelledTask:
    """Loads the rows of ``config``; nothing is downloaded, so there is no progress to show."""
    from torchrec_ext.data.datasets.labelled import load_labelled
    from torchrec_ext.data.datasets.streamed import labelled_rows_of
    from torchx_apps.tasks.labelled import LabelledTask

    del progress
    prepared = _prepared(config)
    if prepared is None:
        return LabelledTask(load_labelled(config))
    return LabelledTask(labelled_rows_of(prepared, context=config.context))


def session_task(config: SequenceConfig, *, progress: bool = True) -> SessionTask:
    """Loads the set of ``config``; nothing is downloaded, so there is no ``progress`` to show.

    Raises:
        ValueError: the folder holds preprocessed rows, which are no sequences.
    """
    from torchrec_ext.data.datasets.sequences import load_sequences
    from torchrec_ext.data.datasets.streamed import prepared_folder
    from torchx_apps.tasks.sessions import SessionTask

    del progress
    if prepared_folder(config.name, config.folder) is not None:
        raise ValueError(
            f"data.name={config.name} was written by rec.data.preprocess: its rows have no order "
            "among each other; take --recipe stream, or a folder with the log itself"
        )
    return SessionTask(load_sequences(config))


def streamed_task(config: StreamConfig, *, progress: bool = True) -> StreamedTask:
    """Opens the preprocessed rows of ``config``; nothing is downloaded, so there is no progress to show."""
    from torchrec_ext.data.datasets.streamed import load_streamed
    from torchx_apps.tasks.streamed import StreamedTask

    del progress
    return StreamedTask(load_streamed(config))


def logged_task(
    config: StreamConfig, *, progress: bool = True, sessions: bool = True
) -> StreamedTask:
    """Opens the preprocessed rows of ``config``; generated ones have sessions, which predict the next click."""
    from torchrec_ext.data.datasets.streamed import load_streamed, planted_log_folder
    from torchx_apps.tasks.streamed import StreamedTask

    del progress
    return StreamedTask(
        load_streamed(config, generate=partial(planted_log_folder, sessions=sessions))
    )


def multi_label_task(config: StreamConfig, *, progress: bool = True) -> StreamedTask:
    """Opens the preprocessed rows of ``config``; generated ones have two labels, which depend on user and item."""
    return logged_task(config, progress=progress, sessions=False)
