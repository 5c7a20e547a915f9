"""EmbeddingStore: a catalogue's vectors by id, memory-mapped; refresh_store() changes, appends or removes rows."""

from __future__ import annotations

import mmap
import os
import shutil
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.distributed.runtime import available_memory
from torchrec_ext.retrieval.store.ids import IdMap, KnownIds
from torchrec_ext.retrieval.store.row_formats import (
    ROW_FORMATS,
    Loss,
    LossMeter,
    decode,
    encode,
)
from torchrec_ext.retrieval.store.versions import (
    ATTEMPTS,
    StoreError,
    check_version_files,
    current,
    new_version,
    publish_version,
    read_store_manifest,
)
from torchrec_ext.schema.validation import listed

ROWS = "rows.bin"
SCALES = "scales.bin"
LIVE = "live.npy"
_SHARE = 2  # rows larger than 1/2 of the free memory stay on disk
# bytes mapped at a time: the call holds the interpreter lock, for about 1 ms
_PIECE = 2**22
_POPULATE_READ = (
    22  # MADV_POPULATE_READ of Linux 5.14; Python's mmap has no name for it
)


class EmbeddingStore:
    """One version of a store, read-only. A reader keeps its version when a newer one is written.

    Attributes:
        ids: map of ids to positions, the rows 0 to I - 1, and back.
        width: D, the width of a vector.
        dtype: name of the row format: ``fp32``, ``fp16``, or ``int8`` with a scale for each row.
        format: the row format.
        version: name of the version below the store's folder.
        digest: digest of all its files.
        tower: digest of the tower that made the vectors, given by the writer.
        live: (I,) bool, False for tombstones: positions whose item was removed.
        loss: measured loss of the row format: see :class:`~torchrec_ext.retrieval.store.row_formats.Loss`; empty for
            fp32.
        scales: (I,) float32 scales of int8 rows, otherwise None.

    Example:
        >>> import tempfile, numpy as np
        >>> from torchrec_ext.retrieval.store.writer import write_store
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = write_store(folder, [(np.array(["a", "b"]), np.array([[1.0, 2.0], [3.0, 4.0]]))])
        ...     store.rows(torch.from_numpy(store.ids.positions(["b"])))
        tensor([[3., 4.]])
    """

    def __init__(self, folder: Path, *, verify: bool = False) -> None:
        """Opens the version in ``folder`` itself. To follow the pointer to the current version, use :meth:`open`."""
        self.folder = folder
        manifest = read_store_manifest(folder)
        check_version_files(folder, manifest["files"], verify=verify)
        self.manifest = manifest
        width = manifest.get("width")
        dtype = manifest.get("dtype")
        files = manifest["files"]
        if (
            not isinstance(width, int)
            or dtype not in ROW_FORMATS
            or not {ROWS, LIVE, "ids.json"} <= set(files)
        ):
            raise StoreError(
                f"'{folder}' is no embedding store: width {width!r}, dtype {dtype!r}, files {listed(sorted(files))}"
            )
        file_bytes = files[ROWS]["bytes"]
        needed_bytes = manifest["rows"] * width * ROW_FORMATS[dtype].numbers.itemsize
        if file_bytes != needed_bytes:
            raise StoreError(
                f"'{folder / ROWS}' has {file_bytes:,} bytes, {manifest['rows']:,} rows of {width} {dtype} need "
                f"{needed_bytes:,}"
            )
        self.width = width
        self.dtype = dtype
        self.tower = str(manifest.get("tower", ""))
        self.loss = dict(manifest.get("loss") or {})
        self.format = ROW_FORMATS[self.dtype]
        self.version = folder.name
        self.digest = str(manifest["digest"])
        count = int(manifest["rows"])
        self.ids = IdMap.open(folder)
        self.live: NDArray[np.bool_] = np.asarray(
            np.load(folder / LIVE, mmap_mode="r", allow_pickle=False)
        )
        if (
            len(self.ids) != count
            or self.live.shape != (count,)
            or self.live.dtype != np.bool_
        ):
            raise StoreError(
                f"'{folder}' is damaged: {count} rows, {len(self.ids)} ids; write the store again"
            )
        self._descriptor, rows, matrix = _map_numbers(
            folder / ROWS, self.format.numbers, count * self.width
        )
        self._matrix = matrix.view(count, self.width)
        self._maps = [rows]
        self.scales: Tensor | None = None
        if self.format.scaled:
            _, scales, self.scales = _map_numbers(folder / SCALES, torch.float32, count)
            self._maps.append(scales)
        self._bytes = count * self.width * self._matrix.element_size()

    @classmethod
    def open(cls, folder: Path | str, *, verify: bool = False) -> EmbeddingStore:
        """Opens the current version below ``folder``.

        Args:
            folder: folder that :func:`torchrec_ext.retrieval.store.writer.write_store` wrote to.
            verify: read every file and compare its digest, about 1 s for each GB.

        Raises:
            StoreError: there is no store, or a damaged, truncated or newer one.
        """
        folder = Path(folder)
        for _ in range(ATTEMPTS):
            name = current(folder)
            try:
                return cls(folder / name, verify=verify)
            except (StoreError, OSError, ValueError):
                # Otherwise a writer replaced and removed it meanwhile: try again.
                if current(folder) == name:
                    raise
        raise StoreError(
            f"'{folder}' changes faster than it can be opened; keep more versions with prune_store(keep=...)"
        )

    def __len__(self) -> int:
        return len(self._matrix)

    @cached_property
    def all_live(self) -> bool:
        """Whether no position is a tombstone."""
        return bool(self.live.all())

    def matrix(self) -> Tensor:
        """Returns the stored (I, D) rows, memory-mapped and read-only. Multiply int8 rows by ``scales``."""
        return self._matrix

    def rows(self, positions: Tensor) -> Tensor:
        """Returns (N, D) float32 vectors at ``positions`` (N,) int64, tombstones included.

        Raises:
            ValueError: a position outside 0 to I - 1.
            StoreError: the file was cut off after it was opened.
        """
        self.check()
        # Two reductions are cheaper than a mask, which is built only for the message.
        if len(positions) and (
            int(positions.min()) < 0 or int(positions.max()) >= len(self)
        ):
            wrong = positions[(positions < 0) | (positions >= len(self))]
            raise ValueError(
                f"positions: {int(wrong[0])} is not a row of this store, which has {len(self)} (0 to {len(self) - 1})"
            )
        return self._decoded(self._matrix.index_select(0, positions), positions)

    def block(self, start: int, stop: int) -> Tensor:
        """Returns (stop - start, D) float32 vectors of neighbouring positions; for fp32 a view of the file."""
        return self._decoded(self._matrix[start:stop], slice(start, stop))

    def _decoded(self, rows: Tensor, positions: Tensor | slice) -> Tensor:
        if self.format.exact:
            return rows
        scales = self.scales
        if scales is not None:
            scales = scales[positions]
        return decode(rows, scales)

    def populate(self) -> bool:
        """Reads the rows into memory and maps their pages, so that the first requests are as fast as later ones.

        Returns:
            False if the rows stay on disk because they would take more than half of the free memory.
        """
        mappings = [mapping for mapping in self._maps if mapping is not None]
        if sum(map(len, mappings)) > available_memory() // _SHARE:
            return False
        self.check()
        for mapping in mappings:
            # Read the file from start to end, and enter its pages into this process's
            # page table.
            mapping.madvise(mmap.MADV_WILLNEED)
            for start in range(0, len(mapping), _PIECE):
                length = min(_PIECE, len(mapping) - start)
                try:
                    mapping.madvise(_POPULATE_READ, start, length)
                except OSError:
                    # older Linux, or another kernel: read one byte of each page instead
                    bytes(memoryview(mapping)[start : start + length : mmap.PAGESIZE])
        return True

    def check(self) -> None:
        """Raises StoreError if the file of rows was truncated after opening: reading it would end the process."""
        size = os.fstat(self._descriptor.fileno()).st_size
        if size < self._bytes:
            raise StoreError(
                f"'{self.folder / ROWS}' has {size:,} bytes and had {self._bytes:,} when it was opened: "
                "it was changed in place. Write with write_store or refresh_store, and open it again"
            )


