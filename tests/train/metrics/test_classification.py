"""Classification figures: by their definitions, which are scikit-learn's, over ranks and updates."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.contracts import run_ranks
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.metrics import ClassificationMetrics

HERE = Runtime()


def classified(runtime: Runtime, *rows: Tensor) -> dict[str, float]:
    metrics = ClassificationMetrics()
    metrics.update(*rows)
    return metrics.compute(runtime)


def rows(count: int = 101, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with ties, labels, weights of which a third are 0; logits that a float32 sigmoid makes a tie of."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(20, (count,), generator=generator).float() + 20
    labels = torch.randint(2, (count,), generator=generator).float()
    return logits, labels, torch.randint(3, (count,), generator=generator).float()


def by_pairs(logits: Tensor, labels: Tensor, weights: Tensor) -> float:
    """The definition: the share of pairs of a positive and a negative in order, by the product of their weights."""
    logits, labels, weights = logits.double(), labels.double(), weights.double()
    positive, negative = weights * labels, weights * (1 - labels)
    won = (logits[:, None] > logits).double() + (logits[:, None] == logits).double() / 2
    return float(positive @ won @ negative / (positive.sum() * negative.sum()))


def share(runtime: Runtime, *columns: Tensor) -> list[Tensor]:
    """A rank's rows: the first rank has a quarter, the last the rest; padding of NaN at the end."""
    cuts = [
        0,
        *[len(columns[0]) // 4 * (rank + 1) for rank in range(runtime.world_size - 1)],
        len(columns[0]),
    ]
    own = slice(cuts[runtime.rank], cuts[runtime.rank + 1])
    logits, labels, weights, *others = [column[own] for column in columns]
    pad = torch.full((3,), torch.nan)
    padded = [
        torch.cat([logits, pad]),
        torch.cat([labels, pad]),
        torch.cat([weights, torch.zeros(3)]),
    ]
    return padded + [torch.cat([other, other.new_full((3,), -7)]) for other in others]


@pytest.mark.unit
@given(
    st.lists(
        st.tuples(
            st.sampled_from([-3.0, -0.5, -0.0, 0.0, 0.5, 200.0]),
            st.sampled_from([0, 0.3, 1]),
            st.integers(0, 2),
        ),
        min_size=1,
    )
)
def test_auc_by_definition(drawn: list[tuple[float, float, int]]) -> None:
    logits, labels, weights = torch.tensor(drawn).unbind(1)
    exact = classified(HERE, logits, labels, weights)["auc"]
    expected = by_pairs(logits, labels, weights)
    if math.isnan(expected):
        assert math.isnan(exact)
    else:
        assert exact == pytest.approx(expected, abs=1e-9)


def noisy(count: int = 4001) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(count, generator=generator) - 2
    labels = (torch.rand(count, generator=generator) < logits.sigmoid()).float()
    return logits, labels, torch.rand(count, generator=generator) + 0.5


@pytest.mark.unit
def test_auc_and_log_loss_are_those_of_scikit_learn() -> None:
    """Printed by roc_auc_score and log_loss of scikit-learn 1.9.1, of weighted rows, nine of which tie."""
    row = torch.arange(40)
    logits = (row * 29 % 41 - 20) / 4
    logits[::5] = 0.25
    found = classified(HERE, logits, (row * 13 % 7 < 3).float(), row % 4 + 0.5)
    assert found["auc"] == pytest.approx(0.4052734375, rel=1e-12)
    assert found["log_loss"] == pytest.approx(1.5153781293388358, rel=1e-12)
    # Log loss over the entropy of the mean label; sum of predictions over that of labels.
    assert found["ne"] == pytest.approx(2.2516372354626553, rel=1e-12)
    assert found["calibration"] == pytest.approx(1.2966168332872439, rel=1e-12)


def streamed(runtime: Runtime) -> tuple[dict[str, float], dict[str, float]]:
    """Rows of all ranks at once, and others in blocks of unequal length, asked twice."""
    made = ClassificationMetrics()
    for block in zip(
        *(column.split(321) for column in share(runtime, *noisy())), strict=True
    ):
        made.update(*block)
    made.compute(runtime)
    return classified(runtime, *share(runtime, *rows())), made.compute(runtime)


def test_figures_over_updates_and_ranks_are_those_of_all_rows_at_once() -> None:
    for world_size in (1, 2, 3):
        for tied, blocks in run_ranks(streamed, world_size):
            assert tied["auc"] == pytest.approx(by_pairs(*rows()), abs=1e-12)
            assert blocks == pytest.approx(classified(HERE, *noisy()), rel=1e-12)


@pytest.mark.unit
def test_what_is_undefined_is_nan() -> None:
    ones = torch.ones(3)
    found = classified(HERE, torch.arange(3.0), ones, ones)
    assert math.isnan(found["auc"])
    assert math.isnan(found["ne"])
    assert found["log_loss"] > 0
    nothing = ClassificationMetrics().compute(HERE)
    assert len(nothing) == 4
    assert all(math.isnan(value) for value in nothing.values())
    assert math.isnan(classified(HERE, ones, ones * 0, ones)["calibration"])


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"logits": torch.zeros(4, 1)},
            r"logits \(4, 1\), labels \(4,\), weights \(4,\): must all be \(B,\)",
        ),
        (
            {"logits": torch.tensor([0, torch.nan, 0, 0])},
            r"logits: nan in 1 of 4 rows; must be finite: has training diverged",
        ),
        (
            {"labels": torch.tensor([0.0, 1.0, 5.0, 3.0])},
            r"labels: 5.0 in 2 of 4 rows; must be 0 to 1: turn ratings into 0 and 1",
        ),
        (
            {"weights": torch.tensor([1.0, -1.0, 1.0, 1.0])},
            r"weights: -1.0 in 1 of 4 rows; must be 0 or more",
        ),
    ],
)
def test_wrong_rows_are_named(options: dict[str, Tensor], message: str) -> None:
    columns = {
        "logits": torch.zeros(4),
        "labels": torch.ones(4),
        "weights": torch.ones(4),
    } | options
    with pytest.raises(ValueError, match=message):
        ClassificationMetrics().update(**columns)
