"""Spark as an engine, for data that outgrows one machine. The order of rows is Spark's."""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

import pyarrow as pa

from torchrec_ext.data.preprocess.engines import Table, need_ibis
from torchrec_ext.data.preprocess.expressions import exact
from torchrec_ext.data.preprocess.sources import Files
from torchrec_ext.data.preprocess.writing import ROW_GROUP, Sink
from torchrec_ext.schema import DataError

# Two zones in one session would make two hours of one time; ANSI mode would raise where DuckDB and numpy do not.
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "false",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
}


class Spark:
    """An existing Spark session, or one for a master URL.

    Args:
        session: ``spark``, a master URL or a SparkSession; one that was active before stays so, with its settings as they were.

    Raises:
        DataError: PySpark is missing, or no session can be started.
    """

    name = "spark"

    def __init__(self, session: Any) -> None:
        ibis = need_ibis("pyspark")
        from pyspark.sql import SparkSession

        active = SparkSession.getActiveSession()
        self._own = isinstance(session, str) and active is None
        if active is not None and isinstance(session, str) and session not in ("spark", active.conf.get("spark.master", session)):
            raise DataError(
                f"engine={session!r}: a Spark session is active here with the master {active.conf.get('spark.master')}, and a "
                "process has one; give engine='spark' to use it, or stop it first"
            )
        self.session = _start(session, SparkSession) if isinstance(session, str) else session
        if self._own:
            self.session.sparkContext.setLogLevel("ERROR")  # it warns of long plans and of folders with a dot, which ours are
        self._before = {name: self.session.conf.get(name, None) for name in _SETTINGS}
        for name, value in _SETTINGS.items():
            self.session.conf.set(name, value)
        self.ibis = ibis.pyspark.connect(self.session)
        self._names = itertools.count()
        self._views: list[str] = []

        @ibis.udf.scalar.builtin(name="conv")  # type: ignore[untyped-decorator]
        def conv(digits: str, base: int, wanted: int) -> str:
            """Spark's own."""
            raise NotImplementedError

        self._conv = conv

    def __enter__(self) -> Spark:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, files: Files) -> Table:
        """The files as a view."""
        reader = self.session.read
        roots = {file.name.split(f"/{next(iter(file.partitions))}=")[0] for file in files.files if file.partitions}
        if roots:
            reader = reader.option("basePath", min(roots, key=len))
        return self._view(
            reader.parquet(*(_pattern(file.name) for file in files.files)).select(*(f"`{name}`" for name in files.schema))
        )

    def owns(self, table: Table) -> bool:
        """A table of Spark's."""
        return bool(table.get_backend().name == "pyspark")

    def register(self, table: pa.Table) -> Table:
        """The table as a view."""
        try:
            frame = self.session.createDataFrame(table)
        except TypeError:  # before Spark 4
            frame = self.session.createDataFrame(table.to_pandas())
        return self._view(frame)

    def stage(self, expression: Table) -> Table:
        """A temporary view."""
        return self._view(self._frame(expression))

    def collect(self, expression: Table) -> pa.Table:
        """The rows, in memory."""
        return self._frame(expression).toArrow()

    def write(self, expression: Table, sink: Sink) -> int:
        """Lets the executors write, with page checksums, and then looks the result over."""
        frame = self._frame(expression)
        frame = frame.select(*(frame[f"`{name}`"].cast(_spark_type(kind)) for name, kind in sink.columns.items()))
        options = {
            "parquet.page.write-checksum.enabled": "true",
            "parquet.block.row.count.limit": str(ROW_GROUP),
            "maxRecordsPerFile": str(64 * ROW_GROUP),
        }
        frame.write.options(**options).mode("append").parquet(_address(str(sink.folder)))
        return self._look_over(sink)

    def _look_over(self, sink: Sink) -> int:
        from pyspark.sql import functions as f

        # With a schema, since Spark finds none where it sees no file: see the count of rows in `offline`.
        fields = ", ".join(f"`{name}` {_spark_type(kind)}" for name, kind in sink.columns.items())
        written = self.session.read.schema(fields).parquet(_pattern(str(sink.folder)))

        def bad(name: str, kind: str) -> Any:
            column = f.col(f"`{name}`")
            if kind.startswith("list"):
                return column.isNull() | f.exists(column, lambda value: value.isNull())
            if kind not in ("float32", "float64"):
                return column.isNull()
            return column.isNull() | f.isnan(column) | (f.abs(column) == float("inf"))

        counts = [f.sum(bad(name, kind).cast("long")).alias(str(at)) for at, (name, kind) in enumerate(sink.columns.items())]
        row = written.agg(f.count(f.lit(1)), *counts).first()
        for name, count in zip(sink.columns, row[1:], strict=True):
            if count:
                raise sink.missing(name, None, count)
        sink.rows = row[0]
        return sink.rows

    def _frame(self, expression: Table) -> Any:
        return self.session.sql(self.ibis.compile(expression))

    def _view(self, frame: Any) -> Table:
        name = f"torchrec_ext_{id(self)}_{next(self._names)}"
        frame.createOrReplaceTempView(name)
        self._views.append(name)
        return self.ibis.table(name)

    def text(self, value: str) -> Any:
        """A string literal."""
        import ibis

        return ibis.literal(value)

    def hex_to_int(self, digits: Any) -> Any:
        """Spark's ``conv`` gives decimal digits."""
        return self._conv(digits, 16, 10).cast("int64")

    def is_finite(self, column: Any) -> Any:
        """Two comparisons; to Spark NaN is greater than every number."""
        return ~column.isnan() & (column.abs() < exact(float("inf")))

    def close(self) -> None:
        """Drops the views; stops the session if it was started here."""
        for name in self._views:
            self.session.catalog.dropTempView(name)
        for name, value in self._before.items():
            if value is None:
                self.session.conf.unset(name)
            else:
                self.session.conf.set(name, value)
        if self._own:
            self.session.stop()


def _spark_type(kind: str) -> str:
    if kind.startswith("list"):
        return f"array<{_spark_type(kind[5:-1])}>"
    return {"int64": "bigint", "float32": "float", "float64": "double"}.get(kind, kind)


def _pattern(name: str) -> str:
    """The address as Spark reads it: brackets and stars are no pattern here."""
    return re.sub(r"([*?{}\[\]\\])", r"\\\1", _address(name))


def _address(name: str) -> str:
    return name if "://" in name else f"file://{os.path.abspath(name)}"


def _start(master: str, session: Any) -> Any:
    builder = session.builder.appName("torchrec_ext preprocessing").config("spark.ui.showConsoleProgress", "false")
    if master != "spark":
        builder = builder.master(master)
    try:
        return builder.getOrCreate()
    except Exception as error:  # PySpark has no common type: no Java, no master, no right
        first = str(error).strip().splitlines()
        raise DataError(
            f"engine={master!r}: Spark did not start ({first[0] if first else type(error).__name__}); "
            "check the master URL, and that Java 17 or newer is installed"
        ) from error
