"""Ranking among given candidates: by hand, on 2 ranks as on 1, and the popularity figures of He et al.'s test file."""

import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from tests.contracts import run_ranks
from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.metrics import (
    Candidates,
    Question,
    candidate_hits,
    catalogue_hits,
    gains_among,
    own_share,
    popularity_hits,
    ranking_metrics,
)

QUERIES, ITEMS, NEGATIVES = 21, 30, 9


@pytest.mark.unit
def test_gains_by_hand(device: torch.device) -> None:
    ids = torch.tensor(
        [[1, 2, 3, 4], [1, 2, 1, 2], [5, 6, -1, -1], [0, 7, 8, 7]], device=device
    )
    scores = torch.tensor(
        [
            [1.0, 2.0, 1.5, 0.0],
            [3.0, 9.0, 3.0, 9.0],
            [2.0, 1.0, 2.0, 9.0],
            [0.5, 0.6, 0.4, 0.7],
        ],
        device=device,
    )
    # An id that repeats counts once, at its first place; an absent one not at all.
    assert gains_among(scores, ids, 3).tolist() == [
        [0, 0, 1],
        [0, 1, 0],
        [1, 0, 0],
        [0, 1, 0],
    ]
    by_item = torch.zeros(4, 9, device=device).scatter(
        1, ids[:, 1:].clamp(min=0), scores[:, 1:]
    )
    by_item.scatter_(1, ids[:, :1], scores[:, :1])
    hits = Candidates(ids.cpu()).hits(Candidates(ids.cpu()).gains(by_item, 0, 3).cpu())
    assert hits.gains[:3].tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
    assert hits.ideal.tolist() == [[1, 0, 0]] * 4
    assert hits.relevant.tolist() == [1] * 4


