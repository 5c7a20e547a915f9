"""Catalogue and users of a bundle: ids, titles, attributes to filter by, and what is known of each user.

Both are memory-mapped Arrow files: items by position, users by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.data.preprocess.columns import raw_type
from torchrec_ext.retrieval.manifest import ANEW, BundleError
from torchrec_ext.schema.validation import listed

IdArray = NDArray[np.int64]
Id = int | str
ITEMS = "items.arrow"
USERS = "users.arrow"
SEEN = "seen.arrow"
ID = "id"
TITLE = "title"
NOT = "not"  # in a filter: ids to leave out
_RESERVED = (ID, TITLE, NOT)
ATTRIBUTE_TYPES = ("int64", "string", "list<int64>", "list<string>")
_SEEN = "__seen__"
_USER = "__id__"
_BATCH_ROWS = 65_536
_MOST_NAMES = 20  # most values in a message


@dataclass(frozen=True, kw_only=True, eq=False)
class Catalogue:
    """The I items to recommend from, in the order of their positions.

    Args:
        ids: (I,) int64 or str ids.
        features: I rows with the raw columns of the candidate tower.
        titles: (I,) titles for display, or None.
        attributes: I rows of columns to filter by: whole numbers, text or lists of them; None for none.
    """

    ids: NDArray[Any]
    features: pa.Table
    titles: Sequence[str] | None = None
    attributes: pa.Table | None = None

    def __post_init__(self) -> None:
        names = ("features", "titles", "attributes")
        _check_lengths(
            "catalogue", vars(self), names, "give one for each item, in their order"
        )
        if not len(self.ids):
            raise BundleError(
                "catalogue: has no items; give the rows that can be recommended"
            )

    def write(self, folder: Path) -> None:
        """Writes the items of a bundle: ids, titles and attributes.

        Raises:
            BundleError: an id is there twice; an attribute has a reserved name or a type that no filter takes.
        """
        columns: dict[str, Any] = {ID: Ids(self.ids).arrow()}
        if self.titles is not None:
            columns[TITLE] = pa.array(self.titles, type=pa.string())
        attributes = pa.table({}) if self.attributes is None else self.attributes
        for field in attributes.schema:
            if field.name in columns or field.name in _RESERVED:
                raise BundleError(
                    f"catalogue: an attribute cannot have the name '{field.name}'; give it another one"
                )
            if raw_type(field.type) not in ATTRIBUTE_TYPES:
                raise BundleError(
                    f"catalogue: attribute '{field.name}' is {field.type}, must be whole numbers, text or lists of them"
                )
            columns[field.name] = attributes[field.name]
        write_table(folder / ITEMS, pa.table(columns))


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedUsers:
    """U users with their features and items, so that requests can name a user by id alone.

    Args:
        key: request column with the user's id, whether a tower reads it or not.
        ids: (U,) int64 or str ids.
        features: U rows with raw columns of the query towers; a request's own values take precedence.
        unknown: raw columns of an unknown user.
        seen_ids: (U,) lists of ids of the items a user has taken, oldest first: recommendations leave them out. Ids
            that the catalogue lacks say nothing. None if nobody's are known.
    """

    key: str
    ids: NDArray[Any]
    features: pa.Table
    unknown: Mapping[str, Any]
    seen_ids: pa.Array | None = None

    def __post_init__(self) -> None:
        names = ("features", "seen_ids")
        _check_lengths("users", vars(self), names, "give one for each user")
        missing = [
            name for name in self.features.column_names if name not in self.unknown
        ]
        if missing:
            raise BundleError(
                f"users: unknown lacks {missing}; give one value for each column of features"
            )

    def write(self, folder: Path, items: NDArray[Any]) -> None:
        """Writes the users of a bundle of ``items``, (I,) ids; the last row is the user of whom nothing is known.

        What they took is a file of its own: the digest of the other one is that of their features.

        Raises:
            BundleError: ids of users are there twice, or those of their items are of another type.
        """
        table = self.features.add_column(0, _USER, Ids(self.ids).arrow())
        table = table.replace_schema_metadata(None)
        last = {
            field.name: pa.array([self.unknown.get(field.name)], field.type)
            for field in table.schema
        }
        write_table(folder / USERS, pa.concat_tables([table, pa.table(last)]))
        write_table(folder / SEEN, pa.table({_SEEN: self._seen(Ids(items))}))

    def _seen(self, items: Ids) -> pa.Array:
        """Returns (U,) lists of positions of the items that users have taken."""
        owners = positions = np.zeros(0, np.int64)
        if self.seen_ids is not None:
            flat = pc.list_flatten(self.seen_ids)
            # SQL's list() of a LEFT JOIN has a null for a user without items.
            is_id = flat.is_valid()
            owners = pc.list_parent_indices(self.seen_ids).filter(is_id).to_numpy()
            flat = flat.filter(is_id)
            numbers = pa.types.is_integer(flat.type)
            try:
                positions = items.positions(
                    flat.cast(pa.int64()).to_numpy() if numbers else flat.to_pylist()
                )
            except ValueError as error:
                raise BundleError(f"users: seen_ids: {error}") from None
        is_there = positions >= 0
        counts = np.bincount(owners[is_there], minlength=len(self.ids))
        ends = np.concatenate([[0], np.cumsum(counts)])
        return pa.ListArray.from_arrays(
            pa.array(ends, pa.int32()), pa.array(positions[is_there], pa.int32())
        )


def _check_lengths(
    owner: str, values: Mapping[str, Any], names: Sequence[str], remedy: str
) -> None:
    count = len(values["ids"])
    for name in names:
        if values[name] is not None and len(values[name]) != count:
            raise BundleError(
                f"{owner}: {len(values[name]):,} {name} for {count:,} ids; {remedy}"
            )


class Ids:
    """Maps ids, int64 or str, to *positions*, the rows 0 to I - 1 of a catalogue, and back.

    Integers are looked up by bisection. Strings are keys of a dict.

    Args:
        ids: the id of each position.

    Raises:
        BundleError: ids of another type than whole numbers or text, a missing id, or an id at two positions.

    Example:
        >>> ids = Ids(np.array([30, 10, 20]))
        >>> ids.positions([10, 99]).tolist(), ids.ids([0, 2])
        ([1, -1], [30, 20])
    """

    def __init__(self, ids: NDArray[Any] | Sequence[Id] | pa.Array) -> None:
        values: Any = ids
        if not isinstance(ids, pa.Array | pa.ChunkedArray):
            try:
                values = pa.array(ids)
            except (pa.ArrowException, OverflowError) as error:
                raise BundleError(
                    f"ids: {str(error)[:80]}; give whole numbers of 64 bits, or strings"
                ) from None
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        kind = raw_type(values.type)
        if kind not in ("int64", "string") or values.null_count:
            raise BundleError(
                f"ids: are {values.type} with {values.null_count} nulls; give whole numbers of 64 bits, or strings"
            )
        self.kind = kind if kind == "int64" else "str"
        if self.kind == "int64":
            self._numbers: IdArray = values.cast(pa.int64()).to_numpy()
            self._order: IdArray | None = None
            self._sorted = self._numbers
            # Ascending ids are their own index.
            if not (self._sorted[1:] > self._sorted[:-1]).all():
                self._order = np.argsort(self._numbers)
                self._sorted = self._numbers[self._order]
            twice = self._sorted[1:][self._sorted[1:] == self._sorted[:-1]]
        else:
            self._strings = values.cast(pa.large_string())
            texts = self._strings.to_pylist()
            self._places = dict(zip(texts, range(len(texts)), strict=True))
            # The dict has the last place of each.
            twice = [text for i, text in enumerate(texts) if self._places[text] != i]
        if len(twice):
            raise BundleError(
                f"ids: {str(twice[0])[:60]!r} is there more than once; give each id once"
            )

    def __len__(self) -> int:
        return len(self._numbers if self.kind == "int64" else self._strings)

    def arrow(self) -> pa.Array:
        """Returns all ids as an Arrow array."""
        return pa.array(self._numbers) if self.kind == "int64" else self._strings

    def positions(self, ids: Sequence[Id]) -> IdArray:
        """Returns (N,) int64 positions of ids, -1 for an unknown one.

        Raises:
            ValueError: ids of another type than the catalogue's.
        """
        if not len(ids):
            return np.zeros(0, np.int64)
        if self.kind == "str":
            for each in ids:
                if not isinstance(each, str):
                    raise ValueError(
                        f"{str(each)[:100]!r} is no string; ids here are strings"
                    )
            places = map(self._places.get, ids, repeat(-1))
            return np.fromiter(places, np.int64, len(ids))
        # Without a look at each value, which would take longer than the array.
        try:
            numbers = np.array(ids)
        except (OverflowError, ValueError):
            numbers = np.array(None)
        if numbers.dtype != np.int64 or numbers.ndim != 1:
            wrong = next((each for each in ids if type(each) is not int), ids[0])
            raise ValueError(
                f"{str(wrong)[:100]!r} is no whole number of 64 bits; ids here are whole numbers"
            )
        if not len(self._sorted):
            return np.full(len(numbers), -1, np.int64)
        index = np.searchsorted(self._sorted, numbers)
        # An id beyond the end is compared with the one there, and differs.
        found = self._sorted.take(index, mode="clip") == numbers
        if self._order is not None:
            index = self._order.take(index, mode="clip")
        return np.where(found, index, -1)

    def ids(self, positions: IdArray | Sequence[int]) -> list[Id]:
        """Returns the ids at positions (N,)."""
        rows = np.asarray(positions, np.int64)
        if self.kind == "int64":
            return self._numbers[rows].tolist()  # type: ignore[no-any-return]
        return self._strings.take(pa.array(rows)).to_pylist()  # type: ignore[no-any-return]


class Attribute:
    """The values of one attribute, such as a genre or a year, and the positions of the items with each of them.

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
        distinct = pc.unique(values).sort()
        self.values = Ids(distinct)
        codes = pc.index_in(values, value_set=distinct).to_numpy()
        # The items of value C are those from bound C to bound C + 1.
        self._positions = owners[np.argsort(codes, kind="stable")].astype(np.int32)
        counts = np.bincount(codes, minlength=len(distinct))
        self._bounds = np.cumsum(np.append(0, counts))

    def mask(self, values: Sequence[Any]) -> NDArray[np.bool_]:
        """Returns (I,) whether an item has one of the values.

        Raises:
            ValueError: no item has a value, or a value has another type.
        """
        codes = self.values.positions(values)
        if codes.min(initial=0) < 0:
            value = str(values[int(codes.argmin())])[:50]
            some = map(str, self.values.ids(range(min(_MOST_NAMES, len(self.values)))))
            raise ValueError(
                f"no item has {value!r}; there are {listed(some) or 'no values'}"
            )
        mask = np.zeros(self._size, np.bool_)
        for code in codes.tolist():
            mask[self._positions[self._bounds[code] : self._bounds[code + 1]]] = True
        return mask


