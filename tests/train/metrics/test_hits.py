"""Figures from hits are those that RecBole and scikit-learn print; ties fall in every order."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrec_ext.train.config import Figure
from torchrec_ext.train.metrics import (
    Hits,
    Question,
    hits_by,
    popularity_hits,
    ranking_metrics,
)
from torchrec_ext.train.metrics.hits import first_gains

pytestmark = pytest.mark.unit
ALL: tuple[Figure, ...] = ("hr", "recall", "precision", "ndcg", "mrr", "map")


def at(k: int) -> list[tuple[Figure, int]]:
    return [(name, k) for name in ALL]


def test_figures_are_those_of_recbole_and_scikit_learn() -> None:
    """Printed by RecBole 1.2.1 for grades of 0 and 1, and by ndcg_score of scikit-learn 1.9.1 for the grades."""
    places = torch.arange(12 * 9).view(12, 9)
    grades = (places * 37 % 11 % 5 * (places % 3 == 0)).float()
    grades[grades.sum(1) == 0, 0] = 1
    scores = (places * 7919 % 10_007).float()
    rows, items = grades.nonzero().unbind(1)
    expected = {
        "hr@5": 0.9166666666666666,
        "recall@5": 0.5972222222222222,
        "precision@5": 0.26666666666666666,
        "ndcg@5": 0.4104158458191915,
        "mrr@5": 0.4680555555555555,
        "map@5": 0.2652777777777778,
    }
    for given_grades, ndcg in (
        (None, expected["ndcg@5"]),
        (grades[rows, items], 0.4019508687838041),
    ):
        question = Question(
            targets=items, target_rows=rows, grades=given_grades, not_items=()
        )
        hits = hits_by(lambda block: scores[block].clone(), question, 9, k=5)
        assert ranking_metrics(hits, at(5)) == pytest.approx(
            expected | {"ndcg@5": ndcg}, rel=1e-12
        )


def test_each_of_equal_scores_is_equally_often_at_each_place() -> None:
    """Of 6 candidates 4 tie behind one: over many queries each has each of the places 2 to 5 in a quarter of them."""
    queries = 8_000
    scores = torch.tensor([0.5, 1.0, 0.5, -1.0, 0.5, 0.5]).repeat(queries, 1)
    for target in (0, 2, 4, 5):
        grades = torch.zeros_like(scores)
        grades[:, target] = 1.0
        counts = first_gains(scores, grades, 6).sum(0)
        assert counts[[0, 5]].tolist() == [0, 0]
        # Four standard deviations of a share of a quarter.
        margin = 4 * math.sqrt(queries * 0.25 * 0.75)
        assert float((counts[1:5] - queries / 4).abs().max()) < margin


def test_ties_fall_alike_in_every_block_and_run(device: torch.device) -> None:
    scores = torch.zeros(50, 30, device=device)
    grades = torch.zeros_like(scores)
    grades[:, 3] = 1.0
    whole = first_gains(scores, grades, 7)
    assert 0 < int(whole.sum()) < 50
    for start in (0, 13, 49):
        part = first_gains(scores[start:], grades[start:], 7, start)
        assert torch.equal(part, whole[start:])


def some_hits() -> Hits:
    generator = torch.Generator().manual_seed(0)
    gains = (torch.rand(40, 20, generator=generator) < 0.2).float()
    relevant = gains.sum(1).long() + 1
    ideal = (torch.arange(20) < relevant[:, None]).float()
    return Hits(gains, ideal, relevant)


def test_popularity_ranks_by_counts_of_any_size() -> None:
    """Counts above 2**24 that a float32 would take for equal."""
    question = Question(
        targets=torch.tensor([1, 3]),
        seen_rows=torch.tensor([1]),
        seen_items=torch.tensor([2]),
    )
    counts = torch.tensor([9, 2**24, 2**24 + 1, 5])
    hits = popularity_hits(counts, question, k=2)
    assert hits.gains.tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ([("hr", 0)], r"hr@0: must be 1 to 20 places"),
        ([("hr", 21)], r"hr@21: must be 1 to 20 places"),
        ([("auc", 5)], r"figure 'auc': must be one of hr, recall, precision"),
    ],
)
def test_wrong_figures_are_named(figures: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ranking_metrics(some_hits(), figures)


def test_no_query_has_no_figure() -> None:
    none: Tensor = torch.zeros(0, 3)
    hits = Hits(none, none, torch.zeros(0, dtype=torch.int64))
    assert math.isnan(ranking_metrics(hits, [("hr", 3)])["hr@3"])
