"""Input that would train silently is refused, or counted in a line: a table for preprocessing and one for CSV files.

Those of a folder as it stands and of a log of events are in test_sets.py and files/test_event_log.py.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("duckdb", reason="needs the extra `data`")

from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.preprocess import (
    Categorify,
    FillMissing,
    Preprocessor,
    read_csv,
)
from torchrec_ext.data.preprocess.columns import read_cells
from torchrec_ext.data.preprocess.rows import connected
from torchrec_ext.data.sets import load_set
from torchrec_ext.schema import DataError
from torchx_apps.jobs.preprocessing import run_preprocess
from torchx_apps.recipes.preprocess import Prepare, PreprocessJob

ROWS: dict[str, list[Any]] = {
    "user": ["u", "v", "u", None],
    "item": ["a", "b", "b", "a"],
    "city": ["x", "y", None, "x"],
    "label": [0.0, 1.0, 0.5, 1.0],
}


def prepare(tmp_path: Path, rows: dict[str, list[Any]], *, by_sql: bool) -> None:
    pq.write_table(pa.table(ROWS), tmp_path / "train.parquet")
    pq.write_table(pa.table(rows), tmp_path / "test.parquet")

    def build(_: None, con: Any) -> Prepare:
        splits: dict[str, Any] = {}
        for name in ("train", "test"):
            path = str(tmp_path / f"{name}.parquet")
            splits[name] = con.sql(f"FROM '{path}'") if by_sql else path
        ids = [Categorify(column=name) for name in ("user", "item", "city")]
        return Prepare(
            preprocessor=Preprocessor(ids, keep=["label"]),
            splits=splits,
            label="label",
            user="user",
            item="item",
        )

    run_preprocess(PreprocessJob(name="own", build=build, out=str(tmp_path / "out")))


PREPARED: dict[str, tuple[str, Any, bool, str]] = {
    "a label": (
        "label",
        [0.0, 2.0, 3.0, 1.0],
        False,
        r"test\.parquet: row group 0, column 'label', row 1: 2\.0, in 2 rows: a label is from 0 to 1",
    ),
    "a label that is no number": (
        "label",
        [0.0, 1.0, float("nan"), 1.0],
        True,
        r"column 'label', row 2: nan, in 1 rows: a label is from 0 to 1",
    ),
    "a label that is missing": (
        "label",
        [0.0, 1.0, None, 1.0],
        False,
        r"test\.parquet: row group 0, column 'label', row 2: None, in 1 rows: a label is from 0 to 1",
    ),
    "an empty user": (
        "user",
        ["u", "", "", "v"],
        False,
        r"test\.parquet.* column 'user', row 1: '', in 2 rows: .*NULL.* nullif\(user, ''\)",
    ),
    "a NUL byte": (
        "item",
        ["a", "b", "b\0", "a"],
        True,
        r"column 'item', row 2: 'b\\x00', in 1 rows",
    ),
    "a label of text": (
        "label",
        ["0", "1", "x", "1"],
        True,
        r"^split 'test': the relation: column 'label' is string, in training it is float64",
    ),
    "another type": (
        "city",
        [1, 2, 3, 4],
        False,
        r"^split 'test': .*test\.parquet: column 'city' is int64, in training it is str",
    ),
    "no UTF-8": (
        "city",
        pa.array([b"x", b"y", b"\xfc", b"x"]).view(pa.string()),
        False,
        r"test\.parquet: .*; write texts as UTF-8",
    ),
    "a line break": (
        "city",
        ["x", "y\n7,u", "y", "x"],
        True,
        r"column 'city', row 1: 'y\\n7,u', in 1 rows: a line break.*read_csv",
    ),
}


@pytest.mark.parametrize("fault", PREPARED)
def test_preprocessing_refuses(fault: str, tmp_path: Path) -> None:
    column, values, by_sql, message = PREPARED[fault]
    with pytest.raises(DataError, match=message) as caught:
        prepare(tmp_path, {**ROWS, column: values}, by_sql=by_sql)
    assert len(str(caught.value)) < 200 + len(str(tmp_path))
    assert not (tmp_path / "out").exists()


SQL = {
    "a split without rows": (
        "SELECT 1 AS city WHERE false",
        r"^split 'train' has no rows; give it at least one$",
    ),
    "types are mixed": (
        "FROM 'mixed.json'",
        r"'city' is JSON, in which values of several types .*CAST\(city AS VARCHAR\)$",
    ),
    "a column of one file": (
        "FROM read_csv(['a.csv', 'b.csv'])",
        r"^b\.csv: column 'city' is missing; write the same columns",
    ),
    "an empty file": (
        "FROM 'empty.parquet'",
        r"empty\.parquet: is of another format, or was cut",
    ),
    "no file": ("FROM 'none.csv'", r"^none\.csv: no such file; check the path$"),
    "a typo": (
        "SELECT cty FROM 'a.csv'",
        r'^DuckDB: Binder Error: Referenced column "cty" not found .*; correct the SQL',
    ),
    "a reserved name": (
        "SELECT city, user at FROM 'a.csv'",
        r"^DuckDB: Parser Error: .*correct the SQL \(quote reserved names",
    ),
    "a sum": (
        "SELECT 9223372036854775807 + i AS city FROM range(2) t(i)",
        r"^DuckDB: Out of Range Error: Overflow in addition of INT64 .*correct the SQL",
    ),
    "a value": (
        "SELECT CAST(user AS BIGINT) AS city FROM 'a.csv'",
        # DuckDB 1 names no line.
        r"a\.csv: line 2: .*; mend it, or read the file by read_csv|Could not convert string 'x'",
    ),
}


@pytest.mark.parametrize("fault", SQL)
def test_what_sql_cannot_read_is_told_in_a_line(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "a.csv": "user,city\nx,y\n",
        "b.csv": "user\nx\n",
        "mixed.json": '{"city": 1}\n{"city": "x"}\n',
        "empty.parquet": "",
    }.items():
        (tmp_path / name).write_text(text)
    sql, message = SQL[fault]

    def build(_: None, con: Any) -> Prepare:
        steps = Preprocessor([Categorify(column="city")])
        return Prepare(preprocessor=steps, splits={"train": con.sql(sql)})

    with pytest.raises(DataError, match=message) as caught:
        run_preprocess(PreprocessJob(name="own", build=build, out="out"))
    assert len(str(caught.value)) <= 200
    assert "\n" not in str(caught.value)


def test_the_steps_are_fitted_on_the_training_rows_whatever_is_named_first(
    tmp_path: Path,
) -> None:
    for name, cities in (("test", ["x"]), ("train", ["y", "z"])):
        pq.write_table(pa.table({"city": cities}), tmp_path / f"{name}.parquet")
    prepared = Prepare(
        preprocessor=Preprocessor([Categorify(column="city")]),
        splits={part: tmp_path / f"{part}.parquet" for part in ("test", "train")},
    )
    job = PreprocessJob(
        name="own", build=lambda config, con: prepared, out=str(tmp_path / "out")
    )
    folder = run_preprocess(job)
    rows = [
        pq.read_table(folder / part)["city"].to_pylist() for part in ("train", "test")
    ]
    assert rows == [[1, 2], [0]]


def test_a_role_that_no_step_writes_names_no_column_of_the_log() -> None:
    steps = Preprocessor([Categorify(column="town")])
    with pytest.raises(
        ValueError, match=r"no step writes 'city'; the steps write town"
    ):
        Prepare(preprocessor=steps, splits={"train": "log.parquet"}, item="city")
    with pytest.raises(ValueError, match=r"'like' is not kept; .*keep=\['like'\]"):
        Prepare(preprocessor=steps, splits={"train": "log.parquet"}, label="like")


LINES = [f"{k % 9},c{k % 5},{k % 2}" for k in range(3000)]
TYPES = {"user": "BIGINT", "city": "VARCHAR", "label": "BIGINT"}
HEADER = "user,city,label"


def csv(header: str, *lines: tuple[int, str]) -> str:
    """3,000 lines, with others put in before these numbers."""
    all_lines = list(LINES)
    for number, line in sorted(lines, reverse=True):
        all_lines.insert(number, line)
    return "\n".join([header, *all_lines, ""])


CSV: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "a quote without its end": (
        # Line 52 has quotes as well, and both their ends.
        [csv(HEADER, (50, '1,"c1",0'), (1000, '7,"c1,1'))],
        {},
        r"0\.csv: line 1003: a quote without its end .*3,003 lines, 1,003 rows; mend",
    ),
    "closed far below": (
        [csv(HEADER, (1000, '7,"c1,1'), (1500, '9,c1",1'))],
        {},
        r"line 1002: a quote .*3,003 lines, 2,502 rows",
    ),
    "a quote inside of a value": (
        [csv(HEADER, (50, '1,"c"1",0'))],
        {},
        r"line 52: a quote inside of a value is not doubled; mend it",
    ),
    "a quote behind a backslash": (
        [csv(HEADER, (50, r'1,"c \" 1",0'))],
        {},
        r"line 52: a quote inside of a value is not doubled",
    ),
    "missing in the second file": (
        [csv(HEADER), "usr,city,label\n1,c,0\n"],
        {},
        r"1\.csv: column 'user' is missing, .*did you mean 'usr'",
    ),
    "a delimiter of two characters": (
        [csv(HEADER)],
        {"delimiter": "::"},
        r"^delimiter='::': must be one character; .*sed 's/::/\\t/g'",
    ),
    "another delimiter": (
        ["user;city;label\n1;c;0\n"],
        {},
        r"column 'user' is missing, it has user;city;label;",
    ),
    "empty": ([""], {}, r"0\.csv: Empty CSV file; mend it, or give its delimiter"),
    "a fraction": (
        [csv(HEADER, (50, "1,c1"), (60, "1.2,c,0"))],
        {"broken": 1},
        r"line 63: column 'user': no int64: invalid value '1\.2'; mend it",
    ),
    "too few values": (
        [csv(HEADER, (50, "1,c1"), (60, "2"))],
        {"broken": 1},
        r"line 52: 2 values, must be 3 \(2 broken lines\); mend them.*\(broken=2\)",
    ),
    "no encoding": (
        [csv(HEADER)],
        {"encoding": "klingon"},
        r"unknown encoding: klingon; ",
    ),
    "another encoding": (
        [csv(HEADER, (50, "1,\xff,0"))],
        {},
        r"line 52: column 'city': no string: invalid UTF8 data; .*or encoding",
    ),
}


def write_csv(folder: Path, texts: list[str]) -> list[Path]:
    paths = [folder / f"{number}.csv" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode("latin-1"))
    return paths


@pytest.mark.parametrize("fault", CSV)
def test_read_csv_refuses(fault: str, tmp_path: Path) -> None:
    texts, options, message = CSV[fault]
    paths = write_csv(tmp_path, texts)
    with connected(threads=1) as con, pytest.raises(DataError, match=message) as caught:
        read_csv(con, paths, TYPES, **options)
    assert len(str(caught.value)) < 250 + len(str(tmp_path))


def test_read_csv_reads_by_name_and_counts_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As pandas writes an index, with a name that occurs twice.
    swapped = ",label,more,more,user,city\n0,1,\xff,2,7,z\n"
    paths = write_csv(tmp_path, [csv(HEADER, (9, "x"), (20, "")), swapped])
    whole = gzip.compress(paths[0].read_bytes())
    paths[0].with_suffix(".csv.gz").write_bytes(whole)
    paths[1] = paths[1].rename(tmp_path / "log[1].csv")
    with connected(threads=1) as con:
        options: Any = {"encoding": "latin-1", "broken": 2}
        name = read_csv(con, [tmp_path / "*.csv.gz", *paths], TYPES, **options)
        rows = con.sql(f"FROM {name}").fetchall()
        assert (len(rows), rows[3000], rows[-1]) == (6001, (0, "c0", 0), (7, "z", 1))
        said = capsys.readouterr().out
        assert said.startswith("note: 2 broken lines are left out; ")
        assert "0.csv.gz: line 11: " in said
        paths[0].with_suffix(".csv.gz").write_bytes(whole[:-40])
        with pytest.raises(DataError, match=r"0\.csv\.gz: .*; mend it"):
            read_csv(con, tmp_path / "*.csv.gz", TYPES, **options)


TEXTS = {
    "BIGINT": ("1.2", "1e-3", "1_000", "true", "9223372036854775808", "\u0663"),
    "DOUBLE": ("1_0.5", "0x1F", "1d", "x"),
    "INT": ("1",),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_read_csv_takes_no_text_for_another_value(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with connected(threads=1) as con:
        for text in TEXTS[kind]:
            path.write_text(f'x,y\n"{text}",1\n', encoding="utf-8")
            rule = r"line 2: column 'x': no |^types: column 'x': 'INT' must be one of"
            with pytest.raises(DataError, match=rule) as caught:
                read_csv(con, path, {"x": kind})
            assert len(str(caught.value)) < 200 + len(str(tmp_path))


def test_integers_are_read_as_the_float64_that_pandas_writes_with_a_null(
    tmp_path: Path,
) -> None:
    files = {
        "a": pa.array([1.5, None, 2.5]),
        "b": pa.array([3, 4]),
        "c": pa.nulls(1),
        "day": pa.array([5, 6]),
        "text": pa.array(["7"]),
    }
    for name, values in files.items():
        pq.write_table(pa.table({"x": values}), tmp_path / f"{name}.parquet")
    steps = [FillMissing(column="x", value=0.0)]
    training = str(tmp_path / "[abc].parquet")
    fitted = Preprocessor(steps).fit(training)
    for source, numbers in ((training, [1.5, 0, 2.5, 3, 4, 0]), ("day", [5, 6])):
        path = source if source == training else tmp_path / f"{source}.parquet"
        fitted.transform(path, tmp_path / "out", overwrite=True)
        made = pq.read_table(tmp_path / "out")["x"].to_pylist()
        assert made == numbers, source
    with pytest.raises(DataError, match=r"'x' is string, in fitting it is float64"):
        fitted.transform(tmp_path / "text.parquet", tmp_path / "others")


def test_read_csv_keeps_what_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('n,f,t\n1,inf,"a""b"\n 007,nan,\n-5,1e-3,c\n', encoding="utf-16")
    types = {"n": "BIGINT", "f": "DOUBLE", "t": "VARCHAR"}
    with connected(threads=1) as con:
        log = read_csv(con, path, types, encoding="utf-16")
        rows = con.sql(f"FROM {log}").fetchall()
    assert str(rows).startswith("[(1, inf, 'a\"b'), (7, nan, None), (-5, 0.001")


# A time in a file and in a request is the same, or refused in both.
CLOCKS = (
    "2024-01-01",
    "2024-01-01T10:00:00.25",
    "2024-01-01 10:00:00+0200",
    "2024-01-01T23:30:00-05",
    "1969-12-31 23:59:59.9996",
    "2024-01-01 10:00:00 PST",
    "infinity",
    "2024/01/01",
    "2024-02-30",
    " 2024-01-01",
    "2024-01-01 24:00:00",
    "2024-01-01T10:00:00.1234567",
)


def test_a_time_in_a_csv_file_is_that_of_a_request(tmp_path: Path) -> None:
    raw = "timestamp[us]"
    path = tmp_path / "a.csv"
    read = 0
    with connected(threads=1) as con:
        con.execute("SET TimeZone='America/New_York'")
        for text in CLOCKS:
            path.write_text(f'at,x\n"{text}",1\n')
            try:
                log = read_csv(con, path, {"at": "TIMESTAMP"})
            except DataError:
                for rows in (1, 70):
                    with pytest.raises(DataError, match="column 'at': "):
                        read_cells("at", [text] * rows, raw)
                continue
            column = con.sql(f'SELECT "at" FROM {log}')
            (value,) = read_cells("at", arrow_of(column), raw).values
            # A few values are read without Arrow.
            for rows in (1, 70):
                assert read_cells("at", [text] * rows, raw).values[0] == value, text
            read += 1
    assert read == 5


def arrow_of(relation: Any) -> Any:
    return relation.to_arrow_table().column(0).combine_chunks()


def test_a_folder_of_csv_files_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "train.csv").touch()
    rule = r"has train\.csv and no train\.parquet; .* read csv by rec\.data\.preprocess"
    with pytest.raises(DataError, match=rule):
        load_set(DataConfig(folder=str(tmp_path.parent), name=tmp_path.name), "labels")
