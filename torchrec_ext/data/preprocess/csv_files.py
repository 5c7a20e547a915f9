"""read_csv(): CSV files -> a table of DuckDB, read by Arrow: columns by their names, no line lost without a word."""

from __future__ import annotations

import codecs
import glob
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as arrow_csv

from torchrec_ext.data.preprocess.columns import as_times, missing_column, short_text
from torchrec_ext.data.preprocess.rows import Connection, named
from torchrec_ext.data.preprocess.step import quoted
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import listed

_numbers = itertools.count()
# As Arrow reads them; a time is a text first, and read as that of a request.
_TYPES = {
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "VARCHAR": pa.string(),
    "BOOLEAN": pa.bool_(),
    "TIMESTAMP": pa.string(),
}
_BLOCK = 2**24


def read_csv(
    con: Connection,
    paths: str | Path | Sequence[str | Path],
    types: Mapping[str, str],
    *,
    names: Sequence[str] | None = None,
    delimiter: str = ",",
    quote: str = '"',
    encoding: str = "utf-8",
    broken: int = 0,
) -> str:
    """Reads columns of CSV files, plain or compressed, into a table of the connection.

    Each file has a header of its own, in any order. A time is in ISO 8601, as in a request, and becomes UTC. An empty
    value is NULL. A value with a line break is refused, since most are a quote without its end.

    Args:
        con: connection of DuckDB.
        paths: files or patterns, read in this order.
        types: type of each column to read: BIGINT, DOUBLE, VARCHAR, BOOLEAN or TIMESTAMP.
        names: names of all columns, if the files have no header.
        delimiter: character between two values.
        quote: character around a value that holds a delimiter; empty if there is none.
        encoding: encoding of the files, such as ``latin-1``.
        broken: greatest number of lines with too few or too many values to leave out; they are counted in a line.

    Returns:
        The table's name in SQL.

    Raises:
        DataError: a file is missing, lacks a column, has a value of another type or more broken lines, or a quote
            without its end takes further lines into a value.
    """
    if len(delimiter) != 1:
        raise DataError(
            f"delimiter={delimiter!r}: must be one character; replace it first: sed 's/{delimiter}/\\t/g'"
        )
    for name, kind in types.items():
        if kind not in _TYPES:
            raise DataError(
                f"types: column '{name}': {short_text(kind)[:40]} must be one of {listed(_TYPES)}"
            )
    table = f"csv_{next(_numbers)}"
    declared = ", ".join(f"{quoted(name)} {kind}" for name, kind in types.items())
    con.execute(f"CREATE TABLE {table} ({declared})")
    skipped: dict[str, str] = {}
    for path in _files(paths):

        def skip(row: Any, path: Path = path) -> str:
            # The first lines are read twice, for the header alone at first.
            wrong = f"{row.actual_columns} values, must be {row.expected_columns}"
            skipped[f"{path}: line {row.number}"] = wrong
            return "skip"

        before = len(skipped)
        try:
            options = {
                "read_options": arrow_csv.ReadOptions(
                    column_names=names, block_size=_BLOCK, use_threads=False
                ),
                "parse_options": arrow_csv.ParseOptions(
                    delimiter=delimiter,
                    quote_char=quote or False,
                    invalid_row_handler=skip,
                ),
            }
            rows = _insert(con, table, path, types, encoding, options)
            found = rows + len(skipped) - before + (names is None)
            if quote:
                marks = (quote.encode(), delimiter.encode())
                _check_lines(path, encoding, marks, found)
        except DataError:
            raise
        except (pa.ArrowException, OSError, LookupError, ValueError) as error:
            text = str(error).splitlines()[0][:100]
            raise DataError(
                f"{path}: {text}; mend it, or give its delimiter, quote or encoding"
            ) from None
    first = next(map(": ".join, skipped.items()), "")
    if len(skipped) > broken:
        raise DataError(
            f"{first} ({len(skipped):,} broken lines); mend them, or leave them out: read_csv(broken={len(skipped)})"
        )
    if skipped:
        print(f"note: {len(skipped):,} broken lines are left out; {first}", flush=True)
    return table


