"""write_store: blocks of ids and vectors to a new version of a store, streamed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.ids import IdMap, Ids, checked_ids
from torchrec_ext.retrieval.quantized import Dtype, LossMeter, check_dtype, decode, encode, some_of
from torchrec_ext.retrieval.snapshots import new_version, publish
from torchrec_ext.retrieval.store import LIVE, ROWS, SCALES, EmbeddingStore

Block = tuple[Ids, "NDArray[Any] | Tensor"]


def write_store(
    folder: Path | str,
    blocks: Iterable[Block],
    *,
    dtype: Dtype = "fp32",
    tower: str = "",
    queries: Tensor | None = None,
) -> EmbeddingStore:
    """Writes a new version below ``folder`` and makes it the current one; readers of the one before it keep theirs.

    Positions are in the order of the blocks. One block is in memory at a time, besides all ids.

    Args:
        folder: made where it is not there.
        blocks: (ids, vectors): (N,) int64 or str, and (N, D) numbers.
        dtype: of the rows on disk.
        tower: digest of the tower that made the vectors.
        queries: (Q, D) with which fp16's and int8's recall is measured; rows of the first block where not given.

    Raises:
        ValueError: an id twice, blocks of different widths, a number that is not finite; no version is made.
        StoreError: the disk refuses, or another process is writing.
    """
    check_dtype(dtype)
    folder = Path(folder)
    with new_version(folder) as path:
        with RowWriter(path, dtype, queries) as writer:
            for ids, vectors in blocks:
                writer.add(ids, vectors)
        kept = IdMap.build(writer.ids)
        kept.save(path)
        np.save(path / LIVE, np.ones(len(kept), np.bool_))
        loss = None if writer.meter is None else writer.meter.loss().as_dict()
        content = {"rows": len(kept), "width": writer.width, "dtype": dtype, "tower": tower, "loss": loss}
        return EmbeddingStore(publish(path, content, writer.digests))


class RowWriter:
    """Encodes blocks and appends them to the files of a version, digesting as it writes.

    Attributes:
        width: D; 0 before the first block.
        meter: of what fp16 and int8 lose; None for fp32.
    """

    def __init__(self, folder: Path, dtype: Dtype, queries: Tensor | None = None) -> None:
        self.dtype, self.width, self._queries = dtype, 0, queries
        self.meter: LossMeter | None = None
        self._ids: list[Any] = []
        names = [ROWS, SCALES] if dtype == "int8" else [ROWS]
        self._files: dict[str, IO[bytes]] = {name: (folder / name).open("wb") for name in names}
        self._sha = {name: hashlib.sha256() for name in names}
        self._rows = 0

    def add(self, ids: Ids, vectors: NDArray[Any] | Tensor) -> None:
        """Appends a block.

        Raises:
            ValueError: see :func:`write_store`; rows are counted from the first block.
        """
        block = self._checked(vectors, len(ids))
        if len(ids):
            self._ids.append(checked_ids(ids if isinstance(ids, pa.Array) else np.array(ids)))  # a copy: blocks may be reused
        try:
            rows, scales = encode(block, self.dtype)
        except ValueError as error:
            raise ValueError(f"{error} (of the block whose first row is row {self._rows})") from None
        if self.dtype != "fp32":
            self.meter = self.meter or LossMeter(some_of(block) if self._queries is None else self._queries)
            self.meter.add(block, decode(rows, scales))
        self._write(ROWS, rows)
        if scales is not None:
            self._write(SCALES, scales)
        self._rows += len(block)

    def _checked(self, vectors: NDArray[Any] | Tensor, count: int) -> Tensor:
        block = torch.as_tensor(vectors).detach().to("cpu", torch.float32)
        if block.dim() != 2 or len(block) != count:
            raise ValueError(f"vectors: shape {tuple(block.shape)} for {count} ids; must be ({count}, D)")
        if self.width and block.shape[1] != self.width:
            raise ValueError(
                f"vectors: {block.shape[1]} wide from row {self._rows} on, {self.width} before; one tower has one width"
            )
        self.width = block.shape[1]
        return block.contiguous()

    def _write(self, name: str, part: Tensor) -> None:
        data = part.numpy().view(np.uint8).data if part.numel() else b""
        self._files[name].write(data)
        self._sha[name].update(data)

    @property
    def ids(self) -> NDArray[Any] | pa.Array:
        """Of all rows so far.

        Raises:
            ValueError: blocks of integers and blocks of strings.
        """
        strings = [isinstance(part, pa.Array) for part in self._ids]
        if any(strings) and not all(strings):
            raise ValueError("ids: some blocks have int64 ids and others str; all ids of a catalogue are of one type")
        if any(strings):
            return pa.concat_arrays(self._ids)
        return np.concatenate([*self._ids, np.zeros(0, np.int64)])

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 by file."""
        return {name: sha.hexdigest() for name, sha in self._sha.items()}

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for stream in self._files.values():
            stream.close()