@pytest.mark.unit
def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"scores: shape \(4,\), ids: \(1, 4\)"):
        gains_among(torch.zeros(4), torch.zeros(1, 4, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match=r"ids: torch.float32 of shape \(1, 4\)"):
        Candidates(torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"ids: row 1 begins with -1; must begin with"):
        Candidates(torch.tensor([[0, 1], [-1, 1]]))
    for scores in ([[torch.nan, 0.0]], [[0.0, torch.nan]], [[torch.inf, 0.0]]):
        with pytest.raises(ValueError, match=r"scores: (nan|inf) of query 0.*diverged"):
            gains_among(torch.tensor(scores), torch.tensor([[3, 1]]), 2)


class Products(nn.Module):
    """The product of the sum of the queries' towers with the candidate's."""

    def forward(self, outputs: list[Tensor]) -> Tensor:
        return (sum(outputs[:-1]) * outputs[-1]).sum(1)

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        return query.unflatten(1, (-1, candidates.shape[1])).sum(1) @ candidates.T


class Lookup:
    """A model whose batches are vectors already."""

    interaction = Products()

    def embed(self, tower: str, batch: TowerBatch) -> Tensor:
        return {"user": 1.0, "context": 2.0, "item": 3.0}[tower] * batch.dense


class Vectors:
    def __init__(self, dense: Tensor) -> None:
        self.dense = dense

    def to(self, device: torch.device) -> "Vectors":
        return self


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    users = torch.randn(QUERIES, 6, generator=generator)
    items = torch.randn(ITEMS, 6, generator=generator)
    return (
        users,
        items,
        torch.randint(-1, ITEMS, (QUERIES, 1 + NEGATIVES), generator=generator).abs_(),
    )


def ranked(runtime: Runtime, towers: tuple[str, ...]) -> list[list[int]]:
    """The place of each target, from 0, among given candidates, and among all."""
    users, items, ids = drawn()
    parts = [
        [
            (Vectors(rows[share.rows]), share.keep)
            for share in own_share(len(rows), runtime, block=4)
        ]
        for rows in (users, items)
    ]
    among = candidate_hits(
        Lookup(),
        runtime,
        *parts,  # type: ignore[arg-type]
        Candidates(ids),
        k=1 + NEGATIVES,
        towers=towers,
    )
    nothing = torch.zeros(0, dtype=torch.int64)
    question = Question(
        targets=ids[:, 0], seen_rows=nothing, seen_items=nothing, not_items=()
    )
    whole = catalogue_hits(
        Lookup(),
        runtime,
        *parts,  # type: ignore[arg-type]
        question,
        k=ITEMS,
        towers=towers,
    )
    assert all(bool((hits.gains.sum(1) == 1).all()) for hits in (among, whole))
    return [hits.gains.argmax(1).tolist() for hits in (among, whole)]


@pytest.mark.parametrize("towers", [("user", "item"), ("user", "context", "item")])
def test_any_number_of_ranks_and_towers_ranks_like_a_plain_loop(
    towers: tuple[str, ...],
) -> None:
    users, items, ids = drawn()
    among, whole = [], []
    for user, own in zip(users, ids.tolist(), strict=True):
        better = {
            other
            for other in range(ITEMS)
            if float(user @ items[other]) > float(user @ items[own[0]])
        }
        whole.append(len(better))
        among.append(len(better & set(own)))
    assert len(set(among)) > 4
    for world_size in (1, 2, 3):
        for found in run_ranks(ranked, world_size, towers):
            assert found == [among, whole]


@pytest.mark.unit
def test_too_few_queries_are_told() -> None:
    users, items, ids = drawn()
    nothing = torch.zeros(0, dtype=torch.int64)
    question = Question(targets=ids[:, 0], seen_rows=nothing, seen_items=nothing)
    few, all_items = [(Vectors(users[:20]), 20)], [(Vectors(items), ITEMS)]
    for function, asked in (
        (candidate_hits, Candidates(ids)),
        (catalogue_hits, question),
    ):
        with pytest.raises(
            ValueError,
            match=r"queries: 20 rows on rank 0, must be 21 of 21; make a batch for each share",
        ):
            function(Lookup(), Runtime(), few, all_items, asked)  # type: ignore[operator]


def test_popularity_on_the_split_of_the_ncf_paper() -> None:
    """Published: .4531 and .2542. The paper's evaluator lists the target last, so it loses every tie."""
    folder = Path(os.environ.get("TORCHREC_EXT_DATA") or "") / "ml-1m-ncf"
    if (
        not os.environ.get("TORCHREC_EXT_DATA")
        or not (folder / "test_negatives.parquet").exists()
    ):
        pytest.skip(
            "needs the split of MovieLens 1M: set TORCHREC_EXT_DATA to a folder with ml-1m-ncf/test_negatives.parquet"
        )
    train, test, negatives = (
        pq.read_table(folder / f"{name}.parquet")
        for name in ("train", "test", "test_negatives")
    )
    targets = test["item"].to_numpy()
    drawn = negatives["negative"].to_numpy().reshape(len(targets), 99)
    assert (
        negatives["user"].to_numpy().reshape(len(targets), 99)
        == test["user"].to_numpy()[:, None]
    ).all()
    assert (drawn == targets[:, None]).any(1).sum() == 156, (
        "test items among their own negatives"
    )
    popularity = torch.from_numpy(np.bincount(train["item"].to_numpy(), minlength=3706))
    ids = torch.from_numpy(np.concatenate([targets[:, None], drawn], axis=1)).long()
    # Half a count more for all but the target: it loses every tie.
    scores = popularity[ids] + torch.tensor([0.0] + [0.5] * 99)
    lost = Candidates(ids).hits(gains_among(scores, ids, 10))
    assert ranking_metrics(lost) == pytest.approx(
        {"hr@10": 0.4531, "ndcg@10": 0.2541}, abs=1e-4
    )
    shared = popularity_hits(popularity, Candidates(ids), k=10)
    assert ranking_metrics(shared) == pytest.approx(
        {"hr@10": 0.4535, "ndcg@10": 0.2543}, abs=1e-3
    )
