"""EASE and ALS beside a model: ranked by its rules, left out with a reason, and as tables that a run begins with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.contracts import leave_group, run_ranks
from torchrec_ext.data.columns import Column
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models import closed_form
from torchrec_ext.train.config import ClosedFormConfig, EvaluationConfig
from torchx_apps import recipes
from torchx_apps.config import with_settings
from torchx_apps.jobs import report
from torchx_apps.jobs.setup import build_model
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.tasks import baselines
from torchx_apps.tasks.baselines import ClosedForms

SMALL = (
    "data.name=planted",
    "data.users=60",
    "data.items=50",
    "closed_form.als_dim=4",
    "closed_form.ease_l2=20",
)


def evaluator_of(recipe: str, *overrides: str) -> Any:
    job = with_settings(load_recipe(recipe), list(overrides))
    task: Any = job.task(job.data, progress=False).with_evaluation(
        job.evaluation, job.closed_form
    )
    model: Any = build_model(job, task)
    return task, task.evaluator(
        model.schema(), type("Wrapped", (), {"module": model})(), Runtime()
    )


def by_hand(
    scores: torch.Tensor, target: int, taken: set[int], not_items: set[int]
) -> int:
    """The number of items that are better than the target; no two scores are the same."""
    if target in taken:
        return len(scores)
    left_out = (taken | not_items) - {target}
    return sum(
        float(score) > float(scores[target])
        for item, score in enumerate(scores)
        if item not in left_out
    )


@pytest.mark.parametrize("recipe", ["two_tower", "session"])
@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize("scores_at_a_time", [1, 2**21])
def test_closed_forms_rank_the_items_that_the_model_ranks(
    recipe: str, split: str, scores_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "_SCORES", scores_at_a_time)
    task, evaluator = evaluator_of(recipe, *SMALL)
    data = task.data
    if recipe == "session":
        training, held_out = data.training(), data.held_out(split)
        sets = [
            set(training.slice(row, row + 1).values.tolist())
            for row in range(len(training))
        ]
        known = [
            held_out.before.slice(row, row + 1).values.tolist()
            for row in range(len(held_out.targets))
        ]
        targets, count = held_out.targets.tolist(), data.num_items + 1
    else:
        users = [
            set(data.train["item_id"].values[data.train["user_id"].values == user])
            for user in range(61)
        ]
        sets = [{int(item) for item in items} for items in users]
        rows = getattr(data, split)
        before = ("train",) if split == "validation" else ("train", "validation")
        known = [
            data.seen(rows["user_id"].values[row : row + 1], *before).values.tolist()
            for row in range(60)
        ]
        targets, count = rows["item_id"].values.tolist(), data.items.num_rows
    taken = torch.zeros(len(sets), count)
    for user, items in enumerate(sets):
        taken[user, list(items)] = 1
    pairs = [*taken.nonzero().T]
    weights = closed_form.ease(*pairs, count, l2=20.0)
    items = closed_form.als(*pairs, len(sets), count, dim=4).items
    hits = {"ease": 0, "als": 0}
    for target, before_it in zip(targets, known, strict=True):
        some = torch.tensor(sorted(set(before_it)))
        user = closed_form.als_half_step(torch.zeros_like(some), some, 1, items)
        for name, scores in (
            ("ease", weights[some].sum(0)),
            ("als", (user @ items.T)[0]),
        ):
            hits[name] += by_hand(scores, target, set(before_it), {0}) < 10
    beside = evaluator.beside(split)
    assert {
        name: round(figures["hr@10"] * len(targets))
        for name, figures in beside.figures.items()
    } == hits
    assert not beside.left_out


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
    settings = ["data.name=plays", f"data.folder={tmp_path}", "closed_form.als_dim=4"]
    task, evaluator = evaluator_of(
        "session",
        *settings,
        "evaluation.metrics=hr@10000",
        "train.early_stop.metric=",
    )
    beside = evaluator.beside("test")
    assert beside.repeats == 20
    assert set(beside.figures) == {"ease", "als"}
    # Of 10,000 places each ranked item has one, so hr is the share of ranked items.
    model = figures_of_planned(
        task, evaluator.model.module, torch.rand(40, task.data.num_items + 1), "test"
    )
    for figures in (model, evaluator.baseline("test"), *beside.figures.values()):
        assert figures["hr@10000"] == 0.5


def test_what_is_learned_on_a_checkerboard_is_known_to_both() -> None:
    _, evaluator = evaluator_of(
        "two_tower", "data.name=checkerboard", "closed_form.als_dim=4"
    )
    figures = evaluator.beside("test").figures
    assert {name: record["hr@10"] for name, record in figures.items()} == {
        "ease": 1.0,
        "als": 1.0,
    }


def test_given_candidates_are_the_ones_that_are_ranked() -> None:
    task, _ = evaluator_of("retrieval", *SMALL)
    rows, drawn = task.data.test.num_rows, np.random.default_rng(0)
    others = drawn.integers(1, 51, (rows, 5))
    data = dataclasses.replace(
        task.data,
        evaluation=dataclasses.replace(
            task.data.evaluation, at=(1,), candidates={"test": others}
        ),
    )
    task = dataclasses.replace(task, data=data)
    model: Any = build_model(with_settings(load_recipe("retrieval"), list(SMALL)), task)
    beside = task.evaluator(
        model.schema(), type("Wrapped", (), {"module": model})(), Runtime()
    ).beside("test")
    known = data.seen(data.test["user_id"].values, "train", "validation")
    hits = 0
    for row, target in enumerate(data.test["item_id"].values.tolist()):
        scores = task.closed_forms.scores("ease", known.slice(row, row + 1))[0]
        hits += all(
            float(scores[item]) < float(scores[target])
            for item in set(others[row].tolist()) - {target}
        )
    assert beside.figures["ease"]["hr@1"] == pytest.approx(hits / rows)


class Planned(torch.nn.Module):
    """Scores query q and item i as ``scores[q, i]``, (Q, I), if batches come in order; 0 for rows with labels."""

    def __init__(self, model: Any, scores: torch.Tensor) -> None:
        super().__init__()
        self.interaction = self
        self.made_of = getattr(model, "made_of", None)
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
    data, drawn = task.data, np.random.default_rng(0)

    def candidates(rows: dict[str, int]) -> dict[str, Any]:
        return {
            "candidates": {
                split: drawn.integers(1, data.num_items + 1, (n, 5))
                for split, n in rows.items()
            }
        }

    changes: list[dict[str, Any]] = [{}]
    if hasattr(data, "held_out"):
        rows = {
            split: len(data.held_out(split).targets) for split in ("validation", "test")
        }
        changes += [candidates(rows), {"test_items": 2}]
    elif hasattr(data, "evaluation"):
        rows = {
            split: getattr(data, split).num_rows for split in ("validation", "test")
        }
        asked = [candidates(rows), {"keep_seen": True}, {"by": "user"}]
        changes += [
            {"evaluation": dataclasses.replace(data.evaluation, **change)}
            for change in asked
        ]
    return [
        dataclasses.replace(task, data=dataclasses.replace(data, **change))
        for change in changes
    ]


def figures_of_planned(
    task: Any, model: Any, scores: torch.Tensor, split: str
) -> dict[str, float]:
    planned = SimpleNamespace(module=Planned(model, scores), eval=lambda: None)
    evaluator = task.evaluator(model.schema(), planned, Runtime())
    figures = evaluator.test() if split == "test" else evaluator.validate()
    return {name: value for name, value in figures.items() if "@" in name}


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_a_model_and_its_baselines_answer_one_question(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with the scores of a baseline has exactly its figures, whatever the recipe's evaluation asks."""
    small = ["data.name=planted", "closed_form.als_dim=4", "closed_form.als_epochs=1"]
    job = with_settings(load_recipe(recipe), small)
    if hasattr(job.data, "users"):
        job = with_settings(job, ["data.users=60", "data.items=50"])
    if hasattr(job.data, "ranked"):
        job = with_settings(job, ["data.ranked=90"])
    known: list[Column] = []
    fitted = ClosedForms.beside

    def beside(forms: ClosedForms, taken: Column, *others: Any) -> Any:
        known.append(taken)
        return fitted(forms, taken, *others)

    monkeypatch.setattr(ClosedForms, "beside", beside)
    for task in questions_of(job.task(job.data, progress=False)):
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
            assert sorted(closed) == (["als", "ease"] if popular else [])
            for name, figures in closed.items():
                scores = task.closed_forms.scores(name, known[-1])
                assert figures_of_planned(task, model, scores, split) == figures
            if popular:
                counts = task.data.popularity
                each = torch.from_numpy(
                    counts() if callable(counts) else counts
                ).float()
                assert (
                    figures_of_planned(
                        task, model, each.repeat(len(known[-1]), 1), split
                    )
                    == popular
                )


