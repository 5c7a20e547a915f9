"""Recipes on data whose right answer is known, on any number of ranks: they learn it, and no more than there is."""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.contracts import run_ranks
from tests.settings import with_settings
from tests.small_sets import checkerboard
from torchrec_ext.data.prepare import write_set
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.config import Record
from torchrec_ext.train.loop import train
from torchx_apps.jobs.setup import build_model, load_task
from torchx_apps.recipes import Job
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.recipes.two_tower import TwoTowerConfig, build_two_tower
from torchx_apps.tasks.evaluator import Recommended
from torchx_apps.tasks.job import schema_of


class Outcome(NamedTuple):
    """What a trained model gives; ``held_out`` are the items of the users to whom items are ``recommended``."""

    test: Record
    baseline: Record
    recommended: list[Recommended]
    held_out: list[int]


def job_of(recipe: str, *overrides: str) -> Job:
    # Steps op by op: whether they are compiled is no question here.
    job: Job = with_settings(load_recipe(recipe), ["train.compile=off", *overrides])
    return job


def trained(runtime: Runtime, job: Job) -> Outcome:
    """As the app trains it, without its printing."""
    task = load_task(job, runtime)
    torch.manual_seed(job.train.seed)
    model: Any = build_model(job, task)
    schema = schema_of(job, task, model)
    parallel, optimizer = hybrid_parallel(
        model, runtime, optimizer=job.optimizer, seed=job.train.seed
    )
    place = {"rank": runtime.rank, "world_size": runtime.world_size}
    loader = task.loader(schema, job.loader, **place)
    evaluator: Any = task.evaluator(schema, parallel, runtime)
    train(parallel, optimizer, loader, runtime, job.train, evaluate=evaluator.validate)
    return Outcome(
        test=evaluator.test(),
        baseline=evaluator.baseline("test"),
        recommended=[evaluator.recommend(row) for row in range(3)],
        held_out=task.data.rows("test")["item_id"].values[:3].tolist(),
    )


def test_the_colours_of_a_checkerboard_are_learned_exactly(tmp_path: Path) -> None:
    # Without a history the colour of a square is nowhere but in the two ids.
    write_set(tmp_path / "board", checkerboard(32, 64, history_length=0))
    settings = ("train.epochs=40", "train.eval_every=40", "loader.batch_size=256")
    job = job_of("two_tower", f"data.name={tmp_path / 'board'}", *settings)
    outcome = run_ranks(trained, 1, job)[0]
    assert outcome.test["ndcg@10"] == 1.0, "every held-out item stands first"
    first = [recommended.items[0] for recommended in outcome.recommended]
    assert first == outcome.held_out
    assert outcome.baseline["hr@10"] < 0.5


def recommended(runtime: Runtime) -> list[Any]:
    """Recommendations for each user, and the items left, of a catalogue so small that some have taken nearly all."""
    job = job_of("two_tower", "data.name=planted", "data.users=40", "data.items=50")
    task = load_task(job, runtime)
    data = task.data
    model: Any = build_model(job, task)
    parallel, _ = hybrid_parallel(model, runtime)
    evaluator: Any = task.evaluator(model.schema(), parallel, runtime)
    parallel.eval()
    taken = data.seen(data.rows("test")["user_id"].values, "train", "validation")
    left = [
        set(range(1, 51)) - set(taken.row(row).tolist()) for row in range(len(taken))
    ]
    return [(evaluator.recommend(row), left[row]) for row in range(len(taken))]


def test_nothing_is_recommended_that_the_user_has_taken() -> None:
    shown = run_ranks(recommended, 2)[0]
    assert any(len(left) < 10 for _, left in shown)
    for answer, left in shown:
        assert set(answer.items) <= left
        assert len(answer.items) == min(10, len(left))
        assert answer.scores == sorted(answer.scores, reverse=True)


@pytest.mark.unit
def test_a_model_begins_at_the_log_odds_of_what_its_loader_gives() -> None:
    for recipe, setting, odds in (
        ("two_tower", "loader.negatives=3", 1 / 3),
        ("ncf", "loader.negatives=4", 1 / 4),
        ("n_tower", "loader.seed=0", None),
    ):
        job = job_of(recipe, "data.name=planted", setting)
        task = load_task(job, Runtime())
        if odds is None:
            labels = task.data.rows("train")[task.data.roles.label].values
            share = float(labels.astype(float).mean())
            odds = share / (1 - share)
        model: Any = build_model(job, task)
        bias = model.interaction.last_biases[0].item()
        assert bias == pytest.approx(math.log(odds)), recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnModel:
    dim: int = 8


SMALL = ("data.name=planted", "data.users=40", "data.items=50")


@pytest.mark.unit
def test_a_model_of_ones_own_needs_no_field_that_it_does_not_read() -> None:
    job = job_of("two_tower", *SMALL)
    task = job.task(job.data)

    def build(own: OwnModel, data: Any) -> Any:
        return build_two_tower(TwoTowerConfig(embedding_dim=own.dim), data)

    own = dataclasses.replace(job, model=OwnModel(), build=build)
    model = build_model(own, task)
    assert schema_of(own, task, model) == model.schema()
    strict = dataclasses.replace(job, model=TwoTowerConfig(out_of_range="oov"))
    schema = schema_of(strict, task, build_model(strict, task))
    assert schema.out_of_range == "oov"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.without=colour",
            r"model\.without names \['colour'\], .* it has \['age'",
        ),
        (
            "model.without=item_id,release_year,genres",
            r"model\.without=\('item_id', .*: leaves no column to the tower of the item",
        ),
        ("model.loss=in_batch", r"model\.loss=in_batch with model\.interaction=top_nn"),
        ("model.temperature=0", r"model\.temperature=0\.0: must be greater than 0"),
        ("loader.negatives=0", r"loader\.negatives=0 without loader\.label"),
        ("evaluation.metrics=recal@5", r"metrics: 'recal@5' must be a figure"),
        ("evaluation.metrics=hit@10", r"metrics: 'hit@10' must be .*Hit is hr"),
        ("evaluation.metrics=recall@0", r"metrics: 'recall@0' must be a figure"),
        (
            "evaluation.metrics=recall@5",
            r"early_stop\.metric=hr@10 with evaluation\.metrics=recall@5",
        ),
    ],
)
def test_a_wrong_setting_is_named_before_the_first_step(
    override: str, message: str
) -> None:
    def begun() -> None:
        job = job_of("two_tower", *SMALL, "train.early_stop.metric=hr@10", override)
        task = job.task(job.data)
        model = job.build(job.model, task.data)
        task.loader(model.schema(), job.loader, rank=0, world_size=1)

    with pytest.raises(ValueError, match=message):
        begun()
