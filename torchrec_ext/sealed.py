"""What was written stays written when the power fails, is replaced without a gap, and what is read is a file, and ends."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from typing import BinaryIO

_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD of fcntl.h, and of linux/fs.h


def synced(path: str | os.PathLike[str]) -> None:
    """Has the disk hold a file, or the names in a folder, which the fsync of a file in it does not.

    Example:
        >>> synced(".")
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a small file that is there as a whole or as it was before, whatever ends the process or the machine.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_whole(f"{folder}/a", b"1")
        ...     pathlib.Path(folder, "a").read_bytes()
        b'1'
    """
    new = f"{os.fspath(path)}.new"
    with open(new, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, path)
    synced(os.path.dirname(os.path.abspath(path)))


def exchange(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> bool:
    """Gives two files or folders each other's name in one step, so that both names are there at any moment.

    Returns:
        Whether it was done: not every file system can (NFS cannot), and of systems Linux alone. What else is against
        it, such as a missing permission, is told by the plain renames that stand in for it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in "ab":
        ...         write_whole(f"{folder}/{name}", name.encode())
        ...     done = exchange(f"{folder}/a", f"{folder}/b")
        ...     done and open(f"{folder}/a").read()
        'b'
    """
    call = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return call is not None and call(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _RENAME_EXCHANGE) == 0


def no_locks(error: OSError) -> str:
    """What to say of a folder that cannot be locked, although no other process holds its lock.

    Example:
        >>> no_locks(OSError(37, "No locks available"))[:40]
        'cannot be locked (No locks available): a'
    """
    return (
        f"cannot be locked ({error.strerror or error}): a lock keeps two jobs from writing the same files, and its "
        "file system "
        "offers none; mount it with locks (NFS: with lockd, or nolock; Lustre: with flock)"
    )


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading, and no pipe, which would be waited for, nor a device, which need not end; a link is followed.

    Raises:
        OSError: it is not there, or is no plain file.
    """
    stream = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115  (the caller closes it)
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise OSError(errno.EINVAL, "it is no plain file", os.fspath(path))


def read_plain(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a plain file of at most ``most`` bytes.

    Raises:
        OSError: see :func:`open_plain`; or it is larger.
    """
    with open_plain(path) as stream:
        data = stream.read(most + 1)
        if len(data) > most:
            size = os.fstat(stream.fileno()).st_size
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, at most {most:,} are read", os.fspath(path))
    return data
