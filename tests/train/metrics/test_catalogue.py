"""Ranking the catalogue: hand-computed cases, and on any number of ranks what a plain loop in one process finds."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.contracts import run_ranks
from tests.small_sets import planted_data
from torchrec_ext.data.loader.sides import BatchBuilder
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train import metrics
from torchrec_ext.train.config import Figure
from torchrec_ext.train.metrics import (
    Coverage,
    Question,
    TargetRanks,
    own_share,
    popularity_ranks,
    ranking_metrics,
    ranks_of,
)
from torchrec_ext.train.metrics.catalogue import BEHIND
from torchx_apps.recipes import TwoTowerConfig, build_two_tower

NOTHING = torch.zeros(0, dtype=torch.int64)


@pytest.mark.unit
def test_ranks_by_hand() -> None:
    scores = torch.tensor(
        [
            [9.0, 1.0, 2.0, 3.0, 3.0],
            [9.0, 1.0, 1.0, 1.0, 8.0],
            [9.0, 5.0, 4.0, 3.0, 2.0],
        ]
    )
    # The first leaves out item 4, which ties with its target. The last has its target
    # among what it has seen: no server that leaves out seen items returns it.
    question = Question(
        targets=torch.tensor([3, 2, 2]),
        seen_rows=torch.tensor([0, 2, 2]),
        seen_items=torch.tensor([4, 2, 1]),
    )
    better, ties, queries = ranks_of(scores, question)
    assert queries is None
    assert better.tolist() == [0, 1, BEHIND], "item 0 is unknown and never ranked"
    assert ties.tolist() == [0, 2, 0]
    assert question.repeats.tolist() == [False, False, True]


def several() -> Question:
    """Three targets of query 0, one of query 1; query 0 has seen its own item 2, query 1 item 4."""
    return Question(
        targets=torch.tensor([1, 2, 4, 1]),
        target_rows=torch.tensor([0, 0, 0, 1]),
        seen_rows=torch.tensor([1, 0]),
        seen_items=torch.tensor([4, 2]),
    )


@pytest.mark.unit
def test_several_targets_are_candidates_of_each_other(device: torch.device) -> None:
    scores = torch.tensor(
        [[9.0, 3.0, 5.0, 4.0, 3.0], [9.0, 1.0, 1.0, 0.0, 8.0]], device=device
    )
    better, ties, queries = ranks_of(scores.clone(), several())
    # The second target is one that its query has seen: missed, and no rival of others.
    assert better.tolist() == [1, BEHIND, 1, 0]
    assert ties.tolist() == [1, 0, 1, 1]
    assert queries is not None
    assert queries.tolist() == [0, 0, 0, 1]
    assert several().queries == 2
    better, ties, queries = ranks_of(scores[1:].clone(), several(), start=1)
    assert (better.tolist(), ties.tolist(), queries.tolist()) == ([0], [1], [1])


@pytest.mark.unit
@given(data=st.data())
def test_any_targets_and_any_block_like_a_plain_loop(data: st.DataObject) -> None:
    rows, items = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 7))
    scores = torch.tensor(
        data.draw(
            st.lists(st.integers(0, 3), min_size=rows * items, max_size=rows * items)
        )
    ).view(rows, items)
    own = [
        data.draw(st.sets(st.integers(0, items - 1), min_size=1)) for _ in range(rows)
    ]
    seen = [data.draw(st.sets(st.integers(0, items - 1))) for _ in range(rows)]
    question = Question(
        targets=torch.tensor([item for targets in own for item in sorted(targets)]),
        target_rows=torch.tensor(
            [row for row, targets in enumerate(own) for _ in targets]
        ),
        seen_rows=torch.tensor(
            [row for row, hidden in enumerate(seen) for _ in hidden], dtype=torch.int64
        ).flip(0),
        seen_items=torch.tensor(
            [item for hidden in seen for item in hidden], dtype=torch.int64
        ).flip(0),
        not_items=(0,),
    )
    block = data.draw(st.integers(1, rows))
    found = []
    for start in range(0, rows, block):
        better, ties, _ = ranks_of(
            scores[start : start + block].float(), question, start
        )
        found += list(zip(better.tolist(), ties.tolist(), strict=True))
    expected = []
    for row, targets in enumerate(own):
        left = [
            item
            for item in range(items)
            if item not in seen[row] and (item in targets or item != 0)
        ]
        for target in sorted(targets):
            if target in seen[row]:
                expected.append((BEHIND, 0))
                continue
            others = [
                int(scores[row, item] - scores[row, target])
                for item in left
                if item != target
            ]
            expected.append((sum(gap > 0 for gap in others), others.count(0)))
    assert found == expected
    # To a depth, all figures up to it are those of the exact ranks.
    depth = data.draw(st.integers(1, items))
    exact = TargetRanks(
        *(torch.tensor(values) for values in zip(*expected, strict=True)),
        question.target_rows,
    )
    names: list[Figure] = ["hr", "recall", "precision", "ndcg", "mrr", "map"]
    near = ranks_of(scores.float(), question, depth=depth)
    assert ranking_metrics(near, depth, names) == pytest.approx(
        ranking_metrics(exact, depth, names)
    )


@pytest.mark.unit
@pytest.mark.parametrize("depth", [1, 3, 10])
@pytest.mark.parametrize("digits", [0, 6], ids=["many ties", "hardly any"])
def test_to_a_depth_a_large_catalogue_has_the_exact_ranks_and_beyond_it_none(
    depth: int, digits: int
) -> None:
    torch.manual_seed(depth)
    rows, items, each = 40, 503, 20
    scores = torch.randn(rows, items).round(decimals=digits)
    targets = torch.stack(
        [torch.randperm(items)[:each].sort().values for _ in range(rows)]
    )
    question = Question(
        targets=targets.flatten(),
        target_rows=torch.arange(rows).repeat_interleave(each),
        seen_rows=torch.arange(rows).repeat_interleave(items // 2),
        seen_items=torch.rand(rows, items).argsort(1)[:, : items // 2].flatten(),
    )
    exact, near = (
        ranks_of(scores.clone(), question, depth=given) for given in (None, depth)
    )
    among = exact.better < depth
    assert 0 < among.sum() < len(among)
    assert torch.equal(near.better, exact.better.clamp(max=depth))
    assert torch.equal(near.ties[among], exact.ties[among])


@pytest.mark.unit
@given(data=st.data())
def test_the_popularity_ranking_is_that_of_the_same_scores_for_all_queries(
    data: st.DataObject,
) -> None:
    rows, items = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 7))
    popularity = torch.tensor(
        data.draw(st.lists(st.integers(0, 3), min_size=items, max_size=items))
    )
    several_each = data.draw(st.booleans())
    own = [
        data.draw(st.sets(st.integers(0, items - 1), min_size=1)) for _ in range(rows)
    ]
    own = own if several_each else [{min(targets)} for targets in own]
    seen = data.draw(
        st.lists(
            st.tuples(st.integers(0, rows - 1), st.integers(0, items - 1)), max_size=12
        )
    )
    question = Question(
        targets=torch.tensor([item for targets in own for item in sorted(targets)]),
        target_rows=torch.tensor(
            [row for row, targets in enumerate(own) for _ in targets]
        )
        if several_each
        else None,
        seen_rows=torch.tensor([row for row, _ in seen], dtype=torch.int64),
        seen_items=torch.tensor([item for _, item in seen], dtype=torch.int64),
        not_items=tuple(data.draw(st.sets(st.integers(0, items - 1)))),
    )
    ranks = popularity_ranks(popularity, question)
    expected = ranks_of(popularity.float().repeat(rows, 1), question)
    assert (ranks.better.tolist(), ranks.ties.tolist()) == (
        expected.better.tolist(),
        expected.ties.tolist(),
    )
    assert ranks.queries is question.target_rows


@pytest.mark.unit
def test_counts_beyond_what_a_float_can_count() -> None:
    scores = torch.ones(1, 2**24 + 3)
    scores[0, 1] = 0
    better, ties, _ = ranks_of(
        scores,
        Question(targets=torch.tensor([1]), seen_rows=NOTHING, seen_items=NOTHING),
    )
    assert (int(better), int(ties)) == (2**24 + 1, 0)


@pytest.mark.unit
def test_wrong_questions_are_named() -> None:
    def ask(**options: Any) -> Question:
        return Question(
            **{
                "targets": torch.tensor([1, 2, 3]),
                "seen_rows": NOTHING,
                "seen_items": NOTHING,
            }
            | options
        )

    with pytest.raises(ValueError, match=r"seen_rows: 0, seen_items: 2; must be pairs"):
        ask(seen_items=torch.tensor([1, 2]))
    with pytest.raises(
        ValueError, match=r"targets: -1; must be 0 or more: leave padding out"
    ):
        ask(targets=torch.tensor([1, -1, 3]))
    with pytest.raises(ValueError, match=r"target_rows: 2, targets: 3"):
        ask(target_rows=torch.tensor([0, 1]))
    with pytest.raises(
        ValueError, match=r"target_rows: 2 after 0; must ascend from 0 without a gap"
    ):
        ask(target_rows=torch.tensor([0, 0, 2]))
    with pytest.raises(
        ValueError, match=r"target_rows: 1 after the start; must ascend from 0"
    ):
        ask(target_rows=torch.tensor([1, 1, 2]))
    with pytest.raises(ValueError, match=r"target_rows: 0 after 1; must ascend"):
        ask(target_rows=torch.tensor([0, 1, 0]))
    with pytest.raises(
        ValueError, match=r"targets: 1 of 3 pairs \(query, item\) repeat"
    ):
        ask(targets=torch.tensor([5, 6, 5]), target_rows=torch.tensor([0, 0, 0]))
    with pytest.raises(
        ValueError, match=r"targets: item 3, but the catalogue has 3 items"
    ):
        ranks_of(torch.zeros(3, 3), ask())


@pytest.mark.unit
def test_a_score_that_is_no_number_is_not_counted_as_worse() -> None:
    question = Question(
        targets=torch.tensor([1, 2]), seen_rows=NOTHING, seen_items=NOTHING
    )
    scores = torch.zeros(2, 4)
    scores[1, 3] = torch.nan
    with pytest.raises(
        ValueError,
        match=r"the score of query 8 for item 3 is NaN.*has training diverged",
    ):
        ranks_of(
            scores, dataclasses.replace(question, targets=torch.arange(9) % 3), start=7
        )
    with pytest.raises(ValueError, match=r"a target's is infinite"):
        ranks_of(torch.full((2, 4), torch.inf), question)
    scores = torch.tensor(
        [[0.0, 1.0, torch.inf, -torch.inf], [0.0, torch.inf, 1.0, -torch.inf]]
    )
    assert ranks_of(scores, question).better.tolist() == [1, 1], (
        "other items may have infinite scores"
    )


@pytest.mark.unit
def test_the_popularity_ranking_by_hand() -> None:
    popularity = torch.tensor([0, 5, 3, 3, 1])
    # The most popular item first; then second and third in a tie once item 1 has been
    # seen; then the last of all.
    question = Question(
        targets=torch.tensor([1, 2, 4]),
        seen_rows=torch.tensor([1]),
        seen_items=torch.tensor([1]),
    )
    found = ranking_metrics(popularity_ranks(popularity, question), 2)
    assert found["hr@2"] == pytest.approx((1 + 1 + 0) / 3)
    assert found["ndcg@2"] == pytest.approx((1 + (1 + 1 / math.log2(3)) / 2 + 0) / 3)


@pytest.mark.unit
@given(
    total=st.integers(1, 300), world_size=st.integers(1, 9), block=st.integers(1, 70)
)
def test_the_shares_of_the_ranks_hold_every_row_once_and_in_order(
    total: int, world_size: int, block: int
) -> None:
    shares = [
        own_share(total, Runtime(rank=rank, world_size=world_size), block)
        for rank in range(world_size)
    ]
    kept = [
        row
        for share in shares
        for rows, keep in share
        for row in list(range(total))[rows][:keep]
    ]
    assert kept == list(range(total))
    assert len({len(share) for share in shares}) == 1, (
        "a look-up is collective, so every rank makes as many"
    )
    assert all(
        1 <= len(range(total)[rows]) <= block for share in shares for rows, _ in share
    ), "never a look-up of nothing"


def small() -> Prepared:
    return planted_data(users=41, items=53, clusters=4, history_length=5)


def asked(data: Prepared) -> Question:
    seen = data.seen(data.rows("test")["user_id"].values, "train", "validation")
    return Question(
        targets=torch.from_numpy(data.rows("test")["item_id"].values),
        seen_rows=torch.arange(len(seen)).repeat_interleave(
            torch.from_numpy(seen.lengths)
        ),
        seen_items=torch.from_numpy(seen.values),
    )


def ranked(runtime: Runtime, interaction: str, sharding: str) -> dict[str, Any]:
    data = small()
    torch.manual_seed(0)
    model = build_two_tower(
        TwoTowerConfig(interaction=interaction, tower_widths=(16,)), data
    )  # type: ignore[arg-type]
    builder = BatchBuilder(model.schema(), data.items)
    plan = plan_sharding(model, runtime, PlanConfig(sharding=sharding))  # type: ignore[arg-type]
    parallel, _ = hybrid_parallel(model, runtime, plan=plan, seed=1)
    parallel.eval()
    block = 8
    rows_of = data.rows("test").slice
    users = [
        (builder.user_batch(rows_of(rows.start, rows.stop)), keep)
        for rows, keep in own_share(data.rows("test").num_rows, runtime, block)
    ]
    ids = data.items["item_id"].values
    items = [
        (builder.item_batch(ids[rows]), keep)
        for rows, keep in own_share(len(ids), runtime, block)
    ]
    queries = metrics.embed_all(parallel.module, "user", users, runtime)
    candidates = metrics.embed_all(parallel.module, "item", items, runtime)
    # The interaction as training runs it, one pair at a time, not as ranking does.
    pairs = [
        queries.repeat_interleave(len(candidates), 0),
        candidates.repeat(len(queries), 1),
    ]
    with torch.no_grad():
        scores = parallel.module.interaction(pairs).view(len(queries), -1)
    coverage = Coverage(len(ids), k=3)
    ranks = metrics.catalogue_ranks(
        parallel.module, runtime, users, items, asked(data), coverage=coverage
    )
    return {
        "ranks": (ranks.better, ranks.ties),
        "scores": scores,
        "coverage": coverage.compute(runtime),
    }


def places(scores: Tensor, question: Question, margin: float) -> list[int]:
    """How many candidates beat each target by more than ``margin``, one plain loop over everything."""
    found = []
    for query, target in enumerate(question.targets.tolist()):
        out = {0, target, *question.seen_items[question.seen_rows == query].tolist()}
        others = [
            float(score) for item, score in enumerate(scores[query]) if item not in out
        ]
        found.append(
            sum(score > float(scores[query, target]) + margin for score in others)
        )
    return found


def shown(scores: Tensor, question: Question, k: int) -> set[int]:
    """The items in anyone's list of the k best."""
    found = set()
    for query, row in enumerate(scores):
        out = {0, *question.seen_items[question.seen_rows == query].tolist()}
        found.update(
            [item for item in row.argsort(descending=True).tolist() if item not in out][
                :k
            ]
        )
    return found


