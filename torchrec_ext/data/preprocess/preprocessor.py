"""Preprocessor: steps in order, fitted once on training rows, then applied alike to files and to a request's rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from torchrec_ext.data.preprocess.columns import check_case, read_cells
from torchrec_ext.data.preprocess.fitted import (
    FittedPreprocessor,
    requests_sql,
    stages,
)
from torchrec_ext.data.preprocess.history import event_columns
from torchrec_ext.data.preprocess.rows import (
    Connection,
    Opened,
    Source,
    batches,
    connected,
    named,
    open_rows,
    query_of,
    telling,
    working_column,
)
from torchrec_ext.data.preprocess.step import Query, Step, makes_ids

FitProgress = Callable[[str], None]


@dataclass(frozen=True)
class Preprocessor:
    """A sequence of steps on columns, before it is fitted.

    The result has every column that a step writes, and those in ``keep``. A step reads what earlier steps wrote, or
    else a column of the files.

    Args:
        steps: steps, in order.
        keep: columns to hand on as they are, such as the label; in a request they may be left out. Times become seconds
            since 1970.

    Raises:
        ValueError: the steps contradict one another.

    Example:
        >>> from torchrec_ext.data.preprocess import Categorify, FillMissing, Lists, Normalize
        >>> steps = [Categorify(column="city"), Normalize(column="age"), FillMissing(column="age", value=0)]
        >>> Preprocessor(steps, keep=["label"]).raw_columns
        ('city', 'age', 'label')
        >>> Preprocessor([Categorify(column="city"), Lists(column="City", separator=" ")])
        Traceback (most recent call last):
        ...
        ValueError: columns 'City' and 'city' differ in case alone, which DuckDB does not tell apart; rename one
    """

    steps: Sequence[Step]
    keep: Sequence[str] = ()

    def __post_init__(self) -> None:
        # Tuples, as a caller's list may change later; the dataclass is frozen.
        object.__setattr__(self, "steps", tuple(self.steps))
        object.__setattr__(self, "keep", tuple(self.keep))
        # The step that writes each column.
        writers: dict[str, Step] = {}
        for step in self.steps:
            # Histories come from events as the files have them, so no step may have
            # replaced their columns.
            late = sorted(writers.keys() & event_columns([step]))
            if late:
                raise ValueError(
                    f"{step} reads {late}, which an earlier step replaces; put it first"
                )
            for name in step.writes:
                before = writers.get(name)
                if before is None:
                    continue
                if name not in step.reads:
                    raise ValueError(
                        f"{step} writes '{name}', as {before} does; give one of them another output"
                    )
                # Entries of a history's columns belong together by their places.
                if name in getattr(step, "skip", ()) and len(before.writes) > 1:
                    raise ValueError(
                        f"{step} has skip='{name}', of which {before} writes other columns entry by entry; leave it "
                        "out of skip"
                    )
                if makes_ids(before, name) and not makes_ids(step, name):
                    raise ValueError(
                        f"{step} replaces the ids of {before}, which would be no feature any more; put it first"
                    )
            writers |= dict.fromkeys(step.writes, step)
        both = sorted(writers.keys() & set(self.keep))
        if both:
            raise ValueError(
                f"keep={both}: a step writes these columns; give the step another output, or do not keep them"
            )
        if not writers:
            raise ValueError("steps: there is none; give at least one")
        check_case([*self.raw_columns, *writers])

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """Names of the files' required columns."""
        file_columns: dict[str, None] = {}
        step_columns: set[str] = set()
        for step in self.steps:
            # A column that an earlier step wrote comes from there.
            file_columns.update(
                dict.fromkeys(name for name in step.reads if name not in step_columns)
            )
            step_columns.update(step.writes)
        return (
            *file_columns,
            *(name for name in self.keep if name not in file_columns),
        )

    def fit(
        self,
        source: Source,
        *,
        con: Connection = None,
        events: Source | None = None,
        progress: FitProgress | None = None,
    ) -> FittedPreprocessor:
        """Fits the steps to training rows.

        Args:
            source: parquet files, folders, patterns, remote addresses, or a relation of ``con``.
            con: connection of DuckDB, such as ``duckdb.connect()``; a new one by default.
            events: rows to make histories of, if a step is fitted on these; ``source`` by default.
            progress: function that is called with each step's name before it is fitted.

        Raises:
            DataError: the files or a column do not allow it; the message names file, column and remedy.
        """
        with connected(con) as opened:
            data, past = open_rows(
                source, events, self.raw_columns, event_columns(self.steps), opened
            )
            types = stages(self.steps, data.where, data.raw)
            fitted = FittedPreprocessor([], data.raw, self.keep)
            with past.blaming(), data.blaming(), telling():
                for number, step in enumerate(self.steps):
                    if progress:
                        progress(str(step))
                    with _fit_rows(fitted, step, data, past, opened) as query:
                        state = step.fit(query, types[number], data.where)
                    fitted = dataclasses.replace(
                        fitted, pairs=[*fitted.pairs, (step, state)]
                    )
        return fitted


@contextmanager
def _fit_rows(
    fitted: FittedPreprocessor, step: Step, data: Opened, past: Opened, con: Connection
) -> Iterator[Query]:
    """Yields SQL over the column that a step is fitted on, after the steps before it."""
    name = step.fit_column
    if name is None:
        yield query_of(con, "VIEW", "SELECT NULL AS nothing")
        return
    # Only the steps behind the column are applied again.
    before = FittedPreprocessor(fitted.pairs, data.raw).only([name])
    if not before.steps:
        column = working_column(name, data.raw[name])
        yield query_of(con, "VIEW", f"SELECT {column} FROM {data.view}")
        return
    types = before.request_columns
    schema = pa.schema([(name, before.types[-1][name])])

    def made() -> Iterator[pa.RecordBatch]:
        for batch in batches(con, requests_sql(before, data, past)):
            columns = before.apply(
                {
                    read: read_cells(read, batch.column(read), kind)
                    for read, kind in types.items()
                }
            )
            array = columns[name].array(schema.field(name).type)
            yield pa.RecordBatch.from_arrays([array], schema=schema)

    # Another connection to the same database, since this one is reading.
    with con.cursor() as cursor:
        stream = named(cursor, pa.RecordBatchReader.from_batches(schema, made()))
        yield query_of(cursor, "TABLE", f"SELECT * FROM {stream}")
