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
from torchrec import JaggedTensor

from torchrec_ext.data.preprocess import (
    Categorify,
    FittedPreprocessor,
    History,
    Lists,
    Normalize,
    Preprocessor,
    TimeFeatures,
)
from torchrec_ext.data.preprocess.history import GAPS
from torchrec_ext.data.preprocess.rows import connected
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.catalogue import Catalogue, NamedUsers
from torchrec_ext.retrieval.columns import Columns
from torchrec_ext.retrieval.export import export
from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.scorer import RequestError, Scorer, ScoreRequest
from torchrec_ext.schema import DataError

pytest.importorskip("duckdb", reason="needs the extra `data`")

ROWS, ITEMS, LENGTH = 60, 12, 3
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
        "genre": [f"g{number}" for number in rng.integers(0, 4, ROWS)],
        "label": np.ones(ROWS, np.float32),
    }
    pq.write_table(pa.table(columns), file)
    return file


@pytest.fixture(scope="module")
def fitted(log: Path) -> FittedPreprocessor:
    steps = [
        History(
            user="user",
            item="item",
            time="time",
            length=LENGTH,
            also=("genre",),
            gaps=GAPS,
        ),
        Categorify(column="item", also=("history",)),
        Categorify(column="genre", also=("history_genre",)),
        Categorify(column="user"),
    ]
    return Preprocessor(steps, keep=["label"]).fit(str(log))


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
                "history_items": [each["item"] for each in before],
                "history_times": [each["time"].isoformat() for each in before],
                "history_genre": [each["genre"] for each in before],
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
        "history_items": pa.list_(pa.int64()),
        "history_times": pa.list_(time),
        "history_genre": pa.list_(pa.string()),
    }
    return pa.Table.from_pylist(rows, schema=pa.schema(schema))


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
    # Null reads row 0, which fills shorter lists up too.
    for recent, unknown in ((row["recent"][1:], []), (row["recent"], ["recent"])):
        answer = scorer.score(ScoreRequest(user=row | {"recent": recent}, items=[item]))
        assert answer.scores == [pytest.approx(logit, rel=1e-4, abs=1e-5)]
        assert answer.unknown_features == unknown
    row |= {"recent": [], "user": "nobody"}
    nobody = scorer.score(ScoreRequest(user=row, items=["vid-x"]))
    assert nobody.unknown_features == ["user"]
    assert nobody.unknown_items == ["vid-x"]
    with pytest.raises(RequestError, match=r"reads no such column; it reads .*recent"):
        scorer.score(ScoreRequest(user={**row, "time_weekday": 1}, items=[item]))
    features = pa.table({"film": ids})
    films = Catalogue(ids=np.array(ids), features=features)
    with pytest.raises(BundleError, match=r"takes item, which is no column; .*recent"):
        export(model, tmp_path / "no", catalogue=films, queries=asked, **rest)


