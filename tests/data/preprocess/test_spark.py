"""A fitted preprocessor in Spark: the executors apply the same code to the same rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("duckdb", reason="needs the extra `data`")
pytest.importorskip("pyspark", reason="needs PySpark: pip install 'pyspark>=4'")
pytest.importorskip("pandas", reason="needs pandas, which PySpark's mapInArrow imports")

from tests.data.preprocess_cases import write
from torchrec_ext.data.preprocess import (
    Categorify,
    HashBucket,
    Lists,
    Normalize,
    Preprocessor,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:pyspark")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    # The executors' Python is not told pytest's path.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[1]")
    for name in ("ui.enabled", "sql.adaptive.enabled"):
        builder = builder.config(f"spark.{name}", "false")
    try:
        found = builder.getOrCreate()
    except (PySparkException, RuntimeError) as error:
        pytest.skip(f"needs Java 17 or newer to start Spark ({type(error).__name__})")
    yield found
    found.stop()


@pytest.mark.slow
def test_spark_writes_what_this_process_writes(session: Any, tmp_path: Path) -> None:
    rows = {
        "city": ["a", None, "b", "a"] * 50,
        "age": [3, 40, 18, 99] * 50,
        "tags": [["x", "y"], [], None, ["x"]] * 50,
        "label": [0.0, 1.0, 0.0, 1.0] * 50,
    }
    log = write(rows, tmp_path / "log.parquet")
    steps = [
        Categorify(column="city"),
        Normalize(column="age"),
        Lists(column="tags", max_length=1),
        HashBucket(column="tags", buckets=9),
    ]
    fitted = Preprocessor(steps, keep=["label"]).fit(log)
    fitted.transform(log, tmp_path / "here")
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(fitted.schema)
    made = session.read.parquet(str(log)).mapInArrow(fitted.batches, schema)
    made.write.parquet(str(tmp_path / "there"))
    here, there = (
        sorted(map(repr, pq.read_table(tmp_path / name).to_pylist()))
        for name in ("here", "there")
    )
    assert here == there
