"""Exact search: what sorting every score would give, ties, filters and tombstones included, in any block size."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from torchrec_ext.modules.interaction import (
    Cosine,
    DeepCross,
    DotProduct,
    GeneralizedMF,
    TopMLP,
)
from torchrec_ext.retrieval.index.exact import ExactIndex, ScoredIndex, TopK
from torchrec_ext.retrieval.index.projection import projection
from torchrec_ext.retrieval.store.store import EmbeddingStore, refresh_store
from torchrec_ext.retrieval.store.writer import write_store

pytestmark = pytest.mark.unit


def by_sorting(
    scores: Tensor,
    k: int,
    allowed: Tensor | None = None,
    excluded: Sequence[Tensor] | None = None,
) -> list[list[int]]:
    """Positions by score, then by position; -1 where none is left."""
    found = []
    for row, one in enumerate(scores):
        left = [place for place in range(len(one)) if allowed is None or allowed[place]]
        left = [
            place
            for place in left
            if excluded is None or place not in excluded[row].tolist()
        ]
        best = sorted(left, key=lambda place: (-float(one[place]), place))[:k]
        found.append([*best, *[-1] * (k - len(best))])
    return found


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_blocks_of_any_size_with_many_ties(data: st.DataObject) -> None:
    """Scores are small integers, so that most of them are equal."""
    queries, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 60))
    k, block = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 60))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9999)))
    scores = torch.randint(
        data.draw(st.integers(1, 9)), (queries, size), generator=generator
    ).float()
    left_out = torch.rand(queries, size, generator=generator) < data.draw(
        st.sampled_from([0.0, 0.3, 1.0])
    )
    best = TopK(queries, k)
    for start in range(0, size, block):
        best.add(
            start, scores.masked_fill(left_out, -torch.inf)[:, start : start + block]
        )
    values, positions = best.result()
    expected = by_sorting(
        scores, k, excluded=[row.nonzero().squeeze(1) for row in left_out]
    )
    assert positions.tolist() == expected
    assert (
        values[positions >= 0].tolist()
        == scores.gather(1, positions.clamp(min=0))[positions >= 0].tolist()
    )
    assert bool((values[positions < 0] == -torch.inf).all())


@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("queries", [1, 5])
def test_exact_and_filtered_inside_the_search(
    metric: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rows of 8: blocks of 37
    monkeypatch.setattr("torchrec_ext.retrieval.index.exact._BLOCK", 4 * 8 * 37)
    torch.manual_seed(queries)
    rows, asked = torch.randn(500, 8), torch.randn(queries, 8)
    rows[3] = 0
    allowed = torch.rand(500) < 0.2
    excluded = [torch.randperm(500)[:40] for _ in range(queries)]
    index = ExactIndex(rows, metric)
    scores = (
        normalize(asked) @ normalize(rows).T if metric == "cosine" else asked @ rows.T
    )
    for mask, out in (
        (None, None),
        (allowed, None),
        (None, excluded),
        (allowed, excluded),
    ):
        found, positions = index.search(asked, 20, allowed=mask, excluded=out)
        assert positions.tolist() == by_sorting(scores, 20, mask, out)
        assert torch.allclose(found, scores.gather(1, positions), atol=1e-6)


FILTERED = 2_003  # rows, which are no multiple of what BLAS multiplies at once


def indexes() -> dict[str, ExactIndex | ScoredIndex]:
    """Exact indexes over rows of which each has a twin with equal scores."""
    torch.manual_seed(2)
    rows = torch.randn(FILTERED, 16)
    rows[1_000:] = rows[:1_003].clone()
    network = projection(TopMLP([16, 16], (16, 8)), 16)
    wide = ScoredIndex(projection(TopMLP([16, 16], (24, 8)), 16), rows)
    wide.quantize()
    return {
        "dot": ExactIndex(rows, "dot"),
        "cosine": ExactIndex(rows, "cosine"),
        "linear": ScoredIndex(projection(GeneralizedMF([16, 16]), 16), rows),
        "top_nn": ScoredIndex(network, network.candidates(rows).detach()),
        "unfolded": wide,
    }


@pytest.mark.parametrize("share", [0.0, 1e-9, 1e-4, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["dot", "cosine", "linear", "top_nn", "unfolded"])
def test_a_filter_changes_no_score_and_loses_no_item(
    kind: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit and tie, also if fewer than K items are left. Share 1e-9 is one item."""
    monkeypatch.setattr("torchrec_ext.retrieval.index.exact._BLOCK", 4 * 16 * 640)
    monkeypatch.setattr("torchrec_ext.retrieval.index.exact._PAIRS", 16 * 640)
    index = indexes()[kind]
    for queries in (1, 3):
        asked = torch.randn(queries, 16)
        ranked, order = index.search(asked, FILTERED)
        scores = torch.zeros_like(ranked).scatter_(1, order, ranked)
        allowed = torch.randperm(FILTERED) < FILTERED * share
        if share:
            allowed[torch.randint(FILTERED, ())] = True
        excluded = [torch.randperm(FILTERED)[:40] for _ in range(queries)]
        for k, out in (
            (10, None),
            (10, excluded),
            (FILTERED + 5, None),
            (FILTERED + 5, excluded),
        ):
            found, positions = index.search(asked, k, allowed=allowed, excluded=out)
            assert positions.tolist() == by_sorting(scores, k, allowed, out)
            exists = positions >= 0
            assert torch.equal(
                found[exists], scores.gather(1, positions.clamp(min=0))[exists]
            )
            assert bool((found[~exists] == -torch.inf).all())


