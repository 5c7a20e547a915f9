"""A request's raw rows become what the rows of the training files became, by the preprocessor in the bundle alone."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
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
from torchrec_ext.retrieval.manifest import BundleError
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


class Own(nn.Module):
    """A module of a user's own, over the columns that the steps make."""

    def __init__(self, vocab: Mapping[str, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(vocab["user"], 4)
        self.recent = nn.EmbeddingBag(vocab["item"], 4, padding_idx=0)
        self.weekday = nn.Embedding(vocab["time_weekday"], 4)
        self.item = nn.Embedding(vocab["item"], 4)
        self.top = nn.Sequential(nn.Linear(13, 6), nn.ReLU(), nn.Linear(6, 4))

    def forward(
        self,
        user: Tensor,
        recent: Tensor,
        time_weekday: Tensor,
        age: Tensor,
        item: Tensor,
    ) -> Tensor:
        rows = [self.user(user), self.recent(recent), self.weekday(time_weekday)]
        query = self.top(torch.cat([*rows, age[:, None]], 1))
        return (query * self.item(item)).sum(1)


@torch.no_grad()
def test_a_module_of_ones_own_takes_raw_requests(tmp_path: Path) -> None:
    """Raw rows score as the rows of the file did in training, and unknown values read row 0, flagged."""
    rng = np.random.default_rng(1)
    hours = [BEGIN + datetime.timedelta(hours=7 * row) for row in range(ROWS)]
    ids = [f"vid-{number}" for number in range(ITEMS)]
    columns = {
        "user": [f"u{number}" for number in rng.integers(0, 8, ROWS)],
        "item": [ids[number] for number in rng.permutation(ROWS) % ITEMS],
        "recent": [[None, *rng.choice(ids, 2).tolist()] for _ in range(ROWS)],
        "time": pa.array(hours, pa.timestamp("us", "UTC")),
        "age": rng.integers(20, 60, ROWS).astype(np.float32),
    }
    log = tmp_path / "log.parquet"
    raw = pa.table(columns)
    pq.write_table(raw, log)
    steps = [
        Categorify(column="item", also=("recent",)),
        Categorify(column="user"),
        TimeFeatures(column="time", zone="Europe/Berlin", features=("weekday",)),
        Normalize(column="age"),
    ]
    fitted = Preprocessor(steps).fit(str(log))
    model = Own(fitted.vocab)
    rest: dict[str, Any] = {"preprocessor": fitted}
    catalogue = Catalogue(ids=np.array(ids), features=pa.table({"item": ids}))
    asked = raw.drop_columns(["item"])
    export(model, tmp_path / "bundle", catalogue=catalogue, queries=asked, **rest)
    scorer = Scorer(Bundle.load(tmp_path / "bundle"))
    fitted.transform(str(log), tmp_path / "ready")
    made = pq.read_table(tmp_path / "ready").to_pydict()
    expected = model(**{name: torch.tensor(made[name]) for name in made}).tolist()
    for row, logit in zip(raw.to_pylist(), expected, strict=True):
        item = row.pop("item")
        row["time"] = row["time"].isoformat()
        (score,) = scorer.score(ScoreRequest(user=row, items=[item])).scores
        assert score == pytest.approx(logit, rel=1e-4, abs=1e-5)
    # Null reads row 0, which the bag leaves out, so the list need not be filled up.
    row["recent"] = row["recent"][1:]
    (score,) = scorer.score(ScoreRequest(user=row, items=[item])).scores
    assert score == pytest.approx(logit, rel=1e-4, abs=1e-5)
    nobody = scorer.score(ScoreRequest(user={**row, "user": "nobody"}, items=["vid-x"]))
    assert nobody.unknown_features == ["user"]
    assert nobody.unknown_items == ["vid-x"]
    with pytest.raises(RequestError, match=r"reads no such column; it reads .*recent"):
        scorer.score(ScoreRequest(user={**row, "time_weekday": 1}, items=[item]))
    features = pa.table({"film": ids})
    films = Catalogue(ids=np.array(ids), features=features)
    with pytest.raises(BundleError, match=r"takes item, which is no column; .*recent"):
        export(model, tmp_path / "no", catalogue=films, queries=asked, **rest)


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
