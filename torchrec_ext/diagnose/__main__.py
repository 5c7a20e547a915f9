"""Say why an unchanged script trains slowly, or compare two reports.

python -m torchrec_ext.diagnose train.py --epochs 3
python -m torchrec_ext.diagnose --json before.json train.py
python -m torchrec_ext.diagnose --compare before.json after.json --limit 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.diagnose.findings import in_ms
from torchrec_ext.diagnose.script import Loop, run_script
from torchrec_ext.diagnose.why import why_slow
from torchrec_ext.terminal import print_to_pipe


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
        "--compare",
        nargs=2,
        type=Path,
        metavar=("BEFORE", "AFTER"),
        help="compare two reports",
    )
    parser.add_argument(
        "--limit", type=float, default=5.0, help="percent by which AFTER may be slower"
    )
    parser.add_argument("script", nargs="?", help="a Python script that trains")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    try:
        if options.compare:
            before, after = options.compare
            return compare_reports(before, after, options.limit)
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
        if options.json:
            _check_writable(options.json)
        run_script(options.script, options.args, lambda loop: _diagnose(loop, options))
    except ValueError as error:
        print(f"torchrec_ext.diagnose: {error}", file=sys.stderr)
        return 2
    return 0


def _check_writable(path: Path) -> None:
    """Refuses a report that could not be written, before anything is measured."""
    if not path.parent.is_dir():
        raise ValueError(
            f"--json {path}: there is no folder {path.parent}; make it, or name another file"
        )
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(
            f"--json {path}: cannot be written: {error.strerror}; name another file"
        ) from None


def _diagnose(loop: Loop, options: argparse.Namespace) -> None:
    print(
        f"the loop at {loop.line} is diagnosed; the script ends afterwards",
        file=sys.stderr,
    )
    diagnosis = why_slow.step(loop.step, loop.batches, budget_s=options.budget)
    # The file first: a reader such as `head` may close the pipe.
    if options.json:
        options.json.write_text(diagnosis.to_json())
    print_to_pipe(str(diagnosis))


def compare_reports(before: Path, after: Path, limit: float) -> int:
    """Prints whether the iterations of the second report are slower than those of the first.

    Args:
        before: file that ``--json`` wrote.
        after: file of the second report.
        limit: percent by which it may be slower, by medians; the quartiles of both may not overlap either.

    Returns:
        1 if it is slower, else 0.

    Raises:
        ValueError: a file holds no report, or the limit is below 0.
    """
    if not limit >= 0:
        raise ValueError(f"--limit {limit:g}: must be a percentage of 0 or more")
    old = _report(before)
    new = _report(after)
    low, was, high = statistics.quantiles(_seconds(before, old), n=4)
    begin, now, _ = statistics.quantiles(_seconds(after, new), n=4)
    is_slower = now > was * (1 + limit / 100) and begin > high
    # An offer is no fault, so a build need not hear of a new one.
    known = {finding["cause"] for finding in old["findings"]}
    causes = [
        each["cause"]
        for each in new["findings"]
        if each["size"] != "offer" and each["cause"] not in known
    ]
    print(
        f"{'slower' if is_slower else 'within the limit'}: an iteration takes {in_ms(now)}, before {in_ms(was)} "
        f"({in_ms(low)} to {in_ms(high)}): {now / was:.2f} times, limit {1 + limit / 100:.2f}"
        + (f"; new: {', '.join(causes)}" if causes else "")
    )
    return int(is_slower)


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
    if len(seconds) < 2:
        raise ValueError(
            f"{path}: its step could not be timed ({report['verdict']}); diagnose again"
        )
    return seconds


if __name__ == "__main__":
    sys.exit(main())
