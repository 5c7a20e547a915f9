"""From a raw log to a served model: preprocess -> train the recipe stream -> bundle, whose requests are raw rows."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.contracts import RankFailedError, leave_group, run_ranks
from tests.files import read_parquet
from tests.settings import with_settings
from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.prepared import Prepared, load_prepared
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
from torchrec_ext.train import metrics
from torchx_apps.jobs.preprocessing import run_preprocess
from torchx_apps.jobs.setup import build_model, load_task
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.recipes.preprocess import Prepare, PreprocessJob
from torchx_apps.tasks.evaluator import held_out_rows, question_of
from torchx_apps.tasks.job import Job, schema_of
from torchx_apps.tasks.task import Task

pytest.importorskip("duckdb", reason="needs the extra `data`")

ROWS, USERS, ITEMS = 6_000, 60, 40
SMALL = (
    *(
        "train.epochs=6",
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
        FillMissing(column="age", statistic="median"),
        Normalize(column="age", output="user_age"),
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
        user_features=("history", "age"),
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
    return Run(
        output.getvalue(), json.loads((out / "summary.json").read_text())["test"]
    )


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    out = folder.parent / "run"
    (run,) = run_ranks(ran, 1, job_of(folder, "export=require"), out)
    assert run.figures["auc"] > 0.8, run.output
    data = load_prepared(DataConfig(name=str(folder)))
    rows = held_out_rows(data, "test").num_rows
    repeats = json.loads((out / "summary.json").read_text())["repeats"]
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
    with pytest.raises(
        RequestError, match=r"user\.seen_at: it is missing; the model reads"
    ):
        scorer.score(ScoreRequest(user={"who": "u1"}, items=items))
    with pytest.raises(
        RequestError, match=r"of which missing: history_items, history_times, age"
    ):
        scorer.score(
            ScoreRequest(user={"who": "stranger", "seen_at": now}, items=items)
        )


def test_columns_become_towers_by_their_owners(folder: Path) -> None:
    data = load_prepared(DataConfig(name=str(folder)))
    assert data.towers == {
        "user": (("history", "user_id"), ("age", "user_age")),
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
    named = ["who=user_*,history,age", "when=seen_*", "what=item_*"]
    job = job_of(folder, *(f"model.towers.{text}" for text in named))
    towers: Any = build_model(job, Task(data))
    assert {name: list(tower.dense) for name, tower in towers.towers.items()} == {
        "who": ["age", "user_age"],
        "when": [],
        "what": ["item_price"],
    }


def test_the_catalogue_is_the_last_row_of_each_item(folder: Path) -> None:
    data = load_prepared(DataConfig(name=str(folder)))
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


@pytest.mark.parametrize(
    "recipe", ["stream", "multi_task", "n_tower", "two_tower", "session"]
)
def test_the_figures_that_may_be_watched_are_those_of_the_validation(
    recipe: str,
) -> None:
    (names,) = run_ranks(figures_of, 1, recipe)
    assert names[0] == names[1]


def figures_of(runtime: Runtime, recipe: str) -> tuple[list[str], list[str]]:
    """Returns the names that an evaluator promises, and those that it gives."""
    small = (
        ["data.users=60", "data.items=50"] if recipe in ("two_tower", "session") else []
    )
    job = with_settings(load_recipe(recipe), ["data.name=planted", *small])
    task = load_task(job, runtime)
    model = build_model(job, task)
    schema = schema_of(job, task, model)
    parallel, _ = hybrid_parallel(model, runtime, optimizer=job.optimizer)
    parallel.eval()
    evaluator: Any = task.evaluator(schema, parallel, runtime)
    return sorted(evaluator.validated), sorted(evaluator.validate())


def test_a_run_that_was_stopped_in_mid_epoch_goes_on_as_if_it_had_not(
    folder: Path, tmp_path: Path
) -> None:
    saving = ("checkpoint.steps=7", "train.epochs=1")
    run_ranks(ran, 2, job_of(folder, *saving), tmp_path / "whole")
    steps = sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))
    assert len(steps) > 2
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "whole", resumed)
    for newer in steps[1:]:
        shutil.rmtree(resumed / "checkpoints" / newer.name)
    run_ranks(ran, 2, job_of(folder, *saving), resumed)
    whole, again = (
        json.loads((path / "summary.json").read_text())["test"]
        for path in (tmp_path / "whole", resumed)
    )
    assert whole == again


@pytest.mark.slow
def test_a_run_is_not_resumed_or_exported_with_the_ids_of_another_preprocessor(
    folder: Path, log: Path, tmp_path: Path
) -> None:
    """A log that was preprocessed again has a larger vocabulary, or one of the same size in another order."""
    ready = tmp_path / "ready"
    shutil.copytree(folder, ready)
    run_ranks(
        ran, 1, job_of(ready, "train.epochs=1", "checkpoint.steps=7"), tmp_path / "run"
    )
    step = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[0]
    (tmp_path / "log").mkdir()
    for split in ("train", "validation", "test"):
        shutil.copy(log / f"{split}.parquet", tmp_path / "log")
    for new in ("film-7", "film-99"):
        table = pq.read_table(log / "train.parquet")
        items = [
            new if index % 10 == 0 else name
            for index, name in enumerate(table["what"].to_pylist())
        ]
        named = table.set_column(
            table.column_names.index("what"), "what", [pa.array(items)]
        )
        pq.write_table(named, tmp_path / "log" / "train.parquet")
        run_preprocess(
            dataclasses.replace(
                prepare(tmp_path / "log"), out=str(ready), overwrite=True
            )
        )
        words = r"step-\d+: column 'item_id' had 40 values .* stand for others"
        with pytest.raises(RankFailedError, match=words):
            run_ranks(ran, 1, job_of(ready), tmp_path / "run")
        with pytest.raises(RankFailedError, match=words):
            run_ranks(exported, 1, tmp_path / "run", tmp_path / "bundle")
    shutil.copytree(step, tmp_path / "moved" / step.name)
    for number, copied in enumerate(
        (step, tmp_path / "moved", tmp_path / "moved" / step.name)
    ):
        start = ("train.epochs=1", f"start.path={copied}", "start.partial=true")
        with pytest.raises(
            RankFailedError,
            match=r"step-\d+: column 'item_id' had 40 values .* stand for others",
        ):
            run_ranks(ran, 1, job_of(ready, *start), tmp_path / f"begun-{number}")


def exported(runtime: Runtime, run: Path, out: Path) -> None:
    from torchx_apps.jobs.exporting import export_run
    from torchx_apps.recipes.saved_job import saved_job

    leave_group(runtime)
    export_run(saved_job(run), run, out)


def brute_force(data: Prepared, held_out: Chunk, scores: np.ndarray[Any, Any]) -> float:
    """HR@10 of held-out rows by hand: the items that the user clicked before are left out, and missed."""
    pairs = set()
    for split in ("train", "validation"):
        rows = rows_of(data.folder, split)
        columns = (rows[name].values for name in ("user_id", "item_id", "clicked"))
        pairs |= {
            (user, item)
            for user, item, label in zip(*columns, strict=True)
            if label and user
        }
    known = set(data.item_ids.tolist())
    hits = 0
    for row, (user, target) in enumerate(
        zip(held_out["user_id"].values, held_out["item_id"].values, strict=True)
    ):
        rivals = [
            item for item in known if item != target and (user, item) not in pairs
        ]
        better = sum(scores[row, item] > scores[row, target] for item in rivals)
        # What the user has clicked before is not ranked, so it is missed.
        hits += better < 10 and (user, target) not in pairs
    return hits / held_out.num_rows


def test_the_ranking_is_what_a_count_by_hand_gives(folder: Path) -> None:
    data = load_prepared(DataConfig(name=str(folder), ranked=90))
    held_out = held_out_rows(data, "test")
    assert 45 <= held_out.num_rows <= 90, "evenly spread over all positives"
    assert held_out["clicked"].values.all()
    scores = np.random.default_rng(0).normal(
        size=(held_out.num_rows, data.vocab["item_id"])
    )
    question = question_of(data, "test", held_out, [("hr", 10)]).question
    hits = question.hits(question.gains(torch.from_numpy(scores.copy()), 0, 10))
    assert metrics.ranking_metrics(hits)["hr@10"] == pytest.approx(
        brute_force(data, held_out, scores)
    )


def test_rows_of_another_vocabulary_and_rows_without_weight_are_named(
    folder: Path, tmp_path: Path
) -> None:
    other = broken(folder, tmp_path / "other")
    part = next((other / "train").glob("*.parquet"))
    table = pq.read_table(part)
    index = table.column_names.index("item_id")
    pq.write_table(table.set_column(index, "item_id", [np.full(len(table), 41)]), part)
    data = load_prepared(DataConfig(name=str(other)))
    job = job_of(folder)
    schema = schema_of(job, Task(data), build_model(job, Task(data)))
    with pytest.raises(
        DataError,
        match=r"row 0, column 'item_id': id 41 is outside table 'item_id' \(0 to 40",
    ):
        list(Task(data).loader(schema, job.loader, rank=0, world_size=1))
    items = pq.read_table(other / "raw/items.parquet")
    unknown = pa.array(["of nobody"] * len(items))
    index = items.column_names.index("what")
    pq.write_table(
        items.set_column(index, "what", unknown), other / "raw/items.parquet"
    )
    with pytest.raises(
        DataError,
        match=r"other: column 'item_id' is 0, the unknown item, in all training rows",
    ):
        assert load_prepared(DataConfig(name=str(other))).items
    summary = json.loads((other / "summary.json").read_text())
    summary["labels"]["train"]["total"] = 0.0
    (other / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(
        DataError, match=r"column 'importance' is 0 in all 4,800 rows of split 'train'"
    ):
        assert load_prepared(DataConfig(name=str(other))).positives


def broken(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out)
    return out


def test_what_is_not_a_preprocessed_folder_is_refused_by_name(
    folder: Path, tmp_path: Path
) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(DataError) as raised:
            load_prepared(DataConfig(name=str(path)))
        return str(raised.value)

    (tmp_path / "logs").mkdir()
    assert (
        "logs: has no summary.json, so rec.data.preprocess did not write it"
        in refusal(tmp_path / "logs")
    )
    shutil.rmtree(broken(folder, tmp_path / "untested") / "test")
    assert "untested: has no split 'test' (it has train, validation, test)" in refusal(
        tmp_path / "untested"
    )
    part = next((broken(folder, tmp_path / "changed") / "test").glob("*.parquet"))
    pq.write_table(pq.read_table(part).drop(["item_tags"]), part)
    assert "column 'item_tags' is missing" in refusal(tmp_path / "changed")
    for name in ("clicked", "importance"):
        part = next(
            (broken(folder, tmp_path / f"without-{name}") / "test").glob("*.parquet")
        )
        pq.write_table(pq.read_table(part).drop([name]), part)
        assert f"column '{name}' is missing" in refusal(tmp_path / f"without-{name}")
    part = next((broken(folder, tmp_path / "typed") / "train").glob("*.parquet"))
    table = pq.read_table(part)
    pq.write_table(
        table.set_column(0, table.column_names[0], [[0.5] * len(table)]), part
    )
    assert f"column '{table.column_names[0]}' is double, must be" in refusal(
        tmp_path / "typed"
    )
    (broken(folder, tmp_path / "cut") / "summary.json").write_text('{"rows"')
    assert "summary.json: is damaged" in refusal(tmp_path / "cut")


def test_a_log_without_a_label_or_without_items_is_told_so(
    log: Path, folder: Path, tmp_path: Path
) -> None:
    run_preprocess(
        dataclasses.replace(
            prepare(log, keep=("importance",)), out=str(tmp_path / "unlabelled")
        )
    )
    with pytest.raises(
        DataError, match=r"unlabelled: its rows have no label: .*it keeps importance"
    ):
        load_prepared(DataConfig(name=str(tmp_path / "unlabelled")))
    with pytest.raises(
        ValueError,
        match=r"Prepare\.item: no step writes 'what_id'; the steps write ",
    ):
        prepare(log, item="what_id")
    older = broken(folder, tmp_path / "older")
    shutil.rmtree(older / "raw")
    data = load_prepared(DataConfig(name=str(older)))
    job = job_of(folder)
    schema = schema_of(job, Task(data), build_model(job, Task(data)))
    with pytest.raises(
        ValueError,
        match=r"older: has no raw/items\.parquet, in which rec\.data\.preprocess keeps",
    ):
        Task(data).export_data(schema)
