"""Say why an unchanged script trains slowly.

python -m torchrec_ext.diagnose train.py --epochs 3
python -m torchrec_ext.diagnose --json report.json train.py
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.diagnose.script import Loop, run_script
from torchrec_ext.diagnose.why import why_slow
from torchrec_ext.terminal import print_to_pipe


def main(argv: Sequence[str] | None = None) -> int:
    """Diagnoses a script.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 if there is a page, 2 if a flag or file is wrong.
    """
    parser = argparse.ArgumentParser(
        "python -m torchrec_ext.diagnose", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=25.0,
        metavar="SECONDS",
        help="of the rounds of experiments, of which there are four at least",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the report as JSON too",
    )
    parser.add_argument("script", help="a Python script that trains")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    try:
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1":
            raise ValueError(
                f"torchrun started {ranks} ranks, and this command diagnoses a script of one process; run one rank"
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


if __name__ == "__main__":
    sys.exit(main())