def test_a_streamed_log_has_its_clicks_as_pairs() -> None:
    task, evaluator = evaluator_of("stream", "data.name=planted")
    users, items = task.closed_forms.pairs()
    clicked = 0
    for chunk in task.data.chunks(
        "train", [task.data.roles.label, task.data.roles.user]
    ):
        clicked += int(
            (
                (chunk[task.data.roles.label].values > 0)
                & (chunk[task.data.roles.user].values > 0)
            ).sum()
        )
    assert len(users) == len(items) == clicked > 0
    beside = evaluator.beside("test")
    asked = evaluator.question("test")
    assert (asked is None) == (not beside.figures)
    if asked is not None:
        assert list(beside.figures["als"]) == ["hr@10", "ndcg@10"]


def forms(**changes: Any) -> ClosedForms:
    usual: dict[str, Any] = {
        "num_pairs": 10**6,
        "num_users": 6_000,
        "num_items": 3_700,
        "roles": {"item_id": "item"},
    }
    return ClosedForms(
        pairs=lambda: (np.zeros(0, np.int64), np.zeros(0, np.int64)),
        **{**usual, **changes},
    )


@pytest.mark.unit
def test_what_takes_long_is_left_out_with_its_seconds_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert forms().left_out() == {}
    long = forms(num_items=12_000).left_out()
    assert list(long) == ["ease"]
    assert (
        "s for 6,000 users and 12,000 items; evaluation.baselines=popularity,ease ranks it"
        in long["ease"]
    )
    assert list(forms(num_pairs=10**8, num_items=1_000).left_out()) == ["als"]
    assert forms(num_items=12_000, names=("ease",)).left_out() == {}
    monkeypatch.setattr(baselines, "available_memory", lambda: 2**30)
    with pytest.raises(
        ValueError,
        match=r"evaluation\.baselines=ease: leave it out: EASE of 12,000 items takes 2\.1",
    ):
        forms(num_items=12_000, names=("ease",))
    with pytest.raises(
        ValueError,
        match=r"history=ease: give als or a file: EASE of 8,000 items takes 1\.2 GiB, and 1\.0 are",
    ):
        forms(num_items=8_000, roles={"history": "history"}).feature(
            "ease", "history", ["history"]
        )
    rule = r"evaluation\.baselines=als: leave it out: ALS of 6,000,000 users and 3,700 items takes \d\.\d GiB"
    with pytest.raises(ValueError, match=rule):
        forms(num_users=6_000_000, names=("als",))
    no_others = forms(names=("popularity",)).beside(
        Column.from_lengths(np.zeros(0, np.int64), np.zeros(1, int)), _, []
    )
    assert no_others[:2] == ({}, {})


