"""EventLog: returns each event of a folder's files once and in order.

A file counts when it is renamed into the folder: it is whole then, and is read once. Files are read in the order of
their names, where part-9 precedes part-10. A position is the name of a file and a number of its rows. The
fingerprints of the files read tell a later run which file came late or was changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from torchrec_ext.data.columns import Chunk, Column, concatenate_rows
from torchrec_ext.data.files.events_config import EventsConfig
from torchrec_ext.schema import DataError

_ID = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_LABEL = Annotated[float, msgspec.Meta(ge=0, le=1)]
_RULE = "ids are int64 (string_ids() of texts), labels 0 to 1, times seconds since 1970"
_ENDINGS = (".jsonl", ".ndjson")
# Columns of events: ids, labels that are 1 in a log without labels, and seconds since
# 1970 that are NaN in a log without times.
USER, ITEM, LABEL, TIME = "user", "item", "label", "time"
_DTYPES: dict[str, type[np.generic]] = {
    USER: np.int64,
    ITEM: np.int64,
    LABEL: np.float32,
    TIME: np.float64,
}
NO_EVENTS = Chunk({name: Column(np.empty(0, kind)) for name, kind in _DTYPES.items()})


class EventLog:
    """Reads the events of a folder's files of JSON lines, .jsonl and .ndjson, each as a whole.

    Names that begin with ``.`` or ``_`` are no data yet. Any other entry of the folder is left out with a warning. A
    file that was read may be removed, except for the last one. The state has a fingerprint of each that is still there,
    so it grows with the folder alone.

    Args:
        columns: folder of the files, of which those in folders below are left out, and names of their columns.

    Raises:
        DataError: there is no such folder.
    """

    def __init__(self, columns: EventsConfig) -> None:
        self.folder = Path(columns.folder)
        self._columns = columns
        self._begin()
        if not columns.folder or not self.folder.is_dir():
            raise DataError(
                f"data.folder={columns.folder}: no such folder; name the folder in which the log's files lie"
            )

    def _begin(self) -> None:
        # The file that is read, its events, and the number of those that were taken.
        self._file = ""
        self._events = NO_EVENTS
        self._row = 0
        self._waiting: list[str] = []
        # Size, time of the last write and digest of each file read, in their order.
        self._read: dict[str, list[Any]] = {}
        # Entries of the folder that were seen; they are not looked at again.
        self._seen: set[str] = set()

    def read(self, most: int) -> Chunk:
        """Returns the next events that are there, at most ``most`` of them.

        Raises:
            DataError: a file is not whole, was written to after it was read or came too late; or a row is no event.
        """
        pieces = [NO_EVENTS]
        while most > 0:
            if self._row == self._events.num_rows and not self._open_next():
                break
            piece = self._events.slice(self._row, self._row + most)
            pieces.append(piece)
            self._row += piece.num_rows
            most -= piece.num_rows
        return concatenate_rows(pieces, NO_EVENTS)

    @property
    def position(self) -> dict[str, Any]:
        """The file and the number of its rows that were taken."""
        return {"file": self._file, "row": self._row}

    def state_dict(self, position: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns a position, by default the present one, and fingerprints of the files up to it, for JSON."""
        position = position or self.position
        if not position["file"]:
            return {**position, "read": {}}
        there = {*os.listdir(self.folder), position["file"]}
        self._read = {
            name: fingerprint
            for name, fingerprint in self._read.items()
            if name in there
        }
        # The log itself may have read further files.
        names = list(self._read)
        names = names[: names.index(position["file"]) + 1]
        return {**position, "read": {name: self._read[name] for name in names}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a position of :meth:`state_dict`.

        Raises:
            DataError: the file is not there, or one up to it was changed or came after it was read.
        """
        self._begin()
        last = state["file"]
        if not last:
            return
        if not (self.folder / last).exists():
            raise DataError(
                f"{self.folder / last}: is gone, and {state['row']:,} of its rows were read; put it back, or "
                "train anew in another --run_dir"
            )
        # What precedes the file has been read.
        self._seen = {
            name for name in os.listdir(self.folder) if _natural(name) <= _natural(last)
        }
        read = state["read"]
        for name in sorted(self._seen, key=_natural):
            path = self.folder / name
            if name[0] in "._" or not _is_data(path):
                continue
            if name in read:
                self._read[name] = read[name]
                self._check_unchanged(name)
            else:
                raise self._too_late(name, last)
        self._open(last)
        self._row = state["row"]

    def _open_next(self) -> bool:
        """Reads the next file; returns False if there is none."""
        if not self._waiting:
            self._list()
        if not self._waiting:
            return False
        self._open(self._waiting.pop(0))
        return True

    def _open(self, name: str) -> None:
        path = self.folder / name
        fingerprint = _fingerprint(path)
        self._events = _read(path, self._columns)
        self._read[name] = fingerprint
        self._file = name
        self._row = 0

    def _list(self) -> None:
        """Finds the files that have come, in their order."""
        new: list[str] = []
        left_out: list[str] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name in self._seen or entry.name[0] in "._":
                    continue
                (new if _is_data(Path(entry.path)) else left_out).append(entry.name)
        self._check_unchanged(self._file)
        self._seen.update(new, left_out)
        self._waiting = sorted(new, key=_natural)
        if left_out:
            warnings.warn(
                f"{self.folder}: entries left out: {len(left_out):,}, such as {min(left_out, key=_natural)}; a log's "
                f"files end in {', '.join(_ENDINGS)}; write them so, or move them away",
                stacklevel=2,
            )
        if self._waiting and _natural(self._waiting[0]) < _natural(self._file):
            raise self._too_late(self._waiting[0], self._file)

    def _too_late(self, name: str, last: str) -> DataError:
        return DataError(
            f"{self.folder / name}: came after {last} was read, and precedes it; give new files greater names"
        )

    def _check_unchanged(self, name: str) -> None:
        """Refuses a file with other bytes than at its reading."""
        path = self.folder / name
        if name not in self._read:
            return
        size, written, digest = self._read[name]
        try:
            status = path.stat()
            if [status.st_size, status.st_mtime_ns] == [size, written]:
                return
            # A copy has another time, and the same bytes.
            now = _fingerprint(path)
        except FileNotFoundError:
            return
        if now[2] != digest:
            raise DataError(
                f"{path}: was changed after it was read: has {now[0]:,} bytes, and had {size:,}; put it back, and "
                "give new events a file of a greater name, renamed when it is whole"
            )
        self._read[name] = now


def _is_data(path: Path) -> bool:
    return path.name.lower().endswith(_ENDINGS) and path.is_file()


def _fingerprint(path: Path) -> list[Any]:
    """Returns the size, the time of the last write and a digest of a file, for JSON."""
    status = path.stat()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return [status.st_size, status.st_mtime_ns, digest[:16]]


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Returns a key by which names sort, numbers in them by their value."""
    key = []
    for part in filter(None, re.split(r"(\d+)", name)):
        number = int(part) if part.isdecimal() else 0
        # Text and numbers are never compared with one another: the first entry decides
        # between them.
        key.append((part.isdecimal(), number, part))
    return key


def _read(path: Path, columns: EventsConfig) -> Chunk:
    """Returns the events of a file; names the first line that is none."""
    fields: list[tuple[str, Any]] = [("user", _ID), ("item", _ID)]
    names = {"user": columns.user, "item": columns.item}
    if columns.label:
        fields.append(("label", _LABEL))
        names["label"] = columns.label
    if columns.time:
        fields.append(("time", float))
        names["time"] = columns.time
    decoder = msgspec.json.Decoder(msgspec.defstruct("Event", fields, rename=names))
    rows: list[Any] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(msgspec.structs.astuple(decoder.decode(line)))
        # A value that is not read may be lists in lists without an end.
        except (msgspec.MsgspecError, RecursionError) as error:
            raise DataError(
                f"{path}: line {number}: {str(error)[:70]}; {_RULE}; mend the line"
            ) from None
    if not rows:
        return NO_EVENTS
    values: dict[str, Any] = {LABEL: np.ones(len(rows)), TIME: [np.nan] * len(rows)}
    values |= zip(names, zip(*rows, strict=True), strict=True)
    return Chunk(
        {name: Column(np.array(values[name], kind)) for name, kind in _DTYPES.items()}
    )
