"""From a raw log to a served model: preprocess -> train the recipe stream -> bundle, whose requests are raw rows."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.contracts import leave_group, run_ranks
from tests.files import read_parquet, summary
from tests.settings import with_settings
from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.sets import load_set
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.scorer import (
    RecommendRequest,
    RequestError,
    Scorer,
    ScoreRequest,
)
from torchrec_ext.schema import DataError
from torchx_apps.jobs.exporting import export_run
from torchx_apps.jobs.preprocessing import run_preprocess
from torchx_apps.jobs.setup import build_model, load_task
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.recipes.preprocess import Prepare, PreprocessJob
from torchx_apps.recipes.saved_job import saved_job
from torchx_apps.tasks.evaluator import held_out_rows, question_of
from torchx_apps.tasks.job import Job, schema_of
from torchx_apps.tasks.task import Task

pytest.importorskip("duckdb", reason="needs the extra `data`")

ROWS, USERS, ITEMS = 6_000, 60, 40
SMALL = (
    *(
        "train.epochs=6",
        "train.compile=off",
        "loader.batch_size=128",
        "model.embedding_dim=8",
        "model.embedding_std=0.1",
    ),
    *("optimizer.tables=adam", "optimizer.tables_lr=0.02", "optimizer.dense_lr=0.01"),
)


def write_log(folder: Path) -> None:
    """A log of texts, dates, lists and gaps; even users click even items, and odd users odd items rather."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    users, items = rng.integers(0, USERS, ROWS), rng.integers(0, ITEMS, ROWS)
    clicked = (
        rng.random(ROWS) < np.array([[0.9, 0.1], [0.3, 0.6]])[users % 2, items % 2]
    )
    table = pa.table(
        {
            "who": pa.array(
                [
                    None if index % 97 == 0 else f"u{user}"
                    for index, user in enumerate(users)
                ]
            ),
            "what": [f"film-{item}" for item in items],
            "price": (items * 0.5).astype(np.float64),
            "tags": [[f"t{item % 5}", f"t{item % 3}"] for item in items],
            "age": pa.array(
                [None if user % 7 == 0 else int(20 + user) for user in users],
                pa.int64(),
            ),
            "seen_at": pa.array(
                1_700_000_000 + np.arange(ROWS) * 977, pa.timestamp("s")
            ),
            "importance": rng.integers(1, 3, ROWS).astype(np.float32),
            "clicked": clicked.astype(np.float32),
        }
    )
    for split, start, stop in (
        ("train", 0, 4_800),
        ("validation", 4_800, 5_400),
        ("test", 5_400, ROWS),
    ):
        pq.write_table(
            table.slice(start, stop - start),
            folder / f"{split}.parquet",
            row_group_size=700,
        )


def prepare(
    log: Path, *, keep: tuple[str, ...] = ("clicked", "importance"), **roles: Any
) -> PreprocessJob:
    """The preprocessing of :func:`write_log`."""
    from torchrec_ext.data.preprocess import (
        Categorify,
        FillMissing,
        History,
        Normalize,
        Preprocessor,
        TimeFeatures,
    )

    steps = [
        History(user="who", item="what", time="seen_at", length=5),
        Categorify(column="what", output="item_id", also=("history",), min_count=2),
        Categorify(column="who", output="user_id"),
        Categorify(column="tags", output="item_tags"),
        Normalize(column="price", output="item_price"),
        Normalize(column="age", output="user_age"),
        FillMissing(column="user_age", value=0),
        TimeFeatures(column="seen_at"),
    ]
    given = {
        "label": "clicked",
        "weight": "importance",
        "user": "user_id",
        "item": "item_id",
    } | roles
    prepared = Prepare(
        preprocessor=Preprocessor(steps, keep=keep),
        splits={
            split: str(log / f"{split}.parquet")
            for split in ("train", "validation", "test")
        },
        events=[
            str(log / f"{split}.parquet") for split in ("train", "validation", "test")
        ],
        user_features=("history",),
        **given,
    )
    return PreprocessJob(name="films", build=lambda config, con: prepared)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films") / "log"
    write_log(folder)
    return folder


@pytest.fixture(scope="module")
def folder(log: Path) -> Path:
    out = log.parent / "preprocessed"
    run_preprocess(dataclasses.replace(prepare(log), out=str(out)))
    return out


def job_of(folder: Path | str, *overrides: str) -> Job:
    job: Job = with_settings(
        load_recipe("stream"), [*SMALL, f"data.name={folder}", *overrides]
    )
    return job


def rows_of(folder: Path, split: str) -> Chunk:
    return read_parquet(sorted((folder / split).glob("*.parquet")))


