"""FillMissing: a value for null; for floats also for NaN and the infinities."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from torchrec_ext.data.preprocess.cells import Cells
from torchrec_ext.data.preprocess.column_types import NUMBERS, Types
from torchrec_ext.data.preprocess.expressions import exact, number
from torchrec_ext.data.preprocess.statistics import mean_and_std, most_common, quantiles_of
from torchrec_ext.data.preprocess.step import ColumnStep, Run, State, Table
from torchrec_ext.schema import DataError

Statistic = Literal["mean", "median", "most_common"]


@dataclass(frozen=True, kw_only=True)
class FillMissing(ColumnStep):
    """Puts a value where there is none.

    Args:
        column: integers, floats or strings.
        value: what to put there, of the column's type; or
        statistic: of the training rows: ``mean`` (the result is a float), ``median`` (the lower one) or ``most_common``.
        output: the name of the result; ``column`` itself where not given.
    """

    column: str
    value: int | float | str | None = None
    statistic: Statistic | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        if (self.value is None) == (self.statistic is None):
            raise ValueError(f"FillMissing('{self.column}'): give either value or statistic")
        if self.statistic is not None and self.statistic not in get_args(Statistic):
            allowed = ", ".join(get_args(Statistic))
            raise ValueError(f"FillMissing('{self.column}'): statistic={self.statistic!r}: must be one of {allowed}")
        if isinstance(self.value, int | float) and not abs(self.value) <= sys.float_info.max:
            raise ValueError(f"FillMissing('{self.column}'): value={_short(self.value)}: must be finite")

    @property
    def fit_reads(self) -> tuple[str, ...]:
        """``column`` where a statistic is wanted."""
        return (self.column,) if self.statistic else ()

    def types(self, types: Types) -> Mapping[str, str]:
        """The column's own type; float for a mean or a median."""
        numeric = self.statistic in ("mean", "median")
        found = types.need(self, self.column, NUMBERS if numeric else NUMBERS | {"string"}, "choose another value or statistic")
        fits: Any = {"string": str, "int64": int, "float64": (int, float)}[found]
        if self.value is not None and (isinstance(self.value, bool) or not isinstance(self.value, fits)):
            raise DataError(
                f"{types.where}: column '{self.column}' is {found}, {self} has value={self.value!r}; give a value of that type"
            )
        if found == "int64" and isinstance(self.value, int) and not -(2**63) <= self.value < 2**63:
            raise DataError(f"{types.where}: {self} has value={self.value}, which does not fit 64 bits; give a smaller one")
        return {self.writes[0]: "float64" if numeric else found}

    def fit(self, table: Table, types: Types, run: Run) -> State:
        """The value."""
        if self.statistic is None:
            return {"value": self.value}
        kind = types[self.column]
        if self.statistic == "most_common":
            x = number(table[self.column], kind, run.engine) if kind == "float64" else table[self.column]
            return {"value": most_common(self, table.select(x=x), types.where, run.engine)}
        values = table.select(x=number(table[self.column], kind, run.engine))
        if self.statistic == "mean":
            return {"value": mean_and_std(self, values, types.where, run.engine)[0]}
        return {"value": quantiles_of(self, values, [0.5], types.where, run.engine)[0]}

    def transform(self, table: Table, types: Types, state: State, run: Run) -> Table:
        """The first of column and value that is there."""
        kind, value = self.types(types)[self.writes[0]], state["value"]
        column = number(table[self.column], types[self.column], run.engine) if kind == "float64" else table[self.column]
        filler = exact(value) if kind == "float64" else run.engine.text(value) if kind == "string" else value
        return table.mutate({self.writes[0]: column.fill_null(filler)})

    def online(self, cells: Mapping[str, Cells], types: Types, state: State) -> Mapping[str, Cells]:
        """The same in numpy."""
        found = cells[self.column]
        values, known = found.numbers() if self.types(types)[self.writes[0]] == "float64" else (found.values, found.valid)
        values = values.copy()
        values[~known] = state["value"]
        return {self.writes[0]: found.with_values(np.asarray(values))}


def _short(value: float) -> str:
    text = str(value)
    return text if len(text) < 40 else f"{text[:20]}... of {len(text)} digits"
