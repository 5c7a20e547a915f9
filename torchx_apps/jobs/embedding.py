"""Runs one side of a bundle over rows, those of parquet files or the bundle's users, into a store of vectors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.retrieval.bundle import Bundle, Side
from torchrec_ext.retrieval.catalogue import Ids
from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.store import Block
from torchrec_ext.schema.validation import DataError

# Rows of a block; a fixed size, because vectors may depend on it in the last bits.
BLOCK_ROWS = 4096


class Rows(NamedTuple):
    """Rows to embed: their number, and blocks of them, each with the name of its place and its ids."""

    total: int
    blocks: Iterator[tuple[str, pa.Array, pa.Table]]


def rows_of_files(side: Side, catalogue: Sequence[str], key: str) -> Rows:
    """Returns the rows of parquet files that have the raw columns of a bundle's side.

    Args:
        side: the side that embeds them.
        catalogue: files, folders, patterns or addresses.
        key: name of the column with the ids.

    Raises:
        DataError: there is no file, none is parquet, or one lacks a column.
    """
    source = ParquetSource(catalogue)
    names = list(dict.fromkeys([key, *side.columns.raw]))
    source.require({key: ("int", "string")})
    for name in names:
        for file in range(len(source.files)):
            source.type_of(name, file)

    def blocks() -> Iterator[tuple[str, pa.Array, pa.Table]]:
        for group in source.groups:
            table = source.table(group, names)
            for start in range(0, len(table), BLOCK_ROWS):
                rows = table.slice(start, BLOCK_ROWS)
                where = f"{group.name}, rows from {start} on"
                yield where, _ids(where, key, rows[key]), rows

    return Rows(source.num_rows, blocks())


def rows_of_users(bundle: Bundle, side: str) -> Rows:
    """Returns the users that a bundle knows.

    Raises:
        ValueError: it does not know the columns of this side.
    """
    users = bundle.users
    known = users.features(-1) if users is not None and side == "query" else {}
    # A bundle has no context of a request, such as its time.
    if users is None or not known.keys() >= {*bundle.query.columns.raw}:
        raise ValueError(
            f"--catalogue: name the parquet files with the rows of the {side} side; the bundle does not know them"
        )

    def blocks() -> Iterator[tuple[str, pa.Array, pa.Table]]:
        ids = users.ids.arrow()
        for start in range(0, len(users), BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, len(users))
            where = f"the bundle's users from place {start} on"
            yield where, ids[start:stop], users.block(start, stop)

    return Rows(len(users), blocks())


def embedded(side: Side, rows: Rows, unknown: Counter[str]) -> Iterator[Block]:
    """Yields the ids and vectors of each block; counts rows with a value unknown to training, by column.

    Raises:
        DataError: a file is damaged, a row has no id, or a value cannot be taken; the message names the place.
    """
    for where, ids, table in rows.blocks:
        try:
            read = side.columns.read(table)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        for name, mask in read.unknown.items():
            unknown[name] += int(mask.sum())
        yield ids, side(read.columns)


def _ids(where: str, name: str, column: pa.ChunkedArray) -> pa.Array:
    """Returns the ids as int64 or as strings."""
    try:
        return Ids(column).arrow()
    except BundleError as error:
        raise DataError(f"{where}: column '{name}': {error}") from None
