"""Say why an unchanged script trains slowly, or compare two reports.

python -m torchrec_ext.diagnose train.py --epochs 3
python -m torchrec_ext.diagnose --json before.json train.py
python -m torchrec_ext.diagnose --compare before.json after.json --limit 5%
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.diagnose.findings import in_ms
from torchrec_ext.diagnose.script import Loop, run_script
from torchrec_ext.diagnose.why import why_slow
from torchrec_ext.drawing.terminal import print_to_pipe

_RESAMPLES = 300  # of the bootstrap over rounds


def main(argv: Sequence[str] | None = None) -> int:
    """Diagnoses a script or compares two reports.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 if there is a page or the second report is within the limit, 1 if it is slower, 2 if a flag or file is wrong.
    """
    parser = argparse.ArgumentParser(
        "python -m torchrec_ext.diagnose", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=25.0,
        metavar="SECONDS",
        help="of the rounds of experiments; the first four may take three times as long",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the report, which --compare reads",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the page with pictures"
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("BEFORE", "AFTER"),
        help="compare two reports",
    )
    parser.add_argument("--limit", default="5%", help="how much slower AFTER may be")
    parser.add_argument("script", nargs="?", help="a Python script that trains")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    try:
        if options.compare:
            comparison = compare_reports(
                options.compare[0], options.compare[1], options.limit
            )
            print(comparison)
            return int(comparison.is_slower)
        if not options.script:
            raise ValueError(
                "name a Python script that trains, or --compare BEFORE AFTER"
            )
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1":
            raise ValueError(
                f"torchrun started {ranks} ranks, and this command diagnoses a script of one process; call "
                "why_slow.step(step, batches) in the script, on every rank"
            )
        run_script(options.script, options.args, lambda loop: _diagnose(loop, options))
    except ValueError as error:
        print(f"torchrec_ext.diagnose: {error}", file=sys.stderr)
        return 2
    return 0


def _diagnose(loop: Loop, options: argparse.Namespace) -> None:
    print(
        f"the loop at {loop.line} is diagnosed; the script ends afterwards",
        file=sys.stderr,
    )
    diagnosis = why_slow.step(loop.step, loop.batches, budget_s=options.budget)
    # The files first: a reader such as `head` may close the pipe.
    if options.json:
        options.json.write_text(diagnosis.to_json())
    if options.html:
        diagnosis.html(options.html)
    print_to_pipe(str(diagnosis))


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
        """The 80 % interval of this ratio, by a bootstrap over rounds."""
        generator = random.Random(0)
        ratios = []
        for _ in range(_RESAMPLES):
            # Not in pairs: the rounds of two reports have nothing to do with each
            # other.
            after = statistics.median(generator.choices(self.after, k=len(self.after)))
            before = statistics.median(
                generator.choices(self.before, k=len(self.before))
            )
            ratios.append(after / before)
        ratios.sort()
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
    """Compares two reports of :meth:`Diagnosis.to_json`.

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
        raise ValueError(
            f"--limit {limit!r}: must be a percentage of 0 or more, such as 5%"
        )
    old = _report(before)
    new = _report(after)
    # An offer is no fault, so a build need not hear of a new one.
    old_causes = {finding["cause"] for finding in old["findings"]}
    causes = [
        each["cause"]
        for each in new["findings"]
        if each["size"] != "offer" and each["cause"] not in old_causes
    ]
    return Comparison(
        before=_seconds(before, old),
        after=_seconds(after, new),
        limit=share,
        causes=causes,
    )


def _report(path: Path) -> Mapping[str, Any]:
    try:
        report: Any = json.loads(path.read_text())
        report["facts"]["rounds"], report["findings"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path}: holds no report of a diagnosis; write one with --json {path}"
        ) from None
    return dict(report)


def _seconds(path: Path, report: Mapping[str, Any]) -> list[float]:
    """Returns the seconds of an iteration in each round."""
    facts = report["facts"]
    between = sum(each["seconds"] / each["steps"] for each in facts["between"])
    seconds = []
    for each in facts["rounds"]:
        if "data" in each and "step" in each:
            seconds.append(each["data"] + each["step"] + between)
    if not seconds:
        raise ValueError(
            f"{path}: its step could not be timed ({report['verdict']}); diagnose again"
        )
    return seconds


if __name__ == "__main__":
    sys.exit(main())
