"""TimeFeatures: hour, weekday and the like from a time, in a stated zone.

offsets_of(): a time zone as numbers, the times from 1970 to 2100 at which its offset from UTC changes. Engines know
different zones, in different editions; a table that is saved with the preprocessor gives files and requests the same
hour, also after a government has changed its mind between fitting and serving.
"""

from __future__ import annotations

import datetime
import operator
import zoneinfo
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.preprocess.columns import TIMES, Cells, Mask, Types, time_unit
from torchrec_ext.data.preprocess.engines import floor_div, floor_mod, step_function
from torchrec_ext.data.preprocess.step import Step, StepContext, StepState, Table
from torchrec_ext.schema.validation import did_you_mean

_FIRST_ZONES, _LAST_ZONES = 1970, 2100
_DAY = 86_400


@lru_cache
def offsets_of(zone: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns a zone's changes in seconds since 1970, and its offsets from UTC in seconds, one more than changes.

    Raises:
        ValueError: there is no such zone.

    Example:
        >>> offsets_of("UTC")
        ((), (0,))
        >>> starts, offsets = offsets_of("Europe/Berlin")
        >>> offsets[:3], datetime.datetime.fromtimestamp(starts[0], datetime.timezone.utc).isoformat()
        ((3600, 7200, 3600), '1980-04-06T01:00:00+00:00')
    """
    try:
        zone_info = zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        otherwise = (
            "write a name such as UTC or Europe/Berlin (pip install tzdata has them)"
        )
        hint = did_you_mean(zone, zoneinfo.available_timezones(), otherwise)
        raise ValueError(f"zone={zone!r}: there is no such time zone; {hint}") from None
    begin = int(
        datetime.datetime(_FIRST_ZONES, 1, 1, tzinfo=datetime.timezone.utc).timestamp()
    )
    end = int(
        datetime.datetime(_LAST_ZONES, 1, 1, tzinfo=datetime.timezone.utc).timestamp()
    )
    starts: list[int] = []
    offsets = [_offset(zone_info, begin)]
    # A day that ends with another offset than it begins with has a change, found by
    # bisection.
    for day in range(begin, end, _DAY):
        after = _offset(zone_info, day + _DAY)
        if after != offsets[-1]:
            starts.append(_change(zone_info, day, day + _DAY))
            offsets.append(after)
    return tuple(starts), tuple(offsets)


def _offset(zone: zoneinfo.ZoneInfo, second: int) -> int:
    offset = datetime.datetime.fromtimestamp(second, zone).utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


def _change(zone: zoneinfo.ZoneInfo, low: int, high: int) -> int:
    """Returns the first second with the offset of ``high``."""
    after = _offset(zone, high)
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(zone, middle) == after:
            high = middle
        else:
            low = middle
    return high


Feature = Literal["hour", "weekday", "hour_of_week", "day", "month"]
Unit = Literal["s", "ms", "us", "ns"]
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
SIZES = {"hour": 24, "weekday": 7, "hour_of_week": 168, "day": 31, "month": 12}
# From 1900 to 2200: beyond it a time is a mistake of unit, and engines disagree on what
# they can hold.
_FIRST, _LAST = -2_208_988_800, 7_258_118_400


@dataclass(frozen=True, kw_only=True)
class TimeFeatures(Step):
    """Maps times to ids from 1 on; 0 stands for a missing time or one outside the years 1900 to 2199.

    ``hour`` 1 to 24 (from midnight), ``weekday`` 1 to 7 (from Monday), ``hour_of_week`` 1 to 168, ``day`` of the month,
    ``month``.

    Args:
        column: name of a column of timestamps (UTC if they have no zone), or of integers counted from 1970 in ``unit``.
        zone: time zone in which hours and days are counted, such as ``Europe/Berlin``.
        features: features to make; the results are called ``<column>_<feature>``.
        unit: unit of an integer column: s, ms, us or ns.
    """

    column: str
    zone: str = "UTC"
    features: tuple[Feature, ...] = ("hour", "weekday")
    unit: Unit = "s"

    def __post_init__(self) -> None:
        for name, values, allowed in (
            ("features", self.features, Feature),
            ("unit", (self.unit,), Unit),
        ):
            wrong = sorted(set(values) - set(get_args(allowed)))
            if wrong or not values:
                raise ValueError(
                    f"TimeFeatures('{self.column}'): {name}={values}: choose from {', '.join(get_args(allowed))}"
                )
        offsets_of(self.zone)

    @property
    def reads(self) -> tuple[str, ...]:
        """``column``."""
        return (self.column,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the results, one column per feature."""
        return tuple(f"{self.column}_{feature}" for feature in self.features)

    def types(self, types: Types) -> Mapping[str, str]:
        """Returns integers."""
        types.need(
            self,
            self.column,
            TIMES | {"int64"},
            "convert it to a timestamp, or to seconds since 1970",
        )
        return dict.fromkeys(self.writes, "int64")

    def fit(self, table: Table, types: Types, run: StepContext) -> StepState:
        """Returns the zone's table of offsets, as this machine knows it today; the rows are not looked at."""
        starts, offsets = offsets_of(self.zone)
        return {"starts": list(starts), "offsets": list(offsets)}

    def transform(
        self, table: Table, types: Types, state: StepState, run: StepContext
    ) -> Table:
        """Computes in whole numbers; the calendar is the engine's."""
        input_columns = table.columns
        table = table.mutate(
            __second__=second_of(table[self.column], types[self.column], self.unit)
        )
        offset = step_function(table["__second__"], state["starts"], state["offsets"])
        # A stage, so that the query has the zone's hundred conditions once and not in
        # every feature.
        table = run.engine.stage(table.mutate(__local__=table["__second__"] + offset))
        local = table["__local__"]
        features = {}
        for name, feature in zip(self.writes, self.features, strict=True):
            features[name] = _expression(feature, local).cast("int64").fill_null(0)
        return table.mutate(**features).select(
            *dict.fromkeys([*input_columns, *self.writes])
        )

    def online(
        self, cells: Mapping[str, Cells], types: Types, state: StepState
    ) -> Mapping[str, Cells]:
        """Computes the same in numpy."""
        times = cells[self.column]
        second = times.values // per_second(types[self.column], self.unit)
        in_range: Mask = times.valid & (second >= _FIRST) & (second < _LAST)
        # Any time does where there is none: its numbers are replaced below.
        second = np.where(in_range, second, 0)
        starts = np.array(state["starts"], dtype=np.int64)
        offsets = np.array(state["offsets"], dtype=np.int64)
        local = second + offsets[np.searchsorted(starts, second, side="right")]
        results = {}
        for name, feature in zip(self.writes, self.features, strict=True):
            results[name] = times.with_values(
                np.where(in_range, _numbers(feature, local), 0)
            )
        return results

    def vocab(self, state: StepState) -> Mapping[str, int]:
        """Returns the number of values of each feature + 1, row 0 included."""
        return {
            name: SIZES[feature] + 1
            for name, feature in zip(self.writes, self.features, strict=True)
        }


def per_second(kind: str, unit: Unit = "s") -> int:
    """Returns the units per second of a type of times, or of integers counted in ``unit``."""
    return PER_SECOND[time_unit(kind) if kind in TIMES else unit]


def second_of(column: Any, kind: str, unit: Unit = "s") -> Any:
    """Returns whole seconds since 1970, rounded down, of times or integers; null outside the years 1900 to 2199."""
    import ibis

    if kind in TIMES:
        column = whole_seconds(column)
        unit = "s"
    size = PER_SECOND[unit]
    # Beyond these limits first: a division of greater numbers would not be exact.
    in_range = (column >= _FIRST * size) & (column < _LAST * size)
    column = ibis.ifelse(in_range, column, ibis.null("int64"))
    return column if size == 1 else floor_div(column, size)


def whole_seconds(times: Any) -> Any:
    """Returns the seconds since 1970 of timestamps, rounded down."""
    return times.truncate("s").epoch_seconds().cast("int64")


def _of_the_week(
    feature: Feature, local: Any, div: Callable[..., Any], mod: Callable[..., Any]
) -> Any:
    """Returns a feature that needs no calendar, by an engine's or numpy's divisions rounded down; None for others."""
    if feature == "hour":
        return div(mod(local, _DAY), 3600) + 1
    # 1970 began on a Thursday, three days or 72 hours after Monday, which is 1.
    if feature == "weekday":
        return mod(div(local, _DAY) + 3, 7) + 1
    if feature == "hour_of_week":
        return mod(div(local, 3600) + 72, 168) + 1
    return None


def _expression(feature: Feature, local: Any) -> Any:
    number = _of_the_week(feature, local, floor_div, floor_mod)
    if number is not None:
        return number
    date = local.as_timestamp("s")
    return date.day() if feature == "day" else date.month()


def _numbers(feature: Feature, local: Int64) -> Int64:
    numbers: Int64 | None = _of_the_week(
        feature, local, operator.floordiv, operator.mod
    )
    if numbers is not None:
        return numbers
    seconds: Any = local.astype("datetime64[s]")
    months = seconds.astype("datetime64[M]")
    # Months since 1970, which began in January.
    if feature == "month":
        return np.asarray(months.astype(np.int64) % 12 + 1)
    # Days since the first of the month.
    days = seconds.astype("datetime64[D]") - months.astype("datetime64[D]")
    return np.asarray(days.astype(np.int64) + 1)
