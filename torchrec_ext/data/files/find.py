"""Paths, globs, folders and remote addresses -> the data files that they name, with the values of hive partitions."""

from __future__ import annotations

import contextlib
import glob
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

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
        DataError: a path names nothing, or cannot be read; a link leads nowhere, back to a folder above it, or to
            a file that another path leads to as well.
    """
    path_list = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = []
    for path in path_list:
        text = os.fspath(path)
        find = _remote if "://" in text else _local
        files += find(text, endings)
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


def _local(path: str, endings: Sequence[str]) -> list[DataFile]:
    try:
        # A set, because patterns such as ** match a file both by itself and below its
        # folder.
        unique_names: set[str] = set()
        for match in _matches(path):
            unique_names.update(_below(match, endings))
        names = sorted(unique_names)
        _check_twins(names)
        files = [
            DataFile(name, name, _partitions(path, name), None, _stamp(name))
            for name in names
        ]
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: cannot be read ({error.strerror or error}), and the rows there would be "
            "missing; give this user the right to read it, or name the files to read"
        ) from error
    if not files:
        rule = "no such file"
        if os.path.isdir(path):
            rule = f"the folder has no file that ends in {' or '.join(endings)}"
        raise DataError(f"{path}: {rule}; check the path")
    return files


def _matches(path: str) -> list[str]:
    """Returns the matching paths; fails on unreadable folders and bad links, which a glob skips silently."""
    if not glob.has_magic(path) or os.path.isfile(path):
        return [path]
    segments = Path(path).parts
    first = _first_wildcard(segments)
    for index, segment in enumerate(segments[first:], start=first):
        # ** stands for the folder itself and for all below it.
        inside = (segment, "") if segment == "**" else ("",)
        for folder in glob.glob(
            os.path.join(".", *segments[:index], *inside), recursive=True
        ):
            if glob.has_magic(segment):
                # Raises if the folder may not be listed; a glob would find nothing
                # there.
                os.scandir(folder).close()
            else:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.stat(os.path.join(folder, segment))
        for match in glob.glob(os.path.join(*segments[: index + 1]), recursive=True):
            _check_link(Path(match))
    return glob.glob(path, recursive=True)


def _first_wildcard(segments: Sequence[str]) -> int:
    """Returns the index of the first segment of a path that is a pattern; their number if none is."""
    for index, segment in enumerate(segments):
        if glob.has_magic(segment):
            return index
    return len(segments)


def _below(path: str, endings: Sequence[str]) -> list[str]:
    _check_link(Path(path))
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        return []
    files: list[str] = []
    left_out: list[str] = []
    # Without onerror, os.walk would leave out folders that it may not list.
    for folder, inside, names in os.walk(path, onerror=_raise, followlinks=True):
        # In place, so that os.walk does not enter hidden folders.
        inside[:] = [name for name in inside if not name.startswith(_HIDDEN)]
        for name in [*inside, *names]:
            path_inside = Path(folder, name)
            if not name.startswith(_HIDDEN):
                _check_link(path_inside)
            # Pipes and sockets are no files.
            if name.startswith(_HIDDEN) or not path_inside.is_file():
                continue
            found = files if name.endswith(tuple(endings)) else left_out
            found.append(str(path_inside))
    _warn_of(path, left_out, endings)
    return files


def _warn_of(path: str, left_out: Sequence[str], endings: Sequence[str]) -> None:
    """Warns of files with other endings in a folder, on the run's first rank."""
    if left_out and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"{path}: files left out: {len(left_out):,}, such as {os.path.basename(min(left_out))}; data files end in "
            f"{' or '.join(endings)}; write them so, or move them away",
            stacklevel=2,
        )


def _check_link(path: Path) -> None:
    """Refuses a link to nothing (its rows would be missing), and to a folder above it (it has no end)."""
    if not path.is_symlink():
        return
    if not path.exists():
        raise DataError(
            f"{path}: a link to {os.readlink(path)}, which is not there, so its rows would be missing; put it back, or "
            "remove the link"
        )
    for above in path.parents:
        if path.samefile(above):
            raise DataError(
                f"{path}: a link to {above}, a folder above it, which would be read again; remove the link"
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


def _raise(error: OSError) -> None:
    raise error


def _remote(path: str, endings: Sequence[str]) -> list[DataFile]:
    try:
        import fsspec.implementations.local  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise DataError(
            f"{path}: addresses need fsspec; pip install 'torchrec-ext[data]'"
        ) from error
    try:
        system, inner = fsspec.core.url_to_fs(path)
        if isinstance(system, fsspec.implementations.local.LocalFileSystem):
            # A file:// address gets the checks of local files.
            files = []
            for file in _local(inner, endings):
                files.append(
                    replace(
                        file, name=system.unstrip_protocol(file.path), remote=system
                    )
                )
            return files
        unique_names: set[str] = set()
        for match in system.glob(inner) if glob.has_magic(inner) else [inner]:
            unique_names.update(_below_remote(system, match, endings))
    except DataError:
        raise
    # Each file system has errors of its own: no such bucket, no right, no network, no
    # driver.
    except Exception as error:
        raise DataError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); check address, rights and network"
        ) from error
    if not unique_names:
        raise DataError(
            f"{path}: no file that ends in {' or '.join(endings)}; check the address"
        )
    names = sorted(unique_names)
    return [
        DataFile(system.unstrip_protocol(name), name, _partitions(inner, name), system)
        for name in names
    ]


def _below_remote(system: Any, path: str, endings: Sequence[str]) -> list[str]:
    if system.isfile(path):
        return [path]
    root = path.rstrip("/")
    files: list[str] = []
    left_out: list[str] = []
    for name in _listed(system, root):
        if _is_hidden(name.removeprefix(root).lstrip("/")):
            continue
        found = files if name.endswith(tuple(endings)) else left_out
        found.append(name)
    _warn_of(path, left_out, endings)
    return files


def _listed(system: Any, root: str) -> Iterator[str]:
    """Yields all files below ``root``; fsspec's own walk would silently skip forbidden folders."""
    from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped, import-not-found, unused-ignore]

    # A listing of its own, such as an object store's by prefix, is no such walk.
    find = getattr(type(system), "_find", type(system).find)
    if find not in (AbstractFileSystem.find, AsyncFileSystem._find):
        yield from system.find(root)
        return
    if not system.isdir(root):
        return
    for entry in system.ls(root, detail=True):
        if entry["type"] == "directory":
            yield from _listed(system, entry["name"])
        else:
            yield entry["name"]


def _is_hidden(relative: str) -> bool:
    return any(segment.startswith(_HIDDEN) for segment in relative.split("/"))


def _partitions(path: str, name: str) -> dict[str, str]:
    """Returns the hive partitions of a file below ``path``; folders above a named folder do not count."""
    partitions = {}
    for segment in Path(name).parts[_first_wildcard(Path(path).parts) : -1]:
        key, equals, value = segment.partition("=")
        if equals:
            partitions[key] = unquote(value)
    return partitions


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
