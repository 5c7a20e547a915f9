"""Tables of a bundle, as memory-mapped Arrow files: users' features by id, items' titles and attributes by position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.data.preprocess.columns import raw_type
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.store.ids import IdArray, IdMap
from torchrec_ext.schema.validation import did_you_mean, listed

_BATCH_ROWS = 65_536
_FEATURES = "features.arrow"
_ITEMS = "items.arrow"
_POSITIONS = ("seen", "liked")
TITLE = "title"
CATEGORIES = "categories"
_POSITION = "position"
NOT = "not"  # in a filter: ids to leave out
ATTRIBUTE_TYPES = ("int64", "string", "list<int64>", "list<string>")
_MOST_NAMES = 1_000  # most values to search for one with a similar spelling
_DENSE = 64  # a value of 1 in 64 items or more has a bit for every item, others have a list of positions


class UserTable:
    """Users and their features at the export, so that requests can name a user by id alone.

    Attributes:
        key: request column with the user's id.
        ids: map of ids to rows, 0 to U - 1.
    """

    def __init__(
        self, key: str, ids: IdMap, features: pa.Table, items: pa.Table
    ) -> None:
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
        slices = []
        for row in map(int, rows):
            if not -1 <= row < len(self):
                raise ValueError(
                    f"rows: {row} is not a user of this bundle, which has {len(self):,} (0 to {len(self) - 1})"
                )
            # Slices of the memory-mapped table copy no column. The table's last row, -1
            # here, is for unknown users.
            slices.append(self._features.slice(row % len(self._features), 1))
        return pa.concat_tables(slices or [self._features.slice(0, 0)]).to_pydict()  # type: ignore[no-any-return]

    def block(self, start: int, stop: int) -> pa.RecordBatch:
        """Returns the raw columns of the users in rows ``start`` to ``stop - 1``."""
        return (
            self._features.slice(start, stop - start).combine_chunks().to_batches()[0]
        )

    def seen(self, row: int) -> IdArray:
        """Returns positions of the items a user has taken, to leave out of recommendations; none for row -1."""
        return self._list("seen", row)

    def liked(self, row: int) -> IdArray:
        """Returns positions of the items a user has liked, oldest first; none for row -1."""
        return self._list("liked", row)

    def positions(self) -> Iterator[tuple[str, pa.ChunkedArray]]:
        """Yields the names and columns of both lists of positions."""
        for name in _POSITIONS:
            yield name, self._items[name]

    def features(self) -> Iterator[tuple[str, pa.ChunkedArray]]:
        """Yields the names and raw columns; their last row is for unknown users."""
        yield from zip(self._features.column_names, self._features.columns, strict=True)

    def _list(self, column: str, row: int) -> IdArray:
        positions = None
        if row >= 0:
            positions = self._items[column][row].values
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
        if (
            len(features) != len(ids) + 1
            or len(items) != len(ids)
            or tuple(items.column_names) != _POSITIONS
        ):
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
    folder: Path,
    ids: IdMap,
    features: pa.Table,
    unknown: Mapping[str, Any],
    seen: pa.Array,
    liked: pa.Array,
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
    last = {
        field.name: pa.array([unknown[field.name]], type=field.type)
        for field in features.schema
    }
    write_table(folder / _FEATURES, pa.concat_tables([features, pa.table(last)]))
    write_table(folder / _ITEMS, pa.table({"seen": seen, "liked": liked}))


class Attribute:
    """The values of one attribute, such as a genre or a year, and the items with each of them.

    A frequent value has a bit for every item, other values a list of positions. For an item with one value, both take
    12 bytes at most.

    Args:
        column: an int64 or string, or a list of them, for each item; null for none.

    Attributes:
        values: map of the values, ascending, to their numbers.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._size = len(column)
        values: Any = column.combine_chunks()
        owners = np.arange(len(values))
        if hasattr(values.type, "value_type"):
            owners = pc.list_parent_indices(values).to_numpy()
            values = values.flatten()
        is_valid = values.is_valid()
        owners = owners[is_valid.to_numpy(zero_copy_only=False)]
        values = values.filter(is_valid)
        self._type: type[int] | type[str] = str
        if pa.types.is_integer(values.type):
            self._type = int
            values = values.cast(pa.int64())
            distinct = pc.unique(values).sort()
            self.values = IdMap.build(distinct.to_numpy())
        else:
            values = values.cast(pa.large_string())
            distinct = pc.unique(values).sort()
            self.values = IdMap.build(distinct)
        codes = pc.index_in(values, value_set=distinct).to_numpy()
        # The items of value C are those from bound C to bound C + 1.
        self._positions = owners[np.argsort(codes, kind="stable")].astype(np.int32)
        counts = np.bincount(codes, minlength=len(distinct))
        self._bounds = np.cumsum(np.append(0, counts))
        frequent = np.flatnonzero(counts * _DENSE >= self._size).tolist()
        names = self.values.ids(frequent).tolist()
        self._bits = {
            value: self._pack([code])
            for value, code in zip(names, frequent, strict=True)
        }

    def bits(self, values: Sequence[Any]) -> NDArray[np.uint8]:
        """Returns a bit for each item, little-endian: whether it has one of the values.

        Raises:
            ValueError: no item has a value, or a value has another type.
        """
        for value in values:
            # A bool is an int to isinstance.
            if isinstance(value, bool) or not isinstance(value, self._type):
                what = "strings"
                if self._type is int:
                    what = "whole numbers"
                raise ValueError(
                    f"{str(value)[:50]!r} is {type(value).__name__}; its values are {what}"
                )
        rare = [value for value in values if value not in self._bits]
        codes = self.values.positions(rare)
        if codes.min(initial=0) < 0:
            raise ValueError(self._explain(rare[int(codes.argmin())]))
        union = self._pack(codes.tolist())
        for value in values:
            if value in self._bits:
                union |= self._bits[value]
        return union

    def _pack(self, codes: Sequence[int]) -> NDArray[np.uint8]:
        if not codes:
            return np.zeros(-(-self._size // 8), np.uint8)
        mask = np.zeros(self._size, np.bool_)
        for code in codes:
            mask[self._positions[self._bounds[code] : self._bounds[code + 1]]] = True
        return np.packbits(mask, bitorder="little")

    def _explain(self, value: int | str) -> str:
        names = list(
            map(str, self.values.ids(range(min(_MOST_NAMES, len(self.values)))))
        )
        remedy = did_you_mean(
            str(value)[:50], names, f"there are {listed(names) or 'no values'}"
        )
        return f"no item has {str(value)[:50]!r}; {remedy}"


class ItemTable:
    """Titles and attributes of items, in the order of positions."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    @cached_property
    def attributes(self) -> dict[str, Attribute]:
        """Attributes to filter by, by name; a million items take about .1 s each to read."""
        names = [
            name for name in self._table.column_names if name not in (_POSITION, TITLE)
        ]
        return {name: Attribute(self._table[name]) for name in names}

    @property
    def categories(self) -> list[str]:
        """Names of the categories, sorted; empty if the export had none."""
        if CATEGORIES not in self.attributes:
            return []
        return [str(name) for name in self.attributes[CATEGORIES].values.ids()]

    def titles_of(self, positions: Sequence[int] | IdArray) -> list[str]:
        """Returns the titles of items; an empty list if items have no titles."""
        if TITLE not in self._table.column_names:
            return []
        titles = self._table[TITLE]
        return [str(titles[int(position)].as_py()) for position in positions]

    def attribute(self, name: str) -> Attribute:
        """Returns an attribute by its name.

        Raises:
            ValueError: the items have no such attribute.
        """
        if name not in self.attributes:
            names = [*self.attributes, NOT]
            remedy = did_you_mean(
                name[:50], names, f"there are {listed(names)}", cutoff=0.5
            )
            raise ValueError(f"the items have no such attribute; {remedy}")
        return self.attributes[name]


def filterable(features: pa.Table, key: str) -> pa.Table:
    """Returns the columns of items' features that can be attributes: whole numbers, text or lists, without the id."""
    names = []
    for field in features.schema:
        if (
            field.name not in (key, _POSITION, TITLE, CATEGORIES, NOT)
            and raw_type(field.type) in ATTRIBUTE_TYPES
        ):
            names.append(field.name)
    return features.select(names)


def write_items(
    path: Path,
    titles: Sequence[str] | None,
    categories: Sequence[Sequence[str]] | None,
    attributes: pa.Table | None,
    count: int,
) -> None:
    """Writes titles and attributes of ``count`` items.

    Raises:
        BundleError: an attribute has a reserved name, or another type than whole numbers, text or lists of them.
    """
    # A table without any column would have no rows.
    columns: dict[str, Any] = {_POSITION: np.arange(count)}
    if titles is not None:
        columns[TITLE] = pa.array(titles, type=pa.string())
    if categories is not None:
        columns[CATEGORIES] = pa.array(categories, type=pa.list_(pa.string()))
    if attributes is not None:
        for field in attributes.schema:
            if field.name in (*columns, TITLE, NOT):
                raise BundleError(
                    f"catalogue: an attribute cannot have the name '{field.name}'; give it another one"
                )
            if raw_type(field.type) not in ATTRIBUTE_TYPES:
                raise BundleError(
                    f"catalogue: attribute '{field.name}' is {field.type}, must be whole numbers, text or lists of them"
                )
        columns |= dict(zip(attributes.column_names, attributes.columns, strict=True))
    write_table(path, pa.table(columns))


def even_rows(rows: int, count: int) -> IdArray:
    """Returns (count,) evenly spaced row numbers, from the first to the last; a short table's rows repeat."""
    positions: IdArray = np.linspace(0, rows - 1, count).round().astype(np.int64)
    return positions


def raw_column_type(field: pa.Field) -> str:
    """Returns the raw type of a column.

    Raises:
        BundleError: requests and batches know no such type.
    """
    kind = raw_type(field.type)
    if kind is None:
        raise BundleError(
            f"column '{field.name}' is {field.type}, must be whole numbers, numbers, text or lists of them"
        )
    return kind


def write_table(path: Path, table: pa.Table) -> None:
    """Writes an uncompressed Arrow file, ready for memory-mapping; equal rows give equal bytes.

    Raises:
        BundleError: a column has a type unknown to requests and batches.
    """
    for field in table.schema:
        raw_column_type(field)
    # Neither metadata nor chunk boundaries of the source may change the bytes, and so
    # the bundle's digest.
    table = table.replace_schema_metadata(None).combine_chunks()
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=_BATCH_ROWS)


def read_table(path: Path) -> pa.Table:
    """Opens an Arrow file written by :func:`write_table`, memory-mapped.

    Raises:
        BundleError: the file is damaged, or its columns have other types.
    """
    try:
        with pa.ipc.open_file(pa.memory_map(str(path))) as source:
            table = source.read_all()
        # In full, because offsets of a damaged file may point beyond its values.
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BundleError(
            f"{path}: cannot be read as an Arrow file ({error}); export the bundle again, or copy it anew"
        ) from None
    for field in table.schema:
        if raw_type(field.type) is None:
            raise BundleError(
                f"{path}: column '{field.name}' is {field.type}, which no bundle has; export the bundle again"
            )
    return table
