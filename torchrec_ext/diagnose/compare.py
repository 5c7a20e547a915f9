"""Comparison: whether a step got slower from one report of a diagnosis to the next."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_ext.diagnose.findings import in_ms

_RESAMPLES = 300


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Seconds of an iteration in two reports.

    Args:
        before: seconds of each round in the first report.
        after: seconds of each round in the second one.
        limit: share of an iteration by which the second one may be slower.
        causes: causes that the second report has and the first one lacks.
    """

    before: Sequence[float]
    after: Sequence[float]
    limit: float
    causes: Sequence[str] = ()

    @property
    def ratio(self) -> float:
        """How many times as long an iteration takes, by medians."""
        return statistics.median(self.after) / statistics.median(self.before)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval that holds this ratio in four of five cases, by a bootstrap over rounds."""
        generator = random.Random(0)
        ratios = sorted(
            statistics.median(generator.choices(self.after, k=len(self.after)))
            / statistics.median(generator.choices(self.before, k=len(self.before)))
            for _ in range(_RESAMPLES)
        )
        return ratios[_RESAMPLES // 10], ratios[-_RESAMPLES // 10]

    @property
    def is_slower(self) -> bool:
        """Whether it is slower by more than the limit, and not by the spread of the rounds alone."""
        return self.ratio > 1 + self.limit and self.interval[0] > 1

    def __str__(self) -> str:
        low, high = self.interval
        verdict = "slower" if self.is_slower else "within the limit"
        causes = f"; new: {', '.join(self.causes)}" if self.causes else ""
        return (
            f"{verdict}: an iteration takes {in_ms(statistics.median(self.after))}, before "
            f"{in_ms(statistics.median(self.before))}: {self.ratio:.2f} times ({low:.2f} to {high:.2f}), limit "
            f"{1 + self.limit:.2f}{causes}"
        )


def compare_reports(before: Path, after: Path, limit: str) -> Comparison:
    """Compares two reports that :meth:`Diagnosis.to_json` wrote.

    Args:
        before: file of the first report.
        after: file of the second one.
        limit: how much slower it may be, such as ``5%``.

    Raises:
        ValueError: a file holds no report, or the limit is no share.

    Example:
        >>> compare_reports(Path("none.json"), Path("none.json"), "5 percent")
        Traceback (most recent call last):
        ValueError: --limit '5 percent': must be a percentage of 0 or more, such as 5%
    """
    try:
        share = float(limit.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not share >= 0:
        raise ValueError(f"--limit {limit!r}: must be a percentage of 0 or more, such as 5%")
    old, new = _report(before), _report(after)
    known = {finding["cause"] for finding in old["findings"]}
    causes = [each["cause"] for each in new["findings"] if each["size"] != "offer" and each["cause"] not in known]
    return Comparison(before=_seconds(before, old), after=_seconds(after, new), limit=share, causes=causes)


def _report(path: Path) -> Mapping[str, Any]:
    try:
        report: Any = json.loads(path.read_text())
        report["facts"]["rounds"], report["findings"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: holds no report of a diagnosis; write one with --json {path}") from None
    return dict(report)


def _seconds(path: Path, report: Mapping[str, Any]) -> list[float]:
    """Returns the seconds of an iteration in each round."""
    facts = report["facts"]
    between = sum(each["seconds"] / each["steps"] for each in facts["between"])
    seconds = [each["data"] + each["step"] + between for each in facts["rounds"] if "data" in each and "step" in each]
    if not seconds:
        raise ValueError(f"{path}: its step could not be timed ({report['verdict']}); diagnose again")
    return seconds
