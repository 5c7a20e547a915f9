"""Files as they stand: ids of any kind, dates and missing values train and serve, and so does what is preprocessed."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.settings import with_settings
from tests.small_sets import write_ml_100k
from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.sets import load_dataset
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.scorer import (
    RecommendRequest,
    RequestError,
    Scorer,
)
from torchrec_ext.retrieval.store import StoredUsers
from torchrec_ext.schema import DataError
from torchrec_ext.train.checkpoint.folder import CheckpointRanks, sealed
from torchx_apps import embed, export, preprocess
from torchx_apps.jobs.preprocessing import run_preprocess
from torchx_apps.jobs.resuming import check_ids_stay, meaning_of_ids
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_job, load_recipe
from torchx_apps.tasks.export_data import items_in

Ids = Callable[[Any], Any]
USERS, ITEMS = 40, 30
DAYS = [datetime.date(2024, 1, 1 + day) for day in range(28)]


def in_order(values: Any) -> Any:
    return [f"id-{value:06}" for value in values]


def in_other_order(values: Any) -> Any:
    return [f"{value}"[::-1] + "x" for value in values]


def hashed(values: Any) -> list[int]:
    """Ids of 64 bits, half of them below 0, in no order."""
    numbers = np.random.default_rng(7).integers(-(2**63), 2**63 - 1, 1_000)
    return numbers[np.asarray(values, np.int64)].tolist()


def of_pairs(folder: Path, ids: Ids = list) -> Path:
    """A log with features of both, dates and missing values; ``ids`` says how the ids are written."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(USERS), 8) * 3 + 5
    items = np.concatenate([rng.permutation(ITEMS)[:8] for _ in range(USERS)]) * 7
    rows = len(users)
    price: list[float | None] = rng.random(rows).tolist()
    device: list[str | None] = rng.choice(["tv", "pc", "phone"], rows).tolist()
    price[::5], device[::4] = [None] * len(price[::5]), [None] * len(device[::4])
    when = [datetime.datetime(2024, 1, 1 + day, day % 24) for day in range(8)] * USERS
    log = {
        "user_id": ids(users),
        "item_id": ids(items),
        "timestamp": when,
        "day": [moment.date() for moment in when],
        "seen": [f"{moment:%Y-%m-%dT%H:%M}" for moment in when],
        "device": device,
        "price": price,
    }
    pq.write_table(pa.table(log), folder / "inter.parquet")
    known = np.unique(users)
    born = [DAYS[user % 28] if user % 3 else None for user in known]
    sex = [["m", "f", None][user % 3] for user in known]
    pq.write_table(
        pa.table({"user_id": ids(known), "sex": sex, "born": born}),
        folder / "users.parquet",
    )
    described = np.unique(items)
    genres = [["a|b", "a", None][item % 3] for item in described]
    table = {
        "item_id": ids(described),
        "genres": genres,
        "title": [f"film {item}" for item in described],
    }
    pq.write_table(pa.table(table), folder / "items.parquet")
    return folder


def run(recipe: str, folder: Path, out: Path, *overrides: str) -> dict[str, float]:
    sets = [
        f"data.name={folder.name}",
        f"data.folder={folder.parent}",
        "train.epochs=1",
        "device=cpu",
        "train.compile=off",
        *overrides,
    ]
    run_training(with_settings(load_recipe(recipe), sets), out)
    figures: dict[str, float] = json.loads((out / "summary.json").read_text())["test"]
    return figures


HERE = CheckpointRanks(Runtime())


def checkpoint_of(folder: Path, task: Any, **content: Any) -> str:
    """Writes a checkpoint's manifest that says what ids stand for."""
    checkpoint = folder / "ckpt" / "step-0000000001"
    checkpoint.mkdir(parents=True, exist_ok=True)
    content = content or {"ids": meaning_of_ids(task)}
    rest: dict[str, Any] = {"paths": {}, "tensors": {}, "files": {}}
    (checkpoint / "manifest.json").write_bytes(
        sealed({"step": 1, "world_size": 1, **rest, "content": content})
    )
    return str(checkpoint)


