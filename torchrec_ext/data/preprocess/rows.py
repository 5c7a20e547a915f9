"""Sources as DuckDB sees them: parquet files, or a relation of SQL; opened, checked, and read in batches.

connected(): a connection with the settings that a log larger than memory needs.
"""

from __future__ import annotations

import functools
import glob
import itertools
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.preprocess.columns import (
    arrow_type,
    widens,
    working_type,
)
from torchrec_ext.data.preprocess.files import ROW_GROUP, raw_types, scan
from torchrec_ext.data.preprocess.step import quoted
from torchrec_ext.schema import DataError

# Paths of parquet files, or a relation of the connection: con.sql("SELECT ...").
Source = Any
Connection = Any  # duckdb.DuckDBPyConnection
# The place of a row among those of its source.
ROW = "__row__"
# Rows of a batch: the more there are, the less the tables of its look-ups cost.
_BATCH = 4 * ROW_GROUP
_numbers = itertools.count()


@contextmanager
def connected(
    con: Connection = None, *, threads: int | None = None, memory: str | None = None
) -> Iterator[Connection]:
    """Opens DuckDB in this process for the time of the block; it goes to disk when memory runs out.

    Args:
        con: a connection, which stays open; a new one by default.
        threads: number of threads; all cores by default.
        memory: memory before it goes to disk, such as ``4GB``; 80 % of the machine's by default.

    Raises:
        DataError: DuckDB is not installed, or refuses a setting.
    """
    if con is not None:
        yield con
        return
    try:
        import duckdb
    except ImportError as error:
        raise DataError(
            f"preprocessing files needs {error.name}, which is not installed: pip install 'torchrec-ext[data]' (a "
            "saved preprocessor works on requests without it)"
        ) from error
    with (
        tempfile.TemporaryDirectory(
            prefix="torchrec_ext_duckdb_", ignore_cleanup_errors=True
        ) as spill,
        duckdb.connect() as opened,
    ):
        settings = {
            "temp_directory": spill,
            "TimeZone": "UTC",
            "threads": threads,
            "memory_limit": memory,
            # With the default, 1 MB, the two sides of a stream wait for each other.
            "streaming_buffer_size": "64MB",
        }
        for name, value in settings.items():
            if value is None:
                continue
            try:
                opened.execute(f"SET {name}={sql_text(str(value))}")
            except duckdb.Error as error:
                raise DataError(
                    f"DuckDB refuses {name}={value!r} ({error}); choose another"
                ) from error
        yield opened


def batches(con: Connection, sql: str) -> Iterator[pa.RecordBatch]:
    """Runs a query whose rows are read as they come, in batches of four row groups."""
    pending: list[pa.RecordBatch] = []
    for batch in _reader(con.sql(sql), _BATCH):
        pending.append(batch)
        if sum(map(len, pending)) >= _BATCH:
            rows = pa.concat_batches(pending)
            yield rows.slice(0, _BATCH)
            pending = [rows.slice(_BATCH)]
    if rest := [batch for batch in pending if len(batch)]:
        yield pa.concat_batches(rest)


def _reader(result: Any, size: int) -> pa.RecordBatchReader:
    # DuckDB 2 has renamed it.
    read = getattr(result, "to_arrow_reader", None) or result.fetch_arrow_reader
    reader: pa.RecordBatchReader = read(size)
    return reader


def table(con: Connection, sql: str) -> pa.Table:
    """Runs a query whose rows fit into memory."""
    return _reader(con.sql(sql), ROW_GROUP).read_all()


def named(con: Connection, data: Any) -> str:
    """Gives an Arrow table, a dataset or a stream of batches a name in SQL."""
    name = f"held_{next(_numbers)}"
    con.register(name, data)
    return name


