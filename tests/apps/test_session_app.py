"""The recipe session on sequences whose answer is known, on one rank and on two: its figures and its report."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.contracts import run_ranks
from torchrec_ext.data.columns import Column
from torchrec_ext.data.datasets.sequences import SequenceData
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.loop import train
from torchx_apps.cli.command_line import apply_overrides
from torchx_apps.recipes.session import session
from torchx_apps.tasks.job import Job
from torchx_apps.tasks.sessions import SessionTask

PLANTED: Job = apply_overrides(
    session(),
    [
        *("data.name=planted", "data.users=1000", "data.items=60", "data.max_length=20", "loader.batch_size=64"),
        *("loader.negatives=0", "model.embedding_dim=32", "model.layers=1", "train.epochs=4", "train.eval_every=4"),
    ],
)


def trained(runtime: Runtime, job: Job) -> dict[str, Any]:
    task = job.task(job.data)
    torch.manual_seed(job.train.seed)
    model = job.build(job.model, task.data)
    schema = model.schema()
    parallel, optimizer = hybrid_parallel(model, runtime, optimizer=job.optimizer, seed=job.train.seed)
    loader = task.loader(schema, job.loader, rank=runtime.rank, world_size=runtime.world_size)
    evaluator = task.evaluator(schema, parallel, runtime)
    history = train(parallel, optimizer, loader, runtime, job.train, evaluate=evaluator.validate)
    return {
        "validation": [record for record in history if record["kind"] == "eval"][-1],
        "test": evaluator.test(),
        "popularity": evaluator.baseline("test"),
        "best": {name.lower(): value for name, value in task.best.items()},
        "example": evaluator.example(),
        "task": task.describe(),
    }


@pytest.fixture(scope="module")
def by_ranks() -> dict[int, list[dict[str, Any]]]:
    return {world_size: run_ranks(trained, world_size, PLANTED) for world_size in (1, 2)}


def test_the_planted_successors_are_found_and_no_more_than_there_is_to_find(
    by_ranks: dict[int, list[dict[str, Any]]],
) -> None:
    (outcome,) = by_ranks[1]
    for name in ("hr@10", "ndcg@10"):
        assert outcome["test"][name] > 0.95 * outcome["best"][name]
        # Of 1,000 held-out items the share that is found by chance has a standard deviation of less than .015.
        assert outcome["test"][name] < outcome["best"][name] + 0.045
        assert outcome["test"][name] > 2 * outcome["popularity"][name]
        assert outcome["validation"][name] == pytest.approx(outcome["test"][name], abs=0.05)


def test_in_bfloat16_they_are_found_too(by_ranks: dict[int, list[dict[str, Any]]]) -> None:
    (half,) = run_ranks(trained, 1, apply_overrides(PLANTED, ["train.amp=bf16"]))
    for name in ("hr@10", "ndcg@10"):
        assert half["test"][name] == pytest.approx(by_ranks[1][0]["test"][name], abs=0.03)
        assert half["test"][name] > 0.95 * half["best"][name]


def test_two_ranks_reach_the_figures_of_one(by_ranks: dict[int, list[dict[str, Any]]]) -> None:
    (single,), (two, other) = by_ranks[1], by_ranks[2]
    assert two["test"] == other["test"], "every rank knows the figures of all"
    assert two["test"] == pytest.approx(single["test"], abs=0.03)
    assert two["popularity"] == single["popularity"]


def test_what_is_shown_and_told(by_ranks: dict[int, list[dict[str, Any]]]) -> None:
    (outcome,) = by_ranks[1]
    assert outcome["task"].startswith("planted, 1,000 users with ")
    assert outcome["task"].endswith(" 1,000 held-out items, 60 items in the catalogue")
    first, second, *shown = outcome["example"].splitlines()
    assert first.startswith("the first user took last: item ")
    assert second.startswith("10 recommendations (the held-out item was: item ")
    scores = [float(line.partition("(")[2].partition(")")[0]) for line in shown]
    assert len(scores) == 10
    assert scores == sorted(scores, reverse=True)
    taken = set(first.removeprefix("the first user took last: ").split(", "))
    assert not taken & {line.split(". ")[1].split("  ")[0] for line in shown}, "nothing that was taken before"


@pytest.mark.unit
def test_a_set_without_anything_to_test_on_is_refused() -> None:
    pairs = SequenceData(
        name="pairs", sequences=Column.from_lengths(np.array([1, 2, 1, 2]), np.array([2, 2])), num_items=2
    )
    with pytest.raises(ValueError, match="set 'pairs' has no test rows: no user has the 3 items"):
        SessionTask(pairs)


@pytest.mark.unit
def test_every_key_of_the_recipe_can_be_set() -> None:
    changed = apply_overrides(
        session(), ["model.layers=3", "model.position=end", "data.max_length=10", "loader.negatives=0"]
    )
    assert (changed.model.layers, changed.model.position, changed.data.max_length, changed.loader.negatives) == (
        3,
        "end",
        10,
        0,
    )
    assert dataclasses.replace(changed, name="mine").name == "mine"
