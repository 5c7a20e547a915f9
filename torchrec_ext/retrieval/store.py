"""Store: vectors with their ids in one folder, which is whole or absent: manifest.json, ids.arrow, vectors.npy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from torchrec_ext.data.preprocess.folders import whole_folder
from torchrec_ext.retrieval.bundle import Bundle, Floats, open_array
from torchrec_ext.retrieval.catalogue import Id, Ids, read_table, write_table
from torchrec_ext.retrieval.manifest import (
    BundleError,
    Manifest,
    check_files,
    write_manifest,
)
from torchrec_ext.sealed import existing_folder, sync_tree

_IDS = "ids.arrow"
_VECTORS = "vectors.npy"
_DTYPES: dict[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2")}
_BLOCK = 2**16
Block = tuple[NDArray[Any] | pa.Array, Floats]


class Store:
    """An open store: (N, W) vectors, memory-mapped, of one side of one bundle.

    Attributes:
        ids: map of ids to rows.
        vectors: (N, W) float32 or float16.
        tower: digest of the side that made the vectors.
        side: ``query`` or ``candidate``.
        features: digest of a bundle's users, of whose features the vectors are; empty for rows of files.
    """

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        """See :meth:`open`."""
        self.folder = folder
        self.tower = str(values["tower"])
        self.side = str(values["side"])
        self.features = str(values.get("features", ""))
        self.ids = Ids(read_table(folder / _IDS)["id"])
        self.vectors = open_array(folder / _VECTORS)

    @classmethod
    def open(cls, folder: Path | str, *, verify: bool = True) -> Store:
        """Opens a store.

        Args:
            folder: folder of :func:`write_store`.
            verify: compare the digest of every file, about 1 s for each GB.

        Raises:
            BundleError: it is missing, damaged, or of another format.
        """
        folder = existing_folder(Path(folder))
        values = Manifest.open(folder).content
        if "side" not in values:
            raise BundleError(
                f"{folder}: is a bundle, no store; torchx_apps.embed --out makes one of it"
            )
        check_files(folder, values["files"], digests=verify)
        return cls(folder, values)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dtype(self) -> str:
        """Type of the vectors: ``fp32`` or ``fp16``."""
        return "fp32" if self.vectors.dtype == np.float32 else "fp16"

    def fits(self, bundle: Bundle) -> bool:
        """Whether the vectors are those that the bundle would compute for its users, by tower and features.

        Raises:
            BundleError: they are vectors of items.
        """
        if self.side != "query":
            raise BundleError(
                f"{self.folder}: has vectors of the {self.side} side; give those of torchx_apps.embed --tower query"
            )
        is_same = self.features in ("", bundle.features_digest)
        return is_same and self.tower == bundle.digest_of("query")

    def find(self, each: Id) -> Floats | None:
        """Returns the (W,) vector of an id, or None."""
        try:
            row = int(self.ids.positions([each])[0])
        except ValueError:  # no id here is of that type
            return None
        if row < 0:
            return None
        vector: Floats = self.vectors[row].astype(np.float32)
        return vector


def write_store(
    folder: Path | str,
    blocks: Iterable[Block],
    *,
    tower: str,
    side: str,
    shape: tuple[int, int],
    features: str = "",
    dtype: str = "fp32",
    overwrite: bool = False,
) -> Store:
    """Writes a store, block by block; the folder is whole or as before.

    Args:
        folder: folder of the store.
        blocks: ids (B,) and vectors (B, W) of each block.
        tower: digest of the side that made the vectors.
        side: ``query`` or ``candidate``.
        shape: (N, W), the number of all rows and the width of each.
        features: digest of the bundle's users, if the rows are their features: those of another digest are then
            computed anew.
        dtype: ``fp32`` or ``fp16``.
        overwrite: replace an earlier store. Who has opened it reads on in the old one.

    Raises:
        BundleError: a vector is not finite or beyond the type; an id is there twice; the folder cannot be written.
    """
    folder = Path(folder)
    if dtype not in _DTYPES:
        raise BundleError(f"dtype={dtype!r}: must be one of {', '.join(_DTYPES)}")
    if not shape[0]:
        raise BundleError(f"{folder}: there are no rows to write; give some")
    with whole_folder(folder, overwrite=overwrite, mark=_VECTORS) as staging:
        ids = _write_vectors(staging / _VECTORS, blocks, shape, _DTYPES[dtype])
        whole = Ids(pa.concat_arrays(ids))
        write_table(staging / _IDS, pa.table({"id": whole.arrow()}))
        content = {"tower": tower, "side": side, "width": shape[1]}
        write_manifest(staging, {**content, "features": features}, {})
        sync_tree(staging)
    return Store.open(folder, verify=False)


def _write_vectors(
    path: Path, blocks: Iterable[Block], shape: tuple[int, int], dtype: np.dtype[Any]
) -> list[pa.Array]:
    """Writes a .npy file; returns the ids of its rows."""
    ids: list[pa.Array] = []
    written = open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    start = 0
    for keys, vectors in blocks:
        block = written[start : start + len(vectors)]
        with np.errstate(over="ignore"):
            block[:] = vectors
        if not np.isfinite(block).all():
            row = int((~np.isfinite(block)).any(axis=1).argmax())
            raise BundleError(
                f"the vector of id {str(keys[row])[:60]} is NaN, or beyond {dtype}; embed finite features"
            )
        ids.append(Ids(keys).arrow())
        start += len(vectors)
    written.flush()
    return ids


def refresh_store(
    folder: Path | str,
    blocks: Iterable[Block],
    *,
    tower: str,
    features: str | None = None,
    deleted: Sequence[Id] = (),
) -> Store:
    """Changes, adds and removes rows of a store over a copy, which then replaces it.

    Rows that are not in ``blocks`` stay, in their order; rows of ``blocks`` follow.

    Args:
        folder: folder of the store.
        blocks: ids and vectors that changed or are new.
        tower: digest of the side that made them; must be the store's.
        features: see :func:`write_store`; None if those of the store stay.
        deleted: ids to remove, but for those in ``blocks``; texts also stand for whole numbers.

    Raises:
        BundleError: the store is of another tower, or as :func:`write_store`.
    """
    store = Store.open(folder)
    if store.tower != tower:
        raise BundleError(
            f"{folder}: is of tower {store.tower[:12]}, this bundle's is {tower[:12]}: its rows would not fit; write "
            "the store anew with --out"
        )
    fresh = list(blocks)
    known = store.ids.arrow()
    try:
        arrays = [Ids(ids).arrow() for ids, _ in fresh]
        new = pa.chunked_array(arrays, known.type).combine_chunks()
        gone = pa.array(list(deleted)).cast(known.type)
    except pa.ArrowException as error:
        raise BundleError(f"{folder}: {error}; give ids of its type") from None
    leaves = pc.is_in(known, pa.concat_arrays([gone, new]))
    stays = np.flatnonzero(~np.asarray(leaves))

    def every() -> Iterator[Block]:
        for start in range(0, len(stays), _BLOCK):
            rows = stays[start : start + _BLOCK]
            yield known.take(pa.array(rows)), store.vectors[rows]
        yield from fresh

    return write_store(
        folder,
        every(),
        tower=tower,
        features=store.features if features is None else features,
        side=store.side,
        shape=(len(stays) + len(new), store.vectors.shape[1]),
        dtype=store.dtype,
        overwrite=True,
    )