class Latest(nn.Module):
    """It reads a history at fixed places, filled up at its end, and counts no padding."""

    def __init__(self, vocab: Mapping[str, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.item = nn.Embedding(vocab["item"], 4, padding_idx=0)
        # Row 0 is for unknown genres, so that padding has a row of its own.
        genres = vocab["genre"]
        self.genre = nn.Embedding(genres + 1, 4, padding_idx=genres)
        self.gap = nn.Embedding(vocab["history_gap"], 4)
        self.layer = nn.Linear(LENGTH * 12, 4)
        nn.init.normal_(self.genre.weight)

    def forward(
        self,
        history: Tensor,
        history_genre: Tensor,
        history_gap: Tensor,
        item: Tensor,
    ) -> Tensor:
        rows = [self.item(history), self.genre(history_genre), self.gap(history_gap)]
        query = self.layer(torch.cat(rows, 2).flatten(1))
        query = query / (history_gap > 0).sum(1, keepdim=True).clamp(min=1)
        return (query * self.item(item)).sum(1)


@pytest.fixture(scope="module")
def latest(
    fitted: FittedPreprocessor, log: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Latest, Scorer]:
    """A module over histories, and the scorer of its bundle, which knows the first row's user."""
    folder = tmp_path_factory.mktemp("latest") / "bundle"
    model = Latest(fitted.vocab)
    ids = np.unique(pq.read_table(log)["item"].to_numpy())
    (last,) = queries(log).slice(ROWS - 1).to_pylist()
    names = [name for name in last if name.startswith("history")]
    named = {"user": ["u"], **{name: [last[name]] for name in (*names, "time")}}
    export(
        model,
        folder,
        catalogue=Catalogue(ids=ids, features=pa.table({"item": ids})),
        queries=queries(log),
        users=NamedUsers(
            key="user",
            ids=pa.array(["u"]),
            features=pa.table(named),
            unknown={"user": "", "time": None, **{name: [] for name in names}},
            seen_ids=pa.array([[]], pa.list_(pa.int64())),
        ),
        preprocessor=fitted,
    )
    return model, Scorer(Bundle.load(folder))


@torch.no_grad()
def test_short_histories_are_filled_up_as_in_training(
    latest: tuple[Latest, Scorer], fitted: FittedPreprocessor, log: Path, tmp_path: Path
) -> None:
    model, scorer = latest
    with connected() as con:
        rows = con.sql(f"SELECT * FROM '{log}' ORDER BY time")
        fitted.transform(rows, tmp_path / "ready", con=con)
    made = pq.read_table(tmp_path / "ready").to_pydict()
    fills = {"history": 0, "history_genre": fitted.vocab["genre"], "history_gap": 0}
    columns = {}
    for name, fill in fills.items():
        lists = [torch.tensor(each, dtype=torch.float32) for each in made[name]]
        jagged = JaggedTensor.from_dense(lists)
        columns[name] = jagged.to_padded_dense(LENGTH, fill).long()
    lengths = {len(each) for each in made["history"]}
    assert lengths == set(range(LENGTH + 1))
    expected = model.eval()(**columns, item=torch.tensor(made["item"])).tolist()
    items = pq.read_table(log)["item"].to_pylist()
    for row, item, logit in zip(requests(log), items, expected, strict=True):
        user = {name: row[name] for name in scorer.bundle.query.columns.raw}
        answer = scorer.score(ScoreRequest(user=user, items=[item]))
        assert answer.scores == [pytest.approx(logit, rel=1e-4, abs=1e-5)]
        assert not answer.unknown_features


def test_a_posted_history_is_not_mixed_with_the_stored_one(
    latest: tuple[Latest, Scorer], log: Path
) -> None:
    """Lists of one history are one unit, with the time that cuts them."""
    _, scorer = latest
    last, other = requests(log)[-1], requests(log)[-2]
    names = ["history_items", "history_times", "history_genre", "time"]

    def served(user: Mapping[str, Any]) -> list[float]:
        return scorer.score(ScoreRequest(user=user, items=[100, 105])).scores

    stored, posted = ({name: row[name] for name in names} for row in (last, other))
    assert served({"user": "u"}) == served(stored)
    assert served({"user": "u", "time": last["time"]}) == served(stored)
    assert served({"user": "u", **posted}) == served(posted)
    for name in names:
        part = {each: posted[each] for each in names if each != name}
        with pytest.raises(RequestError, match="all of a history") as caught:
            served({"user": "u", **part})
        assert caught.value.field == f"user.{name}"
    with pytest.raises(
        RequestError, match="time: it is missing, and so are history_times"
    ):
        served({"user": "u", "history_items": None, "history_genre": None})


def test_ids_that_no_step_made_are_filled_up_by_the_padding_row(tmp_path: Path) -> None:
    """Ids that are rows already: by the table's padding row; without one it is asked for."""
    rows = pa.table({"item": [1, 2], "recent": [[1], [2, 1, 2]]})
    pq.write_table(rows, tmp_path / "log.parquet")
    steps = [Lists(column="recent", max_length=2)]
    fitted = Preprocessor(steps, keep=["item"]).fit(str(tmp_path / "log.parquet"))

    def exported(padding: int | None) -> Columns:
        items = np.array([1, 2])
        export(
            Places(padding),
            tmp_path / "bundle",
            catalogue=Catalogue(ids=items, features=pa.table({"item": items})),
            queries=rows.select(["recent"]),
            preprocessor=fitted,
            overwrite=True,
        )
        return Bundle.load(tmp_path / "bundle").query.columns

    read = exported(2).read_row({"recent": [2]})
    assert read.columns["recent"].values.tolist() == [2, 2]
    assert not read.unknown["recent"].any()
    with pytest.raises(BundleError, match=r"'recent': .* one padding_idx"):
        exported(None)


class Places(nn.Module):
    """It needs to know how long its lists are."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.item = nn.Embedding(3, 4, padding_idx=padding)

    def forward(self, recent: Tensor, item: Tensor) -> Tensor:
        return (self.item(recent)[:, -1] * self.item(item)).sum(1)


def test_errors_name_the_requests_own_column(
    latest: tuple[Latest, Scorer], log: Path
) -> None:
    _, scorer = latest
    last = requests(log)[-1]
    user = {name: last[name] for name in scorer.bundle.query.columns.raw}
    for change, what in (
        ({"time": "yesterday"}, "column 'time': "),
        ({"history_items": ["x"]}, "column 'history_items'"),
        ({"agee": 1}, "reads no such column"),
    ):
        with pytest.raises((RequestError, DataError)) as caught:
            scorer.score(ScoreRequest(user={**user, **change}, items=[100]))
        assert what in str(caught.value)
    user["history_items"] = [999_999]
    for name in ("history_times", "history_genre"):
        user[name] = user[name][:1]
    answer = scorer.score(ScoreRequest(user=user, items=[100]))
    assert answer.unknown_features == ["history"]
