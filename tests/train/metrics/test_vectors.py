"""vector_figures(): equal to a count by hand and to torchmetrics; what counts as missed, and popularity's pairs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from torchrec_ext.train.metrics import vector_figures

pytestmark = pytest.mark.unit

USERS, ITEMS, DIM = 40, 200, 8
Array = np.ndarray[Any, Any]


class Case(NamedTuple):
    """Vectors and pairs of rows."""

    users: Array
    items: Array
    held_out: list[tuple[int, int]]
    seen: list[tuple[int, int]]


@pytest.fixture
def case() -> Case:
    draw = np.random.default_rng(0)
    users = draw.normal(size=(USERS, DIM)).astype(np.float32)
    items = draw.normal(size=(ITEMS, DIM)).astype(np.float32)
    drawn = draw.integers(0, (USERS, ITEMS), (600, 2)).tolist()
    pairs = sorted({(user, item) for user, item in drawn})
    seen = [pair for index, pair in enumerate(pairs) if index % 3]
    return Case(users, items, pairs[::3], seen)


def by_hand(case: Case, k: int, scores: Array) -> dict[str, float]:
    """The figures by sorting each user's scores, as RecBole 1.2.1 defines them."""
    sums = dict.fromkeys(("hr", "recall", "precision", "ndcg", "mrr", "map"), 0.0)
    asked = sorted({user for user, _ in case.held_out})
    for user in asked:
        wanted = {item for owner, item in case.held_out if owner == user}
        row = scores[user].copy()
        row[[item for owner, item in case.seen if owner == user]] = -np.inf
        hits = [item in wanted for item in np.argsort(-row)[:k].tolist()]
        gain = sum(hit / math.log2(place + 2) for place, hit in enumerate(hits))
        best = sum(1 / math.log2(place + 2) for place in range(min(k, len(wanted))))
        precisions = [
            sum(hits[: place + 1]) / (place + 1)
            for place, hit in enumerate(hits)
            if hit
        ]
        sums["hr"] += any(hits)
        sums["recall"] += sum(hits) / len(wanted)
        sums["precision"] += sum(hits) / k
        sums["ndcg"] += gain / best
        sums["mrr"] += 1 / (1 + hits.index(True)) if any(hits) else 0
        sums["map"] += sum(precisions) / min(k, len(wanted))
    return {f"{name}@{k}": value / len(asked) for name, value in sums.items()}


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_figures_are_those_of_a_count_by_hand(case: Case, similarity: Any) -> None:
    users, items = case.users, case.items
    if similarity == "cosine":
        users = users / np.linalg.norm(users, axis=1, keepdims=True)
        items = items / np.linalg.norm(items, axis=1, keepdims=True)
    expected = by_hand(case, 5, users @ items.T) | by_hand(case, 20, users @ items.T)
    result = vector_figures(*case, metrics=list(expected), similarity=similarity)
    assert result.figures == pytest.approx(expected, abs=1e-6)
    assert result.users == len({user for user, _ in case.held_out})
    assert result.pairs == len(case.held_out)


def test_tensors_arrays_order_and_repeated_pairs_change_nothing(case: Case) -> None:
    expected = vector_figures(*case)
    pairs = torch.tensor(case.held_out + case.held_out[:5]).flip(0)
    result = vector_figures(
        torch.from_numpy(case.users), case.items, pairs, np.array(case.seen[::-1])
    )
    assert result == expected


def test_blocks_change_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = vector_figures(*case)
    monkeypatch.setattr("torchrec_ext.train.metrics.hits.SCORES_PER_BLOCK", 3 * ITEMS)
    assert vector_figures(*case).figures == pytest.approx(whole.figures, abs=1e-12)


