"""DataConfig, LabelledConfig, SequenceConfig, StreamConfig: settings that say which data to load; folders' layouts.

This module imports neither torch nor what reads files, so that a command line is checked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torchrec_ext.schema.validation import check_choice, check_least

NAMES = ("ml-100k", "ml-1m-ncf", "planted", "checkerboard")
GENERATED = ("planted", "checkerboard")
PLANTED = "planted"
# The parts of a data set, in the order of time where there is one.
PARTS = ("train", "validation", "test")
Split100K = Literal["last_item", "recbole", "tfrs"]
LAYOUTS = (
    "inter.parquet (user_id, item_id, timestamp: the last item of each user is for test), or train.parquet and "
    "test.parquet (user, item), with validation.parquet where it is given and with test_negatives.parquet (user, "
    "negative) where each test item is ranked among its own candidates, or the text files NAME.train.rating, "
    "NAME.test.rating and NAME.test.negative of the NCF paper, or train.txt and test.txt of LightGCN (user item item "
    "... in a line); with users.parquet (user, ...) and items.parquet (item, ...) where more is known of them, and "
    "columns of context beside the pairs, named in data.context; or what rec.data.preprocess wrote, whose label says "
    "what is a positive. Ids are whole numbers or text, times numbers or dates; a missing feature is unknown"
)
LABELLED_LAYOUT = (
    "train.parquet, validation.parquet and test.parquet, with the columns label (0 or 1), user and item where there "
    "are such and, of any other name, the context: text and whole numbers are ids, of which those of the training rows "
    "are known, dates become their hour, weekday or month, fractions are dense columns, a missing value is unknown; "
    "columns whose names begin with user_ or user. are the user's and those that begin with item_ or item. the item's, "
    "as are all columns of users.parquet (user, ...) and items.parquet (item, ...) there; or what rec.data.preprocess "
    "wrote"
)
SEQUENCES_LAYOUT = (
    "one file *sequences.parquet or inter.parquet with a row per event: user (or user_id), item (or item_id), and "
    "position, timestamp or time; ids are whole numbers or text, times numbers or dates; with test_negatives.parquet "
    "(user, negative) beside it where each user's test item is ranked among candidates of its own, and "
    "validation_negatives.parquet for the validation item"
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the set of interactions to load.

    Args:
        name: ``ml-100k``, ``ml-1m-ncf``, generated data (``planted``, ``checkerboard``), or the name of a folder of
            your own in one of the layouts of :data:`LAYOUTS`.
        history_length: greatest number of the user's earlier items in a row. What ``rec.data.preprocess`` wrote has
            the histories that its recipe made.
        folder: folder of real sets, each in a folder of its own name; ``$TORCHREC_EXT_DATA`` where not given.
        offline: never download.
        users: number of users to generate; the generator's default where not given. For generated sets only.
        items: number of items to generate, in the same way.
        seed: seed of the generator, and of the rows held out for validation where no time says which.
        split: split of ml-100k: ``last_item`` of each user for test and the one before it for validation; ``recbole``,
            the default of RecBole 1.2.1, all held-out items of a user found in one ranking; ``tfrs``, a random fifth
            for test, ranked among all titles, those that the user has taken before too, as in TensorFlow Recommenders'
            tutorial.
        context: columns of the interactions in a folder of your own that say in what context an item was taken, such as
            ``hour,device``, and are known when a recommendation is asked for: a rating is not. Text and whole numbers
            become ids, dates those of their hour, weekday or month, fractions numbers; negatives have the context of
            their positive. All recipes but ``session`` read them. What ``rec.data.preprocess`` wrote has its own.
        validation: hold rows out for validation; False trains on them, for a last run with settings chosen before. For
            ``ml-1m-ncf`` and folders like it, and ``tfrs``.
    """

    name: str = field(
        default="ml-100k",
        metadata={
            "doc": "ml-100k, ml-1m-ncf, generated data (planted, checkerboard), or the name of a folder of your own. "
            f"Such a folder has {LAYOUTS}."
        },
    )
    history_length: int = 50
    folder: str | None = None
    offline: bool = False
    users: int | None = None
    items: int | None = None
    seed: int = 0
    split: Split100K = "last_item"
    context: tuple[str, ...] = ()
    validation: bool = True

    def __post_init__(self) -> None:
        check_choice("data.split", self.split, get_args(Split100K))
        # Of the other sets, times or a file say which rows are held out.
        if not self.validation and (
            self.name in GENERATED or (self.name == "ml-100k" and self.split != "tfrs")
        ):
            raise ValueError(
                f"data.validation=False: {self.name} split by {self.split} always has validation rows; leave it out"
            )
        if self.split != "last_item" and self.name != "ml-100k":
            raise ValueError(
                f"data.split={self.split!r}: a split of ml-100k; leave it out with data.name={self.name}, and write a "
                "split of your own as train, validation and test.parquet"
            )
        if self.context and self.name in NAMES:
            raise ValueError(
                f"data.context={','.join(self.context)}: of a folder of your own; the rows of {self.name} have none: "
                "leave it out"
            )
        check_least("data.history_length", self.history_length, 0)
        _check_sizes(self, GENERATED)


