"""EventLog: returns each event of a folder's files once and in order.

A file counts when it is renamed into the folder: it is whole then, and is read once. Files are read in the order of
their names, where part-9 precedes part-10. A position is the name of a file and a number of its rows.
"""

from __future__ import annotations

import os
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from torchrec_ext.data.columns import Array, Float32, Int64
from torchrec_ext.data.files.arrow import Kind, as_int64
from torchrec_ext.data.files.events_config import EventsConfig
from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.schema import DataError

# Arrow parses a text file in blocks of at most so many bytes.
_BLOCK = 2**30
_RENAME = (
    "write files under a name with a leading _, and rename them when they are whole"
)
_TYPES = {"int": pa.int64(), "float": pa.float64()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """N events in their order.

    Args:
        users: (N,) ids.
        items: (N,) ids.
        labels: (N,) labels, 1 for a log without labels.
        times: (N,) seconds since 1970, NaN for a log without times.
    """

    users: Int64
    items: Int64
    labels: Float32
    times: Array

    @classmethod
    def of(cls, columns: EventsConfig, values: Mapping[str, Array]) -> Events:
        """Returns the events of columns by name, (N,) each; those of no columns are none."""
        users = values.get(columns.user, np.empty(0, np.int64))
        labels = values.get(columns.label, np.ones(len(users)))
        times = values.get(columns.time, np.full(len(users), np.nan))
        items = values.get(columns.item, users)
        return cls(
            users=users,
            items=items,
            labels=labels.astype(np.float32),
            times=times.astype(np.float64),
        )

    @classmethod
    def joined(cls, pieces: Sequence[Events]) -> Events:
        """Returns the events of all pieces, one piece after the other."""
        columns = {}
        for name in vars(pieces[0]):
            columns[name] = np.concatenate([vars(piece)[name] for piece in pieces])
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.users)

    def rows(self, start: int, stop: int) -> Events:
        """Returns events ``start`` to ``stop``."""
        return Events(
            **{name: column[start:stop] for name, column in vars(self).items()}
        )


NO_EVENTS = Events.of(EventsConfig(), {})


