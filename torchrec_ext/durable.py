"""What was written stays written when the power fails, and is replaced without a moment in which it is not there."""

from __future__ import annotations

import os


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


def no_locks(error: OSError) -> str:
    """What to say of a folder that cannot be locked, although no other process holds its lock.

    Example:
        >>> no_locks(OSError(37, "No locks available"))[:40]
        'cannot be locked (No locks available): a'
    """
    return (
        f"cannot be locked ({error.strerror or error}): a lock keeps two jobs from writing the same files, and its file system "
        "offers none; mount it with locks (NFS: with lockd, or nolock; Lustre: with flock)"
    )
