"""The recipe on data whose right answer is known, on any number of ranks."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts import run_ranks
from tests.settings import with_settings
from tests.small_sets import checkerboard
from torchrec_ext.data.loader.loader import training_loader
from torchrec_ext.data.prepare import write_set
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.config import Record
from torchrec_ext.train.loop import train
from torchx_apps.jobs.setup import (
    build_model,
    load_task,
)
from torchx_apps.recipes import Job, two_tower_job
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.tasks.evaluator import Evaluator, Recommended
from torchx_apps.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Outcome:
    figures: Record
    popularity: Record
    best: dict[str, float]
    recommended: list[Recommended]
    held_out: list[int]


def trained(runtime: Runtime, job: Job) -> Outcome:
    """The recipe as the app trains it, without its printing."""
    data = load_task(job, runtime).data
    torch.manual_seed(job.train.seed)
    model: Any = build_model(job, Task(data))
    schema = model.schema()
    parallel, optimizer = hybrid_parallel(
        model, runtime, optimizer=job.optimizer, seed=job.train.seed
    )
    loader = training_loader(
        data, schema, job.loader, rank=runtime.rank, world_size=runtime.world_size
    )
    evaluator = Evaluator(data, schema, parallel, runtime)
    train(parallel, optimizer, loader, runtime, job.train)
    return Outcome(
        figures=evaluator.test(),
        popularity=evaluator.baseline("test"),
        best={name.lower(): value for name, value in data.best.items()},
        recommended=[evaluator.recommend(row) for row in range(3)],
        held_out=data.rows("test")["item_id"].values[:3].tolist(),
    )


def two_tower_with(*overrides: str) -> Job:
    job: Job = with_settings(two_tower_job(), list(overrides))
    return job


# Without a history the colour of a square is nowhere but in the two ids.
# The dot product and a modest rate: the top NN at its own rate magnifies the last bit
# of a sum a hundredfold every fifty steps, so that its figures on 1 and on 2 ranks
# differ as those of two seeds do.
PLANTED = two_tower_with(
    *(
        "data.name=planted",
        "data.users=2000",
        "data.items=200",
        "model.interaction=dot",
    ),
    *("train.epochs=3", "loader.batch_size=2048", "optimizer.tables_lr=0.1"),
)


def test_the_colours_of_a_checkerboard_are_learned_exactly(tmp_path: Path) -> None:
    # Without a history the colour of a square is nowhere but in the two ids.
    write_set(tmp_path / "board", checkerboard(32, 64, history_length=0))
    job = two_tower_with(
        f"data.name={tmp_path / 'board'}",
        "train.epochs=40",
        "loader.batch_size=256",
    )
    outcome = run_ranks(trained, 1, job)[0]
    assert outcome.figures["ndcg@10"] == 1.0, "every held-out item stands first"
    assert [
        recommended.items[0] for recommended in outcome.recommended
    ] == outcome.held_out
    assert outcome.popularity["hr@10"] < 0.5


def test_planted_tastes_are_found_on_any_ranks_and_no_more_than_there_is_to_find() -> (
    None
):
    (single,) = run_ranks(trained, 1, PLANTED)
    for name in ("hr@10", "ndcg@10"):
        assert single.figures[name] >= 1.5 * single.popularity[name]
        # Of 2,000 held-out items the share that is hit has a standard deviation of at
        # most 0.011.
        assert single.figures[name] <= single.best[name] + 0.035
    two, other = run_ranks(trained, 2, PLANTED)
    assert two == other, "every rank knows the figures of all"
    assert two.figures == pytest.approx(single.figures, abs=0.01)
    assert two.popularity == single.popularity
    assert two.recommended[0].items[:3] == single.recommended[0].items[:3]


def recommended(runtime: Runtime) -> list[Any]:
    """Recommendations for each user, and the items left, of a catalogue so small that some have taken nearly all."""
    job = two_tower_with("data.name=planted", "data.users=40", "data.items=50")
    data = load_task(job, runtime).data
    model = job.build(job.model, data)
    parallel, _ = hybrid_parallel(model, runtime)
    evaluator = Evaluator(data, model.schema(), parallel, runtime)
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


def last_bias(job: Job, runtime: Runtime) -> float:
    model: Any = build_model(job, load_task(job, runtime))
    return float(model.interaction.last_biases[0])


def begun(runtime: Runtime) -> list[float]:
    n_tower = with_settings(load_recipe("n_tower"), ["data.name=planted"])
    task = load_task(n_tower, runtime)
    labels = task.data.rows("train")["label"].values
    return [
        float(labels.mean()),
        last_bias(n_tower, runtime),
        last_bias(two_tower_with("data.name=planted", "loader.negatives=3"), runtime),
        last_bias(with_settings(load_recipe("ncf"), ["data.name=planted"]), runtime),
    ]


def test_a_model_begins_at_the_log_odds_of_what_its_loader_gives_on_every_rank() -> (
    None
):
    first, other = run_ranks(begun, 2)
    share, alone, two_tower_bias, ncf_bias = first
    assert alone == pytest.approx(math.log(share / (1 - share)))
    assert two_tower_bias == pytest.approx(math.log(1 / 3))
    assert ncf_bias == pytest.approx(math.log(1 / 4))
    assert other == first


@pytest.mark.unit
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "evaluation.metrics=recal@5",
            r"metrics: 'recal@5' must be a figure and a number of items shown",
        ),
        (
            "evaluation.metrics=hit@10",
            r"metrics: 'hit@10' must be .*Hit is hr",
        ),
        (
            "evaluation.metrics=recall@0",
            r"metrics: 'recall@0' must be a figure and a number of items shown",
        ),
        (
            "evaluation.metrics=recall@5",
            r"train\.early_stop\.metric=hr@10 with evaluation\.metrics=recall@5: the evaluation has no such figure",
        ),
    ],
)
def test_wrong_figures_are_refused_before_anything_is_read(
    override: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        two_tower_with("train.early_stop.metric=hr@10", override)
