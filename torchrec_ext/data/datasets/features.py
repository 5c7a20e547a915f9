"""RowContext: raw columns of rows in memory under the fitted preprocessor that reads a request's rows too.

raw_column(), raw_ids(): a column of a user's file in a type that steps take: dates are times, missing values stay.

side_features(): a table of users or items -> feature columns by id; their kinds are inferred from the values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchrec_ext.data.columns import Array, Chunk, Column, Int64
from torchrec_ext.data.files.arrow import as_int64, is_list_type, one_piece
from torchrec_ext.data.files.parquet import read_columns
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
from torchrec_ext.data.preprocess.columns import as_times, is_iso
from torchrec_ext.data.preprocess.times import Feature
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import listed

# Stands in a list for a value that is in no vocabulary.
_UNKNOWN = "unknown"
SEPARATOR = "|"
# Share of distinct values from which on a column names its row, as a title does, and
# says nothing about another row.
MOST_DISTINCT = 0.5
MISSING_TIME = np.iinfo(np.int64).min
# The first text among these rows decides whether a column holds dates.
_PROBE_ROWS = 1000
_DAY = 86_400_000_000
# Raw type of a column of dates or times.
TIME = "timestamp[us]"
OF_TIMES: tuple[Feature, ...] = ("hour", "weekday")
# Features of a column in which every time is midnight: its hour says nothing.
OF_DATES: tuple[Feature, ...] = ("weekday", "month")
_OTHER_DATE = re.compile(
    r"(\d{4}[./]\d{1,2}[./]\d{1,2}|\d{1,2}[./-]\d{1,2}[./-]\d{4})(\D.*)?"
)
RawColumns = Mapping[str, pa.Array]
# By tower: the names of its columns of ids, and of those of numbers.
TowerColumns = dict[str, tuple[Sequence[str], Sequence[str]]]


def owned_columns(
    owner: str, names: Iterable[str], described: Collection[str | None]
) -> list[str]:
    """Returns the columns of the ``owner``, user or item: those in ``described``, and all that begin with its name."""
    return [name for name in names if name in described or name.startswith(f"{owner}_")]


def columns_by_tower(
    order: Sequence[str],
    features: Sequence[str],
    dense: Sequence[str],
    owners: Mapping[str, str],
) -> TowerColumns:
    """Returns the columns of each tower in ``order``, without towers that have none.

    Args:
        order: names of the towers, ``context`` among them.
        features: names of all columns of ids.
        dense: names of all columns of numbers.
        owners: tower of each column that is not the context's.
    """
    towers: TowerColumns = {}
    for tower in order:
        own_features = tuple(
            name for name in features if owners.get(name, "context") == tower
        )
        own_dense = tuple(
            name for name in dense if owners.get(name, "context") == tower
        )
        if own_features or own_dense:
            towers[tower] = (own_features, own_dense)
    return towers


@dataclass(frozen=True, kw_only=True)
class RowContext:
    """The mapping of raw columns to ids and numbers; context is fitted on training rows, users and items on all rows.

    Args:
        steps: the fitted preprocessor that maps rows in memory here and the rows of a request later. Text and whole
            numbers become ids from 1 on, in the order of the values. Dates and times become the ids of their hour,
            weekday or month. Fractions become numbers of mean 0 and deviation 1. 0 stands for a missing and for an
            unknown value.

    Example:
        >>> rows = {"device": pa.array(["tv", "phone"]), "price": pa.array([1.0, 3.0])}
        >>> context = RowContext.fit(rows)
        >>> {name: column.values.tolist() for name, column in context.transform(rows).items()}
        {'device': [2, 1], 'price': [-1.0, 1.0]}
    """

    steps: FittedPreprocessor = field(
        default_factory=lambda: FittedPreprocessor.of((), {})
    )

    @classmethod
    def of(cls, columns: Sequence[ColumnSteps]) -> RowContext:
        """Builds the preprocessor from the fitted steps of each column."""
        pairs: list[tuple[Step, Any]] = []
        for column in columns:
            pairs += column.pairs
        return cls(
            steps=FittedPreprocessor.of(
                pairs, {column.name: column.raw for column in columns}
            )
        )

    @classmethod
    def fit(
        cls,
        rows: RawColumns,
        *,
        filled: Collection[str] = (),
        separator: str | None = None,
    ) -> RowContext:
        """Fits vocabularies and scales to raw columns, as :func:`raw_column` returns them.

        Args:
            rows: raw columns of the training rows.
            filled: columns of fractions in which a missing value stands for the mean.
            separator: separator of the values in texts with lists; None if no column has such texts.

        Raises:
            DataError: all values of a column are missing.
        """
        ids: list[ColumnSteps] = []
        numbers: list[ColumnSteps] = []
        times: list[ColumnSteps] = []
        for name, column in rows.items():
            values = column.drop_null()
            if not len(values):
                raise DataError(
                    f"column '{name}': all {len(column):,} values are missing; leave the column out"
                )
            if pa.types.is_floating(values.type):
                floats = values.to_numpy()
                # A constant column has deviation 0, by which nothing can be divided.
                deviation = float(floats.std()) or 1.0
                numbers.append(
                    number_steps(
                        name, float(floats.mean()), deviation, filled=name in filled
                    )
                )
            elif pa.types.is_timestamp(values.type):
                times.append(_time_steps(name, values))
            else:
                ids.append(_id_steps_of_values(name, values, separator))
        # Ids come first, numbers next: a model's columns keep this order.
        context = cls.of([*ids, *numbers, *times])
        for name, features in context.times.items():
            if clash := sorted(set(features) & rows.keys()):
                raise DataError(
                    f"column '{clash[0]}' is there, and is made of the dates in '{name}' too; leave one of them out, "
                    "or rename it"
                )
        return context

    @cached_property
    def vocabularies(self) -> dict[str, Vocabulary]:
        """Values of each column of text or whole numbers, from row 1 on; any other value is row 0."""
        return {
            step.column: state
            for step, state in self.steps.pairs
            if isinstance(step, Categorify)
        }

    @cached_property
    def scales(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of each column of fractions."""
        scaled = {
            step.column: state
            for step, state in self.steps.pairs
            if isinstance(step, Normalize)
        }
        return {name: (state["mean"], state["std"]) for name, state in scaled.items()}

    @cached_property
    def separators(self) -> dict[str, str]:
        """Separator of the values in each column of texts with lists."""
        return {
            step.column: str(step.separator)
            for step in self.steps.steps
            if isinstance(step, Lists)
        }

    @cached_property
    def times(self) -> dict[str, tuple[str, ...]]:
        """Names of the id columns made of each column of times."""
        return {
            step.column: step.writes
            for step in self.steps.steps
            if isinstance(step, TimeFeatures)
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns of ids and of numbers."""
        return (*self.vocab, *self.scales)

    @property
    def vocab(self) -> dict[str, int]:
        """Number of rows of the table of each column of ids."""
        return dict(self.steps.vocab)

    def transform(self, rows: RawColumns) -> dict[str, Column]:
        """Maps raw columns to ids (B,) int64 from 1 on, and numbers (B,) float32 of mean 0 and deviation 1.

        A column of times stays next to its features, in microseconds since 1970; ``MISSING_TIME`` stands for a missing
        one.
        """
        times = {}
        for name in self.times:
            moments = rows[name].cast(pa.int64()).fill_null(MISSING_TIME)
            times[name] = Column(moments.to_numpy())
        return {**self.steps.online(rows), **times}

    def raw(self, rows: Chunk) -> dict[str, pa.Array]:
        """Maps ids and numbers back to raw values, as in a file or a request; null for the unknown."""
        values = {
            name: self._words(name, rows[name])
            for name in self.vocabularies
            if name in rows
        }
        for name, (mean, deviation) in self.scales.items():
            if name in rows:
                values[name] = pa.array(
                    rows[name].values.astype(np.float64) * deviation + mean
                )
        for name in self.times:
            if name in rows:
                moments = rows[name].values
                values[name] = pa.array(moments, mask=moments == MISSING_TIME).cast(
                    pa.timestamp("us", "UTC")
                )
        return values

    def raw_type(self, name: str) -> str:
        """Returns the type of a raw column in a file or a request."""
        return self.steps.raw[name]

    def sources(self, names: Sequence[str]) -> list[str]:
        """Returns the raw columns behind ``names``, in their order; other names stay. See :meth:`derived`."""
        source_of: dict[str, str] = {}
        for name, features in self.times.items():
            source_of |= dict.fromkeys(features, name)
        return list(dict.fromkeys(source_of.get(name, name) for name in names))

    def derived(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the columns made of the raw columns ``names``, in their order."""
        columns: list[str] = []
        for name in names:
            columns += self.times.get(name, (name,))
        return tuple(columns)

    def steps_of(self, name: str) -> list[tuple[Step, Any]]:
        """Returns the steps on a raw column, with their states."""
        return [
            (step, state) for step, state in self.steps.pairs if step.reads == (name,)
        ]

    def joined(self, other: RowContext) -> RowContext:
        """Returns one mapping of both mappings' columns, which must differ."""
        pairs = [*self.steps.pairs, *other.steps.pairs]
        return RowContext(
            steps=FittedPreprocessor.of(pairs, {**self.steps.raw, **other.steps.raw})
        )

    def _words(self, name: str, column: Column) -> pa.Array:
        ids = column.values
        words = self.vocabularies[name].values.take(pa.array(ids - 1, mask=ids == 0))
        if name in self.separators:
            lists = pa.ListArray.from_arrays(
                pa.array(column.offsets, pa.int32()), words.fill_null(_UNKNOWN)
            )
            return pc.binary_join(lists, self.separators[name])
        if self.raw_type(name) == "bool":
            # Its vocabulary holds 0 and 1.
            return words.cast(pa.bool_())
        return words


class ColumnSteps(NamedTuple):
    """The name and the raw type of a column, and its fitted steps, each with its state."""

    name: str
    raw: str
    pairs: list[tuple[Step, Any]]


def id_steps(name: str, words: Vocabulary, separator: str | None = None) -> ColumnSteps:
    """Returns the steps from text or whole numbers to rows of ``words``; with a separator, from texts with lists."""
    pairs: list[tuple[Step, Any]] = [(Categorify(column=name), words)]
    if separator is None:
        return ColumnSteps(name, str(words.values.type), pairs)
    return ColumnSteps(
        name, "string", [(Lists(column=name, separator=separator), {}), *pairs]
    )


def number_steps(
    name: str, mean: float, deviation: float, *, filled: bool = False
) -> ColumnSteps:
    """Returns the steps from fractions to numbers of mean 0 and deviation 1; ``filled`` puts the mean for null."""
    pairs: list[tuple[Step, Any]] = [
        (Normalize(column=name), {"mean": mean, "std": deviation})
    ]
    if filled:
        pairs.insert(0, (FillMissing(column=name, statistic="mean"), {"value": mean}))
    return ColumnSteps(name, "float64", pairs)


def _time_steps(name: str, values: pa.Array) -> ColumnSteps:
    """Returns the step from times to the ids of their hour, weekday or month."""
    # Dates are times at midnight by now.
    is_midnight = values.cast(pa.int64()).to_numpy() % _DAY == 0
    features = OF_DATES if is_midnight.all() else OF_TIMES
    return ColumnSteps(name, TIME, [(TimeFeatures(column=name, features=features), {})])


def _id_steps_of_values(
    name: str, values: pa.Array, separator: str | None
) -> ColumnSteps:
    """Returns the steps from text or whole numbers to ids from 1 on, in the order of the values."""
    if pa.types.is_boolean(values.type):
        return id_steps(
            name, _vocabulary_with_counts(values.cast(pa.int64()))
        )._replace(raw="bool")
    has_lists = (
        separator
        and pa.types.is_string(values.type)
        and pc.any(pc.match_substring(values, separator)).as_py()
    )
    if not has_lists:
        return id_steps(name, _vocabulary_with_counts(values))
    words = pc.list_flatten(pc.split_pattern(values, separator))
    # Two separators in a row, and an empty text, hold no value.
    return id_steps(
        name, _vocabulary_with_counts(words.filter(pc.not_equal(words, ""))), separator
    )


def _vocabulary_with_counts(values: pa.Array) -> Vocabulary:
    """Returns the distinct values, in sorted order, with the number of rows of each."""
    value_counts = pc.value_counts(values)
    order = pc.sort_indices(value_counts.field("values"))
    return Vocabulary(
        value_counts.field("values").take(order),
        value_counts.field("counts").take(order),
    )


def raw_column(path: Path, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Converts a column of a file to a type supported by steps, its missing values as nulls.

    Whole numbers are int64; dates, times and texts in ISO 8601 ``timestamp[us, UTC]``; text, fractions, bools and lists
    stay.

    Args:
        path: the file, for messages.
        name: name of the column, for messages.
        column: (B,) values.

    Raises:
        DataError: a whole number is beyond int64, a fraction is not finite, a text is a date in another format than the
            first one or than ISO 8601, or the type is none of these.
    """
    column = _plain_text(column)
    kind = column.type
    if pa.types.is_integer(kind):
        return _integers(path, name, column)
    if pa.types.is_floating(kind):
        # Nulls stay in the column; as 0 they pass the check.
        check_finite(path, name, column.fill_null(0).to_numpy(zero_copy_only=False))
        return column.cast(pa.float32()) if pa.types.is_float16(kind) else column
    first = ""
    if pa.types.is_string(kind):
        first = next((text for text in column[:_PROBE_ROWS].to_pylist() if text), "")
    if (
        is_iso(first)
        or _OTHER_DATE.fullmatch(first)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
    ):
        return times_in(path, name, column)
    if (
        pa.types.is_string(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
        or is_list_type(kind)
    ):
        return column
    raise DataError(
        f"{path}: column '{name}' is {kind}; must be text, whole numbers, fractions or dates: convert it where it is "
        "written, or leave it out"
    )


def raw_ids(path: Path, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns a column of ids as int64 or string, its missing values as nulls.

    Raises:
        DataError: an id is beyond int64, or the ids are neither whole numbers nor text.
    """
    column = _plain_text(column)
    if pa.types.is_integer(column.type):
        return _integers(path, name, column)
    if pa.types.is_string(column.type) or pa.types.is_null(column.type):
        return column
    refuse_lists(path, name, column)
    raise DataError(
        f"{path}: column '{name}' is {column.type}; ids must be whole numbers or text: convert it "
        "where it is written (of pandas: astype('Int64'))"
    )


def refuse_lists(path: Path, name: str, column: pa.Array) -> None:
    """Refuses a column with several values in a row.

    Raises:
        DataError: the column holds lists.
    """
    if is_list_type(column.type):
        raise DataError(
            f"{path}: column '{name}' holds lists, must hold one value per row; write a row for each event"
        )


def times_in(path: Path, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns a column of dates, times or texts in ISO 8601 as ``timestamp[us, UTC]``.

    Raises:
        DataError: a text is a date in another format; the message names its row. The column has another type.
    """
    column = _plain_text(column)
    kind = column.type
    if not (
        pa.types.is_string(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
    ):
        raise DataError(
            f"{path}: column '{name}' is {kind}; times must be whole numbers, timestamps, dates or text in ISO 8601; "
            "convert it where it is written"
        )
    try:
        return as_times(column)
    except ValueError as error:
        row = getattr(error, "row", 0)
        raise DataError(
            f"{path}: column '{name}', row {row}: {ascii(column[row].as_py())[:80]} {error}; write the dates so or as "
            "timestamps, or leave the column out"
        ) from None


# Reads a column of a file; called with the file, the column's name in it, and its
# values.
Convert = Callable[[Path, str, pa.ChunkedArray], pa.Array]


def spelled(path: Path, spellings: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the names of columns in a file, by our names.

    Args:
        path: a parquet file.
        spellings: the names that each column may have, the preferred one first.

    Raises:
        DataError: a column has none of its names.
    """
    available = names_in(path)
    words = {}
    for name, choices in spellings.items():
        word = next((word for word in choices if word in available), None)
        if word is None and available:
            raise DataError(
                f"{path}: no column {' or '.join(choices)}; the file has {listed(available)}"
            )
        words[name] = word or choices[0]
    return words


def names_in(path: Path) -> list[str]:
    """Returns the names of the file's columns; none if it is unreadable, for :func:`read_columns` to report."""
    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError):
        return []


def read_ids(
    path: Path, words: Mapping[str, str], reason: str, **converters: Convert
) -> dict[str, pa.Array]:
    """Reads columns of ids, and others by their converters, without a missing value.

    Args:
        path: a parquet file.
        words: the columns' names in the file, by our names.
        reason: the rule against missing values, for messages.
        converters: functions that read the columns of other values, by our names.

    Raises:
        DataError: a value is missing, or an id is neither a whole number nor text.
    """
    table = read_columns(path, list(words.values()))
    columns = {}
    for name, word in words.items():
        convert = converters.get(name, raw_ids)
        columns[name] = convert(path, word, table.column(word))
        check_no_null(path, word, columns[name], reason)
    return columns


def check_no_null(path: Path, name: str, column: pa.Array, reason: str) -> None:
    """Refuses missing values.

    Raises:
        DataError: a value is missing; the message names file, column and row, and says the ``reason``.
    """
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(
            f"{path}: column '{name}', row {row}: value is null ({column.null_count:,} such rows), and {reason}; leave "
            "these rows out"
        )


def same_types(columns: Mapping[Path, RawColumns]) -> list[dict[str, pa.Array]]:
    """Returns the raw columns of several files in the types of the first.

    Raises:
        DataError: a file lacks a column of the first, or has it in another type.
    """
    first, first_columns = next(iter(columns.items()))
    aligned = []
    for path, arrays in columns.items():
        converted_columns = {}
        for name, array in first_columns.items():
            if name not in arrays:
                raise DataError(
                    f"{path}: column '{name}' is missing, {first.name} has it and {path.name} {sorted(arrays)}; write "
                    "the same columns to all files"
                )
            converted_columns[name] = _as_type(
                path, name, arrays[name], first, array.type
            )
        aligned.append(converted_columns)
    return aligned


def _as_type(
    path: Path, name: str, array: pa.Array, first: Path, expected: pa.DataType
) -> pa.Array:
    if array.type == expected:
        return array
    if pa.types.is_timestamp(expected) and pa.types.is_string(array.type):
        return times_in(path, name, array)
    both_fractions = pa.types.is_floating(array.type) and pa.types.is_floating(expected)
    if not both_fractions and not pa.types.is_null(array.type):
        raise DataError(
            f"{path}: column '{name}' is {array.type}, in {first.name} {expected}; write one type to all files"
        )
    return array.cast(expected)


def _plain_text(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns a column as one array, text without a dictionary and of one type."""
    array = one_piece(column)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(pa.string()) if pa.types.is_large_string(array.type) else array


def _integers(path: Path, name: str, column: pa.Array) -> pa.Array:
    # Every other type fits into int64.
    if pa.types.is_uint64(column.type):
        as_int64(str(path), name, Column(column.fill_null(0).to_numpy()))
    return column.cast(pa.int64())


def check_finite(path: Path, name: str, values: Array) -> None:
    """Refuses NaN, infinity and numbers beyond float32 in a column of fractions.

    Raises:
        DataError: a value is not finite; the message names file, column, row and value.
    """
    with np.errstate(over="ignore"):
        # A number beyond float32 becomes infinite here, and is meant to.
        bad = ~np.isfinite(values.astype(np.float32, copy=False))
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"{path}: column '{name}', row {row}: {values[row]}; must be a finite number of 32 bits "
            f"({int(bad.sum()):,} rows are not): fill it, drop the row, or leave the column out"
        )


class SideFeatures(NamedTuple):
    """Features of users or items: ``columns`` with a row per id, row 0 the unknown; ``words`` maps raw values."""

    columns: Chunk
    words: RowContext


def side_features(
    ids: Int64,
    table: RawColumns,
    size: int,
    columns: Sequence[str] | None = None,
    words: RowContext | None = None,
) -> SideFeatures:
    """Turns a table of users or items into feature columns by id.

    Text and whole numbers become ids from 1, in sorted order. Text with ``|`` in it becomes a list of ids. Fractions
    become dense columns of mean 0 and standard deviation 1. Dates become the ids of their weekday and month or hour. A
    missing value is the unknown one, or the mean. Columns whose values are nearly all distinct, such as titles and
    postal codes, are left out: they name a row and do not describe it.

    Args:
        ids: (B,) from 1 to ``size - 1``, the row of the result that each row of ``table`` describes; a row that none
            describes is all 0.
        table: B rows of raw values.
        size: number of rows of the result.
        columns: columns of ``table`` to use; by default all that are not left out.
        words: mapping of the columns, which names them; fitted to the table by default.

    Example:
        >>> table = {"genres": pa.array(["b|a", "a"]), "year": pa.array([1995, 1995])}
        >>> features = side_features(np.array([1, 3]), table, 4, ["genres", "year"])
        >>> genre_lists = [features.columns["genres"].row(item).tolist() for item in range(4)]
        >>> genre_lists, features.columns["year"].values.tolist()
        ([[], [2, 1], [], [1]], [0, 1, 0, 1])
        >>> features.words.vocab
        {'genres': 3, 'year': 2}
    """
    arrays = dict(table)
    # Mean and deviation are computed in 64 bits, whatever the width in the file.
    for name, array in arrays.items():
        if pa.types.is_floating(array.type):
            arrays[name] = array.cast(pa.float64())
    if words is not None:
        columns = list(words.steps.raw)
    elif columns is None:
        columns = [name for name in arrays if _describes(arrays[name])]
    raw = {name: arrays[name] for name in columns}
    if words is None:
        words = RowContext.fit(
            raw,
            filled=[name for name in columns if raw[name].null_count],
            separator=SEPARATOR,
        )
    # A missing time has a mark of its own, because 0 is a time, too: 1970.
    missing = dict.fromkeys(words.times, MISSING_TIME)
    feature_columns = {}
    for name, column in words.transform(raw).items():
        feature_columns[name] = _by_id(ids, column, size, missing.get(name, 0))
    return SideFeatures(Chunk(feature_columns), words)


def check_described(path: Path, key: str, ids: Array) -> None:
    """Refuses repeated ids in a file of users or items.

    Args:
        path: file of users or items.
        key: name of the column with the ids.
        ids: (B,) ids in that column, whole numbers or text.

    Raises:
        DataError: an id has two rows, one of which would be lost.
    """
    # Stable, so that the message names the first two rows of an id in the order of the
    # file.
    order = np.argsort(ids, kind="stable")
    twice = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    if len(twice):
        first = order[twice[0]]
        second = order[twice[0] + 1]
        raise DataError(
            f"{path}: column '{key}', rows {first} and {second}: both describe id {ids[first]} ({len(twice):,} rows "
            "more than there are ids); keep one row for each id"
        )


def vocabulary_of(values: Array | Sequence[str]) -> Vocabulary:
    """Returns the distinct values of a column of text or whole numbers, in sorted order."""
    array = np.asarray(values)
    words = pa.array(array.astype(np.int64) if array.dtype.kind in "iub" else array)
    # Rows are not counted here: the counts are only written beside the values.
    return Vocabulary(words, pa.array(np.zeros(len(words), np.int64)))


def _describes(column: pa.Array) -> bool:
    if is_list_type(column.type) or column.null_count == len(column):
        return False
    if pa.types.is_floating(column.type) or pa.types.is_timestamp(column.type):
        return True
    return bool(
        pc.count_distinct(column).as_py()
        <= MOST_DISTINCT * (len(column) - column.null_count)
    )


def _by_id(ids: Int64, column: Column, size: int, missing: int) -> Column:
    """Spreads a column to a row for each id; ids without a row get ``missing`` or an empty list."""
    if not column.ragged:
        values = np.full(size, missing, dtype=column.values.dtype)
        values[ids] = column.values
        return Column(values)
    starts = np.zeros(size, np.int64)
    stops = np.zeros(size, np.int64)
    starts[ids], stops[ids] = column.windows
    rows = column.windowed(starts, stops)
    return Column(rows.values, rows.offsets)
