"""Runs one side of a bundle over rows, those of parquet files or the bundle's users, into a store of vectors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa

from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.retrieval.bundle import Bundle, Side
from torchrec_ext.retrieval.catalogue import Ids
from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.store import Block
from torchrec_ext.schema.validation import DataError

# Rows of a block; a fixed size, because vectors may depend on it in the last bits.
BLOCK_ROWS = 4096


class TowerRows:
    """One side of a bundle, and the rows that it embeds.

    Args:
        bundle: bundle with the side.
        side: ``query`` or ``candidate``.
        catalogue: parquet files, folders, patterns or addresses with the side's raw columns; empty for the users that
            the bundle knows.
        key: name of the column with the ids.

    Attributes:
        unknown: number of rows with a value unknown to training, by column; complete after all blocks.

    Raises:
        DataError: there is no file, none is parquet, or one lacks a column.
        ValueError: there are no files, and the bundle does not know such rows.
    """

    def __init__(
        self, bundle: Bundle, side: str, catalogue: Sequence[str], key: str
    ) -> None:
        self.side = side
        self._bundle = bundle
        self._encoder: Side = bundle.query if side == "query" else bundle.candidate
        self.unknown: Counter[str] = Counter()
        self._names = list(dict.fromkeys([key, *self._encoder.columns.raw]))
        self._key = key
        self._source: ParquetSource | None = None
        if not catalogue:
            self._check_users()
            return
        self._source = ParquetSource(catalogue)
        for name in self._names:
            for file in range(len(self._source.files)):
                self._source.type_of(name, file)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and width of a vector."""
        users = self._bundle.users
        rows = len(users) if users is not None else 0
        if self._source is not None:
            rows = self._source.num_rows
        return rows, self._encoder.width

    def _check_users(self) -> None:
        users = self._bundle.users
        known: Sequence[str] = ()
        if users is not None and self.side == "query":
            known = list(users.features(-1))
        for name in self._encoder.columns.raw:
            if name not in known:
                raise ValueError(
                    f"--catalogue: name the parquet files with the rows; the bundle does not know column '{name}' of "
                    f"the {self.side} side"
                )

    def blocks(self) -> Iterator[Block]:
        """Yields the ids and vectors of each block.

        Raises:
            DataError: a file is damaged, a row has no id, or a value cannot be taken; the message names the place.
        """
        for where, ids, rows in self._rows():
            try:
                read = self._encoder.columns.read(rows)
            except DataError as error:
                raise DataError(f"{where}: {error}") from None
            for name, mask in read.unknown.items():
                self.unknown[name] += int(mask.sum())
            yield ids, self._encoder(read.columns)

    def _rows(self) -> Iterator[tuple[str, pa.Array, pa.Table]]:
        if self._source is None:
            users = self._bundle.users
            assert users is not None
            ids = users.ids.arrow()
            for start in range(0, len(users), BLOCK_ROWS):
                stop = min(start + BLOCK_ROWS, len(users))
                where = f"the bundle's users from place {start} on"
                yield where, ids[start:stop], users.block(start, stop)
            return
        for group in self._source.groups:
            table = self._source.table(group, self._names)
            for start in range(0, len(table), BLOCK_ROWS):
                rows = table.slice(start, BLOCK_ROWS)
                where = f"{group.name}, rows from {start} on"
                yield where, _ids(where, self._key, rows[self._key]), rows


def _ids(where: str, name: str, column: pa.ChunkedArray) -> pa.Array:
    """Returns the ids as int64 or as strings."""
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(
            f"{where}: column '{name}' is null {row} rows later; give every row an id"
        )
    ids = column.combine_chunks()
    if pa.types.is_dictionary(ids.type):
        ids = ids.dictionary_decode()
    try:
        return Ids(ids).arrow()
    except BundleError as error:
        raise DataError(f"{where}: column '{name}': {error}") from None
