"""Files as they stand: ids of any kind stay what they are; what is preprocessed trains and serves."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.files import summary
from tests.settings import with_settings
from tests.small_sets import write_ml_100k
from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.sets import load_set
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.scorer import RecommendRequest, Scorer
from torchrec_ext.schema import DataError
from torchrec_ext.train.checkpoint.folder import CheckpointRanks, sealed
from torchx_apps import export, preprocess
from torchx_apps.jobs.preprocessing import run_preprocess
from torchx_apps.jobs.resuming import check_ids_stay, meaning_of_ids
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.recipes.preprocess import PreprocessJob
from torchx_apps.tasks.export_data import items_in

Ids = Callable[[Any], Any]
USERS, ITEMS = 40, 30


def in_order(values: Any) -> Any:
    return [f"id-{value:06}" for value in values]


def in_other_order(values: Any) -> Any:
    return [f"{value}"[::-1] + "x" for value in values]


def hashed(values: Any) -> list[int]:
    """Ids of 64 bits, half of them below 0, in no order."""
    numbers = np.random.default_rng(7).integers(-(2**63), 2**63 - 1, 1_000)
    return numbers[np.asarray(values, np.int64)].tolist()


def of_pairs(folder: Path, ids: Ids = list) -> Path:
    """A log with a column of the users; ``ids`` says how the ids are written."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(USERS), 8) * 3 + 5
    items = np.concatenate([rng.permutation(ITEMS)[:8] for _ in range(USERS)]) * 7
    columns = {
        "user_id": ids(users),
        "item_id": ids(items),
        "timestamp": np.arange(len(users)),
        "user_sex": [("m", "f")[user % 2] for user in users],
    }
    pq.write_table(pa.table(columns), folder / "inter.parquet")
    return folder


def run(recipe: str, folder: Path, out: Path, *overrides: str) -> None:
    sets = [
        f"data.name={folder.name}",
        f"data.folder={folder.parent}",
        "train.epochs=1",
        "device=cpu",
        "train.compile=off",
        *overrides,
    ]
    run_training(with_settings(load_recipe(recipe), sets), out)


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
    config = DataConfig(name=str(folder))
    task = SimpleNamespace(data=load_set(config))
    checkpoint = checkpoint_of(tmp_path, task)
    check_ids_stay(checkpoint, task, HERE)
    log = pq.read_table(folder / "inter.parquet")
    at = log.column_names.index("item_id")
    bought = pa.array([new, *log["item_id"].to_pylist()[1:]])
    pq.write_table(log.set_column(at, "item_id", [bought]), folder / "inter.parquet")
    grown = SimpleNamespace(data=load_set(config))
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


@pytest.mark.parametrize(
    ("before", "after", "same", "message"),
    [
        (
            shops({}),
            shops({"shop": ["a", "b"]}),
            shops({}),
            "'shop' had no numbering of its own in training",
        ),
        (
            shops({"shop": ["a", "b"]}),
            shops({}),
            shops({"shop": ["a", "b", "c"]}),
            "'shop' had 2 values in training",
        ),
        (
            shops({}, shop="a", gone="b"),
            shops({}, shop="other"),
            shops({}, shop="a", new="c"),
            "step-0000000001: column 'shop' came from other steps",
        ),
    ],
)
def test_a_column_may_not_be_numbered_or_made_otherwise_by_a_new_run(
    before: Any, after: Any, same: Any, message: str, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(tmp_path, before)
    check_ids_stay(checkpoint, same, HERE, later=True)
    with pytest.raises(DataError, match=message):
        check_ids_stay(checkpoint, after, HERE, later=True)


@pytest.mark.parametrize("ids", [in_other_order, hashed])
def test_rows_are_in_the_order_of_the_ids_and_name_the_same_users_and_items(
    ids: Ids, tmp_path: Path
) -> None:
    first, second = (
        load_set(DataConfig(name=str(of_pairs(tmp_path / name, how))))
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


@pytest.mark.filterwarnings("ignore:.*have an unknown user or item")
def test_the_label_decides_what_is_a_positive(ready: Path) -> None:
    from torchx_apps.tasks.loading import ranking_task

    data = ranking_task(DataConfig(name=ready.name, folder=str(ready.parent))).data
    for split in ("train", "test"):
        files = sorted((ready / split).glob("*.parquet"))
        rows = pq.read_table(files).filter(pc.field("label") > 0)
        if split == "train":
            known = (pc.field("user_id") > 0) & (pc.field("item_id") > 0)
            rows = rows.filter(known)
        for name in ("user_id", "item_id"):
            found = data.rows(split)[name].values.tolist()
            assert found == rows[name].to_pylist()
    raw = pq.read_table(ready / "raw/items.parquet")["item_id"].to_pylist()
    assert set(data.values_of("item_id")[data.item_ids].tolist()) <= set(raw)


@pytest.mark.parametrize(
    ("recipe", "roles", "message"),
    [
        ("session", {}, "have no column 'session' with the ids .*--recipe stream"),
        (
            "two_tower",
            {"user": None, "item": None},
            "the user's column is 'None', and this recipe ranks by 'user_id'; name such",
        ),
    ],
)
def test_a_folder_that_a_recipe_cannot_use_is_refused(
    recipe: str, roles: dict[str, Any], message: str, ready: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(ready, tmp_path / "copy")
    told = summary(folder)
    told["roles"] |= roles
    (folder / "summary.json").write_text(json.dumps(told))
    job = with_settings(load_recipe(recipe), [f"data.name={folder}"])
    with pytest.raises(ValueError, match=message):
        job.task(job.data)


@pytest.mark.slow
def test_a_csv_with_broken_lines_becomes_a_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    taken = {user: (10 + rng.permutation(30)[:9]).tolist() for user in range(1, 41)}
    lines = [
        f"{user},{item},4.5,{880_000_000 + 60 * place}"
        for user, items in taken.items()
        for place, item in enumerate(items)
    ]
    lines.insert(4, "7,a film,5")
    lines.insert(49, "8,12")
    log = tmp_path / "ratings.csv"
    log.write_text("\n".join(["userId,movieId,rating,timestamp", *lines, ""]))
    file = Path(__file__).parents[2] / "examples" / "csv_to_service.py"
    job = load_recipe(f"{file}:job", kind=PreprocessJob)
    config = dataclasses.replace(job.config, path=str(log))
    ready = tmp_path / "ready"
    run_preprocess(dataclasses.replace(job, config=config, out=str(ready)))
    assert "note: 2 broken lines are left out; " in capsys.readouterr().out
    run("two_tower", ready, tmp_path / "run", "export=require")
    asked = RecommendRequest(user={"user_id": 3, "timestamp": 880_009_000}, k=30)
    answer = Scorer(Bundle.load(tmp_path / "run" / "bundle")).recommend(asked)
    assert not set(answer.items) & set(taken[3]), "what the user took, also last"
    # New items come with a longer catalogue.
    items = pq.read_table(ready / "raw" / "items.parquet")
    longer = pa.concat_tables([items.slice(1), pa.table({"item_id": [500]})])
    pq.write_table(longer, tmp_path / "items.parquet")
    again = tmp_path / "again"
    flags = [f"--out={again}", f"--catalogue={tmp_path / 'items.parquet'}"]
    assert export.main([str(tmp_path / "run"), *flags]) == 0
    said = capsys.readouterr().out
    assert "1 of them new; 1 items of the training are not in it" in said
    with_new = Scorer(Bundle.load(again)).recommend(asked)
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