def _map_numbers(
    path: Path, dtype: torch.dtype, numbers: int
) -> tuple[Any, mmap.mmap | None, Tensor]:
    """Maps a file of numbers; returns the open file, its mapping (None if empty), and the numbers."""
    # Stays open, so that check() asks for this file's size even if another has taken
    # its name.
    stream = path.open("rb")
    if not numbers:  # nothing to map
        return stream, None, torch.empty(0, dtype=dtype)
    mapping = mmap.mmap(
        stream.fileno(), numbers * dtype.itemsize, access=mmap.ACCESS_READ
    )
    # torch cannot mark a tensor read-only and warns; no code here writes to the rows.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return stream, mapping, torch.frombuffer(mapping, dtype=dtype, count=numbers)


def refresh_store(
    folder: Path | str,
    ids: KnownIds,
    vectors: NDArray[Any] | Tensor,
    *,
    deleted: KnownIds = (),
    tower: str | None = None,
) -> EmbeddingStore:
    """Writes a new current version: sets the ``vectors`` of ``ids`` and marks ``deleted`` ids as tombstones.

    Positions do not change: an existing id keeps its row, even if it was deleted before. New ids are appended. Deleted
    ids keep a row that is not live. The rows are copied; the tower does not run over them again.

    Args:
        folder: folder of the store.
        ids: (N,) ids that changed or are new, each once.
        vectors: (N, D) vectors of the ids.
        deleted: ids to remove.
        tower: digest of the tower that made ``vectors``, where it is known: it must be the store's.

    Raises:
        ValueError: an unknown or repeated id, an id in both, another width, a number that is not finite.
        StoreError: the store is damaged, the disk refuses, another process writes, or another tower made the vectors.
    """
    folder = Path(folder)
    with new_version(folder) as path:
        current_store = EmbeddingStore.open(folder)
        if tower is not None and tower != current_store.tower:
            raise StoreError(
                f"'{folder}' holds vectors of the tower {current_store.tower[:12] or 'unnamed'}, these are of "
                f"{tower[:12]}: rows of two towers do not compare; embed the whole catalogue anew with write_store"
            )
        block = torch.as_tensor(vectors).detach().to("cpu", torch.float32)
        if not len(ids):
            block = block.reshape(0, current_store.width)
        if block.dim() != 2 or block.shape != (len(ids), current_store.width):
            raise ValueError(
                f"vectors: shape {tuple(block.shape)}; {len(ids)} ids of this store need ({len(ids)}, "
                f"{current_store.width})"
            )
        id_map, positions = _assign_positions(current_store.ids, ids)
        tombstones = _tombstone_positions(current_store.ids, deleted, positions)
        rows, scales = encode(block, current_store.dtype)
        _copy_with_rows(
            current_store.folder / ROWS, path / ROWS, rows, positions, len(id_map)
        )
        if scales is not None:
            _copy_with_rows(
                current_store.folder / SCALES,
                path / SCALES,
                scales[:, None],
                positions,
                len(id_map),
            )
        id_map.save(path)
        live = np.concatenate(
            [current_store.live, np.ones(len(id_map) - len(current_store), np.bool_)]
        )
        # A tombstone comes back to life if its id is written again.
        live[positions] = True
        live[tombstones] = False
        np.save(path / LIVE, live)
        content = {
            key: current_store.manifest[key] for key in ("width", "dtype", "tower")
        }
        content |= {
            "rows": len(id_map),
            "loss": _merge_loss(current_store, block, decode(rows, scales)),
        }
        return EmbeddingStore(publish_version(path, content, {}))


