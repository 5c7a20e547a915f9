"""HashBucket and Cross: ids without a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from torchrec_ext.data.preprocess.cells import Cells, map_texts
from torchrec_ext.data.preprocess.column_types import ID_LISTS, IDS, Types, is_list
from torchrec_ext.data.preprocess.hashing import hashed_id, hashed_id_expression, md5
from torchrec_ext.data.preprocess.step import ColumnStep, Run, State, Step, Table, positive


@dataclass(frozen=True, kw_only=True)
class HashBucket(ColumnStep):
    """Values to ids 1 to ``buckets`` by a hash, 0 for null: for columns of too many or ever new values.

    Args:
        column: integers, strings or lists of them; 7 and "7" have one id.
        buckets: how many ids.
        output: the name of the result; ``column`` itself where not given.
        salt: another text gives other collisions.
    """

    column: str
    buckets: int
    output: str | None = None
    salt: str = ""

    def __post_init__(self) -> None:
        positive(f"HashBucket('{self.column}')", "buckets", self.buckets)

    def types(self, types: Types) -> Mapping[str, str]:
        """Integers, as many per row as there were values."""
        found = types.need(self, self.column, IDS | ID_LISTS, "bucket a number with Bucketize, or cast it where it is written")
        return {self.writes[0]: "list<int64>" if is_list(found) else "int64"}

    def transform(self, table: Table, types: Types, state: State, run: Run) -> Table:
        """The hash of each value, or of each element."""

        def hashed(value: Table) -> Table:
            return hashed_id_expression(value.cast("string"), self.buckets, self.salt, run.engine).fill_null(0)

        column = table[self.column]
        return table.mutate({self.writes[0]: column.map(hashed) if is_list(types[self.column]) else hashed(column)})

    def online(self, cells: Mapping[str, Cells], types: Types, state: State) -> Mapping[str, Cells]:
        """The same hash."""
        found = cells[self.column]
        return {self.writes[0]: found.with_values(map_texts(found, lambda text: hashed_id(text, self.buckets, self.salt)))}

    def vocab(self, state: State) -> Mapping[str, int]:
        """``buckets`` and row 0."""
        return {self.writes[0]: self.buckets + 1}


@dataclass(frozen=True, kw_only=True)
class Cross(Step):
    """The combination of several columns as one id, 1 to ``buckets``; 0 where one of them is null.

    Args:
        columns: two or more columns of integers or strings.
        buckets: how many ids.
        output: the name of the result; the columns' names with ``_x_`` between them where not given.
        salt: another text gives other collisions.
    """

    columns: tuple[str, ...]
    buckets: int
    output: str | None = None
    salt: str = ""

    def __post_init__(self) -> None:
        positive(f"Cross{self.columns}", "buckets", self.buckets)
        if len(self.columns) < 2:
            raise ValueError(f"Cross: columns={self.columns}: a cross combines two columns or more; use HashBucket for one")

    @property
    def reads(self) -> tuple[str, ...]:
        """``columns``."""
        return tuple(self.columns)

    @property
    def writes(self) -> tuple[str, ...]:
        """``output``."""
        return (self.output or "_x_".join(self.columns),)

    def types(self, types: Types) -> Mapping[str, str]:
        """Integers."""
        for name in self.columns:
            types.need(self, name, IDS, "bucket a number first; a list cannot be crossed")
        return {self.writes[0]: "int64"}

    def transform(self, table: Table, types: Types, state: State, run: Run) -> Table:
        """The hash of the parts' digests, which all have one length: ("ab", "c") and ("a", "bc") stay apart."""
        first, *rest = (table[name].cast("string").hexdigest("md5") for name in self.columns)
        for digest in rest:
            first = first + digest
        return table.mutate({self.writes[0]: hashed_id_expression(first, self.buckets, self.salt, run.engine).fill_null(0)})

    def online(self, cells: Mapping[str, Cells], types: Types, state: State) -> Mapping[str, Cells]:
        """The same hash."""
        parts = [cells[name] for name in self.columns]
        valid = np.logical_and.reduce([part.valid for part in parts])
        rows = zip(*(part.values.tolist() for part in parts), strict=True)
        ids = [
            hashed_id("".join(md5(str(value)) for value in row), self.buckets, self.salt) if known else 0
            for row, known in zip(rows, valid.tolist(), strict=True)
        ]
        return {self.writes[0]: parts[0].with_values(np.array(ids, dtype=np.int64))}

    def vocab(self, state: State) -> Mapping[str, int]:
        """``buckets`` and row 0."""
        return {self.writes[0]: self.buckets + 1}
