"""Where a run's time went, from its records."""

from typing import Any

import pytest

from torchrec_ext.train.report.progress import time_shares

pytestmark = pytest.mark.unit


def record(
    data: float, ranks: float | None = None, seconds: float = 1.0
) -> dict[str, Any]:
    """A record of a window of some seconds; shares of waits for batches and in collectives."""
    of_ranks = {} if ranks is None else {"ranks_wait": ranks}
    usual = {"kind": "train", "rows": 100, "rows_per_s": 100 / seconds}
    return {**usual, "data_wait": data, **of_ranks}


def test_shares_are_of_the_seconds_that_each_record_took() -> None:
    evaluated = {"kind": "eval", "epoch": 1, "step": 20, "auc": 0.7}
    records = [record(0.1, 0.4), record(0.3, 0.2, 3.0), evaluated]
    assert time_shares(records) == {
        "data": pytest.approx(0.25),
        "ranks": pytest.approx(0.25),
        "compute": pytest.approx(0.5),
    }
    assert time_shares([record(0.2), record(0.6, seconds=3.0)]) == {
        "data": pytest.approx(0.5),
        "compute": pytest.approx(0.5),
    }
