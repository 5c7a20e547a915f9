"""load_vectors(): pretrained vectors into a table, by id and block by block, into the shards that this rank holds.

publish_weights(): the weights of a checkpoint as one file, written block by block, of whatever size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_ext.distributed.tables import local_shards
from torchrec_ext.tensor_file import Shape, TensorWriter
from torchrec_ext.train.checkpoint.folder import read_checkpoint_manifest, read_index
from torchrec_ext.train.checkpoint.state import LoadPlanner, LocalShard, Parts
from torchrec_ext.train.checkpoint.storage import CheckpointError, reader

BLOCK = 65536


def read_vectors(path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields ids (n,) int64, rows of a table, and vectors (n, D) float32 of a file, block by block.

    Args:
        path: ``.npy``, (N, D), row i being id i; ``.npz`` with ``ids`` and ``vectors``; ``.safetensors`` with
            ``vectors`` and, where they are not 0 to N - 1, ``ids``; ``.parquet`` with a column ``id`` of integers and
            ``vector`` of lists.

    Raises:
        CheckpointError: the file is missing or damaged, or lacks a part.
    """
    readers = {".npy": _numpy, ".npz": _numpy, ".safetensors": _safetensors, ".parquet": _parquet}
    if path.suffix not in readers:
        raise CheckpointError(f"'{path}': vectors are read from {', '.join(readers)} files")
    try:
        yield from readers[path.suffix](path)
    except CheckpointError:
        raise
    except Exception as error:  # numpy, Arrow and safetensors have errors of their own for a damaged file
        raise CheckpointError(f"'{path}' holds no vectors: {error}".splitlines()[0]) from None


def load_vectors(
    model: nn.Module, table: str, path: Path, blocks: Iterable[tuple[Tensor, Tensor]] | None = None
) -> int:
    """Writes the vectors of a file into a table; rows that it does not name stay as they are.

    Args:
        model: model from :func:`hybrid_parallel`, or unsharded; each rank reads the file and writes its own shards.
        table: name of the table.
        path: file of vectors, see :func:`read_vectors`; with ``blocks``, a name for them.
        blocks: ids (n,) and vectors (n, D), block by block, in the place of a file.

    Returns:
        The number of vectors.

    Raises:
        CheckpointError: an id is not a row of the table, or a vector has another width or is not finite; blocks before
            it have been written.
    """
    shards = [shard for shard in local_shards(model) if shard.config.name == table]
    count = 0
    with torch.no_grad():
        for ids, vectors in read_vectors(path) if blocks is None else blocks:
            _check(path, table, shards[0].config if shards else None, ids, vectors, count)
            count += len(ids)
            for shard in shards:
                local = (ids >= shard.row) & (ids < shard.row + len(shard.tensor))
                columns = slice(shard.column, shard.column + shard.tensor.shape[1])
                shard.tensor[(ids[local] - shard.row).to(shard.tensor.device)] = vectors[local][:, columns].to(
                    shard.tensor
                )
    return count


def _check(path: Path, table: str, config: object, ids: Tensor, vectors: Tensor, before: int) -> None:
    if vectors.ndim != 2 or len(vectors) != len(ids):
        raise CheckpointError(
            f"'{path}': {len(ids)} ids with vectors of shape {tuple(vectors.shape)}; they must be (N,) and (N, D)"
        )
    bad = (~torch.isfinite(vectors)).any(dim=1).nonzero()
    if len(bad):
        raise CheckpointError(f"'{path}': the vector of id {int(ids[bad[0]])} is not finite; leave it out, or mend it")
    if config is None:
        return
    rows, dim = config.num_embeddings, config.embedding_dim  # type: ignore[attr-defined]
    if vectors.shape[1] != dim:
        raise CheckpointError(
            f"'{path}': vectors are {vectors.shape[1]} wide, and table '{table}' has embedding_dim={dim}"
        )
    out = ((ids < 0) | (ids >= rows)).nonzero()
    if len(out):
        row = before + int(out[0])
        raise CheckpointError(
            f"'{path}': id {int(ids[out[0]])} in row {row} is no row of table '{table}', which has {rows:,}"
        )


