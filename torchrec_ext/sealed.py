"""Folders that are complete or absent, each file under a SHA-256: checkpoint, bundle, store, preprocessor. No torch.

Written files survive a power failure. One process writes at a time. Only plain files
are read, because a pipe or a device need not end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

# Bytes that are read and hashed at a time.
_BLOCK = 2**22


def package_versions() -> dict[str, str]:
    """Returns the versions for a run's and a bundle's record; a clone on PYTHONPATH has none of its own."""
    # Costs 40 ms, so it is imported only when needed.
    from importlib import metadata

    versions = {}
    for name in ("torchrec-ext", "torch", "torchrec"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def yield_to_others() -> None:
    """Lowers the priority of this thread, which reads or writes a folder beside more urgent work.

    Only Linux has priorities by thread; elsewhere it does nothing.

    Example:
        >>> thread = threading.Thread(target=yield_to_others)
        >>> thread.start()
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def sync_to_disk(path: str | os.PathLike[str]) -> None:
    """Waits until the disk holds a file, or the names in a folder: syncing a file does not cover its name.

    Example:
        >>> sync_to_disk(".")
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Waits until the disk holds a folder with every file and folder below it."""
    for path in [*folder.rglob("*"), folder]:
        sync_to_disk(path)


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a small file atomically: after a crash it is complete, or as before.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_whole(f"{folder}/a", b"1")
        ...     Path(folder, "a").read_bytes()
        b'1'
    """
    new = f"{os.fspath(path)}.new"
    with open(new, "wb") as stream:
        stream.write(content)
        stream.flush()
        # Before the rename: else a power failure could leave the new name with an empty
        # file.
        os.fsync(stream.fileno())
    os.replace(new, path)
    sync_to_disk(os.path.dirname(os.path.abspath(path)))


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a plain file or a link to one for reading: no pipe, which would block, and no device, which need not end.

    Raises:
        OSError: it is missing, or not a plain file.
    """
    # O_NONBLOCK, because opening a pipe would otherwise wait for a writer.
    stream = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115  (the caller closes it)
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise OSError(errno.EINVAL, "it is not a plain file", os.fspath(path))


def read_plain(path: str | os.PathLike[str], most: int) -> bytes:
    """Returns the content of a plain file of at most ``most`` bytes.

    Raises:
        OSError: see :func:`open_plain`; or the file is larger.
    """
    with open_plain(path) as stream:
        # One byte more shows that the file is too large, even if it grew after its size
        # was read.
        data = stream.read(most + 1)
        if len(data) > most:
            size = os.fstat(stream.fileno()).st_size
            raise OSError(
                errno.EFBIG,
                f"it has {size:,} bytes, at most {most:,} are read",
                os.fspath(path),
            )
    return data


def measure_stream(stream: BinaryIO) -> dict[str, Any]:
    """Returns size and SHA-256 of a stream read to its end, as manifests list them.

    Example:
        >>> import io
        >>> measure_stream(io.BytesIO(b"")) == {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
        True
    """
    sha = hashlib.sha256()
    size = 0
    while block := stream.read(_BLOCK):
        sha.update(block)
        size += len(block)
    return {"bytes": size, "sha256": sha.hexdigest()}


