"""Early stopping: on every rank at the same step, by rank 0's figures, and what the records keep."""

import math
from typing import Any

import pytest

from tests.contracts import run_ranks
from tests.examples import META, small_model
from tests.train.test_loop import Batches
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.config import EarlyStop
from torchrec_ext.train.early_stop import EarlyStopWatch
from torchrec_ext.train.loop import TrainConfig, train


def seen(config: EarlyStop, figures: list[float]) -> tuple[list[bool], int | None, Any]:
    """Which figures were the best so far, the evaluation after which the run ends, and what is kept of the best."""
    watch, best = EarlyStopWatch(config, Runtime()), []
    for number, figure in enumerate(figures):
        best.append(
            watch.see({"epoch": number + 1, "step": 10 * number, "auc": figure})
        )
        if stop := watch.stops():
            return best, number, stop
    return best, None, watch.best


@pytest.mark.unit
def test_a_run_ends_after_patience_evaluations_without_a_better_figure() -> None:
    best, ended, stop = seen(
        EarlyStop(metric="auc", patience=2), [0.5, 0.6, 0.6, 0.7, 0.65, 0.7, 0.9]
    )
    assert best == [True, True, False, True, False, False]
    assert ended == 5
    message = "stopped early: no auc better than 0.7000, of epoch 4, in 2 evaluation(s)"
    assert stop == {
        "kind": "stop",
        "metric": "auc",
        "best": 0.7,
        "best_epoch": 4,
        "best_step": 30,
        "message": message,
    }


@pytest.mark.unit
def test_a_loss_should_fall() -> None:
    assert seen(EarlyStop(metric="auc", mode="min", patience=1), [0.5, 0.4, 0.41])[
        :2
    ] == ([True, True, False], 2)


@pytest.mark.unit
def test_nothing_is_watched_without_a_metric() -> None:
    assert seen(EarlyStop(), [0.5, 0.4, math.nan]) == ([False] * 3, None, None)


@pytest.mark.unit
def test_a_figure_that_is_missing_or_nan_is_told() -> None:
    with pytest.raises(
        ValueError,
        match=r"^train.early_stop.metric='hr': an evaluation has no such figure; it has auc$",
    ):
        seen(EarlyStop(metric="hr"), [0.5])
    with pytest.raises(
        ValueError,
        match=r"^train.early_stop.metric='auc': the figure is nan at step 10, so nothing",
    ):
        seen(EarlyStop(metric="auc"), [0.5, math.nan])


def stopped(runtime: Runtime) -> Any:
    """The ranks' figures differ, as no metric of ours should; the run must end all the same, and by rank 0's."""
    parallel, optimizer = hybrid_parallel(small_model(META), runtime)
    figures = iter(
        [0.5, 0.7, 0.6, 0.6, 0.6, 0.6]
        if runtime.rank == 0
        else [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    )
    loader = Batches(runtime, 2)
    stop = EarlyStop(metric="auc", patience=2, restore=False)
    config = TrainConfig(epochs=6, early_stop=stop)
    history = train(
        parallel,
        optimizer,
        loader,
        runtime,
        config,
        evaluate=lambda: {"auc": next(figures)},
    )
    unequal = {"rows_per_s": 0, "data_wait": 0, "ranks_wait": 0, "auc": 0}
    return [{**record, **unequal} for record in history], loader.epochs


def test_all_ranks_end_at_the_same_step_by_the_figures_of_rank_0() -> None:
    (first, epochs), (second, other_epochs) = run_ranks(stopped, 2)
    assert first == second
    assert epochs == other_epochs == [0, 1, 2, 3]
    assert {
        key: first[-1][key]
        for key in (
            "kind",
            "epoch",
            "step",
            "metric",
            "best",
            "best_epoch",
            "best_step",
        )
    } == {
        "kind": "stop",
        "epoch": 4,
        "step": 8,
        "metric": "auc",
        "best": 0.7,
        "best_epoch": 2,
        "best_step": 4,
    }
    assert [record["epoch"] for record in first if record.get("best") is True] == [1, 2]


def refused(runtime: Runtime) -> list[str]:
    parallel, optimizer = hybrid_parallel(small_model(META), runtime)
    config = TrainConfig(early_stop=EarlyStop(metric="auc"))
    told = []
    for evaluate in (None, lambda: {"auc": 0.5}):
        with pytest.raises(ValueError) as error:
            train(
                parallel,
                optimizer,
                Batches(runtime, 1),
                runtime,
                config,
                evaluate=evaluate,
            )
        told.append(str(error.value))
    return told


def test_what_cannot_be_watched_or_restored_is_refused_at_the_start() -> None:
    ((nothing, unsaved),) = run_ranks(refused, 1)
    assert nothing.startswith("train.early_stop.metric='auc', but nothing is evaluated")
    assert unsaved.startswith("train.early_stop.metric='auc': the best weights are")
    assert len(unsaved) <= 200
