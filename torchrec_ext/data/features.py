"""read_rows(): a user's parquet file as it stands -> its columns in types that steps take, each checked by its role."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.data.files.arrow import is_list_type, not_utf8, one_piece
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.preprocess.columns import (
    arrow_type,
    as_times,
    is_iso,
    raw_type,
    short_text,
)
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import listed

KEYS = {"user": "user_id", "item": "item_id"}
# Columns that may say the order of events, which we call ORDER.
TIMES = ("timestamp", "time", "position")
ORDER = "order"
LABEL = "label"
_SPELLINGS = {
    "user_id": ("user_id", "user"),
    "item_id": ("item_id", "item"),
    ORDER: TIMES,
}
# Raw types of the columns that have a role.
_NUMBERS = ("int64", "float32", "float64")
_TAKES = {
    **dict.fromkeys(KEYS.values(), ("int64", "string")),
    ORDER: (*_NUMBERS, "timestamp[us]"),
    LABEL: (*_NUMBERS, "bool"),
}
# The first text among so many decides whether a column holds dates.
_PROBE = 1000
_OTHER_DATE = re.compile(
    r"(\d{4}[./]\d{1,2}[./]\d{1,2}|\d{1,2}[./-]\d{1,2}[./-]\d{4})(\D.*)?"
)
_LABELS = pa.array([0.0, 1.0])
RawColumns = Mapping[str, pa.Array]


def owned_columns(
    owner: str, names: Iterable[str], described: Collection[str | None]
) -> list[str]:
    """Returns the columns of the ``owner``, user or item: those in ``described``, and all that begin with its name."""
    return [name for name in names if name in described or name.startswith(f"{owner}_")]


def read_rows(
    path: Path, needs: Sequence[str], others: tuple[str, ...] = ("",)
) -> dict[str, pa.Array]:
    """Reads a file's columns under our names: ids, numbers, times and texts in the types of steps.

    Whole numbers are int64; dates, times and texts in ISO 8601 ``timestamp[us, UTC]``; fractions are those of 32 bits
    in 64; an order, times of any unit, is a number with all its digits.

    Args:
        path: a parquet file.
        needs: columns without a missing value: ids, an order, and ``label``, which is 0 or 1.
        others: beginnings of the names of further columns to read; all of them by default.

    Raises:
        DataError: a column is missing, or has a type or a value that it cannot have.
    """
    source = ParquetSource(path)
    names = source.columns
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
    words = {
        name: word
        for name, word in words.items()
        if name in needs or name.startswith(others)
    }
    written = list(words.values())
    table = pa.concat_tables([source.table(group, written) for group in source.groups])
    columns = {}
    for name, word in words.items():
        column = _typed(path, word, name, one_piece(table[word]))
        _check(path, word, name, column, is_needed=name in needs)
        if name == ORDER:
            if pa.types.is_timestamp(column.type):
                column = column.cast(pa.int64())
        elif pa.types.is_floating(column.type):
            # Rounded to 32 bits, so that a number compares equal in files of 32 and of
            # 64 bits; means are computed in 64. Not times: 32 bits hold two minutes.
            column = column.cast(pa.float32()).cast(pa.float64())
        columns[name] = column
    return columns


def _typed(path: Path, name: str, role: str, column: pa.Array) -> pa.Array:
    """Returns a column in the type of steps; refuses a type without steps, or one against its role."""
    row = not_utf8(column)
    if row >= 0:
        text = "a text of the list"
        if not is_list_type(column.type):
            text = short_text(column.slice(row, 1).cast(pa.binary())[0])
        raise DataError(
            f"{path}: column '{name}', row {row}: {text} is no UTF-8; write the column as UTF-8, or leave it out"
        )
    kind = raw_type(column.type)
    is_time = pa.types.is_date(column.type) or pa.types.is_timestamp(column.type)
    if kind == "string" and role not in KEYS.values():
        column = column.cast(pa.string())
        first = next(filter(None, column.drop_null()[:_PROBE].to_pylist()), "")
        is_time = is_iso(first) or _OTHER_DATE.fullmatch(first) is not None
    if is_time:
        try:
            column = as_times(column)
        except ValueError as error:
            row = getattr(error, "row", 0)
            raise DataError(
                f"{path}: column '{name}', row {row}: {short_text(column[row])} {error}; write the dates so or as "
                "timestamps, or leave the column out"
            ) from None
        kind = raw_type(column.type)
    if pa.types.is_null(column.type):
        return column
    takes = _TAKES.get(role)
    if kind is None or (takes and kind not in takes):
        must = listed(takes or ("text", "whole numbers", "fractions", "times"))
        # Of whole numbers with a missing one pandas makes fractions.
        of_pandas = pa.types.is_floating(column.type) and role in KEYS.values()
        hint = " (of pandas: astype('Int64'))" if of_pandas else ""
        raise DataError(
            f"{path}: column '{name}' is {column.type}; must be {must}: convert it where it is written{hint}, or "
            "leave it out"
        )
    return column if is_list_type(column.type) else column.cast(arrow_type(kind))


def _check(
    path: Path, name: str, role: str, column: pa.Array, *, is_needed: bool
) -> None:
    """Refuses a column with a value that its role cannot have; names the first one."""
    faults: list[tuple[pa.Array, str]] = []
    if is_needed:
        faults.append((column.is_null(), "each row needs one; leave these rows out"))
    if role == LABEL:
        wrong = pc.invert(pc.is_in(column.cast(pa.float64(), safe=False), _LABELS))
        faults.append((wrong, "must be 0 or 1; write ratings so, such as rating >= 4"))
    if role in KEYS.values() and pa.types.is_string(column.type):
        nameless = pc.or_(pc.equal(column, ""), pc.match_substring(column, "\0"))
        rule = "an id without a name, or with a NUL byte; write null if it is missing"
        faults.append((nameless, rule))
    if pa.types.is_floating(column.type):
        # A number beyond float32 becomes infinite here, and is meant to.
        beyond = pc.invert(pc.is_finite(column.cast(pa.float32(), safe=False)))
        rule = "must be a finite number of 32 bits: fill it, or leave the column out"
        faults.append((beyond, rule))
    for is_wrong, rule in faults:
        if count := pc.sum(is_wrong).as_py():
            row = pc.index(is_wrong, True).as_py()
            raise DataError(
                f"{path}: column '{name}', row {row}: {short_text(column[row])}, in {count:,} rows: {rule}"
            )


def why_no_lists(kind: pa.DataType) -> str:
    """Says why a column of lists describes nothing, and what takes it."""
    if pa.types.is_floating(kind.value_type):
        return "it holds vectors; pretrained.ID=FILE begins the table of column ID with vectors"
    return "it holds lists; a preprocessing recipe takes them by Lists(column=...)"
