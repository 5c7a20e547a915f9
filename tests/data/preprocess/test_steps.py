"""Every step by itself: what it makes of a request's rows is what DuckDB writes of a file's, on any rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip(
    "ibis", reason="needs ibis-framework[duckdb]: pip install 'torchrec-ext[data]'"
)
pytest.importorskip(
    "duckdb", reason="needs ibis-framework[duckdb]: pip install 'torchrec-ext[data]'"
)

from tests.data.preprocess_cases import ALL_TIMES, ANY_VALUES, same, with_events, write
from torchrec_ext.data.files.parquet import read_parquet
from torchrec_ext.data.preprocess import (
    Bucketize,
    Categorify,
    Cross,
    FillMissing,
    HashBucket,
    History,
    Lists,
    LogClip,
    Normalize,
    Preprocessor,
    Step,
    TimeFeatures,
)
from torchrec_ext.data.preprocess.engines import DuckDB

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ibis")
STEPS: dict[str, list[Step]] = {
    "Categorify": [
        Categorify(column="city"),
        Categorify(column="user", min_count=2),
        Categorify(column="prime", max_size=1),
    ],
    "Categorify of lists": [
        Categorify(column="tags", max_size=3),
        Categorify(column="shops", min_count=2),
    ],
    "HashBucket": [
        HashBucket(column="user", buckets=7),
        HashBucket(column="city", buckets=5, salt="'"),
        HashBucket(column="tags", buckets=3),
    ],
    "Cross": [Cross(columns=("user", "city", "prime"), buckets=11)],
    "Bucketize": [
        Bucketize(column="age", quantiles=5),
        Bucketize(column="price", boundaries=(-1.0, 0.0, 0.5)),
    ],
    "Bucketize a logarithm": [
        LogClip(column="age", low=-3, high=2**20),
        Bucketize(column="age", quantiles=20),
    ],
    "FillMissing": [
        FillMissing(column="city", value="?"),
        FillMissing(column="price", value=0.1),
        FillMissing(column="age", statistic="median"),
    ],
    "LogClip": [FillMissing(column="price", value=0), LogClip(column="price", low=-5)],
    "Normalize": [FillMissing(column="age", statistic="mean"), Normalize(column="age")],
    "Lists": [Lists(column="tags", max_length=2), HashBucket(column="tags", buckets=9)],
    "Lists of a text": [
        Lists(column="genre", separator="|", output="genres"),
        Categorify(column="genres"),
    ],
    "TimeFeatures": [
        TimeFeatures(column="when", features=ALL_TIMES),
        TimeFeatures(column="ts", zone="Asia/Kolkata"),
    ],
    "History": [
        History(user="user", item="item", time="ts", length=2, where="label"),
        History(
            user="user",
            item="item",
            time="when",
            length=2,
            output="past",
            also=("city", "age"),
            gaps=(3600,),
        ),
        Categorify(column="item", also=("history", "past")),
        HashBucket(column="past_city", buckets=9),
        HashBucket(column="past_age", buckets=7),
    ],
}
KNOWN = {"age": 30, "price": 1.5}  # fitting needs one number at least


@pytest.fixture(scope="module")
def duckdb() -> Iterator[DuckDB]:
    with DuckDB(threads=1) as engine:
        yield engine


@pytest.mark.parametrize("name", STEPS)
@given(data=st.data())
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_requests_agree_with_files(
    duckdb: DuckDB,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    data: st.DataObject,
) -> None:
    steps = Preprocessor(STEPS[name], keep=("label",))
    values = {column: ANY_VALUES[column] for column in steps.raw_columns}
    train, other = (
        data.draw(st.lists(st.fixed_dictionaries(values), min_size=1, max_size=20))
        for _ in range(2)
    )
    train[0] |= {column: value for column, value in KNOWN.items() if column in values}
    rows: dict[str, list[Any]] = {
        column: [row[column] for row in other] for column in values
    }
    folder = tmp_path_factory.mktemp("rows")
    files = {
        name: write(
            {column: [row[column] for row in part] for column in values},
            folder / f"{name}.parquet",
        )
        for name, part in (("train", train), ("other", other))
    }
    fitted = steps.fit(files["train"], engine=duckdb)
    fitted.transform(files["other"], folder / "out", engine=duckdb)
    made = fitted.online(with_events(rows, rows) if name == "History" else rows)
    same(made, read_parquet(folder / "out/part-00000.parquet"))
