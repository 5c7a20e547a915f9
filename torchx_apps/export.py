"""Export a run to a bundle for serving: `python -m torchx_apps.export RUN --out BUNDLE`, or by torchrun on more ranks.

RUN is a run folder: its recipe is made again from its config.json, and its best checkpoint, or its last where no early
stop marked a best one, is loaded, whatever plan and ranks it was trained with. The bundle is the same on any number of
ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchx_apps.cli.export_flags import build_export_parser, check_export
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.cli.process import exit_code
from torchx_apps.recipes.saved_job import saved_job


def main(argv: Sequence[str] | None = None) -> int:
    """Exports a run.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when the bundle is written, 1 when not, 130 after Ctrl-C.
    """
    return exit_code(_export, argv)


def _export(argv: Sequence[str] | None) -> int:
    options = build_export_parser(__doc__).parse_args(argv)
    job = apply_overrides(saved_job(options.run, options.recipe), options.set)
    out = options.out or options.run / "bundle"
    check_export(options, out)
    from torchx_apps.jobs.exporting import export_run

    export_run(
        job,
        options.run,
        out,
        options.checkpoint,
        store=options.store,
        index=options.index,
        recall=options.recall,
        overwrite=options.overwrite,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