@dataclass(frozen=True, kw_only=True)
class LabelledConfig:
    """Settings of the labelled rows to load.

    Args:
        name: ``frappe``, generated data (``planted``), or the name of a folder of your own in the same layout
            (:data:`LABELLED_LAYOUT`).
        context: read the context; False gives every row the same context, id 0 and 0.0, to see what the model can do
            without it.
        user_features: further columns of the rows that describe the user and not the event.
        item_features: further columns of the rows that describe the item, such as the shown item's ``price``: the item
            tower reads them, a bundle stores those of each item's last training row, and requests do not give them.
        folder: folder of real sets, each in a folder of its own name; ``$TORCHREC_EXT_DATA`` where not given.
        seed: seed of generated data.
    """

    name: str = field(
        default="frappe",
        metadata={
            "doc": "frappe, generated data (planted), or the name of a folder of your own. Such a folder has "
            f"{LABELLED_LAYOUT}."
        },
    )
    context: bool = True
    user_features: tuple[str, ...] = ()
    item_features: tuple[str, ...] = ()
    folder: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if both := sorted(set(self.user_features) & set(self.item_features)):
            raise ValueError(
                f"data.user_features and data.item_features name {both[0]}: a column describes one of the two"
            )
        for key in ("user_features", "item_features"):
            if getattr(self, key) and self.name == PLANTED:
                raise ValueError(
                    f"data.{key}: of a folder of your own; the rows of {PLANTED} have none: leave it out"
                )


@dataclass(frozen=True, kw_only=True)
class SequenceConfig:
    """Settings of the set of sequences to load.

    Args:
        name: name of the folder of a set, such as ``amazon-beauty-sequences``, which holds one file as in
            :data:`SEQUENCES_LAYOUT`; or ``planted``, generated data.
        max_length: S, the greatest number of items, the most recent ones, that a model reads before its target.
        test_items: number of a user's last items that are for test, found in one ranking after all items before them;
            as many before these are for validation. A user with fewer than twice as many and one is trained on alone.
        folder: folder of the sets, each in a folder of its own name; ``$TORCHREC_EXT_DATA`` where not given.
        users: number of users to generate; for generated data only.
        items: number of items to generate; for generated data only.
        seed: seed of the generator.
    """

    name: str = field(
        default="amazon-beauty-sequences",
        metadata={
            "doc": "amazon-beauty-sequences, generated data (planted), or the name of a folder of your own. Such a "
            f"folder has {SEQUENCES_LAYOUT}."
        },
    )
    max_length: int = 50
    test_items: int = 1
    folder: str | None = None
    users: int | None = None
    items: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("max_length", "test_items"):
            check_least(f"data.{key}", getattr(self, key))
        _check_sizes(self, (PLANTED,))


def generated_sizes(config: DataConfig | SequenceConfig) -> dict[str, int]:
    """Returns the numbers of users and items that are set; others are the generator's."""
    sizes = {"users": config.users, "items": config.items}
    return {key: size for key, size in sizes.items() if size is not None}


def _check_sizes(config: DataConfig | SequenceConfig, generated: Sequence[str]) -> None:
    """Refuses numbers of users and items of a set that is not generated, and numbers below 1."""
    for key, value in generated_sizes(config).items():
        if config.name not in generated:
            raise ValueError(
                f"data.{key}={value}: {config.name} has its own; leave it out, or choose data.name={PLANTED}"
            )
        check_least(f"data.{key}", value)


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Settings of the preprocessed rows to read while they train.

    Args:
        name: folder that ``rec.data.preprocess --out`` wrote, its path or its name in ``data.folder``; or ``planted``,
            generated rows.
        folder: folder of preprocessed sets, each in a folder of its own name; ``$TORCHREC_EXT_DATA`` where not given.
        ranked: greatest number of held-out rows with label 1 for whose user the whole catalogue is ranked, evenly
            spread over all of them, where the preprocessing names the columns of user and item; 0 ranks nothing.
        seed: seed of generated data.
    """

    name: str = PLANTED
    folder: str | None = None
    ranked: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_least("data.ranked", self.ranked, 0)
