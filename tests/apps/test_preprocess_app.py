"""`rec.data.preprocess`, from the component to the folder it leaves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.files import read_parquet, summary
from tests.small_sets import write_ml_100k
from torchrec_ext.data.preprocess import (
    Categorify,
    Cross,
    FittedPreprocessor,
    History,
    Normalize,
    Preprocessor,
)
from torchrec_ext.schema import DataError
from torchx_apps.jobs import preprocessing
from torchx_apps.preprocess import main
from torchx_apps.recipes.preprocess import Prepare, PreprocessJob

pytest.importorskip("duckdb", reason="needs the extra `data`")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--recipe", "ml_100"],
            "--recipe ml_100: there is no such recipe; did you mean 'ml_100k'? Built in: ml_100k, taobao",
        ),
        (
            ["--config.min_cuont", "1"],
            "did you mean --config.min_count?",
        ),
        (
            ["--recipe", "torchx_apps.recipes:two_tower"],
            "it returned a Job; here a recipe returns a PreprocessJob of torchx_apps",
        ),
        (["--recipe", "taobao"], "recipe taobao needs a log: --config.path UserBeh"),
        (
            ["--config.test_share", "2"],
            "config.test_share=2.0: must be between 0 and 1",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 1
    line = capsys.readouterr().err
    assert message in line
    assert "Traceback" not in line


def test_from_files_to_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ready"
    flags = ["--config.history_length=5", "--config.min_count=16", f"--out={out}"]
    flags.append(f"--config.folder={write_ml_100k(tmp_path)}/ml-100k")
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert re.search(r"item_id +│ BIGINT +│ 1 +│ 40 ", shown)
    assert re.search(r"test: 72 rows; unknown ids: .*item_id \d", shown)
    assert "720 rows in " in shown
    told = summary(out)
    assert told["rows"] == {"train": 648, "test": 72}
    assert told["dense"] == ["age"]
    made = read_parquet(out / "test/part-00000.parquet")
    unknown = np.mean(made["item_id"].values == 0)
    assert told["unknown"]["test"]["item_id"] == unknown > 0
    labels = told["labels"]["test"]
    assert labels["total"] == 72
    assert labels["positives"]["label"]["of_all"] == made["label"].values.sum()
    assert made["history"].lengths.max() == 5
    fitted = FittedPreprocessor.load(out / "preprocessor")
    assert fitted.vocab == told["vocab"]
    assert told["vocab"]["item_id"] == 1 + len(fitted.id_values["item_id"]) < 41
    first = pq.read_table(out / "raw/items.parquet").to_pylist()[0]
    assert (first["title"], first["release_year"], first["genres"]) == (
        "Mis\u00e9rables 1 (1995)",
        "1995",
        "Drama War",
    )
    assert main(flags) == 1
    assert "ready: there is something already; choose" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("user", "item", "message"),
    [
        ("user", "tags", r"item: 'tags' is list<item: int64>, and each row has one id"),
        ("price", "item", r"user: 'price' is double, and each row has one id there"),
        ("user", "pair", r"item: 'pair' is made of item, kind, and a catalogue names"),
        ("user", "item", ""),
    ],
)
def test_who_is_the_user_and_what_the_item_decides(
    user: str, item: str, message: str, tmp_path: Path
) -> None:
    row = np.arange(1_400)
    log = {"user": row // 7, "item": row % 300, "kind": row % 30, "hour": row % 7}
    log |= {"tags": [[1]] * len(row), "price": row / 2.0, "one": 0 * row}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    ids = ("user", "item", "kind", "tags", "hour", "one")
    steps = [
        Cross(columns=("item", "kind"), buckets=9, output="pair"),
        *[Categorify(column=name) for name in ids],
        Normalize(column="price"),
    ]

    def build(*_: Any) -> Prepare:
        return Prepare(
            preprocessor=Preprocessor(steps),
            splits={"train": tmp_path / "log.parquet"},
            user=user,
            item=item,
            item_features=("price",),
        )

    job = PreprocessJob(name="own", build=build, out=str(tmp_path / "out"))
    if message:
        with pytest.raises(DataError, match=message):
            preprocessing.run_preprocess(job)
        return
    preprocessing.run_preprocess(job)
    told = [re.findall(r"'(\w+)'", note) for note in summary(tmp_path / "out")["notes"]]
    assert told == [["pair", "kind"], ["kind", "kind"], ["price"]]


@pytest.mark.unit
@pytest.mark.parametrize("name", ["preprocessor", "../x", ""])
def test_splits_are_folders(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"splits has the name .*: must be letters, digits"
    ):
        Prepare(
            preprocessor=Preprocessor([Categorify(column="x")]),
            splits={name: "a.parquet"},
        )


def test_a_request_and_a_user_have_the_events_that_a_history_counts(
    tmp_path: Path,
) -> None:
    columns = {
        "user": [1, 1, 1, 1, 2, None],
        "item": [7, 8, 9, 5, 9, 9],
        "at": [10, 20, 30, 40, 15, 16],
    }
    pq.write_table(
        pa.table(columns | {"liked": [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]}),
        tmp_path / "log.parquet",
    )
    steps = [
        History(user="user", item="item", time="at", length=2),
        Categorify(column="item", also=("history",)),
        Categorify(column="user"),
    ]

    def build(config: Any, con: Any) -> Prepare:
        named = {"user": "user", "item": "item", "user_features": ("history",)}
        splits = {"train": str(tmp_path / "log.parquet")}
        return Prepare(
            preprocessor=Preprocessor(steps, keep=("liked",)),
            splits=splits,
            events=con.sql(f"FROM '{splits['train']}' WHERE liked > 0"),
            label="liked",
            **named,
        )

    job = PreprocessJob(name="mine", build=build, out=str(tmp_path / "ready"))
    raw = preprocessing.run_preprocess(job) / "raw"
    users = {
        row["user"]: (row["history_items"], row["history_times"])
        for row in pq.read_table(raw / "users.parquet").to_pylist()
    }
    assert users == {1: ([9, 5], [30, 40]), 2: ([], [])}
    popularity = pq.read_table(raw / "popularity.parquet")["count"].to_pylist()
    # Row 0 is the unknown item; 9, the most frequent one, has row 1.
    assert popularity == [0, 2, 1, 1, 0]
    requests = pq.read_table(raw / "requests.parquet").to_pylist()
    assert [row["history_items"] for row in requests] == [[], [7], [7], [7, 9], [], []]


def test_another_day_is_prepared_by_the_steps_of_the_first(tmp_path: Path) -> None:
    """Ids stand for the same values, a new value is unknown, and the numbers keep the first day's mean."""
    for day, items, prices in (
        ("monday", ["a", "a", "b"], [1.0, 2.0, 3.0]),
        ("tuesday", ["b", "c", "b"], [9.0, 9.0, 9.0]),
    ):
        rows = {"item": items, "price": prices, "y": [1.0, 0.0, 1.0]}
        pq.write_table(pa.table(rows), tmp_path / f"{day}.parquet")

    def build(day: str, con: Any) -> Prepare:
        steps: Any = Preprocessor(
            [Categorify(column="item"), Normalize(column="price")], keep=["y"]
        )
        if day == "tuesday":
            steps = FittedPreprocessor.load(tmp_path / "ready-monday/preprocessor")
        file = str(tmp_path / f"{day}.parquet")
        return Prepare(preprocessor=steps, splits={"train": file}, label="y")

    for day in ("monday", "tuesday"):
        out = tmp_path / f"ready-{day}"
        own = PreprocessJob(name="shop", build=build, config=day, out=str(out))
        preprocessing.run_preprocess(own)
    made = read_parquet(tmp_path / "ready-tuesday/train/part-00000.parquet")
    assert made["item"].values.tolist() == [2, 0, 2]
    assert made["price"].values[0] == pytest.approx(7 / np.std([1, 2, 3]), rel=1e-6)
    texts = [tmp_path / f"ready-{day}/preprocessor" for day in ("monday", "tuesday")]
    assert len({(text / "preprocessor.sha256").read_text() for text in texts}) == 1
