"""Export a run to a bundle for serving: `python -m torchx_apps.export RUN --out BUNDLE`, or by torchrun on more ranks.

RUN is a run folder: its recipe is made again from its config.json, and its best checkpoint, or its last where no early
stop marked a best one, is loaded, whatever plan and ranks it was trained with. The bundle is the same on any number of
ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from torchx_apps.config import changed, parse_known_options
from torchx_apps.process import exit_code
from torchx_apps.recipes.saved_job import saved_job


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Exports a run; words behind these flags change a setting of the recipe, such as --data.folder /data.

    Args:
        run: a run folder.
        out: the bundle's folder; RUN/bundle where not given.
        checkpoint: best (by train.early_stop.metric), last, or a step; best where the run has marked one, else last.
        recipe: my_recipe.py:job or my.module:job, where the run's recipe is not built in.
        store: type of the stored rows.
        index: exact, or a text for FAISS's index_factory, such as IVF1024,Flat or HNSW32, for logits that are products.
        recall: recall that an approximate index must reach, measured.
        catalogue: parquet files, folders, patterns or addresses of the items to serve, with the columns of the prepared
            folder's raw/items.parquet; the items of the training where not given.
        overwrite: replace an earlier bundle.
    """

    run: Positional[Path]
    out: Path | None = None
    checkpoint: str | None = None
    recipe: str | None = None
    store: Literal["fp32", "fp16"] = "fp32"
    index: str = "exact"
    recall: float = 0.95
    catalogue: tuple[str, ...] = ()
    overwrite: bool = False

    @property
    def folder(self) -> Path:
        """The bundle's folder."""
        return self.out or self.run / "bundle"


def main(argv: Sequence[str] | None = None) -> int:
    """Exports a run.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when the bundle is written, 1 when not, 130 after Ctrl-C.
    """
    return exit_code(_export, argv)


def _export(argv: Sequence[str] | None) -> int:
    options, settings = parse_known_options(ExportOptions, "torchx_apps.export", argv)
    job = changed(saved_job(options.run, options.recipe), settings)
    _check(options)
    from torchx_apps.jobs.exporting import export_run

    export_run(
        job,
        options.run,
        options.folder,
        options.checkpoint,
        options.catalogue,
        store=options.store,
        index=options.index,
        recall=options.recall,
        overwrite=options.overwrite,
    )
    return 0


def _check(options: ExportOptions) -> None:
    """Refuses a folder in use before minutes of loading."""
    folder = options.folder
    is_used = folder.is_file() or (folder.is_dir() and any(folder.iterdir()))
    if is_used and not options.overwrite:
        raise ValueError(
            f"--out {folder}: there is something already; give another folder, or --overwrite"
        )


if __name__ == "__main__":
    sys.exit(main())
