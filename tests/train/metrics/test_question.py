"""Ranking the catalogue or candidates: by hand, and on any number of ranks like a plain loop in one process."""

import dataclasses
from functools import partial
from typing import Any

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
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train import metrics
from torchrec_ext.train.metrics import (
    Question,
    hits_by,
    own_share,
)
from torchx_apps.recipes import TwoTowerConfig, build_two_tower


@pytest.mark.unit
def test_targets_that_no_list_shows_count_as_missed() -> None:
    """An item without a row, one that is never ranked, one that was seen; and one that is found."""
    question = Question(
        targets=torch.tensor([-1, 0, 2, 3]),
        target_rows=torch.tensor([0, 0, 0, 0]),
        seen_rows=torch.tensor([0]),
        seen_items=torch.tensor([2]),
    )
    gains = question.gains(torch.tensor([[9.0, 1.0, 5.0, 4.0]]), 0, 4)
    assert gains.tolist() == [[1, 0, 0, 0]]
    assert question.hits(gains).relevant.tolist() == [4]
    assert question.hits(gains).ideal.tolist() == [[1, 1, 1, 1]]
    assert question.new.tolist() == [True, True, False, False]
    # Of 32 bits the numbers of so many pairs would overflow.
    rows = torch.arange(100_000).int()
    assert Question(targets=rows, seen_rows=rows, seen_items=rows).repeats.all()


@pytest.mark.unit
@given(data=st.data())
def test_any_targets_and_any_block_like_a_plain_loop(data: st.DataObject) -> None:
    rows, items = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 7))
    scores = torch.stack(
        [torch.tensor(data.draw(st.permutations(range(items)))) for _ in range(rows)]
    ).float()
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
    )
    block = data.draw(st.integers(1, rows))
    k = data.draw(st.integers(1, items + 1))
    found = []
    for start in range(0, rows, block):
        part = scores[start : start + block]
        found += question.gains(part, start, k).tolist()
    for row, targets in enumerate(own):
        shown = [item for item in range(1, items) if item not in seen[row]]
        shown.sort(key=lambda item: -float(scores[row, item]))
        expected = [float(item in targets) for item in shown[:k]]
        assert found[row] == expected + [0.0] * (k - len(expected))
    assert scores.isfinite().all()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seen_items": [1, 2]}, "seen_rows: 0 for 2 rows; must be equally many"),
        ({"targets": [1, -2, 3]}, "targets: -2; must be -1 or more"),
        ({"grades": [1.0, 0.0, 2.0]}, "grades: 0.0; must be above 0"),
        ({"target_rows": [0, 0, 2]}, "target_rows: 2 at 2; must ascend from 0 without"),
        (
            {"targets": [0, 6, 0], "target_rows": [0, 0, 0]},
            r"targets: 1 of 3 pairs \(query, item\) repeat",
        ),
        (
            {"targets": [-1], "candidates": [[1]]},
            "targets: -1; must be 0 or more: leave padding out",
        ),
    ],
)
def test_wrong_questions_are_named(options: dict[str, Any], message: str) -> None:
    tensors = {name: torch.tensor(values) for name, values in options.items()}
    with pytest.raises(ValueError, match=message):
        Question(**{"targets": torch.tensor([1, 2, 3]), **tensors})


@pytest.mark.unit
def test_a_target_outside_of_the_catalogue_is_named() -> None:
    with pytest.raises(ValueError, match="item 3, but the catalogue has 3 items"):
        Question(targets=torch.tensor([1, 2, 3])).gains(torch.zeros(3, 3), 0, 2)


@pytest.mark.unit
def test_gains_among_candidates_by_hand(device: torch.device) -> None:
    """An id that repeats counts once, at its first place; padding not at all."""
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 1, 2], [5, 6, -1, -1], [0, 7, 8, 7]])
    scores = torch.tensor(
        [
            [1.0, 2.0, 1.5, 0.0],
            [3.0, 9.0, 9.5, 9.0],
            [2.0, 1.0, 2.5, 9.0],
            [0.5, 0.6, 0.4, 0.7],
        ],
        device=device,
    )
    question = Question(targets=ids[:, 0], candidates=ids[:, 1:])
    gains = question.gains(scores, 0, 3)
    assert gains.tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 1, 0]]
    hits = question.hits(gains.cpu())
    assert hits.ideal.tolist() == [[1, 0, 0]] * 4
    assert hits.relevant.tolist() == [1] * 4