class ItemTable:
    """Ids, titles and attributes of items, in the order of positions.

    Args:
        table: a row for each item.

    Attributes:
        ids: map of the ids to positions.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.ids = Ids(table[ID])

    def __len__(self) -> int:
        return len(self._table)

    @classmethod
    def open(cls, folder: Path) -> ItemTable:
        """Opens the items of a bundle; raises BundleError if they are damaged."""
        return cls(read_table(folder / ITEMS))

    @cached_property
    def attributes(self) -> dict[str, Attribute]:
        """Attributes to filter by, by name; a million items take about .1 s each to read."""
        names = [name for name in self._table.column_names if name not in _RESERVED]
        return {name: Attribute(self._table[name]) for name in names}

    def titles_of(self, positions: Sequence[int] | IdArray) -> list[str]:
        """Returns the titles of items; an empty list if items have no titles."""
        if TITLE not in self._table.column_names:
            return []
        # An item may have none.
        rows = pa.array(positions, pa.int64())
        return self._table[TITLE].take(rows).fill_null("").to_pylist()  # type: ignore[no-any-return]


class UserTable:
    """Users and their features at the export, so that requests can name a user by id alone.

    Attributes:
        key: request column with the user's id.
        ids: map of ids to rows, 0 to U - 1.
    """

    def __init__(self, key: str, table: pa.Table, seen: pa.ChunkedArray) -> None:
        self.key = key
        self._seen = seen
        self._features = table.drop_columns([_USER])
        # The last row is for unknown users.
        self.ids = Ids(table[_USER].slice(0, len(table) - 1))

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def open(cls, folder: Path, key: str) -> UserTable:
        """Opens the users of a bundle; raises BundleError if they are damaged."""
        return cls(key, read_table(folder / USERS), read_table(folder / SEEN)[_SEEN])

    def features(self, row: int) -> dict[str, Any]:
        """Returns a user's raw columns; row -1 is the unknown user's."""
        # A slice of the memory-mapped table copies no column.
        return self._features.slice(row % len(self._features), 1).to_pylist()[0]  # type: ignore[no-any-return]

    def block(self, start: int, stop: int) -> pa.Table:
        """Returns the raw columns of the users in rows ``start`` to ``stop - 1``."""
        return self._features.slice(start, stop - start)

    def seen(self, row: int) -> IdArray:
        """Returns positions of the items a user has taken, oldest first; none for row -1."""
        positions = self._seen[row].values if row >= 0 else None
        if positions is None:
            return np.zeros(0, np.int64)
        return positions.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def filterable(features: pa.Table, key: str) -> pa.Table:
    """Returns the columns of items' features that can be attributes: whole numbers, text or lists, without the id."""
    names = []
    for field in features.schema:
        if (
            field.name not in (key, *_RESERVED)
            and raw_type(field.type) in ATTRIBUTE_TYPES
        ):
            names.append(field.name)
    return features.select(names)


def even_rows(rows: int, count: int) -> IdArray:
    """Returns (count,) evenly spaced row numbers, from the first to the last; a short table's rows repeat."""
    positions: IdArray = np.linspace(0, rows - 1, count).round().astype(np.int64)
    return positions


def raw_types(table: pa.Table) -> dict[str, str]:
    """Returns the raw type of each column.

    Raises:
        BundleError: a column has a type unknown to requests and batches.
    """
    types = {}
    for field in table.schema:
        kind = raw_type(field.type)
        if kind is None:
            raise BundleError(
                f"column '{field.name}' is {field.type}, must be whole numbers, numbers, text or lists of them"
            )
        types[field.name] = kind
    return types


def write_table(path: Path, table: pa.Table) -> None:
    """Writes an uncompressed Arrow file, ready for memory-mapping; equal rows give equal bytes.

    Raises:
        BundleError: see :func:`raw_types`.
    """
    raw_types(table)
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
        why = str(error).splitlines()[0][:80]
        raise BundleError(
            f"{path}: cannot be read as an Arrow file ({why}); {ANEW}"
        ) from None
    return table
