"""read_csv(): CSV files -> a table of DuckDB; columns are found by their names, and no line is lost without a word."""

from __future__ import annotations

import codecs
import csv
import functools
import glob
import gzip
import io
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrec_ext.data.preprocess.columns import ISO_8601, missing_column, short_text
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
# Column of a table that is being filled: the place of a line's first wrong column, and its text.
_FAULT = quoted("__fault__")
_INTEGERS = re.compile("U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?")
# DuckDB's types of times, from the time in UTC.
_TIMES = {
    "TIMESTAMP": "{utc}",
    "TIMESTAMP WITH TIME ZONE": "timezone('UTC', {utc})",
    # A request's time loses what the unit cannot hold, and DuckDB would round it.
    "TIMESTAMP_S": "CAST(make_timestamp(epoch_us({utc}) // 1000000 * 1000000) AS TIMESTAMP_S)",
    "TIMESTAMP_MS": "CAST(make_timestamp(epoch_us({utc}) // 1000 * 1000) AS TIMESTAMP_MS)",
    "TIMESTAMP_NS": "TRY_CAST({utc} AS TIMESTAMP_NS)",
}


def read_csv(
    con: Connection,
    paths: str | Path | Sequence[str | Path],
    types: Mapping[str, str],
    *,
    names: Sequence[str] | None = None,
    delimiter: str = ",",
    quote: str = '"',
    encoding: str = "utf-8",
    line_breaks: bool = False,
    broken: int = 0,
) -> str:
    """Reads columns of CSV files, plain or .gz, into a table of the connection.

    Each file has a header of its own, in any order: DuckDB's ``read_csv(..., columns=...)`` reads by position and takes
    a header for granted. A text is read as a request reads it: a time in ISO 8601 becomes UTC, and an integer has no
    fraction. A value with a line break is refused by default, since most are a quote without its end.

    Args:
        con: connection of DuckDB.
        paths: files or patterns, read in this order.
        types: DuckDB's type of each column to read, such as ``{"user_id": "BIGINT", "city": "VARCHAR"}``.
        names: names of all columns, if the files have no header.
        delimiter: text between two values.
        quote: character around a value that holds a delimiter; empty if there is none.
        encoding: encoding of the files, such as ``latin-1``.
        line_breaks: whether quoted values may have line breaks.
        broken: greatest number of broken lines to leave out. They are counted in a line, and the first one is named.

    Returns:
        The table's name in SQL.

    Raises:
        DataError: a file is missing, lacks a column, has more broken lines, or a quote without its end takes further
            lines into a value.
    """
    table = f"csv_{next(_numbers)}"
    kinds = _created(con, table, types)
    select = _select(kinds)
    mark = quote.encode() if line_breaks else b""
    before = 0
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
        texts = []
        for place, name in enumerate(header):
            word = name if name in types else f"unread {place}"
            texts.append(f"{sql_text(word)}: 'VARCHAR'")
        options = {
            "auto_detect": "false",
            "header": str(names is None).lower(),
            "delim": sql_text(delimiter),
            "quote": sql_text(quote),
            "escape": sql_text(quote),
            "encoding": sql_text(encoding),
            "columns": f"{{{', '.join(texts)}}}",
            "store_rejects": "true",
            "rejects_table": sql_text(f"{table}_rejects"),
            "rejects_scan": sql_text(f"{table}_scans"),
        }
        settings = ", ".join(f"{key}={value}" for key, value in options.items())
        # DuckDB takes every name for a pattern.
        pattern = sql_text(glob.escape(str(path)))
        with telling():
            ((rows,),) = con.execute(
                f"INSERT INTO {table} {select}{pattern}, {settings}))"
            ).fetchall()
        # Lines that are not of the header's form.
        rejected = con.sql(
            f"SELECT line, arg_min(error_message, line) FROM {table}_rejects JOIN {table}_scans "
            f"USING (scan_id, file_id) WHERE file_path = {sql_text(str(path))} GROUP BY line ORDER BY line"
        ).fetchall()
        # Ends of lines are counted in a tenth of the time of lines.
        if mark or _line_ends(path, encoding) > rows + len(rejected) + (names is None):
            lines = sum(1 for _ in _records(path, encoding, mark)) - (names is None)
            if lines > rows + len(rejected):
                raise _unclosed(path, quote, encoding, lines, rows)
        count, row, wrong = con.sql(
            f"SELECT count(*), min(rowid), arg_min({_FAULT}, rowid) FROM {table} "
            f"WHERE rowid >= {before} AND {_FAULT} IS NOT NULL"
        ).fetchall()[0]
        if (count or rejected) and not told:
            # In a file of one column a blank line is a row.
            records = functools.partial(
                _records, path, encoding, mark, blank=len(header) == 1
            )
            found = []
            for place, fault in rejected[:1]:
                number = next((n for at, n in records() if at >= place), place)
                found.append((number, csv_fault(str(fault))))
            if count:
                without = {place for place, _ in rejected}
                good = (number for at, number in records() if at not in without)
                number = next(
                    itertools.islice(good, row - before + (names is None), None)
                )
                column, text = wrong.split(" ", 1)
                name, kind = kinds[int(column)]
                fault = f"column '{name}': {short_text(text)[:40]} is no {kind}{_rule(kind)}"
                found.append((number, fault))
            first = "{}: line {}: {}".format(path, *min(found))
        before += rows
        told += len(rejected) + count
    con.execute(f"DELETE FROM {table} WHERE {_FAULT} IS NOT NULL")
    con.execute(f"ALTER TABLE {table} DROP {_FAULT}")
    if told > broken:
        raise DataError(
            f"{first} ({told:,} broken lines); mend them, or leave them out: read_csv(broken={told})"
        )
    if told:
        print(f"note: {told:,} broken lines are left out; {first}", flush=True)
    return table


