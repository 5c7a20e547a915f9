"""EASE beside a model: ranked by its rules, and left out with a reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.settings import with_settings
from tests.small_sets import checkerboard, with_candidates
from torchrec_ext.data.columns import Column
from torchrec_ext.data.config import Roles
from torchrec_ext.data.planted import planted
from torchrec_ext.data.prepare import Evaluation, RawSet, write_set
from torchrec_ext.data.sets import open_set
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models import closed_form
from torchx_apps import recipes
from torchx_apps.jobs.setup import build_model
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.tasks.baselines import ClosedForms


def evaluator_of(recipe: str, *overrides: str) -> Any:
    job = with_settings(load_recipe(recipe), list(overrides))
    task: Any = job.task(job.data).with_evaluation(job.evaluation)
    model: Any = build_model(job, task)
    return task, task.evaluator(
        model.schema(), type("Wrapped", (), {"module": model})(), Runtime()
    )


def test_an_item_taken_before_is_missed_by_model_and_baselines_alike(
    tmp_path: Path,
) -> None:
    """Half of the users take an earlier item again: nobody can be right about these by what is left out."""
    (tmp_path / "plays").mkdir()
    rng = np.random.default_rng(0)
    rows = []
    for user in range(40):
        own = rng.permutation(20)[:8].tolist()
        rows += [(user, item, place) for place, item in enumerate(own[:7])]
        rows.append((user, own[0] if user % 2 else own[7], 7))
    columns = zip(*rows, strict=True)
    names = ("user_id", "item_id", "timestamp")
    table = pa.table(dict(zip(names, map(list, columns), strict=True)))
    pq.write_table(table, tmp_path / "plays" / "inter.parquet")
    settings = ["data.name=plays", f"data.folder={tmp_path}"]
    task, evaluator = evaluator_of(
        "session",
        *settings,
        "evaluation.metrics=hr@10000",
        "train.early_stop.metric=",
    )
    beside = evaluator.beside("test")
    assert beside.repeats == 20
    assert set(beside.figures) == {"ease"}
    # Of 10,000 places each ranked item has one, so hr is the share of ranked items.
    model = figures_of_planned(
        task,
        evaluator.model.module,
        torch.rand(40, task.data.vocab["item_id"]),
        "test",
    )
    for figures in (model, evaluator.baseline("test"), *beside.figures.values()):
        assert figures["hr@10000"] == 0.5


def test_a_user_with_new_items_and_one_held_out_twice_is_one_query(
    tmp_path: Path,
) -> None:
    """RecBole's protocol, by user; the held-out rows of user 1 are item 2, twice, and items 8 and 9, both new."""
    raw = RawSet(
        name="plays",
        splits={
            "train": raw_columns([1, 1, 2, 2], [1, 3, 1, 2]),
            "test": raw_columns([1, 2, 1, 1, 1], [8, 3, 2, 9, 2]),
        },
        roles=Roles(user="user_id", item="item_id"),
        evaluation=Evaluation(at=(9,), figures=("recall",), by="user"),
    )
    write_set(tmp_path / "plays", raw)
    settings = [f"data.name={tmp_path / 'plays'}", "train.early_stop.metric="]
    task, evaluator = evaluator_of("two_tower", *settings)
    question = evaluator.question("test")
    assert question.question.rows.tolist() == [0, 0, 0, 1]
    assert "of 4 held-out items 0 were taken before and 2 have no" in question.rule
    # User 1 finds one of three, and user 2 the one.
    module, scores = evaluator.model.module, torch.rand(2, 4)
    model = figures_of_planned(task, module, scores, "test")
    for figures in (evaluator.baseline("test"), model):
        assert figures["recall@9"] == pytest.approx((1 / 3 + 1) / 2)


