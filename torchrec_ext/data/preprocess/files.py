"""scan(): parquet files as a preprocessor's input; every footer is checked before a row is read.

write_files(): parquet files as loaders read them best, with row groups of one size and page checksums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_ext.data.files.arrow import value_type
from torchrec_ext.data.files.sources import ParquetSource, PathLike
from torchrec_ext.data.preprocess.columns import missing_column, raw_type, widens
from torchrec_ext.data.preprocess.folders import disk_errors
from torchrec_ext.schema import DataError


def scan(
    paths: PathLike | Sequence[PathLike], only: Collection[str] | None = None
) -> tuple[ParquetSource, dict[str, pa.DataType]]:
    """Finds the files and reads their footers; returns the type of each column, too: hive partitions are strings.

    Args:
        paths: files, folders, patterns or remote addresses.
        only: names of the columns to check, of files that DuckDB reads by the first one's types; all of the first file
            by default, and integers may be wider in another.

    Raises:
        DataError: a path names nothing; a file is not parquet, is cut short, has other columns than the first, or one
            that is also a hive partition; or there is no row at all.
    """
    source = ParquetSource(paths)
    schema = {name: source.type_of(name) for name in source.columns}
    for number, file in enumerate(source.files):
        for name, dtype in schema.items():
            if only is not None and name not in only:
                continue
            other = source.type_of(name, number)
            kind, wider = raw_type(other), raw_type(dtype)
            ints = [value_type(each) for each in (other, dtype)]
            is_beyond = (
                only is not None
                and all(map(pa.types.is_integer, ints))
                and not np.can_cast(str(ints[0]), str(ints[1]))
            )
            # Of a column without a value pandas knows no type.
            if other not in (dtype, pa.null()) and (
                is_beyond or not (kind and wider and widens(kind, wider))
            ):
                raise DataError(
                    f"{file.name}: column '{name}' is {other}, in {source.files[0].name} it is {dtype}; give files "
                    "with the same types"
                )
    return source, schema | dict.fromkeys(source.files[0].partitions, pa.string())


def raw_types(
    where: str, schema: Mapping[str, pa.DataType], names: Collection[str]
) -> dict[str, str]:
    """Returns the raw types of some columns.

    Raises:
        DataError: a column is missing or has a type of which no feature can be made.
    """
    types = {}
    for name in names:
        if name not in schema:
            raise missing_column(where, name, schema.keys())
        for other in schema:
            if other != name and other.lower() == name.lower():
                raise DataError(
                    f"{where}: columns '{name}' and '{other}' differ in case alone, which DuckDB does not tell apart; "
                    "rename one where they are written"
                )
        kind = raw_type(schema[name])
        if kind is None:
            raise DataError(
                f"{where}: column '{name}' is {schema[name]}, must be bool, int64, float, string, "
                "timestamp or a list of these; convert it where it is written"
            )
        types[name] = kind
    return types


ROW_GROUP = 65_536
# 4 M rows.
FILE_ROWS = 64 * ROW_GROUP


def write_files(
    folder: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
) -> int:
    """Writes parquet files to an empty folder, with row groups of one size; returns the number of rows.

    Args:
        folder: the folder.
        schema: columns of the batches.
        batches: multiples of ``ROW_GROUP`` rows, and the rest at the end.
    """
    rows = 0
    writer: Any = None
    try:
        for batch in batches:
            with disk_errors(folder):
                if rows % FILE_ROWS == 0:
                    if writer:
                        writer.close()
                    path = folder / f"part-{rows // FILE_ROWS:05}.parquet"
                    writer = pq.ParquetWriter(path, schema, **_encoding(schema))
                writer.write_batch(batch, row_group_size=ROW_GROUP)
            rows += batch.num_rows
    finally:
        if writer:
            with disk_errors(folder):
                writer.close()
    return rows


def _encoding(schema: pa.Schema) -> dict[str, Any]:
    """Encodes ids as differences: smaller and faster, to write and read, than dictionaries of mostly distinct ids."""
    texts = []
    packed = {}
    for field in schema:
        name = field.name
        if pa.types.is_list(field.type):
            # Parquet's own name of the elements of a list.
            name = f"{name}.list.element"
        if pa.types.is_integer(value_type(field.type)):
            packed[name] = "DELTA_BINARY_PACKED"
        elif pa.types.is_string(field.type):
            texts.append(name)
    return {
        "write_page_checksum": True,
        "use_dictionary": texts,
        "column_encoding": packed or None,
        "compression": "snappy",
    }
