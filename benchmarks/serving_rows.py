"""What the rows of serving.py share: calls timed in turn, and one JSON row."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Row = dict[str, object]


class Options(NamedTuple):
    """What the command line asks for: rounds of each side, and whether sizes are those of a trial run."""

    repeats: int
    quick: bool


IN_A_ROW = 10  # calls of one side before the next has its turn, as in a server that does nothing else


def in_turn(repeats: int, sides: Mapping[str, Callable[[int], object]]) -> dict[str, list[float]]:
    """Seconds of each call, all sides in turn, each called with the number of the call; the first three warm up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for first in range(0, repeats + 3, IN_A_ROW):
        for name, call in sides.items():
            for number in range(first, min(first + IN_A_ROW, repeats + 3)):
                start = time.perf_counter()
                call(number)
                times[name].append(time.perf_counter() - start)
    return {name: found[3:] for name, found in times.items()}


def p99(seconds: list[float]) -> float:
    """The 99th percentile."""
    return sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]


def compared(name: str, baseline: list[float], ours: list[float], required: float | None) -> Row:
    """Medians in ms; ``ratio`` is the baseline's over ours."""
    slow, fast = statistics.median(baseline) * 1e3, statistics.median(ours) * 1e3
    found = row(name, fast, "ms", baseline=slow, ratio=slow / fast, required=required)
    return found | {"p99": round(p99(ours) * 1e3, 4), "baseline_p99": round(p99(baseline) * 1e3, 4)}


def row(
    name: str,
    ours: float,
    unit: str,
    *,
    baseline: float | None = None,
    ratio: float | None = None,
    required: float | None = None,
) -> Row:
    """One row of the JSON."""
    said = {"baseline": baseline, "ours": ours, "ratio": ratio}
    rounded = {key: None if value is None else round(value, 4) for key, value in said.items()}
    found: Row = {"name": name, **rounded, "unit": unit, "required": required, "ceiling": None}
    print(found)
    return found
