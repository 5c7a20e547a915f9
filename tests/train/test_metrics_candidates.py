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
from torchrec_ext.train.metrics import Ranks, candidate_ranks, gather_ranks, own_share, ranking_metrics, ranks_among

QUERIES, ITEMS, NEGATIVES = 21, 30, 9


@pytest.mark.unit
def test_ranks_by_hand(device: torch.device) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 1, 2], [5, 6, -1, -1], [0, 7, 8, 7]], device=device)
    scores = torch.tensor([[1.0, 2.0, 1.0, 0.0], [3.0, 9.0, 3.0, 9.0], [2.0, 2.0, 2.0, 9.0], [0.5, 0.6, 0.4, 0.7]], device=device)
    better, ties, queries = ranks_among(scores, ids)
    assert better.tolist() == [1, 1, 0, 1], "an id that repeats counts once, an absent one not at all"
    assert ties.tolist() == [1, 0, 1, 0], "the target does not tie with itself"
    assert queries is None


@pytest.mark.unit
def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"scores: shape \(4,\), ids: \(1, 4\).*\.view\(-1, 1 \+ N\)"):
        ranks_among(torch.zeros(4), torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"ids: torch.float32, must be int64"):
        ranks_among(torch.zeros(1, 4), torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"row 1: target -1 with score 0.0; the first id of a row must be an item"):
        ranks_among(torch.zeros(2, 2), torch.tensor([[0, 1], [-1, 1]]))
    with pytest.raises(ValueError, match=r"row 0: target 3 with score nan.*diverged"):
        ranks_among(torch.tensor([[torch.nan, 0.0]]), torch.tensor([[3, 1]]))
    with pytest.raises(ValueError, match=r"row 0: item 1 with score nan"):
        ranks_among(torch.tensor([[0.0, torch.nan]]), torch.tensor([[3, 1]]))


class Product(nn.Module):
    def forward(self, outputs: list[Tensor]) -> Tensor:
        return (outputs[0] * outputs[1]).sum(1)

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        return query @ candidates.T


class Lookup:
    """A model whose batches are vectors already."""

    interaction = Product()

    def embed(self, tower: str, batch: TowerBatch) -> Tensor:
        return {"user": 1.0, "item": 2.0}[tower] * batch.dense


class Vectors:
    def __init__(self, dense: Tensor) -> None:
        self.dense = dense

    def to(self, device: torch.device) -> "Vectors":
        return self


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    users, items = torch.randn(QUERIES, 6, generator=generator), torch.randn(ITEMS, 6, generator=generator)
    return users, items, torch.randint(-1, ITEMS, (QUERIES, 1 + NEGATIVES), generator=generator).abs_()


def ranked(runtime: Runtime) -> tuple[list[int], list[int]]:
    users, items, ids = drawn()
    parts = [
        [(Vectors(rows[share.rows]), share.keep) for share in own_share(len(rows), runtime, block=4)] for rows in (users, items)
    ]
    better, ties, _ = candidate_ranks(Lookup(), runtime, *parts, ids)  # type: ignore[arg-type]
    return better.tolist(), ties.tolist()


def test_any_number_of_ranks_ranks_like_a_plain_loop() -> None:
    users, items, ids = drawn()
    expected = []
    for user, own in zip(users, ids.tolist(), strict=True):
        others = {other for other in own[1:] if other != own[0]}
        expected.append(sum(float(user @ items[other]) > float(user @ items[own[0]]) for other in others))
    assert len(set(expected)) > 4
    for world_size in (1, 2, 3):
        for better, ties in run_ranks(ranked, world_size):
            assert better == expected
            assert ties == [0] * QUERIES


def gathered(runtime: Runtime) -> list[list[int]]:
    own = [torch.arange(5), torch.arange(0)][runtime.rank]
    return [part.tolist() for part in gather_ranks(Ranks(own, own + 1), runtime)[:2]]


def test_a_rank_without_queries_gets_those_of_the_others() -> None:
    assert run_ranks(gathered, 2) == [[[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]] * 2


def test_popularity_on_the_split_of_the_ncf_paper() -> None:
    """Published: .4531 and .2542. The paper's evaluator lists the target last, so it loses every tie."""
    folder = Path(os.environ.get("TORCHREC_EXT_DATA") or "") / "ml-1m-ncf"
    if not os.environ.get("TORCHREC_EXT_DATA") or not (folder / "test_negatives.parquet").exists():
        pytest.skip("needs the split of MovieLens 1M: set TORCHREC_EXT_DATA to a folder with ml-1m-ncf/test_negatives.parquet")
    train, test, negatives = (pq.read_table(folder / f"{name}.parquet") for name in ("train", "test", "test_negatives"))
    targets = test["item"].to_numpy()
    drawn = negatives["negative"].to_numpy().reshape(len(targets), 99)
    assert (negatives["user"].to_numpy().reshape(len(targets), 99) == test["user"].to_numpy()[:, None]).all()
    assert (drawn == targets[:, None]).any(1).sum() == 156, "test items among their own negatives"
    popularity = torch.from_numpy(np.bincount(train["item"].to_numpy(), minlength=3706))
    ids = torch.from_numpy(np.concatenate([targets[:, None], drawn], axis=1)).long()
    ranks = ranks_among(popularity[ids], ids)
    lost, shared, won = (ranking_metrics(r) for r in (ranks.ties_lost(), ranks, Ranks(ranks.better, torch.zeros_like(ranks.ties))))
    assert lost == pytest.approx({"hr@10": 0.4531, "ndcg@10": 0.2541}, abs=1e-4)
    assert shared == pytest.approx({"hr@10": 0.45348, "ndcg@10": 0.25427}, abs=1e-5)
    assert all(lost[name] < shared[name] < won[name] for name in shared)
