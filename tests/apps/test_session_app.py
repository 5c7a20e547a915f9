"""The recipe session on sequences whose answer is known, on one rank and on two: its figures and its report."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.contracts import run_ranks
from tests.settings import with_settings
from tests.small_sets import with_candidates
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.loader.sides import BatchBuilder
from torchrec_ext.data.prepare import write_set
from torchrec_ext.data.sets import raw_set
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.loop import train
from torchx_apps.jobs.setup import load_task
from torchx_apps.recipes.session import session
from torchx_apps.tasks.job import Job

PLANTED: Job = with_settings(
    session(),
    [
        *(
            "data.name=planted",
            "data.users=1000",
            "data.items=60",
            "data.history_length=20",
            "loader.batch_size=64",
        ),
        *(
            "loader.negatives=0",
            "model.embedding_dim=32",
            "model.layers=1",
            "train.epochs=4",
            "train.eval_every=4",
            "train.early_stop.restore=false",
        ),
    ],
)


def trained(runtime: Runtime, job: Job) -> dict[str, Any]:
    task = job.task(job.data)
    torch.manual_seed(job.train.seed)
    model = job.build(job.model, task.data)
    schema = model.schema()
    parallel, optimizer = hybrid_parallel(
        model, runtime, optimizer=job.optimizer, seed=job.train.seed
    )
    loader = task.loader(
        schema, job.loader, rank=runtime.rank, world_size=runtime.world_size
    )
    evaluator = task.evaluator(schema, parallel, runtime)
    history = train(
        parallel, optimizer, loader, runtime, job.train, evaluate=evaluator.validate
    )
    return {
        "validation": [record for record in history if record["kind"] == "eval"][-1],
        "test": evaluator.test(),
        "popularity": evaluator.baseline("test"),
        "best": {name.lower(): value for name, value in task.best.items()},
    }


@pytest.fixture(scope="module")
def by_ranks() -> dict[int, list[dict[str, Any]]]:
    return {
        world_size: run_ranks(trained, world_size, PLANTED) for world_size in (1, 2)
    }


def test_the_planted_successors_are_found_and_no_more_than_there_is_to_find(
    by_ranks: dict[int, list[dict[str, Any]]],
) -> None:
    (outcome,) = by_ranks[1]
    for name in ("hr@10", "ndcg@10"):
        assert outcome["test"][name] > 0.95 * outcome["best"][name]
        # Of 1,000 held-out items the share that is found by chance has a standard
        # deviation of less than .015.
        assert outcome["test"][name] < outcome["best"][name] + 0.045
        assert outcome["test"][name] > 2 * outcome["popularity"][name]
        assert outcome["validation"][name] == pytest.approx(
            outcome["test"][name], abs=0.06
        )


def test_two_ranks_reach_the_figures_of_one(
    by_ranks: dict[int, list[dict[str, Any]]],
) -> None:
    (single,), (two, other) = by_ranks[1], by_ranks[2]
    assert two["test"] == other["test"], "every rank knows the figures of all"
    assert two["test"] == pytest.approx(single["test"], abs=0.03)
    assert two["popularity"] == single["popularity"]


def write_sequences(root: Path, *, users: int = 40, items: int = 50) -> Path:
    """Sequences of files' ids of their own."""
    rng, folder = np.random.default_rng(0), root / "mine"
    folder.mkdir()
    taken = np.stack([rng.permutation(items)[:12] for _ in range(users)])
    owners = 100 + np.arange(users)
    pq.write_table(
        pa.table(
            {
                "user": owners.repeat(12),
                "item": 7 * taken.reshape(-1),
                "position": np.tile(np.arange(12), users),
            }
        ),
        folder / "inter.parquet",
    )
    return folder


def counted_by_hand(runtime: Runtime, root: Path, *overrides: str) -> dict[str, Any]:
    """The evaluator's figures, and the ranks of each test item, counted from the vectors of the same model."""
    sets = [
        "data.name=mine",
        f"data.folder={root}",
        "model.embedding_dim=16",
        "evaluation.metrics=recall@5,ndcg@5",
    ]
    job = with_settings(session(), [*sets, "train.early_stop.metric=", *overrides])
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
        "asked": task.heading,
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
    assert single["asked"].startswith(
        "test items, among " if given == "candidates" else "test items, whole catalog"
    )
    assert single["figures"] == pytest.approx(single["by hand"], abs=1e-9)
    assert (
        two[0]["figures"]
        == two[1]["figures"]
        == pytest.approx(single["figures"], abs=1e-9)
    )
    assert set(single["popularity"]) == {"recall@5", "ndcg@5"}
    if given == "candidates":
        assert abs(single["popularity"]["recall@5"] - 0.5) < 0.25, (
            "5 of 10 places, and popularity knows nothing"
        )