def _insert(
    con: Connection,
    table: str,
    path: Path,
    types: Mapping[str, str],
    encoding: str,
    options: Mapping[str, Any],
) -> int:
    """Inserts the rows of a file, and returns their number."""
    # Before the columns are converted, whose error would not name them.
    with (
        _opened(path, encoding) as file,
        arrow_csv.open_csv(file, **options) as reader,
    ):
        header = reader.schema.names
    for name in types:
        if name not in header:
            raise missing_column(str(path), name, header)
        if header.count(name) > 1:
            raise DataError(f"{path}: two columns are '{name}'; rename one")
    convert = arrow_csv.ConvertOptions(
        column_types={name: _TYPES[kind] for name, kind in types.items()},
        include_columns=list(types),
        null_values=[""],
        strings_can_be_null=True,
    )
    rows = 0
    with _opened(path, encoding) as file:
        try:
            with arrow_csv.open_csv(file, convert_options=convert, **options) as reader:
                for batch in reader:
                    columns = {}
                    for name, kind in types.items():
                        column = batch.column(name)
                        if kind == "TIMESTAMP":
                            column = _times(path, name, column, rows)
                        columns[name] = column
                    view = named(con, pa.table(columns))
                    con.execute(f"INSERT INTO {table} FROM {view}")
                    con.unregister(view)
                    rows += len(batch)
        except pa.ArrowInvalid as error:
            fault = re.search(r"column #(\d+): Row #(\d+): CSV.* to (.*)", str(error))
            if not fault:
                raise
            name = header[int(fault[1])]
            raise DataError(
                f"{path}: line {fault[2]}: column '{name}': no {fault[3][:80]}; mend it, or give its type or encoding"
            ) from None
    return rows


def _times(path: Path, name: str, column: pa.Array, before: int) -> pa.Array:
    """Returns texts as times in UTC without a zone, as DuckDB's TIMESTAMP has them."""
    try:
        return as_times(column).cast(pa.timestamp("us"))
    except ValueError as error:
        row = getattr(error, "row", 0)
        raise DataError(
            f"{path}: column '{name}', row {before + row}: {short_text(column[row])} {error}"
        ) from None


def _files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        # A file may have brackets in its name.
        found = [str(path)] if Path(path).exists() else sorted(glob.glob(str(path)))
        if not found:
            raise DataError(f"{path}: no such file; check the path")
        files += map(Path, found)
    return files


def _opened(path: Path, encoding: str) -> Any:
    """Opens a file, decompressed by its ending, as UTF-8."""
    stream = pa.input_stream(str(path))
    if codecs.lookup(encoding).name == "utf-8":
        return stream
    return pa.transcoding_input_stream(stream, encoding, "utf-8")


def _check_lines(
    path: Path, encoding: str, marks: tuple[bytes, bytes], found: int
) -> None:
    """Refuses lines within values, and quotes that are not doubled."""
    q, d = map(re.escape, marks)
    # Each value is without a quote, or between two, and holds only doubled ones.
    value = rb"(?:%b[^%b]*(?:%b%b[^%b]*)*%b|[^%b%b\r\n]*)" % (q, q, q, q, q, q, q, d)
    whole = re.compile(rb"%b(?:%b%b)*[\r\n]*" % (value, d, value))
    lines = odd = loose = 0
    with io.BufferedReader(_opened(path, encoding), 2**20) as file:
        for number, line in enumerate(file, 1):
            # Arrow leaves blank lines out.
            lines += line not in (b"\n", b"\r\n")
            count = line.count(marks[0])
            if count % 2:
                odd = odd or number
            if count and not loose and not whole.fullmatch(line):
                loose = number
    if lines > found:
        raise DataError(
            f"{path}: line {odd}: a quote without its end or a line break in a value: {lines:,} lines, {found:,} rows; "
            "mend it, or quote='' if quotes are text; DuckDB's own read_csv reads breaks"
        )
    if loose:
        raise DataError(
            f"{path}: line {loose}: a quote inside of a value is not doubled; mend it, or quote='' if quotes are text"
        )
