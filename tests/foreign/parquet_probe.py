"""Reads one parquet file within limits, and prints each column's result as JSON lines.

It is run as a process of its own, which a damaged file may end: `python -m tests.foreign.parquet_probe FILE`.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pyarrow.parquet as pq

from torchrec_ext.data.columns import Column, concatenate
from torchrec_ext.data.files.arrow import Kind
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.schema import DataError

# bytes of address space that reading may take beside what is there after the imports
MEMORY = 2 << 30


def columns_of(path: str) -> list[str]:
    """The file's columns; one of no name where its footer cannot be read."""
    try:
        return list(pq.read_schema(path).names) or [""]
    except Exception:
        return [""]


def by_source(path: str, name: str) -> Column:
    """The column as it streams by."""
    source = ParquetSource(path)
    source.require({name: get_args(Kind)})
    return concatenate([source.read(group, [name])[name] for group in source.groups])


def rows_of(column: Column) -> list[Any]:
    """Its values as Python's."""
    return (
        [column.row(row).tolist() for row in range(len(column))]
        if column.ragged
        else column.values.tolist()
    )


def read_by_duckdb(path: str, name: str) -> list[Any] | None:
    """The same column as a reader that is not Arrow's has it; None where it has nothing."""
    import duckdb

    try:
        rows = duckdb.sql(
            f"select {json.dumps(name)} from read_parquet('{path}')"
        ).fetchall()
    except duckdb.Error:
        return None
    return [row[0] for row in rows]


def same(left: Any, right: Any) -> bool:
    """Whether two values are the same, NaN of NaN."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def outcome(path: str, name: str, read: Callable[[], Column]) -> dict[str, Any]:
    """Returns how reading ended: ``refused`` with the message, ``raised`` with an error, or ``read``, right or not."""
    try:
        column = read()
    except DataError as error:
        return {"how": "refused", "told": str(error)}
    except Exception as error:
        return {"how": "raised", "told": f"{type(error).__name__}: {error}"}
    other = read_by_duckdb(path, name)
    return {
        "how": "read",
        "right": None if other is None else same(rows_of(column), other),
    }


def main(path: str) -> None:
    """Prints a line for each column."""
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    for name in columns_of(path):
        told = outcome(path, name, partial(by_source, path, name))
        print(json.dumps({"column": name, **told}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
