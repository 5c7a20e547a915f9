"""Engines for a preprocessor's expressions: DuckDB in this process, or Spark, with Spark's order of rows.

exact(), step_function(), floor_div() ...: Ibis expressions that compute, to the last bit, what numpy does.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa

from torchrec_ext.data.files.find import NULL_PARTITION
from torchrec_ext.data.preprocess.columns import element, is_list_column
from torchrec_ext.data.preprocess.files import GROUPS_PER_FILE, ROW_GROUP, Files, Sink
from torchrec_ext.schema import DataError

# An ibis Table. Ibis is imported by the engines alone, when files are processed.
Table = Any
# The place of a row in its files, if the engine knows it.
ROW = "__row__"


class Engine(Protocol):
    """An engine for a preprocessor's expressions, with its Ibis backend."""

    name: str

    def read(self, files: Files) -> Table:
        """Opens files as a table, with a column ``__row__`` if rows have an order."""

    def owns(self, table: Table) -> bool:
        """Says whether an Ibis table can be read here."""

    def register(self, table: pa.Table) -> Table:
        """Makes a small table known to the engine."""

    def stage(self, expression: Table) -> Table:
        """Gives rows a name of their own, since Ibis takes quadratic time over a long chain of steps."""

    def collect(self, expression: Table) -> pa.Table:
        """Computes the rows of an expression."""

    def write(self, expression: Table, sink: Sink) -> int:
        """Writes the rows of an expression to the sink's folder; returns their number."""

    def hex_to_int(self, digits: Any) -> Any:
        """Converts up to 15 hexadecimal digits to int64."""

    def is_finite(self, column: Any) -> Any:
        """Says whether a float is neither NaN nor infinite."""

    def close(self) -> None:
        """Frees the engine's resources."""


@contextmanager
def connected(
    engine: Any, *, threads: int | None = None, memory: str | None = None
) -> Iterator[Engine]:
    """Opens an engine for the time of the block.

    Args:
        engine: ``duckdb``; ``spark`` for the session that is active here, or the one that Spark's own configuration
            describes; a master URL such as ``local[4]`` or ``spark://host:7077``; a SparkSession; or an engine, which
            stays open.
        threads: number of DuckDB's threads; all cores by default.
        memory: memory that DuckDB may use before it goes to disk, such as ``4GB``; 80 % of the machine's by default.

    Raises:
        DataError: the engine is unknown or not installed.
    """
    # An engine, not a session: it stays open, because whoever made it goes on with it.
    if hasattr(engine, "hex_to_int"):
        yield cast(Engine, engine)
        return
    if engine == "duckdb":
        opened: DuckDB | Spark = DuckDB(threads=threads, memory=memory)
    elif (
        isinstance(engine, str)
        and engine != "spark"
        and not engine.startswith(("local", "spark://", "yarn", "k8s://", "mesos://"))
    ):
        raise DataError(
            f"engine={engine!r}: there is no such engine; write duckdb, spark or a Spark master URL such as local[4]"
        )
    else:
        opened = Spark(engine)
    with opened:
        yield opened


def need_ibis(package: str = "duckdb") -> Any:
    """Imports Ibis; only fitting and files need it.

    Raises:
        DataError: Ibis is not installed.
    """
    try:
        import ibis

        __import__(package)
    except ImportError as error:
        extra = "data" if package == "duckdb" else "spark"
        raise DataError(
            f"preprocessing files needs {error.name}, which is not installed: pip install 'torchrec-ext[{extra}]' (a "
            "saved preprocessor works on requests without it)"
        ) from error
    return ibis