def test_popularity_counts_the_rows_of_users_that_no_test_row_asks_for(
    tmp_path: Path,
) -> None:
    """Cold start: all 20 asked users are new, so that what is popular is known from 200 others alone."""
    rng, shares = np.random.default_rng(0), 1 / np.arange(1, 101)
    shares /= shares.sum()

    def drawn(users: range, each: int) -> dict[str, pa.Array]:
        items = [rng.choice(100, each, replace=False, p=shares) for _ in users]
        return raw_columns(
            np.repeat(users, each).tolist(), np.concatenate(items).tolist()
        )

    train, test = drawn(range(200), 10), drawn(range(1000, 1020), 3)
    raw = RawSet(
        name="plays",
        splits={"train": train, "test": test},
        roles=Roles(user="user_id", item="item_id"),
        evaluation=Evaluation(at=(10,), figures=("recall",), by="user"),
    )
    write_set(tmp_path / "plays", raw)
    settings = [f"data.name={tmp_path / 'plays'}", "train.early_stop.metric="]
    _, evaluator = evaluator_of("two_tower", *settings)
    counts = np.bincount(train["item_id"].to_numpy(), minlength=100)
    # Of two items with one count the smaller id, which the vocabulary has first, is shown.
    shown = np.argsort(-counts, kind="stable")[:10]
    found = np.isin(test["item_id"].to_numpy(), shown).reshape(20, 3).mean()
    assert found > 0.3  # a random ranking has .1
    assert evaluator.baseline("test")["recall@10"] == pytest.approx(found)


def raw_columns(users: list[int], items: list[int]) -> dict[str, pa.Array]:
    return {"user_id": pa.array(users), "item_id": pa.array(items)}


def test_what_is_learned_on_a_checkerboard_is_known_to_both(tmp_path: Path) -> None:
    write_set(tmp_path / "board", checkerboard(64, 64))
    _, evaluator = evaluator_of("two_tower", f"data.name={tmp_path / 'board'}")
    assert evaluator.beside("test").figures["ease"]["hr@10"] == 1.0


