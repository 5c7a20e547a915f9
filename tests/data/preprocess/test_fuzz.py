"""Any content of a saved preprocessor, with digests made for it, is loaded or refused in words, and never runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip(
    "ibis", reason="needs ibis-framework[duckdb]: pip install 'torchrec-ext[data]'"
)
pytest.importorskip(
    "duckdb", reason="needs ibis-framework[duckdb]: pip install 'torchrec-ext[data]'"
)

from torchrec_ext.data.preprocess import (
    Categorify,
    FittedPreprocessor,
    Normalize,
    Preprocessor,
)
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ibis")
EXAMPLES = [100, pytest.param(5_000, marks=pytest.mark.slow)]
EDITS = st.lists(
    st.tuples(st.integers(0, 10**6), st.binary(max_size=9), st.integers(0, 9)),
    min_size=1,
    max_size=4,
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    pq.write_table(
        pa.table({"city": ["a", "b", "a"], "price": [1.0, 2.0, 4.0]}),
        path / "rows.parquet",
    )
    fitted = Preprocessor([Categorify(column="city"), Normalize(column="price")]).fit(
        path / "rows.parquet"
    )
    fitted.save(path / "saved")
    return path / "saved"


def seal(folder: Path, text: bytes) -> None:
    """Puts ``text`` in place of the JSON, with the digest that belongs to it."""
    (folder / "preprocessor.json").write_bytes(text)
    (folder / "preprocessor.sha256").write_text(hashlib.sha256(text).hexdigest() + "\n")


def survives(folder: Path) -> None:
    with contextlib.suppress(DataError):
        assert isinstance(FittedPreprocessor.load(folder), FittedPreprocessor)


def edited(data: bytes, edits: list[tuple[int, bytes, int]]) -> bytes:
    for place, new, old in edits:
        at = place % (len(data) + 1)
        data = data[:at] + new + data[at + old :]
    return data


def fuzzed(examples: int, strategy: Any, test: Any) -> None:
    settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )(given(strategy)(test))()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_json_with_other_bytes_in_it(folder: Path, examples: int) -> None:
    whole = (folder / "preprocessor.json").read_bytes()

    def other(edits: list[tuple[int, bytes, int]]) -> None:
        seal(folder, edited(whole, edits))
        survives(folder)

    try:
        fuzzed(examples, EDITS, other)
    finally:
        seal(folder, whole)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_json_with_another_value_in_it(folder: Path, examples: int) -> None:
    whole = (folder / "preprocessor.json").read_bytes()

    def other(drawn: tuple[int, Any]) -> None:
        content = json.loads(whole)
        holders = list(_holders(content))
        holder, key = holders[drawn[0] % len(holders)]
        holder[key] = drawn[1]
        seal(folder, json.dumps(content).encode())
        survives(folder)

    try:
        fuzzed(examples, st.tuples(st.integers(0, 999), JSON), other)
    finally:
        seal(folder, whole)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_vocabulary_with_other_bytes_in_it(folder: Path, examples: int) -> None:
    file = next(folder.glob("vocabulary-*.parquet"))
    whole = (folder / "preprocessor.json").read_bytes()
    data = file.read_bytes()

    def other(edits: list[tuple[int, bytes, int]]) -> None:
        changed = edited(data, edits)
        file.write_bytes(changed)
        content = json.loads(whole)
        content["steps"][0]["sha256"] = hashlib.sha256(changed).hexdigest()
        seal(folder, json.dumps(content).encode())
        survives(folder)

    try:
        fuzzed(examples, EDITS, other)
    finally:
        file.write_bytes(data)
        seal(folder, whole)


def _holders(content: Any) -> Any:
    """(holder, key) of every value in a JSON."""
    for key, value in (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    ):
        yield content, key
        yield from _holders(value)
