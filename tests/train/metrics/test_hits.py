"""Figures from hits: by hand, as a plain list defines them, and torchmetrics'; ties fall in every order."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


def plain(order: list[float], k: int) -> list[float]:
    """The definitions of RecBole, and of scikit-learn's graded NDCG, on one list of grades, best place first."""
    relevant, top = sum(grade > 0 for grade in order), order[:k]
    hits = [grade > 0 for grade in top]
    gain = sum(grade / math.log2(place + 2) for place, grade in enumerate(top))
    best = sorted(order, reverse=True)[:k]
    ideal = sum(grade / math.log2(place + 2) for place, grade in enumerate(best))
    first = next((1 / (place + 1) for place, hit in enumerate(hits) if hit), 0.0)
    precisions = sum(
        sum(hits[: place + 1]) / (place + 1) for place, hit in enumerate(hits) if hit
    )
    return [
        float(any(hits)),
        sum(hits) / relevant,
        sum(hits) / k,
        gain / ideal,
        first,
        precisions / min(relevant, k),
    ]


@given(
    lists=st.lists(
        st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.5]), min_size=7, max_size=7),
        min_size=1,
        max_size=4,
    ).filter(lambda rows: all(any(row) for row in rows)),
    k=st.integers(1, 9),
)
def test_figures_of_any_grades_are_those_of_a_plain_list(
    lists: list[list[float]], k: int
) -> None:
    grades = torch.tensor(lists)
    scores = torch.arange(7.0).flip(0).repeat(len(lists), 1)
    rows, items = grades.nonzero().unbind(1)
    question = Question(
        targets=items, target_rows=rows, grades=grades[rows, items], not_items=()
    )
    hits = hits_by(lambda block: scores[block].clone(), question, 7, k=k)
    expected = np.mean([plain(row, k) for row in lists], axis=0)
    assert list(ranking_metrics(hits, at(k)).values()) == pytest.approx(list(expected))


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
