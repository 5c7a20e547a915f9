"""Every step by itself: known answers, and the same values for files and for requests, on any rows."""

from __future__ import annotations

import datetime
import zoneinfo
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("duckdb", reason="needs the extra `data`")

from tests.data.preprocess_cases import (
    ALL_TIMES,
)
from tests.files import read_parquet
from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.preprocess import (
    Bucketize,
    Categorify,
    Cross,
    FillMissing,
    FittedPreprocessor,
    HashBucket,
    Lists,
    LogClip,
    Normalize,
    Preprocessor,
    Step,
    TimeFeatures,
)

NAN, INF = float("nan"), float("inf")
DST = 1_616_893_200  # 2021-03-28 01:00 UTC: Berlin's clocks go from 2 to 3
KNOWN_ANSWERS: list[tuple[list[Step], list[Any], list[Any]]] = [
    # As often, by value; null and the third are unknown.
    ([Categorify(column="x", max_size=2)], ["b", "a", None, "c"], [2, 1, 0, 0]),
    ([Categorify(column="x", min_count=2)], [-7, 5, -7, None], [1, 0, 1, 0]),
    ([Categorify(column="x")], [["u", None], [], None, ["u"]], [[1, 0], [], [], [1]]),
    # MD5's first 60 bits: 7 and "7" have one id.
    ([HashBucket(column="x", buckets=1000)], ["sushi", "-7", None], [387, 748, 0]),
    ([HashBucket(column="x", buckets=1000)], [-7, None], [748, 0]),
    ([HashBucket(column="x", buckets=1000)], [["sushi"], []], [[387], []]),
    ([Bucketize(column="x", boundaries=(1.0, 2.0))], [0, 1, 3, None], [1, 2, 3, 0]),
    ([Bucketize(column="x", quantiles=2)], [1.0, 2.0, 3.0, NAN], [1, 2, 2, 0]),
    ([FillMissing(column="x", value=2.5)], [None, 7], [2.5, 7]),
    # DuckDB counts by the least and greatest value, which are equal here.
    (
        [Normalize(column="x"), FillMissing(column="x", value=7)],
        [1.5, NAN, INF],
        [0, 7, 7],
    ),
    ([Normalize(column="x")], [1.0, 3.0], [-1, 1]),
    ([Normalize(column="x")], [4.0, 4.0], [0, 0]),
    ([LogClip(column="x")], [-1.0, 0.0], [0, 0]),
    (
        [Lists(column="x", max_length=2), HashBucket(column="x", buckets=1)],
        [["a", None, "b", "c"], None],
        [[1, 1], []],
    ),
    (
        [Lists(column="x", separator="|"), Categorify(column="x")],
        ["b|a||b", "", None],
        [[1, 2, 1], [], []],
    ),
]


@pytest.mark.parametrize("case", KNOWN_ANSWERS, ids=lambda case: str(case[0][-1]))
def test_known_answers(
    con: Any, case: tuple[list[Step], list[Any], list[Any]], tmp_path: Path
) -> None:
    steps, values, expected = case
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": values}), file)
    fitted = Preprocessor(steps).fit(file, con=con)
    for made in (fitted.online({"x": values}), transformed(fitted, file, con)):
        rows = made["x"]
        found = [
            rows.row(row).tolist() if rows.ragged else rows.values[row]
            for row in range(len(values))
        ]
        assert found == expected


def transformed(fitted: FittedPreprocessor, file: Path, con: Any) -> Chunk:
    fitted.transform(file, file.parent / "out", con=con)
    return read_parquet(file.parent / "out/part-00000.parquet")


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Asia/Kolkata"])
def test_times_are_those_of_the_zone(zone: str) -> None:
    step = TimeFeatures(column="t", zone=zone, features=ALL_TIMES)
    times = [0, 86_399, -1, DST - 1, DST, 1_709_164_800, 2_100_000_000]
    fitted = FittedPreprocessor([(step, {})], {"t": "int64"})
    made = fitted.online({"t": [*times, None, 2**62]})
    for row, second in enumerate(times):
        local = datetime.datetime.fromtimestamp(second, zoneinfo.ZoneInfo(zone))
        hour, weekday = local.hour + 1, local.isoweekday()
        expected = [hour, weekday, local.month]
        assert [made[f"t_{name}"].values[row] for name in ALL_TIMES] == expected
    assert [made[f"t_{name}"].values[-2:].tolist() for name in ALL_TIMES] == [
        [0, 0]
    ] * 3


def test_a_cross_tells_combinations_apart(con: Any) -> None:
    step = Cross(columns=("a", "b"), buckets=10**9)
    fitted = FittedPreprocessor([(step, {})], {"a": "string", "b": "int64"})
    rows = {"a": ["x", "x1", "x", None, "x"], "b": [12, 2, 12, 12, None]}
    ids = fitted.online(rows)["a_x_b"].values.tolist()
    alone = [
        fitted.online({"a": [a], "b": [b]})["a_x_b"].values[0]
        for a, b in zip(rows["a"], rows["b"], strict=True)
    ]
    assert ids == alone
    assert (ids[0] == ids[2], ids[0] == ids[1], ids[3:]) == (True, False, [0, 0])


def test_float32_is_fitted_in_64_bits(con: Any, tmp_path: Path) -> None:
    """In 32 bits, 1e7 and 1 more or less have a deviation of 1.003."""
    values = pa.array([1e7 - 1, 1e7 + 1] * 5_000, pa.float32())
    pq.write_table(pa.table({"x": values}), tmp_path / "a.parquet")
    fitted = Preprocessor([Normalize(column="x")]).fit(tmp_path / "a.parquet", con=con)
    assert fitted.pairs[0][1] == {"mean": 1e7, "std": 1.0}
