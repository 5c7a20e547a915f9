"""What number columns are fitted with: mean, spread, quantiles, the most common value, the same from every engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from torchrec_ext.schema import DataError

if TYPE_CHECKING:
    from torchrec_ext.data.preprocess.engines import Engine

Table = Any  # one column, x: float64, null where missing
_DIGITS = 10


def rounded(value: float) -> float:
    """To 10 significant digits: sums over many threads differ in the last ones, from engine to engine and run to run.

    Example:
        >>> rounded(0.1 + 0.2), rounded(123456.7890123456)
        (0.3, 123456.789)
    """
    return float(f"{value:.{_DIGITS - 1}e}")


def mean_and_std(step: Any, values: Table, where: str, engine: Engine) -> tuple[float, float]:
    """Mean and population standard deviation.

    Raises:
        DataError: no value is a number, or the sum overflows.
    """
    values = values.filter(values.x.notnull())
    row = engine.collect(values.aggregate(n=values.count(), mean=values.x.mean(), std=values.x.std(how="pop"))).to_pylist()[0]
    _some(step, row["n"], where)
    if not all(math.isfinite(row[name] if row[name] is not None else math.nan) for name in ("mean", "std")):
        raise DataError(f"{where}: {step}: the sum of its values is beyond float64; clip the column first with LogClip")
    return rounded(row["mean"]), rounded(row["std"])


def quantiles_of(step: Any, values: Table, shares: Sequence[float | Fraction], where: str, engine: Engine) -> list[float]:
    """For each share the smallest value that at least this share of the rows does not exceed: a value of the data, never a mean.

    Fractions are exact: 7 / 100 of 100 rows is, in floats, a little more than 7.

    Raises:
        DataError: no value is a number.
    """
    values = values.filter(values.x.notnull())
    (size,) = engine.collect(values.aggregate(n=values.count()))["n"].to_pylist()
    _some(step, size, where)
    # -0.0 and 0.0 are one value; adding 0.0 leaves the second.
    counts = values.group_by(x=values.x + 0.0).aggregate(n=lambda t: t.count())
    import ibis

    upto = counts.n.sum().over(ibis.window(order_by=counts.x, preceding=None, following=0))
    counts = counts.mutate(upto=upto)
    needs = [max(1, math.ceil(share * size)) for share in shares]
    places = engine.register(pa.table({"place": sorted(set(needs))}))
    found = counts.inner_join(places, [counts.upto >= places.place, counts.upto - counts.n < places.place])
    values_at = {row["place"]: float(row["x"]) for row in engine.collect(found.select("place", "x")).to_pylist()}
    return [values_at[need] for need in needs]


def most_common(step: Any, values: Table, where: str, engine: Engine) -> Any:
    """The value with the most rows, the smallest of those that have equally many.

    Raises:
        DataError: every value is missing.
    """
    values = values.filter(values.x.notnull())
    counts = values.group_by("x").aggregate(n=lambda t: t.count())
    found = engine.collect(counts.order_by(counts.n.desc(), counts.x.asc()).limit(1))["x"].to_pylist()
    _some(step, len(found), where)
    return found[0]


def _some(step: Any, size: int, where: str) -> None:
    if not size:
        raise DataError(f"{where}: {step}: every value is missing; leave the column out, or give the value to fill it with")