@contextmanager
def telling() -> Iterator[None]:
    """Raises DuckDB's error over a file as one line: file, line or column, what is wrong, remedy."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        told = _told(error)
        if not told:
            raise
        raise DataError(told) from error


# Of the recipe's SQL, or of values that it converts. By its words, which Arrow hands on behind the first batch.
_OF_SQL = "(Binder|Catalog|Conversion|Invalid Input|Out of Range|Parser) Error: "
# DuckDB's words for a fault in a file, and ours.
_FAULTS = {
    r'Invalid string encoding found in Parquet file "(.*?)": (.{1,60})': "{}: {}; write texts as UTF-8",
    r'JSON in file "(.*?)".* line (\d+): ([^\n]*)': "{}: line {}: {}; write one JSON object a line",
    r'Current file: ([^\n]*)\nColumn with name: "(.*?)" is miss': (
        "{}: column '{}' is missing; write the same columns to all files"
    ),
    r"(?:No magic bytes found at end of file|GZIP stream:|Error: File) '?([^'\n]*)'?(?: too small|\n|$)": (
        "{}: is of another format, or was cut short; copy or write it again"
    ),
    r'No files found that match the pattern "(.*?)"': "{}: no such file; check the path",
    r"CSV Error on Line: (\d+)\n(?:Original Line:[^\n]*\n)?([^\n]*).*\n\s*file = ([^\n]*)": (
        "{2}: line {0}: {1:.90}; mend it, or read the file by read_csv of torchrec_ext.data.preprocess"
    ),
}


def _told(error: Exception) -> str:
    text = str(error)
    for pattern, words in _FAULTS.items():
        if fault := re.search(pattern, text, re.DOTALL):
            return words.format(*fault.groups())
    if not re.match(_OF_SQL, text):
        return ""
    remedy = "correct the SQL (quote reserved names), or write the column so"
    return f"DuckDB: {text.splitlines()[0][:110]}; {remedy}"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A source that is open.

    Args:
        view: its name in SQL.
        raw: raw type of each requested column.
        where: name of the files, for messages.
        source: files that were opened; None for a relation.
        files: all local parquet files that the rows come from, also those that a relation's SQL names.
    """

    view: str
    raw: Mapping[str, str]
    where: str
    source: ParquetSource | None = None
    files: Sequence[ParquetSource] = ()

    def check_types(self, expected_types: Mapping[str, str], elsewhere: str) -> None:
        """Refuses a column with another type than it has elsewhere; float32 and integers are read as float64.

        Raises:
            DataError: the types differ; the message names column, types and remedy.
        """
        for name, kind in expected_types.items():
            if not widens(self.raw[name], kind):
                raise DataError(
                    f"{self.where}: column '{name}' is {self.raw[name]}, {elsewhere} it is {kind}; write it with that "
                    "type"
                )

    def place(self, row: int) -> tuple[str, int]:
        """Returns the file and row group that a row is in, and its number there."""
        for group in self.source.groups if self.source else ():
            if row < group.rows:
                return group.name, row
            row -= group.rows
        return self.where, row

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Names file, row group and column in an error over damaged data."""
        try:
            yield
        except DataError:
            raise
        except Exception:
            # The engine's error names no row group: the file is read again, which fails
            # there.
            for source in self.files:
                for group in source.groups:
                    source.table(group, source.columns)
            raise


def open_rows(
    source: Source,
    events: Source | None,
    columns: Sequence[str],
    event_columns: Sequence[str],
    con: Connection,
) -> tuple[Opened, Opened]:
    """Opens the rows, and the events behind histories: the same rows if no others are given or needed.

    Raises:
        DataError: see :func:`open_source`; or an event's column has another type than the row's.
    """
    data = open_source(source, columns, con)
    if events is None or not event_columns:
        return data, data
    past = open_source(events, event_columns, con)
    past.check_types(
        {name: data.raw[name] for name in event_columns}, f"in {data.where}"
    )
    return data, past


# What DuckDB makes of FROM 'log/*.parquet' and of read_parquet([...]).
_READS = r"""(?:read_parquet|parquet_scan)\([^)]*\)|["'][^"']+\.parquet["']"""


def open_source(source: Source, columns: Sequence[str], con: Connection) -> Opened:
    """Opens files, or takes a relation.

    Raises:
        DataError: a file or a column is missing, damaged or of a wrong type.
    """
    if hasattr(source, "create_view"):
        view = f"rows_{next(_numbers)}"
        with telling():
            source.create_view(view)
            try:
                schema = table(con, f"SELECT * FROM {view} LIMIT 0").schema
            except Exception as error:
                if "does not exist" not in str(error):
                    raise
                raise DataError(
                    "the relation is of another connection; make it with the one that the recipe's build is given, as "
                    "in con.sql(...), or give files"
                ) from error
        types = dict(zip(schema.names, schema.types, strict=True))
        for name, kind in zip(source.columns, source.types, strict=True):
            # What DuckDB makes of numbers and texts in one column.
            if str(kind) == "JSON" and name in columns:
                raise DataError(
                    f"the relation: column '{name}' is JSON, in which values of several types are mixed; say which one "
                    f"it is: CAST({name} AS VARCHAR)"
                )
        raw = raw_types("the relation", types, columns)
        behind = _files_behind(source, columns, con)
        return Opened(view=view, raw=raw, where="the relation", files=behind)
    files, schema = scan(source)
    where = files.files[0].name
    if len(files.files) > 1:
        where = f"{where} and {len(files.files) - 1} more"
    # Types are checked from the footers, before a row is read.
    raw = raw_types(where, schema, columns)
    view = _view_of(files, schema, con)
    return Opened(view=view, raw=raw, where=where, source=files, files=[files])


def _files_behind(
    relation: Any, columns: Collection[str], con: Connection
) -> list[ParquetSource]:
    """Returns the local parquet files in a relation's SQL, a source for each pattern.

    DuckDB reads them by the first file's types, and would make numbers of texts without a word.

    Raises:
        DataError: a file is damaged, or lacks a column or has it in another type.
    """
    sql = relation.sql_query()
    sources = []
    # By that option files may differ.
    reads = [] if "union_by_name" in sql else re.findall(_READS, sql)
    for read in reads:
        files = []
        for pattern in re.findall(r"""["']([^"']+)["']""", read):
            if "://" not in pattern:
                found = con.execute("SELECT file FROM glob(?)", [pattern]).fetchall()
                files += [file for (file,) in found]
        if files:
            sources.append(scan(files, {*columns, *re.findall(r"\w+", sql)})[0])
    return sources


def view_of(paths: Any, con: Connection) -> str:
    """Gives parquet files a name in SQL.

    Raises:
        DataError: see :func:`~torchrec_ext.data.preprocess.files.scan`.
    """
    return _view_of(*scan(paths), con)


def _view_of(files: ParquetSource, schema: Collection[str], con: Connection) -> str:
    """Gives the files a name in SQL; DuckDB's own reader is faster than Arrow's, but knows no remote addresses.

    It would also make columns of the folders above the log, where some below it are hive partitions.
    """
    if any(file.remote or file.partitions for file in files.files):
        return named(con, files.dataset)
    # DuckDB takes every name for a pattern.
    names = [sql_text(glob.escape(file.name)) for file in files.files]
    view = f"files_{next(_numbers)}"
    con.execute(
        f"CREATE VIEW {view} AS SELECT {', '.join(map(quoted, schema))} FROM read_parquet([{', '.join(names)}], "
        "hive_partitioning=false, union_by_name=true)"
    )
    return view


def sql_text(value: str) -> str:
    """Returns a text as SQL."""
    return "'" + value.replace("'", "''") + "'"


_SQL = {pa.int64(): "BIGINT", pa.float64(): "DOUBLE", pa.string(): "VARCHAR"}
_SQL |= {pa.list_(dtype): f"{name}[]" for dtype, name in _SQL.items()}


def working_column(name: str, raw: str) -> str:
    """Returns a column in the type that steps see, in SQL; times keep their unit."""
    dtype = _SQL.get(working_type(arrow_type(raw)))
    column = quoted(name)
    return f"CAST({column} AS {dtype}) AS {column}" if dtype else column


def query_of(con: Connection, kind: str, select: str) -> Callable[[str], pa.Table]:
    """Returns a function for SQL over ``fit_rows``, a view or a table of a SELECT."""
    con.execute(f"CREATE OR REPLACE TEMP {kind} fit_rows AS {select}")
    return functools.partial(table, con)
