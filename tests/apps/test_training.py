"""Recipes on data whose right answer is known, on any number of ranks: they learn it, and no more than there is."""

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.contracts import run_ranks
from tests.settings import with_settings
from tests.small_sets import checkerboard, with_candidates
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.loader.sides import BatchBuilder
from torchrec_ext.data.prepare import write_set
from torchrec_ext.data.sets import raw_set
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

    validation: Record
    test: Record
    baseline: Record
    best: Record
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
    ranked = evaluator.towers is not None
    return Outcome(
        validation=evaluator.validate(),
        test=evaluator.test(),
        baseline=evaluator.baseline("test"),
        best={name.lower(): value for name, value in task.best.items()},
        recommended=[evaluator.recommend(row) for row in range(3)] if ranked else [],
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


def test_contextual_ncf_comes_near_the_odds_that_made_the_rows() -> None:
    settings = (
        *("data.name=planted", "loader.batch_size=1024", "optimizer.tables_lr=0.01"),
        *("optimizer.dense_lr=0.01", "train.early_stop.restore=false"),
        *("train.epochs=6", "model.embedding_std=0.1"),
    )
    (outcome,) = run_ranks(trained, 1, job_of("contextual_ncf", *settings))
    best = outcome.best["auc"]
    assert best - 0.05 < outcome.test["auc"] < best + 0.005
    assert outcome.test["log_loss"] < 0.75 * outcome.baseline["log_loss"]


PLANTED = (
    *(
        "data.name=planted",
        "data.users=1000",
        "data.items=60",
        "data.history_length=20",
    ),
    *("loader.batch_size=64", "loader.negatives=0", "model.embedding_dim=32"),
    *("model.layers=1", "train.epochs=4", "train.eval_every=4"),
    "train.early_stop.restore=false",
)


def test_planted_successors_are_found_on_any_ranks_and_no_more_than_there_are() -> None:
    job = job_of("session", *PLANTED)
    (single,), (two, other) = (run_ranks(trained, ranks, job) for ranks in (1, 2))
    for name in ("hr@10", "ndcg@10"):
        assert single.test[name] > 0.95 * single.best[name]
        # Of 1,000 held-out items the share that is found by chance has a standard
        # deviation of less than .015.
        assert single.test[name] < single.best[name] + 0.045
        assert single.test[name] > 2 * single.baseline[name]
        assert single.validation[name] == pytest.approx(single.test[name], abs=0.06)
    assert two == other, "every rank knows the figures of all"
    assert two.test == pytest.approx(single.test, abs=0.03)
    assert two.baseline == single.baseline
    assert two.recommended[0].items[:2] == single.recommended[0].items[:2]


def write_sequences(root: Path, *, users: int = 40, items: int = 50) -> Path:
    """Sequences of files' ids of their own."""
    rng, folder = np.random.default_rng(0), root / "mine"
    folder.mkdir()
    taken = np.stack([rng.permutation(items)[:12] for _ in range(users)])
    columns = {
        "user": (100 + np.arange(users)).repeat(12),
        "item": 7 * taken.reshape(-1),
        "position": np.tile(np.arange(12), users),
    }
    pq.write_table(pa.table(columns), folder / "inter.parquet")
    return folder


def counted_by_hand(runtime: Runtime, root: Path) -> dict[str, Any]:
    """The evaluator's figures, and the ranks of each test item, counted from the vectors of the same model."""
    settings = (
        *("data.name=mine", f"data.folder={root}", "model.embedding_dim=16"),
        *("evaluation.metrics=recall@5,ndcg@5", "train.early_stop.metric="),
    )
    job = job_of("session", *settings)
    task = load_task(job, runtime)
    model = job.build(job.model, task.data)
    schema = model.schema()
    parallel, _ = hybrid_parallel(model, runtime, optimizer=job.optimizer, seed=3)
    evaluator = task.evaluator(schema, parallel, runtime)
    figures = evaluator.test()
    rows = task.data.rows("test")
    item_ids = task.data.id_values["item_id"].to_pylist()
    ids = np.arange(len(item_ids) + 1)
    builder = BatchBuilder(schema, Chunk({"item_id": Column(ids)}))
    with torch.no_grad():
        sessions = parallel.module.embed(
            "session", builder.user_batch(rows.select(["session"]))
        ).double()
        items = parallel.module.embed("item", builder.item_batch(ids)).double()
    places: list[int] = []
    for row, target in enumerate(rows["item_id"].values.tolist()):
        if "candidates" in rows:
            rivals = sorted({*rows["candidates"].row(row).tolist()} - {int(target)})
        else:
            taken = {*rows["session"].row(row).tolist(), int(target)}
            rivals = sorted({*range(1, len(ids))} - taken)
        scores = items @ sessions[row]
        places.append(int((scores[rivals] > scores[target]).sum()))
    gains = [1 / math.log2(2 + place) for place in places if place < 5]
    return {
        "figures": figures,
        "by hand": {
            "recall@5": len(gains) / len(places),
            "ndcg@5": sum(gains) / len(places),
        },
        "popularity": evaluator.baseline("test"),
    }


@pytest.mark.parametrize("given", ["candidates", "whole catalogue"])
def test_figures_are_those_of_a_count_by_hand_on_any_number_of_ranks(
    given: str, tmp_path: Path
) -> None:
    folder = write_sequences(tmp_path)
    if given == "candidates":
        raw = raw_set(DataConfig(name="mine", folder=str(tmp_path)), "sessions")
        shutil.rmtree(folder)
        write_set(folder, with_candidates(raw, 9))
    (single,), two = (run_ranks(counted_by_hand, ranks, tmp_path) for ranks in (1, 2))
    expected = pytest.approx(single["by hand"], abs=1e-9)
    assert single["figures"] == two[0]["figures"] == two[1]["figures"] == expected
    assert set(single["popularity"]) == {"recall@5", "ndcg@5"}
    if given == "candidates":
        assert abs(single["popularity"]["recall@5"] - 0.5) < 0.25, (
            "5 of 10 places, and popularity knows nothing"
        )


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
            share = float(task.data.rows("train")["label"].values.mean())
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
