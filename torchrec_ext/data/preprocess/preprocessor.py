"""Preprocessor: steps in an order. Fitted once on training rows, then applied to files and, the same, to a request's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_ext.data.preprocess.column_types import Types
from torchrec_ext.data.preprocess.engines import connected
from torchrec_ext.data.preprocess.fitted import FittedPreprocessor, stages
from torchrec_ext.data.preprocess.sources import Source
from torchrec_ext.data.preprocess.step import Run, State, Step, Table
from torchrec_ext.data.preprocess.tables import open_source

FitProgress = Callable[[str], None]


@dataclass(frozen=True)
class Preprocessor:
    """What to do to which columns.

    The result has a column for everything that a step writes, and those in ``keep``. A step reads what earlier steps wrote, or else
    a column of the files.

    Args:
        steps: in order.
        keep: columns to hand on as they are, such as the label; in a request they may be left out. Times become seconds since 1970.

    Raises:
        ValueError: the steps contradict one another.

    Example:
        >>> from torchrec_ext.data.preprocess import Categorify, FillMissing, Normalize
        >>> steps = [Categorify(column="city"), FillMissing(column="age", statistic="median"), Normalize(column="age")]
        >>> import pyarrow as pa, pyarrow.parquet as pq, tempfile
        >>> file = tempfile.mkdtemp() + "/rows.parquet"
        >>> pq.write_table(pa.table({"city": ["Rome", "Oslo", "Rome"], "age": [20, 40, None]}), file)
        >>> fitted = Preprocessor(steps).fit(file)  # doctest: +SKIP
        >>> fitted.online({"city": ["Oslo", "Bern"], "age": [None, 40]})["city"].values  # doctest: +SKIP
        array([2, 0])
    """

    steps: Sequence[Step]
    keep: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        object.__setattr__(self, "keep", tuple(self.keep))
        written: set[str] = set()
        for step in self.steps:
            late = sorted(set(step.reads) & written) if type(step).__name__ == "History" else []
            if late:
                raise ValueError(f"{step} reads {late}, which an earlier step replaces; put it first")
            written |= set(step.writes)
        both = sorted(written & set(self.keep))
        if both:
            raise ValueError(f"keep={both}: a step writes these columns; give the step another output, or do not keep them")
        if not written:
            raise ValueError("steps: there is none; give at least one")

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """The columns that the files must have."""
        needed: dict[str, None] = {}
        written: set[str] = set()
        for step in self.steps:
            needed.update(dict.fromkeys(name for name in step.reads if name not in written))
            written |= set(step.writes)
        return (*needed, *(name for name in self.keep if name not in needed))

    def fit(
        self, source: Source, *, engine: Any = "duckdb", events: Source | None = None, progress: FitProgress | None = None
    ) -> FittedPreprocessor:
        """Looks at training rows, and at no others.

        Args:
            source: parquet files, folders, patterns, remote addresses, or a table of the engine.
            engine: see :func:`~torchrec_ext.data.preprocess.engines.connected`.
            events: where a step is fitted on histories, the rows that these are made of; ``source`` where not given.
            progress: is called with each step's name before it is fitted.

        Raises:
            DataError: the files or a column do not allow it; the message names file, column and remedy.
        """
        with connected(engine) as opened:
            data = open_source(source, self.raw_columns, opened)
            past = data if events is None else open_source(events, self.raw_columns, opened)
            run = Run(engine=opened, events=past.table)
            types = stages(self.steps, data.where, data.raw)
            states: list[State] = []
            with data.blaming():
                for at, step in enumerate(self.steps):
                    if progress:
                        progress(str(step))
                    table = apply_before(self.steps, at, data.table, types, states, run) if step.fit_reads else data.table
                    states.append(step.fit(table, types[at], run))
        return FittedPreprocessor(steps=tuple(self.steps), keep=tuple(self.keep), raw=data.raw, states=tuple(states))


def apply_before(steps: Sequence[Step], at: int, table: Table, types: list[Types], states: Sequence[State], run: Run) -> Table:
    """The table as step ``at`` sees it when fitted, with only those steps applied that its columns come from."""
    for index in _ancestors(steps, at):
        table = steps[index].transform(table, types[index], states[index], run)
    return table


def _ancestors(steps: Sequence[Step], at: int) -> list[int]:
    needed = set(steps[at].fit_reads)
    chosen = []
    for index in reversed(range(at)):
        if needed & set(steps[index].writes):
            chosen.append(index)
            needed |= set(steps[index].reads)
    return chosen[::-1]