class Run(NamedTuple):
    """What a run printed, its test figures, and the SHA-256 of its weights' values by name."""

    output: str
    figures: dict[str, float]


def ran(runtime: Runtime, job: Job, out: Path) -> Run:
    leave_group(runtime)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        run_training(job, out)
    return Run(output.getvalue(), summary(out)["test"])


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    out = folder.parent / "run"
    (run,) = run_ranks(ran, 1, job_of(folder, "export=require"), out)
    assert run.figures["auc"] > 0.8, run.output
    data = load_set(DataConfig(name=str(folder)), "labels")
    rows = held_out_rows(data, "test").num_rows
    repeats = summary(out)["repeats"]
    assert 0 < repeats < rows
    assert f"held-out items {repeats:,} were taken before" in run.output
    assert run.figures["hr@10"] * rows > 0.5 * (rows - repeats), (
        "half of the new items are good"
    )
    assert 0.8 < run.figures["calibration"] < 1.2
    assert run.figures["ne"] < 0.8
    return out


def test_the_score_of_a_raw_row_is_the_models_on_the_preprocessed_row(
    trained: Path, folder: Path, log: Path
) -> None:
    """Rows of the test split, which training did not see, as they stand in the log."""
    scores = run_ranks(model_scores, 1, job_of(folder), trained)[0]
    raw = pq.read_table(log / "test.parquet")
    past = history_before(log, raw["seen_at"][-1].as_py())
    scorer = Scorer(Bundle.load(trained / "bundle"))
    asked = {
        name
        for name in scorer.bundle.query.columns.raw
        if name not in ("history_items", "history_times")
    }
    for number, row in enumerate(raw.slice(0, 60).to_pylist()):
        before = (
            [event for event in past.get(row["who"], []) if event[0] < row["seen_at"]]
            if row["who"]
            else []
        )
        user = {name: row[name] for name in asked}
        user |= {
            "history_times": [at for at, _ in before],
            "history_items": [what for _, what in before],
        }
        (score,) = scorer.score(ScoreRequest(user=user, items=[row["what"]])).scores
        assert score == pytest.approx(scores[number], abs=1e-5)


def model_scores(runtime: Runtime, job: Job, run: Path) -> list[float]:
    """Returns the logits of the run's last checkpoint for the test split's first 60 rows, as the loader reads them."""
    from torchrec_ext.train.checkpoint.folder import CheckpointRanks, read_checkpoint
    from torchrec_ext.train.checkpoint.load import load_checkpoint
    from torchrec_ext.train.checkpoint.state import model_state
    from torchx_apps.jobs.resuming import checkpoint_to_export

    task = load_task(job, runtime)
    model = build_model(job, task)
    schema = schema_of(job, task, model)
    parallel, optimizer = hybrid_parallel(model, runtime, optimizer=job.optimizer)
    path, _ = checkpoint_to_export(
        str(run), "last", CheckpointRanks(runtime), restores=False
    )
    load_checkpoint(
        read_checkpoint(path),
        model_state(parallel, optimizer),
        CheckpointRanks(runtime),
    )
    parallel.eval()
    config = LoaderConfig(
        batch_size=60, negatives=0, label=task.data.roles.label, shuffle=False
    )
    batch = next(iter(ChunkLoader(task.data.splits["test"], schema, config=config)))
    with torch.no_grad():
        return parallel.module.logits(batch).tolist()  # type: ignore[no-any-return]


def history_before(log: Path, moment: Any) -> dict[str, list[tuple[Any, str]]]:
    """Every user's events (time, item) before a moment, in order."""
    past: dict[str, list[tuple[Any, str]]] = {}
    for split in ("train", "validation", "test"):
        for row in pq.read_table(
            log / f"{split}.parquet", columns=["who", "seen_at", "what"]
        ).to_pylist():
            if row["who"] is not None and row["seen_at"] < moment:
                past.setdefault(row["who"], []).append((row["seen_at"], row["what"]))
    return past