class EventLog:
    """Reads the events of a folder's files: .jsonl, .ndjson, .csv and .parquet, each as a whole.

    Names that begin with ``.`` or ``_`` are no data yet. Any other entry of the folder is left out with a warning. A
    file that was read may be removed, except for the last one.

    Args:
        columns: folder of the files, of which those in folders below are left out, and names of their columns.

    Raises:
        DataError: there is no such folder.
    """

    def __init__(self, columns: EventsConfig) -> None:
        self.folder = Path(columns.folder)
        self._columns = columns
        # The file that is read, its events, and the number of those that were taken.
        self._file = ""
        self._size = 0
        self._events = NO_EVENTS
        self._row = 0
        self._waiting: list[str] = []
        # Entries of the folder that were seen; they are not looked at again.
        self._seen: set[str] = set()
        if not columns.folder or not self.folder.is_dir():
            raise DataError(
                f"data.folder={columns.folder}: no such folder; name the folder in which the log's files lie"
            )

    def read(self, most: int) -> Events:
        """Returns the next events that are there, at most ``most`` of them.

        Raises:
            DataError: a file is not whole, was written to after it was read or came too late; or a row is no event.
        """
        pieces = [NO_EVENTS]
        while most > 0:
            if self._row == len(self._events) and not self._open_next():
                break
            piece = self._events.rows(self._row, self._row + most)
            pieces.append(piece)
            self._row += len(piece)
            most -= len(piece)
        return Events.joined(pieces)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, for JSON: the file and the number of its rows that were taken."""
        return {"file": self._file, "row": self._row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a position of :meth:`state_dict`.

        Raises:
            DataError: the file is not there, or has fewer rows.
        """
        self._file = ""
        self._events = NO_EVENTS
        self._row = 0
        self._waiting = []
        self._seen = set()
        if "row" not in state:
            raise DataError(
                f"{self.folder}: the run of an earlier version read files that grow; train anew in another --run_dir"
            )
        if not state["file"]:
            return
        if not (self.folder / state["file"]).exists():
            raise DataError(
                f"{self.folder / state['file']}: is gone, and {state['row']:,} of its rows were read; put it back, or "
                "train anew in another --run_dir"
            )
        self._open(state["file"])
        if len(self._events) < state["row"]:
            raise DataError(
                f"{self.folder / self._file}: has {len(self._events):,} rows, of which {state['row']:,} were read; put "
                "the file back that was read, or train anew in another --run_dir"
            )
        self._row = state["row"]
        # What precedes the file has been read.
        self._seen = {
            name
            for name in os.listdir(self.folder)
            if _natural(name) <= _natural(self._file)
        }

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
        self._size = path.stat().st_size
        self._events = _READERS[path.suffix.lower()](path, self._columns)
        self._file = name
        self._row = 0

    def _list(self) -> None:
        """Finds the files that have come, in their order."""
        new: list[str] = []
        left_out: list[str] = []
        size = self._size
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name == self._file:
                    size = entry.stat().st_size
                if entry.name in self._seen or entry.name[0] in "._":
                    continue
                is_file = (
                    Path(entry.name).suffix.lower() in _READERS and entry.is_file()
                )
                (new if is_file else left_out).append(entry.name)
        if size != self._size:
            raise DataError(
                f"{self.folder / self._file}: has {size:,} bytes, and had {self._size:,} when it was read; {_RENAME}"
            )
        self._seen.update(new, left_out)
        self._waiting = sorted(new, key=_natural)
        if left_out:
            warnings.warn(
                f"{self.folder}: entries left out: {len(left_out):,}, such as {min(left_out, key=_natural)}; a log's "
                f"files end in {', '.join(_READERS)}; write them so, or move them away",
                stacklevel=2,
            )
        if self._waiting and _natural(self._waiting[0]) < _natural(self._file):
            raise DataError(
                f"{self.folder / self._waiting[0]}: came after {self._file} was read, and precedes it; give new files "
                "greater names"
            )


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Returns a key by which names sort, numbers in them by their value."""
    key = []
    for part in filter(None, re.split(r"(\d+)", name)):
        number = int(part) if part.isdecimal() else 0
        # Text and numbers are never compared with one another: the first entry decides
        # between them.
        key.append((part.isdecimal(), number, part))
    return key


def _read_json(path: Path, columns: EventsConfig) -> Events:
    schema = pa.schema({name: _TYPES[kind] for name, kind in columns.kinds.items()})
    parsing = pa.json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="ignore"
    )

    def parse(data: bytes) -> pa.Table:
        reading = pa.json.ReadOptions(use_threads=False, block_size=_block(data))
        return pa.json.read_json(pa.BufferReader(data), reading, parsing)

    return _of_text(path, columns, parse)


def _read_csv(path: Path, columns: EventsConfig) -> Events:
    converting = pa.csv.ConvertOptions(
        column_types={name: _TYPES[kind] for name, kind in columns.kinds.items()},
        include_columns=list(columns.kinds),
    )

    def parse(data: bytes) -> pa.Table:
        reading = pa.csv.ReadOptions(use_threads=False, block_size=_block(data))
        return pa.csv.read_csv(
            pa.BufferReader(data), reading, convert_options=converting
        )

    return _of_text(path, columns, parse)


def _block(data: bytes) -> int:
    return min(len(data), _BLOCK)


def _of_text(
    path: Path, columns: EventsConfig, parse: Callable[[bytes], pa.Table]
) -> Events:
    """Returns the events of a text file; names the first line that is none."""
    data = path.read_bytes()
    if not data.strip():
        return NO_EVENTS
    table, fault = _parsed(data, columns, parse)
    if fault:
        lines = data.splitlines(keepends=True)

        def is_wrong(last: int) -> bool:
            return bool(_parsed(b"".join(lines[: last + 1]), columns, parse)[1])

        number = bisect_left(range(len(lines)), True, key=is_wrong)
        _, fault = _parsed(b"".join(lines[: number + 1]), columns, parse)
        raise DataError(f"{path}: line {number + 1}: {fault}; mend the line")
    return Events.of(columns, {name: table[name].to_numpy() for name in columns.kinds})


def _parsed(
    data: bytes, columns: EventsConfig, parse: Callable[[bytes], pa.Table]
) -> tuple[pa.Table, str]:
    """Parses lines; returns the table, and what is wrong with it, empty if nothing is."""
    try:
        table = parse(data)
    except pa.ArrowKeyError as error:
        return None, f"{str(error)[:80]}; set data.user, data.item"
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0][:80]
        return (
            None,
            f"{reason}; ids are whole numbers of 64 bits, string_ids() makes them of texts",
        )
    # A header is no event.
    if sum(1 for line in data.splitlines() if line.strip()) > len(table) + 1:
        return table, "it lies within a quote that begins above and has no end there"
    for name in columns.kinds:
        if table[name].null_count:
            return table, f"it has no '{name}'"
    if columns.label:
        labels = table[columns.label].to_numpy()
        if not ((labels >= 0) & (labels <= 1)).all():
            return table, f"'{columns.label}' is not from 0 to 1"
    return table, ""


def _read_parquet(path: Path, columns: EventsConfig) -> Events:
    try:
        rows = pq.read_metadata(path).num_rows
    except pa.ArrowInvalid:
        raise DataError(f"{path}: is no whole parquet file; {_RENAME}") from None
    # A source of no rows is refused, but some writers make such parts.
    if not rows:
        return NO_EVENTS
    source = ParquetSource(path)
    kinds: dict[str, tuple[Kind, ...]] = {
        "int": ("int",),
        "float": ("float", "int", "bool"),
    }
    source.require({name: kinds[kind] for name, kind in columns.kinds.items()})
    pieces = []
    for group in source.groups:
        chunk = source.read(group, list(columns.kinds))
        values: dict[str, Array] = {}
        for name, kind in columns.kinds.items():
            values[name] = chunk[name].values
            if kind == "int":
                values[name] = as_int64(str(path), name, chunk[name])
        if columns.label:
            labels = values[columns.label]
            wrong = ~((labels >= 0) & (labels <= 1))
            if wrong.any():
                row = int(wrong.argmax())
                raise DataError(
                    f"{group.name}, column '{columns.label}', row {row}: value {labels[row]:g} is not from 0 to 1; "
                    "mend the row"
                )
        pieces.append(Events.of(columns, values))
    return Events.joined(pieces)


_READERS: dict[str, Callable[[Path, EventsConfig], Events]] = {
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