class DuckDB:
    """DuckDB in this process; goes to disk when memory runs out.

    Args:
        threads: number of threads; all cores by default.
        memory: memory before it goes to disk, such as ``4GB``.
    """

    name = "duckdb"

    def __init__(
        self, *, threads: int | None = None, memory: str | None = None
    ) -> None:
        ibis = need_ibis()
        # Removed at the latest with this object, or when Python ends.
        self._spill = tempfile.TemporaryDirectory(
            prefix="torchrec_ext_duckdb_", ignore_cleanup_errors=True
        )
        self.ibis = ibis.duckdb.connect()
        self._names = itertools.count()

        @ibis.udf.scalar.builtin(name="isfinite")  # type: ignore[untyped-decorator]
        def isfinite(value: float) -> bool:
            """DuckDB's own function."""
            raise NotImplementedError

        self._isfinite = isfinite
        settings = {
            "temp_directory": self._spill.name,
            "TimeZone": "UTC",
            "threads": threads,
            "memory_limit": memory,
        }
        # Thousands of small batches pass through the stream: with the default, 1 MB,
        # its two sides wait for each other.
        settings["streaming_buffer_size"] = "64MB"
        for name, value in settings.items():
            if value is None:
                continue
            text = _quoted(str(value), "'")
            try:
                self.ibis.con.execute(f"SET {name}={text}")
            except Exception as error:
                raise DataError(
                    f"DuckDB refuses {name}={value!r} ({error}); choose another"
                ) from error

    def __enter__(self) -> DuckDB:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, files: Files) -> Table:
        """Opens files as a table with its rows in order."""
        # A file system is registered once for all of its files.
        remotes = {
            id(file.remote): file.remote
            for file in files.files
            if file.remote is not None
        }
        for system in remotes.values():
            self.ibis.con.register_filesystem(system)
        clashing = sorted({"file_index", "file_row_number"} & set(files.schema))
        if clashing:
            raise DataError(
                f"{files.where}: column '{clashing[0]}': DuckDB has a column of that name itself; rename it"
            )
        # DuckDB takes every name for a pattern.
        names = ", ".join(_quoted(glob.escape(file.name), "'") for file in files.files)
        partitions = files.files[0].partitions
        expressions = []
        for name, dtype in files.schema.items():
            if name in partitions:
                expressions.append(_partition(name, files))
            else:
                expressions.append(_column(name, dtype))
        columns = ", ".join(expressions)
        name = f"files_{next(self._names)}"
        # A file has fewer than 2**40 rows.
        self.ibis.con.execute(
            f"CREATE TEMP VIEW {name} AS SELECT {columns}, CAST(file_index AS BIGINT) * 1099511627776 + "
            f"file_row_number AS {ROW} FROM read_parquet([{names}], file_row_number=true, hive_partitioning=false)"
        )
        return self.ibis.table(name)

    def owns(self, table: Table) -> bool:
        """Says whether the table is one of this connection."""
        return table.get_backend() is self.ibis

    def register(self, table: pa.Table) -> Table:
        """Makes a temporary table."""
        # Not Ibis's create_table: what Ibis 12 sends does not parse in DuckDB 2.0.
        name = f"held_{next(self._names)}"
        self.ibis.con.register("__arrow__", table)
        self.ibis.con.execute(f"CREATE TEMP TABLE {name} AS SELECT * FROM __arrow__")
        self.ibis.con.unregister("__arrow__")
        return self.ibis.table(name)

    def stage(self, expression: Table) -> Table:
        """Makes a temporary view."""
        name = f"stage_{next(self._names)}"
        self.ibis.con.execute(
            f"CREATE TEMP VIEW {name} AS {self.ibis.compile(expression)}"
        )
        return self.ibis.table(name)

    def collect(self, expression: Table) -> pa.Table:
        """Computes the rows, in memory."""
        return self._stream(expression).read_all()

    def write(self, expression: Table, sink: Sink) -> int:
        """Streams the rows through Arrow: DuckDB's own writer leaves page checksums out."""
        with sink.writer() as write:
            for batch in self._stream(expression):
                write(batch)
        return sink.rows

    def _stream(self, expression: Table) -> pa.RecordBatchReader:
        # Not Ibis's to_pyarrow_batches: Ibis 12 calls a method that DuckDB 2.0 has
        # dropped.
        sql = self.ibis.compile(expression)
        result = self.ibis.con.sql(sql)
        open_reader = (
            getattr(result, "to_arrow_reader", None) or result.fetch_arrow_reader
        )
        reader: pa.RecordBatchReader = open_reader(ROW_GROUP)
        return reader

    def hex_to_int(self, digits: Any) -> Any:
        """Converts by a cast: DuckDB reads 0x... as a number."""
        import ibis

        return (ibis.literal("0x") + digits).cast("int64")

    def is_finite(self, column: Any) -> Any:
        """Calls DuckDB's own function: isnan and comparisons are answered from statistics without NaN.

        With DuckDB 2.0, `select count(*) from 'f.parquet' where isnan(x)` gives 0 for a file that pyarrow wrote with
        NaN in x.
        """
        return self._isfinite(column)

    def close(self) -> None:
        """Closes the connection and removes the spilled data."""
        self.ibis.disconnect()
        self._spill.cleanup()


def _quoted(text: str, mark: str) -> str:
    return mark + text.replace(mark, 2 * mark) + mark


