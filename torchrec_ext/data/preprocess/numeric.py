"""Bucketize, LogClip, Normalize: one number column each. Null, NaN and the infinities are one thing to them: missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from torchrec_ext.data.preprocess.cells import Cells
from torchrec_ext.data.preprocess.column_types import NUMBERS, Types
from torchrec_ext.data.preprocess.expressions import exact, number, step_function
from torchrec_ext.data.preprocess.statistics import mean_and_std, quantiles_of
from torchrec_ext.data.preprocess.step import ColumnStep, Run, State, Table


class _NumberStep(ColumnStep):
    """A step from one number column to one column."""

    def types(self, types: Types) -> Mapping[str, str]:
        """Floats."""
        types.need(self, self.column, NUMBERS, "give it numbers")
        return {self.writes[0]: "float64"}

    def _number(self, table: Table, types: Types, run: Run) -> Any:
        return number(table[self.column], types[self.column], run.engine)


@dataclass(frozen=True, kw_only=True)
class Bucketize(_NumberStep):
    """Numbers to ids: 1 + how many boundaries are at or below the number; 0 for a missing one.

    Args:
        column: integers or floats.
        boundaries: rising numbers; or
        quantiles: how many buckets of about equally many training rows to fit. Equal boundaries become one.
        output: the name of the result; ``column`` itself where not given.
    """

    column: str
    boundaries: tuple[float, ...] | None = None
    quantiles: int | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        if (self.boundaries is None) == (self.quantiles is None):
            raise ValueError(f"Bucketize('{self.column}'): give either boundaries or quantiles")
        if self.quantiles is not None and self.quantiles < 2:
            raise ValueError(f"Bucketize('{self.column}'): quantiles={self.quantiles}: must be 2 or more")
        edges = list(self.boundaries or ())
        if not all(map(math.isfinite, edges)) or edges != sorted(set(edges)):
            raise ValueError(f"Bucketize('{self.column}'): boundaries={self.boundaries}: must rise, each finite and given once")

    @property
    def fit_reads(self) -> tuple[str, ...]:
        """``column`` where boundaries are fitted."""
        return (self.column,) if self.quantiles else ()

    def types(self, types: Types) -> Mapping[str, str]:
        """Integers."""
        types.need(self, self.column, NUMBERS, "give it numbers; Categorify takes strings")
        return {self.writes[0]: "int64"}

    def fit(self, table: Table, types: Types, run: Run) -> State:
        """The boundaries."""
        if self.quantiles is None:
            return {"boundaries": [float(edge) for edge in self.boundaries or ()]}
        shares = [Fraction(at, self.quantiles) for at in range(1, self.quantiles)]
        found = quantiles_of(self, table.select(x=self._number(table, types, run)), shares, types.where, run.engine)
        return {"boundaries": sorted(set(found))}

    def transform(self, table: Table, types: Types, state: State, run: Run) -> Table:
        """Bisection, as nested conditions."""
        x = self._number(table, types, run)
        edges = state["boundaries"]
        bucket = step_function(x, [exact(edge) for edge in edges], range(1, len(edges) + 2))
        return table.mutate({self.writes[0]: x.isnull().ifelse(0, bucket).cast("int64")})

    def online(self, cells: Mapping[str, Cells], types: Types, state: State) -> Mapping[str, Cells]:
        """Bisection."""
        x, known = cells[self.column].numbers()
        buckets = np.searchsorted(np.array(state["boundaries"], dtype=np.float64), x, side="right") + 1
        return {self.writes[0]: cells[self.column].with_values(np.where(known, buckets, 0).astype(np.int64))}

    def vocab(self, state: State) -> Mapping[str, int]:
        """The buckets and row 0."""
        return {self.writes[0]: len(state["boundaries"]) + 2}


@dataclass(frozen=True, kw_only=True)
class LogClip(_NumberStep):
    """ln(1 + x - low) of x clipped to [low, high]: for counts and prices, which have a long tail.

    The logarithm is rounded to 32 bits. Java's and C's differ in the last of 64 (Spark's from numpy's in 0.3 % of 300,000 numbers),
    and a step after this one could make a bucket of that.

    Args:
        column: integers or floats.
        low: smaller numbers become this.
        high: greater numbers become this; no limit where not given.
        log: False clips only.
        output: the name of the result; ``column`` itself where not given.
    """

    column: str
    low: float = 0.0
    high: float | None = None
    log: bool = True
    output: str | None = None

    def __post_init__(self) -> None:
        high = self.low if self.high is None else self.high
        if not math.isfinite(self.low) or not math.isfinite(high) or high < self.low:
            raise ValueError(f"LogClip('{self.column}'): low={self.low}, high={self.high}: must be finite, low at most high")

    def transform(self, table: Table, types: Types, state: State, run: Run) -> Table:
        """Conditions and a logarithm."""
        x = self._number(table, types, run)
        x = (x < exact(self.low)).ifelse(exact(self.low), x)
        if self.high is not None:
            x = (x > exact(self.high)).ifelse(exact(self.high), x)
        if self.log:
            x = (x - exact(self.low) + exact(1.0)).ln().cast("float32").cast("float64")
        return table.mutate({self.writes[0]: x})

    def online(self, cells: Mapping[str, Cells], types: Types, state: State) -> Mapping[str, Cells]:
        """The same in numpy."""
        x, known = cells[self.column].numbers()
        x = np.clip(np.where(known, x, self.low), self.low, self.high)
        if self.log:
            x = np.log(x - self.low + 1.0).astype(np.float32).astype(np.float64)
        return {self.writes[0]: cells[self.column].with_values(x, known)}


@dataclass(frozen=True, kw_only=True)
class Normalize(_NumberStep):
    """(x - mean) / standard deviation of the training rows, both rounded to 10 digits so that engines agree.

    A column with one value only is divided by 1.

    Args:
        column: integers or floats.
        output: the name of the result; ``column`` itself where not given.
    """

    column: str
    output: str | None = None

    @property
    def fit_reads(self) -> tuple[str, ...]:
        """``column``."""
        return (self.column,)

    def fit(self, table: Table, types: Types, run: Run) -> State:
        """Mean and standard deviation."""
        mean, std = mean_and_std(self, table.select(x=self._number(table, types, run)), types.where, run.engine)
        return {"mean": mean, "std": std or 1.0}

    def transform(self, table: Table, types: Types, state: State, run: Run) -> Table:
        """A difference and a quotient."""
        x = self._number(table, types, run)
        return table.mutate({self.writes[0]: (x - exact(state["mean"])) / exact(state["std"])})

    def online(self, cells: Mapping[str, Cells], types: Types, state: State) -> Mapping[str, Cells]:
        """The same in numpy."""
        x, known = cells[self.column].numbers()
        with np.errstate(all="ignore"):
            return {self.writes[0]: cells[self.column].with_values((x - state["mean"]) / state["std"], known)}
