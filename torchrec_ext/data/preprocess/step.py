"""Step: one named operation on columns, as an Ibis expression for files and in numpy for a request's rows.

Chain: applies steps as expressions to an opened source, all of them or only those needed for a column.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_ext.data.preprocess.columns import Cells, Types
from torchrec_ext.data.preprocess.engines import Engine
from torchrec_ext.data.preprocess.engines import Table as Table

StepState = Any  # the result of fitting: a Vocabulary, or a dict of JSON values


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The engine and the rows available to a step beside its table.

    Args:
        engine: engine that runs expressions and holds tables.
        events: rows to make histories of, as they are before any step.
        column: function that returns the rows with one column as the step reads it, made by no more steps than that
            column comes from. A step that joins its table with a part of itself takes the part from here: the table
            would be computed twice, and twice again by the next such step.
    """

    engine: Engine
    events: Table
    column: Callable[[str], Table]


class Step(ABC):
    """One operation of a preprocessor. Subclasses are frozen dataclasses whose fields are JSON values."""

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """Names of the step's input columns."""

    @property
    @abstractmethod
    def writes(self) -> tuple[str, ...]:
        """Names of the step's output columns, new or replaced."""

    @property
    def fit_reads(self) -> tuple[str, ...]:
        """Names of the columns needed in fitting; none if nothing is fitted."""
        return ()

    @property
    def event_reads(self) -> tuple[str, ...]:
        """Names of the needed columns of :attr:`StepContext.events`."""
        return ()

    @abstractmethod
    def types(self, types: Types) -> Mapping[str, str]:
        """Returns the working types of the output columns.

        Raises:
            DataError: a column is missing or has a type that the step cannot take.
        """

    def fit(self, table: Table, types: Types, run: StepContext) -> StepState:
        """Fits the step to the training rows and returns its state."""
        return {}

    @abstractmethod
    def transform(
        self, table: Table, types: Types, state: StepState, run: StepContext
    ) -> Table:
        """Returns the table with ``writes`` added or replaced; other columns and the number of rows stay."""

    def request_types(self, raw: Mapping[str, str]) -> Mapping[str, str]:
        """Returns the raw columns of a request needed for the step, unless an earlier step writes them."""
        return {name: raw[name] for name in self.reads if name in raw}

    @abstractmethod
    def online(
        self, cells: Mapping[str, Cells], types: Types, state: StepState
    ) -> Mapping[str, Cells]:
        """Computes ``writes`` for a request's rows, value for value as ``transform`` does."""

    def problems(self, table: Table, types: Types) -> list[tuple[Any, str, str]]:
        """Returns the refused cases of a table, each as (boolean expression, column, rule and remedy)."""
        return []

    def vocab(self, state: StepState) -> Mapping[str, int]:
        """Returns the number of rows of each column's embedding table; row 0 is for unknown values."""
        return {}

    def meaning(self, state: StepState) -> Mapping[str, Any]:
        """Returns the fields and the state behind the step's values, as JSON can hold them."""
        return {"fields": dataclasses.asdict(self), "state": state}  # type: ignore[call-overload]

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


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Applies steps to a table, all fitted already or fitted one by one.

    Args:
        steps: steps, in order.
        types: the working types before each step, and after the last.
        states: states of the steps that are fitted already; a list may grow.
        engine: engine that runs the expressions.
        table: the rows as they are before any step.
        events: see :class:`StepContext`.
    """

    steps: Sequence[Step]
    types: Sequence[Types]
    states: Sequence[StepState]
    engine: Engine
    table: Table
    events: Table

    def run(self, number: int) -> StepContext:
        """Returns the context of step number ``number``."""
        # A function, since most steps need no part of their table.
        return StepContext(
            engine=self.engine,
            events=self.events,
            column=lambda name: self.before(number, (name,)),
        )

    def apply(self, number: int, table: Table) -> Table:
        """Returns the table after step number ``number``."""
        return self.steps[number].transform(
            table, self.types[number], self.states[number], self.run(number)
        )

    def before(self, number: int, columns: Collection[str]) -> Table:
        """Returns the rows before step number ``number``, with only the steps needed for ``columns`` applied."""
        table = self.table
        for index in ancestors(self.steps, number, columns):
            table = self.apply(index, table)
        return table


def ancestors(
    steps: Sequence[Step], number: int, columns: Collection[str]
) -> list[int]:
    """Returns the numbers of the steps before ``number`` needed to make the columns.

    Example:
        >>> from torchrec_ext.data.preprocess import Categorify, FillMissing, Normalize
        >>> steps = [FillMissing(column="age", value=0), Categorify(column="city"), Normalize(column="age")]
        >>> ancestors(steps, 2, ["age"])
        [0]
    """
    required_columns = set(columns)
    step_numbers = []
    # Backwards, as a step that makes a required column requires its own inputs from
    # earlier steps.
    for index in reversed(range(number)):
        if not required_columns.isdisjoint(steps[index].writes):
            step_numbers.append(index)
            required_columns.update(steps[index].reads)
    return step_numbers[::-1]
