"""Chain: steps as expressions on an opened source, one after the other or only those that a column comes from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torchrec_ext.data.preprocess.column_types import Types
from torchrec_ext.data.preprocess.engines import Engine
from torchrec_ext.data.preprocess.step import Run, State, Step, Table


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Steps that are fitted, or will be one by one.

    Args:
        steps: in order.
        types: the working types before each step, and after the last.
        states: of the steps that are fitted already; a list may grow.
        engine: runs the expressions.
        table: the rows as they stand before any step.
        events: see :class:`Run`.
    """

    steps: Sequence[Step]
    types: Sequence[Types]
    states: Sequence[State]
    engine: Engine
    table: Table
    events: Table

    def run(self, at: int) -> Run:
        """What step ``at`` may use."""
        return Run(engine=self.engine, events=self.events, column=lambda name: self.before(at, (name,)))

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