def _numpy(path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    vectors = loaded["vectors"] if path.suffix == ".npz" else loaded
    ids = loaded["ids"] if path.suffix == ".npz" else None
    for start in range(0, len(vectors), BLOCK):
        block = torch.from_numpy(np.array(vectors[start : start + BLOCK], dtype=np.float32))
        message = (
            torch.arange(start, start + len(block))
            if ids is None
            else torch.from_numpy(ids[start : start + BLOCK].astype(np.int64))
        )
        yield message, block


def _safetensors(path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        vectors = file.get_slice("vectors")
        ids = file.get_tensor("ids").long() if "ids" in file.keys() else None  # noqa: SIM118  (no iteration over the file)
        for start in range(0, vectors.get_shape()[0], BLOCK):
            block = vectors[start : start + BLOCK].float()
            yield (torch.arange(start, start + len(block)) if ids is None else ids[start : start + BLOCK]), block


def _parquet(path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(path).iter_batches(BLOCK, columns=["id", "vector"]):
        ids = torch.from_numpy(batch["id"].to_numpy(zero_copy_only=False).astype(np.int64))
        flat = np.array(batch["vector"].flatten().to_numpy(zero_copy_only=False), dtype=np.float32)
        if len(ids) and len(flat) % len(ids):
            raise CheckpointError(f"'{path}': the lists of column 'vector' are not of one length")
        yield ids, torch.from_numpy(flat).view(len(ids), -1)


def publish_weights(
    path: str, file: Path, *, progress: Callable[[int], None] | None = None
) -> dict[str, tuple[int, ...]]:
    """Writes the weights of a checkpoint to one safetensors file, under the names of the unsharded model's state dict.

    One saved block (32 MiB) is in memory at a time.

    Args:
        path: checkpoint without damage.
        file: file to write, which appears as a whole or not at all.
        progress: called with the bytes of each block that was written.

    Returns:
        The shape of each tensor.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the file cannot be written.
    """
    saved, index = read_checkpoint_manifest(path), read_index(path)
    names = dict(_published(saved, index.state_dict_metadata))
    held: dict[str, Any] = {name: index.state_dict_metadata[saved_name] for name, saved_name in names.items()}
    try:
        with TensorWriter(
            file, {name: Shape(tuple(each.size), each.properties.dtype) for name, each in held.items()}
        ) as out:
            for name, saved_name in names.items():
                for row, block in _blocks(path, saved_name, held[name]):
                    out.write(name, row, block)
                    if progress is not None:
                        progress(block.numel() * block.element_size())
    except OSError as error:
        raise CheckpointError(f"'{file}' cannot be written: {error.strerror or error}") from None
    return {name: tuple(each.size) for name, each in held.items()}


def _published(saved: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the name in the model's state dict and the name in the checkpoint of each weight."""
    for table, path in saved["paths"].items():
        yield path, f"tables.{table}.weight"
    for name, held in tensors.items():
        if name.startswith("dense.") and "@" not in name and isinstance(held, TensorStorageMetadata):
            yield name.removeprefix("dense."), name


def _blocks(path: str, name: str, held: Any) -> Iterator[tuple[int, Tensor]]:
    """Yields the first row and the rows of each saved block of a tensor."""
    size = tuple(held.size)
    starts = sorted({chunk.offsets[0] for chunk in held.chunks}) if size else [0]
    for start, stop in zip(starts, [*starts[1:], size[0] if size else 0], strict=True):
        block = torch.empty((stop - start, *size[1:]) if size else (), dtype=held.properties.dtype)
        into: Any = Parts(size, [LocalShard(block, (start, *[0] * (len(size) - 1)))]) if len(size) > 1 else block
        whole = block if len(size) <= 1 else into
        dcp.load({name: whole}, storage_reader=reader(path), planner=LoadPlanner(), no_dist=True)
        yield start, block
