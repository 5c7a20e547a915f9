"""DataConfig: settings that say which data to load; Roles: the special columns of rows.

This module imports neither torch nor what reads files, so that a command line is checked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchrec_ext.schema.validation import check_least

PLANTED = "planted"
# The parts of a data set, in the order of time where there is one.
PARTS = ("train", "validation", "test")
# What a recipe reads of a set: the rows with label 1, to draw negatives for; rows with
# labels; or items in order, of which each is predicted from those before.
Form = Literal["pairs", "labels", "sessions"]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The special columns of preprocessed rows, beside their features.

    All that is neither the user's nor the item's is context, which is known before the item is.

    Args:
        label: column of the labels, 0 to 1, which a recipe learns where it is kept; empty if every row is a positive.
        tasks: further columns of labels, such as the conversion beside the click, which the recipe ``multi_task``
            learns together with the label.
        weight: column of a weight for each row, or None.
        user: column of the users' ids, or None.
        item: column of the items' ids, or None; with both the catalogue is ranked.
        user_features: further columns that are the user's, beside those whose names begin with ``user_`` and the
            user's own histories.
        item_features: further columns that are the item's, beside those whose names begin with ``item_``.
    """

    label: str = ""
    tasks: Sequence[str] = ()
    weight: str | None = None
    user: str | None = None
    item: str | None = None
    user_features: Sequence[str] = ()
    item_features: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the set to load: a prepared folder, a folder as it stands, or a set by its name.

    Args:
        name: folder that ``rec.data.preprocess --out`` wrote, its path or its name in ``data.folder``; a folder of your
            own as it stands, with inter.parquet, or train.parquet and test.parquet (docs/recipes.md); or ``planted``,
            generated rows.
        folder: folder of sets, each in a folder of its own name; ``$TORCHREC_EXT_DATA`` where not given.
        ranked: greatest number of held-out rows with label 1 for whose user the whole catalogue is ranked, evenly
            spread over all of them, where the recipe learns labels and the set has users and items; 0 ranks nothing.
        history_length: greatest number of a user's earlier items in a row of a folder as it stands, and of a session's.
            A prepared folder has the histories of its preprocessing.
        users: number of users to generate; the generator's default where not given.
        items: number of items to generate, in the same way.
        seed: seed of the generator.
    """

    name: str = PLANTED
    folder: str | None = None
    ranked: int = 10_000
    history_length: int = 50
    users: int | None = None
    items: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_least("data.ranked", self.ranked, 0)
        check_least("data.history_length", self.history_length, 0)
        for key, value in self.generated_sizes().items():
            if self.name != PLANTED:
                raise ValueError(
                    f"data.{key}={value}: {self.name} has its own; leave it out, or choose data.name={PLANTED}"
                )
            check_least(f"data.{key}", value)

    def generated_sizes(self) -> dict[str, int]:
        """Returns the numbers of users and items that are set; others are the generator's."""
        sizes = {"users": self.users, "items": self.items}
        return {key: size for key, size in sizes.items() if size is not None}
