"""Bucketize, LogClip, Normalize: steps on one number column; null, NaN and the infinities count as missing.

FillMissing: a value for null; for floats also for NaN and the infinities.

mean_and_std(), quantiles_of(), most_common(): statistics of number columns, the same from every engine.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pyarrow as pa

from torchrec_ext.data.preprocess.columns import NUMBERS, Cells, Types
from torchrec_ext.data.preprocess.engines import (
    count_rows,
    exact,
    number,
    step_function,
)
from torchrec_ext.data.preprocess.step import ColumnStep, StepContext, StepState, Table
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import check_choice, check_least

if TYPE_CHECKING:
    from torchrec_ext.data.preprocess.engines import Engine

Values = Any  # one column, x: float64, null if missing
_DIGITS = 10


def rounded(value: float) -> float:
    """Rounds to 10 significant digits: sums over many threads differ in the last ones, by engine and by run.

    Example:
        >>> rounded(0.1 + 0.2), rounded(123456.7890123456)
        (0.3, 123456.789)
    """
    return float(f"{value:.{_DIGITS - 1}e}")


def mean_and_std(
    step: Any, values: Values, where: str, engine: Engine
) -> tuple[float, float]:
    """Computes the mean and the population standard deviation.

    Raises:
        DataError: no value is a number, or the sum overflows.
    """
    values = values.filter(values.x.notnull())
    statistics = values.aggregate(
        n=values.count(), mean=values.x.mean(), std=values.x.std(how="pop")
    )
    row = engine.collect(statistics).to_pylist()[0]
    _check_not_empty(step, row["n"], where)
    mean = row["mean"]
    std = row["std"]
    # An engine answers an overflow with infinity, NaN or null.
    if mean is None or std is None or not math.isfinite(mean) or not math.isfinite(std):
        raise DataError(
            f"{where}: {step}: the sum of its values is beyond float64; clip the column first with LogClip"
        )
    return rounded(mean), rounded(std)


def quantiles_of(
    step: Any,
    values: Values,
    shares: Sequence[float | Fraction],
    where: str,
    engine: Engine,
) -> list[float]:
    """Returns, for each share, the smallest value with at least this share of the rows at or below it.

    Shares are exact fractions: 7 / 100 of 100 rows is, in floats, a little more than 7.

    Raises:
        DataError: no value is a number.
    """
    values = values.filter(values.x.notnull())
    size = count_rows(values, engine)
    _check_not_empty(step, size, where)
    # -0.0 and 0.0 are one value; adding 0.0 leaves the second.
    counts = values.group_by(x=values.x + 0.0).aggregate(n=lambda t: t.count())
    import ibis

    # The number of rows with a value up to x. Counts are exact in every engine;
    # quantile functions may interpolate.
    upto = counts.n.sum().over(
        ibis.window(order_by=counts.x, preceding=None, following=0)
    )
    counts = counts.mutate(upto=upto)
    needs = [max(1, math.ceil(share * size)) for share in shares]
    places = engine.register(pa.table({"place": sorted(set(needs))}))
    # Each place is reached by one value: the first with so many rows up to it.
    reached = counts.inner_join(
        places, [counts.upto >= places.place, counts.upto - counts.n < places.place]
    )
    rows = engine.collect(reached.select("place", "x")).to_pylist()
    values_at = {row["place"]: float(row["x"]) for row in rows}
    return [values_at[need] for need in needs]


def most_common(step: Any, values: Values, where: str, engine: Engine) -> Any:
    """Returns the value with the most rows, the smallest one of a tie.

    Raises:
        DataError: every value is missing.
    """
    values = values.filter(values.x.notnull())
    counts = values.group_by("x").aggregate(n=lambda t: t.count())
    rows = engine.collect(counts.order_by(counts.n.desc(), counts.x.asc()).limit(1))[
        "x"
    ].to_pylist()
    _check_not_empty(step, len(rows), where)
    return rows[0]


def _check_not_empty(step: Any, size: int, where: str) -> None:
    if not size:
        raise DataError(
            f"{where}: {step}: every value is missing; leave the column out, or give the value to fill it with"
        )


class _NumberStep(ColumnStep):
    """A step from one number column to one column."""

    def types(self, types: Types) -> Mapping[str, str]:
        """Returns floats."""
        types.need(self, self.column, NUMBERS, "give it numbers")
        return {self.writes[0]: "float64"}

    def _number(self, table: Table, types: Types, run: StepContext) -> Any:
        return number(table[self.column], types[self.column], run.engine)


@dataclass(frozen=True, kw_only=True)
class Bucketize(_NumberStep):
    """Maps numbers to ids: 1 + the number of boundaries at or below the number; 0 for a missing one.

    Args:
        column: name of a column of integers or floats.
        boundaries: rising numbers; give these or ``quantiles``.
        quantiles: number of buckets of about equally many training rows to fit; equal boundaries become one.
        output: name of the result; ``column`` by default.
    """

    column: str
    boundaries: tuple[float, ...] | None = None
    quantiles: int | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        if (self.boundaries is None) == (self.quantiles is None):
            raise ValueError(
                f"Bucketize('{self.column}'): give either boundaries or quantiles"
            )
        check_least(f"Bucketize('{self.column}'): quantiles", self.quantiles, 2)
        edges = list(self.boundaries or ())
        # NaN is not in order with any number, so it is looked for first.
        if not all(map(math.isfinite, edges)) or edges != sorted(set(edges)):
            raise ValueError(
                f"Bucketize('{self.column}'): boundaries={self.boundaries}: must rise, each finite and given once"
            )

    @property
    def fit_reads(self) -> tuple[str, ...]:
        """``column``, if boundaries are fitted."""
        return (self.column,) if self.quantiles else ()

    def types(self, types: Types) -> Mapping[str, str]:
        """Returns integers."""
        types.need(
            self, self.column, NUMBERS, "give it numbers; Categorify takes strings"
        )
        return {self.writes[0]: "int64"}

    def fit(self, table: Table, types: Types, run: StepContext) -> StepState:
        """Fits the boundaries."""
        if self.quantiles is None:
            return {"boundaries": [float(edge) for edge in self.boundaries or ()]}
        shares = [
            Fraction(bucket, self.quantiles) for bucket in range(1, self.quantiles)
        ]
        values = table.select(x=self._number(table, types, run))
        boundaries = quantiles_of(self, values, shares, types.where, run.engine)
        return {"boundaries": sorted(set(boundaries))}

    def transform(
        self, table: Table, types: Types, state: StepState, run: StepContext
    ) -> Table:
        """Bisects the boundaries by nested conditions."""
        x = self._number(table, types, run)
        edges = state["boundaries"]
        bucket = step_function(
            x, [exact(edge) for edge in edges], range(1, len(edges) + 2)
        )
        return table.mutate(
            {self.writes[0]: x.isnull().ifelse(0, bucket).cast("int64")}
        )

    def online(
        self, cells: Mapping[str, Cells], types: Types, state: StepState
    ) -> Mapping[str, Cells]:
        """Bisects the boundaries."""
        x, is_number = cells[self.column].numbers()
        buckets = (
            np.searchsorted(
                np.array(state["boundaries"], dtype=np.float64), x, side="right"
            )
            + 1
        )
        return {
            self.writes[0]: cells[self.column].with_values(
                np.where(is_number, buckets, 0).astype(np.int64)
            )
        }

    def vocab(self, state: StepState) -> Mapping[str, int]:
        """Returns the number of buckets + 1, row 0 included."""
        return {self.writes[0]: len(state["boundaries"]) + 2}


@dataclass(frozen=True, kw_only=True)
class LogClip(_NumberStep):
    """Computes ln(1 + x - low) of x clipped to [low, high]: for counts and prices, which have a long tail.

    The logarithm is rounded to 32 bits. Java's and C's differ in the last of 64 (Spark's from numpy's in 0.3 % of
    300,000 numbers), and a step after this one could make a bucket of that.

    Args:
        column: name of a column of integers or floats.
        low: lower limit, to which smaller numbers are raised.
        high: upper limit, to which greater numbers are lowered; no limit by default.
        log: take the logarithm; False only clips.
        output: name of the result; ``column`` by default.
    """

    column: str
    low: float = 0.0
    high: float | None = None
    log: bool = True
    output: str | None = None

    def __post_init__(self) -> None:
        high = self.low if self.high is None else self.high
        if not math.isfinite(self.low) or not math.isfinite(high) or high < self.low:
            raise ValueError(
                f"LogClip('{self.column}'): low={self.low}, high={self.high}: must be finite, low at most high"
            )

    def transform(
        self, table: Table, types: Types, state: StepState, run: StepContext
    ) -> Table:
        """Clips by conditions and takes the logarithm."""
        x = self._number(table, types, run)
        x = (x < exact(self.low)).ifelse(exact(self.low), x)
        if self.high is not None:
            x = (x > exact(self.high)).ifelse(exact(self.high), x)
        if self.log:
            x = (x - exact(self.low) + exact(1.0)).ln().cast("float32").cast("float64")
        return table.mutate({self.writes[0]: x})

    def online(
        self, cells: Mapping[str, Cells], types: Types, state: StepState
    ) -> Mapping[str, Cells]:
        """Computes the same in numpy."""
        x, is_number = cells[self.column].numbers()
        x = np.clip(np.where(is_number, x, self.low), self.low, self.high)
        # By way of 32 bits, as `transform` does.
        if self.log:
            x = np.log(x - self.low + 1.0).astype(np.float32).astype(np.float64)
        return {self.writes[0]: cells[self.column].with_values(x, is_number)}


@dataclass(frozen=True, kw_only=True)
class Normalize(_NumberStep):
    """Computes (x - mean) / std with the training rows' statistics, rounded to 10 digits so that engines agree.

    A column with one value only is divided by 1.

    Args:
        column: name of a column of integers or floats.
        output: name of the result; ``column`` by default.
    """

    column: str
    output: str | None = None

    @property
    def fit_reads(self) -> tuple[str, ...]:
        """``column``."""
        return (self.column,)

    def fit(self, table: Table, types: Types, run: StepContext) -> StepState:
        """Fits mean and standard deviation."""
        values = table.select(x=self._number(table, types, run))
        mean, std = mean_and_std(self, values, types.where, run.engine)
        # It is 0 for a column with one value.
        return {"mean": mean, "std": std or 1.0}

    def transform(
        self, table: Table, types: Types, state: StepState, run: StepContext
    ) -> Table:
        """Subtracts the mean and divides by the deviation."""
        x = self._number(table, types, run)
        return table.mutate(
            {self.writes[0]: (x - exact(state["mean"])) / exact(state["std"])}
        )

    def online(
        self, cells: Mapping[str, Cells], types: Types, state: StepState
    ) -> Mapping[str, Cells]:
        """Computes the same in numpy."""
        x, is_number = cells[self.column].numbers()
        with np.errstate(all="ignore"):
            return {
                self.writes[0]: cells[self.column].with_values(
                    (x - state["mean"]) / state["std"], is_number
                )
            }


Statistic = Literal["mean", "median", "most_common"]


@dataclass(frozen=True, kw_only=True)
class FillMissing(ColumnStep):
    """Replaces missing values.

    Args:
        column: name of a column of integers, floats or strings.
        value: value to put in, of the column's type; give this or ``statistic``.
        statistic: statistic of the training rows to put in: ``mean`` (the result is a float), ``median`` (the lower
            one) or ``most_common``.
        output: name of the result; ``column`` by default.
    """

    column: str
    value: int | float | str | None = None
    statistic: Statistic | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        if (self.value is None) == (self.statistic is None):
            raise ValueError(
                f"FillMissing('{self.column}'): give either value, of the column's type, or statistic: "
                f"{', '.join(get_args(Statistic))}"
            )
        if self.statistic is not None:
            check_choice(
                f"FillMissing('{self.column}'): statistic",
                self.statistic,
                get_args(Statistic),
            )
        # An integer too, since a column of floats takes it.
        if (
            isinstance(self.value, int | float)
            and not abs(self.value) <= sys.float_info.max
        ):
            text = str(self.value)
            if len(text) >= 40:
                text = f"{text[:20]}... of {len(text)} digits"
            raise ValueError(
                f"FillMissing('{self.column}'): value={text}: must be finite"
            )

    @property
    def fit_reads(self) -> tuple[str, ...]:
        """``column``, if a statistic is fitted."""
        return (self.column,) if self.statistic else ()

    def types(self, types: Types) -> Mapping[str, str]:
        """Returns the column's own type; float for a mean or a median."""
        numeric = self.statistic in ("mean", "median")
        allowed = NUMBERS if numeric else NUMBERS | {"string"}
        kind = types.need(
            self, self.column, allowed, "choose another value or statistic"
        )
        fits: Any = {"string": str, "int64": int, "float64": (int, float)}[kind]
        # To Python a bool is an int.
        if self.value is not None and (
            isinstance(self.value, bool) or not isinstance(self.value, fits)
        ):
            raise DataError(
                f"{types.where}: column '{self.column}' is {kind}, {self} has value={self.value!r}; give a value of "
                "that type"
            )
        if (
            kind == "int64"
            and isinstance(self.value, int)
            and not -(2**63) <= self.value < 2**63
        ):
            raise DataError(
                f"{types.where}: {self} has value={self.value}, which does not fit 64 bits; give a smaller one"
            )
        return {self.writes[0]: "float64" if numeric else kind}

    def fit(self, table: Table, types: Types, run: StepContext) -> StepState:
        """Returns the value, or computes the statistic."""
        if self.statistic is None:
            return {"value": self.value}
        kind = types[self.column]
        x = table[self.column]
        # Integers and texts stay what they are: as a float a large integer would be
        # another one.
        if kind == "float64" or self.statistic != "most_common":
            x = number(x, kind, run.engine)
        values = table.select(x=x)
        if self.statistic == "most_common":
            return {"value": most_common(self, values, types.where, run.engine)}
        if self.statistic == "mean":
            return {"value": mean_and_std(self, values, types.where, run.engine)[0]}
        return {"value": quantiles_of(self, values, [0.5], types.where, run.engine)[0]}

    def transform(
        self, table: Table, types: Types, state: StepState, run: StepContext
    ) -> Table:
        """Replaces the missing values of the column."""
        kind = self.types(types)[self.writes[0]]
        value = state["value"]
        column = table[self.column]
        if kind == "float64":
            # Makes NaN and the infinities null.
            column = number(column, types[self.column], run.engine)
            value = exact(value)
        return table.mutate({self.writes[0]: column.fill_null(value)})

    def online(
        self, cells: Mapping[str, Cells], types: Types, state: StepState
    ) -> Mapping[str, Cells]:
        """Computes the same in numpy."""
        column = cells[self.column]
        values = column.values
        is_present = column.valid
        if self.types(types)[self.writes[0]] == "float64":
            values, is_present = column.numbers()
        # A copy: the cells may be the request's own memory.
        values = values.copy()
        values[~is_present] = state["value"]
        return {self.writes[0]: column.with_values(np.asarray(values))}