def test_figures_are_torchmetrics(case: Case) -> None:
    retrieval = pytest.importorskip("torchmetrics.retrieval")
    scores = torch.from_numpy(case.users @ case.items.T)
    wanted = torch.zeros(USERS, ITEMS, dtype=torch.bool)
    wanted[tuple(torch.tensor(case.held_out).T)] = True
    counted = torch.ones(USERS, ITEMS, dtype=torch.bool)
    counted[tuple(torch.tensor(case.seen).T)] = False
    asked = wanted.any(1, keepdim=True).expand(-1, ITEMS) & counted
    queries = torch.arange(USERS)[:, None].expand(-1, ITEMS)
    theirs = {
        "recall@10": retrieval.RetrievalRecall(top_k=10),
        "ndcg@10": retrieval.RetrievalNormalizedDCG(top_k=10),
        "precision@10": retrieval.RetrievalPrecision(top_k=10),
        "hr@10": retrieval.RetrievalHitRate(top_k=10),
    }
    figures = vector_figures(*case, metrics=list(theirs)).figures
    for name, metric in theirs.items():
        value = metric(scores[asked], wanted[asked], indexes=queries[asked])
        assert figures[name] == pytest.approx(float(value), abs=1e-6), name


def test_items_without_a_vector_are_missed(case: Case) -> None:
    """Also those of a user who has no other item to find."""
    gone = {item for _, item in case.held_out[::4]}
    lonely = case.held_out[0][0]
    gone |= {item for user, item in case.held_out if user == lonely}
    kept = [item for item in range(ITEMS) if item not in gone]
    row = {item: index for index, item in enumerate(kept)}
    scores = case.users @ case.items.T
    scores[:, sorted(gone)] = -1e9
    expected = by_hand(case, 20, scores)
    held_out = [(user, row.get(item, -1)) for user, item in case.held_out]
    # Of one user several pairs may be without a vector: each is a pair of its own.
    seen = [(user, row.get(item, -1)) for user, item in case.seen]
    result = vector_figures(
        case.users, case.items[kept], held_out, seen, metrics=["hr@20", "mrr@20"]
    )
    assert result.without_vector == sum(item in gone for _, item in case.held_out)
    assert result.pairs == len(case.held_out)
    assert result.figures == pytest.approx(
        {name: expected[name] for name in ("hr@20", "mrr@20")}, abs=1e-6
    )


def test_an_item_seen_before_is_missed_and_popularity_counts_every_seen_pair() -> None:
    """User 2 is new and is asked for item 0; user 3 is asked for item 3, which it has seen."""
    eye = np.eye(4, dtype=np.float32)
    seen = [(0, 0), (1, 0), (1, 1), (3, 3), (-1, 0)]
    result = vector_figures(eye, eye, [(2, 0), (3, 3)], seen, metrics=["hr@1"])
    assert result.seen_before == 1
    # Item 0 is the most popular one. Item 3 has the best score for user 3, who has seen it.
    assert result.popularity == {"hr@1": 0.5}
    assert result.figures == {"hr@1": 0.0}
    assert vector_figures(eye, eye, [(2, 0)]).popularity == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": ["recal@20"]}, "'recal@20' must be a figure and a number of items"),
        ({"items": np.ones((3, 2))}, "users: width 4, items: width 2; must be equal"),
        ({"items": np.full((4, 4), np.nan)}, "items: the vector of row 0 is not finite"),
        ({"users": np.ones(4)}, r"users: shape \(4,\); must be \(rows, width\)"),
        ({"held_out": [(4, 0)]}, "held_out: user 4; must be a row of the 4 user vectors"),
        ({"held_out": [(-1, 0)]}, "held_out: user -1; must be a row"),
        ({"held_out": [(0, -1)]}, "held_out: none of its items has a vector"),
        ({"held_out": [(0, 1, 2)]}, r"held_out: shape \(1, 3\); must be \(pairs, 2\)"),
        ({"seen": [(0, 7)]}, "seen: item 7; must be a row of the 4 item vectors"),
    ],
)  # fmt: skip
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    eye = np.eye(4)
    arguments: dict[str, Any] = {
        "users": eye,
        "items": eye,
        "held_out": [(0, 0)],
        "seen": [(0, 1)],
    }
    with pytest.raises(ValueError, match=message):
        vector_figures(**(arguments | changes))
