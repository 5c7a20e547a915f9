r"""Run one side of a bundle over parquet files, into a store of vectors.

    python -m torchx_apps.embed BUNDLE --catalogue items.parquet \
        --id item_id --out vectors
    python -m torchx_apps.embed BUNDLE --catalogue changed.parquet \
        --id item_id --refresh vectors --delete 17,18
    # the users that the bundle knows
    python -m torchx_apps.embed BUNDLE --tower query --out users

A store is one folder. It is replaced as a whole, and processes that have
opened the earlier one continue to read it. With --refresh rows that are not in
the files stay, and changed and new ones come after them. The vectors of
--tower query are what torchx_apps.serve takes with --vectors FOLDER.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchx_apps.cli.command_line import FlagParser
from torchx_apps.cli.process import exit_code

if TYPE_CHECKING:
    from torchrec_ext.retrieval.catalogue import Id

SIDES = ("query", "candidate")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the store.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when the store is written, 1 when not, 130 after Ctrl-C.
    """
    return exit_code(_embed, argv)


def _embed(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    _check(options)
    from torchrec_ext.retrieval.bundle import Bundle
    from torchrec_ext.retrieval.manifest import bundle_folder
    from torchx_apps.jobs.embedding import TowerRows, embed_files, refresh_files
    from torchx_apps.jobs.tracking import tracked

    bundle = Bundle.load(bundle_folder(options.bundle))
    rows = None
    # Ids may be deleted without rows to write.
    if options.catalogue or options.delete is None:
        catalogue = options.catalogue or []
        rows = TowerRows(bundle, options.tower, catalogue, options.id)
    folder = options.out or options.refresh
    with tracked(folder, vars(options), folder="store") as figures:
        if options.refresh is None:
            assert rows is not None
            store = embed_files(rows, folder, options.store or "fp32")
            changes = ""
        else:
            towers = bundle.manifest.content["towers"]
            tower = towers[options.tower]["digest"]
            deleted = _deleted(options)
            store, changes = refresh_files(rows, folder, tower, deleted)
        width = store.vectors.shape[1]
        result = f"store: {folder} ({len(store):,} x {width} {store.dtype} of the {options.tower} side)"
        if changes:
            result += f": {changes}"
        unknown = rows.unknown if rows is not None else Counter()
        unknown = +unknown
        figures.update({"store": result, "unknown": dict(unknown)})
    print(result)
    if unknown:
        print(
            f"never seen in training, so embedded as unknown: {_counts_text(unknown)}"
        )
    return 0


def _deleted(options: argparse.Namespace) -> list[Id]:
    from torchx_apps.jobs.embedding import ids_in, typed_ids

    if options.delete is None:
        return []
    if _is_path(options.delete):
        return ids_in([options.delete], options.id)
    texts = [each.strip() for each in options.delete.split(",")]
    return typed_ids(texts, options.refresh)


def _check(options: argparse.Namespace) -> None:
    """Refuses incompatible flags."""
    if (options.out is None) == (options.refresh is None):
        raise ValueError("say one of --out FOLDER and --refresh FOLDER")
    if options.delete is not None and options.refresh is None:
        raise ValueError(
            "--delete: a store that is written whole has the rows of --catalogue alone; with --refresh FOLDER in place "
            "of --out ids are taken out"
        )
    if options.store is not None and options.refresh is not None:
        raise ValueError(
            f"--store {options.store}: is for --out; a store keeps its type when it is refreshed"
        )
    if not options.id and (options.catalogue or _is_path(options.delete or "")):
        raise ValueError("--id: name the column with the ids")


def _is_path(deleted: str) -> bool:
    """Whether the text of ``--delete`` has the form of parquet paths rather than ids; no file need exist.

    Example:
        >>> _is_path("gone.parquet"), _is_path("gone/"), _is_path("17,18")
        (True, True, False)
    """
    return deleted.endswith(".parquet") or "/" in deleted


def _counts_text(unknown: Counter[str]) -> str:
    texts = []
    for name, rows in unknown.most_common():
        texts.append(f"{name} in {rows:,} rows" if rows > 1 else f"{name} in 1 row")
    return ", ".join(texts)


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="python -m torchx_apps.embed",
        description=__doc__.partition("\n\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("bundle", type=Path, help="a bundle, or a run folder with one")
    parser.add_argument(
        "--catalogue",
        nargs="+",
        help="parquet files, folders, patterns or addresses; without, the users that the bundle knows",
    )
    parser.add_argument(
        "--id", default="", metavar="COLUMN", help="the column with the ids"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder of the store, written whole; one that is there is replaced",
    )
    parser.add_argument(
        "--refresh",
        type=Path,
        metavar="FOLDER",
        help="folder of an existing store, of which these rows changed or are new",
    )
    delete = "with --refresh: ids to delete, by commas; or X.parquet or FOLDER/ with them in the column --id"
    parser.add_argument("--delete", metavar="IDS", help=delete)
    parser.add_argument(
        "--tower",
        choices=SIDES,
        default="candidate",
        help="the side of the bundle that embeds the rows",
    )
    parser.add_argument(
        "--store",
        choices=["fp32", "fp16"],
        help="with --out: type of the stored vectors; fp32 by default",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
