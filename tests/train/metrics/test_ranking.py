"""Figures from ranks: by hand, ties against every order, several relevant items by RecBole's rules."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts import run_ranks
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.metrics import (
    RankingMetrics,
    TargetRanks,
    query_figures,
    ranking_metrics,
)

ALL = ("hr", "recall", "precision", "ndcg", "mrr", "map")


def figures(better: int, ties: int, k: int = 10) -> tuple[float, float]:
    found = ranking_metrics(
        TargetRanks(torch.tensor([better]), torch.tensor([ties])), k
    )
    return found[f"hr@{k}"], found[f"ndcg@{k}"]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("better", "ties", "k", "hr", "ndcg"),
    [
        (0, 0, 10, 1.0, 1.0),
        (2, 0, 10, 1.0, 0.5),
        (9, 0, 10, 1.0, 1 / math.log2(11)),
        (10, 0, 10, 0.0, 0.0),
        (0, 1, 1, 0.5, 0.5),
        (0, 1, 10, 1.0, (1 + 1 / math.log2(3)) / 2),
        (9, 4, 10, 0.2, 1 / math.log2(11) / 5),
        (12, 5, 10, 0.0, 0.0),
        (0, 19, 10, 0.5, sum(1 / math.log2(place + 1) for place in range(1, 11)) / 20),
    ],
)
def test_figures_of_one_query_by_hand(
    better: int, ties: int, k: int, hr: float, ndcg: float
) -> None:
    assert figures(better, ties, k) == pytest.approx((hr, ndcg))


@pytest.mark.unit
@given(better=st.integers(0, 30), ties=st.integers(0, 30), k=st.integers(1, 12))
def test_a_tie_counts_as_the_mean_over_the_places_it_may_take(
    better: int, ties: int, k: int
) -> None:
    def all_figures(better: int, ties: int) -> tuple[float, ...]:
        return tuple(
            ranking_metrics(
                TargetRanks(torch.tensor([better]), torch.tensor([ties])), k, ALL
            ).values()
        )

    places = [all_figures(better + others, 0) for others in range(ties + 1)]
    expected = tuple(sum(values) / len(places) for values in zip(*places, strict=True))
    assert all_figures(better, ties) == pytest.approx(expected)


def test_several_relevant_items_by_hand() -> None:
    """Relevant at places 1, 3 and 12 of one query, at place 2 of another."""
    ranks = TargetRanks(
        torch.tensor([0, 2, 11, 1]),
        torch.zeros(4, dtype=torch.int64),
        torch.tensor([0, 0, 0, 1]),
    )
    found = ranking_metrics(ranks, 10, ALL)
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert found == pytest.approx(
        {
            "hr@10": 1.0,
            "recall@10": (2 / 3 + 1) / 2,
            "precision@10": (0.2 + 0.1) / 2,
            "ndcg@10": ((1 + 1 / 2) / ideal + 1 / math.log2(3)) / 2,
            "mrr@10": (1 + 1 / 2) / 2,
            "map@10": ((1 + 2 / 3) / 3 + 1 / 2) / 2,
        }
    )


def plain(order: list[bool], k: int) -> tuple[float, ...]:
    """RecBole's figures of one ranked list: whether each place holds a relevant item."""
    relevant, top = sum(order), order[:k]
    gain = sum(1 / math.log2(place + 2) for place, hit in enumerate(top) if hit)
    ideal = sum(1 / math.log2(place + 2) for place in range(min(relevant, k)))
    first = next((1 / (place + 1) for place, hit in enumerate(top) if hit), 0.0)
    precisions = sum(
        sum(top[: place + 1]) / (place + 1) for place, hit in enumerate(top) if hit
    )
    return (
        float(any(top)),
        sum(top) / relevant,
        sum(top) / k,
        gain / ideal,
        first,
        precisions / min(relevant, k),
    )


@pytest.mark.unit
@given(
    candidates=st.lists(
        st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6
    ).filter(lambda c: any(r for _, r in c)),
    k=st.integers(1, 5),
)
def test_several_relevant_items_count_as_the_mean_over_all_orders_of_the_ties(
    candidates: list[tuple[int, bool]], k: int
) -> None:
    scores = [score for score, _ in candidates]
    own = [score for score, relevant in candidates if relevant]
    ranks = TargetRanks(
        torch.tensor([sum(other > score for other in scores) for score in own]),
        torch.tensor([scores.count(score) - 1 for score in own]),
        torch.zeros(len(own), dtype=torch.int64),
    )
    orders = [
        order
        for order in itertools.permutations(candidates)
        if [s for s, _ in order] == sorted(scores, reverse=True)
    ]
    each = [plain([relevant for _, relevant in order], k) for order in orders]
    expected = [sum(values) / len(each) for values in zip(*each, strict=True)]
    assert list(ranking_metrics(ranks, k, ALL).values()) == pytest.approx(expected)


def some_ranks() -> TargetRanks:
    generator = torch.Generator().manual_seed(0)
    queries = torch.arange(40).repeat_interleave(
        torch.randint(1, 4, (40,), generator=generator)
    )
    better = torch.randint(0, 15, (len(queries),), generator=generator)
    return TargetRanks(better, torch.zeros_like(better), queries)


@pytest.mark.unit
def test_several_k_are_those_of_each() -> None:
    found = ranking_metrics(some_ranks(), (1, 5, 20), ALL)
    assert len(found) == 18
    for k in (1, 5, 20):
        assert {
            name: value for name, value in found.items() if name.endswith(f"@{k}")
        } == ranking_metrics(some_ranks(), k, ALL)
    assert found["recall@1"] < found["recall@5"] < found["recall@20"] == 1.0


@pytest.mark.unit
def test_every_query_has_its_own_figures() -> None:
    found = query_figures(some_ranks(), 5, ("recall",))["recall@5"]
    assert found.shape == (40,)
    assert (
        float(found.mean()) == ranking_metrics(some_ranks(), 5, ("recall",))["recall@5"]
    )


def streamed(runtime: Runtime, parts: int) -> dict[str, Any]:
    """Blocks of queries in turn: rank 0 takes more of them than rank 1, and a rank may have none."""
    made = RankingMetrics((3, 10), ALL)
    whole = some_ranks()
    assert whole.queries is not None
    for part in range(parts):
        if (part % 3 > 0) != (runtime.rank == 0) and runtime.world_size > 1:
            continue
        own = (whole.queries * parts // 40) == part
        made.update(TargetRanks(whole.better[own], whole.ties[own], whole.queries[own]))
    return made.compute(runtime)


@pytest.mark.parametrize(("world_size", "parts"), [(1, 1), (1, 7), (2, 7), (2, 1)])
def test_streamed_over_blocks_and_ranks_equals_all_at_once(
    world_size: int, parts: int
) -> None:
    expected = ranking_metrics(some_ranks(), (3, 10), ALL)
    for found in run_ranks(streamed, world_size, parts):
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.unit
def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"k=\[0\]: must be 1 or more"):
        ranking_metrics(some_ranks(), 0)
    with pytest.raises(
        ValueError,
        match=r"names=\['auc'\]: must be some of hr, recall, precision, ndcg, mrr, map",
    ):
        ranking_metrics(some_ranks(), 5, ("auc",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"k=\[5, 0\]"):
        RankingMetrics((5, 0))
