"""The readers of a user's files: their columns in types that steps take.

raw_column(), raw_ids(): dates are times, missing values stay.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.data.columns import Array, Column
from torchrec_ext.data.files.arrow import as_int64, is_list_type, one_piece
from torchrec_ext.data.files.sources import ParquetSource, read_columns
from torchrec_ext.data.preprocess.columns import as_times, is_iso
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import listed

SEPARATOR = "|"
KEYS = {"user": "user_id", "item": "item_id"}
# Columns that may say the order of events, which we call ORDER.
TIMES = ("timestamp", "time", "position")
ORDER = "order"
_SPELLINGS = {
    "user_id": ("user_id", "user"),
    "item_id": ("item_id", "item"),
    ORDER: TIMES,
}
# Share of distinct values from which on a column names its row, as a title does, and
# says nothing about another row.
MOST_DISTINCT = 0.5
# The first text among these rows decides whether a column holds dates.
_PROBE_ROWS = 1000
_OTHER_DATE = re.compile(
    r"(\d{4}[./]\d{1,2}[./]\d{1,2}|\d{1,2}[./-]\d{1,2}[./-]\d{4})(\D.*)?"
)
RawColumns = Mapping[str, pa.Array]


def owned_columns(
    owner: str, names: Iterable[str], described: Collection[str | None]
) -> list[str]:
    """Returns the columns of the ``owner``, user or item: those in ``described``, and all that begin with its name."""
    return [name for name in names if name in described or name.startswith(f"{owner}_")]


def raw_column(path: Path, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Converts a column of a file to a type supported by steps, its missing values as nulls.

    Whole numbers are int64; dates, times and texts in ISO 8601 ``timestamp[us, UTC]``; text, fractions, bools and lists
    stay.

    Args:
        path: the file, for messages.
        name: name of the column, for messages.
        column: (B,) values.

    Raises:
        DataError: a whole number is beyond int64, a fraction is not finite, a text is a date in another format than the
            first one or than ISO 8601, or the type is none of these.
    """
    column = _plain_text(column)
    kind = column.type
    if pa.types.is_integer(kind):
        return _integers(path, name, column)
    if pa.types.is_floating(kind):
        # Nulls stay in the column; as 0 they pass the check.
        check_finite(path, name, column.fill_null(0).to_numpy(zero_copy_only=False))
        return column.cast(pa.float32()) if pa.types.is_float16(kind) else column
    first = ""
    if pa.types.is_string(kind):
        first = next((text for text in column[:_PROBE_ROWS].to_pylist() if text), "")
    if (
        is_iso(first)
        or _OTHER_DATE.fullmatch(first)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
    ):
        return times_in(path, name, column)
    if (
        pa.types.is_string(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
        or is_list_type(kind)
    ):
        return column
    raise DataError(
        f"{path}: column '{name}' is {kind}; must be text, whole numbers, fractions or dates: convert it where it is "
        "written, or leave it out"
    )


def raw_ids(path: Path, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns a column of ids as int64 or string, its missing values as nulls.

    Raises:
        DataError: an id is beyond int64, empty or holds a NUL byte, or the ids are neither whole numbers nor text.
    """
    column = _plain_text(column)
    if pa.types.is_integer(column.type):
        return _integers(path, name, column)
    if pa.types.is_null(column.type):
        return column
    if pa.types.is_string(column.type):
        bad = pc.or_(pc.equal(column, ""), pc.match_substring(column, "\0"))
        if count := pc.sum(bad).as_py():
            row = bad.index(True).as_py()
            value = ascii(column[row].as_py())[:40]
            raise DataError(
                f"{path}: column '{name}', row {row}: {value}, in {count:,} rows: an id without a name, or with a NUL "
                "byte; write null if it is missing, or leave these rows out"
            )
        return column
    refuse_lists(path, name, column)
    raise DataError(
        f"{path}: column '{name}' is {column.type}; ids must be whole numbers or text: convert it "
        "where it is written (of pandas: astype('Int64'))"
    )


def refuse_lists(path: Path, name: str, column: pa.Array) -> None:
    """Refuses a column with several values in a row.

    Raises:
        DataError: the column holds lists.
    """
    if is_list_type(column.type):
        raise DataError(
            f"{path}: column '{name}' holds lists, must hold one value per row; write a row for each event"
        )


def times_in(path: Path, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns a column of dates, times or texts in ISO 8601 as ``timestamp[us, UTC]``.

    Raises:
        DataError: a text is a date in another format; the message names its row. The column has another type.
    """
    column = _plain_text(column)
    kind = column.type
    if not (
        pa.types.is_string(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
    ):
        raise DataError(
            f"{path}: column '{name}' is {kind}; times must be whole numbers, timestamps, dates or text in ISO 8601; "
            "convert it where it is written"
        )
    try:
        return as_times(column)
    except ValueError as error:
        row = getattr(error, "row", 0)
        raise DataError(
            f"{path}: column '{name}', row {row}: {ascii(column[row].as_py())[:80]} {error}; write the dates so or as "
            "timestamps, or leave the column out"
        ) from None


def read_rows(
    path: Path, needs: Sequence[str], *, every: bool = True
) -> dict[str, pa.Array]:
    """Reads a file's columns under our names: ids, numbers, times and texts in the types of steps.

    Fractions are those of 32 bits in 64, and an order, times of any unit, is a number.

    Args:
        path: a parquet file.
        needs: columns without a missing value: ids and an order; and ``label``, whose values the caller checks.
        every: whether to read further columns.

    Raises:
        DataError: a column is missing, or has a value that it cannot have.
    """
    names = ParquetSource(path).columns
    words: dict[str, str] = {}
    for name in names:
        # Tables are named like their columns, and a module's name has no dot.
        short = KEYS.get(name, name.replace(".", "_"))
        if short in words:
            raise DataError(
                f"{path}: two columns are '{short}', of which one is written '{name}'; rename one"
            )
        words[short] = name
    if ORDER in needs:
        time = next((name for name in TIMES if name in words), None)
        if time:
            words[ORDER] = words.pop(time)
    for name in needs:
        if name not in words:
            spelled = " or ".join(_SPELLINGS.get(name, (name,)))
            raise DataError(
                f"{path}: no column {spelled}; the file has {listed(names)}: add it, as in "
                "docs/recipes.md"
            )
    columns = {}
    reason = f"a row needs {', '.join(words[name] for name in needs)}"
    if not every:
        words = {name: words[name] for name in needs}
    table = read_columns(path, list(words.values()))
    for name, word in words.items():
        convert = raw_ids if name in KEYS.values() else raw_column
        column = convert(path, word, table.column(word))
        if name == ORDER:
            column = _order(path, word, column)
        if name in needs and name != "label":
            check_no_null(path, word, column, reason)
        if pa.types.is_floating(column.type):
            # Rounded to 32 bits, so that a number compares equal in files of 32 and of
            # 64 bits; means are computed in 64.
            column = column.cast(pa.float32()).cast(pa.float64())
        columns[name] = column
    return columns


def _order(path: Path, name: str, column: pa.Array) -> pa.Array:
    """Returns positions or times of any unit as numbers: only their order counts."""
    refuse_lists(path, name, column)
    if pa.types.is_string(column.type):
        # raw_column keeps text without a first date. This raises an error that names
        # the row.
        times_in(path, name, column)
    return column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column


def check_no_null(path: Path, name: str, column: pa.Array, reason: str) -> None:
    """Refuses missing values.

    Raises:
        DataError: a value is missing; the message names file, column and row, and says the ``reason``.
    """
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(
            f"{path}: column '{name}', row {row}: value is null ({column.null_count:,} such rows), and {reason}; leave "
            "these rows out"
        )


def same_types(
    columns: Mapping[Path, RawColumns], *, strict: bool = False
) -> list[dict[str, pa.Array]]:
    """Returns the raw columns of several files in the types of the first.

    Args:
        columns: columns of each file.
        strict: refuse what could be converted.

    Raises:
        DataError: a file lacks a column of the first, or has it in another type.
    """
    first, first_columns = next(iter(columns.items()))
    aligned = []
    for path, arrays in columns.items():
        converted: dict[str, pa.Array] = {}
        for name, expected in first_columns.items():
            if name not in arrays:
                raise DataError(
                    f"{path}: column '{name}' is missing, {first.name} has it and {path.name} {sorted(arrays)}; write "
                    "the same columns to all files"
                )
            array = arrays[name]
            if array.type != expected.type:
                is_time = pa.types.is_timestamp(expected.type)
                if is_time and pa.types.is_string(array.type):
                    array = times_in(path, name, array)
                elif strict or not pa.types.is_null(array.type):
                    raise DataError(
                        f"{path}: column '{name}' is {array.type}, in {first.name} {expected.type}; write one type to "
                        "all files"
                    )
            converted[name] = array.cast(expected.type)
        aligned.append(converted)
    return aligned


def _plain_text(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns a column as one array, text without a dictionary and of one type."""
    array = one_piece(column)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(pa.string()) if pa.types.is_large_string(array.type) else array


def _integers(path: Path, name: str, column: pa.Array) -> pa.Array:
    # Every other type fits into int64.
    if pa.types.is_uint64(column.type):
        as_int64(str(path), name, Column(column.fill_null(0).to_numpy()))
    return column.cast(pa.int64())


def check_finite(path: Path, name: str, values: Array) -> None:
    """Refuses NaN, infinity and numbers beyond float32 in a column of fractions.

    Raises:
        DataError: a value is not finite; the message names file, column, row and value.
    """
    with np.errstate(over="ignore"):
        # A number beyond float32 becomes infinite here, and is meant to.
        bad = ~np.isfinite(values.astype(np.float32, copy=False))
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"{path}: column '{name}', row {row}: {values[row]}; must be a finite number of 32 bits "
            f"({int(bad.sum()):,} rows are not): fill it, drop the row, or leave the column out"
        )


def check_described(path: Path, key: str, ids: Array) -> None:
    """Refuses repeated ids in a file of users or items.

    Args:
        path: file of users or items.
        key: name of the column with the ids.
        ids: (B,) ids in that column, whole numbers or text.

    Raises:
        DataError: an id has two rows, one of which would be lost.
    """
    # Stable, so that the message names the first two rows of an id in the order of the
    # file.
    order = np.argsort(ids, kind="stable")
    twice = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    if len(twice):
        first = order[twice[0]]
        second = order[twice[0] + 1]
        raise DataError(
            f"{path}: column '{key}', rows {first} and {second}: both describe id {ids[first]} ({len(twice):,} rows "
            "more than there are ids); keep one row for each id"
        )


def why_left_out(column: pa.Array) -> str | None:
    """Says why a column of users or items describes none of them; None if it does."""
    if is_list_type(column.type):
        return "it holds lists"
    known = len(column) - column.null_count
    if not known:
        return "all its values are missing"
    if pa.types.is_floating(column.type) or pa.types.is_timestamp(column.type):
        return None
    distinct = pc.count_distinct(column).as_py()
    if distinct <= MOST_DISTINCT * known:
        return None
    return f"{distinct:,} different values in {known:,} rows name a row and do not describe it"
