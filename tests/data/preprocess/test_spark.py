"""DuckDB and Spark fit the same and transform to the same values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip(
    "ibis", reason="needs ibis-framework: pip install 'torchrec-ext[data,spark]'"
)
pytest.importorskip("duckdb", reason="needs DuckDB: pip install 'torchrec-ext[data]'")
pytest.importorskip(
    "pyspark", reason="needs PySpark: pip install 'torchrec-ext[spark]'"
)

from tests.data.preprocess_cases import EVERY_STEP, random_rows, write
from torchrec_ext.data.preprocess import Categorify, Normalize, Preprocessor
from torchrec_ext.data.preprocess.engines import Spark
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:pyspark", "ignore::DeprecationWarning:ibis"
)


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]").config(
        "spark.ui.enabled", "false"
    )
    # Interpreted: to compile each of these small queries takes longer than all of them
    # run.
    for name, value in {"wholeStage": "false", "factoryMode": "NO_CODEGEN"}.items():
        builder = builder.config(f"spark.sql.codegen.{name}", value)
    builder = builder.config("spark.sql.adaptive.enabled", "false")
    builder = builder.config(
        "spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    )
    try:
        found = (
            builder.config("spark.sql.shuffle.partitions", "1")
            .config("spark.sql.session.timeZone", "Asia/Tokyo")
            .getOrCreate()
        )
    except (PySparkException, RuntimeError) as error:
        pytest.skip(f"needs Java 17 or newer to start Spark ({type(error).__name__})")
    yield found
    found.stop()


def rows_of(folder: Path) -> list[str]:
    return sorted(map(repr, pq.read_table(folder).to_pylist()))


@pytest.mark.slow
def test_both_engines_agree_on_every_value(session: Any, tmp_path: Path) -> None:
    train, other = (
        write(random_rows(400, seed=seed), tmp_path / f"{seed}.parquet")
        for seed in (1, 2)
    )
    fitted = {
        name: EVERY_STEP.fit(train, engine=engine)
        for name, engine in (("duckdb", "duckdb"), ("spark", session))
    }
    for name, engine in (("duckdb", "duckdb"), ("spark", session)):
        fitted[name].save(tmp_path / f"saved_{name}")
        assert fitted["duckdb"].transform(other, tmp_path / name, engine=engine) == 400
    assert (tmp_path / "saved_duckdb/preprocessor.json").read_bytes() == (
        tmp_path / "saved_spark/preprocessor.json"
    ).read_bytes()
    assert rows_of(tmp_path / "duckdb") == rows_of(tmp_path / "spark")
    assert session.conf.get("spark.sql.session.timeZone") == "Asia/Tokyo", (
        "the session's settings are its owner's"
    )


@pytest.mark.slow
def test_spark_writes_row_groups_and_checksums_and_refuses_missing_values(
    session: Any, tmp_path: Path
) -> None:
    rows = random_rows(200, seed=3)
    steps = Preprocessor([Categorify(column="item"), Normalize(column="price")])
    with Spark(session) as engine:
        fitted = steps.fit(write(rows, tmp_path / "a.parquet"), engine=engine)
        with pytest.raises(
            DataError,
            match=r"column 'price': the result is missing.*put FillMissing\(column='price', ...\)",
        ):
            fitted.transform(tmp_path / "a.parquet", tmp_path / "out", engine=engine)
        assert not list(tmp_path.glob("*out*"))
        rows["price"] = [
            value if value is not None and math.isfinite(value) else 0.0
            for value in rows["price"]
        ]
        fitted.transform(
            write(rows, tmp_path / "b.parquet"),
            tmp_path / "out",
            engine=engine,
            order_by=("price",),
        )
    (part,) = (tmp_path / "out").glob("*.parquet")
    assert (
        pq.ParquetFile(part, page_checksum_verification=True).metadata.num_rows == 200
    )
    damaged = bytearray(part.read_bytes())
    damaged[40] ^= 1
    part.write_bytes(damaged)
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(part, page_checksum_verification=True).read()


def test_an_unknown_engine_is_told() -> None:
    with pytest.raises(
        DataError,
        match=r"engine='sprak': there is no such engine; write duckdb, spark or a Spark master URL",
    ):
        Preprocessor([Categorify(column="item")]).fit("a.parquet", engine="sprak")


def test_a_second_master_is_refused(session: Any) -> None:
    with pytest.raises(
        DataError,
        match=r"engine='local\[3\]': a Spark session is active here with the master local\[1\]",
    ):
        Spark("local[3]")


def test_rows_that_other_machines_kept_are_missed(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where executors write to disks of their own, this machine sees fewer rows, or none."""
    path = write({"item": ["a", "b"]}, tmp_path / "a.parquet")
    fitted = Preprocessor([Categorify(column="item")]).fit(path, engine=session)
    monkeypatch.setattr(
        Spark, "write", lambda self, expression, sink: self._look_over(sink)
    )
    with pytest.raises(
        DataError,
        match=r"out: got 0 of the 2 rows of .*choose a folder that all of them",
    ):
        fitted.transform(path, tmp_path / "out", engine=session)
    assert not (tmp_path / "out").exists()
