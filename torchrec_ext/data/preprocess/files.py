"""Parquet files as a preprocessor's input: every footer is looked at before an engine is."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_ext.data.files import DataFile, find_files
from torchrec_ext.data.preprocess.column_types import missing_column, raw_type
from torchrec_ext.schema import DataError

PathLike = str | os.PathLike[str]
Source = Any  # a path, several of them, or an ibis Table of the engine


@dataclass(frozen=True, kw_only=True)
class Files:
    """Parquet files with the same columns.

    Args:
        files: one or more.
        schema: by column, its Arrow type; hive partitions are strings.
        rows: of all files together.
    """

    files: tuple[DataFile, ...]
    schema: Mapping[str, pa.DataType]
    rows: int

    @property
    def where(self) -> str:
        """What messages call them."""
        return self.files[0].name if len(self.files) == 1 else f"{self.files[0].name} and {len(self.files) - 1} more"


def scan(paths: PathLike | Sequence[PathLike]) -> Files:
    """Finds the files and reads their footers.

    Raises:
        DataError: a path names nothing; a file is not parquet, is cut short, or has other columns than the first; no row at all.
    """
    files = find_files(paths, (".parquet", ".pq"))
    footers = [_footer(file) for file in files]
    first = _schema(files[0], footers[0])
    for file, footer in zip(files[1:], footers[1:], strict=True):
        _check_same(files[0], first, file, _schema(file, footer))
    rows = sum(footer.num_rows for footer in footers)
    if not rows:
        raise DataError(f"{', '.join(file.name for file in files[:3])}: zero rows; write at least one, or leave the file out")
    return Files(files=tuple(files), schema=first, rows=rows)


def raw_types(where: str, schema: Mapping[str, pa.DataType], names: Collection[str]) -> dict[str, str]:
    """The raw types of some columns.

    Raises:
        DataError: a column is missing or has a type that nothing can be made of.
    """
    found = {}
    for name in names:
        if name not in schema:
            raise missing_column(where, name, schema.keys())
        twin = next((other for other in schema if other != name and other.lower() == name.lower()), None)
        if twin:
            raise DataError(
                f"{where}: columns '{name}' and '{twin}' differ in case alone, which no engine tells apart; rename one where they "
                "are written"
            )
        kind = raw_type(schema[name])
        if kind is None:
            raise DataError(
                f"{where}: column '{name}' is {schema[name]}, must be a bool, an integer of 64 signed bits, a float, a string, a "
                "timestamp or a list of one of these; convert it where it is written"
            )
        found[name] = kind
    return found


@contextmanager
def blaming(files: Sequence[DataFile]) -> Iterator[None]:
    """Turns an engine's error over damaged data into one that names file, row group and column."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        for file in files:
            if place := _damage(file):
                raise DataError(
                    f"{file.name}: {place} cannot be read: the file is damaged; copy or write it again ({error})"
                ) from error
        raise


def _open(file: DataFile) -> pq.ParquetFile:
    source = file.path if file.remote is None else file.open()
    return pq.ParquetFile(source, page_checksum_verification=True)


def _footer(file: DataFile) -> pq.FileMetaData:
    try:
        return _open(file).metadata
    except Exception as error:  # a remote file system has errors of its own
        raise DataError(
            f"{file.name}: not parquet, or its footer is missing or damaged: was it cut short? copy or write it again ({error})"
        ) from error


def _schema(file: DataFile, footer: pq.FileMetaData) -> dict[str, pa.DataType]:
    schema = footer.schema.to_arrow_schema()
    types = {name: schema.field(name).type for name in schema.names}
    return {**types, **{name: pa.string() for name in file.partitions if name not in types}}


def _check_same(first: DataFile, wanted: Mapping[str, Any], file: DataFile, found: Mapping[str, Any]) -> None:
    for name, dtype in wanted.items():
        if name not in found:
            raise DataError(f"{file.name}: column '{name}' is missing, but {first.name} has it; give files with the same columns")
        same = found[name] == dtype or (raw_type(dtype) == raw_type(found[name]) == "string")
        if not same:
            raise DataError(
                f"{file.name}: column '{name}' is {found[name]}, in {first.name} it is {dtype}; give files with the same types"
            )


def _damage(file: DataFile) -> str:
    try:
        parquet = _open(file)
    except Exception:
        return "its footer"
    for group in range(parquet.metadata.num_row_groups):
        for name in parquet.schema_arrow.names:
            try:
                parquet.read_row_group(group, columns=[name])
            except (pa.ArrowException, OSError):
                return f"row group {group}, column '{name}'"
    return ""
