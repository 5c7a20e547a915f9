"""Where a run's time went, from its records; and the line that its picture says."""

from typing import Any

import pytest

from torchrec_ext.train.report.progress import (
    best_evaluation,
    conclusion,
    rank_shares,
    time_shares,
)

pytestmark = pytest.mark.unit


def record(
    step: int, *waits: tuple[float, float], seconds: float = 1.0, **more: Any
) -> dict[str, Any]:
    """A record of a window of some seconds; each rank's shares of waits for batches and in collectives."""
    of_ranks = (
        {"ranks_wait": sum(ranks for _, ranks in waits) / len(waits), "waits": waits}
        if len(waits) > 1
        else {}
    )
    usual = {
        "kind": "train",
        "epoch": 1,
        "step": step,
        "loss": 1 / step,
        "rows": 100,
        "rows_per_s": 100 / seconds,
    }
    return {**usual, "data_wait": max(data for data, _ in waits), **of_ranks, **more}


TWO_RANKS = [
    record(10, (0.1, 0.4), (0.5, 0.0)),
    record(20, (0.3, 0.2), (0.1, 0.4), seconds=3.0),
]
EVALUATED = {"kind": "eval", "epoch": 1, "step": 20, "auc": 0.7}


def test_shares_are_of_the_seconds_that_each_record_took() -> None:
    assert rank_shares(TWO_RANKS) == [
        (pytest.approx(0.25), pytest.approx(0.25)),
        (0.2, pytest.approx(0.3)),
    ]
    shares = time_shares([*TWO_RANKS, EVALUATED])
    assert shares == {
        "data": pytest.approx(0.225),
        "ranks": pytest.approx(0.275),
        "compute": pytest.approx(0.5),
    }
    assert time_shares([record(10, (0.2, 0)), record(20, (0.6, 0), seconds=3)])[
        "data"
    ] == pytest.approx(0.5)


def test_a_run_that_went_on_with_other_ranks_has_shares_of_all_and_names_no_rank() -> (
    None
):
    records = [*TWO_RANKS, record(30, (0.1, 0.1), (0.1, 0.1), (0.1, 0.1))]
    assert rank_shares(records) == []
    assert time_shares(records)["ranks"] == pytest.approx((0.2 + 3 * 0.3 + 0.1) / 5)


def test_the_best_evaluation_of_a_figure_that_falls_is_the_lowest() -> None:
    losses = [0.5, 0.4, 0.45]
    records = [
        {"kind": "eval", "epoch": i, "step": i, "log_loss": loss}
        for i, loss in enumerate(losses, 1)
    ]
    best = best_evaluation(records)
    assert best is not None
    assert best["epoch"] == 2
    facts = {"this model": {"log_loss": 0.4}, "the same for all": {"log_loss": 0.6}}
    assert (
        conclusion(records, facts)
        == "log_loss 0.4000: better than the same for all 0.6000; best at epoch 2"
    )