def _column(name: str, dtype: pa.DataType) -> str:
    quoted = _quoted(name, '"')
    # Ibis 12 does not know DuckDB's nanoseconds with a zone.
    if pa.types.is_timestamp(dtype) and dtype.unit == "ns" and dtype.tz:
        return f"CAST({quoted} AS TIMESTAMP_NS) AS {quoted}"
    return quoted


def _partition(name: str, files: Files) -> str:
    """Returns a hive partition of each file by the file's index: DuckDB's own would count folders above the log too."""
    texts = []
    for file in files.files:
        text = file.partitions[name]
        texts.append("NULL" if text == NULL_PARTITION else _quoted(text, "'"))
    quoted = _quoted(name, '"')
    return f"CAST([{', '.join(texts)}] AS VARCHAR[])[CAST(file_index AS BIGINT) + 1] AS {quoted}"


Expr = Any
FLOAT32_MAX = float(np.finfo(np.float32).max)


def exact(value: float) -> Expr:
    """Returns a float literal; written into SQL bare, DuckDB would read it as a decimal and round twice."""
    import ibis

    return ibis.literal(repr(float(value))).cast("float64")


def count_rows(table: Table, engine: Engine) -> int:
    """Counts the rows of a table."""
    return int(engine.collect(table.aggregate(n=table.count()))["n"][0].as_py())


def number(column: Expr, kind: str, engine: Engine) -> Expr:
    """Returns a number column as float64; NaN and the infinities become null."""
    import ibis

    if kind != "float64":
        return column.cast("float64")
    return ibis.ifelse(engine.is_finite(column), column, ibis.null("float64"))


def as_float32(column: Expr, engine: Engine) -> Expr:
    """Casts to float32; overflow becomes null: it is infinity in one engine and an error in the other."""
    import ibis

    fits = engine.is_finite(column) & (column.abs() <= exact(FLOAT32_MAX))
    return ibis.ifelse(fits, column, ibis.null("float64")).cast("float32")


def step_function(x: Expr, starts: Sequence[Expr], values: Sequence[int]) -> Expr:
    """Returns ``values[k]`` for k of the rising ``starts`` at most x, by bisection; ``values`` has one more."""
    import ibis

    if not len(starts):
        return ibis.literal(int(values[0]), type="int64")
    # Halves, so that 200 starts make an expression 8 deep and not 200.
    middle = len(starts) // 2
    below = step_function(x, starts[:middle], values[: middle + 1])
    above = step_function(x, starts[middle + 1 :], values[middle + 1 :])
    return ibis.ifelse(x < starts[middle], below, above)


def floor_div(a: Expr, b: int) -> Expr:
    """Divides and rounds down; exact while |a| is below 2**53.

    Integer division is spelt, and rounded below zero, differently from engine to engine; the division here leaves no
    remainder.
    """
    return ((a - floor_mod(a, b)) / b).round().cast("int64")


def floor_mod(a: Expr, b: int) -> Expr:
    """Returns the remainder of a / b, 0 to b - 1."""
    return (a % b + b) % b


# Another zone of the session would change the hours of times. ANSI mode would raise
# errors that DuckDB and numpy do not raise.
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "false",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
}


