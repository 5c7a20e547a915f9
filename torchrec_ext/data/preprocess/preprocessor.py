"""Preprocessor: steps in order, fitted once on training rows, then applied alike to files and to a request's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_ext.data.preprocess.columns import check_case
from torchrec_ext.data.preprocess.engines import connected
from torchrec_ext.data.preprocess.files import Source
from torchrec_ext.data.preprocess.fitted import FittedPreprocessor, stages
from torchrec_ext.data.preprocess.step import Chain, Step, StepState
from torchrec_ext.data.preprocess.tables import open_sources

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
        >>> from torchrec_ext.data.preprocess import Categorify, FillMissing, Normalize
        >>> steps = [Categorify(column="city"), FillMissing(column="age", statistic="median"), Normalize(column="age")]
        >>> Preprocessor(steps, keep=["label"]).raw_columns
        ('city', 'age', 'label')
        >>> Preprocessor([Categorify(column="city"), FillMissing(column="City", value="?")])
        Traceback (most recent call last):
        ...
        ValueError: columns 'City' and 'city' differ in case alone, which no engine tells apart; rename one
    """

    steps: Sequence[Step]
    keep: Sequence[str] = ()

    def __post_init__(self) -> None:
        # Tuples, as a caller's list may change later; the dataclass is frozen.
        object.__setattr__(self, "steps", tuple(self.steps))
        object.__setattr__(self, "keep", tuple(self.keep))
        step_columns: set[str] = set()
        # Histories come from events as the files have them, so no step may have
        # replaced their columns.
        for step in self.steps:
            late = sorted(step_columns.intersection(step.event_reads))
            if late:
                raise ValueError(
                    f"{step} reads {late}, which an earlier step replaces; put it first"
                )
            step_columns.update(step.writes)
        both = sorted(step_columns.intersection(self.keep))
        if both:
            raise ValueError(
                f"keep={both}: a step writes these columns; give the step another output, or do not keep them"
            )
        if not step_columns:
            raise ValueError("steps: there is none; give at least one")
        check_case([*self.raw_columns, *step_columns])

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

    @property
    def event_columns(self) -> tuple[str, ...]:
        """Names of the required columns of the events behind histories."""
        return tuple(
            dict.fromkeys(name for step in self.steps for name in step.event_reads)
        )

    def fit(
        self,
        source: Source,
        *,
        engine: Any = "duckdb",
        events: Source | None = None,
        progress: FitProgress | None = None,
    ) -> FittedPreprocessor:
        """Fits the steps to training rows.

        Args:
            source: parquet files, folders, patterns, remote addresses, or an Ibis table of the engine (``engine.ibis``
                makes them).
            engine: see :func:`~torchrec_ext.data.preprocess.engines.connected`.
            events: rows to make histories of, if a step is fitted on these; ``source`` by default.
            progress: function that is called with each step's name before it is fitted.

        Raises:
            DataError: the files or a column do not allow it; the message names file, column and remedy.
        """
        with connected(engine) as opened:
            data, past = open_sources(
                source, events, self.raw_columns, self.event_columns, opened
            )
            types = stages(self.steps, data.where, data.raw)
            states: list[StepState] = []
            chain = Chain(
                steps=self.steps,
                types=types,
                states=states,
                engine=opened,
                table=data.table,
                events=past.table,
            )
            with past.blaming(), data.blaming():
                for number, step in enumerate(self.steps):
                    if progress:
                        progress(str(step))
                    # Only the steps behind the columns of this one are run again over
                    # the rows.
                    table = chain.before(number, step.fit_reads)
                    states.append(step.fit(table, types[number], chain.run(number)))
        return FittedPreprocessor(
            steps=tuple(self.steps),
            keep=tuple(self.keep),
            raw=data.raw,
            states=tuple(states),
        )
