r"""Run a tower of a bundle over parquet files, into a store of vectors or a Redis.

    python -m torchx_apps.embed BUNDLE --catalogue items.parquet \
        --id item_id --out vectors
    python -m torchx_apps.embed BUNDLE --catalogue changed.parquet \
        --id item_id --refresh vectors --delete 17,18
    # the users that the bundle knows
    python -m torchx_apps.embed BUNDLE --tower query --redis redis://host:6379/0
    # on two ranks; or torchx run rec.embed --procs 2
    torchrun --nproc_per_node 2 -m torchx_apps.embed BUNDLE ...

Each rank reads its share of the rows; the store is the same on any number of
ranks, and its rows are in the order of the ids. A store that exists gets a new
version, and processes that have opened the earlier one continue to read it.
With --refresh rows that are not in the files stay, and new ids come after them.
The vectors of --tower query are what torchx_apps.serve takes with
--vectors FOLDER or --redis URL.
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
from torchx_apps.cli.redis_address import add_password_file, with_password

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle
    from torchrec_ext.retrieval.store.ids import KnownIds
    from torchrec_ext.retrieval.store.store import EmbeddingStore
    from torchx_apps.jobs.embedding import TowerGroup

QUERY = "query"
_DAY_S = 86_400.0


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the store, or fills the Redis.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when the store is written, 1 when not, 130 after Ctrl-C.
    """
    return exit_code(_embed, argv)


def _embed(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    _check(options)
    options.redis = with_password(options.redis, options.redis_password_file)
    from torchrec_ext.distributed.runtime import Runtime
    from torchx_apps.jobs.embedding import TowerGroup
    from torchx_apps.jobs.setup import quieten_libraries
    from torchx_apps.jobs.tracking import tracked

    quieten_libraries()
    with Runtime.start("cpu", collectives="gloo") as runtime:
        bundle = _bundle(options.bundle)
        names = _towers(bundle, options.tower)
        if options.redis is not None and names != list(bundle.query):
            raise ValueError(
                f"--redis holds users' vectors, and {', '.join(names)} makes others: add --tower {QUERY}"
            )
        catalogue = options.catalogue
        # Ids may be deleted without rows to write.
        if not catalogue and options.delete is None:
            catalogue = "known"
        rows = TowerGroup(bundle, names, runtime, catalogue, options.id)
        folder = (options.out or options.refresh) if runtime.is_main else None
        with tracked(folder, vars(options), folder="store") as figures:
            result = _write(rows, options)
            unknown = rows.unknown()
            figures.update({"store": result, "unknown": dict(unknown)})
        if runtime.is_main:
            print(result)
            if unknown:
                print(
                    f"never seen in training, so embedded as unknown: {_counts_text(unknown)}"
                )
    return 0


def _write(rows: TowerGroup, options: argparse.Namespace) -> str:
    """Writes to the flags' store or Redis, and describes the result."""
    from torchx_apps.jobs.embedding import embed_files, ids_in, refresh_files

    deleted: KnownIds = []
    # Ids from a file keep its type; typed ones are text, and become that of the store.
    if _is_path(options.delete or ""):
        deleted = ids_in([options.delete], options.id)
    elif options.delete is not None:
        deleted = [item.strip() for item in options.delete.split(",")]
    if options.redis is not None:
        from torchx_apps.jobs.embedding import fill_redis

        # 0 stands for never.
        expire = _DAY_S if options.expire is None else options.expire
        return fill_redis(rows, options.redis, expire or None, deleted)
    if options.refresh is not None:
        store, changes = refresh_files(rows, options.refresh, deleted)
        return f"{_described(store, options.refresh, rows)}: {changes}{_prune(rows, options.refresh, options.keep)}"
    store = embed_files(rows, options.out, options.store or "fp32")
    return _described(store, options.out, rows) + _prune(
        rows, options.out, options.keep
    )


def _prune(rows: TowerGroup, folder: Path, keep: int | None) -> str:
    """Removes all but the newest versions, and reports their number; processes with an open version keep reading it."""
    from torchrec_ext.retrieval.store.versions import prune_store

    if keep is None or not rows.runtime.is_main:
        return ""
    return f"; {len(prune_store(folder, keep))} older versions removed"


def _check(options: argparse.Namespace) -> None:
    """Refuses incompatible flags, before torch is imported."""
    expire = options.expire
    delete = options.delete
    keep = options.keep
    targets = [
        flag
        for flag in ("out", "refresh", "redis")
        if getattr(options, flag) is not None
    ]
    if len(targets) != 1:
        raise ValueError("say one of --out FOLDER, --refresh FOLDER and --redis URL")
    (target,) = targets
    if delete is not None and target == "out":
        raise ValueError(
            "--delete: a store that is written whole has the rows of --catalogue alone; with --refresh FOLDER in place "
            "of --out ids are taken out"
        )
    if options.store is not None and target != "out":
        raise ValueError(
            f"--store {options.store}: is for --out; a store keeps its type when it is refreshed, and a Redis has fp32"
        )
    if expire is not None and target != "redis":
        raise ValueError(
            f"--expire {expire}: is for --redis; what is in a folder stays"
        )
    if expire is not None and not 0 <= expire < float("inf"):
        raise ValueError(f"--expire {expire}: must be seconds, or 0 for never")
    if keep is not None and keep < 1:
        raise ValueError(
            f"--keep {keep}: must be 1 or more; the version just written stays"
        )
    if keep is not None and target == "redis":
        raise ValueError(f"--keep {keep}: is for a store; a Redis has one version")
    if not options.id and (options.catalogue or _is_path(delete or "")):
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


def _bundle(folder: Path) -> Bundle:
    """Loads the bundle in a folder, or the one in a run folder."""
    from torchrec_ext.retrieval.bundle.bundle import Bundle
    from torchx_apps.jobs.exporting import BUNDLE
    from torchx_apps.recipes.saved_job import CONFIG

    if (folder / CONFIG).is_file():
        if not (folder / BUNDLE).is_dir():
            raise ValueError(
                f"{folder}: is a run without a bundle; make one: torchx run rec.serve.export --run {folder}"
            )
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


def _described(store: EmbeddingStore, out: Path, rows: TowerGroup) -> str:
    text = f"{store.version}: {len(store):,} x {store.width} {store.dtype} of {rows.description}"
    losses = ", ".join(f"{name} {value:.3g}" for name, value in store.loss.items())
    if losses:
        text += f"; lost by {store.dtype}: {losses}"
    return f"store: {out} ({text})"


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
        help="folder of the store, written whole; all ranks must see it",
    )
    parser.add_argument(
        "--refresh",
        type=Path,
        metavar="FOLDER",
        help="folder of an existing store, of which these rows changed or are new",
    )
    parser.add_argument(
        "--redis",
        metavar="URL",
        help="address to write the vectors of --tower query to, such as redis://host:6379/0",
    )
    add_password_file(parser)
    delete = "with --refresh or --redis: ids to delete, by commas; or X.parquet or FOLDER/ with them in the column --id"
    parser.add_argument("--delete", metavar="IDS", help=delete)
    expire = "with --redis: seconds after which a vector is forgotten, a day by default; 0 for never"
    parser.add_argument("--expire", type=float, metavar="SECONDS", help=expire)
    parser.add_argument(
        "--tower",
        help=f"a tower of the bundle, or {QUERY} for those of the query; the candidate's by default",
    )
    parser.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help="with --out or --refresh: versions of the store that stay; all of them by default",
    )
    parser.add_argument(
        "--store",
        choices=["fp32", "fp16", "int8"],
        help="with --out: type of the stored vectors; fp32 by default",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
