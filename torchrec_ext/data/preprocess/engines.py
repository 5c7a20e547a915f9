"""Engines: where a preprocessor's expressions run. DuckDB inside this process, or Spark."""

from __future__ import annotations

import glob
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import pyarrow as pa

from torchrec_ext.data.preprocess.sources import Files
from torchrec_ext.data.preprocess.writing import ROW_GROUP, Sink
from torchrec_ext.schema import DataError

Table = Any
ROW = "__row__"  # the place of a row in its files, where the engine knows it


class Engine(Protocol):
    """What a preprocessor asks of an engine, beside being an Ibis backend."""

    name: str

    def read(self, files: Files) -> Table:
        """The files as a table, with a column ``__row__`` where rows have an order."""

    def owns(self, table: Table) -> bool:
        """Whether an Ibis table can be read here."""

    def register(self, table: pa.Table) -> Table:
        """A small table as one of the engine's."""

    def stage(self, expression: Table) -> Table:
        """The same rows under a name of their own: Ibis takes quadratic time over a long chain of steps."""

    def collect(self, expression: Table) -> pa.Table:
        """The rows of an expression."""

    def write(self, expression: Table, sink: Sink) -> int:
        """Writes the rows of an expression to the sink's folder; returns how many."""

    def text(self, value: str) -> Any:
        """A string literal."""

    def hex_to_int(self, digits: Any) -> Any:
        """The value of up to 15 hexadecimal digits as int64."""

    def is_finite(self, column: Any) -> Any:
        """Whether a float is neither NaN nor infinite."""

    def close(self) -> None:
        """Frees what it holds."""


@contextmanager
def connected(engine: Any, *, threads: int | None = None, memory: str | None = None) -> Iterator[Engine]:
    """An engine for the time of the block.

    Args:
        engine: ``duckdb``; ``spark`` for the session that is active here, or the one that Spark's own configuration describes; a
            master URL such as ``local[4]`` or ``spark://host:7077``; a SparkSession; or an engine, which stays open.
        threads: of DuckDB; all cores where not given.
        memory: that DuckDB may use before it goes to disk, such as ``4GB``; 80 % of the machine's where not given.

    Raises:
        DataError: the engine is unknown or not installed.
    """
    if hasattr(engine, "hex_to_int"):
        yield cast(Engine, engine)
        return
    opened = _open(engine, threads, memory)
    try:
        yield opened
    finally:
        opened.close()


def _open(engine: Any, threads: int | None, memory: str | None) -> Engine:
    if engine == "duckdb":
        return DuckDB(threads=threads, memory=memory)
    from torchrec_ext.data.preprocess.spark import Spark

    if isinstance(engine, str) and engine != "spark" and not engine.startswith(("local", "spark://", "yarn", "k8s://", "mesos://")):
        raise DataError(f"engine={engine!r}: there is no such engine; write duckdb, spark or a Spark master URL such as local[4]")
    return Spark(engine)


def need_ibis(package: str = "duckdb") -> Any:
    """Ibis, which only the offline half needs.

    Raises:
        DataError: it is not installed.
    """
    try:
        import ibis

        __import__(package)
    except ImportError as error:
        extra = "data" if package == "duckdb" else "spark"
        raise DataError(
            f"preprocessing files needs {error.name}, which is not installed: pip install 'torchrec-ext[{extra}]' "
            "(a saved preprocessor works on requests without it)"
        ) from error
    return ibis