@pytest.mark.unit
def test_a_score_that_is_no_number_is_not_counted_as_worse() -> None:
    question = Question(targets=torch.tensor([1, 2]))
    scores = torch.zeros(2, 4)
    scores[1, 3] = torch.nan
    with pytest.raises(
        ValueError, match=r"scores: nan of query 8 for item 3.*has training diverged"
    ):
        dataclasses.replace(question, targets=torch.arange(9) % 3).gains(scores, 7, 2)
    with pytest.raises(ValueError, match=r"scores: inf of query 0 for item 1"):
        question.gains(torch.full((2, 4), torch.inf), 0, 2)
    scores = torch.tensor(
        [[0.0, 1.0, torch.inf, -torch.inf], [0.0, torch.inf, 1.0, -torch.inf]]
    )
    # Other items may have infinite scores.
    assert question.gains(scores, 0, 2).tolist() == [[0, 1], [0, 1]]


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
    parallel, _ = hybrid_parallel(
        model, runtime, plan=PlanConfig(sharding=sharding), seed=1
    )
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
    question, rank = asked(data), partial(metrics.model_hits, parallel.module, runtime)
    hits = rank(users, items, question, k=len(ids))
    some = rank(users, items, among(question), k=len(ids))
    if runtime.world_size == 1:
        with pytest.raises(
            ValueError, match=r"queries: \d+ rows on rank 0, must be 41 of"
        ):
            rank(users[:-1], items, question)
    return {
        "gains": hits.gains,
        "scores": scores,
        "among": some.gains,
    }


def among(question: Question) -> Question:
    """Each target among nine drawn candidates, some of them padding."""
    draw = torch.Generator().manual_seed(0)
    candidates = torch.randint(-1, 53, (len(question.targets), 9), generator=draw)
    return Question(targets=question.targets, candidates=candidates)


MODELS = [("top_nn", "auto"), ("dot", "row_wise")]


def all_ranked(runtime: Runtime) -> list[dict[str, Any]]:
    return [ranked(runtime, *model) for model in MODELS]


# Row-wise tables refuse a look-up of nothing, which rows that do not divide by ranks
# and blocks would ask for.
def test_any_number_of_ranks_ranks_like_a_plain_loop() -> None:
    question = asked(small())
    expected: list[dict[str, Any]] = []
    for world_size in (1, 2, 3):
        for outcomes in run_ranks(all_ranked, world_size):
            expected = expected or outcomes
            for own, first in zip(outcomes, expected, strict=True):
                assert torch.equal(own["gains"], first["gains"])
                assert torch.equal(own["among"], first["among"])
    for model in expected:
        for asked_of, gains in (
            (question, model["gains"]),
            (among(question), model["among"]),
        ):
            places = check_places(gains, model["scores"], asked_of)
            assert len(places.unique()) > 5, "not all alike"


def check_places(gains: Tensor, scores: Tensor, question: Question) -> Tensor:
    """Each target's place is that of a plain ranking, but for candidates closer than a sum in another order."""
    bounds = []
    for margin in (1e-6, -1e-6):
        shifted = scores.clone()
        shifted[torch.arange(len(scores)), question.targets] += margin
        plain = hits_by(
            lambda block, shifted=shifted: shifted[block].clone(),
            question,
            scores.shape[1],
            k=gains.shape[1],
        )
        bounds.append(place_of(plain.gains))
    best, worst = bounds
    places = place_of(gains)
    assert bool(((best <= places) & (places <= worst)).all())
    assert float((best == worst).double().mean()) > 0.9
    return places


def place_of(gains: Tensor) -> Tensor:
    """The place of each target from 0, and K of a missed one."""
    return torch.where(gains.any(1), gains.argmax(1), gains.shape[1])
