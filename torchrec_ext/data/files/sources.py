"""ParquetSource: parquet files of any total size as row groups that can be read one at a time, or in parts.

find_files(): paths, patterns, folders and remote addresses -> the data files that they name.

Found and opened by :mod:`pyarrow.fs`, which knows local disks, S3 (``s3://``), Google's store (``gs://``) and HDFS.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs

from torchrec_ext.data.columns import Chunk, Column, with_elements
from torchrec_ext.data.files.arrow import Kind, as_column, kind_of
from torchrec_ext.data.files.arrow import RowGroup as RowGroup
from torchrec_ext.schema import DataError
from torchrec_ext.schema.array_columns import element_of
from torchrec_ext.schema.validation import did_you_mean, listed

PathLike = str | os.PathLike[str]
ENDINGS = (".parquet", ".parq", ".pq")
# The value of a hive partition for rows without one.
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
# Such names are no data, but for example what a writer has not finished.
_HIDDEN = (".", "_")
_ARRAYS: tuple[Kind, ...] = ("floats", "ints")
# Number and bytes of the blocks of a sample.
_BLOCKS = 16
_BLOCK = 4_096
# Footers that are read at a time: each waits for the disk or the network.
_FOOTERS_AT_ONCE = 8
# Bytes of each column that are read at a time if a row group is read in parts. A remote
# request takes longer to answer.
_AHEAD = 1 << 16
_AHEAD_REMOTE = 1 << 20
# Values that are decoded at a time: of fewer, threads wait more for Python's lock; of more, the shuffle finds the first
# ones no more in the cache.
_AT_ONCE = 1 << 20
# Parsed footers that are held. A set of more files parses them anew for each row group
# rather than fill the memory.
_FOOTER_LIMIT = 64


@dataclass(frozen=True)
class DataFile:
    """A data file, local or remote.

    Args:
        name: path or address by which messages name the file.
        path: path of the file in its file system.
        partitions: values of the hive partitions (``day=3/``) that the file lies in.
        remote: file system of a remote file; None for a local one.
    """

    name: str
    path: str
    partitions: Mapping[str, str] = field(default_factory=dict)
    remote: fs.FileSystem | None = None

    def open(self) -> BinaryIO:
        """Opens the file for reading."""
        system = self.remote or fs.LocalFileSystem()
        return cast(BinaryIO, system.open_input_file(self.path))


def find_files(paths: PathLike | Sequence[PathLike]) -> list[DataFile]:
    """Finds the data files named by paths, sorted within each folder and pattern.

    Args:
        paths: local files, folders (read with all that lies below them), patterns, or addresses such as
            ``s3://bucket/clicks``. Only folders below a named folder, or from the first wildcard of a pattern on, are
            partitions.
            Names in a folder with a leading ``_`` or ``.`` are no data files. A warning counts the files that do not
            end in one of :data:`ENDINGS`, and names one.

    Raises:
        DataError: a path names nothing, or cannot be read.
    """
    path_list = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = []
    for path in path_list:
        address = os.fspath(path)
        try:
            files += _find(address)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{address}: cannot be read ({error}), and the rows there would be missing; check path, rights and "
                "network"
            ) from error
    if not files:
        raise DataError("no file was given; name at least one")
    return files


def _find(address: str) -> list[DataFile]:
    scheme, separator, path = address.rpartition("://")
    system, remote = fs.LocalFileSystem(), None
    base, matches = path, [path]
    if scheme not in ("", "file"):
        system, base = fs.FileSystem.from_uri(address)
        remote, matches = system, [base]
    elif glob.has_magic(path) and not os.path.exists(path):
        # A file may have brackets in its name.
        base = str(Path(*_before_wildcard(Path(path).parts)))
        matches = sorted(glob.glob(path, recursive=True))
    found = set()
    left_out = []
    for match in matches:
        info = system.get_file_info(match)
        if info.type == fs.FileType.NotFound:
            raise DataError(f"{address}: no such file; check the path")
        if info.is_file:
            found.add(info.path)
            continue
        below = system.get_file_info(fs.FileSelector(info.path, recursive=True))
        for each in below:
            inside = Path(each.path).relative_to(info.path).parts
            if each.is_file and not any(part.startswith(_HIDDEN) for part in inside):
                if each.path.endswith(ENDINGS):
                    found.add(each.path)
                else:
                    left_out.append(each.base_name)
    if left_out and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"{base}: files left out: {len(left_out):,}, such as {min(left_out)}; data files end in "
            f"{' or '.join(ENDINGS)}; write them so, or move them away",
            stacklevel=4,
        )
    if not found:
        rule = "no such file"
        if matches:
            rule = f"the folder has no file that ends in {' or '.join(ENDINGS)}"
        raise DataError(f"{address}: {rule}; check the path")
    files = []
    for where in sorted(found):
        place = where if remote else str(Path(where))
        partitions = {}
        for segment in Path(place).relative_to(base).parts[:-1]:
            key, equals, value = segment.partition("=")
            if equals:
                partitions[key] = unquote(value)
        name = f"{scheme}{separator}{place}"
        files.append(DataFile(name, place, partitions, remote))
    return files


def _before_wildcard(parts: Sequence[str]) -> Sequence[str]:
    magic = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    return parts[:magic]


class _Opening(NamedTuple):
    """A file's schema, its groups' numbers of rows, and a digest of its footer.

    ``footer`` is None in a set of very many files; ``written`` is the size and the last write of a local file.
    """

    schema: pa.Schema
    rows: list[int]
    evidence: bytes
    footer: pq.FileMetaData | None
    written: tuple[int, int] | None


class ParquetSource:
    """Rows of parquet files, read a row group at a time.

    Page checksums are verified if the files have them (write with ``write_page_checksum=True``: 0.06 % of size).

    Args:
        paths: files, folders, patterns, or addresses such as ``s3://bucket/clicks``, see :func:`find_files`. Hive
            partitions (``day=3/``) below a named folder, or from the first wildcard of a pattern on, are columns,
            integers if all their values are, of up to 18 digits.

    Raises:
        DataError: a path names nothing, a file is not parquet or cut short, or there are no rows.

    Example:
        >>> ParquetSource("clicks/part-0.parquet")
        Traceback (most recent call last):
        torchrec_ext.schema.validation.DataError: clicks/part-0.parquet: no such file; check the path
    """

    def __init__(self, paths: PathLike | Sequence[PathLike]) -> None:
        self.files = find_files(paths)
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            self._openings = list(pool.map(self._opening, self.files))
        groups = []
        for index, (file, opening) in enumerate(
            zip(self.files, self._openings, strict=True)
        ):
            for name, value in file.partitions.items():
                if name in opening.schema.names:
                    raise DataError(
                        f"{file.name}: column '{name}' is in the file and in its folder's name, {name}={value}; rename "
                        "the folder, or write the file without the column"
                    )
            for number, rows in enumerate(opening.rows):
                if rows:
                    name = f"{file.name}: row group {number}"
                    groups.append(
                        RowGroup(name=name, file=index, number=number, rows=rows)
                    )
        self._partitions = _partition_types(self.files)
        self.groups: Sequence[RowGroup] = tuple(groups)
        if not self.groups:
            raise DataError(
                f"{self.files[0].name}: zero rows, as in all {len(self.files)} files; write at least one"
            )

    def digest(self) -> str:
        """Returns a text, most likely different for other rows: of footers, and of blocks of local files."""
        digest = hashlib.sha256()
        for file, opening in zip(self.files, self._openings, strict=True):
            digest.update(opening.evidence)
            if file.remote is None:
                digest.update(_sample(file))
        return digest.hexdigest()[:16]

    @property
    def num_rows(self) -> int:
        """Number of rows of all files."""
        return sum(group.rows for group in self.groups)

    @cached_property
    def dataset(self) -> ds.Dataset:
        """All files for Arrow and DuckDB to scan; hive partitions are texts."""
        options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        texts = pa.schema([(name, pa.string()) for name in self._partitions])
        schemas = [*[opening.schema for opening in self._openings], texts]
        return ds.dataset(
            [file.path for file in self.files],
            # Integers may be wider in another file than in the first.
            schema=pa.unify_schemas(schemas, promote_options="permissive"),
            format=ds.ParquetFileFormat(default_fragment_scan_options=options),
            filesystem=self.files[0].remote,
            partitioning=ds.partitioning(texts, flavor="hive"),
        )

    def _opening(self, file: DataFile) -> _Opening:
        with _open(file) as opened:
            metadata = opened.metadata
        stream = pa.BufferOutputStream()
        metadata.write_metadata_file(stream)
        groups = range(metadata.num_row_groups)
        return _Opening(
            metadata.schema.to_arrow_schema(),
            [metadata.row_group(number).num_rows for number in groups],
            hashlib.sha256(stream.getvalue()).digest(),
            metadata if len(self.files) <= _FOOTER_LIMIT else None,
            _written(file),
        )

    @property
    def columns(self) -> list[str]:
        """Names of the first file's columns, without hive partitions."""
        return list(self._openings[0].schema.names)

    def type_of(self, name: str, file: int = 0) -> pa.DataType:
        """Returns the type of a column in one of the files.

        Raises:
            DataError: the file has no such column.
        """
        if name in self._partitions:
            return self._partitions[name]
        schema = self._openings[file].schema
        if name in schema.names:
            return schema.field(name).type
        hint = did_you_mean(name, schema.names, "rename the column, or write it")
        raise DataError(
            f"{self.files[file].name}: column '{name}' is missing, the file has {listed(schema.names)}; {hint}"
        )

    def require(self, columns: Mapping[str, Sequence[Kind]]) -> dict[str, Kind]:
        """Returns the kinds of the columns.

        Raises:
            DataError: a file lacks a column, or has another kind of it than the first file.
        """
        return {name: self._require(name, kinds) for name, kinds in columns.items()}

    def _require(self, name: str, kinds: Sequence[Kind]) -> Kind:
        if self._column(name) != name:
            self._require(self._column(name), _ARRAYS)
            return "float"
        types = [self.type_of(name, index) for index in range(len(self.files))]
        kind = kind_of(types[0])
        if kind is None or kind not in kinds:
            raise DataError(
                f"{self.files[0].name}: column '{name}' is {types[0]}, must be {' or '.join(kinds)}; convert it where "
                "it is written"
            )
        for file, dtype in zip(self.files, types, strict=True):
            # Whole numbers of any width are read as int64, and fractions as float32.
            if kind_of(dtype) != kind:
                raise DataError(
                    f"{file.name}: column '{name}' is {dtype}, in {self.files[0].name} it is {types[0]}; give files "
                    "with the same types"
                )
        return kind

    def _column(self, name: str) -> str:
        """Returns the file's column for ``name``: an array column for its elements."""
        element = element_of(name)
        # A column may have the name of an element, since parquet allows any.
        if element is None or name in self._partitions or name in self.columns:
            return name
        return element.column

    def read(self, group: RowGroup, names: Sequence[str]) -> Chunk:
        """Reads and checks the columns ``names`` of one group; views of Arrow's memory if the layout allows.

        Raises:
            DataError: the file is gone or damaged, or a value is null; the message names file, row group, column, row.
        """
        return Chunk(dict(self.columns_of(group, names)))

    def columns_of(
        self, group: RowGroup, names: Sequence[str]
    ) -> Iterator[tuple[str, Column]]:
        """Yields what :meth:`read` returns, a few columns at a time: whoever goes on with them finds them in the cache.

        The order is that of ``names``, with the elements of an array column side by side, for groups of any size.

        Raises:
            DataError: see :meth:`read`.
        """
        file = self.files[group.file]
        stored = list(dict.fromkeys(map(self._column, names)))
        # Of a remote file all at once, since each call is a request.
        size = len(stored) if file.remote else max(1, _AT_ONCE // group.rows)
        for start in range(0, len(stored), size):
            some = set(stored[start : start + size])
            of_some = [name for name in names if self._column(name) in some]
            table = self.table(group, self._stored(of_some))
            yield from self._chunk(group, of_some, table).items()

    def table(self, group: RowGroup, names: Sequence[str]) -> pa.Table:
        """Reads the columns ``names`` of one group as they stand, with their nulls.

        Raises:
            DataError: the file is gone or damaged; the message names file, row group and column.
        """
        if not names:
            return pa.table({})
        with self._reading(group) as file:
            return file.read_row_group(
                group.number, columns=list(names), use_threads=False
            )

    def parts(
        self, group: RowGroup, names: Sequence[str], start: int, size: int
    ) -> Iterator[Chunk]:
        """Reads a group from row ``start`` on in parts ending at multiples of ``size``, never all of it at once.

        Raises:
            DataError: see :meth:`read`.
        """
        stored = self._stored(names)
        tables = self._parts(group, stored, start, size)
        for first in [start, *range((start // size + 1) * size, group.rows, size)]:
            rows = min((first // size + 1) * size, group.rows) - first
            part = dataclasses.replace(group, first=first, rows=rows)
            # Without a name, which would keep the chunk alive in this frame, one for
            # each lane.
            yield self._chunk(part, names, next(tables) if stored else pa.table({}))

    def _parts(
        self, group: RowGroup, names: list[str], start: int, size: int
    ) -> Iterator[pa.RecordBatch]:
        with self._reading(group, in_parts=True) as file:
            # pyarrow cannot skip pages, so what lies before is decoded for nothing.
            for number, batch in enumerate(
                file.iter_batches(
                    size, row_groups=[group.number], columns=names, use_threads=False
                )
            ):
                if number * size + len(batch) > start:
                    yield batch.slice(max(start - number * size, 0))

    @contextmanager
    def _reading(
        self, group: RowGroup, *, in_parts: bool = False
    ) -> Iterator[pq.ParquetFile]:
        """Opens the file of a group; names the group where reading fails, or other rows would be read."""
        file, opening = self.files[group.file], self._openings[group.file]
        try:
            if _written(file) != opening.written:
                raise DataError(
                    f"{file.name}: was written to after it was opened; its rows may be others: begin anew"
                )
            with _open(file, opening.footer, in_parts=in_parts) as opened:
                yield opened
        except DataError:
            raise
        # Of Arrow, the disk or the network.
        except Exception as error:
            raise DataError(
                f"{group.name} cannot be read: the file is damaged, cut or gone; copy or write it again "
                f"({str(error).splitlines()[0][:60]})"
            ) from error

    def _stored(self, names: Sequence[str]) -> list[str]:
        stored = [self._column(name) for name in names if name not in self._partitions]
        return list(dict.fromkeys(stored))

    def _chunk(
        self, part: RowGroup, names: Sequence[str], table: pa.Table | pa.RecordBatch
    ) -> Chunk:
        columns = {}
        for name in self._stored(names):
            columns[name] = as_column(part, name, table.column(name))
        for name, kind in self._partitions.items():
            if name in names:
                text = self.files[part.file].partitions[name]
                value = None if text == NULL_PARTITION else text
                texts = pa.repeat(pa.scalar(value, pa.string()), part.rows)
                array = texts.cast(kind)
                columns[name] = as_column(part, name, array)
        chunk = with_elements(Chunk(columns), names, part.name, part.first)
        # Parts of a block are joined column by column, so their order may not depend on how many columns are read at a
        # time, nor on which of them are partitions.
        places = list(dict.fromkeys(map(self._column, names)))
        ordered = sorted(names, key=lambda name: places.index(self._column(name)))
        return Chunk({name: chunk[name] for name in ordered})


def _written(file: DataFile) -> tuple[int, int] | None:
    """Returns size and last write of a local file."""
    if file.remote:
        return None
    status = os.stat(file.path)
    return status.st_size, status.st_mtime_ns


def _open(
    file: DataFile, footer: pq.FileMetaData | None = None, *, in_parts: bool = False
) -> pq.ParquetFile:
    # 0 reads all bytes of a column at once.
    buffer_size = 0
    if in_parts:
        buffer_size = _AHEAD_REMOTE if file.remote else _AHEAD
    try:
        return pq.ParquetFile(
            file.open() if file.remote else file.path,
            metadata=footer,
            page_checksum_verification=True,
            # Fewer and larger requests.
            pre_buffer=file.remote is not None and not in_parts,
            buffer_size=buffer_size,
        )
    except Exception as error:
        why = str(error).splitlines()[0][:90]
        raise DataError(
            f"{file.name}: cannot be read as parquet ({why}); copy or write it again, or check path, rights and network"
        ) from error


def _sample(file: DataFile) -> bytes:
    """Returns blocks from all over a file; another file most likely differs in them."""
    with file.open() as stream:
        size = stream.seek(0, 2)
        blocks = []
        for number in range(_BLOCKS):
            # The first block is at the start of the file, and the last one at its end.
            stream.seek(max(0, size - _BLOCK) * number // (_BLOCKS - 1))
            blocks.append(stream.read(_BLOCK))
    return b"".join(blocks)


def _partition_types(files: Sequence[DataFile]) -> dict[str, pa.DataType]:
    for file in files:
        if file.partitions.keys() != files[0].partitions.keys():
            raise DataError(
                f"{file.name}: has the hive partitions {listed(sorted(file.partitions))}, {files[0].name} has "
                f"{listed(sorted(files[0].partitions))}; give files of one layout"
            )
    types = {}
    for name in files[0].partitions:
        texts = {file.partitions[name] for file in files} - {NULL_PARTITION}
        are_whole = all(re.fullmatch(r"-?[0-9]{1,18}", text) for text in texts)
        types[name] = pa.int64() if are_whole else pa.string()
    return types
