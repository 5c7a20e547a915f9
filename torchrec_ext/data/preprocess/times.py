"""TimeFeatures: hour, weekday and month from a time, in a stated zone, by Arrow's calendar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.preprocess.columns import (
    INT64,
    PER_SECOND,
    TIME_TYPES,
    Cells,
    Columns,
    Types,
    need,
)
from torchrec_ext.data.preprocess.step import Query, Step, StepState, quoted
from torchrec_ext.schema import DataError

Feature = Literal["hour", "weekday", "month"]
SIZES = {"hour": 24, "weekday": 7, "month": 12}
# From 1900 to 2200: beyond it a time is a mistake of unit.
_FIRST, _LAST = -2_208_988_800, 7_258_118_400


@dataclass(frozen=True, kw_only=True)
class TimeFeatures(Step):
    """Maps times to ids from 1 on; 0 stands for a missing time or one outside the years 1900 to 2199.

    Arrow knows no summer time after 2037.

    ``hour`` 1 to 24 (from midnight), ``weekday`` 1 to 7 (from Monday), ``month`` 1 to 12.

    Args:
        column: name of a column of timestamps (UTC if they have no zone), or of integers, seconds since 1970.
        zone: time zone in which hours and days are counted, such as ``Europe/Berlin``.
        features: features to make; the results are called ``<column>_<feature>``.
    """

    column: str
    zone: str = "UTC"
    features: tuple[Feature, ...] = ("hour", "weekday")

    def __post_init__(self) -> None:
        wrong = set(self.features) - set(get_args(Feature))
        if wrong or not self.features:
            raise ValueError(
                f"TimeFeatures('{self.column}'): features={self.features}: choose from {', '.join(get_args(Feature))}"
            )
        _check_zone(self.zone)

    @property
    def reads(self) -> tuple[str, ...]:
        """``column``."""
        return (self.column,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the results, one column per feature."""
        return tuple(f"{self.column}_{feature}" for feature in self.features)

    def types(self, types: Types) -> Types:
        """Returns integers."""
        remedy = (
            f"convert it: CAST({self.column} AS TIMESTAMPTZ), or to seconds since 1970"
        )
        need(types, self, self.column, TIME_TYPES | {INT64}, remedy)
        return dict.fromkeys(self.writes, INT64)

    @property
    def fit_column(self) -> str:
        """``column``; integers are looked at for their unit."""
        return self.column

    def fit(self, query: Query, types: Types, where: str) -> StepState:
        """Fits nothing; refuses integers of which half would be times beyond the year 2199.

        Raises:
            DataError: naming one of them.
        """
        if types[self.column] == INT64:
            column = quoted(self.column)
            sql = f"SELECT quantile_disc({column}, 0.5) AS middle FROM fit_rows"
            middle = query(sql)["middle"][0].as_py()
            if middle and middle >= _LAST:
                raise DataError(
                    f"{where}: column '{self.column}' has times such as {middle}, beyond 2199 in seconds since 1970; "
                    f"convert them, of milliseconds: {self.column} // 1_000"
                )
        return {}

    def apply(self, columns: Columns, state: StepState) -> Columns:
        """Reads the features off the zone's calendar."""
        times = columns[self.column]
        second = times.values // per_second(times.unit)
        in_range = (second >= _FIRST) & (second < _LAST)
        if times.valid is not None:
            in_range &= times.valid
        # Any time does where there is none: its numbers are replaced below.
        local = _local(np.where(in_range, second, 0), self.zone)
        results = {}
        for name, feature in zip(self.writes, self.features, strict=True):
            results[name] = Cells(np.where(in_range, _numbers(feature, local), 0))
        return results

    def vocab(self, state: StepState) -> Mapping[str, int]:
        """Returns the number of values of each feature + 1, row 0 included."""
        return {
            name: SIZES[feature] + 1
            for name, feature in zip(self.writes, self.features, strict=True)
        }


def per_second(unit: str | None) -> int:
    """Returns the units per second of times in ``unit``, or of integers, which are seconds."""
    return PER_SECOND[unit or "s"]


def _check_zone(zone: str) -> None:
    """Refuses a name that Arrow knows no time zone of."""
    try:
        _local(np.zeros(1, np.int64), zone)
    except pa.ArrowInvalid:
        raise ValueError(
            f"zone={zone!r}: there is no such time zone; write a name such as UTC or Europe/Berlin, whose tables are "
            "in the system's package tzdata"
        ) from None


def _local(second: Int64, zone: str) -> Int64:
    """Returns what the clocks of a zone show, as seconds."""
    times = pa.array(second).view(pa.timestamp("s", zone))
    local: Int64 = pc.local_timestamp(times).to_numpy().view(np.int64)
    return local


def _numbers(feature: Feature, local: Int64) -> Int64:
    """Returns a feature of seconds on a clock, from 1 on."""
    if feature == "hour":
        return local // 3600 % 24 + 1
    if feature == "weekday":
        # 1970 began on a Thursday.
        return (local // 86_400 + 3) % 7 + 1
    months = local.view("datetime64[s]").astype("datetime64[M]").view(np.int64)
    return months % 12 + 1
