"""Known pairs of a prepared folder: who took what in a split, written once, sorted, and read by memory map.

write_known(): writes the pairs of a split; keys_of(): reads those of some users.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.preprocess.rows import Connection, batches

# Folder of the pairs beside the rows.
KNOWN = "known"


def known_path(folder: Path, split: str, *, sessions: bool = False) -> Path:
    """Returns the file with the pairs of a split; that of sessions counts all items of a row's session, too."""
    return folder / KNOWN / f"{split}{'-sessions' if sessions else ''}.npy"


def write_known(path: Path, con: Connection, pairs: str, width: int) -> None:
    """Writes pairs as sorted numbers, user * width + item, each once.

    Args:
        path: file to write.
        con: connection of DuckDB, which sorts more pairs than memory holds.
        pairs: SQL of the pairs, ``u`` and ``i``; those of the unknown user or item are left out.
        width: rows of the items' table.
    """
    path.parent.mkdir(exist_ok=True)
    con.execute(
        f"CREATE OR REPLACE TEMP TABLE known_pairs AS SELECT DISTINCT u * {width} + i AS key FROM ({pairs}) "
        "WHERE u > 0 AND i > 0 ORDER BY key"
    )
    ((count,),) = con.sql("SELECT count(*) FROM known_pairs").fetchall()
    if not count:
        np.save(path, np.zeros(0, np.int64))
        return
    out = np.lib.format.open_memmap(path, "w+", np.int64, (count,))
    place = 0
    for batch in batches(con, "FROM known_pairs"):
        out[place : place + len(batch)] = batch.column(0).to_numpy()
        place += len(batch)
    out.flush()


def known_keys(path: Path) -> Int64:
    """Returns the pairs of a split as they lie on the disk."""
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
