"""Sets of intervals of time, and how long they are together."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges overlapping and touching intervals; returns them in order.

    Example:
        >>> union([(3, 5), (0, 2), (1, 3)]), union([(0, 1), (4, 4)])
        ([(0, 5)], [(0, 1)])
    """
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Sums the lengths of intervals; these must not overlap."""
    return sum(stop - start for start, stop in intervals)
