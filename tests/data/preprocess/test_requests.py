"""The half that serves: steps on a request's rows, saved states, and what is refused. Needs no DuckDB."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import subprocess
import sys
import zoneinfo
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_ext.data.preprocess import (
    Bucketize,
    Categorify,
    Cross,
    FillMissing,
    FittedPreprocessor,
    HashBucket,
    History,
    LogClip,
    Normalize,
    Preprocessor,
    Step,
    TimeFeatures,
    Vocabulary,
    categorical,
)
from torchrec_ext.data.preprocess.columns import arrow_type, read_cells, working_type
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit


def fitted(
    raw: Mapping[str, str], *pairs: tuple[Step, Any], keep: tuple[str, ...] = ()
) -> FittedPreprocessor:
    return FittedPreprocessor(pairs, raw, keep)


BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
CITIES = Vocabulary(pa.array(["Rome", "Oslo"]))
CITY = fitted(
    {"city": "string", "label": "float32"},
    (Categorify(column="city"), CITIES),
    keep=("label",),
)


def test_known_unknown_and_null_ids() -> None:
    made = CITY.online({"city": ["Oslo", "Bern", None, "Rome"], "label": [1, 0, 0, 1]})
    assert made["city"].values.tolist() == [2, 0, 0, 1]
    assert made["label"].values.dtype == "float32"
    assert list(CITY.online({"city": ["Oslo"], "other": ["left aside"]})) == ["city"], (
        "a request has no label"
    )
    assert (CITY.vocab, CITY.dense, CITY.request_columns) == (
        {"city": 3},
        (),
        {"city": "string"},
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"city": ["a", 7]}, r"column 'city': \['a', 7\] is not string"),
        (
            {"city": ["a", "\ud800"]},
            r"column 'city': .*'\\ud800'\] is not string \(.*surrogates not allowed",
        ),
        (
            {"city": "Oslo"},
            r"column 'city': 'Oslo' is one value; give a list with one entry per row",
        ),
        (
            {"cty": ["Oslo"]},
            r"the request: column 'city' is missing, did you mean 'cty'",
        ),
        (
            {"city": ["a"], "label": [1.0, 2.0]},
            r"different numbers of rows, \{'city': 1, 'label': 2\}",
        ),
        (
            {"city": ["a"], "label": [None]},
            r"column 'label', row 0: the result is missing.*fill it where",
        ),
    ],
)
def test_requests_that_are_refused(rows: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        CITY.online(rows)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("int64", 1.5, r"1.5\] is not int64 \(Float value 1.500000 was truncated"),
        ("int64", True, r"True\] is not int64 \(it is bool\)"),
        ("int64", "7", r"'7'\] is not int64 \(it is string\)"),
        ("int64", float("nan"), r"nan\] is not int64"),
        ("float64", "0.5", r"'0.5'\] is not float64 \(it is string\)"),
        ("string", 7, r"7\] is not string \(it is int64\)"),
        ("string", b"a", r"b'a'\] is not string \(it is binary\)"),
        ("list<int64>", 7, r"7\] is not list<int64> \(it is int64\)"),
        ("list<int64>", [7, 0.5], r"\[7, 0.5\]\] is not list<int64>"),
        (
            "list<string>",
            [7],
            r"\[7\]\] is not list<string> \(it is list<item: int64>\)",
        ),
        (
            "timestamp[us]",
            "01/02/2024",
            r"'01/02/2024'\] is not timestamp\[us\] \(must be a date in ISO 8601, such",
        ),
        (
            "timestamp[us]",
            "2024-02-30",
            r"'2024-02-30'\] is not timestamp\[us\] \(must be a date in ISO 8601, such",
        ),
        # Of which unit nobody knows.
        ("timestamp[us]", 7, r"7\] is not timestamp\[us\] \(it is int64\)"),
    ],
)
def test_a_value_of_another_type(kind: str, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"column 'x': \[None, {message}"):
        read_cells("x", [None, value], kind)


VALUES: dict[str, list[Any]] = {
    "int64": [0, -(2**63), 2**63 - 1, 2**63],
    "bool": [True, False, 1],
    "float64": [0.1, -0.0, float("nan"), float("-inf"), 2**53, 2**53 + 1],
    "float32": [0.1, 1e300, 1e-300, 2**24, -(2**24) - 1],
    "string": ["", "\x00", "\u00fc", "\U0001f363", "\ud83d", "\ude00"],
    "timestamp[s]": [
        *("2024-02-29", "1969-12-31 23:59:58", "1969-12-31 23:59:58.5", "2024-02-30"),
        *("2024-01-01 24:00", "\u0662024-01-01", "x", ""),
    ],
    "timestamp[ms]": ["2023-11-14T22:13:20.001", 1_700_000_000_000],
    "timestamp[us]": [
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4567),
        datetime.datetime(2024, 2, 29, 23, tzinfo=BERLIN),
    ],
    "timestamp[ns]": [
        *("2024-02-29T18:30Z", "2024-02-29 18:30:00.25-0130", "9999-12-31"),
        "2024-02-29T18:30:00.000001+14",
    ],
    "list<timestamp[s]>": [["2024-02-29", None], []],
    "list<int64>": [[1, None], [], [2**63 - 1]],
    "list<float32>": [[0.1], [None]],
    "list<string>": [["a", None], [""]],
}


@pytest.mark.parametrize("kind", VALUES)
@given(data=st.data())
def test_plain_values_are_read_as_arrow_reads_them(
    kind: str, data: st.DataObject
) -> None:
    value = st.none() | st.sampled_from(VALUES[kind])
    values = data.draw(st.lists(value, max_size=3))

    def read(data: Any) -> Any:
        try:
            cells = read_cells("x", data, kind)
        except DataError:
            return "refused"
        # Times are compared in their unit.
        dtype = arrow_type(re.sub(r"timestamp.*\]", "int64", kind))
        return cells.unit, cells.array(working_type(dtype)).to_pylist()

    # Of Python's own sequences only a list is read without Arrow.
    assert repr(read(values)) == repr(read(tuple(values)))


@pytest.mark.parametrize("one_hash", [False, True])
@pytest.mark.parametrize("many", [1, 200])
@pytest.mark.parametrize("few", [0, 300], ids=["by Arrow's table", "by index"])
@pytest.mark.parametrize("dtype", [pa.string(), pa.large_string(), pa.int64()])
def test_a_vocabulary_knows_its_values_and_no_others(
    dtype: pa.DataType,
    few: int,
    many: int,
    one_hash: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(categorical, "_FEW", few)
    if one_hash:
        monkeypatch.setattr(
            categorical, "_hashes", lambda texts: np.full(len(texts), 7)
        )
    words: list[Any] = ["", "a", "a\0", "\0a", "\u00e9", *map(str, range(20))]
    asked: list[Any] = ["\0a", "", "19", "99"]
    if dtype == pa.int64():
        words = [0, 5, -7, 2**63 - 1, -(2**63), *range(20, 40)]
        asked = [2**63 - 1, 0, 39, 99]
    vocabulary = Vocabulary(pa.array(words, dtype))
    for values, ids in (
        (asked, [4, 1, len(words), 0]),
        (words, range(1, len(vocabulary))),
    ):
        kind = "int64" if dtype == pa.int64() else "string"
        column = read_cells("x", list(values) * many, kind)
        assert vocabulary.ids(column).tolist() == list(ids) * many


def test_a_history_needs_a_time_for_each_item() -> None:
    raw = {"user": "int64", "item": "string", "t": "timestamp[us]"}
    step = fitted(
        raw,
        (History(user="user", item="item", time="t", length=2), {}),
        (HashBucket(column="history", buckets=5), {}),
    )
    assert step.request_columns == {
        "t": "timestamp[us]",
        "history_items": "list<string>",
        "history_times": "list<timestamp[us]>",
    }
    day = [
        datetime.datetime(2024, 1, d, tzinfo=datetime.timezone.utc) for d in range(1, 6)
    ]
    made = step.online(
        {
            "t": [day[3]],
            "history_items": [["a", "b", "c", "d", "e"]],
            "history_times": [day[::-1]],
        }
    )
    assert made["history"].lengths.tolist() == [2]
    with pytest.raises(
        DataError,
        match=r"'history_items' and 'history_times' have lists of different lengths",
    ):
        step.online(
            {"t": day[:2], "history_items": [[], ["a"]], "history_times": [[], day[:2]]}
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Categorify(column="x", min_count=0),
            r"Categorify\('x'\): min_count=0: must be 1 or more",
        ),
        (lambda: HashBucket(column="x", buckets=0), "buckets=0"),
        (lambda: Cross(columns=("x",), buckets=3), "combines two columns or more"),
        (lambda: Bucketize(column="x"), "either boundaries or quantiles"),
        (
            lambda: Bucketize(column="x", boundaries=(2, 1)),
            r"boundaries=\(2, 1\): must rise",
        ),
        (
            lambda: FillMissing(column="x", value=10**400),
            "value=1000.*: must be a finite number",
        ),
        (lambda: LogClip(column="x", low=2, high=1), "low=2, high=1"),
        (
            lambda: TimeFeatures(column="x", zone="Europe/Berlim"),
            "there is no such time zone; write a name",
        ),
        (
            lambda: TimeFeatures(column="x", features=("minute",)),
            "choose from hour, weekday",
        ),  # type: ignore[arg-type]
        (
            lambda: Preprocessor([Normalize(column="x")], keep=("x",)),
            r"keep=\['x'\]: a step writes these columns",
        ),
        (
            lambda: Preprocessor(
                [
                    Categorify(column="u"),
                    History(user="u", item="i", time="t", length=1),
                ]
            ),
            "put it first",
        ),
        (
            lambda: Preprocessor(
                [Categorify(column="a"), FillMissing(column="a", value=0)]
            ),
            r"FillMissing\('a'\) replaces the ids of Categorify\('a'\).*; put it first",
        ),
        (
            lambda: Preprocessor(
                [
                    Normalize(column="x", output="o"),
                    Categorify(column="a", output="o"),
                ]
            ),
            r"Categorify\('o'\) writes 'o', as Normalize\('o'\) does",
        ),
        (
            lambda: Categorify(column="i", also=("seen",), skip=("sen",)),
            r"Categorify\('i'\): skip has 'sen', must be of i, seen;",
        ),
        (
            lambda: Preprocessor(
                [
                    History(user="u", item="i", time="t", length=1, also=("c",)),
                    Categorify(column="i", also=("history",), skip=("history",)),
                ]
            ),
            r"has skip='history', of which History\('history', 'history_c'\) writes other",
        ),
        (lambda: Preprocessor([]), "give at least one"),
        (lambda: FillMissing(column="x", value="?"), r"value='\?': must be a finite"),  # type: ignore[arg-type]
        (
            lambda: Preprocessor([Categorify(column="a"), Categorify(column="A")]),
            r"'A' and 'a' differ in case alone",
        ),
    ],
)
def test_steps_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_empty_vocabulary_is_loaded(tmp_path: Path) -> None:
    nothing = Vocabulary(pa.array([], pa.string()))
    empty = fitted({"city": "string"}, (Categorify(column="city"), nothing))
    empty.save(tmp_path / "empty")
    loaded = FittedPreprocessor.load(tmp_path / "empty")
    assert loaded.online({"city": ["Oslo"]})["city"].values.tolist() == [0]


def rewrite(folder: Path, **changes: Any) -> None:
    main = json.loads((folder / "preprocessor.json").read_text()) | changes
    text = json.dumps(main)
    (folder / "preprocessor.json").write_text(text)
    (folder / "preprocessor.sha256").write_text(
        hashlib.sha256(text.encode()).hexdigest()
    )


def test_what_loading_refuses(tmp_path: Path) -> None:
    folder = tmp_path / "saved"

    def refused(message: str) -> None:
        with pytest.raises(DataError, match=message):
            FittedPreprocessor.load(folder)
        CITY.save(folder, overwrite=True)

    refused(r"preprocessor\.json: no such file; name the whole folder")
    rewrite(folder, version=1)
    refused(r"format version 1, this package reads 3; preprocess the log again")
    rewrite(folder, steps=[{"step": "Categorfy", "fields": {}}])
    refused(r"cannot be read \(KeyError: 'Categorfy'\); copy the folder again")
    rewrite(
        folder,
        steps=[{"step": "Categorify", "fields": {"column": "x", "min_count": 0}}],
    )
    refused(r"cannot be read \(ValueError: Categorify\('x'\): min_count=0")
    (folder / "preprocessor.json").write_text(
        (folder / "preprocessor.json").read_text().replace("city", "cite")
    )
    refused(
        r"preprocessor\.json: does not fit preprocessor\.sha256: it was changed or damaged"
    )
    data = bytearray((folder / "vocabulary-000.parquet").read_bytes())
    data[20] ^= 1
    (folder / "vocabulary-000.parquet").write_bytes(data)
    refused(r"vocabulary-000\.parquet: does not have the SHA-256 in preprocessor\.json")
    (folder / "vocabulary-000.parquet").unlink()
    refused(r"vocabulary-000\.parquet: no such file; name the whole")


@pytest.mark.launch
def test_serving_imports_neither_duckdb_nor_torch(tmp_path: Path) -> None:
    CITY.save(tmp_path / "saved")
    program = (
        "import sys; from torchrec_ext.data.preprocess import FittedPreprocessor as F; "
        f"F.load({str(tmp_path / 'saved')!r}).online({{'city': ['Oslo']}}); "
        "print([name for name in ('torch', 'duckdb') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
