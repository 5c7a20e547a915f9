"""Known pairs of a prepared folder: who took what in a split, written once, sorted, and read by memory map.

KnownWriter: writes the pairs of a split while its rows are written; known_pairs(): reads those of some users.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchrec_ext.data.columns import Int64
from torchrec_ext.schema import DataError

# Folder of the pairs beside the rows.
KNOWN = "known"
# Keys that are compared or copied at a time.
_AT_ONCE = 1 << 20


def known_path(folder: Path, split: str, *, sessions: bool = False) -> Path:
    """Returns the file with the pairs of a split; that of sessions counts all items of a row's session, too."""
    return folder / KNOWN / f"{split}{'-sessions' if sessions else ''}.npy"


class KnownWriter:
    """Writes pairs as sorted numbers, user * width + item, each once.

    Args:
        path: file to write.
        width: rows of the items' table.
    """

    def __init__(self, path: Path, width: int) -> None:
        self._path = path
        self._width = width
        path.parent.mkdir(parents=True, exist_ok=True)
        self._unsorted = path.with_suffix(".unsorted")
        self._unsorted.touch()

    def add(self, users: Int64, items: Int64) -> None:
        """Adds pairs; those of the unknown user or item are left out."""
        known = (users > 0) & (items > 0)
        with self._unsorted.open("ab") as file:
            np.unique(users[known] * self._width + items[known]).tofile(file)

    def close(self) -> None:
        """Sorts the pairs in the file itself, which may be larger than the memory."""
        keys = np.zeros(0, np.int64)
        if self._unsorted.stat().st_size:
            keys = np.memmap(self._unsorted, np.int64, "r+")
            keys.sort()
        starts = range(0, len(keys), _AT_ONCE)
        count = sum(int(_first(keys, start).sum()) for start in starts)
        if not count:
            np.save(self._path, np.zeros(0, np.int64))
        else:
            out = np.lib.format.open_memmap(self._path, "w+", np.int64, (count,))
            place = 0
            for start in starts:
                once = keys[start : start + _AT_ONCE][_first(keys, start)]
                out[place : place + len(once)] = once
                place += len(once)
            out.flush()
        self._unsorted.unlink()


def _first(keys: Int64, start: int) -> np.ndarray:
    """Says of the keys from ``start`` on whether each is the first of its value."""
    some = keys[start : start + _AT_ONCE]
    before = keys[max(start - 1, 0) : start + len(some) - 1]
    if start == 0:
        return np.concatenate([[True], some[1:] != before])
    return np.asarray(some != before)


def known_keys(path: Path) -> Int64:
    """Returns the pairs of a split as they lie on the disk.

    Raises:
        DataError: an earlier version has written the folder.
    """
    if not path.exists():
        raise DataError(
            f"{path}: is missing, which rec.data.preprocess writes beside the rows; preprocess the log again with this "
            "version"
        )
    # A map of no bytes is refused.
    keys: Int64 = np.load(path, mmap_mode="r" if path.stat().st_size > 1_024 else None)
    return keys


def keys_of(splits: Sequence[Int64], width: int, users: Int64 | None = None) -> Int64:
    """Returns the pairs of several splits, of some ``users`` or of all: sorted, each once."""
    found = list(splits)
    if users is not None:
        owners = np.unique(users)
        found = []
        for keys in splits:
            # Each user's keys are one range, so that nothing else is read.
            starts = keys.searchsorted(owners * width)
            counts = keys.searchsorted((owners + 1) * width) - starts
            shift = (starts - np.cumsum(counts) + counts).repeat(counts)
            found.append(keys[shift + np.arange(len(shift))])
    return found[0] if len(found) == 1 else np.unique(np.concatenate(found))
