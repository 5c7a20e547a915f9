"""Paths, globs, folders and remote addresses -> the data files that they name, with the values of hive partitions."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from torchrec_ext.schema import DataError

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class DataFile:
    """One file.

    Args:
        name: the path or address by which messages call it.
        path: what its file system calls it.
        partitions: the values of the hive partitions (``day=3/``) that it lies in.
        remote: the fsspec file system; None for a local file.
        stamp: size and time of the last change when it was found.
    """

    name: str
    path: str
    partitions: Mapping[str, str] = field(default_factory=dict)
    remote: Any = None
    stamp: tuple[int, int] = (0, 0)

    def open(self) -> BinaryIO:
        """The remote file for reading, through fsspec."""
        stream: BinaryIO = self.remote.open(self.path, "rb")
        return stream

    def check_unchanged(self) -> None:
        """A reader holds the places of the row groups: in another file they would be wrong, and a cut mapping kills the process.

        Raises:
            DataError: the file is gone, or is not the one that was found.
        """
        if self.remote is not None:
            return
        try:
            now = _stamp(self.path)
        except OSError as error:
            raise DataError(f"{self.name}: the file vanished while it was in use ({error}); put it back, or start anew") from error
        if now != self.stamp:
            raise DataError(
                f"{self.name}: the file changed while it was in use, {self.stamp[0]} bytes became {now[0]}; "
                "start anew, and write new data to new files"
            )


def find_files(paths: PathLike | Sequence[PathLike], endings: Sequence[str]) -> list[DataFile]:
    """The files, sorted within each folder and pattern.

    Args:
        paths: local files, folders (read with all that lie below them), patterns, or addresses such as ``s3://bucket/day=*/``.
        endings: which files of a folder are data; ``_`` and ``.`` in front of a name mean that a file is not.

    Raises:
        DataError: a path names nothing, or cannot be read.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found = [file for path in given for file in (_remote if "://" in os.fspath(path) else _local)(os.fspath(path), endings)]
    if not found:
        raise DataError("no file was given; name at least one")
    return found


def _local(path: str, endings: Sequence[str]) -> list[DataFile]:
    if os.path.isfile(path):
        names = [path]
    elif glob.has_magic(path):
        names = sorted(name for match in glob.glob(path, recursive=True) for name in _below(match, endings))
    else:
        names = _below(path, endings)
    if not names:
        rule = f"the folder has no file that ends in {' or '.join(endings)}" if os.path.isdir(path) else "no such file"
        raise DataError(f"{path}: {rule}; check the path")
    return [DataFile(name, name, _partitions(name), None, _stamp(name)) for name in names]


def _below(path: str, endings: Sequence[str]) -> list[str]:
    if os.path.isfile(path):
        return [path]
    return sorted(str(file) for file in Path(path).rglob("*") if file.is_file() and _is_data(str(file.relative_to(path)), endings))


def _remote(path: str, endings: Sequence[str]) -> list[DataFile]:
    try:
        import fsspec  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise DataError(f"{path}: addresses need fsspec; pip install 'torchrec-ext[data]'") from error
    try:
        system, inner = fsspec.core.url_to_fs(path)
        matches = sorted(system.glob(inner)) if glob.has_magic(inner) else [inner]
        names = [name for match in matches for name in _below_remote(system, match, endings)]
    except Exception as error:  # each file system has its own: no such bucket, no right, no network, no driver
        raise DataError(f"{path}: cannot be read ({type(error).__name__}: {error}); check address, rights and network") from error
    if not names:
        raise DataError(f"{path}: no file that ends in {' or '.join(endings)}; check the address")
    return [DataFile(system.unstrip_protocol(name), name, _partitions(name), system) for name in names]


def _below_remote(system: Any, path: str, endings: Sequence[str]) -> list[str]:
    if system.isfile(path):
        return [path]
    root = path.rstrip("/")
    return sorted(name for name in system.find(root) if _is_data(name.removeprefix(root).lstrip("/"), endings))


def _is_data(relative: str, endings: Sequence[str]) -> bool:
    hidden = any(part.startswith((".", "_")) for part in relative.split("/"))
    return relative.endswith(tuple(endings)) and not hidden


def _partitions(name: str) -> dict[str, str]:
    parts = [part.split("=", 1) for part in name.split("/")[:-1] if "=" in part]
    return {key: unquote(value) for key, value in parts}


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
