"""Run one tower of a bundle over a catalogue of parquet files, into a store of vectors in the order of the ids, or into a Redis.

    python -m torchx_apps.embed BUNDLE --catalogue items.parquet --id item_id --out vectors
    python -m torchx_apps.embed BUNDLE --catalogue changed.parquet --id item_id --refresh vectors --delete 17,18
    python -m torchx_apps.embed BUNDLE --tower query --redis redis://localhost:6379/0      # the users that the bundle knows
    torchrun --nproc_per_node 2 -m torchx_apps.embed BUNDLE ...      # or torchx run rec.embed --procs 2

Rows stream by, a share of them on each rank; the store is the same on any number of ranks. A store that is there gets a
new version, and who has the one before open reads on; with --refresh the rows that are not in the files stay, and new
ids come after them. Users' vectors, of --tower query, are what torchx_apps.serve takes with --vectors FOLDER or --redis
URL.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchx_apps.agent import exit_code

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle
    from torchrec_ext.retrieval.store.store import EmbeddingStore
    from torchx_apps.jobs.embedding import TowerGroup

QUERY = "query"
_DAY_S = 86_400.0


def main(argv: Sequence[str] | None = None) -> int:
    """Embeds.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when the store is written, 1 when not, 130 after Ctrl-C.
    """
    return exit_code(_embed, argv)


def _embed(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    _check(options)
    from torchrec_ext.distributed.runtime import Runtime
    from torchx_apps.jobs.embedding import TowerGroup
    from torchx_apps.jobs.training import quieten_libraries

    quieten_libraries()
    with Runtime.start("cpu") as runtime:
        bundle = _bundle(options.bundle)
        names = _towers(bundle, options.tower)
        if options.redis is not None and names != list(bundle.query):
            raise ValueError(f"--redis holds users' vectors, and {', '.join(names)} makes others: add --tower {QUERY}")
        alone = None if options.delete is not None else "known"
        rows = TowerGroup(bundle, names, runtime, options.catalogue or alone, options.id)
        told = _written(rows, options)
        unknown = rows.unknown()
        if runtime.is_main:
            print(told)
            if unknown:
                print(f"never seen in training, so embedded as unknown: {_counted(unknown)}")
    return 0


def _written(rows: TowerGroup, options: argparse.Namespace) -> str:
    """Writes to where the flags say, and tells what is there."""
    from torchx_apps.cli.embedding_ids import deleted_ids
    from torchx_apps.jobs.embedding import embed_files, refresh_files

    deleted = deleted_ids(options.delete, options.id)
    if options.redis is not None:
        from torchx_apps.jobs.embedding import fill_redis

        expire = _DAY_S if options.expire is None else options.expire
        return fill_redis(rows, options.redis, expire or None, deleted)
    if options.refresh is not None:
        store, done = refresh_files(rows, options.refresh, deleted)
        return f"{_told(store, options.refresh, rows.names)}: {done}{_pruned(rows, options.refresh, options.keep)}"
    store = embed_files(rows, options.out, options.store or "fp32")
    return _told(store, options.out, rows.names) + _pruned(rows, options.out, options.keep)


def _pruned(rows: TowerGroup, folder: Path, keep: int | None) -> str:
    """Removes all but the newest versions, and says how many; who has one open reads on."""
    from torchrec_ext.retrieval.store.versions import prune_store

    if keep is None or not rows.runtime.is_main:
        return ""
    return f"; {len(prune_store(folder, keep))} older versions removed"


def _check(options: argparse.Namespace) -> None:
    """Flags that do not go together, before torch is imported."""
    from torchx_apps.cli.embedding_ids import is_path

    expire, delete = options.expire, options.delete
    to = [flag for flag in ("out", "refresh", "redis") if getattr(options, flag) is not None]
    wrong = {
        "say one of --out FOLDER, --refresh FOLDER and --redis URL": len(to) != 1,
        "--delete: a store that is written whole has the rows of --catalogue alone; "
        "with --refresh FOLDER in place of --out ids are taken out": delete is not None and to == ["out"],
        f"--store {options.store}: is for --out; a store keeps its type when it is refreshed, and a Redis has fp32": (
            options.store is not None and to != ["out"]
        ),
        f"--expire {expire}: is for --redis; what is in a folder stays": expire is not None and to != ["redis"],
        f"--expire {expire}: must be seconds, or 0 for never": expire is not None and not 0 <= expire < float("inf"),
        f"--keep {options.keep}: must be 1 or more; the version just written stays": options.keep is not None
        and options.keep < 1,
        f"--keep {options.keep}: is for a store; a Redis has one version": options.keep is not None and to == ["redis"],
        "--id: name the column with the ids": not options.id and bool(options.catalogue or is_path(delete or "")),
    }
    for told, is_so in wrong.items():
        if is_so:
            raise ValueError(told)


def _counted(unknown: Counter[str]) -> str:
    return ", ".join(f"{name} in {rows:,} row{'s' if rows > 1 else ''}" for name, rows in unknown.most_common())


def _bundle(folder: Path) -> Bundle:
    """The bundle in a folder, or the one that a run ended with."""
    from torchrec_ext.retrieval.bundle.bundle import Bundle
    from torchx_apps.jobs.exporting import BUNDLE
    from torchx_apps.jobs.saved_job import CONFIG

    if (folder / CONFIG).is_file():
        if not (folder / BUNDLE).is_dir():
            raise ValueError(f"{folder}: is a run without a bundle; make one: python -m torchx_apps.export {folder}")
        folder = folder / BUNDLE
    return Bundle.load(folder)


def _towers(bundle: Bundle, tower: str | None) -> list[str]:
    if tower == QUERY:
        return list(bundle.query)
    names = [*bundle.query, bundle.candidate]
    if tower not in (None, *names):
        raise ValueError(
            f"--tower {tower}: the bundle's towers are {', '.join(names)}; name one, or {QUERY} for all but the last"
        )
    return [tower or bundle.candidate]


def _told(store: EmbeddingStore, out: Path, names: Sequence[str]) -> str:
    lost = (
        f"; lost by {store.dtype}: {', '.join(f'{name} {value:.3g}' for name, value in store.loss.items())}"
        if store.loss
        else ""
    )
    towers = f"tower{'s' if len(names) > 1 else ''} {', '.join(names)} ({store.tower[:12]})"
    return f"store: {out} ({store.version}: {len(store):,} x {store.width} {store.dtype} of {towers}{lost})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchx_apps.embed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("bundle", type=Path, help="a bundle, or a run folder with one")
    parser.add_argument(
        "--catalogue",
        nargs="+",
        help="parquet files, folders, patterns or addresses; without, the users that the bundle knows",
    )
    parser.add_argument("--id", default="", metavar="COLUMN", help="the column with the ids")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the store, written whole; all ranks must see it")
    parser.add_argument(
        "--refresh", type=Path, metavar="FOLDER", help="of the store there is, of which these rows changed or are new"
    )
    parser.add_argument(
        "--redis", metavar="URL", help="to write the vectors of --tower query to, such as redis://host:6379/0"
    )
    gone = "with --refresh or --redis: ids to take out, by commas; or X.parquet or FOLDER/ with them in the column --id"
    parser.add_argument("--delete", metavar="IDS", help=gone)
    day = "with --redis: after which a vector is forgotten, a day by default; 0 for never"
    parser.add_argument("--expire", type=float, metavar="SECONDS", help=day)
    parser.add_argument(
        "--tower", help=f"of the bundle, or {QUERY} for those of the query side by side; the candidate's by default"
    )
    parser.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help="with --out or --refresh: versions of the store that stay; all of them by default",
    )
    parser.add_argument(
        "--store", choices=["fp32", "fp16", "int8"], help="with --out: type of the stored vectors; fp32 by default"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