class Spark:
    """An existing Spark session, or one for a master URL.

    Args:
        session: ``spark``, a master URL or a SparkSession; a session that was active before stays active, with its
            settings as they were.

    Raises:
        DataError: PySpark is missing, or no session can be started.
    """

    name = "spark"

    def __init__(self, session: Any) -> None:
        ibis = need_ibis("pyspark")
        from pyspark.sql import SparkSession

        active = SparkSession.getActiveSession()
        self._own = isinstance(session, str) and active is None
        self.session = session
        if isinstance(session, str):
            # With a session active, Spark's builder returns that one, whatever the
            # master.
            if active is not None and session not in (
                "spark",
                active.conf.get("spark.master", session),
            ):
                raise DataError(
                    f"engine={session!r}: a Spark session is active here with the master "
                    f"{active.conf.get('spark.master')}, and a process has one; give engine='spark' to use it, or "
                    "stop it first"
                )
            self.session = _start(session, SparkSession)
        if self._own:
            # Spark warns of long plans, and of folders with a dot, as ours are.
            self.session.sparkContext.setLogLevel("ERROR")
        self._before: dict[str, Any] = {}
        for name, value in _SETTINGS.items():
            # To be put back by close(): a session that was active before is the user's.
            self._before[name] = self.session.conf.get(name, None)
            self.session.conf.set(name, value)
        self.ibis = ibis.pyspark.connect(self.session)
        self._names = itertools.count()
        self._views: list[str] = []

        @ibis.udf.scalar.builtin(name="conv")  # type: ignore[untyped-decorator]
        def conv(digits: str, base: int, to_base: int) -> str:
            """Spark's own function."""
            raise NotImplementedError

        self._conv = conv

    def __enter__(self) -> Spark:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, files: Files) -> Table:
        """Opens files as a view."""
        reader = self.session.read
        # Spark finds the columns of hive partitions below one base folder.
        roots = set()
        for file in files.files:
            if file.partitions:
                outermost = next(iter(file.partitions))
                roots.add(file.name.rsplit(f"/{outermost}=", 1)[0])
        if roots:
            reader = reader.option("basePath", min(roots, key=len))
        frame = reader.parquet(*(_pattern(file.name) for file in files.files))
        return self._view(frame.select(*(f"`{name}`" for name in files.schema)))

    def owns(self, table: Table) -> bool:
        """Says whether the table is one of Spark's."""
        return bool(table.get_backend().name == "pyspark")

    def register(self, table: pa.Table) -> Table:
        """Makes a view of the table."""
        # Before version 4 Spark takes no Arrow tables.
        try:
            frame = self.session.createDataFrame(table)
        except TypeError:
            frame = self.session.createDataFrame(table.to_pandas())
        return self._view(frame)

    def stage(self, expression: Table) -> Table:
        """Makes a temporary view."""
        return self._view(self._frame(expression))

    def collect(self, expression: Table) -> pa.Table:
        """Computes the rows, in memory."""
        return self._frame(expression).toArrow()

    def write(self, expression: Table, sink: Sink) -> int:
        """Lets the executors write, with page checksums, and then checks the result."""
        frame = self._frame(expression)
        columns = [
            frame[f"`{name}`"].cast(_spark_type(kind))
            for name, kind in sink.columns.items()
        ]
        frame = frame.select(*columns)
        options = {
            "parquet.page.write-checksum.enabled": "true",
            "parquet.block.row.count.limit": str(ROW_GROUP),
            "maxRecordsPerFile": str(GROUPS_PER_FILE * ROW_GROUP),
        }
        # To append, since the folder is there already, empty.
        frame.write.options(**options).mode("append").parquet(
            _address(str(sink.folder))
        )
        return self._look_over(sink)

    def _look_over(self, sink: Sink) -> int:
        from pyspark.sql import functions as f

        # With a schema, since Spark cannot infer one without a file. transform() then
        # reports the missing rows.
        fields = ", ".join(
            f"`{name}` {_spark_type(kind)}" for name, kind in sink.columns.items()
        )
        output = self.session.read.schema(fields).parquet(_pattern(str(sink.folder)))

        def bad(name: str, kind: str) -> Any:
            column = f.col(f"`{name}`")
            if kind.startswith("list"):
                return column.isNull() | f.exists(column, lambda value: value.isNull())
            if kind not in ("float32", "float64"):
                return column.isNull()
            return column.isNull() | f.isnan(column) | (f.abs(column) == float("inf"))

        # In one pass over the result. Names by number, because a column may be called
        # anything.
        counts: list[Any] = []
        for name, kind in sink.columns.items():
            counts.append(f.sum(bad(name, kind).cast("long")).alias(str(len(counts))))
        row = output.agg(f.count(f.lit(1)), *counts).first()
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

    def hex_to_int(self, digits: Any) -> Any:
        """Converts by Spark's ``conv`` to decimal digits, and casts these."""
        return self._conv(digits, 16, 10).cast("int64")

    def is_finite(self, column: Any) -> Any:
        """Compares twice: to Spark, NaN is greater than every number."""
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
    if is_list_column(kind):
        return f"array<{_spark_type(element(kind))}>"
    return {"int64": "bigint", "float32": "float", "float64": "double"}.get(kind, kind)


def _pattern(name: str) -> str:
    """Escapes an address for Spark: brackets and stars would make a pattern."""
    return re.sub(r"([*?{}\[\]\\])", r"\\\1", _address(name))


def _address(name: str) -> str:
    return name if "://" in name else f"file://{os.path.abspath(name)}"


def _start(master: str, session: Any) -> Any:
    builder = session.builder.appName("torchrec_ext preprocessing").config(
        "spark.ui.showConsoleProgress", "false"
    )
    if master != "spark":
        builder = builder.master(master)
    try:
        return builder.getOrCreate()
    # PySpark's errors have no common type: no Java, no master, no right.
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"engine={master!r}: Spark did not start ({lines[0]}); check the master URL, and that Java 17 or newer is "
            "installed"
        ) from error
