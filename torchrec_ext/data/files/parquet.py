"""read_parquet(): whole files -> one Chunk, without nulls.

read_columns(): a whole file -> an Arrow table, with its nulls.

Both read by :class:`ParquetSource`, which names every fault by file, column, row group and row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import pyarrow as pa

from torchrec_ext.data.columns import Chunk, concatenate_rows
from torchrec_ext.data.files.arrow import Kind
from torchrec_ext.data.files.find import PathLike
from torchrec_ext.data.files.sources import ParquetSource


def read_parquet(
    paths: PathLike | Sequence[PathLike],
    columns: Mapping[str, Kind] | Sequence[str] | None = None,
    *,
    fill: Mapping[str, Any] | None = None,
) -> Chunk:
    """Reads whole files, one after the other.

    Numbers without nulls are views of Arrow's memory if a column lies in one piece. Strings are object arrays, lists
    ragged columns.

    Args:
        paths: one file or several with the same columns.
        columns: names, or names with the kind that each must have; all columns by default.
        fill: maps a column to the value that stands for null; other columns must have no nulls.

    Raises:
        DataError: a file is missing, is not parquet, is cut short or damaged, has no rows, lacks a column, has one of
            another type, or holds a null.

    Example:
        >>> read_parquet("ratings.parquet", {"user_id": "int"})
        Traceback (most recent call last):
        torchrec_ext.schema.validation.DataError: ratings.parquet: no such file; check the path
    """
    source = ParquetSource(paths, fill=fill)
    names = list(source.columns if columns is None else columns)
    kinds: dict[str, Sequence[Kind]] = dict.fromkeys(names, get_args(Kind))
    if isinstance(columns, Mapping):
        kinds |= {name: (kind,) for name, kind in columns.items()}
    source.require(kinds)
    chunks = [source.read(group, names) for group in source.groups]
    return concatenate_rows(chunks, names)


def read_columns(path: PathLike, names: Sequence[str] | None = None) -> pa.Table:
    """Reads a whole file as it stands, of any types and with its nulls.

    Args:
        path: a parquet file.
        names: names of columns; all by default.

    Raises:
        DataError: the file is missing, is not parquet, is cut short or damaged, has no rows, or lacks a column.
    """
    source = ParquetSource(path)
    table_names = list(source.columns if names is None else names)
    for name in table_names:
        source.type_of(name)
    # The source decodes a group in one thread, as a loader wants it; here nothing else
    # runs meanwhile.
    with ThreadPoolExecutor() as pool:
        tables = list(
            pool.map(lambda group: source.table(group, table_names), source.groups)
        )
    return pa.concat_tables(tables).combine_chunks()