def _(scores: torch.Tensor, start: int) -> Any:
    raise AssertionError("nothing is ranked")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ease_l2": 0.0}, r"ease_l2=0\.0: must be a number above 0"),
        ({"als_l2": float("nan")}, r"als_l2=nan: must be a number above 0"),
        (
            {"als_unobserved": -1.0},
            r"als_unobserved=-1\.0: must be a number of 0 or more",
        ),
        ({"als_dim": 0}, r"als_dim=0: must be 1 or more"),
        ({"als_epochs": 0}, r"als_epochs=0: must be 1 or more"),
    ],
)
def test_settings_of_no_sense_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ClosedFormConfig(**settings)


@pytest.mark.unit
def test_an_unknown_baseline_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"baselines: slim: must be of popularity, ease, als"
    ):
        EvaluationConfig(baselines=("als", "slim"))


@pytest.mark.unit
def test_a_better_closed_form_is_named_with_its_figures_and_what_to_do() -> None:
    (note,) = report.closed_form_notes(
        {"hr@10": 0.5}, {"als": {"hr@10": 0.5}, "ease": {"hr@10": 0.625}}
    )
    assert note == (
        "ease, which is solved for and not trained, is better by hr@10 (0.6250 against 0.5000); tables can begin with "
        "its vectors: pretrained=TABLE=ease"
    )


