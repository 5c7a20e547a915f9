"""Step: one named operation on columns, written twice: as an Ibis expression for files and in numpy for a request's rows.

Chain: steps as expressions on an opened source, one after the other or only those that a column comes from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_ext.data.preprocess.columns import Cells, Types
from torchrec_ext.data.preprocess.engines import Engine

Table = Any  # an ibis Table; ibis is imported by the engines alone, when files are processed
State = Any  # what fitting found: a Vocabulary, or a dict of JSON values


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What a step may use beside its table.

    Args:
        engine: runs expressions and holds tables.
        events: the rows that histories are made of, as they stand before any step.
        column: the rows with one column as the step finds it, made by no more steps than that column comes from. A step
            that joins its table with something of itself takes it from here: the table would be computed twice, and
            twice again by the next.
    """

    engine: Engine
    events: Table
    column: Callable[[str], Table]


class Step(ABC):
    """One operation of a preprocessor. Subclasses are frozen dataclasses whose fields are JSON values."""

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """The columns that it needs."""

    @property
    @abstractmethod
    def writes(self) -> tuple[str, ...]:
        """The columns that it makes or replaces."""

    @property
    def fit_reads(self) -> tuple[str, ...]:
        """The columns that fitting looks at; none where nothing is fitted."""
        return ()

    @property
    def event_reads(self) -> tuple[str, ...]:
        """The columns of ``Run.events`` that it needs."""
        return ()

    @abstractmethod
    def types(self, types: Types) -> Mapping[str, str]:
        """The working types of what it writes.

        Raises:
            DataError: a column is missing or has a type that the step cannot take.
        """

    def fit(self, table: Table, types: Types, run: StepContext) -> State:
        """What is to be known of the training rows."""
        return {}

    @abstractmethod
    def transform(self, table: Table, types: Types, state: State, run: StepContext) -> Table:
        """The table with ``writes`` added or replaced; further columns stay, the number of rows too."""

    def request_types(self, raw: Mapping[str, str]) -> Mapping[str, str]:
        """The raw columns that a request must have for it, of those that no earlier step writes."""
        return {name: raw[name] for name in self.reads if name in raw}

    @abstractmethod
    def online(self, cells: Mapping[str, Cells], types: Types, state: State) -> Mapping[str, Cells]:
        """``writes`` for a request's rows, value for value what ``transform`` gives."""

    def problems(self, table: Table, types: Types) -> list[tuple[Any, str, str]]:
        """What a table may not hold: (boolean expression, column, rule and remedy) each."""
        return []

    def vocab(self, state: State) -> Mapping[str, int]:
        """By column, the rows that its embedding table needs, row 0 for the unknown."""
        return {}

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.writes))})"


class ColumnStep(Step):
    """A step from one column to one column."""

    column: str
    output: str | None

    @property
    def reads(self) -> tuple[str, ...]:
        """``column``."""
        return (self.column,)

    @property
    def writes(self) -> tuple[str, ...]:
        """``output``."""
        return (self.output or self.column,)


def positive(step: str, name: str, value: int | None) -> None:
    """Refuses a number below 1.

    Raises:
        ValueError: naming step, argument and value.
    """
    if value is not None and value < 1:
        raise ValueError(f"{step}: {name}={value}: must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Steps that are fitted, or will be one by one.

    Args:
        steps: in order.
        types: the working types before each step, and after the last.
        states: of the steps that are fitted already; a list may grow.
        engine: runs the expressions.
        table: the rows as they stand before any step.
        events: see :class:`StepContext`.
    """

    steps: Sequence[Step]
    types: Sequence[Types]
    states: Sequence[State]
    engine: Engine
    table: Table
    events: Table

    def run(self, at: int) -> StepContext:
        """What step ``at`` may use."""
        return StepContext(engine=self.engine, events=self.events, column=lambda name: self.before(at, (name,)))

    def apply(self, at: int, table: Table) -> Table:
        """The table after step ``at``."""
        return self.steps[at].transform(table, self.types[at], self.states[at], self.run(at))

    def before(self, at: int, columns: Collection[str]) -> Table:
        """The rows before step ``at``, with only those steps applied that ``columns`` come from."""
        table = self.table
        for index in ancestors(self.steps, at, columns):
            table = self.apply(index, table)
        return table


def ancestors(steps: Sequence[Step], at: int, columns: Collection[str]) -> list[int]:
    """Which of the steps before ``at`` the columns come from.

    Example:
        >>> from torchrec_ext.data.preprocess import Categorify, FillMissing, Normalize
        >>> steps = [FillMissing(column="age", value=0), Categorify(column="city"), Normalize(column="age")]
        >>> ancestors(steps, 2, ["age"])
        [0]
    """
    needed = set(columns)
    chosen = []
    for index in reversed(range(at)):
        if needed & set(steps[index].writes):
            chosen.append(index)
            needed |= set(steps[index].reads)
    return chosen[::-1]
