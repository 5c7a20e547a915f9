"""Paths, globs, folders and remote addresses -> the data files that they name, with the values of hive partitions."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from torchrec_ext.schema import DataError

PathLike = str | os.PathLike[str]
_HIDDEN = (".", "_")  # in front of what is no data, such as what a writer has not finished


@dataclass(frozen=True)
class DataFile:
    """A data file, local or remote.

    Args:
        name: path or address by which messages name the file.
        path: path of the file in its file system.
        partitions: values of the hive partitions (``day=3/``) that the file lies in.
        remote: fsspec file system; None for a local file.
        stamp: size and time of the last change when the file was found.
    """

    name: str
    path: str
    partitions: Mapping[str, str] = field(default_factory=dict)
    remote: Any = None
    stamp: tuple[int, int] = (0, 0)

    def open(self) -> BinaryIO:
        """Opens the remote file for reading, through fsspec."""
        stream: BinaryIO = self.remote.open(self.path, "rb")
        return stream

    def check_unchanged(self) -> None:
        """Refuses a file that changed: a reader's offsets would be wrong, and a cut mapping kills the process.

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


def find_files(paths: PathLike | Sequence[PathLike], endings: Sequence[str]) -> list[DataFile]:
    """Finds the data files that paths name, sorted within each folder and pattern.

    Args:
        paths: local files, folders (read with all that lies below them), patterns, or addresses such as
            ``s3://bucket/day=*/``.
        endings: endings of data files in a folder; a file whose name begins with ``_`` or ``.`` is none.

    Raises:
        DataError: a path names nothing, or cannot be read.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = [
        file for path in given for file in (_remote if "://" in os.fspath(path) else _local)(os.fspath(path), endings)
    ]
    if not files:
        raise DataError("no file was given; name at least one")
    return files


def _local(path: str, endings: Sequence[str]) -> list[DataFile]:
    try:
        names = sorted({name for match in _matches(path) for name in _below(match, endings)})
        files = [DataFile(name, name, _partitions(name), None, _stamp(name)) for name in names]
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: cannot be read ({error.strerror or error}), and the rows there would be "
            "missing; give this user the right to read it, or name the files to read"
        ) from error
    if not files:
        rule = f"the folder has no file that ends in {' or '.join(endings)}" if os.path.isdir(path) else "no such file"
        raise DataError(f"{path}: {rule}; check the path")
    return files


def _matches(path: str) -> list[str]:
    """Returns the paths that match; looks first for folders that may not be listed, which a glob silently skips."""
    if not glob.has_magic(path) or os.path.isfile(path):
        return [path]
    segments = Path(path).parts
    first = next(index for index, segment in enumerate(segments) if glob.has_magic(segment))
    for index, segment in enumerate(segments[first:], start=first):
        inside = (segment, "") if segment == "**" else ("",)
        for folder in glob.glob(os.path.join(".", *segments[:index], *inside), recursive=True):
            if glob.has_magic(segment):
                os.scandir(folder).close()
            else:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.stat(os.path.join(folder, segment))
    return glob.glob(path, recursive=True)


def _below(path: str, endings: Sequence[str]) -> list[str]:
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        return []
    files = []
    for folder, inside, names in os.walk(path, onerror=_raise):
        inside[:] = [name for name in inside if not name.startswith(_HIDDEN)]
        files += [str(Path(folder, name)) for name in names if _is_data(name, endings)]
    return [file for file in files if Path(file).is_file()]


def _raise(error: OSError) -> None:
    raise error


def _remote(path: str, endings: Sequence[str]) -> list[DataFile]:
    try:
        import fsspec.implementations.local  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise DataError(f"{path}: addresses need fsspec; pip install 'torchrec-ext[data]'") from error
    try:
        system, inner = fsspec.core.url_to_fs(path)
        if isinstance(system, fsspec.implementations.local.LocalFileSystem):
            return [
                replace(file, name=system.unstrip_protocol(file.path), remote=system) for file in _local(inner, endings)
            ]
        matches = system.glob(inner) if glob.has_magic(inner) else [inner]
        names = sorted({name for match in matches for name in _below_remote(system, match, endings)})
    except DataError:
        raise
    except Exception as error:  # each file system has its own: no such bucket, no right, no network, no driver
        raise DataError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); check address, rights and network"
        ) from error
    if not names:
        raise DataError(f"{path}: no file that ends in {' or '.join(endings)}; check the address")
    return [DataFile(system.unstrip_protocol(name), name, _partitions(name), system) for name in names]


def _below_remote(system: Any, path: str, endings: Sequence[str]) -> list[str]:
    if system.isfile(path):
        return [path]
    root = path.rstrip("/")
    return [name for name in _listed(system, root) if _is_data(name.removeprefix(root).lstrip("/"), endings)]


def _listed(system: Any, root: str) -> Iterator[str]:
    """Yields all files below ``root``; fsspec's own walk would silently skip folders that may not be listed."""
    from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped, import-not-found, unused-ignore]

    find = getattr(type(system), "_find", type(system).find)
    if find not in (AbstractFileSystem.find, AsyncFileSystem._find):
        yield from system.find(root)
        return
    for entry in system.ls(root, detail=True) if system.isdir(root) else ():
        if entry["type"] == "directory":
            yield from _listed(system, entry["name"])
        else:
            yield entry["name"]


def _is_data(relative: str, endings: Sequence[str]) -> bool:
    hidden = any(segment.startswith(_HIDDEN) for segment in relative.split("/"))
    return relative.endswith(tuple(endings)) and not hidden


def _partitions(name: str) -> dict[str, str]:
    pairs = [segment.split("=", 1) for segment in name.split("/")[:-1] if "=" in segment]
    return {key: unquote(value) for key, value in pairs}


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
