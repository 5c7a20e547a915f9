"""read_csv(): CSV files -> a table of DuckDB; columns are found by their names, and no line is lost without a word."""

from __future__ import annotations

import codecs
import csv
import glob
import gzip
import io
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec_ext.data.preprocess.columns import missing_column, short_text
from torchrec_ext.data.preprocess.rows import (
    Connection,
    csv_fault,
    sql_text,
    telling,
)
from torchrec_ext.data.preprocess.step import quoted
from torchrec_ext.schema import DataError

_numbers = itertools.count()
# What no text has, but a file of another format or encoding.
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f]")


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
    """Reads columns of CSV files, plain or .gz, into a table of the connection.

    Each file has a header of its own, in any order: DuckDB's ``read_csv(..., columns=...)`` reads by position and takes
    a header for granted. A value with a line break is refused, since most are a quote without its end.

    Args:
        con: connection of DuckDB.
        paths: files or patterns, read in this order.
        types: DuckDB's type of each column to read, such as ``{"user_id": "BIGINT", "city": "VARCHAR"}``.
        names: names of all columns, if the files have no header.
        delimiter: text between two values.
        quote: character around a value that holds a delimiter; empty if there is none.
        encoding: encoding of the files, such as ``latin-1``.
        broken: greatest number of broken lines to leave out. They are counted in a line, and the first one is named.

    Returns:
        The table's name in SQL.

    Raises:
        DataError: a file is missing, lacks a column, has more broken lines, or a quote without its end takes further
            lines into a value.
    """
    table = f"csv_{next(_numbers)}"
    columns = ", ".join(map(quoted, types))
    declared = ", ".join(f"{quoted(name)} {kind}" for name, kind in types.items())
    with telling():
        con.execute(f"CREATE TABLE {table} ({declared})")
    told = 0
    first = ""
    for path in _files(paths):
        header = list(names or _header(path, types, delimiter, quote, encoding))
        for name in types:
            if name not in header:
                raise missing_column(str(path), name, header)
            if header.count(name) > 1:
                raise DataError(f"{path}: two columns are '{name}'; rename one")
        # Names of columns that are not read may be empty, or occur twice.
        kinds = []
        for place, name in enumerate(header):
            word = name if name in types else f"unread {place}"
            kinds.append(f"{sql_text(word)}: {sql_text(types.get(name, 'VARCHAR'))}")
        options = {
            "auto_detect": "false",
            "header": str(names is None).lower(),
            "delim": sql_text(delimiter),
            "quote": sql_text(quote),
            "escape": sql_text(quote),
            "encoding": sql_text(encoding),
            "columns": f"{{{', '.join(kinds)}}}",
            "store_rejects": "true",
            "rejects_table": sql_text(f"{table}_rejects"),
            "rejects_scan": sql_text(f"{table}_scans"),
        }
        settings = ", ".join(f"{key}={value}" for key, value in options.items())
        # DuckDB takes every name for a pattern.
        pattern = sql_text(glob.escape(str(path)))
        with telling():
            ((rows,),) = con.execute(
                f"INSERT INTO {table} SELECT {columns} FROM read_csv({pattern}, {settings})"
            ).fetchall()
        rejects = f"{table}_rejects"
        count, line, fault = con.sql(
            "SELECT count(DISTINCT line), min(line), arg_min(error_message, line) "
            f"FROM {rejects} JOIN {table}_scans USING (scan_id, file_id) WHERE file_path = {sql_text(str(path))}"
        ).fetchall()[0]
        lines = sum(1 for _ in _lines(path, encoding)) - (names is None)
        if lines > rows + count:
            raise _unclosed(path, quote, encoding, lines, rows)
        if count and not told:
            first = f"{path}: line {line}: {csv_fault(str(fault))}"
        told += count
    if told > broken:
        raise DataError(
            f"{first} ({told:,} broken lines); mend them, or leave them out: read_csv(broken={told})"
        )
    if told:
        print(f"note: {told:,} broken lines are left out; {first}", flush=True)
    return table


def _files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        # A file may have brackets in its name.
        found = [str(path)] if Path(path).exists() else sorted(glob.glob(str(path)))
        if not found:
            raise DataError(f"{path}: no such file; check the path")
        files += map(Path, found)
    return files


def _lines(path: Path, encoding: str) -> Iterator[bytes]:
    """Yields the lines with a value, as they stand in the file; those of utf-16 in utf-8."""
    opened: Any = gzip if path.suffix == ".gz" else io
    try:
        with opened.open(path, "rb") as file:
            lines: Iterable[bytes] = file
            if codecs.lookup(encoding).name.startswith("utf-16"):
                # A line break is two bytes there.
                text = io.TextIOWrapper(file, encoding, "replace", newline="\n")
                lines = (line.encode() for line in text)
            yield from (line for line in lines if line.strip())
    except LookupError:
        raise DataError(
            f"encoding={encoding!r}: there is no such encoding; give utf-8, latin-1 or utf-16"
        ) from None
    except (OSError, EOFError) as error:
        raise DataError(
            f"{path}: cannot be read ({str(error)[:60]}); copy or write it again"
        ) from None


def _header(
    path: Path, types: Collection[str], delimiter: str, quote: str, encoding: str
) -> list[str]:
    first = next(_lines(path, encoding), b"").strip(b"\r\n")
    written = "latin-1" if codecs.lookup(encoding).name == "iso8859-1" else "utf-8-sig"
    text = first.decode(written, "replace")
    if _CONTROL.search(text.replace(delimiter, "")):
        raise DataError(
            f"{path}: line 1 is no text in {encoding}: {short_text(first)}; give its encoding, such as "
            "encoding='utf-16', or another file"
        )
    if len(delimiter) > 1:
        return [name.strip(quote) for name in text.split(delimiter)]
    options: dict[str, Any] = {"delimiter": delimiter, "quotechar": quote or None}
    if not quote:
        options["quoting"] = csv.QUOTE_NONE
    header = next(csv.reader([text], **options), [])
    other = re.search(r"[;,\t|]", text.replace(delimiter, ""))
    if len(header) == 1 and other and header[0] not in types:
        raise DataError(
            f"{path}: line 1 is one value, {short_text(text)}; give its delimiter: delimiter={other[0]!r}"
        )
    return header


def _unclosed(
    path: Path, quote: str, encoding: str, lines: int, rows: int
) -> DataError:
    """Returns the error of a value that holds further lines; its line has a quote too many."""
    mark = quote.encode()
    numbered = enumerate(_lines(path, encoding), 1)
    odd = (number for number, line in numbered if line.count(mark) % 2)
    return DataError(
        f"{path}: line {next(odd, 1)}: a quote without its end takes lines into a value: {lines:,} lines, {rows:,} "
        "rows; mend the quote, or read none: read_csv(quote='')"
    )