class DuckDB:
    """DuckDB in this process: all cores, and to disk where memory does not do.

    Args:
        threads: all cores where not given.
        memory: such as ``4GB``.
    """

    name = "duckdb"

    def __init__(self, *, threads: int | None = None, memory: str | None = None) -> None:
        ibis = need_ibis()
        # Removed at the latest with this object, or when Python ends.
        self._spill = tempfile.TemporaryDirectory(prefix="torchrec_ext_duckdb_", ignore_cleanup_errors=True)
        self.ibis = ibis.duckdb.connect()
        self._names = itertools.count()

        @ibis.udf.scalar.builtin(name="isfinite")  # type: ignore[untyped-decorator]
        def isfinite(value: float) -> bool:
            """DuckDB's own."""
            raise NotImplementedError

        self._isfinite = isfinite
        settings = {"temp_directory": self._spill.name, "TimeZone": "UTC", "threads": threads, "memory_limit": memory}
        # Thousands of small batches pass through the stream: with the default of 1 MB its two sides wait for one another.
        settings["streaming_buffer_size"] = "64MB"
        for name, value in settings.items():
            if value is not None:
                self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        text = _quoted(str(value), "'")
        try:
            self.ibis.con.execute(f"SET {name}={text}")
        except Exception as error:
            raise DataError(f"DuckDB refuses {name}={value!r} ({error}); choose another") from error

    def __enter__(self) -> DuckDB:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, files: Files) -> Table:
        """The files, with their rows in order."""
        for system in {id(file.remote): file.remote for file in files.files if file.remote is not None}.values():
            self.ibis.con.register_filesystem(system)
        taken = sorted({"file_index", "file_row_number"} & set(files.schema))
        if taken:
            raise DataError(f"{files.where}: column '{taken[0]}': DuckDB has a column of that name itself; rename it")
        # DuckDB takes every name for a pattern.
        names = ", ".join(_quoted(glob.escape(file.name), "'") for file in files.files)
        hive = any(file.partitions for file in files.files)
        columns = ", ".join(_column(name, dtype) for name, dtype in files.schema.items())
        options = "file_row_number=true" + (", hive_partitioning=true, hive_types_autocast=false" if hive else "")
        name = f"files_{next(self._names)}"
        # A file has fewer than 2**40 rows.
        self.ibis.con.execute(
            f"CREATE TEMP VIEW {name} AS SELECT {columns}, CAST(file_index AS BIGINT) * 1099511627776 + file_row_number AS {ROW} "
            f"FROM read_parquet([{names}], {options})"
        )
        return self.ibis.table(name)

    def owns(self, table: Table) -> bool:
        """A table of this connection."""
        return table.get_backend() is self.ibis

    def register(self, table: pa.Table) -> Table:
        """A temporary table."""
        # Not Ibis's create_table: what Ibis 12 sends does not parse in DuckDB 2.0.
        name = f"held_{next(self._names)}"
        self.ibis.con.register("__arrow__", table)
        self.ibis.con.execute(f"CREATE TEMP TABLE {name} AS SELECT * FROM __arrow__")
        self.ibis.con.unregister("__arrow__")
        return self.ibis.table(name)

    def stage(self, expression: Table) -> Table:
        """A temporary view."""
        name = f"stage_{next(self._names)}"
        self.ibis.con.execute(f"CREATE TEMP VIEW {name} AS {self.ibis.compile(expression)}")
        return self.ibis.table(name)

    def collect(self, expression: Table) -> pa.Table:
        """The rows, in memory."""
        return self._stream(expression).read_all()

    def write(self, expression: Table, sink: Sink) -> int:
        """Streams the rows through Arrow: DuckDB's own writer leaves page checksums out."""
        with sink.writer() as write:
            for batch in self._stream(expression):
                write(batch)
        return sink.rows

    def _stream(self, expression: Table) -> pa.RecordBatchReader:
        # Not Ibis's to_pyarrow_batches: Ibis 12 calls a method that DuckDB 2.0 has dropped.
        sql = self.ibis.compile(expression)
        result = self.ibis.con.sql(sql)
        read = getattr(result, "to_arrow_reader", None) or result.fetch_arrow_reader
        reader: pa.RecordBatchReader = read(ROW_GROUP)
        return reader

    def text(self, value: str) -> Any:
        """A string literal."""
        import ibis

        return ibis.literal(value)

    def hex_to_int(self, digits: Any) -> Any:
        """DuckDB reads 0x... as a number."""
        return (self.text("0x") + digits).cast("int64")

    def is_finite(self, column: Any) -> Any:
        """DuckDB's own function: it answers isnan and comparisons from the file's least and greatest value, which leave NaN out.

        With DuckDB 2.0, `select count(*) from 'f.parquet' where isnan(x)` gives 0 for a file that pyarrow wrote with NaN in x.
        """
        return self._isfinite(column)

    def close(self) -> None:
        """Closes the connection and removes what was spilled."""
        self.ibis.disconnect()
        self._spill.cleanup()


def _quoted(text: str, mark: str) -> str:
    return mark + text.replace(mark, 2 * mark) + mark


def _column(name: str, dtype: pa.DataType) -> str:
    quoted = _quoted(name, '"')
    if pa.types.is_timestamp(dtype) and dtype.unit == "ns" and dtype.tz:
        return f"CAST({quoted} AS TIMESTAMP_NS) AS {quoted}"  # Ibis 12 does not know DuckDB's type with a zone
    return quoted
