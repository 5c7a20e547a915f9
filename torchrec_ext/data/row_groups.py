"""RowGroup and Source: what the loader asks of data that is read a row group at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchrec_ext.data.arrow import Kind
from torchrec_ext.data.columns import Chunk


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """A row group of parquet, a record batch of Arrow IPC, or a part of one.

    Args:
        name: file and number, for messages.
        file: place of the file in the source.
        number: of the group in its file.
        rows: how many it has.
        first: greater than 0 for a part: rows of the group that come before it.
    """

    name: str
    file: int
    number: int
    rows: int
    first: int = 0


class Source(Protocol):
    """What the loader asks of the data. Nothing but metadata is read before :meth:`read`."""

    @property
    def groups(self) -> Sequence[RowGroup]:
        """All row groups that have rows, in the order of the files."""

    def require(self, columns: Mapping[str, Sequence[Kind]]) -> dict[str, Kind]:
        """The kinds of the columns; refuses, with a DataError, one that a file lacks or that has none of the kinds given for it."""

    def read(self, group: RowGroup, names: Sequence[str]) -> Chunk:
        """The columns ``names`` of one group, checked; views of Arrow's memory where the layout allows."""

    def parts(self, group: RowGroup, names: Sequence[str], start: int, size: int) -> Iterator[Chunk]:
        """The same from row ``start`` on, in parts that end at multiples of ``size``, without holding the whole group."""
