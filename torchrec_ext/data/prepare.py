"""write_set(): raw rows in memory -> a prepared folder, as rec.data.preprocess writes one; every set is such a folder.

RawSet: rows as files have them, by split, with the role of each column.

Steps follow a column's type: text and whole numbers become ids, fractions numbers, times their hour or weekday.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.config import PARTS
from torchrec_ext.data.features import (
    RawColumns,
    owned_columns,
)
from torchrec_ext.data.files.arrow import as_arrow, is_list_type
from torchrec_ext.data.known import KnownWriter, known_path
from torchrec_ext.data.preprocess import (
    Categorify,
    FillMissing,
    FittedPreprocessor,
    Lists,
    Normalize,
    Step,
    TimeFeatures,
    Vocabulary,
)
from torchrec_ext.data.preprocess.columns import raw_type
from torchrec_ext.data.preprocess.times import Feature
from torchrec_ext.schema import DataError

# The folder that `rec.data.preprocess` writes next to the rows.
PREPROCESSOR = "preprocessor"
SUMMARY = "summary.json"
# Some training rows as a request has them.
RAW_REQUESTS = "raw/requests.parquet"
# A row for each item, its columns as in the log.
RAW_ITEMS = "raw/items.parquet"
# A row for each user: the user's columns and latest events as a request has them.
RAW_USERS = "raw/users.parquet"
# The number of positive training rows of each row of the items' table.
RAW_POPULARITY = "raw/popularity.parquet"
# Column of the items before a row's item, in a set of sessions.
SESSION = "session"
# Rows of a row group of a set in memory: a small set still has several groups.
_GROUP_ROWS = 8_192
# Rows to transform at once.
_ROWS_AT_ONCE = 8 * _GROUP_ROWS
# Requests that are kept for an export, which compares its answers with the live model.
_REQUESTS = 1_000
_DAY = 86_400_000_000
OF_TIMES: tuple[Feature, ...] = ("hour", "weekday")
OF_DATES: tuple[Feature, ...] = ("weekday", "month")
# Numbers above this are no seconds since 1970 of a date before the year 5000.
_MILLISECONDS = (10**11, 10**14)

_Figure = Literal["hr", "recall", "ndcg", "mrr"]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The special columns of preprocessed rows, beside their features.

    Args:
        label: column of the labels, 0 to 1; empty if every row is a positive.
        tasks: further columns of labels, of tasks that are learned together with the label.
        weight: column of a weight for each row, or None.
        user: column of the users' ids, or None.
        item: column of the items' ids, or None.
        user_features: further columns that are the user's, beside those whose names begin with ``user_``.
        item_features: further columns that are the item's, beside those whose names begin with ``item_``.
    """

    label: str
    tasks: Sequence[str] = ()
    weight: str | None = None
    user: str | None = None
    item: str | None = None
    user_features: Sequence[str] = ()
    item_features: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The rule of a ranking, the same for the model and for what stands beside it.

    Ranked are the items of the training rows. A held-out item that is not among them counts as missed.

    Args:
        at: cut-offs K of the ranking.
        figures: figures to compute, of ``hr``, ``recall``, ``ndcg`` and ``mrr``.
        by: ``row``: each held-out row is a question of its own; ``user``: all held-out items of a user are the answers
            to one.
        keep_seen: rank the items that the user has taken before, too. Otherwise they are masked, and a held-out item
            among them, a repeat, counts as missed.
        candidates: column of the held-out rows with item ids: each row's item is ranked among its own and nothing
            else; None for the whole catalogue.
    """

    at: tuple[int, ...] = (10,)
    figures: tuple[_Figure, ...] = ("hr", "ndcg")
    by: Literal["row", "user"] = "row"
    keep_seen: bool = False
    candidates: str | None = None

    def __post_init__(self) -> None:
        if not self.at or min(self.at) < 1:
            raise ValueError(
                f"at={self.at}: must be one number of places or more, each 1 or more"
            )
        unknown = sorted(set(self.figures) - set(get_args(_Figure)))
        if unknown or not self.figures:
            raise ValueError(
                f"figures={self.figures}: must be some of {', '.join(get_args(_Figure))}"
            )


@dataclass(frozen=True, kw_only=True)
class RawSet:
    """Rows of a set as files and requests have them.

    Args:
        name: name of the set.
        splits: raw columns of each split, ``train`` first; the same columns in all of them.
        roles: roles of the columns.
        shared: further columns with the values of a column, by that column, such as ``{"item_id": ("history",)}``.
        separators: separator of the values in columns of texts with lists.
        lengths: greatest number of values in a row of a column of lists, the last ones; a request may have more.
        kept: columns that are handed on as they are, such as the label.
        numbers: columns of whole fractions that are known to be numbers.
        titles: texts for display by the raw id of an item.
        left_out: why a column of the files is not read, by its name.
        notes: what a reader should know of the rows, one line each.
        evaluation: rule of the ranking.
        best: figures of the best possible prediction, if known (generated data).
    """

    name: str
    splits: Mapping[str, RawColumns]
    roles: Roles
    shared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    separators: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    kept: Sequence[str] = ()
    numbers: Sequence[str] = ()
    titles: Mapping[Any, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    evaluation: Evaluation = field(default_factory=Evaluation)
    best: Mapping[str, float] = field(default_factory=dict)


def fit_steps(raw: RawSet) -> FittedPreprocessor:
    """Fits a step for each column, by its type, to the training rows.

    Raises:
        DataError: all values of a column are missing.
    """
    train = raw.splits["train"]
    others: set[str] = set()
    for names in raw.shared.values():
        others.update(names)
    ids: list[tuple[Step, Any]] = [
        (Lists(column=name, max_length=length), {})
        for name, length in raw.lengths.items()
    ]
    numbers: list[tuple[Step, Any]] = []
    times: list[tuple[Step, Any]] = []
    types = {name: str(train[name].type) for name in raw.kept}
    for name, column in train.items():
        if name in raw.kept:
            continue
        types[name] = raw_type(column.type) or str(column.type)
        if name in others:
            continue
        also = tuple(raw.shared.get(name, ()))
        values = _values(column, _trained_lists(raw, name))
        if not len(values):
            raise DataError(
                f"column '{name}': all {len(column):,} values are missing; leave the column out"
            )
        if pa.types.is_floating(values.type):
            floats = values.to_numpy()
            # A constant column has deviation 0, by which nothing can be divided.
            deviation = float(floats.std()) or 1.0
            filled = any(columns[name].null_count for columns in raw.splits.values())
            mean = float(floats.mean())
            if filled:
                fill = FillMissing(column=name, statistic="mean")
                numbers.append((fill, {"value": mean}))
            numbers.append((Normalize(column=name), {"mean": mean, "std": deviation}))
        elif pa.types.is_timestamp(values.type):
            # Where every time is midnight, its hour says nothing.
            at_midnight = (values.cast(pa.int64()).to_numpy() % _DAY == 0).all()
            features = OF_DATES if at_midnight else OF_TIMES
            times.append((TimeFeatures(column=name, features=features), {}))
        elif separator := raw.separators.get(name):
            words = pc.list_flatten(pc.split_pattern(values, separator))
            # Two separators in a row, and an empty text, hold no value.
            words = words.filter(pc.not_equal(words, ""))
            ids.append((Lists(column=name, separator=separator), {}))
            ids.append((Categorify(column=name), vocabulary_with_counts(words)))
        else:
            if pa.types.is_boolean(values.type):
                values = values.cast(pa.int64())
            ids.append(
                (Categorify(column=name, also=also), vocabulary_with_counts(values))
            )
    # Ids come first, numbers next: a model's columns keep this order.
    fitted = FittedPreprocessor.of([*ids, *numbers, *times], types, raw.kept)
    writes: set[str] = set()
    for step in fitted.steps:
        again = writes.intersection(step.writes) - set(step.reads)
        if again:
            raise DataError(
                f"column '{min(again)}' is there, and is made of the dates in '{step.reads[0]}' too; leave one of them "
                "out, or rename it"
            )
        writes.update(step.writes)
    return fitted


def vocabulary_with_counts(values: pa.Array) -> Vocabulary:
    """Returns the distinct values, in sorted order, with the number of rows of each."""
    value_counts = pc.value_counts(values)
    order = pc.sort_indices(value_counts.field("values"))
    return Vocabulary(
        value_counts.field("values").take(order),
        value_counts.field("counts").take(order),
    )


def _trained_lists(raw: RawSet, name: str) -> list[pa.Array]:
    """Returns the training columns with the values of a column; a candidate is nothing that is trained."""
    names = raw.shared.get(name, ())
    train = raw.splits["train"]
    return [train[other] for other in names if other != raw.evaluation.candidates]


def _values(column: pa.Array, others: Sequence[pa.Array]) -> pa.Array:
    """Returns all values of columns, of one value or a list of them in a row, without nulls."""
    flat = [
        (each.flatten() if is_list_type(each.type) else each).drop_null()
        for each in (column, *others)
    ]
    return pa.concat_arrays(flat) if len(flat) > 1 else flat[0]


class Counts:
    """Counts of a prepared folder's rows, made while they are written; no reader has to count them again.

    Args:
        fitted: preprocessor that makes the rows.
        roles: roles of the columns.
        folder: the prepared folder, which gets the pairs of users and items.
        split: name of the split.
    """

    def __init__(
        self, fitted: FittedPreprocessor, roles: Roles, folder: Path, split: str
    ) -> None:
        self.rows = 0
        self._user = roles.user
        width = fitted.vocab.get(roles.item or "", 0)
        self._known: dict[bool, KnownWriter] = {}
        if width and roles.user in fitted.vocab:
            tables = fitted.vocabularies
            for sessions in (False, True):
                if not sessions or tables.get(SESSION) == tables[str(roles.item)]:
                    path = known_path(folder, split, sessions=sessions)
                    self._known[sessions] = KnownWriter(path, width)
        self._zeros = dict.fromkeys(fitted.vocab, 0)
        self._ids = dict.fromkeys(fitted.vocab, 0)
        names = [roles.label, *roles.tasks]
        self._labels = [name for name in names if name in fitted.keep]
        self._weight = roles.weight
        # The weights of positives among all rows and among those with label 1, by
        # label, and of all rows.
        self._every = np.zeros(len(self._labels))
        self._clicked = np.zeros(len(self._labels))
        self._total = 0.0
        self._item = roles.item
        self.popularity = np.zeros(fitted.vocab.get(roles.item or "", 0), np.int64)

    def add(self, batch: pa.RecordBatch) -> None:
        """Counts a batch."""
        self.rows += batch.num_rows
        for name in self._zeros:
            column = batch.column(name)
            ids = column.flatten() if pa.types.is_list(column.type) else column
            self._zeros[name] += len(ids) - int(np.count_nonzero(ids.to_numpy()))
            self._ids[name] += len(ids)
        weights = np.ones(batch.num_rows)
        if self._weight:
            weights = batch.column(self._weight).to_numpy().astype(np.float64)
        self._total += float(weights.sum())
        positive = np.ones(batch.num_rows, dtype=bool)
        if self._labels:
            columns = [batch.column(name).cast(pa.float64()) for name in self._labels]
            labels = np.stack([column.to_numpy() for column in columns])
            self._every += (labels * weights).sum(1)
            self._clicked += (labels * labels[0] * weights).sum(1)
            positive = labels[0] > 0
        if self._item and len(self.popularity):
            items = batch.column(self._item).to_numpy()[positive]
            self.popularity += np.bincount(items, minlength=len(self.popularity))
            self._add_known(batch.filter(pa.array(positive)), items)

    def _add_known(self, batch: pa.RecordBatch, items: Int64) -> None:
        for sessions, writer in self._known.items():
            users = batch.column(self._user).to_numpy()
            writer.add(users, items)
            if sessions:
                lists = batch.column(SESSION)
                lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
                writer.add(users.repeat(lengths), lists.flatten().to_numpy())

    def close(self) -> None:
        """Writes the pairs of users and items."""
        for writer in self._known.values():
            writer.close()

    @property
    def unknown(self) -> dict[str, float]:
        """The share of zeros per id column; in a list column of its elements."""
        return {
            name: zeros / max(self._ids[name], 1) for name, zeros in self._zeros.items()
        }

    @property
    def labels(self) -> dict[str, Any]:
        """The weight of all rows, and of the positives of each label."""
        sums = zip(self._labels, self._every, self._clicked, strict=True)
        return {
            "total": self._total,
            "positives": {
                name: {"of_all": float(every), "of_positive": float(clicked)}
                for name, every, clicked in sums
            },
        }


def write_set(folder: Path, raw: RawSet) -> None:
    """Writes a set as rec.data.preprocess would; ``folder`` is empty, or is created.

    Raises:
        DataError: a column cannot be prepared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fitted = fit_steps(raw)
    roles = raw.roles
    written: dict[str, Sequence[str]] = {}
    for step in fitted.steps:
        written |= dict.fromkeys(step.reads, step.writes)
    owned = {
        owner: set(
            owned_columns(
                owner,
                raw.splits["train"],
                (getattr(roles, owner), *getattr(roles, f"{owner}_features")),
            )
        )
        for owner in ("user", "item")
    }
    not_sent = {*raw.kept, *filter(None, [raw.evaluation.candidates]), *owned["item"]}
    train = raw.splits["train"]
    size = len(next(iter(train.values())))
    every = max(1, -(-size // _REQUESTS))
    requests = {name: train[name][::every] for name in train if name not in not_sent}
    tables = {RAW_REQUESTS: pa.table(requests)}
    for owner, path in (("user", RAW_USERS), ("item", RAW_ITEMS)):
        if (key := getattr(roles, owner)) is not None:
            names = [
                name for name in train if name in owned[owner] and name not in not_sent
            ]
            if owner == "item":
                names = [name for name in train if name in owned[owner]]
            tables[path] = _last_of_each(raw, key, names)
            # Items that a history alone names can be recommended, too.
            if owner == "item" and names == [key]:
                values = pc.unique(_values(train[key], _trained_lists(raw, key)))
                tables[path] = pa.table({key: values.take(pc.sort_indices(values))})
    if roles.item and raw.titles:
        keys = tables[RAW_ITEMS][roles.item].to_pylist()
        titles = pa.array([raw.titles.get(key) for key in keys], pa.string())
        tables[RAW_ITEMS] = tables[RAW_ITEMS].append_column("title", titles)
    write_rows(
        folder,
        fitted,
        raw.splits,
        tables,
        dataclasses.replace(
            roles,
            user_features=_derived(roles.user_features, written),
            item_features=_derived(roles.item_features, written),
        ),
        recipe=raw.name,
        details={
            "evaluation": dataclasses.asdict(raw.evaluation),
            "left_out": dict(raw.left_out),
            "notes": [*raw.notes, *_doubts(raw, fitted)],
            "best": dict(raw.best),
        },
    )


def write_rows(
    folder: Path,
    fitted: FittedPreprocessor,
    splits: Mapping[str, Mapping[str, Any]],
    raw_tables: Mapping[str, pa.Table],
    roles: Roles,
    *,
    recipe: str,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Writes raw rows by split through a fitted preprocessor, and raw tables by their path.

    Args:
        folder: an empty folder.
        fitted: the preprocessor.
        splits: raw columns of each split.
        raw_tables: tables by their path in the folder.
        roles: roles of the columns.
        recipe: name of the set's origin.
        details: further entries of the summary.
    """
    fitted.save(folder / PREPROCESSOR)
    counts = {split: Counts(fitted, roles, folder, split) for split in splits}
    for split, rows in splits.items():
        if len(next(iter(rows.values()))):
            (folder / split).mkdir()
            path = folder / split / "part-00000.parquet"
            _write_split(path, fitted, rows, counts[split])
        counts[split].close()
    (folder / "raw").mkdir()
    for name, table in raw_tables.items():
        pq.write_table(table, folder / name)
    popularity = counts["train"].popularity
    if len(popularity):
        pq.write_table(pa.table({"count": popularity}), folder / RAW_POPULARITY)
    summary = {
        "recipe": recipe,
        "rows": {split: each.rows for split, each in counts.items()},
        "labels": {split: each.labels for split, each in counts.items()},
        "roles": dataclasses.asdict(roles),
        **(details or {}),
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")


def _derived(names: Sequence[str], written: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the columns that are made of raw columns: of a time its hour and weekday."""
    derived: list[str] = []
    for name in names:
        made = written.get(name, (name,))
        derived += [name] if name in made else made
    return derived


def _write_split(
    path: Path, fitted: FittedPreprocessor, rows: Mapping[str, Any], counts: Counts
) -> None:
    count = len(next(iter(rows.values())))
    writer: pq.ParquetWriter | None = None
    for start in range(0, count, _ROWS_AT_ONCE):
        part = {
            name: values[start : start + _ROWS_AT_ONCE] for name, values in rows.items()
        }
        columns = fitted.online(part)
        table = pa.table({name: as_arrow(column) for name, column in columns.items()})
        for batch in table.to_batches():
            counts.add(batch)
        if writer is None:
            writer = pq.ParquetWriter(path, table.schema, write_page_checksum=True)
        writer.write_table(table, row_group_size=_GROUP_ROWS)
    assert writer is not None, "no rows"
    writer.close()


def _last_of_each(raw: RawSet, key: str, names: Sequence[str]) -> pa.Table:
    """Returns the latest row of each value of ``key`` that a training row has, in the order of the values.

    A user's latest row is that of the latest split: it has the history before the test item. An item's is its last
    training row.
    """
    splits = ["train"] if key == raw.roles.item else [*reversed(PARTS)]
    trained = pc.unique(raw.splits["train"][key].drop_null())
    trained = trained.take(pc.sort_indices(trained))
    taken = np.zeros(len(trained), bool)
    pieces: list[pa.Table] = []
    order: list[Int64] = []
    for split in splits:
        columns = raw.splits.get(split)
        if columns is None:
            continue
        number = pc.index_in(columns[key], trained).fill_null(-1)
        # Backwards: of the rows of a value the last one comes first.
        found, first = np.unique(number.to_numpy()[::-1], return_index=True)
        fresh = (found >= 0) & ~taken[found]
        taken[found[fresh]] = True
        order.append(found[fresh])
        last = pa.array(len(number) - 1 - first[fresh])
        pieces.append(pa.table({name: columns[name].take(last) for name in names}))
    by_key = np.argsort(np.concatenate(order), kind="stable")
    return pa.concat_tables(pieces).take(pa.array(by_key)).combine_chunks()


def _doubts(raw: RawSet, fitted: FittedPreprocessor) -> list[str]:
    """Returns a line for each column whose type may not be what its values mean."""
    lines = []
    for name in fitted.dense:
        values = raw.splits["train"].get(name)
        if name in raw.numbers or values is None:
            continue
        if not pa.types.is_floating(values.type):
            continue
        numbers = values.drop_null().to_numpy()
        if len(numbers) and (numbers == np.floor(numbers)).all():
            lines.append(
                f"column '{name}' is read as a number, and all its values are whole: if they are codes, write them as "
                "whole numbers (of pandas: astype('Int64'))"
            )
    low, high = _MILLISECONDS
    for name, values in raw.splits["train"].items():
        if name in (raw.roles.user, raw.roles.item) or not pa.types.is_integer(
            values.type
        ):
            continue
        least = pc.min(values).as_py()
        if least is not None and low <= least and pc.max(values).as_py() < high:
            lines.append(
                f"column '{name}' is read as ids, and its values look like milliseconds since 1970: if they are times, "
                "write them as timestamps"
            )
    return lines
