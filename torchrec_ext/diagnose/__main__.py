"""Say why an unchanged script trains slowly, or compare two reports.

python -m torchrec_ext.diagnose train.py --epochs 3
python -m torchrec_ext.diagnose --json before.json train.py
python -m torchrec_ext.diagnose --compare before.json after.json --limit 5%
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.diagnose.compare import compare_reports
from torchrec_ext.diagnose.script import Loop, run_script
from torchrec_ext.diagnose.why import why_slow


def main(argv: Sequence[str] | None = None) -> int:
    """Diagnoses a script or compares two reports.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 if there is a page or the second report is within the limit, 1 if it is slower, 2 if a flag or file is wrong.
    """
    parser = argparse.ArgumentParser("python -m torchrec_ext.diagnose", description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=25.0, metavar="SECONDS", help="of the rounds of experiments")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report, which --compare reads")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page with pictures")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="compare two reports")
    parser.add_argument("--limit", default="5%", help="how much slower AFTER may be")
    parser.add_argument("script", nargs="?", help="a Python script that trains")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    try:
        if options.compare:
            comparison = compare_reports(options.compare[0], options.compare[1], options.limit)
            print(comparison)
            return int(comparison.is_slower)
        if not options.script:
            raise ValueError("name a Python script that trains, or --compare BEFORE AFTER")
        run_script(options.script, options.args, lambda loop: _diagnose(loop, options))
    except ValueError as error:
        print(f"torchrec_ext.diagnose: {error}", file=sys.stderr)
        return 2
    return 0


def _diagnose(loop: Loop, options: argparse.Namespace) -> None:
    print(f"the loop at {loop.place} is diagnosed; the script ends afterwards", file=sys.stderr)
    diagnosis = why_slow.step(loop.step, loop.batches, budget_s=options.budget)
    print(diagnosis)
    if options.json:
        options.json.write_text(diagnosis.to_json())
    if options.html:
        diagnosis.html(options.html)


if __name__ == "__main__":
    sys.exit(main())
