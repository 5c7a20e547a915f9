"""Run one tower of a bundle over a catalogue of parquet files, into a store of vectors in the order of the ids.

    python -m torchx_apps.embed BUNDLE --catalogue items.parquet --id item_id --out vectors
    torchrun --nproc_per_node 2 -m torchx_apps.embed BUNDLE ...      # or torchx run rec.embed --procs 2

Rows stream by, a share of them on each rank; the store is the same on any number of ranks. A store that is there gets a new
version, and who has the one before open reads on. Users' vectors, of --tower query, are what torchx_apps.serve --vectors takes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchx_apps.agent import exit_code

if TYPE_CHECKING:
    from torchrec_ext.distributed.runtime import Runtime
    from torchrec_ext.retrieval.bundle import Bundle
    from torchrec_ext.retrieval.sides import Side
    from torchrec_ext.retrieval.store import EmbeddingStore
    from torchx_apps.catalogue import Block, CatalogueFiles

QUERY = "query"


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
    from torchrec_ext.distributed.runtime import Runtime
    from torchx_apps.training import quieten_libraries

    quieten_libraries()
    with Runtime.start("cpu") as runtime:
        bundle = _bundle(options.bundle)
        names = _towers(bundle, options.tower)
        store, unknown = embed_files(bundle, names, runtime, options.catalogue, options.id, options.out, options.store)
        if runtime.is_main:
            print(_told(store, options.out, names))
            if unknown:
                print(f"never seen in training, so embedded as unknown: {_counted(unknown)}")
    return 0


def embed_files(
    bundle: Bundle, names: Sequence[str], runtime: Runtime, catalogue: Sequence[str], key: str, out: Path, dtype: Any
) -> tuple[EmbeddingStore, Counter[str]]:
    """Runs towers that read the same rows over files, on all ranks together.

    Args:
        bundle: with the towers.
        names: of the towers, whose outputs stand side by side.
        runtime: of this rank.
        catalogue: parquet files, folders or patterns, with the towers' raw columns.
        key: the column with the ids.
        out: folder of the store, which all ranks see.
        dtype: ``fp32``, ``fp16`` or ``int8``.

    Returns:
        The store, and by column the rows of all ranks with a value that training never saw.

    Raises:
        ValueError: a file, a column or a value that cannot be taken, or an id twice.
        StoreError: the disk refuses.
    """
    import torch.distributed as dist

    from torchrec_ext.retrieval.embed import embed
    from torchrec_ext.retrieval.sides import open_preprocessor, open_side, tower_digest
    from torchx_apps.catalogue import CatalogueFiles
    from torchx_apps.progress import Progress

    side = open_side(bundle.folder, bundle.architecture, names, open_preprocessor(bundle.folder))
    rank = {"rank": runtime.rank, "world_size": runtime.world_size}
    files = CatalogueFiles(catalogue, list(side.request_columns), key, **rank)
    unknown: Counter[str] = Counter()
    with Progress(runtime, "embed") as progress:
        store = embed(
            lambda block: _vectors(side, block, unknown),
            _told_of(files, progress, "rows of rank 0"),
            out,
            digest=tower_digest(bundle.architecture, names, bundle.manifest.content["files"]),
            dtype=dtype,
            barrier=dist.barrier,
            **rank,
        )
    shares: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(shares, unknown)
    return store, sum(shares, Counter())


def _vectors(side: Side, block: Block, unknown: Counter[str]) -> Any:
    from torchrec_ext.schema import DataError

    try:
        read = side.read(block.columns)  # type: ignore[arg-type]
    except DataError as error:
        raise DataError(f"{block.where}: {error}") from None
    unknown.update({name: int(rows.sum()) for name, rows in read.unknown.items() if rows.any()})
    return side.vectors(read)


def _counted(unknown: Counter[str]) -> str:
    return ", ".join(f"{name} in {rows:,} row{'s' if rows > 1 else ''}" for name, rows in unknown.most_common())


def _told_of(files: CatalogueFiles, progress: Any, stage: str) -> Iterator[tuple[Any, Block]]:
    done = 0
    for block in files:
        yield block.ids.to_numpy(zero_copy_only=False), block
        done += len(block.ids)
        progress(stage, done, files.rows)


def _bundle(folder: Path) -> Bundle:
    """The bundle in a folder, or the one that a run ended with."""
    from torchrec_ext.retrieval.bundle import Bundle
    from torchx_apps.exporting import BUNDLE
    from torchx_apps.saved_job import CONFIG

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
        raise ValueError(f"--tower {tower}: the bundle's towers are {', '.join(names)}; name one, or {QUERY} for all but the last")
    return [tower or bundle.candidate]


def _told(store: EmbeddingStore, out: Path, names: Sequence[str]) -> str:
    lost = (
        f"; lost by {store.dtype}: {', '.join(f'{name} {value:.3g}' for name, value in store.loss.items())}" if store.loss else ""
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
    parser.add_argument("--catalogue", nargs="+", required=True, help="parquet files, folders, patterns or addresses")
    parser.add_argument("--id", required=True, metavar="COLUMN", help="the column with the ids")
    parser.add_argument("--out", type=Path, required=True, help="folder of the store; all ranks must see it")
    parser.add_argument(
        "--tower", help=f"of the bundle, or {QUERY} for those of the query side by side; the candidate's by default"
    )
    parser.add_argument("--store", default="fp32", choices=["fp32", "fp16", "int8"], help="type of the stored vectors")
    return parser


if __name__ == "__main__":
    sys.exit(main())
