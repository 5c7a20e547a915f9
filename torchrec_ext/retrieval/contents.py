"""What an export is given beside the model: the items that can be recommended, and what is known of users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from torchrec_ext.retrieval.errors import BundleError


@dataclass(frozen=True, kw_only=True, eq=False)
class Catalogue:
    """The items that can be recommended, I of them; their order is that of the positions.

    Args:
        ids: (I,) int64 or str, what their owner calls them.
        features: I rows with the raw columns of the candidate tower.
        titles: (I,) for display.
        categories: (I,) lists of names to filter by.
        trained: ids that stand in the training rows, each of which must be among ``ids``.
    """

    ids: NDArray[Any]
    features: pa.Table
    titles: Sequence[str] | None = None
    categories: Sequence[Sequence[str]] | None = None
    trained: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        sizes = {"features": len(self.features), "titles": self.titles, "categories": self.categories}
        for name, found in sizes.items():
            count = found if isinstance(found, int) else None if found is None else len(found)
            if count is not None and count != len(self.ids):
                raise BundleError(f"catalogue: {count:,} {name} for {len(self.ids):,} ids; give one for each item, in their order")
        if not len(self.ids):
            raise BundleError("catalogue: has no items; give the rows that can be recommended")


@dataclass(frozen=True, kw_only=True, eq=False)
class Users:
    """What is known of U users, so that a request may name one by id alone.

    Args:
        key: the column of a request that holds the user's id, whether a tower reads it or not.
        ids: (U,).
        features: U rows with raw columns of the query towers; those of a request are put over them.
        unknown: one row, for an id that is not among them.
        seen: (U,) lists of the positions of items that each has taken.
        liked: (U,) lists of the positions of items that each has liked, oldest first, for display.
    """

    key: str
    ids: NDArray[Any]
    features: pa.Table
    unknown: Mapping[str, Any]
    seen: pa.Array
    liked: pa.Array

    def __post_init__(self) -> None:
        for name in ("features", "seen", "liked"):
            if len(getattr(self, name)) != len(self.ids):
                raise BundleError(f"users: {len(getattr(self, name)):,} {name} for {len(self.ids):,} ids; give one for each user")
        missing = [name for name in self.features.column_names if name not in self.unknown]
        if missing:
            raise BundleError(f"users: unknown lacks {missing}; give one value for each column of features")
