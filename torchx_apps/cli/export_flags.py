"""The flags of torchx_apps.export, checked before torch is imported."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchx_apps.cli.command_line import FlagParser


def build_export_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of the flags of torchx_apps.export."""
    parser = FlagParser(
        prog="python -m torchx_apps.export", description=description, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument(
        "--out", type=Path, help="the bundle's folder; RUN/bundle where not given"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="best|last|STEP|PATH",
        help="the best by train.early_stop.metric, the last, that of a step, or another one by path or address; the "
        "best where the run has marked one, else the last",
    )
    parser.add_argument(
        "--recipe",
        help="my_recipe.py:job or my.module:job, where the run's recipe is not built in",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one key; repeat at will",
    )
    add_bundle_flags(parser)
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier bundle"
    )
    return parser


def add_bundle_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for a bundle's content and its types."""
    parser.add_argument(
        "--store",
        default="fp32",
        choices=["fp32", "fp16"],
        help="type of the stored rows",
    )
    parser.add_argument(
        "--index",
        default="exact",
        help="exact, or a text for FAISS's index_factory, such as IVF1024,Flat or HNSW32, for logits that are products",
    )
    parser.add_argument(
        "--recall",
        type=float,
        default=0.95,
        help="recall that an approximate index must reach, measured",
    )


def check_export(options: argparse.Namespace, out: Path) -> None:
    """Refuses incompatible flags and folders, before minutes of loading.

    Args:
        options: flags of :func:`build_export_parser`.
        out: the bundle's folder.

    Raises:
        ValueError: the folder is in use, or a package is missing.
    """
    _check_free(options, "--out", out)
    if options.index != "exact":
        # Imported here: it reads files.
        from torchrec_ext.retrieval.search import check_faiss

        check_faiss(options.index)


def _check_free(options: argparse.Namespace, flag: str, folder: Path) -> None:
    is_used = folder.is_file() or (folder.is_dir() and any(folder.iterdir()))
    if is_used and not options.overwrite:
        raise ValueError(
            f"{flag} {folder}: there is something already; give another folder, or --overwrite"
        )