DOT = (
    *(
        "model.features=user_id,item_id",
        "model.without=",
        "model.tower_widths=",
        "model.embedding_dim=4",
    ),
    *(
        "optimizer.tables=sgd",
        "optimizer.tables_lr=0",
        "train.epochs=1",
        "loader.batch_size=64",
        "train.compile=off",
    ),
)


def trained_from(
    runtime: Runtime, name: str, sharding: str, folder: Path
) -> dict[str, Any]:
    leave_group(runtime)
    tables = f"pretrained=user_id={name},item_id={name}"
    job = with_settings(
        load_recipe("retrieval"), [*SMALL, *DOT, tables, f"plan.sharding={sharding}"]
    )
    run_training(job, folder)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.mark.parametrize(
    ("name", "ranks", "sharding"),
    [("als", 1, "table_wise"), ("als", 2, "row_wise"), ("ease", 2, "table_wise")],
)
def test_a_run_that_begins_with_a_closed_form_and_does_not_move_has_its_figures(
    name: str, ranks: int, sharding: str, tmp_path: Path
) -> None:
    summary = run_ranks(
        trained_from, ranks, name, sharding, tmp_path / "run", timeout_s=120
    )[0]
    task, _ = evaluator_of("retrieval", *SMALL)
    user = task.closed_forms.vectors(name, "user_id", 4)[
        task.data.test["user_id"].values
    ]
    scores = user @ task.closed_forms.vectors(name, "item_id", 4).T
    seen = task.data.seen(task.data.test["user_id"].values, "train", "validation")
    hits = [
        by_hand(scores[row], target, set(seen.slice(row, row + 1).values.tolist()), {0})
        < 10
        for row, target in enumerate(task.data.test["item_id"].values.tolist())
    ]
    assert summary["test"]["hr@10"] == pytest.approx(np.mean(hits), abs=1e-9)
    assert summary.keys() >= {"popularity", "ease", "als"}


def refused(runtime: Runtime, recipe: str, overrides: list[str], folder: Path) -> str:
    leave_group(runtime)
    try:
        run_training(with_settings(load_recipe(recipe), overrides), folder)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        (
            "retrieval",
            ["pretrained=history=als"],
            "pretrained: history=als: the table is read for history, and als has vectors for user_id, item_id",
        ),
        (
            "contextual_ncf",
            ["data.name=planted", "pretrained=user_id=als"],
            "are not pairs of a user and an item",
        ),
    ],
)
def test_a_table_without_vectors_is_refused_by_name(
    recipe: str, overrides: list[str], message: str, tmp_path: Path
) -> None:
    small = list(SMALL) if recipe == "retrieval" else []
    if recipe == "contextual_ncf":
        overrides = [
            overrides[0],
            f"pretrained={tables_of(recipe, overrides[:1])[0]}=als",
        ]
    assert (
        message
        in run_ranks(
            refused, 1, recipe, [*small, *overrides], tmp_path / "run", timeout_s=120
        )[0]
    )


def tables_of(recipe: str, overrides: list[str]) -> list[str]:
    job = with_settings(load_recipe(recipe), overrides)
    return list(
        job.optimizer.for_tables(build_model(job, job.task(job.data, progress=False)))
    )
