"""Bucketize, LogClip, Normalize: steps on one number column; null, NaN and the infinities count as missing.

FillMissing: a number for these.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrec_ext.data.preprocess.columns import (
    FLOAT64,
    INT64,
    NUMBERS,
    Cells,
    Columns,
    Types,
)
from torchrec_ext.data.preprocess.step import (
    ColumnStep,
    Query,
    StepState,
    finite,
    quoted,
)
from torchrec_ext.schema import DataError
from torchrec_ext.schema.validation import check_least

_DIGITS = 10


def rounded(value: float) -> float:
    """Rounds to 10 significant digits: sums over many threads differ in the last ones from run to run.

    Example:
        >>> rounded(0.1 + 0.2), rounded(123456.7890123456)
        (0.3, 123456.789)
    """
    return float(f"{value:.{_DIGITS - 1}e}")


def _finite(column: str) -> str:
    """Returns a table with the finite numbers of a column as doubles, ``x``, in SQL."""
    x = f"CAST({quoted(column)} AS DOUBLE)"
    # -0.0 and 0.0 are one value; adding 0.0 leaves the second.
    return f"(SELECT {x} + 0.0 AS x FROM fit_rows WHERE {finite(x)})"


def _check_not_empty(step: Any, size: int, where: str) -> None:
    if not size:
        raise DataError(
            f"{where}: {step}: every value is missing; leave the column out, or give the value to fill it with"
        )


class _NumberStep(ColumnStep):
    """A step from one column of numbers to one column, of floats."""

    takes = NUMBERS
    remedy = "give it numbers"
    makes = FLOAT64


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
    remedy = "give it numbers; Categorify takes strings"
    makes = INT64

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
    def fit_column(self) -> str | None:
        """``column``, if boundaries are fitted."""
        return self.column if self.quantiles else None

    def fit(self, query: Query, types: Types, where: str) -> StepState:
        """Fits the boundaries."""
        if self.quantiles is None:
            return {"boundaries": [float(edge) for edge in self.boundaries or ()]}
        # The smallest value with at least this share of the rows at or below it: counts
        # are exact, and take less memory than DuckDB's quantiles.
        parts = self.quantiles
        boundaries = query(
            f"WITH counts AS (SELECT x, count(*) AS n FROM {_finite(self.column)} GROUP BY x), "
            "sums AS (SELECT x, n, sum(n) OVER (ORDER BY x) AS upto, sum(n) OVER () AS total FROM counts) "
            f"SELECT x FROM sums WHERE least(upto * {parts} // total, {parts - 1}) > (upto - n) * {parts} // total "
            "ORDER BY x"
        )["x"].to_pylist()
        _check_not_empty(self, len(boundaries), where)
        return {"boundaries": boundaries}

    def apply(self, columns: Columns, state: StepState) -> Columns:
        """Bisects the boundaries."""
        x = columns[self.column].numbers
        edges = np.array(state["boundaries"], dtype=np.float64)
        buckets = edges.searchsorted(x, side="right") + 1
        return {self.writes[0]: Cells(np.where(np.isnan(x), 0, buckets))}

    def vocab(self, state: StepState) -> Mapping[str, int]:
        """Returns the number of buckets + 1, row 0 included."""
        return {self.writes[0]: len(state["boundaries"]) + 2}


@dataclass(frozen=True, kw_only=True)
class LogClip(_NumberStep):
    """Computes ln(1 + x - low) of x clipped to [low, high]: for counts and prices, which have a long tail.

    The logarithm is rounded to 32 bits: machines differ in the last of 64, and a step after this one could make a
    bucket of that.

    Args:
        column: name of a column of integers or floats.
        low: lower limit, to which smaller numbers are raised.
        high: upper limit, to which greater numbers are lowered; no limit by default.
        output: name of the result; ``column`` by default.
    """

    column: str
    low: float = 0.0
    high: float | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        high = self.low if self.high is None else self.high
        if not math.isfinite(self.low) or not math.isfinite(high) or high < self.low:
            raise ValueError(
                f"LogClip('{self.column}'): low={self.low}, high={self.high}: must be finite, low at most high"
            )

    def apply(self, columns: Columns, state: StepState) -> Columns:
        """Clips, and takes the logarithm."""
        x = np.maximum(columns[self.column].numbers, self.low)
        if self.high is not None:
            x = np.minimum(x, self.high)
        logarithm = np.log(x - self.low + 1.0).astype(np.float32)
        return {self.writes[0]: Cells(logarithm.astype(np.float64))}


@dataclass(frozen=True, kw_only=True)
class Normalize(_NumberStep):
    """Computes (x - mean) / std with the training rows' statistics, rounded to 10 digits.

    A column with one value only is divided by 1.

    Args:
        column: name of a column of integers or floats.
        output: name of the result; ``column`` by default.
    """

    column: str
    output: str | None = None

    @property
    def fit_column(self) -> str:
        """``column``."""
        return self.column

    def fit(self, query: Query, types: Types, where: str) -> StepState:
        """Fits mean and standard deviation."""
        numbers = _finite(self.column)
        sql = (
            f"SELECT count(*) AS n, avg(x) AS mean, stddev_pop(x) AS std FROM {numbers}"
        )
        try:
            (row,) = query(sql).to_pylist()
        except Exception as error:
            if "out of range" not in str(error).lower():
                raise
            row = {"n": 1, "mean": math.inf, "std": math.inf}
        _check_not_empty(self, row["n"], where)
        mean, std = rounded(row["mean"]), rounded(row["std"])
        if not math.isfinite(mean + std):
            raise DataError(
                f"{where}: {self}: the values make a sum beyond float64; mend the file, or clip it first with LogClip"
            )
        # It is 0 for a column with one value.
        return {"mean": mean, "std": std or 1.0}

    def apply(self, columns: Columns, state: StepState) -> Columns:
        """Subtracts the mean and divides by the deviation."""
        x = (columns[self.column].numbers - state["mean"]) / state["std"]
        return {self.writes[0]: Cells(x)}


@dataclass(frozen=True, kw_only=True)
class FillMissing(_NumberStep):
    """Replaces missing numbers, as floats. Of normalized numbers 0 is the mean.

    Args:
        column: name of a column of integers or floats.
        value: number to put in.
        output: name of the result; ``column`` by default.
    """

    column: str
    value: float
    output: str | None = None

    def __post_init__(self) -> None:
        # An integer too may be beyond all floats.
        if not (
            isinstance(self.value, int | float)
            and abs(self.value) <= sys.float_info.max
        ):
            raise ValueError(
                f"FillMissing('{self.column}'): value={self.value!r:.40}: must be a finite number; fill texts in SQL"
            )

    def apply(self, columns: Columns, state: StepState) -> Columns:
        """Replaces the missing values of the column."""
        x = columns[self.column].numbers
        return {self.writes[0]: Cells(np.where(np.isnan(x), self.value, x))}
