"""Paths, globs, folders and remote addresses -> the data files that they name, with the values of hive partitions.

Listed by :mod:`pyarrow.fs`, which knows local disks, S3 (``s3://``), Google's store (``gs://``) and HDFS.
"""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from torchrec_ext.schema import DataError

PathLike = str | os.PathLike[str]
# The value of a hive partition for rows without one.
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
# Number and bytes of the blocks of a sample.
_BLOCKS = 16
_BLOCK = 4_096
# Such names are no data, but for example what a writer has not finished.
_HIDDEN = (".", "_")


@dataclass(frozen=True)
class DataFile:
    """A data file, local or remote.

    Args:
        name: path or address by which messages name the file.
        path: path of the file in its file system.
        partitions: values of the hive partitions (``day=3/``) that the file lies in.
        remote: file system of a remote file; None for a local one.
        stamp: size and time of the last change when the file was found.
    """

    name: str
    path: str
    partitions: Mapping[str, str] = field(default_factory=dict)
    remote: fs.FileSystem | None = None
    stamp: tuple[int, int] = (0, 0)

    def open(self) -> BinaryIO:
        """Opens the file for reading."""
        system = self.remote or fs.LocalFileSystem()
        return cast(BinaryIO, system.open_input_file(self.path))

    def sample(self) -> bytes:
        """Returns the size and blocks from all over a local file; another file most likely differs in them."""
        if self.remote is not None:
            return b""
        size = self.stamp[0]
        blocks = [str(size).encode()]
        with open(self.path, "rb") as stream:
            for number in range(_BLOCKS):
                # The first block is at the start of the file, and the last one at its
                # end.
                stream.seek(max(0, size - _BLOCK) * number // (_BLOCKS - 1))
                blocks.append(stream.read(_BLOCK))
        return b"".join(blocks)

    def check_unchanged(self) -> None:
        """Refuses a changed file: a reader's offsets would be wrong, and a cut mapping kills the process.

        Raises:
            DataError: the file is gone, or is not the one that was found.
        """
        if self.remote is not None:
            return
        try:
            now = _stamp(self.path)
        except OSError as error:
            raise DataError(
                f"{self.name}: the file vanished while it was in use ({error}); put it back, or start anew"
            ) from error
        if now != self.stamp:
            raise DataError(
                f"{self.name}: the file changed while it was in use, {self.stamp[0]} bytes became {now[0]}; start "
                "anew, and write new data to new files"
            )


def find_files(
    paths: PathLike | Sequence[PathLike], endings: Sequence[str]
) -> list[DataFile]:
    """Finds the data files named by paths, sorted within each folder and pattern.

    Args:
        paths: local files, folders (read with all that lies below them, also behind links), patterns, or addresses
            such as ``s3://bucket/day=*/``. Only folders below a named folder, or from the first wildcard of a pattern
            on, are partitions.
        endings: endings of data files in a folder; names with a leading ``_`` or ``.`` are no data files. A warning
            counts the files with other endings, and names one.

    Raises:
        DataError: a path names nothing, or cannot be read; two paths below a folder lead to one file.
    """
    path_list = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = []
    for path in path_list:
        files += _find(os.fspath(path), endings)
    if not files:
        raise DataError("no file was given; name at least one")
    return files


def check_partitions(file: DataFile, columns: Collection[str]) -> None:
    """Refuses a file with a column named like a hive partition: the two need not agree.

    Args:
        file: a file.
        columns: names of its columns.

    Raises:
        DataError: such a column, by name.
    """
    for name, value in file.partitions.items():
        if name in columns:
            raise DataError(
                f"{file.name}: column '{name}' is in the file and in its folder's name, {name}={value}; rename the "
                "folder, or write the file without the column"
            )


def _find(address: str, endings: Sequence[str]) -> list[DataFile]:
    scheme, separator, path = address.rpartition("://")
    base, pattern = _before_wildcard(path)
    remote = None
    try:
        if scheme not in ("", "file"):
            remote, base = fs.FileSystem.from_uri(f"{scheme}://{base}")
        system = remote or fs.LocalFileSystem()
        # A file may have brackets in its name.
        if pattern and system.get_file_info(path).is_file:
            base, pattern = path, ()
        info = system.get_file_info(base)
        if info.type == fs.FileType.NotFound:
            raise DataError(f"{address}: no such file; check the path")
        found = [info]
        if not info.is_file:
            found = sorted(
                _below(system, base, pattern, endings), key=lambda info: info.path
            )
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{address}: cannot be read ({error}), and the rows there would be missing; check path, rights and network"
        ) from error
    if not found:
        rule = f"the folder has no file that ends in {' or '.join(endings)}"
        raise DataError(f"{address}: {rule}; check the path")
    files = []
    for each in found:
        place = each.path if remote else str(Path(each.path))
        files.append(
            DataFile(
                name=f"{scheme}{separator}{place}",
                path=place,
                partitions=_partitions(Path(place).relative_to(base)),
                remote=remote,
                stamp=(0, 0) if remote else _stamp(place),
            )
        )
    if remote is None:
        _check_twins([file.path for file in files])
    return files


def _before_wildcard(path: str) -> tuple[str, Sequence[str]]:
    """Returns the part of a path before its first wildcard, and the segments from there on."""
    parts = Path(path).parts
    for index, part in enumerate(parts):
        if glob.has_magic(part):
            return str(Path(*parts[:index])), parts[index:]
    return str(Path(path)), ()


def _below(
    system: fs.FileSystem, base: str, pattern: Sequence[str], endings: Sequence[str]
) -> Iterator[fs.FileInfo]:
    """Yields the files of a folder: those that a pattern names, and the data files below the folders that it names."""
    left_out = []
    for info in system.get_file_info(fs.FileSelector(base, recursive=True)):
        inside = Path(info.path).relative_to(base).parts
        if info.type == fs.FileType.Directory or any(
            part.startswith(_HIDDEN) for part in inside
        ):
            continue
        if pattern and _is_match(pattern, inside):
            yield info
        elif any(_is_match(pattern, inside[:depth]) for depth in range(len(inside))):
            if info.path.endswith(tuple(endings)):
                yield info
            else:
                left_out.append(info.base_name)
    if left_out and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"{base}: files left out: {len(left_out):,}, such as {min(left_out)}; data files end in "
            f"{' or '.join(endings)}; write them so, or move them away",
            stacklevel=2,
        )


def _is_match(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Says whether a pattern names a path.

    Example:
        >>> _is_match(["**", "day=*"], ["log", "day=3"]), _is_match(["*"], ["log", "day=3"])
        (True, False)
    """
    if not pattern:
        return not parts
    # ** stands for the folder itself and for all below it.
    if pattern[0] == "**":
        return any(
            _is_match(pattern[1:], parts[depth:]) for depth in range(len(parts) + 1)
        )
    return (
        bool(parts)
        and fnmatchcase(parts[0], pattern[0])
        and _is_match(pattern[1:], parts[1:])
    )


def _check_twins(names: Sequence[str]) -> None:
    """Refuses a file found twice, such as through a link ``latest`` to one of the folders next to it."""
    first_names: dict[str, str] = {}
    for name in names:
        other = first_names.setdefault(os.path.realpath(name), name)
        if other != name:
            raise DataError(
                f"{name}: the same file as {other}, so its rows would count twice; remove the link"
            )


def _partitions(inside: Path) -> dict[str, str]:
    """Returns the hive partitions of a file by its path below a folder."""
    partitions = {}
    for segment in inside.parts[:-1]:
        key, equals, value = segment.partition("=")
        if equals:
            partitions[key] = unquote(value)
    return partitions


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
