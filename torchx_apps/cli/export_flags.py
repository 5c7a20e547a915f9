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
        "--compiled",
        type=Path,
        metavar="FOLDER",
        help="also write the scoring as machine code, with a C++ program",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier bundle"
    )
    return parser


def add_bundle_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for a bundle's content and its types."""
    parser.add_argument(
        "--store",
        default="fp32",
        choices=["fp32", "fp16", "int8"],
        help="type of the stored vectors",
    )
    parser.add_argument(
        "--tables",
        default="trained",
        choices=["trained", "int8"],
        help="type of the towers' tables; int8 is measured",
    )
    parser.add_argument(
        "--overlap",
        type=float,
        default=0.9,
        help="share of a query's 10 best that int8 tables must leave among them",
    )
    parser.add_argument(
        "--index",
        default="exact",
        choices=["exact", "flat", "ivf", "hnsw", "pq"],
        help="others need FAISS",
    )
    parser.add_argument(
        "--recall",
        type=float,
        default=0.95,
        help="recall that an approximate index must reach, measured",
    )
    parser.add_argument(
        "--onnx",
        type=Path,
        metavar="FOLDER",
        help="also write the towers and the top NN as ONNX files, checked equal",
    )
    parser.add_argument(
        "--onnx-skip",
        action="append",
        default=[],
        metavar="TOWER",
        help="leave one out (or top); repeat at will",
    )


def check_export(options: argparse.Namespace, out: Path) -> None:
    """Refuses incompatible flags and folders, before minutes of loading.

    Args:
        options: flags of :func:`build_export_parser`.
        out: the bundle's folder.

    Raises:
        ValueError: the folder is in use, a package is missing, or flags exclude each other.
    """
    _check_free(options, "--out", out)
    if options.index != "exact":
        from torchrec_ext.retrieval.index.faiss import faiss_module

        # Raises if the package is missing.
        faiss_module()
    if options.onnx_skip and not options.onnx:
        raise ValueError(
            f"--onnx-skip {options.onnx_skip[0]}: there is nothing to leave it out of; give --onnx FOLDER too"
        )
    # Where the files go is checked before a package is asked for: without it both
    # mistakes would have one answer.
    for flag in ("onnx", "compiled"):
        path = getattr(options, flag)
        if path is None:
            continue
        if options.tables == "int8":
            kind = "ONNX files have their" if flag == "onnx" else "compiled code reads"
            raise ValueError(
                f"--{flag} {path} with --tables int8: {kind} tables in fp32; leave one of them out"
            )
        folder = path.resolve()
        bundle = out.resolve()
        if folder.is_relative_to(bundle) or bundle.is_relative_to(folder):
            raise ValueError(
                f"--{flag} {path}: is the bundle's folder {out}, in it, or around it; give one beside it"
            )
        _check_free(options, f"--{flag}", path)
    if options.onnx:
        from torchrec_ext.retrieval.onnx.layers import require_onnx

        require_onnx()


def _check_free(options: argparse.Namespace, flag: str, folder: Path) -> None:
    is_used = folder.is_file() or (folder.is_dir() and any(folder.iterdir()))
    if is_used and not options.overwrite:
        raise ValueError(
            f"{flag} {folder}: there is something already; give another folder, or --overwrite"
        )
