"""A request's raw rows become what the rows of the training files became, by the preprocessor in the bundle alone."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.data.preprocess import (
    Categorify,
    FittedPreprocessor,
    History,
    Normalize,
    Preprocessor,
    TimeFeatures,
)
from torchrec_ext.data.preprocess.rows import connected
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.catalogue import Catalogue
from torchrec_ext.retrieval.export import export
from torchrec_ext.retrieval.scorer import RequestError, Scorer, ScoreRequest
from torchrec_ext.schema import DataError, Jagged

pytest.importorskip("duckdb", reason="needs the extra `data`")

ROWS, ITEMS = 60, 12
BEGIN = datetime.datetime(1997, 11, 20, tzinfo=datetime.timezone.utc)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("log") / "log.parquet"
    hours = [BEGIN + datetime.timedelta(hours=7 * row) for row in range(ROWS)]
    columns = {
        "user": [f"u{number}" for number in rng.integers(0, 8, ROWS)],
        "item": rng.integers(100, 100 + ITEMS, ROWS),
        "time": pa.array(hours, pa.timestamp("us", "UTC")),
        "age": rng.integers(20, 60, ROWS).astype(np.float32),
        "label": np.ones(ROWS, np.float32),
    }
    pq.write_table(pa.table(columns), file)
    return file


@pytest.fixture(scope="module")
def fitted(log: Path) -> FittedPreprocessor:
    steps = [
        History(user="user", item="item", time="time", length=3),
        Categorify(column="item", also=("history",)),
        TimeFeatures(column="time", zone="Europe/Berlin", features=("weekday",)),
        Normalize(column="age"),
        Categorify(column="user"),
    ]
    return Preprocessor(steps, keep=["label"]).fit(str(log))


def model_of(fitted: FittedPreprocessor) -> TowerModel:
    def table(name: str) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name,
            feature_names=[name],
            num_embeddings=fitted.vocab[name],
            embedding_dim=4,
            pooling=PoolingType.MEAN,
        )

    torch.manual_seed(0)
    users = [table("user"), table("history"), table("time_weekday")]
    return two_tower(users, [table("item")], user_dense=["age"], tower_widths=(6,))


def requests(log: Path) -> list[dict[str, Any]]:
    """What is known when each row of the log comes in, as JSON says it."""
    rows = pq.read_table(log).to_pylist()
    made = []
    for number, row in enumerate(rows):
        before = [each for each in rows[:number] if each["user"] == row["user"]]
        made.append(
            {
                "user": row["user"],
                "time": row["time"].isoformat(),
                "age": row["age"],
                "history_items": [each["item"] for each in before],
                "history_times": [each["time"].isoformat() for each in before],
            }
        )
    return made


def queries(log: Path) -> pa.Table:
    rows = requests(log)
    stamp = datetime.datetime.fromisoformat
    for row in rows:
        row["time"] = stamp(row["time"])
        row["history_times"] = [stamp(each) for each in row["history_times"]]
    time = pa.timestamp("us", "UTC")
    schema = {
        "user": pa.string(),
        "time": time,
        "age": pa.float32(),
        "history_items": pa.list_(pa.int64()),
        "history_times": pa.list_(time),
    }
    return pa.Table.from_pylist(rows, schema=pa.schema(schema))


@pytest.fixture(scope="module")
def bundle(
    fitted: FittedPreprocessor, log: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    ids = np.unique(pq.read_table(log)["item"].to_numpy())
    export(
        model_of(fitted),
        folder,
        catalogue=Catalogue(ids=ids, features=pa.table({"item": ids})),
        queries=queries(log),
        preprocessor=fitted,
    )
    return Bundle.load(folder)


def test_a_request_scores_as_the_row_of_the_file(
    bundle: Bundle, fitted: FittedPreprocessor, log: Path, tmp_path: Path
) -> None:
    with connected() as con:
        rows = con.sql(f"SELECT * FROM '{log}' ORDER BY time")
        fitted.transform(rows, tmp_path / "ready", con=con)
    made = pq.read_table(tmp_path / "ready").to_pydict()
    model = model_of(fitted).eval()
    lengths = torch.tensor([len(history) for history in made["history"]])
    every = [item for items in made["history"] for item in items]
    ids = {
        name: Jagged(torch.tensor(made[name]))
        for name in ("user", "time_weekday", "item")
    } | {"history": Jagged(torch.tensor(every, dtype=torch.int64), lengths)}
    batch = model.schema().assemble(
        ids, {"age": torch.tensor(made["age"])}, labels=torch.ones(ROWS)
    )
    with torch.no_grad():
        expected = model.logits(batch).tolist()
    scorer = Scorer(bundle)
    items = pq.read_table(log)["item"].to_pylist()
    for user, item, logit in zip(requests(log), items, expected, strict=True):
        (score,) = scorer.score(ScoreRequest(user=user, items=[item])).scores
        assert score == pytest.approx(logit, rel=1e-4, abs=1e-5)


def test_errors_name_the_requests_own_column(bundle: Bundle, log: Path) -> None:
    user = requests(log)[-1]
    scorer = Scorer(bundle)
    for change, what in (
        ({"age": None}, "column 'age'"),
        ({"time": "yesterday"}, "column 'time', row 0"),
        ({"history_items": ["x"]}, "column 'history_items'"),
        ({"agee": 1}, "reads no such column"),
    ):
        with pytest.raises((RequestError, DataError)) as caught:
            scorer.score(ScoreRequest(user={**user, **change}, items=[100]))
        assert what in str(caught.value)
    for column in user:
        rest = {name: value for name, value in user.items() if name != column}
        with pytest.raises(RequestError, match=column):
            scorer.score(ScoreRequest(user=rest, items=[100]))


def test_unknown_values_are_flagged(bundle: Bundle, log: Path) -> None:
    user = {**requests(log)[-1], "user": "nobody", "history_items": [999_999]}
    user["history_times"] = user["history_times"][:1]
    answer = Scorer(bundle).score(ScoreRequest(user=user, items=[100]))
    assert sorted(answer.unknown_features) == ["history", "user"]
