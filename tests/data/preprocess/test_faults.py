"""Bad input is told by file, column, row, rule and remedy, and leaves nothing behind that looks whole."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("duckdb", reason="needs the extra `data`")

from tests.data.preprocess_cases import same
from tests.files import read_parquet
from torchrec_ext.data.preprocess import (
    Bucketize,
    Categorify,
    FillMissing,
    FittedPreprocessor,
    HashBucket,
    History,
    Lists,
    Normalize,
    Preprocessor,
    TimeFeatures,
)
from torchrec_ext.data.preprocess.files import ROW_GROUP
from torchrec_ext.data.preprocess.rows import connected, telling
from torchrec_ext.schema import DataError

CITY = Preprocessor([Categorify(column="city")], keep=("label",))


def table(path: Path, **columns: Any) -> Path:
    columns = columns or {"city": ["a", "b", "a"], "label": [0.0, 1.0, 0.0]}
    pq.write_table(
        pa.table(columns),
        path,
        write_page_checksum=True,
        use_dictionary=False,
        compression="none",
    )
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return table(tmp_path / "good.parquet")


@pytest.fixture
def fitted(good: Path) -> FittedPreprocessor:
    return CITY.fit(good)


def refuses(message: str, source: Any, steps: Preprocessor = CITY) -> None:
    with pytest.raises(DataError, match=message):
        steps.fit(source)


def test_a_missing_column_with_the_nearest_name(tmp_path: Path) -> None:
    refuses(
        r"a\.parquet: column 'city' is missing, did you mean 'citi'",
        table(tmp_path / "a.parquet", citi=[1], label=[1.0]),
    )


@pytest.mark.parametrize(
    ("values", "step", "message"),
    [
        (
            [1.5],
            Categorify(column="x"),
            r"column 'x' is float64, Categorify\('x'\) takes int64, .*bucket a number with Bucketize",
        ),
        (
            ["a"],
            Normalize(column="x"),
            r"column 'x' is string, Normalize\('x'\) takes float64, int64",
        ),
        (
            ["a"],
            TimeFeatures(column="x"),
            r"takes int64, timestamp; convert it: CAST\(.* AS TIMESTAMPTZ\)",
        ),
        (
            [1_700_000_000_000, None],
            TimeFeatures(column="x"),
            r"times such as 1700000000000, beyond 2199 .*; convert .*: x // 1_000",
        ),
        (
            ["a"],
            Categorify(column="x", skip=("x",)),
            r"column 'x' is string, Categorify\('x'\) takes list<int64>, list<string>",
        ),
        ([1], Lists(column="x"), r"give separator to split a string"),
        (
            ["a"],
            FillMissing(column="x", value=0),
            r"column 'x' is string, FillMissing\('x'\) takes float64, int64",
        ),
        (
            pa.array([1], pa.uint64()),
            Categorify(column="x"),
            r"column 'x' is uint64, must be bool, int64, float",
        ),
        (
            [{"a": 1}],
            Categorify(column="x"),
            r"column 'x' is struct<a: int64>, must be",
        ),
        ([None], Normalize(column="x"), r"column 'x' is null, must be"),
        (
            pa.array([None], pa.float64()),
            Normalize(column="x"),
            r"Normalize\('x'\): every value is missing; leave the column out",
        ),
        (
            pa.array([None], pa.float64()),
            Bucketize(column="x", quantiles=3),
            r"every value is missing",
        ),
        (
            [1e308, -1e308, 1.7e308],
            Normalize(column="x"),
            r"Normalize\('x'\): .*beyond float64.*LogClip",
        ),
    ],
)
def test_a_column_that_a_step_cannot_take(
    tmp_path: Path, values: Any, step: Any, message: str
) -> None:
    refuses(
        rf"a\.parquet.*{message}",
        table(tmp_path / "a.parquet", x=values),
        Preprocessor([step]),
    )


def test_a_name_is_no_pattern(tmp_path: Path) -> None:
    meant = table(tmp_path / "log[1].parquet", city=["a", "b"], label=[0.0, 1.0])
    table(tmp_path / "log1.parquet", city=["c"], label=[0.0])
    fitted = CITY.fit(meant)
    assert fitted.vocab == {"city": 3}
    assert fitted.transform(meant, tmp_path / "out") == 2


def test_a_relation_of_another_connection(good: Path) -> None:
    with connected(threads=1) as mine:
        held = mine.sql(f"SELECT * FROM '{good}'")
        assert CITY.fit(held, con=mine).vocab == {"city": 3}
        refuses(r"relation is of another connection", held)


# Column x of a second file, and the refusal; DuckDB itself reads by the first file's type.
FILE_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"x": ["1"]}, r"b\.parquet: column 'x' is string, in .*a\.parquet it is "),
    "name": ({"xs": [1.0]}, r"b\.parquet: column 'x' is missing, .* did you mean 'xs'"),
}


@pytest.mark.parametrize("sql", ["FROM '{}'", "FROM read_parquet(['{}'])"])
@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_relation_is_refused_by_its_files(
    tmp_path: Path, fault: str, sql: str
) -> None:
    table(tmp_path / "a.parquet", x=[0.5])
    columns, message = FILE_FAULTS[fault]
    bad = table(tmp_path / "b.parquet", **columns)
    steps = Preprocessor([Normalize(column="x")])
    with connected(threads=1) as con:

        def fit() -> None:
            rows = con.sql(sql.format(tmp_path / "?.parquet"))
            steps.fit(rows.filter("x > -1"), con=con)

        with pytest.raises(DataError, match=message) as caught:
            fit()
        assert len(str(caught.value)) < 200 + 2 * len(str(tmp_path))
        bad.write_bytes(bad.read_bytes()[:-20])
        with pytest.raises(DataError, match=r"b\.parquet: cannot be read as"):
            fit()
        (tmp_path / "a.parquet").write_bytes(bad.read_bytes())
        with pytest.raises(DataError, match=r"\.parquet: .* was cut short"), telling():
            fit()


def test_events_may_have_fewer_columns_but_not_other_types(tmp_path: Path) -> None:
    rows = table(
        tmp_path / "rows.parquet",
        user=[1, 1],
        item=["a", "b"],
        ts=[1, 2],
        city=["x", "y"],
    )
    history = History(user="user", item="item", time="ts", length=3)
    fitted = Preprocessor(
        [
            history,
            Categorify(column="item", also=("history",)),
            Categorify(column="city"),
        ]
    ).fit(rows)
    past = table(tmp_path / "past.parquet", user=[1], item=["b"], ts=[0])
    fitted.transform(rows, tmp_path / "out", events=past)
    assert read_parquet(tmp_path / "out/part-00000.parquet")[
        "history"
    ].values.tolist() == [2, 2]
    wrong = table(tmp_path / "wrong.parquet", user=["1"], item=["b"], ts=[0])
    with pytest.raises(
        DataError,
        match=r"wrong\.parquet: column 'user' is string, in .*rows\.parquet it is int64",
    ):
        fitted.transform(rows, tmp_path / "wrong", events=wrong)
    (tmp_path / "past.parquet").write_bytes(past.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"past\.parquet: cannot be read as parquet"):
        fitted.transform(rows, tmp_path / "again", events=past)


def test_a_result_does_not_replace_its_source(
    tmp_path: Path, good: Path, fitted: FittedPreprocessor
) -> None:
    fitted.transform(good, tmp_path / "out")
    again = Preprocessor([Categorify(column="city")]).fit(tmp_path / "out")
    with pytest.raises(
        DataError, match=r"out: holds .*part-00000\.parquet, which is being read"
    ):
        again.transform(tmp_path / "out", tmp_path / "out", overwrite=True)
    with connected(threads=1) as con:
        rows = con.sql(f"FROM '{tmp_path}/out/*.parquet'")
        with pytest.raises(DataError, match="out: holds "):
            again.transform(rows, tmp_path / "out", overwrite=True, con=con)
    assert read_parquet(tmp_path / "out/part-00000.parquet").num_rows == 3


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "Asia/Tokyo"])
def test_times_of_any_unit_and_zone(
    tmp_path: Path, unit: str, zone: str | None
) -> None:
    moments = (
        pa.array([-500, 1_582_977_600_250], pa.timestamp("ms"))
        .cast(pa.timestamp(unit))
        .cast(pa.timestamp(unit, zone))
    )
    path = table(tmp_path / "a.parquet", t=moments)
    fitted = Preprocessor(
        [TimeFeatures(column="t", features=("hour", "month"))], keep=("t",)
    ).fit(path)
    fitted.transform(path, tmp_path / "out")
    made = read_parquet(tmp_path / "out/part-00000.parquet")
    assert {name: made[name].values.tolist() for name in made} == {
        "t_hour": [24, 13],
        "t_month": [12, 2],
        "t": [-1, 1_582_977_600],
    }
    same(fitted.online({"t": moments}), made)


def test_damage_in_the_middle_is_named(
    tmp_path: Path, good: Path, fitted: FittedPreprocessor
) -> None:
    data = bytearray(good.read_bytes())
    start = pq.ParquetFile(good).metadata.row_group(0).column(0).data_page_offset
    data[start : start + 12] = b"\xff" * 12
    (tmp_path / "damaged.parquet").write_bytes(data)
    with pytest.raises(
        DataError,
        match=r"damaged\.parquet: row group 0 cannot be read: the file is damaged",
    ):
        fitted.transform([good, tmp_path / "damaged.parquet"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "damaged.parquet",
        "good.parquet",
    ]


def test_a_missing_value_is_named_by_its_row(tmp_path: Path) -> None:
    size = ROW_GROUP + 10
    price, label = [1.0 + k % 7 for k in range(size)], [0.0] * size
    price[ROW_GROUP + 3] = float("nan")
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"price": price, "label": label}), path, row_group_size=ROW_GROUP
    )
    fitted = Preprocessor([Normalize(column="price")], keep=("label",)).fit(path)
    with pytest.raises(
        DataError,
        match=r"a\.parquet: row group 1, column 'price', row 3: the result is missing.*FillMissing\(column='price'",
    ):
        fitted.transform(path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]
    with pytest.raises(
        DataError,
        match=r"column 'price', row 1: the result is missing.*FillMissing\(column='price'",
    ):
        fitted.online({"price": [1.0, float("nan")]})
    with pytest.raises(
        DataError,
        match=r"column 'price', row 0: the result .* beyond float32; .*LogClip",
    ):
        fitted.online({"price": [1e300]})


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            r"out: the disk is full; free space there",
        ),
        (
            RuntimeError("Could not write: disk quota exceeded"),
            r"out: the disk is full",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied"),
            r"out: cannot be written \(Permission denied\)",
        ),
    ],
)
def test_a_full_disk_leaves_the_old_output_and_nothing_else(
    tmp_path: Path,
    good: Path,
    fitted: FittedPreprocessor,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    message: str,
) -> None:
    fitted.transform(good, tmp_path / "out")
    before = (tmp_path / "out/part-00000.parquet").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(DataError, match=message):
        fitted.transform(good, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out/part-00000.parquet").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.parquet", "out"]


def test_the_result_has_row_groups_of_one_size_and_checksums(tmp_path: Path) -> None:
    size = 2 * ROW_GROUP + 5
    path = table(tmp_path / "a.parquet", x=list(range(size)), label=[0.0] * size)
    fitted = Preprocessor([HashBucket(column="x", buckets=1000)], keep=("label",)).fit(
        path
    )
    assert fitted.transform(path, tmp_path / "out") == size
    part = tmp_path / "out/part-00000.parquet"
    metadata = pq.ParquetFile(part).metadata
    assert [metadata.row_group(k).num_rows for k in range(3)] == [
        ROW_GROUP,
        ROW_GROUP,
        5,
    ]
    data = bytearray(part.read_bytes())
    data[metadata.row_group(1).column(0).data_page_offset + 60] ^= 1
    part.write_bytes(data)
    with pytest.raises(
        DataError, match=r"row group 1 cannot be read: the file is damaged"
    ):
        read_parquet(part)


def test_a_folder_above_the_log_is_no_partition(tmp_path: Path) -> None:
    (tmp_path / "label=1/log/day=3").mkdir(parents=True)
    table(
        tmp_path / "label=1/log/day=3/a.parquet",
        city=["a", "b", "a"],
        label=[0.0, 1.0, 0.0],
    )
    steps = Preprocessor(
        [Categorify(column="city"), Categorify(column="day")], keep=("label",)
    )
    steps.fit(tmp_path / "label=1/log").transform(
        tmp_path / "label=1/log", tmp_path / "out"
    )
    made = read_parquet(tmp_path / "out/part-00000.parquet")
    assert (made["label"].values.tolist(), made["day"].values.tolist()) == (
        [0, 1, 0],
        [1, 1, 1],
    )


def test_without_duckdb_only_fitting_and_files_are_missing(
    good: Path, fitted: FittedPreprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(
        DataError,
        match=r"preprocessing files needs duckdb, .*pip install 'torchrec-ext\[data\]'",
    ):
        CITY.fit(good)
    assert fitted.online({"city": ["b"]})["city"].values.tolist() == [2]


def test_integers_may_be_wider_in_another_file_but_not_of_a_relation(
    tmp_path: Path,
) -> None:
    steps = Preprocessor([Categorify(column="x"), Categorify(column="y")])
    for kind, value in ((pa.int32(), -1), (pa.uint32(), 2**32 - 1)):
        for folder in (tmp_path, tmp_path / f"day={value}"):
            folder.mkdir(exist_ok=True)
            table(
                folder / f"{kind}.parquet",
                x=pa.array([value], kind),
                y=pa.array([[value]], pa.list_(kind)),
            )
    for pattern in ("*.parquet", "day=*"):
        fitted = steps.fit(str(tmp_path / pattern))
        assert fitted.vocab == {"x": 3, "y": 3}, pattern
    for name in "xy":
        with connected() as con:
            log = con.sql(f"SELECT {name} FROM '{tmp_path}/*.parquet'")
            with pytest.raises(DataError, match=rf"uint32.*: column '{name}' is"):
                Preprocessor([Categorify(column=name)]).fit(log, con=con)
