"""Ibis expressions that compute, to the last bit, what numpy does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torchrec_ext.data.preprocess.engines import Engine

Expr = Any
FLOAT32_MAX = float(np.finfo(np.float32).max)


def exact(value: float) -> Expr:
    """A float literal: written into SQL bare, DuckDB would read it as a decimal and round twice."""
    import ibis

    return ibis.literal(repr(float(value))).cast("float64")


def number(column: Expr, kind: str, engine: Engine) -> Expr:
    """A number column as float64; null, NaN and the infinities are one thing, null."""
    import ibis

    if kind != "float64":
        return column.cast("float64")
    return ibis.ifelse(engine.is_finite(column), column, ibis.null("float64"))


def as_float32(column: Expr, engine: Engine) -> Expr:
    """As float32; null where it would overflow, which one engine answers with infinity and the other with an error."""
    import ibis

    held = engine.is_finite(column) & (column.abs() <= exact(FLOAT32_MAX))
    return ibis.ifelse(held, column, ibis.null("float64")).cast("float32")


def step_function(x: Expr, starts: Sequence[Expr], values: Sequence[int]) -> Expr:
    """``values[k]`` where k of the rising ``starts`` are at most x, by bisection; one value more than starts."""
    import ibis

    if not len(starts):
        return ibis.literal(int(values[0]), type="int64")
    middle = len(starts) // 2
    below = step_function(x, starts[:middle], values[: middle + 1])
    return ibis.ifelse(x < starts[middle], below, step_function(x, starts[middle + 1 :], values[middle + 1 :]))


def floor_div(a: Expr, b: int) -> Expr:
    """The whole part of a / b, downwards; exact while |a| is below 2**53.

    Integer division is spelt, and rounded below zero, differently from engine to engine; the division here leaves no remainder.
    """
    return ((a - floor_mod(a, b)) / b).round().cast("int64")


def floor_mod(a: Expr, b: int) -> Expr:
    """What is left of a / b, 0 to b - 1."""
    return (a % b + b) % b