def _assign_positions(id_map: IdMap, ids: KnownIds) -> tuple[IdMap, NDArray[np.int64]]:
    """Appends the new ids to the map; also returns the position of each of ``ids``."""
    if not len(ids):
        return id_map, np.zeros(0, np.int64)
    IdMap.build(ids)  # refuses an id that occurs twice
    is_new = id_map.positions(ids) < 0
    if is_new.any():
        id_map = id_map.extended(np.asarray(ids)[is_new])
    return id_map, id_map.positions(ids)


def _tombstone_positions(
    id_map: IdMap, deleted: KnownIds, written_positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    positions = id_map.positions(deleted)
    problems = {
        "is not in the store": positions < 0,
        "is also among the ids to write": np.isin(positions, written_positions),
    }
    for problem, wrong in problems.items():
        if wrong.any():
            raise ValueError(
                f"deleted: {np.asarray(deleted)[wrong][0]!s} {problem}; leave it out"
            )
    return positions


def _copy_with_rows(
    source: Path, target: Path, rows: Tensor, positions: NDArray[np.int64], count: int
) -> None:
    """Copies a file, extends it to ``count`` rows, and writes ``rows`` (N, W) at ``positions``."""
    # Readers have the old file mapped, so it must not change.
    shutil.copyfile(source, target)
    width = rows.shape[1] * rows.element_size()
    with target.open("r+b") as stream:
        stream.truncate(count * width)
    if len(rows):
        file_rows = np.memmap(target, np.uint8, mode="r+", shape=(count, width))
        file_rows[positions] = (
            rows.contiguous().view(torch.uint8).numpy().reshape(len(rows), width)
        )
        file_rows.flush()


def _merge_loss(
    old_store: EmbeddingStore, block: Tensor, stored: Tensor
) -> dict[str, Any] | None:
    if not old_store.loss:
        return None
    meter = LossMeter()
    meter.add(block, stored)
    return Loss(**old_store.loss).with_more(meter.loss()).as_dict()
