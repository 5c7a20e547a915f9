"""Parquet files -> one Chunk, with every fault named by file, column, row group and row.

read_columns(): a file as an Arrow table, with its nulls.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_ext.data.columns import Chunk, Column, concatenate
from torchrec_ext.data.files.arrow import ColumnRules, Kind, kind_of
from torchrec_ext.data.files.sources import warn_of_parquet
from torchrec_ext.schema import DataError

Path_ = str | os.PathLike[str]
_ACCEPTED_KINDS: dict[str, set[str]] = {"float": {"float", "int"}, "floats": {"floats", "ints"}}


def read_parquet(
    paths: Path_ | Sequence[Path_],
    columns: Mapping[str, Kind | None] | Sequence[str] | None = None,
    *,
    fill: Mapping[str, Any] | None = None,
) -> Chunk:
    """Reads whole files, one after the other.

    Numbers without nulls are views of Arrow's memory if a column lies in one piece. Strings are object arrays, lists
    ragged columns.

    Args:
        paths: one file or several with the same columns.
        columns: names, or names with the kind that each must have (``float`` takes integers as well; None takes any);
            all columns by default.
        fill: maps a scalar column to the value that stands for null; other columns must have no nulls.

    Raises:
        DataError: a file is missing, is not parquet, is cut short or damaged, has no rows, lacks a column, has one of
            another type, or holds a null.

    Example:
        >>> read_parquet("ratings.parquet", {"user_id": "int"})
        Traceback (most recent call last):
        torchrec_ext.schema.validation.DataError: ratings.parquet: no such file; check the path
    """
    files = [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(path) for path in paths]
    if not files:
        raise DataError("no parquet file was given; name at least one")
    kinds = columns if isinstance(columns, Mapping) or columns is None else dict.fromkeys(columns)
    wrong = sorted({kind for kind in (kinds or {}).values() if kind} - set(get_args(Kind)))
    if wrong:
        raise ValueError(f"columns asks for the kinds {wrong}; a kind is one of {', '.join(get_args(Kind))}")
    chunks = [_read_file(file, kinds, fill or {}) for file in files]
    joined_columns = {}
    for name in chunks[0]:
        joined_columns[name] = concatenate([_same_kind(name, files, chunks, index) for index in range(len(files))])
    chunk = Chunk(joined_columns)
    if not chunk.num_rows:
        raise DataError(
            f"{files[0]}: zero rows, as in all {len(files)} files; write at least one, or leave the file out"
        )
    return chunk


def read_columns(path: Path, names: Sequence[str] | None = None) -> pa.Table:
    """Reads a whole file as it stands, of any types and with its nulls.

    Args:
        path: a parquet file.
        names: names of columns; all by default.

    Raises:
        DataError: the file is missing, is not parquet, is cut short or damaged, has no rows, or lacks a column.
    """
    file = _open(path)
    warn_of_parquet(str(path), path, file.metadata)
    for name in names or ():
        _check_named(path, file.schema_arrow, name)
    column_names = list(file.schema_arrow.names if names is None else names)
    groups = [_read_columns(path, file, group, column_names) for group in range(file.metadata.num_row_groups)]
    table = pa.concat_tables(groups) if groups else file.schema_arrow.empty_table()
    if not len(table):
        raise DataError(f"{path}: zero rows; write at least one, or leave the file out")
    return table.combine_chunks()


def _read_file(path: Path, kinds: Mapping[str, Kind | None] | None, fill: Mapping[str, Any]) -> Chunk:
    file = _open(path)
    warn_of_parquet(str(path), path, file.metadata)
    schema = file.schema_arrow
    if kinds is None:
        kinds = dict.fromkeys(schema.names)
    for name, kind in kinds.items():
        _check_type(path, schema, name, kind)
    groups = [_read_group(path, file, group, list(kinds), fill) for group in range(file.metadata.num_row_groups)]
    table = pa.concat_tables(groups) if groups else schema.empty_table().select(list(kinds))
    return Chunk({name: ColumnRules().column(str(path), name, table.column(name)) for name in kinds})


def _open(path: Path) -> pq.ParquetFile:
    if not path.exists():
        raise DataError(f"{path}: no such file; check the path")
    try:
        # Pages that carry a checksum are verified: without it, half of all flipped bits give wrong numbers in silence.
        return pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        try:
            with path.open("rb") as stream:
                has_magic = stream.read(4) == b"PAR1"
            size = path.stat().st_size
        except OSError as cause:
            raise DataError(
                f"{path}: cannot be read ({cause.strerror or cause}); check the file and its rights"
            ) from cause
        if has_magic:
            rule = f"starts as parquet, but its footer is missing or damaged ({size} bytes): it was cut short"
        else:
            rule = "is not parquet"
        raise DataError(f"{path}: {rule}; copy or write it again ({error})") from error


def _read_group(path: Path, file: pq.ParquetFile, group: int, names: list[str], fill: Mapping[str, Any]) -> pa.Table:
    table = _read_columns(path, file, group, names)
    return pa.table(
        {name: _without_nulls(f"{path}: row group {group}", name, table.column(name), fill) for name in names}
    )


def _read_columns(path: Path, file: pq.ParquetFile, group: int, names: list[str]) -> pa.Table:
    try:
        return file.read_row_group(group, columns=names)
    except (pa.ArrowException, OSError) as error:
        column = next((name for name in names if not _readable(file, group, name)), None)
        where = f"row group {group}" + (f", column '{column}'" if column else "")
        raise DataError(
            f"{path}: {where} cannot be read: the file is damaged or cut; copy or write it again ({error})"
        ) from error


def _readable(file: pq.ParquetFile, group: int, name: str) -> bool:
    try:
        file.read_row_group(group, columns=[name])
    except (pa.ArrowException, OSError):
        return False
    return True


def _check_named(path: Path, schema: pa.Schema, name: str) -> None:
    if name not in schema.names:
        near = difflib.get_close_matches(name, schema.names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "rename the column, or write it"
        raise DataError(f"{path}: column '{name}' is missing, the file has {schema.names}; {hint}")


def _check_type(path: Path, schema: pa.Schema, name: str, expected_kind: Kind | None) -> None:
    _check_named(path, schema, name)
    kind = kind_of(schema.field(name).type)
    if kind is None or (expected_kind and kind not in _ACCEPTED_KINDS.get(expected_kind, {expected_kind})):
        rule = f"must be {expected_kind}" if expected_kind else f"must be one of {', '.join(get_args(Kind))}"
        raise DataError(f"{path}: column '{name}' is {schema.field(name).type}, {rule}; convert it where it is written")


def _without_nulls(where: str, name: str, data: pa.ChunkedArray, fill: Mapping[str, Any]) -> pa.ChunkedArray:
    """Returns the column with its nulls filled; nulls inside a list are never filled."""
    if data.null_count and name in fill:
        data = data.fill_null(fill[name])
    inside = 0
    if hasattr(data.type, "value_type"):
        inside = sum(chunk.flatten().null_count for chunk in data.chunks)
    if not data.null_count and not inside:
        return data
    if data.null_count:
        row = data.is_null().index(True).as_py()
    else:
        row = next(index for index, ids in enumerate(data) if None in ids.as_py())
    raise DataError(
        f"{where}, column '{name}', row {row}: value is null ({data.null_count or inside} nulls in this row group, "
        f"none allowed); fill them in the file, or those of a scalar column by fill={{'{name}': ...}}"
    )


def _same_kind(name: str, files: Sequence[Path], chunks: Sequence[Chunk], at: int) -> Column:
    first, column = (chunks[index].get(name) for index in (0, at))
    if column is None or first is None:
        raise DataError(
            f"{files[at]}: column '{name}' is missing, but {files[0]} has it; give files with the same columns"
        )
    if column.values.dtype.kind != first.values.dtype.kind or column.ragged != first.ragged:
        raise DataError(
            f"{files[at]}: column '{name}' is {column.values.dtype}, in {files[0]} it is {first.values.dtype}; give "
            "files with the same types"
        )
    return column
