"""Ranking figures: hand-computed ones, and on any number of ranks those of a plain ranking in one process."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.contracts import run_ranks
from torchrec_ext.data.batches import BatchBuilder
from torchrec_ext.data.interactions import InteractionData
from torchrec_ext.data.synthetic import planted
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.planning import PlanConfig, plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train import metrics
from torchrec_ext.train.metrics import Question, Ranks, own_share, popularity_metrics, ranking_metrics, ranks_of
from torchx_apps.recipes import TwoTowerConfig, build_two_tower

NOTHING = torch.zeros(0, dtype=torch.int64)


def figures(better: int, ties: int, k: int = 10) -> tuple[float, float]:
    found = ranking_metrics(Ranks(torch.tensor([better]), torch.tensor([ties])), k)
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
def test_figures_of_one_query_by_hand(better: int, ties: int, k: int, hr: float, ndcg: float) -> None:
    assert figures(better, ties, k) == pytest.approx((hr, ndcg))


@pytest.mark.unit
@given(better=st.integers(0, 30), ties=st.integers(0, 30), k=st.integers(1, 12))
def test_a_tie_counts_as_the_mean_over_the_places_it_may_take(better: int, ties: int, k: int) -> None:
    places = [figures(better + others, 0, k) for others in range(ties + 1)]
    assert figures(better, ties, k) == pytest.approx(tuple(sum(values) / len(places) for values in zip(*places, strict=True)))


@pytest.mark.unit
def test_ranks_by_hand() -> None:
    scores = torch.tensor([[9.0, 1.0, 2.0, 3.0, 3.0], [9.0, 1.0, 1.0, 1.0, 8.0], [9.0, 5.0, 4.0, 3.0, 2.0]])
    # The first leaves out item 4, which ties with its target; the last has its target among what it has seen, which still counts.
    question = Question(targets=torch.tensor([3, 2, 2]), seen_rows=torch.tensor([0, 2, 2]), seen_items=torch.tensor([4, 2, 1]))
    better, ties = ranks_of(scores, question)
    assert better.tolist() == [0, 1, 0], "item 0 is unknown and never ranked"
    assert ties.tolist() == [0, 2, 0]


@pytest.mark.unit
@pytest.mark.parametrize("block", [1, 2, 1024])
def test_the_popularity_ranking_by_hand(block: int) -> None:
    popularity = torch.tensor([0, 5, 3, 3, 1])
    # The most popular item first; then second and third in a tie once item 1 has been seen; then the last of all.
    question = Question(targets=torch.tensor([1, 2, 4]), seen_rows=torch.tensor([1]), seen_items=torch.tensor([1]))
    found = popularity_metrics(popularity, question, 2, block)
    assert found["hr@2"] == pytest.approx((1 + 1 + 0) / 3)
    assert found["ndcg@2"] == pytest.approx((1 + (1 + 1 / math.log2(3)) / 2 + 0) / 3)


@pytest.mark.unit
@given(total=st.integers(1, 300), world_size=st.integers(1, 9), block=st.integers(1, 70))
def test_the_shares_of_the_ranks_hold_every_row_once_and_in_order(total: int, world_size: int, block: int) -> None:
    shares = [own_share(total, Runtime(rank=rank, world_size=world_size), block) for rank in range(world_size)]
    kept = [row for share in shares for rows, keep in share for row in list(range(total))[rows][:keep]]
    assert kept == list(range(total))
    assert len({len(share) for share in shares}) == 1, "a look-up is collective, so every rank makes as many"
    assert all(1 <= len(range(total)[rows]) <= block for share in shares for rows, _ in share), "never a look-up of nothing"


def small() -> InteractionData:
    return planted(users=41, items=53, clusters=4, history_length=5)


def asked(data: InteractionData) -> Question:
    seen = data.seen(data.test["user_id"].values, "train", "validation")
    return Question(
        targets=torch.from_numpy(data.test["item_id"].values),
        seen_rows=torch.arange(len(seen)).repeat_interleave(torch.from_numpy(seen.lengths)),
        seen_items=torch.from_numpy(seen.values),
    )


def ranked(runtime: Runtime, interaction: str, sharding: str) -> dict[str, Any]:
    data = small()
    torch.manual_seed(0)
    model = build_two_tower(TwoTowerConfig(interaction=interaction, tower_widths=(16,)), data)  # type: ignore[arg-type]
    builder = BatchBuilder(model.schema(), data.items)
    plan = plan_sharding(model, runtime, PlanConfig(sharding=sharding))  # type: ignore[arg-type]
    parallel, _ = hybrid_parallel(model, runtime, plan=plan, seed=1)
    parallel.eval()
    block = 8
    rows_of = data.test.slice
    users = [
        (builder.user_batch(rows_of(rows.start, rows.stop)), keep) for rows, keep in own_share(data.test.num_rows, runtime, block)
    ]
    ids = data.items["item_id"].values
    items = [(builder.item_batch(ids[rows]), keep) for rows, keep in own_share(len(ids), runtime, block)]
    queries = metrics.embed_all(parallel.module, "user", users, runtime)
    candidates = metrics.embed_all(parallel.module, "item", items, runtime)
    # The interaction as training runs it, one pair at a time, not as ranking does.
    pairs = [queries.repeat_interleave(len(candidates), 0), candidates.repeat(len(queries), 1)]
    with torch.no_grad():
        scores = parallel.module.interaction(pairs).view(len(queries), -1)
    ranks = metrics.catalogue_ranks(parallel.module, runtime, users, items, asked(data))
    return {"ranks": tuple(ranks), "scores": scores}


def places(scores: Tensor, question: Question, margin: float) -> list[int]:
    """How many candidates beat each target by more than ``margin``, one plain loop over everything."""
    found = []
    for query, target in enumerate(question.targets.tolist()):
        out = {0, target, *question.seen_items[question.seen_rows == query].tolist()}
        others = [float(score) for item, score in enumerate(scores[query]) if item not in out]
        found.append(sum(score > float(scores[query, target]) + margin for score in others))
    return found


# Row-wise tables refuse a look-up of nothing, which rows that do not divide by ranks and blocks would ask for.
@pytest.mark.parametrize(("interaction", "sharding"), [("top_nn", "auto"), ("dot", "row_wise")])
def test_any_number_of_ranks_ranks_like_a_plain_loop(interaction: str, sharding: str) -> None:
    question = asked(small())
    for world_size in (1, 2, 3):
        outcomes = run_ranks(ranked, world_size, interaction, sharding)
        better, ties = outcomes[0]["ranks"]
        assert all(torch.equal(other, mine) for o in outcomes for other, mine in zip(o["ranks"], (better, ties), strict=True))
        # Candidates closer than this may change places, since sums are taken in another order.
        most, least = (torch.tensor(places(outcomes[0]["scores"], question, margin)) for margin in (-1e-6, 1e-6))
        assert bool(((least <= better) & (better + ties <= most)).all())
        assert float((least == most).double().mean()) > 0.9
        assert len(better.unique()) > 10, "not all alike"


def area(runtime: Runtime, logits: Tensor, labels: Tensor, weights: Tensor) -> float:
    own = slice(*(len(logits) * part // runtime.world_size for part in (runtime.rank, runtime.rank + 1)))
    return metrics.auc(logits[own], labels[own], weights[own], runtime)


def test_auc_counts_pairs_of_all_ranks_and_no_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(20, (101,), generator=generator).float()
    labels = torch.randint(2, (101,), generator=generator).float()
    logits = logits + 20.0  # a float32 sigmoid makes a tie of all above 17
    weights = torch.randint(3, (101,), generator=generator).float()
    kept = weights > 0
    positive, negative = logits[kept & (labels == 1)][:, None], logits[kept & (labels == 0)]
    expected = float(((positive > negative).double() + (positive == negative).double() / 2).mean())
    for world_size in (1, 2):
        for found in run_ranks(area, world_size, logits, labels, weights):
            assert found == pytest.approx(expected, abs=1e-6)