def _created(
    con: Connection, table: str, types: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Creates a table with a column for faults; returns the names of its columns and types.

    Raises:
        DataError: DuckDB has no such type.
    """
    if not types:
        raise DataError(
            "types={}: name the columns to read, as in {'user_id': 'BIGINT'}"
        )
    for name, kind in types.items():
        try:
            con.execute(f"SELECT CAST(NULL AS {kind})")
        except Exception as error:
            raise DataError(
                f"types: column '{name}': DuckDB has no type {short_text(kind)[:40]}; name one, such as BIGINT, "
                "DOUBLE, VARCHAR, BOOLEAN, DATE or TIMESTAMP"
            ) from error
    declared = ", ".join(f"{quoted(name)} {kind}" for name, kind in types.items())
    with telling():
        con.execute(f"CREATE TABLE {table} ({declared}, {_FAULT} VARCHAR)")
    # DuckDB's own names of the types: INT8 is BIGINT.
    return [pair[:2] for pair in con.sql(f"DESCRIBE {table}").fetchall()[:-1]]


def _select(kinds: Sequence[tuple[str, str]]) -> str:
    """Returns the beginning of SQL that reads columns of texts: their values, and the first fault's place and text."""
    values = []
    faults = []
    for place, (name, kind) in enumerate(kinds):
        text = quoted(name)
        values.append(f"{text} AS t{place}, {_strict(text, kind)} AS v{place}")
        if kind != "VARCHAR":
            is_fault = f"v{place} IS NULL AND t{place} IS NOT NULL"
            faults.append(f"WHEN {is_fault} THEN '{place} ' || t{place}")
    fault = f"CASE {' '.join(faults)} END" if faults else "NULL"
    results = ", ".join(f"v{place}" for place in range(len(kinds)))
    # Each value is computed once, below the search for faults.
    return f"SELECT {results}, {fault} FROM (SELECT {', '.join(values)} FROM read_csv("


def _strict(text: str, kind: str) -> str:
    """Returns SQL for the value of a text in DuckDB's type ``kind``; NULL if it is no such value.

    DuckDB's own conversion rounds fractions to integers, makes infinities of large numbers, and drops a time's offset.
    """
    value = f"TRY_CAST({text} AS {kind})"
    if kind == "VARCHAR":
        return text
    if _INTEGERS.fullmatch(kind):
        digits = sql_text(r"\s*[+-]?\d+(\.0*)?\s*")
        return f"CASE WHEN regexp_full_match({text}, {digits}) THEN {value} END"
    if kind in ("FLOAT", "DOUBLE"):
        # A request's number is a double first.
        double = f"TRY_CAST({text} AS DOUBLE)"
        is_meant = f"isfinite({double}) OR regexp_matches({text}, '(?i)inf|nan')"
        return f"CASE WHEN NOT contains({text}, '_') AND ({is_meant}) THEN TRY_CAST({double} AS {kind}) END"
    if kind.startswith("DECIMAL"):
        return f"CASE WHEN CAST({value} AS DOUBLE) = TRY_CAST({text} AS DOUBLE) THEN {value} END"
    if kind == "DATE":
        return f"CASE WHEN regexp_full_match({text}, '\\d{{4}}-\\d\\d-\\d\\d') THEN {value} END"
    if kind not in _TIMES:
        return value
    plain = f"TRY_CAST({text} AS TIMESTAMP)"
    # The form of most times, which is sooner compared than searched. DuckDB knows an hour 24.
    is_plain = (
        f"{text} LIKE '____-__-__ __:__:__' AND {text} BETWEEN '0' AND ':' AND right({text}, 1) BETWEEN '0' AND '9' "
        f"AND NOT {text} LIKE '% 24:%' AND NOT {text} LIKE '%  %'"
    )
    has_zone = f"regexp_matches({text}, '[T ].*(Z|[+-]..(:?..)?)$')"
    to_utc = f"timezone('UTC', TRY_CAST({text} AS TIMESTAMPTZ))"
    utc = (
        f"CASE WHEN {is_plain} THEN {plain} WHEN NOT regexp_full_match({text}, {sql_text(ISO_8601)}) THEN NULL "
        f"WHEN {has_zone} THEN {to_utc} ELSE {plain} END"
    )
    return _TIMES[kind].format(utc=utc)


def _rule(kind: str) -> str:
    """Returns what a type asks of a text, for a message."""
    if _INTEGERS.fullmatch(kind):
        return ", a whole number in digits"
    if kind in _TIMES:
        return " in ISO 8601, such as 2024-02-29T18:30:00+01:00"
    return ", such as 2024-02-29 without a time" if kind == "DATE" else ""


def _files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        # A file may have brackets in its name.
        found = [str(path)] if Path(path).exists() else sorted(glob.glob(str(path)))
        if not found:
            raise DataError(f"{path}: no such file; check the path")
        files += map(Path, found)
    return files


@contextmanager
def _opened(path: Path, encoding: str) -> Iterator[Any]:
    """Opens a file for its bytes; one of utf-16 for its lines in utf-8, since a line break is two bytes there."""
    file_of: Any = gzip if path.suffix == ".gz" else io
    try:
        with file_of.open(path, "rb") as file:
            if codecs.lookup(encoding).name.startswith("utf-16"):
                text = io.TextIOWrapper(file, encoding, "replace", newline="\n")
                yield (line.encode() for line in text)
            else:
                yield file
    except LookupError:
        raise DataError(
            f"encoding={encoding!r}: there is no such encoding; give utf-8, latin-1 or utf-16"
        ) from None
    except (OSError, EOFError) as error:
        raise DataError(
            f"{path}: cannot be read ({str(error)[:60]}); copy or write it again"
        ) from None


def _line_ends(path: Path, encoding: str) -> int:
    """Returns the number of lines of a file, blank ones too."""
    with _opened(path, encoding) as file:
        if not hasattr(file, "read"):
            return sum(1 for _ in file)
        ends = 0
        block = b"\n"
        for block in iter(functools.partial(file.read, 2**20), b""):
            ends += block.count(b"\n")
        # The last line may have none.
        return ends + (block[-1:] != b"\n")


def _records(
    path: Path, encoding: str, mark: bytes, *, blank: bool = False
) -> Iterator[tuple[int, int]]:
    """Yields each row's place among the rows and blank lines of a file, and the number of the line it begins in.

    Args:
        path: the file.
        encoding: its encoding.
        mark: the quote, if a value in it may go on in the next line.
        blank: whether a blank line is a row.

    Raises:
        DataError: the file ends within a value.
    """
    is_within = False
    place = begin = 0
    with _opened(path, encoding) as file:
        for number, line in enumerate(file, 1):
            if not is_within:
                begin = number
                place += 1
                if blank or line.strip():
                    yield place, number
            if mark and line.count(mark) % 2:
                is_within = not is_within
    if is_within:
        raise DataError(
            f"{path}: line {begin}: a quote without its end: the file ends within its value; mend the quote"
        )


def _header(
    path: Path, types: Collection[str], delimiter: str, quote: str, encoding: str
) -> list[str]:
    with _opened(path, encoding) as file:
        first = next((line for line in file if line.strip()), b"").strip(b"\r\n")
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
    with _opened(path, encoding) as file:
        lines_of_file = enumerate(file, 1)
        odd = next((n for n, line in lines_of_file if line.count(mark) % 2), 1)
    return DataError(
        f"{path}: line {odd}: a quote without its end or a line break in a value: {lines:,} lines, {rows:,} "
        "rows; mend the quote, or read_csv(line_breaks=True) if breaks are meant, quote='' if quotes are text"
    )
