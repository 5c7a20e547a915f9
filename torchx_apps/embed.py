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

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from torchx_apps.config import parse_options
from torchx_apps.process import exit_code


@dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """Runs one side of a bundle over parquet files, into a store of vectors.

    Args:
        bundle: a bundle, or a run folder with one.
        catalogue: parquet files, folders, patterns or addresses; without, the users that the bundle knows.
        id: the column with the ids.
        out: folder of the store, written whole; one that is there is replaced.
        refresh: folder of an existing store, of which these rows changed or are new.
        delete: with refresh, ids to delete, by commas.
        tower: the side of the bundle that embeds the rows.
        store: with out, type of the stored vectors; fp32 where not given.
    """

    bundle: Positional[Path]
    catalogue: tuple[str, ...] = ()
    id: str = ""
    out: Path | None = None
    refresh: Path | None = None
    delete: str | None = None
    tower: Literal["query", "candidate"] = "candidate"
    store: Literal["fp32", "fp16"] | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the store.

    Args:
        argv: the flags; the command line when None.

    Returns:
        0 when the store is written, 1 when not, 130 after Ctrl-C.
    """
    return exit_code(_embed, argv)


def _embed(argv: Sequence[str] | None) -> int:
    options = parse_options(EmbedOptions, "torchx_apps.embed", argv)
    _check(options)
    from torchrec_ext.retrieval.bundle import Bundle
    from torchrec_ext.retrieval.manifest import bundle_folder
    from torchrec_ext.retrieval.store import refresh_store, write_store
    from torchx_apps.jobs.embedding import (
        Rows,
        embedded,
        rows_of_files,
        rows_of_users,
    )
    from torchx_apps.jobs.tracking import tracked

    bundle = Bundle.load(bundle_folder(options.bundle))
    side = bundle.query if options.tower == "query" else bundle.candidate
    # Rows of files are the caller's own: no bundle says whether they have changed. A
    # store of a bundle's users stays one if they are added to it.
    features = ""
    if options.catalogue:
        rows = rows_of_files(side, options.catalogue, options.id)
    elif options.delete is None:
        rows = rows_of_users(bundle, options.tower)
        features = bundle.features_digest
    else:
        # Ids may be deleted without rows to write.
        rows = Rows(0, iter(()))
    folder = options.out or options.refresh
    assert folder is not None
    tower = bundle.digest_of(options.tower)
    unknown: Counter[str] = Counter()
    with tracked(folder, asdict(options), folder="store") as figures:
        blocks = embedded(side, rows, unknown)
        if options.refresh is None:
            store = write_store(
                folder,
                blocks,
                tower=tower,
                side=options.tower,
                shape=(rows.total, side.width),
                features=features,
                dtype=options.store or "fp32",
                overwrite=True,
            )
        else:
            texts = options.delete.split(",") if options.delete else []
            deleted = [text.strip() for text in texts]
            store = refresh_store(
                folder,
                blocks,
                tower=tower,
                features=features or None,
                deleted=deleted,
            )
        unknown = +unknown
        width = store.vectors.shape[1]
        result = f"store: {folder} ({len(store):,} x {width} {store.dtype} of the {options.tower} side)"
        figures.update({"store": result, "unknown": dict(unknown)})
    print(result)
    if unknown:
        counts = [f"{name} in {rows:,} row(s)" for name, rows in unknown.most_common()]
        print(f"never seen in training, so embedded as unknown: {', '.join(counts)}")
    return 0


def _check(options: EmbedOptions) -> None:
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
    if options.catalogue and not options.id:
        raise ValueError("--id: name the column with the ids")


if __name__ == "__main__":
    sys.exit(main())