def test_a_user_who_is_named_by_id_is_the_whole_raw_row_without_what_was_taken(
    trained: Path, log: Path
) -> None:
    """At a moment after the log, by which all that the log says of a user is in the past."""
    train = pq.read_table(log / "train.parquet").to_pylist()
    now = pq.read_table(log / "test.parquet")["seen_at"][
        -1
    ].as_py() + datetime.timedelta(hours=1)
    ages = {row["who"]: row["age"] for row in train}
    before = list(train)
    for split in ("validation", "test"):
        before += pq.read_table(log / f"{split}.parquet").to_pylist()
    clicked = {(row["who"], row["what"]) for row in before if row["clicked"]}
    bundle = Bundle.load(trained / "bundle")
    assert bundle.users is not None
    assert sorted(bundle.users.ids.arrow().to_pylist()) == sorted(set(ages) - {None})
    scorer, items = Scorer(bundle), [f"film-{item}" for item in range(ITEMS)]
    for who, events in list(history_before(log, now).items())[:20]:
        named = {"who": who, "seen_at": now}
        whole = named | {"age": ages[who]}
        whole |= {
            "history_times": [at for at, _ in events],
            "history_items": [what for _, what in events],
        }
        by_id, by_row = (
            scorer.score(ScoreRequest(user=user, items=items))
            for user in (named, whole)
        )
        assert by_id.scores == pytest.approx(by_row.scores, abs=1e-6)
        assert not by_id.unknown_user
        answer = scorer.recommend(RecommendRequest(user=named, k=ITEMS)).items
        assert set(answer) == {item for item in items if (who, item) not in clicked}
    for user, missing in (
        ({"who": "u1"}, r"user\.seen_at: it is missing; send a value"),
        ({"who": "stranger"}, r"user\.seen_at: it is missing; send a value"),
        (
            {"who": "stranger", "seen_at": now},
            r"history_items: .* so are history_times, age; .* or 'who' of a stored user",
        ),
    ):
        with pytest.raises(RequestError, match=missing):
            scorer.score(ScoreRequest(user=user, items=items))


def test_columns_become_towers_by_their_owners(folder: Path) -> None:
    data = load_set(DataConfig(name=str(folder)), "labels")
    assert data.towers == {
        "user": (("history", "user_id"), ("user_age",)),
        "context": (("seen_at_hour", "seen_at_weekday"), ()),
        "item": (("item_id", "item_tags"), ("item_price",)),
    }
    assert data.vocab == data.preprocessor.vocab
    model: Any = build_model(job_of(folder), Task(data))
    assert {
        name: [table.name for table in tower.tables]
        for name, tower in model.towers.items()
    } == {
        "user": ["item_id", "user_id"],
        "context": ["seen_at_hour", "seen_at_weekday"],
        "item": ["item_id", "item_tags"],
    }, "items and the history of items have one vocabulary, and one table"
    named = [
        "who=user_id,user_age,history",
        "when=seen_at_hour,seen_at_weekday",
        "what=item_id,item_tags,item_price",
    ]
    job = job_of(folder, *(f"model.towers.{text}" for text in named))
    towers: Any = build_model(job, Task(data))
    assert {name: list(tower.dense) for name, tower in towers.towers.items()} == {
        "who": ["user_age"],
        "when": [],
        "what": ["item_price"],
    }
    for text, told in (
        ("who=user_*", r"'user_\*' is no column"),
        ("when=seen_at_hour,user_age", "'user_age' is in 2 towers"),
        ("when=seen_at_hour", "'seen_at_weekday' is in 0 towers"),
    ):
        changed = dict(each.split("=") for each in [*named, text])
        wrong = job_of(folder, *(f"model.towers.{k}={v}" for k, v in changed.items()))
        with pytest.raises(ValueError, match=rf"model\.towers: {told}"):
            build_model(wrong, Task(data))


def test_the_catalogue_is_the_last_row_of_each_item(folder: Path) -> None:
    data = load_set(DataConfig(name=str(folder)), "labels")
    known, items = data.item_ids, data.items
    train = rows_of(folder, "train")
    ids = train["item_id"].values
    assert known.tolist() == sorted(set(ids[ids > 0].tolist()))
    for item in known.tolist():
        row = int(np.flatnonzero(ids == item)[-1])
        assert items["item_price"].values[item] == train["item_price"].values[row]
        assert (
            items["item_tags"].row(item).tolist()
            == train["item_tags"].row(row).tolist()
        )


@pytest.mark.slow
@pytest.mark.parametrize("new", ["film-7", "film-99"])
def test_a_run_is_not_resumed_or_exported_with_the_ids_of_another_preprocessor(
    new: str, folder: Path, log: Path, tmp_path: Path
) -> None:
    """A log that was preprocessed again has a larger vocabulary, or one of the same size in another order."""
    ready = shutil.copytree(folder, tmp_path / "ready")
    run, short = tmp_path / "run", ("train.epochs=1", "checkpoint.steps=7")
    run_training(job_of(ready, *short), run)
    again = shutil.copytree(log, tmp_path / "log")
    table = pq.read_table(log / "train.parquet")
    items = table["what"].to_pylist()
    items[::10] = [new] * len(items[::10])
    table = table.set_column(table.column_names.index("what"), "what", [items])
    pq.write_table(table, again / "train.parquet")
    job = dataclasses.replace(prepare(again), out=str(ready), overwrite=True)
    run_preprocess(job)
    step = sorted((run / "checkpoints").glob("step-*"))[0]
    moved = shutil.copytree(step, tmp_path / "moved" / step.name)
    attempts = [
        lambda: run_training(job_of(ready), run),
        lambda: export_run(saved_job(run), run, tmp_path / "bundle"),
    ]
    for start in (step, moved.parent, moved):
        begun = job_of(ready, f"start.path={start}", "start.partial=true")
        attempts.append(partial(run_training, begun, tmp_path / "begun"))
    words = r"step-\d+: column 'item_id' had 40 values .* stand for others"
    for attempt in attempts:
        with pytest.raises(DataError, match=words):
            attempt()


