"""synced(): what was written stays written when the power fails."""

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