# Row-wise tables refuse a look-up of nothing, which rows that do not divide by ranks
# and blocks would ask for.
@pytest.mark.parametrize(
    ("interaction", "sharding"), [("top_nn", "auto"), ("dot", "row_wise")]
)
def test_any_number_of_ranks_ranks_like_a_plain_loop(
    interaction: str, sharding: str
) -> None:
    question = asked(small())
    for world_size in (1, 2, 3):
        outcomes = run_ranks(ranked, world_size, interaction, sharding)
        covered = {"coverage@3": len(shown(outcomes[0]["scores"], question, 3)) / 53}
        better, ties = outcomes[0]["ranks"]
        assert all(
            torch.equal(other, mine)
            for o in outcomes
            for other, mine in zip(o["ranks"], (better, ties), strict=True)
        )
        # Candidates closer than this may change places, since sums are taken in another
        # order.
        most, least = (
            torch.tensor(places(outcomes[0]["scores"], question, margin))
            for margin in (-1e-6, 1e-6)
        )
        assert bool(((least <= better) & (better + ties <= most)).all())
        assert float((least == most).double().mean()) > 0.9
        assert len(better.unique()) > 10, "not all alike"
        assert all(outcome["coverage"] == covered for outcome in outcomes)


def test_the_figures_of_recbole_on_its_own_split() -> None:
    """Ranks MovieLens 100K in full, many relevant items per user: EASE (Steck 2019) with L2 of 300, and popularity."""
    path = (
        Path(os.environ.get("TORCHREC_EXT_DATA") or "")
        / "ml-100k"
        / "recbole_split.parquet"
    )
    if not os.environ.get("TORCHREC_EXT_DATA") or not path.exists():
        pytest.skip(
            "needs RecBole's split: set TORCHREC_EXT_DATA to a folder with ml-100k/recbole_split.parquet"
        )
    table = pq.read_table(path)
    user, item, part = (
        table[name].to_numpy().copy() for name in ("user_id", "item_id", "split")
    )
    users, rows = np.unique(user[part == "test"], return_inverse=True)
    order = np.argsort(rows, kind="stable")
    seen = (part != "test") & np.isin(user, users)
    question = Question(
        targets=torch.from_numpy(item[part == "test"][order]),
        target_rows=torch.from_numpy(rows[order]),
        seen_rows=torch.from_numpy(users.searchsorted(user[seen])),
        seen_items=torch.from_numpy(item[seen]),
    )
    taken = torch.zeros(user.max() + 1, item.max() + 1, dtype=torch.float64)
    taken[user[part == "train"], item[part == "train"]] = 1
    inverse = torch.linalg.inv(
        taken.T @ taken + 300 * torch.eye(taken.shape[1], dtype=torch.float64)
    )
    weights = -inverse / inverse.diagonal()
    weights.fill_diagonal_(0)
    ease = ranking_metrics(
        ranks_of((taken @ weights)[users], question), 10, ("recall", "ndcg")
    )
    assert ease == pytest.approx({"recall@10": 0.2808, "ndcg@10": 0.3309}, abs=5e-5)
    popular = ranking_metrics(
        popularity_ranks(taken.sum(0), question), 10, ("recall", "ndcg")
    )
    assert popular == pytest.approx(
        {"recall@10": 0.1274, "ndcg@10": 0.1416}, abs=5e-4
    ), "counts tie, and RecBole favours some"