class Planned(torch.nn.Module):
    """Scores query q and item i as ``scores[q, i]``, (Q, I), if batches come in order; 0 for rows with labels."""

    def __init__(self, model: Any, scores: torch.Tensor) -> None:
        super().__init__()
        self.interaction = self
        self.towers = getattr(model, "towers", None)
        self._rows = {"item": torch.eye(scores.shape[1]), "query": scores}
        self._starts = {"item": 0, "query": 0}
        self._first = ""  # of a query's towers

    def embed(self, tower: str, batch: Any) -> torch.Tensor:
        """Returns the next rows; nothing for a query's second tower."""
        kind = "item" if tower in ("item", "target") else "query"
        self._first = self._first or (tower if kind == "query" else "")
        if kind == "query" and tower != self._first:
            return torch.zeros(len(batch.labels), 0)
        start = self._starts[kind]
        self._starts[kind] += len(batch.labels)
        return self._rows[kind][start : start + len(batch.labels)]

    def score_all(self, query: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Returns the scores of every query with every item."""
        return query @ candidates.T

    def forward(self, rows: Any) -> Any:
        """Returns the scores of pairs, or constants for a batch with labels."""
        if isinstance(rows, list):
            return (rows[0] * rows[-1]).sum(1)
        constants = torch.zeros(len(rows.labels))
        return constants, SimpleNamespace(
            logits=constants, labels=rows.labels, weights=rows.weights
        )


def questions_of(task: Any) -> list[Any]:
    """Returns a task with each question that its kind of data can ask: whole catalogue, candidates, several targets."""
    data = task.data
    if data.form != "pairs":
        return [task]
    others = [data, open_set(with_candidates(planted(users=60, items=50), 5))]
    for rule in ({"keep_seen": True}, {"by": "user"}):
        evaluation = dataclasses.replace(data.evaluation, **rule)
        others.append(dataclasses.replace(data, evaluation=evaluation))
    return [dataclasses.replace(task, data=other) for other in others]


def figures_of_planned(
    task: Any, model: Any, scores: torch.Tensor, split: str
) -> dict[str, float]:
    planned = SimpleNamespace(module=Planned(model, scores), eval=lambda: None)
    evaluator = task.evaluator(model.schema(), planned, Runtime())
    figures = evaluator.test() if split == "test" else evaluator.validate()
    # These may be watched, by name, before there are any.
    assert split == "test" or sorted(figures) == sorted(evaluator.validated)
    return {name: value for name, value in figures.items() if "@" in name}


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_a_model_and_its_baselines_answer_one_question(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with the scores of a baseline has exactly its figures, whatever the recipe's evaluation asks."""
    small = ["data.name=planted"]
    job = with_settings(load_recipe(recipe), small)
    job = with_settings(job, ["data.users=60", "data.items=50", "data.ranked=90"])
    known: list[Column] = []
    fitted = ClosedForms.beside

    def beside(forms: ClosedForms, taken: Column, *others: Any) -> Any:
        known.append(taken)
        return fitted(forms, taken, *others)

    monkeypatch.setattr(ClosedForms, "beside", beside)
    for task in questions_of(job.task(job.data)):
        model: Any = build_model(job, task)
        evaluator = task.evaluator(
            model.schema(), SimpleNamespace(module=model), Runtime()
        )
        for split in ("validation", "test"):
            popular = {
                name: value
                for name, value in evaluator.baseline(split).items()
                if "@" in name
            }
            closed = evaluator.beside(split).figures
            assert sorted(closed) == (["ease"] if popular else [])
            for figures in closed.values():
                scores = task.closed_forms.scores(known[-1])
                assert figures_of_planned(task, model, scores, split) == figures
            if popular:
                each = torch.from_numpy(task.data.popularity).float()
                assert (
                    figures_of_planned(
                        task, model, each.repeat(len(known[-1]), 1), split
                    )
                    == popular
                )


def test_a_streamed_log_has_its_clicks_as_pairs() -> None:
    task, evaluator = evaluator_of("stream", "data.name=planted")
    users, items = task.closed_forms.pairs()
    clicked = set()
    for chunk in task.data.clicked("train", "user_id", "item_id"):
        pairs = zip(chunk["user_id"].values, chunk["item_id"].values, strict=True)
        clicked |= {(user, item) for user, item in pairs if user > 0 and item > 0}
    assert sorted(clicked) == list(zip(users, items, strict=True))
    beside = evaluator.beside("test")
    asked = evaluator.question("test")
    assert (asked is None) == (not beside.figures)
    if asked is not None:
        assert list(beside.figures["ease"]) == ["hr@10", "ndcg@10"]


@pytest.mark.unit
def test_a_users_scores_are_those_of_its_known_items_by_ease_of_the_pairs() -> None:
    users, items = np.random.default_rng(0).integers(1, (9, 6), (40, 2)).T
    taken = torch.zeros(9, 6)
    taken[users, items] = 1
    weights = closed_form.ease(*taken.nonzero().T, 6, l2=3.0)
    pairs = taken.numpy().nonzero()
    known = Column.from_lengths(np.array([2, 5, 1]), np.array([2, 0, 1]))
    scores = forms(pairs=lambda: pairs, num_items=6, l2=3.0).scores(known)
    expected = torch.stack([weights[[2, 5]].sum(0), torch.zeros(6), weights[1]])
    torch.testing.assert_close(scores, expected)


def forms(**changes: Any) -> ClosedForms:
    usual: dict[str, Any] = {
        "pairs": lambda: (np.zeros(0, np.int64), np.zeros(0, np.int64)),
        "num_pairs": 10**6,
        "num_users": 6_000,
        "num_items": 3_700,
    }
    return ClosedForms(**{**usual, **changes})


@pytest.mark.unit
def test_what_takes_long_is_left_out_with_its_seconds_unless_it_is_named() -> None:
    assert forms().left_out() == {}
    long = forms(num_items=12_000).left_out()
    assert list(long) == ["ease"]
    assert (
        "s for 6,000 users and 12,000 items; evaluation.baselines=popularity,ease ranks it"
        in long["ease"]
    )
    assert forms(num_items=12_000, names=("ease",)).left_out() == {}
    with pytest.raises(ValueError, match=r"leave it out: EASE of 10,000,000 items"):
        forms(num_items=10**7, names=("ease",))
    no_others = forms(names=("popularity",)).beside(
        Column.from_lengths(np.zeros(0, np.int64), np.zeros(1, int)), _, []
    )
    assert no_others[:2] == ({}, {})


def _(scores: torch.Tensor, start: int) -> Any:
    raise AssertionError("nothing is ranked")
