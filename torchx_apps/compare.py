"""Compare runs in one table: `python -m torchx_apps.compare runs/grid`, or RUN RUN RUN.

Runs are read as they are, so that any will do: the members of a grid, or trainings that were started one by one. What
sets them apart is read from their settings.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from torchx_apps.config import parse_options
from torchx_apps.process import exit_code
from torchx_apps.recipes.saved_job import CONFIG


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Compares runs.

    Args:
        runs: run folders, or a folder of run folders.
        out: folder of results.txt and results.json; by default the folder of the runs.
    """

    runs: Positional[tuple[Path, ...]]
    out: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, and writes it.

    Args:
        argv: flags; those of the command line when None.

    Returns:
        0 when the table is made, 1 when not.
    """
    return exit_code(_compare, argv)


def _compare(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    options = parse_options(CompareOptions, "torchx_apps.compare", words)
    runs = run_folders(options.runs)
    parents = {run.parent for run in runs}
    if options.out is None and len(parents) > 1:
        raise ValueError(
            f"{runs[0]} and {runs[-1]} are not in one folder; say where the table goes: --out FOLDER"
        )
    from torchx_apps.networks.report import compare

    compare(runs, options.out or runs[0].parent)
    return 0


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Returns the run folders that are named, and those in the folders that are named.

    Raises:
        ValueError: a path is no run folder, and none is in it.
    """
    runs: list[Path] = []
    for path in paths:
        found = [path]
        if not (path / CONFIG).is_file():
            found = sorted(file.parent for file in path.glob(f"*/{CONFIG}"))
        if not found:
            raise ValueError(
                f"{path}: neither a run folder nor a folder of such, as it has no {CONFIG}; name the --run_dir of a run"
            )
        runs += [run for run in found if run not in runs]
    return runs


if __name__ == "__main__":
    sys.exit(main())