@pytest.mark.parametrize(("new", "kept"), [("zz-new", True), ("aa-new", False)])
def test_a_run_is_taken_up_only_where_its_ids_stand_for_the_same_values(
    new: str, kept: bool, tmp_path: Path
) -> None:
    """A new item after the old ones in the order of the ids leaves their rows alone; one before them moves all."""
    folder = of_pairs(tmp_path / "log", in_order)
    sets = {"name": "log", "folder": str(tmp_path)}
    task = SimpleNamespace(data=load_dataset(**sets))
    checkpoint = checkpoint_of(tmp_path, task)
    check_ids_stay(checkpoint, task, HERE)
    log = pq.read_table(folder / "inter.parquet")
    items = pq.read_table(folder / "items.parquet")
    pq.write_table(
        pa.concat_tables([items, items.slice(0, 1).set_column(0, "item_id", [[new]])]),
        folder / "items.parquet",
    )
    at = log.column_names.index("item_id")
    bought = pa.array([new, *log["item_id"].to_pylist()[1:]])
    pq.write_table(log.set_column(at, "item_id", [bought]), folder / "inter.parquet")
    grown = SimpleNamespace(data=load_dataset(**sets))
    words = (
        r"column 'item_id' had \d+ values in training, whose ids now stand for others"
    )
    with pytest.raises(DataError, match=words):
        check_ids_stay(checkpoint, grown, HERE)
    with nullcontext() if kept else pytest.raises(DataError, match=words):
        check_ids_stay(checkpoint, grown, HERE, later=True)


def shops(values: dict[str, list[str]], **origins: str) -> Any:
    """A task whose rows have the column ``shop``, which comes from some steps."""
    data = SimpleNamespace(
        vocab={"shop": 3},
        id_values=values,
        preprocessor=SimpleNamespace(origins=origins),
    )
    return SimpleNamespace(data=data)


def test_a_column_whose_values_were_their_ids_may_not_be_numbered_later(
    tmp_path: Path,
) -> None:
    whole, numbered = (shops(values) for values in ({}, {"shop": ["a", "b"]}))
    for before, after in ((whole, numbered), (numbered, whole)):
        checkpoint = checkpoint_of(tmp_path, before)
        check_ids_stay(checkpoint, before, HERE, later=True)
        with pytest.raises(
            DataError,
            match=r"column 'shop' had (no numbering of its own|2 values) in training",
        ):
            check_ids_stay(checkpoint, after, HERE, later=True)


def test_a_column_whose_steps_have_changed_is_refused_by_a_new_run_too(
    tmp_path: Path,
) -> None:
    checkpoint = checkpoint_of(tmp_path, shops({}, shop="a", gone="b"))
    check_ids_stay(checkpoint, shops({}, shop="a", new="c"), HERE, later=True)
    for later in (False, True):
        with pytest.raises(
            DataError, match=r"step-0000000001: column 'shop' came from other steps"
        ):
            check_ids_stay(checkpoint, shops({}, shop="other"), HERE, later=later)