def test_more_than_there_are_gives_all_and_says_so() -> None:
    rows = torch.tensor([[1.0], [3.0], [2.0]])
    scores, positions = ExactIndex(rows, "dot").search(torch.ones(1, 1), 5)
    assert positions.tolist() == [[1, 2, 0, -1, -1]]
    assert scores.tolist() == [[3.0, 2.0, 1.0, -torch.inf, -torch.inf]]
    nobody = torch.zeros(3, dtype=torch.bool)
    assert ExactIndex(rows, "dot").search(torch.ones(2, 1), 1, allowed=nobody)[
        1
    ].tolist() == [[-1], [-1]]
    assert ExactIndex(torch.empty(0, 1), "cosine").search(torch.ones(1, 1), 2)[
        1
    ].tolist() == [[-1, -1]]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("share", [0.2, 0.9, 1.0])
def test_half_of_the_first_layer_in_advance_changes_no_bit(
    dtype: str, share: float, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    rows = np.random.default_rng(0).standard_normal((FILTERED, 8)).astype(np.float32)
    write_store(tmp_path, [(np.arange(FILTERED), rows)], dtype=dtype)
    wide = projection(TopMLP([8, 8], (12, 4)), 8)
    plain, ahead = (ScoredIndex(wide, EmbeddingStore.open(tmp_path)) for _ in range(2))
    ahead.quantize()
    assert (plain.projection.width, ahead.projection.width) == (8, 12)
    allowed = torch.rand(FILTERED) < share
    for expected, found in zip(
        plain.search(torch.ones(2, 8), 20, allowed=allowed),
        ahead.search(torch.ones(2, 8), 20, allowed=allowed),
        strict=True,
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_over_a_store_without_its_tombstones(dtype: str, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    write_store(tmp_path, [(np.arange(200), rows)], dtype=dtype)
    store = refresh_store(tmp_path, [], [], deleted=[17, 18])
    query = torch.from_numpy(rows[17:18])
    scores = query @ store.rows(torch.arange(200)).T
    for index in (
        ExactIndex(store, "dot"),
        ScoredIndex(projection(DotProduct([8, 8]), 8), store),
    ):
        found = index.search(query, 10)[1]
        assert found.tolist() == by_sorting(
            scores, 10, torch.from_numpy(store.live.copy())
        )
    assert EmbeddingStore.open(tmp_path).digest == store.digest


@pytest.mark.parametrize("hidden", [(4,), (16, 4), ()])
def test_under_a_top_nn_as_the_network_scores(
    hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrec_ext.retrieval.index.exact._PAIRS", 64)
    torch.manual_seed(1)
    candidates, queries = torch.randn(150, 8), torch.randn(3, 6)
    for interaction in (TopMLP([6, 8], hidden), DeepCross([6, 8], (4,))):
        made = projection(interaction, 8)
        scores = interaction.score_all(queries, candidates).detach()
        found, positions = ScoredIndex(made, made.candidates(candidates)).search(
            queries, 9
        )
        assert positions.tolist() == by_sorting(scores, 9)
        assert torch.allclose(found, scores.gather(1, positions), atol=1e-6)
    made = projection(Cosine([8, 8]), 8)
    assert ScoredIndex(made, made.candidates(candidates)).search(candidates[7:8], 1)[
        1
    ].tolist() == [[7]]


def test_refused() -> None:
    index = ExactIndex(torch.ones(4, 2), "dot")
    ones, _top = torch.ones(1, 2), projection(TopMLP([2, 4], (3,)), 4)
    refused = [
        ("queries: shape", lambda: index.search(torch.ones(2), 1)),
        (
            "must be \\(Q, D\\) finite numbers",
            lambda: index.search(torch.tensor([[1.0, torch.nan]]), 1),
        ),
        (
            "queries: 3 wide, the stored vectors are 2|queries: 3 wide, stored are 2",
            lambda: index.search(torch.ones(1, 3), 1),
        ),
        ("k=0: must be 1 or more", lambda: index.search(ones, 0)),
        (
            r"allowed: shape \(3,\) of torch.bool; must be \(4,\) bool",
            lambda: index.search(ones, 1, allowed=torch.ones(3).bool()),
        ),
        (
            "excluded: 2 sets of positions for 1 queries",
            lambda: index.search(ones, 1, excluded=[torch.tensor([0])] * 2),
        ),
        (
            "excluded: -1 is not a position .*; leave out unknown ids",
            lambda: index.search(ones, 1, excluded=[torch.tensor([2, -1])]),
        ),
        (
            "metric='l2': must be dot or cosine",
            lambda: ExactIndex(torch.ones(1, 1), "l2"),
        ),
        (
            "a top NN is searched by ScoredIndex",
            lambda: ExactIndex(torch.ones(1, 1), "top_nn"),
        ),
        (
            "source: rows are 4 wide, the projection's 3",
            lambda: ScoredIndex(projection(TopMLP([2, 4], (3,)), 4), torch.ones(1, 4)),
        ),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()