def test_a_ranking_leaves_out_what_its_users_clicked_before(folder: Path) -> None:
    """The place of a target among the others is that of a plain loop in tests/train/metrics."""
    data = load_set(DataConfig(name=str(folder), ranked=90), "labels")
    held_out = held_out_rows(data, "test")
    assert 45 <= held_out.num_rows <= 90, "evenly spread over all positives"
    assert held_out["clicked"].values.all()
    clicked = set()
    for split in ("train", "validation"):
        rows = rows_of(data.folder, split)
        names = ("user_id", "item_id", "clicked")
        columns = np.stack([rows[name].values for name in names])
        clicked |= set(map(tuple, columns[:2, columns.all(0)].T.astype(int).tolist()))
    users = held_out["user_id"].values
    asked = question_of(data, "test", held_out, [("hr", 10)]).question
    found = zip(users[asked.seen_rows], asked.seen_items.tolist(), strict=True)
    assert set(found) == {pair for pair in clicked if pair[0] in users}
    assert asked.targets.tolist() == held_out["item_id"].values.tolist()


def put(place: Path, name: str, *value: Any) -> None:
    """Sets a column of the first file of a folder, or of this file, to a value, or leaves it out."""
    file = next(place.glob("*.parquet")) if place.is_dir() else place
    table = pq.read_table(file).drop([name])
    for each in value:
        table = table.append_column(name, pa.array([each] * len(table)))
    pq.write_table(table, file)


def weightless(folder: Path) -> None:
    told = summary(folder)
    told["labels"]["train"]["total"] = 0.0
    (folder / "summary.json").write_text(json.dumps(told))


BROKEN: dict[str, tuple[Any, str]] = {
    "no summary": (
        lambda at: (at / "summary.json").unlink(),
        r"summary\.json: is missing or damaged .*No such file",
    ),
    "half a summary": (
        lambda at: (at / "summary.json").write_text('{"rows"'),
        r"summary\.json: is missing or damaged",
    ),
    "no test rows": (
        lambda at: shutil.rmtree(at / "test"),
        r"ready: has no split 'test' \(it has train, validation, test\)",
    ),
    **{
        f"no {name}": (
            lambda at, name=name: put(at / "test", name),
            f"column '{name}' is missing",
        )
        for name in ("item_tags", "clicked", "importance")
    },
    "another type": (
        lambda at: put(at / "train", "user_id", 0.5),
        "column 'user_id' is double, must be",
    ),
    "another vocabulary": (
        lambda at: put(at / "train", "item_id", 41),
        r"row 0, column 'item_id': id 41 is outside table 'item_id' \(0 to 40",
    ),
    "unknown items": (
        lambda at: put(at / "raw/items.parquet", "what", "of nobody"),
        "ready: column 'item_id' is 0, the unknown item, in all training rows",
    ),
    "no weight": (
        weightless,
        "column 'importance' is 0 in all rows of split 'train'",
    ),
    "no raw rows": (
        lambda at: shutil.rmtree(at / "raw"),
        r"ready: has no raw/items\.parquet, in which rec\.data\.preprocess keeps",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_not_a_preprocessed_folder_is_refused_by_name(
    fault: str, folder: Path, tmp_path: Path
) -> None:
    damage, message = BROKEN[fault]
    ready = shutil.copytree(folder, tmp_path / "ready")
    damage(ready)

    def read() -> None:
        task = Task(load_set(DataConfig(name=str(ready)), "labels"))
        assert task.data.positives("train")
        job = job_of(folder)
        schema = schema_of(job, task, build_model(job, task))
        list(task.loader(schema, job.loader, rank=0, world_size=1))
        task.export_data(schema)

    with pytest.raises(ValueError, match=message):
        read()


def test_a_log_without_a_label_is_told_so(log: Path, tmp_path: Path) -> None:
    unlabelled = prepare(log, keep=("importance",), label="")
    out = run_preprocess(dataclasses.replace(unlabelled, out=str(tmp_path / "ready")))
    with pytest.raises(
        DataError, match=r"ready: its rows have no label: .*it keeps importance"
    ):
        load_set(DataConfig(name=str(out)), "labels")