@pytest.mark.parametrize("ids", [in_order, in_other_order, hashed])
def test_rows_are_in_the_order_of_the_ids_and_name_the_same_users_and_items(
    ids: Ids, tmp_path: Path
) -> None:
    first, second = (
        load_dataset("log", folder=str(of_pairs(tmp_path / name / "log", how).parent))
        for name, how in (("a", list), ("b", ids))
    )
    users = second.values_of("user_id")[1:].tolist()
    assert users == sorted(users), "rows are in the order of the ids"
    assert second.num_items == first.num_items
    for split in ("train", "validation", "test"):
        pairs = []
        for data, how in ((first, ids), (second, list)):
            rows = data.rows(split)
            known = rows["item_id"].values > 0
            asked = data.values_of("user_id")[rows["user_id"].values[known]]
            items = data.values_of("item_id")[rows["item_id"].values[known]]
            pairs.append(sorted(zip(list(how(asked)), list(how(items)), strict=True)))
        assert pairs[0]
        assert pairs[0] == pairs[1]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What rec.data.preprocess makes of ratings; rare items are unknown."""
    pytest.importorskip("duckdb", reason="needs the extra `data`")
    root = tmp_path_factory.mktemp("prepared")
    write_ml_100k(root / "raw")
    sets = [
        f"--config.folder={root / 'raw' / 'ml-100k'}",
        "--config.min_count=12",
    ]
    assert preprocess.main(["--recipe=ml_100k", *sets, f"--out={root / 'ready'}"]) == 0
    return root / "ready"


@pytest.mark.parametrize(
    "recipe",
    [
        "two_tower",
        *(
            pytest.param(recipe, marks=pytest.mark.slow)
            for recipe in ("contextual_ncf", "ncf", "n_tower")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*have an unknown user or item")
def test_what_the_preprocessing_writes_is_read_and_served_by_raw_rows(
    recipe: str, ready: Path, tmp_path: Path
) -> None:
    run(recipe, ready, tmp_path / "run", "export=require", "train.early_stop.metric=")
    bundle = Bundle.load(tmp_path / "run/bundle")
    items = pq.read_table(ready / "raw/items.parquet")["item_id"].to_pylist()
    served = bundle.items.ids.arrow().to_pylist()
    assert set(served) < set(items), "the log's ids, without the rare ones"
    (row,) = pq.read_table(ready / "raw/requests.parquet").slice(0, 1).to_pylist()
    asked = {
        name: value for name, value in row.items() if name in bundle.query.columns.raw
    }
    answer = Scorer(bundle).recommend(RecommendRequest(user=asked, k=5))
    assert len(answer.items) == 5
    assert all(np.isfinite(answer.scores))


@pytest.mark.filterwarnings("ignore:.*have an unknown user or item")
def test_the_label_decides_what_is_a_positive(ready: Path) -> None:
    from torchx_apps.tasks.loading import ranking_task

    data = ranking_task(DataConfig(name=ready.name, folder=str(ready.parent))).data
    rows = pq.read_table(sorted((ready / "train").glob("*.parquet"))).to_pydict()
    pairs = zip(rows["user_id"], rows["item_id"], rows["label"], strict=True)
    wanted = [(user, item) for user, item, label in pairs if label and user and item]
    assert (
        list(
            zip(
                data.rows("train")["user_id"].values,
                data.rows("train")["item_id"].values,
                strict=True,
            )
        )
        == wanted
    )
    test = pq.read_table(sorted((ready / "test").glob("*.parquet"))).to_pydict()
    held_out = [
        item
        for item, label in zip(test["item_id"], test["label"], strict=True)
        if label
    ]
    assert data.rows("test")["item_id"].values.tolist() == held_out
    raw = pq.read_table(ready / "raw/items.parquet")["item_id"].to_pylist()
    assert set(data.values_of("item_id")[data.item_ids].tolist()) <= set(raw)


@pytest.mark.parametrize(
    ("recipe", "broken", "message"),
    [
        (
            "session",
            "",
            r"its rows have no column 'session' with the ids .*--recipe stream",
        ),
        (
            "two_tower",
            "roles",
            r"names no user or no item; set .*, or take --recipe stream",
        ),
        (
            "two_tower",
            "user",
            r"the user's column is 'gender', and this recipe reads 'user_id'; write output='u",
        ),
    ],
)
def test_a_folder_that_a_recipe_cannot_use_is_refused(
    recipe: str, broken: str, message: str, ready: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(ready, tmp_path / "copy")
    summary = json.loads((folder / "summary.json").read_text())
    roles = {"roles": {"user": None, "item": None}, "user": {"user": "gender"}}
    summary["roles"] |= roles.get(broken, {})
    (folder / "summary.json").write_text(json.dumps(summary))
    job = with_settings(load_recipe(recipe), [f"data.name={folder}"])
    with pytest.raises(ValueError, match=message):
        job.task(job.data)


@pytest.mark.slow
def test_a_csv_with_broken_lines_becomes_a_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    lines = ["userId,movieId,rating,timestamp"]
    taken: dict[int, list[int]] = {}
    for user in range(1, 41):
        taken[user] = (10 + rng.permutation(30)[:9]).tolist()
        lines += [
            f"{user},{item},4.5,{880_000_000 + 60 * place}"
            for place, item in enumerate(taken[user])
        ]
    lines.insert(5, "7,a film,5,880000000")
    lines.insert(50, "8,12")
    lines.insert(90, "9,13,4,yesterday")
    log = tmp_path / "ratings.csv"
    log.write_text("\n".join(lines) + "\n")
    file = Path(__file__).parents[2] / "examples" / "csv_to_service.py"
    job = load_job(f"{file}:job")
    config = dataclasses.replace(job.config, path=str(log))
    ready = tmp_path / "ready"
    run_preprocess(dataclasses.replace(job, config=config, out=str(ready)))
    said = capsys.readouterr().out
    assert "note: 3 broken lines are left out; " in said
    assert "ratings.csv: line 6: " in said
    assert "train: 280 rows" in said
    run("two_tower", ready, tmp_path / "run", "export=require")
    scorer = Scorer(Bundle.load(tmp_path / "run" / "bundle"))
    answer = scorer.recommend(
        RecommendRequest(user={"user_id": 3, "timestamp": 880_009_000}, k=30)
    )
    assert not set(answer.items) & set(taken[3]), "what the user took, also last"
    by_id = scorer.recommend(RecommendRequest(user={"user_id": 3}, k=30))
    assert (by_id.items, by_id.scores) == (answer.items, answer.scores)
    nobody = scorer.recommend(RecommendRequest(user={"user_id": 99}, k=1))
    assert nobody.unknown_user
    with pytest.raises(
        RequestError, match=r"history_items.*send these, or 'user_id' alone"
    ):
        scorer.recommend(RecommendRequest(user={"user_id": 99, "timestamp": 9}, k=1))

    # Users of the log are stored; new items come with a longer catalogue.
    store = tmp_path / "users"
    bundle = str(tmp_path / "run" / "bundle")
    assert embed.main([bundle, "--tower", "query", "--out", str(store)]) == 0
    stored = Scorer(Bundle.load(bundle), vectors=StoredUsers(store))
    from_store = stored.recommend(RecommendRequest(user={"user_id": 3}, k=30))
    assert (from_store.vector, from_store.items) == ("store", answer.items)
    items = pq.read_table(ready / "raw" / "items.parquet")
    longer = tmp_path / "items.parquet"
    pq.write_table(
        pa.concat_tables([items.slice(1), pa.table({"item_id": [500]})]), longer
    )
    again = tmp_path / "again"
    flags = [str(tmp_path / "run"), "--out", str(again), "--catalogue", str(longer)]
    capsys.readouterr()
    assert export.main(flags) == 0
    said = capsys.readouterr().out
    assert "1 of them new; 1 items of the training are not in it" in said
    assert "train with --id_dropout.item_id" in said
    with_new = Scorer(Bundle.load(again)).recommend(
        RecommendRequest(user={"user_id": 3}, k=30)
    )
    gone = items["item_id"][0].as_py()
    scores = dict(zip(with_new.items, with_new.scores, strict=True))
    assert 500 in scores
    assert gone not in scores
    for item, score in zip(answer.items, answer.scores, strict=True):
        assert item == gone or scores[item] == pytest.approx(score, abs=1e-6)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"other": [1]}, "column 'item_id' is missing, the file has"),
        ({"item_id": ["a"]}, "column 'item_id' is string, was int64 in training"),
        ({"item_id": [1, None]}, "row 1 has no 'item_id'"),
    ],
)
def test_a_catalogue_without_the_training_s_columns_is_refused(
    tmp_path: Path, columns: dict[str, list[Any]], message: str
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "items.parquet")
    raw = pa.table({"item_id": pa.array([1, 2])})
    with pytest.raises(DataError, match=message):
        items_in([str(tmp_path / "items.parquet")], raw, "item_id")
