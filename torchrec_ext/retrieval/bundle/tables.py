"""Tables of a bundle, as memory-mapped Arrow files: users' features by id, items' titles and categories by position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from torchrec_ext.data.preprocess.columns import raw_type
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.store.ids import IdArray, IdMap

_BATCH_ROWS = 65_536
_FEATURES = "features.arrow"
_ITEMS = "items.arrow"
_POSITIONS = ("seen", "liked")
_MOST_MASK_BYTES = 2**26  # memory for the cached masks of categories
_LISTED = 20  # most categories in an error message


class UserTable:
    """Users and their features at the export, so that requests can name a user by id alone.

    Attributes:
        key: request column with the user's id.
        ids: map of ids to rows, 0 to U - 1.
    """

    def __init__(self, key: str, ids: IdMap, features: pa.Table, items: pa.Table) -> None:
        self.key = key
        self.ids = ids
        self._features = features
        self._items = items

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, rows: Sequence[int] | IdArray) -> dict[str, list[Any]]:
        """Returns users' raw columns for ``embed_query``; row -1 is an unknown user.

        Raises:
            ValueError: a row outside -1 to U - 1.
        """
        row_numbers = [int(row) for row in rows]
        for row in row_numbers:
            if not -1 <= row < len(self):
                raise ValueError(
                    f"rows: {row} is not a user of this bundle, which has {len(self):,} (0 to {len(self) - 1})"
                )
        # Slices of the memory-mapped table copy no column. The table's last row is for unknown users.
        slices = [self._features.slice(row if row >= 0 else len(self), 1) for row in row_numbers]
        return pa.concat_tables(slices or [self._features.slice(0, 0)]).to_pydict()  # type: ignore[no-any-return]

    def block(self, start: int, stop: int) -> pa.RecordBatch:
        """Returns the raw columns of the users in rows ``start`` to ``stop - 1``."""
        return self._features.slice(start, stop - start).combine_chunks().to_batches()[0]

    def seen(self, row: int) -> IdArray:
        """Returns positions of the items a user has taken, to leave out of recommendations; none for row -1."""
        return self._list("seen", row)

    def liked(self, row: int) -> IdArray:
        """Returns positions of the items a user has liked, oldest first; none for row -1."""
        return self._list("liked", row)

    def positions(self) -> Iterator[tuple[str, pa.ChunkedArray]]:
        """Yields the names and columns of both lists of positions."""
        yield from ((name, self._items[name]) for name in _POSITIONS)

    def features(self) -> Iterator[tuple[str, pa.ChunkedArray]]:
        """Yields the names and raw columns; their last row is for unknown users."""
        yield from zip(self._features.column_names, self._features.columns, strict=True)

    def _list(self, column: str, row: int) -> IdArray:
        positions = self._items[column][row].values if row >= 0 else None
        if positions is None:
            return np.zeros(0, np.int64)
        return positions.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]

    @classmethod
    def open(cls, folder: Path, key: str) -> UserTable:
        """Opens a folder written by :func:`write_users`.

        Raises:
            BundleError: the files do not fit together.
        """
        ids = IdMap.open(folder)
        features = read_table(folder / _FEATURES)
        items = read_table(folder / _ITEMS)
        if len(features) != len(ids) + 1 or len(items) != len(ids) or tuple(items.column_names) != _POSITIONS:
            raise BundleError(
                f"{folder}: {len(ids):,} ids, {len(features):,} rows of features (one more is for unknown users), "
                f"{len(items):,} of items: they are of different exports; export the bundle again"
            )
        for name in _POSITIONS:
            if raw_type(items.schema.field(name).type) != "list<int64>":
                raise BundleError(
                    f"{folder / _ITEMS}: column '{name}' is {items.schema.field(name).type}, must be lists of "
                    "positions; export the bundle again"
                )
        return cls(key, ids, features, items)


def write_users(
    folder: Path, ids: IdMap, features: pa.Table, unknown: Mapping[str, Any], seen: pa.Array, liked: pa.Array
) -> None:
    """Writes the users of a bundle.

    Args:
        folder: folder to make.
        ids: ids of the U users.
        features: U rows of raw columns.
        unknown: raw columns of an unknown user.
        seen: U lists of positions of items a user has taken.
        liked: U lists of positions of items a user has liked, oldest first.
    """
    folder.mkdir(parents=True)
    ids.save(folder)
    last = pa.table(
        {name: pa.array([unknown[name]], type=features.schema.field(name).type) for name in features.column_names}
    )
    write_table(folder / _FEATURES, pa.concat_tables([features, last]))
    write_table(folder / _ITEMS, pa.table({"seen": seen, "liked": liked}))


class ItemTable:
    """Titles and categories of items, in the order of positions.

    Attributes:
        categories: names, sorted; empty if the export had none.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        column = table["categories"] if "categories" in table.column_names else None
        self._categories: Any = None if column is None else column.combine_chunks()
        names = [] if self._categories is None else pc.unique(self._categories.flatten()).to_pylist()
        self.categories: list[str] = sorted(names)
        self._category_names = frozenset(names)
        # Requests repeat a few sets of categories; a mask takes a byte per item, so the cache is limited by bytes.
        self._mask = lru_cache(max(1, _MOST_MASK_BYTES // max(1, len(table))))(self._in_categories)

    def __len__(self) -> int:
        return len(self._table)

    def titles_of(self, positions: Sequence[int] | IdArray) -> list[str]:
        """Returns the titles of items; an empty list if items have no titles."""
        if "title" not in self._table.column_names:
            return []
        titles = self._table["title"]
        return [str(titles[int(position)].as_py()) for position in positions]

    def in_categories(self, names: Sequence[str]) -> Tensor:
        """Returns (I,) bool, whether an item is in one of some categories.

        Raises:
            ValueError: there is no such category.
        """
        for name in names:
            if name not in self._category_names:
                listed = ", ".join(self.categories[:_LISTED]) or "none"
                raise ValueError(f"{name!r} is not a category of this catalogue; it has {listed}")
        return self._mask(frozenset(names))

    def _in_categories(self, names: frozenset[str]) -> Tensor:
        lists = self._categories
        mask = np.zeros(len(self), bool)
        parents = pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
        inside = pc.is_in(lists.flatten(), value_set=pa.array(sorted(names)))
        mask[parents[inside.to_numpy(zero_copy_only=False)]] = True
        return torch.from_numpy(mask)


def even_rows(rows: int, count: int) -> IdArray:
    """Returns (count,) evenly spaced row numbers, from the first to the last; a short table's rows repeat."""
    positions: IdArray = np.linspace(0, rows - 1, count).round().astype(np.int64)
    return positions


def write_table(path: Path, table: pa.Table) -> None:
    """Writes an uncompressed Arrow file, ready for memory-mapping; equal rows give equal bytes.

    Raises:
        BundleError: a column has a type unknown to requests and batches.
    """
    for field in table.schema:
        if raw_type(field.type) is None:
            raise BundleError(
                f"column '{field.name}' is {field.type}, must be whole numbers, numbers, text or lists of them"
            )
    # Neither metadata nor chunk boundaries of the source may change the bytes, and so the bundle's digest.
    table = table.replace_schema_metadata(None).combine_chunks()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=_BATCH_ROWS)


def read_table(path: Path) -> pa.Table:
    """Opens an Arrow file written by :func:`write_table`, memory-mapped.

    Raises:
        BundleError: the file is damaged, or its columns have other types.
    """
    try:
        with pa.ipc.open_file(pa.memory_map(str(path))) as source:
            table = source.read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BundleError(
            f"{path}: cannot be read as an Arrow file ({error}); export the bundle again, or copy it anew"
        ) from None
    wrong = next((field for field in table.schema if raw_type(field.type) is None), None)
    if wrong is not None:
        raise BundleError(
            f"{path}: column '{wrong.name}' is {wrong.type}, which no bundle has; export the bundle again"
        )
    return table
