"""EventLog: follows a folder of files that grow, and returns each event once and in order.

A text file has an event a line and may grow; a parquet file is whole when it appears. Files are read in the order of
their names, where part-9 precedes part-10: while the last one grows, those before it are complete.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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

# Bytes that are read from a text file at a time.
_BLOCK = 2**20
_LONGEST_LINE = 2**24
# Bytes before the position that are compared with those that were read, at each look
# and after a resume.
_TAIL = 256
# Bytes at the end of a parquet file, where its metadata are.
_FOOTER = 4096
_ANEW = "put it back, or train anew in another --run_dir"


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
    """Reads the events of a folder's files, and follows the last one: .jsonl, .ndjson, .csv and .parquet.

    A line counts once it ends; without an end it counts if a later file exists. Names that begin with ``.`` or ``_``
    are no data yet. Any other entry of the folder is left out with a warning. Read files may be removed, except for the
    last one.

    Args:
        columns: folder of the files, of which those in folders below are left out, and names of their columns.

    Raises:
        DataError: there is no such folder.
    """

    def __init__(self, columns: EventsConfig) -> None:
        self.folder = Path(columns.folder)
        self._columns = columns
        self._sizes: dict[str, int] = {}
        self._file: _EventFile | None = None
        self._last = ""
        self._left_out: set[str] = set()
        if not columns.folder or not self.folder.is_dir():
            raise DataError(
                f"data.folder={columns.folder}: no such folder; name the folder in which the log's files lie"
            )

    def read(self, most: int) -> Events:
        """Returns the next events that are there, at most ``most`` of them.

        Raises:
            DataError: a file was cut, rewritten, removed while it was read or came too late; or a line is no event.
        """
        pieces = [NO_EVENTS]
        count = 0
        names: list[str] = []
        while count < most:
            is_last = not names or names[-1] == self._last
            piece = (
                NO_EVENTS
                if self._file is None
                else self._file.take(most - count, is_last=is_last)
            )
            if len(piece):
                pieces.append(piece)
                count += len(piece)
            elif not names:
                # Listed before the rest of a file is read: what precedes a later file
                # is then complete.
                names = self._names()
                if not names:
                    break
            elif not self._open_next(names):
                break
        return Events.joined(pieces)

    def _names(self) -> list[str]:
        """Returns the names of the files in their order, after checking those that were read."""
        sizes = {}
        left_out = set()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name[0] in "._":
                    continue
                if _ending(Path(entry.name)) in _FILES and entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
                else:
                    left_out.add(entry.name)
        self._warn_of(left_out)
        for name, size in self._sizes.items():
            if sizes.get(name, size) != size:
                raise DataError(
                    f"{self.folder / name}: has {sizes[name]:,} bytes, and had {size:,} when the log went on to "
                    f"{self._last}; only the last file may grow: {_ANEW}"
                )
        names = sorted(sizes, key=_natural)
        for name in names:
            if name not in self._sizes and _natural(name) < _natural(self._last):
                raise DataError(
                    f"{self.folder / name}: came when {self._last} was being read already, and precedes it; give new "
                    "files greater names"
                )
        if self._file is not None and self._last not in sizes:
            raise self._file.changed()
        return names

    def _warn_of(self, names: set[str]) -> None:
        """Warns of entries that are left out, once for each."""
        new = sorted(names - self._left_out, key=_natural)
        self._left_out |= names
        if new:
            warnings.warn(
                f"{self.folder}: entries left out: {len(new):,}, such as {new[0]}; a log's files end in "
                f"{', '.join(_FILES)}; write them so, or move them away",
                stacklevel=2,
            )

    def unfinished(self) -> str:
        """Describes the end of the last file that is no event yet; empty if there is none."""
        return "" if self._file is None else self._file.unfinished()

    def _open_next(self, names: list[str]) -> bool:
        """Opens the file after the one that is read; returns False if there is none."""
        later = [name for name in names if _natural(name) > _natural(self._last)]
        if not later:
            return False
        if self._file is not None:
            self._sizes[self._last] = self._file.size
        self._last = later[0]
        self._file = self._opened(later[0])
        return True

    def _opened(self, name: str) -> _EventFile:
        path = self.folder / name
        return _FILES[_ending(path)](path, self._columns)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: the file and the place in it, for JSON."""
        place = None if self._file is None else self._file.state_dict()
        # Files that were removed need not be compared again.
        sizes = {
            name: size
            for name, size in self._sizes.items()
            if (self.folder / name).exists()
        }
        return {"file": self._last, "place": place, "sizes": sizes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a position of :meth:`state_dict`.

        Raises:
            DataError: a file up to there is not as it was read.
        """
        self._file = None
        self._last = state["file"]
        self._sizes = dict(state["sizes"])
        if state["place"] is not None:
            self._file = self._opened(self._last)
            self._file.load_state_dict(state["place"])
        self._names()


def _ending(path: Path) -> str:
    return path.suffix.lower()


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Returns a key by which names sort, numbers in them by their value."""
    key = []
    for part in filter(None, re.split(r"(\d+)", name)):
        number = int(part) if part.isdecimal() else 0
        # Text and numbers are never compared with one another: the first entry decides
        # between them.
        key.append((part.isdecimal(), number, part))
    return key


class _EventFile(ABC):
    """One file of the log, read from its beginning or a saved place.

    Attributes:
        unit: ``bytes`` or ``rows``.
        place: number of those that were read.
        size: size of the file in bytes, if all of it was read.
    """

    unit = "bytes"

    def __init__(self, path: Path, columns: EventsConfig) -> None:
        self.path = path
        self.columns = columns
        self.place = 0
        self.size = 0

    @abstractmethod
    def take(self, most: int, *, is_last: bool) -> Events:
        """Returns the next events, at most ``most``; if the file is the last, without what is not complete yet."""

    @abstractmethod
    def unfinished(self) -> str:
        """Describes the end of the file that is no event yet; empty if there is none."""

    @abstractmethod
    def evidence(self) -> bytes:
        """Returns the bytes by which a change of the part so far is noticed."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the place after the last event that was taken."""
        return {
            "place": self.place,
            "seal": hashlib.sha256(self.evidence()).hexdigest(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a place; raises a DataError if the bytes before it have changed."""
        # Of a text file; evidence() finds that of a parquet file.
        self.size = state["place"]
        self.place = state["place"]
        if hashlib.sha256(self.evidence()).hexdigest() != state["seal"]:
            raise self.changed()

    def changed(self) -> DataError:
        """Returns the error of a file that was cut or rewritten."""
        return DataError(
            f"{self.path}: was cut, rewritten or removed after {self.place:,} {self.unit} of it were read; a log's "
            f"files may only grow: {_ANEW}"
        )


class _LineFile(_EventFile):
    """A text file with an event a line: JSON objects, or values by commas after a line of names."""

    def __init__(self, path: Path, columns: EventsConfig) -> None:
        super().__init__(path, columns)
        # The last bytes before the place, and the bytes after it that are no events
        # yet.
        self._tail = b""
        self._buffer = b""
        # None for JSON; empty before the first line was read.
        self._header: list[str] | None = [] if _ending(path) == ".csv" else None

    def take(self, most: int, *, is_last: bool) -> Events:
        if self._header == [] and not self._read_header():
            return NO_EVENTS
        while lines := self._lines(most, is_last):
            try:
                table = self._table(lines)
            except pa.ArrowInvalid as error:
                raise self._fault(lines, str(error)) from None
            nulls = sum(table[name].null_count for name in self.columns.kinds)
            # Arrow takes several JSON objects in a line, which would be several events.
            if nulls or table.num_rows > len(_line_ends(lines)) + 1:
                raise self._fault(lines, "some line has no value, or several events")
            events = Events.of(
                self.columns,
                {name: table[name].to_numpy() for name in self.columns.kinds},
            )
            if not ((events.labels >= 0) & (events.labels <= 1)).all():
                raise self._fault(lines, f"'{self.columns.label}' must be from 0 to 1")
            self._skip(len(lines))
            # Empty lines are no events, so others may follow them.
            if len(events):
                return events
        return NO_EVENTS

    def _lines(self, most: int, is_last: bool) -> bytes:
        """Returns the next lines, at most ``most``, as they are in the file."""
        ends = _line_ends(self._buffer)
        while len(ends) < most and (block := self._next_block()):
            self._buffer += block
            ends = _line_ends(self._buffer)
            if len(self._buffer) > _LONGEST_LINE and not len(ends):
                raise DataError(
                    f"{self.path}: a line has more than {_LONGEST_LINE:,} bytes; write an event a line"
                )
        if len(ends) < most and not is_last:
            # A later file exists, so this one is complete, and its last line may have
            # no end.
            return self._buffer
        return self._buffer[: ends[:most].max(initial=-1) + 1]

    def _skip(self, count: int) -> None:
        self._tail = (self._tail + self._buffer[:count])[-_TAIL:]
        self._buffer = self._buffer[count:]
        self.place += count
        self.size = self.place

    def _next_block(self) -> bytes:
        """Returns further bytes of the file, none if there are none yet; what was read before must be as it was."""
        last_bytes = (self._tail + self._buffer)[-_TAIL:]
        data = self._bytes(
            self.place + len(self._buffer) - len(last_bytes), len(last_bytes) + _BLOCK
        )
        if not data.startswith(last_bytes):
            raise self.changed()
        return data[len(last_bytes) :]

    def unfinished(self) -> str:
        if not self._buffer.rpartition(b"\n")[2].strip():
            return ""
        return (
            f"{self.path}: the last line has no end, so it is not counted; end it with a newline, or begin a "
            "later file"
        )

    def _bytes(self, start: int, count: int) -> bytes:
        try:
            with open(self.path, "rb", buffering=0) as stream:
                stream.seek(start)
                return stream.read(count)
        except FileNotFoundError:
            return b""

    def evidence(self) -> bytes:
        start = max(0, self.place - _TAIL)
        if len(self._tail) < self.place - start:
            self._tail = self._bytes(start, self.place - start)
        return self._tail

    def _read_header(self) -> bool:
        """Reads the names of the columns, and skips their line; returns whether it is there."""
        line, end, _ = self._bytes(0, _BLOCK).partition(b"\n")
        if not end:
            return False
        self._header = next(csv.reader([line.decode("utf-8-sig").strip()]), [])
        missing = [name for name in self.columns.kinds if name not in self._header]
        if missing:
            columns = ", ".join(self._header)[:80]
            raise DataError(
                f"{self.path}: has no column '{missing[0]}', but {columns}; set data.user, data.item"
            )
        if not self.place:
            self._buffer = line + end
            self._skip(len(self._buffer))
        return True

    def _table(self, lines: bytes) -> pa.Table:
        data = pa.BufferReader(lines)
        options = {"use_threads": False, "block_size": len(lines)}
        types = {"int": pa.int64(), "float": pa.float64()}
        columns = {name: types[kind] for name, kind in self.columns.kinds.items()}
        if self._header is None:
            parsing = pa.json.ParseOptions(
                explicit_schema=pa.schema(columns), unexpected_field_behavior="ignore"
            )
            return pa.json.read_json(data, pa.json.ReadOptions(**options), parsing)
        converting = pa.csv.ConvertOptions(
            column_types=columns, include_columns=list(columns)
        )
        reading = pa.csv.ReadOptions(column_names=self._header, **options)
        return pa.csv.read_csv(data, reading, convert_options=converting)

    def _fault(self, lines: bytes, reason: str) -> DataError:
        """Returns the error of the first line that is no event."""
        before = 0
        for start in range(0, self.place, _BLOCK):
            before += self._bytes(start, min(_BLOCK, self.place - start)).count(b"\n")
        for number, line in enumerate(lines.split(b"\n"), before + 1):
            if line.strip() and (fault := self._fault_of_line(line)):
                return DataError(f"{self.path}: line {number}: {fault}; mend the line")
        return DataError(
            f"{self.path}: a line from {before + 1} on is no event: {reason[:80]}"
        )

    def _fault_of_line(self, line: bytes) -> str:
        """Describes what keeps a line from being an event; empty if nothing does."""
        try:
            values = self._values(line)
        except ValueError as error:
            return f"it cannot be read: {str(error)[:60]}"
        for name, kind in self.columns.kinds.items():
            number = values.get(name)
            if not number:
                return f"it has no '{name}'"
            if kind == "int" and not (
                re.fullmatch(r"-?\d+", number) and -(2**63) <= int(number) < 2**63
            ):
                rule = "must be a whole number of 64 bits with sign; string_ids() makes them of texts"
                return f"'{name}' is {number[:30]}, {rule}"
            if name == self.columns.label and not _is_share(number):
                return f"'{name}' is {number[:30]}, must be a number from 0 to 1"
        return ""

    def _values(self, line: bytes) -> dict[str, str]:
        """Returns the values of a line by name, as they are written, without missing ones; of no event, none."""
        if self._header is not None:
            fields = next(csv.reader([line.decode()]))
            if len(fields) != len(self._header):
                raise ValueError(
                    f"it has {len(fields)} values, and the header has {len(self._header)}"
                )
            return dict(zip(self._header, fields, strict=True))
        event = json.loads(line)
        if not isinstance(event, dict):
            return {}
        # Written anew, a text stands in quotes, by which it is no number.
        return {
            name: json.dumps(value)
            for name, value in event.items()
            if value not in (None, "")
        }


class _PartFile(_EventFile):
    """A parquet file, whose rows are read at once."""

    unit = "rows"

    def __init__(self, path: Path, columns: EventsConfig) -> None:
        super().__init__(path, columns)
        self._rows: Events | None = None

    def take(self, most: int, *, is_last: bool) -> Events:
        if self._rows is None and self.evidence().endswith(b"PAR1"):
            self._rows = self._read()
        if self._rows is None:
            if is_last:
                return NO_EVENTS
            raise DataError(
                f"{self.path}: is no whole parquet file, and a later one follows; write parts under a name with a "
                "leading _, and rename them"
            )
        events = self._rows.rows(self.place, self.place + most)
        self.place += len(events)
        return events

    def unfinished(self) -> str:
        if self._rows is not None:
            return ""
        return f"{self.path}: is no whole parquet file, so its rows are not counted; write it again"

    def evidence(self) -> bytes:
        try:
            with open(self.path, "rb") as stream:
                self.size = os.fstat(stream.fileno()).st_size
                stream.seek(max(0, self.size - _FOOTER))
                return stream.read()
        except FileNotFoundError:
            return b""

    def _read(self) -> Events:
        # A source of no rows is refused, but some writers make such parts.
        if not pq.read_metadata(self.path).num_rows:
            return NO_EVENTS
        source = ParquetSource(self.path)
        kinds: dict[str, tuple[Kind, ...]] = {
            "int": ("int",),
            "float": ("float", "int", "bool"),
        }
        source.require({name: kinds[kind] for name, kind in self.columns.kinds.items()})
        pieces = []
        for group in source.groups:
            rows = source.read(group, list(self.columns.kinds))
            columns: dict[str, Array] = {}
            for name, kind in self.columns.kinds.items():
                columns[name] = rows[name].values
                if kind == "int":
                    columns[name] = as_int64(str(self.path), name, rows[name])
            pieces.append(Events.of(self.columns, columns))
        return Events.joined(pieces)


_FILES: dict[str, type[_EventFile]] = {
    ".jsonl": _LineFile,
    ".ndjson": _LineFile,
    ".csv": _LineFile,
    ".parquet": _PartFile,
}


def _line_ends(text: bytes) -> Int64:
    return np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))


def _is_share(number: str) -> bool:
    try:
        return 0 <= float(number) <= 1
    except ValueError:
        return False
