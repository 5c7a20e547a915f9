"""Each built-in recipe learns what there is to learn on data whose right answer is known, and tells it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.contracts import run_ranks
from tests.settings import with_settings
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.config import Record
from torchrec_ext.train.loop import train
from torchx_apps.jobs.setup import build_model, load_task
from torchx_apps.recipes import Job
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.recipes.two_tower import TwoTowerConfig, build_two_tower
from torchx_apps.tasks.job import schema_of


def job_of(recipe: str, *overrides: str) -> Job:
    job: Job = with_settings(load_recipe(recipe), list(overrides))
    return job


def trained(runtime: Runtime, job: Job) -> dict[str, Record]:
    """As the app trains it, without its printing."""
    task = load_task(job, runtime)
    torch.manual_seed(job.train.seed)
    model: Any = build_model(job, task)
    schema = model.schema(out_of_range=job.model.out_of_range)
    parallel, optimizer = hybrid_parallel(
        model, runtime, optimizer=job.optimizer, seed=job.train.seed
    )
    loader = task.loader(
        schema, job.loader, rank=runtime.rank, world_size=runtime.world_size
    )
    evaluator = task.evaluator(schema, parallel, runtime)
    train(
        parallel,
        optimizer,
        loader,
        runtime,
        job.train,
        evaluate=evaluator.validate if task.validates else None,
    )
    return {
        "test": evaluator.test(),
        "baseline": evaluator.baseline("test"),
        "best": dict(task.best),
    }


CONTEXT = (
    "data.name=planted",
    "loader.batch_size=1024",
    "optimizer.tables_lr=0.01",
    "optimizer.dense_lr=0.01",
    "train.early_stop.restore=false",
)


@pytest.fixture(scope="module")
def with_context() -> Record:
    return run_ranks(
        trained,
        1,
        job_of("contextual_ncf", *CONTEXT, "train.epochs=6", "model.embedding_std=0.1"),
    )[0]


def test_contextual_ncf_comes_near_the_odds_that_made_the_rows(
    with_context: dict[str, Record],
) -> None:
    test, best = with_context["test"], with_context["best"]
    assert best["auc"] - 0.05 < test["auc"] < best["auc"] + 0.005
    assert test["log_loss"] < 0.75 * with_context["baseline"]["log_loss"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnModel:
    dim: int = 8


@pytest.mark.unit
def test_a_model_of_ones_own_needs_no_field_that_it_does_not_read() -> None:
    job = job_of("two_tower", "data.users=60", "data.items=50", "data.name=planted")
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
    ("overrides", "message"),
    [
        (
            ("model.without=colour",),
            r"model\.without names \['colour'\], which 'planted' does not have; it has \['age'",
        ),
        (
            ("model.without=item_id,release_year,genres",),
            r"model\.without=\('item_id', .*: leaves no column to the tower of the item",
        ),
        (
            ("model.loss=in_batch",),
            r"model\.loss=in_batch with model\.interaction=top_nn: each query meets every candidate",
        ),
        (("model.temperature=0",), r"model\.temperature=0\.0: must be greater than 0"),
    ],
)
def test_a_wrong_tower_is_named(overrides: tuple[str, ...], message: str) -> None:
    def built() -> Any:
        job = job_of(
            "two_tower",
            "data.name=planted",
            "data.users=40",
            "data.items=50",
            *overrides,
        )
        return job.build(job.model, job.task(job.data).data)

    with pytest.raises(ValueError, match=message):
        built()


@pytest.mark.unit
def test_rows_without_negatives_need_a_loss_that_compares_rows() -> None:
    job = job_of(
        "two_tower",
        "data.name=planted",
        "data.users=40",
        "data.items=50",
        "loader.negatives=0",
    )
    task = job.task(job.data)
    model = job.build(job.model, task.data)
    with pytest.raises(
        ValueError,
        match=r"loader\.negatives=0 without loader\.label: every row would have label 1",
    ):
        task.loader(model.schema(), job.loader, rank=0, world_size=1)