class MeasuredStream:
    """Measures size and SHA-256 of a file while it is written, without reading it again; all else is the stream's.

    Args:
        stream: stream that is open for writing, at its beginning.

    Example:
        >>> import io
        >>> stream = MeasuredStream(io.BytesIO())
        >>> stream.write(b"abc"), stream.measured == measure_stream(io.BytesIO(b"abc"))
        (3, True)
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._sha = hashlib.sha256()
        self._size = 0

    def write(self, data: Any) -> int:
        """Writes and hashes a block of bytes, and returns their number."""
        block = memoryview(data)
        self._sha.update(block)
        self._stream.write(block)
        self._size += block.nbytes
        return block.nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def measured(self) -> dict[str, Any]:
        """Size and SHA-256 of all bytes written, as manifests list them."""
        return {"bytes": self._size, "sha256": self._sha.hexdigest()}


def measure_file(path: Path) -> dict[str, Any]:
    """Returns size and SHA-256 of a plain file; raises as :func:`open_plain`."""
    with open_plain(path) as stream:
        return measure_stream(stream)


def files_below(folder: Path) -> dict[str, Path]:
    """Returns every file below a folder by its path from there, sorted.

    Raises:
        OSError: there is a link, a pipe or a device, which ``filename`` names.
    """
    files = {}
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise OSError(errno.EINVAL, "it is not a plain file", os.fspath(path))
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = path
    return dict(sorted(files.items()))


def difference(measured: Mapping[str, Any], listed: Mapping[str, Any]) -> str | None:
    """Describes how a file differs from its manifest entry, in words after the file's path; else None.

    Example:
        >>> difference({"bytes": 1, "sha256": "a"}, {"bytes": 2000, "sha256": "a"})
        'has 1 bytes and was written with 2,000'
    """
    if measured["bytes"] != listed["bytes"]:
        return (
            f"has {measured['bytes']:,} bytes and was written with {listed['bytes']:,}"
        )
    if measured["sha256"] != listed["sha256"]:
        return "is damaged: its content does not fit its digest"
    return None


def json_digest(content: Any) -> str:
    """Returns the SHA-256 of JSON values, whatever order their keys are in."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sealed_json(content: Mapping[str, Any], key: str) -> bytes:
    """Returns the bytes of a manifest with its own digest under ``key``."""
    return (
        json.dumps({**content, key: json_digest(content)}, indent=1) + "\n"
    ).encode()


def take_lock(handle: int | IO[str]) -> bool:
    """Locks an open file or folder until it is closed; returns False at once if another process has the lock.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def begin_folder(out: Path) -> tuple[Path, int]:
    """Makes ``.NAME.partial`` beside ``out``, and keeps others from writing it until its handle is closed.

    What a killed process left of either is removed, and a folder that it was replacing is put back.

    Returns:
        The folder, and its file descriptor.

    Raises:
        OSError: another process writes it, or the file system cannot tell; or it cannot be written.
    """
    hidden = out.with_name(f".{out.name}.partial")
    hidden.mkdir(parents=True, exist_ok=True)
    handle = os.open(hidden, os.O_RDONLY)
    try:
        is_ours = take_lock(handle)
    except OSError:
        # A file system without locks: what is there may be written, or left by a kill.
        is_ours = not any(hidden.iterdir())
    # The former writer may have given it its name meanwhile.
    if not is_ours or not hidden.exists() or not _is_open(handle, hidden):
        os.close(handle)
        why = f"another process writes it; if none does, remove {hidden}"
        raise OSError(errno.EBUSY, why, os.fspath(out))
    for left in hidden.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()
    old = _old(out)
    if old.exists():
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(out)
    return hidden, handle


def _is_open(handle: int, path: Path) -> bool:
    return os.path.samestat(os.fstat(handle), path.stat())


def _old(out: Path) -> Path:
    return out.with_name(f".{out.name}.old")


def visible_name(path: Path) -> Path:
    """Returns a path with the final names of its :func:`begin_folder` folders."""
    return Path(*(re.sub(r"^\.(.+)\.partial$", r"\1", name) for name in path.parts))


def existing_folder(out: Path) -> Path:
    """Returns ``out``, or its temporary name while :func:`replace_folder` replaces it in two steps."""
    return out if out.exists() or not _old(out).exists() else _old(out)


def replace_folder(new: Path, out: Path) -> None:
    """Gives ``new`` the name of ``out``, which need not exist.

    The former folder is hidden for a moment, in which :func:`existing_folder` finds it.
    """
    old = _old(out)
    if out.exists():
        out.rename(old)
    try:
        new.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
    sync_to_disk(out.absolute().parent)


def remove_leftovers(out: Path) -> None:
    """Removes what killed processes left beside ``out``, unless another process writes it; see :func:`begin_folder`."""
    with contextlib.suppress(OSError):
        hidden, handle = begin_folder(out)
        hidden.rmdir()
        os.close(handle)
