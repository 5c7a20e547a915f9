"""Evaluate anybody's vectors: exact figures over the whole catalogue.

    python -m torchx_apps.evaluate --users users.parquet \
        --items items.parquet --truth test.parquet --seen train.parquet

Vectors are .npy (row i is id i), .npz or .safetensors (ids and vectors), or
.parquet with the columns id, numbers or texts, and vector. Truth and seen are
parquet files of pairs: user and item. This file reads the command line and
returns an exit code; the work is done by `torchx_apps.jobs.evaluating`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchrec_ext.train.config import EvaluationConfig
from torchx_apps.cli.command_line import FlagParser
from torchx_apps.cli.process import exit_code

METRICS = "recall@10,ndcg@10,hr@10,mrr@10,map@10"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the figures, and writes them to ``--out``.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when there are figures, 1 when a file or a flag is wrong, 130 after Ctrl-C.
    """
    return exit_code(_evaluate, argv)


def _evaluate(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    EvaluationConfig(metrics=tuple(options.metrics.split(",")))
    for flag in ("users", "items", "truth", "seen"):
        path = getattr(options, flag)
        if path is not None and not path.is_file():
            raise ValueError(f"--{flag} {path}: there is no such file")
    from torchx_apps.jobs.evaluating import run_evaluation

    return run_evaluation(options)


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="python -m torchx_apps.evaluate",
        description=__doc__.partition("\n\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument(
        "--users", type=Path, required=True, metavar="FILE", help="vectors of the users"
    )
    parser.add_argument(
        "--items",
        type=Path,
        required=True,
        metavar="FILE",
        help="vectors of all items, the catalogue",
    )
    parser.add_argument(
        "--truth", type=Path, required=True, metavar="FILE", help="pairs to find"
    )
    parser.add_argument(
        "--seen",
        type=Path,
        metavar="FILE",
        help="pairs to leave out of a user's ranking",
    )
    parser.add_argument(
        "--metrics",
        default=METRICS,
        help="NAME@K by commas: recall, ndcg, hr, mrr, map, precision",
    )
    parser.add_argument(
        "--similarity",
        default="dot",
        choices=("dot", "cosine"),
        help="what scores a pair",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for evaluation.json and evaluation.png",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON instead"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
