"""Export a run to a bundle for serving: `python -m torchx_apps.export RUN --out BUNDLE`, or by torchrun on more ranks.

RUN is a run folder: its recipe is made again from its config.json, and its best checkpoint, or its last where no early
stop marked a best one, is loaded, whatever plan and ranks it was trained with. The bundle is the same on any number of
ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torchx_apps.agent import exit_code
from torchx_apps.cli.command_line import FlagParser


def main(argv: Sequence[str] | None = None) -> int:
    """Exports a run.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when the bundle is written, 1 when not, 130 after Ctrl-C.
    """
    return exit_code(_export, argv)


def _export(argv: Sequence[str] | None) -> int:
    options = build_export_parser().parse_args(argv)
    from torchx_apps.cli.overrides import apply_overrides
    from torchx_apps.recipes.saved_job import saved_job

    job = apply_overrides(saved_job(options.run, options.recipe), options.set)
    out = options.out or options.run / "bundle"
    check_export(options, out)
    settings = {
        "store": options.store,
        "index": options.index,
        "recall": options.recall,
        "tables": options.tables,
        "overlap": options.overlap,
        "overwrite": options.overwrite,
    }
    skip = options.onnx_skip if options.onnx else None
    first = export_run(job, options.run, out, options.checkpoint, onnx_skip=skip, **settings)
    if options.onnx and first:
        from torchx_apps.jobs.exporting import write_onnx_files

        print(write_onnx_files(out, options.onnx, options.onnx_skip, overwrite=options.overwrite), flush=True)
    return 0


def check_export(options: argparse.Namespace, out: Path) -> None:
    """Refuses incompatible flags and folders, before minutes of loading.

    Args:
        options: flags of :func:`build_export_parser`.
        out: the bundle's folder.

    Raises:
        ValueError: the folder is in use, a package is missing, or flags exclude each other.
    """
    if not options.overwrite and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        raise ValueError(f"--out {out}: there is something already; give another folder, or --overwrite")
    if options.index != "exact":
        from torchrec_ext.retrieval.index.faiss import faiss_module

        faiss_module()
    if options.onnx_skip and not options.onnx:
        raise ValueError(
            f"--onnx-skip {options.onnx_skip[0]}: there is nothing to leave it out of; give --onnx FOLDER too"
        )
    if not options.onnx:
        return
    if options.tables == "int8":
        raise ValueError(
            f"--onnx {options.onnx} with --tables int8: ONNX files have their tables in fp32; leave one of them out"
        )
    folder = options.onnx.resolve()
    bundle = out.resolve()
    if folder.is_relative_to(bundle) or bundle.is_relative_to(folder):
        raise ValueError(
            f"--onnx {options.onnx}: is the bundle's folder {out}, in it, or around it; give one beside it"
        )
    if (
        not options.overwrite
        and options.onnx.exists()
        and not (options.onnx.is_dir() and not any(options.onnx.iterdir()))
    ):
        raise ValueError(f"--onnx {options.onnx}: there is something already; give another folder, or --overwrite")
    from torchrec_ext.retrieval.onnx.layers import require_onnx

    require_onnx()


def export_run(
    job: Any,
    run: Path,
    out: Path,
    checkpoint: str | None = None,
    *,
    onnx_skip: Sequence[str] | None = None,
    **settings: Any,
) -> bool:
    """Loads a run's model on this job's ranks and writes its bundle; every rank calls it.

    Args:
        job: the run's job.
        run: the run's folder.
        out: the bundle's folder.
        checkpoint: name of the checkpoint, see :func:`torchx_apps.jobs.resuming.checkpoint_to_export`.
        onnx_skip: towers that need no ONNX file, where all others must be able to become one; None if no ONNX files
            are wanted.
        settings: further arguments of :func:`torchrec_ext.retrieval.exporting.export.export`.

    Returns:
        Whether this is the first rank.
    """
    import torch

    from torchrec_ext.distributed.parallel import hybrid_parallel
    from torchrec_ext.distributed.runtime import Runtime
    from torchrec_ext.train.checkpoint.folder import CheckpointRanks
    from torchrec_ext.train.checkpoint.load import load_checkpoint
    from torchrec_ext.train.checkpoint.state import model_state
    from torchx_apps.jobs.exporting import bundle_figures, check_exportable_to_onnx, describe_bundle, export_task
    from torchx_apps.jobs.placing import merge_lookups
    from torchx_apps.jobs.report import read_warning
    from torchx_apps.jobs.resuming import check_ids_stay, checkpoint_to_export
    from torchx_apps.jobs.tracking import tracked
    from torchx_apps.jobs.training import load_task, quieten_libraries
    from torchx_apps.tasks.job import schema_of

    quieten_libraries()
    with Runtime.start(job.device, threads=job.threads) as runtime:
        together = CheckpointRanks(runtime)
        stop = job.train.early_stop
        location = job.checkpoint.folder or str(run)
        restores = bool(stop.metric and stop.restore)
        path, which = checkpoint_to_export(location, checkpoint, together, restores=restores)
        task = load_task(dataclasses.replace(job, fallback=None), runtime)
        check_ids_stay(path, task, together, run=run)
        torch.manual_seed(job.train.seed)
        model = job.build(job.model, task.data)
        if onnx_skip is not None:
            check_exportable_to_onnx(model, onnx_skip)
        merge_lookups(job, model, runtime.world_size)
        schema = schema_of(job, task, model)
        sharded, optimizer = hybrid_parallel(model, runtime, optimizer=job.optimizer)
        saved, _ = load_checkpoint(path, model_state(sharded, optimizer), together)
        details = {"recipe": job.name, "run": str(run), "checkpoint": path, "steps": saved["step"], **read_warning(run)}
        tracked_settings = {**details, "out": str(out), **settings}
        with tracked(out, tracked_settings, folder="bundle") if runtime.is_main else nullcontext({}) as figures:
            manifest = export_task(sharded, task, schema, runtime, out, details=details, **settings)
            figures["bundle"] = bundle_figures(manifest)
        if runtime.is_main:
            print(f"checkpoint: {which}, after {saved['step']:,} steps ({path})")
            print(describe_bundle(manifest, out), flush=True)
        return runtime.is_main


def build_export_parser() -> argparse.ArgumentParser:
    """Returns the parser of this app's flags."""
    parser = FlagParser(prog="python -m torchx_apps.export", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--out", type=Path, help="the bundle's folder; RUN/bundle where not given")
    parser.add_argument(
        "--checkpoint",
        metavar="best|last|STEP|PATH",
        help="the best by train.early_stop.metric, the last, that of a step, or another one by path or address; the "
        "best where the run has marked one, else the last",
    )
    parser.add_argument("--recipe", help="my_recipe.py:job or my.module:job, where the run's recipe is not built in")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one key; repeat at will"
    )
    add_bundle_flags(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier bundle")
    return parser


def add_bundle_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for a bundle's content and its types."""
    parser.add_argument("--store", default="fp32", choices=["fp32", "fp16", "int8"], help="type of the stored vectors")
    parser.add_argument(
        "--tables", default="trained", choices=["trained", "int8"], help="type of the towers' tables; int8 is measured"
    )
    parser.add_argument(
        "--overlap", type=float, default=0.9, help="share of a query's 10 best that int8 tables must leave among them"
    )
    parser.add_argument(
        "--index", default="exact", choices=["exact", "flat", "ivf", "hnsw", "pq"], help="others need FAISS"
    )
    parser.add_argument(
        "--recall", type=float, default=0.95, help="recall that an approximate index must reach, measured"
    )
    parser.add_argument(
        "--onnx", type=Path, metavar="FOLDER", help="also write the towers and the top NN as ONNX files, checked equal"
    )
    parser.add_argument(
        "--onnx-skip", action="append", default=[], metavar="TOWER", help="leave one out (or top); repeat at will"
    )


if __name__ == "__main__":
    sys.exit(main())
