"""load_vectors(): loads pretrained vectors into this rank's shards of a table, by id, block by block.

publish_weights(): writes the weights of a checkpoint of any size to one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrec_ext.distributed.tables import local_shards
from torchrec_ext.sealed import sync_to_disk
from torchrec_ext.tensor_file import Shape, mapped_tensors
from torchrec_ext.train.checkpoint.folder import read_checkpoint
from torchrec_ext.train.checkpoint.load import load_tensors
from torchrec_ext.train.checkpoint.storage import CheckpointError

# Rows to read at once, so that a file may be larger than memory.
BLOCK = 65536


def read_vectors(path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Reads a file block by block: yields ids (n,) int64, rows of a table, and vectors (n, D) float32.

    Args:
        path: ``.npy``, (N, D), row i being id i; ``.safetensors`` with
            ``vectors`` and, unless they are 0 to N - 1, ``ids``; ``.parquet`` with a column ``id`` of integers and
            ``vector`` of lists.

    Raises:
        CheckpointError: the file is missing or damaged, or lacks a part.
    """
    readers = {
        ".npy": _read_numpy,
        ".safetensors": _read_safetensors,
        ".parquet": _read_parquet,
    }
    if path.suffix not in readers:
        raise CheckpointError(
            f"'{path}': vectors are read from {', '.join(readers)} files"
        )
    try:
        yield from readers[path.suffix](path)
    except CheckpointError:
        raise
    except Exception as error:
        # numpy, Arrow and safetensors have errors of their own for a damaged file.
        raise CheckpointError(
            f"'{path}' holds no vectors: {error}".splitlines()[0]
        ) from None


def load_vectors(model: nn.Module, table: str, path: Path) -> int:
    """Loads the vectors of a file into a table; rows without a vector are unchanged.

    Args:
        model: model from :func:`hybrid_parallel`, or unsharded; each rank reads the file and writes its own shards.
        table: name of the table.
        path: file of vectors, see :func:`read_vectors`.

    Returns:
        The number of vectors.

    Raises:
        CheckpointError: an id is not a row of the table, or a vector has another width or is not finite; blocks before
            it have been written.
    """
    shards = [shard for shard in local_shards(model) if shard.config.name == table]
    count = 0
    with torch.no_grad():
        for ids, vectors in read_vectors(path):
            # A rank without a shard reads the file too, and checks what it can.
            wrong = _wrong(table, shards[0].config if shards else None, ids, vectors)
            if wrong:
                raise CheckpointError(f"'{path}': {wrong}")
            count += len(ids)
            for shard in shards:
                local = (ids >= shard.row) & (ids < shard.row + len(shard.tensor))
                columns = slice(shard.column, shard.column + shard.tensor.shape[1])
                shard.tensor[(ids[local] - shard.row).to(shard.tensor.device)] = (
                    vectors[local][:, columns].to(shard.tensor)
                )
    return count


def _wrong(table: str, config: Any, ids: Tensor, vectors: Tensor) -> str:
    """Says what is wrong with a block of vectors; empty if nothing is."""
    if vectors.ndim != 2 or len(vectors) != len(ids):
        return f"{len(ids)} ids with vectors of shape {tuple(vectors.shape)}; they must be (N,) and (N, D)"
    bad = ids[(~torch.isfinite(vectors)).any(dim=1)]
    if len(bad):
        return f"the vector of id {int(bad[0])} is not finite; leave it out, or mend it"
    if config is None:
        return ""
    rows, dim = config.num_embeddings, config.embedding_dim
    if vectors.shape[1] != dim:
        return f"vectors are {vectors.shape[1]} wide, and table '{table}' has embedding_dim={dim}"
    outside = ids[(ids < 0) | (ids >= rows)]
    if len(outside):
        return f"id {int(outside[0])} is no row of table '{table}', which has {rows:,}"
    return ""


def _read_numpy(path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    # Mapped, because a .npy file may be larger than memory. A pickle in it would run
    # code.
    vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    for start in range(0, len(vectors), BLOCK):
        block = np.array(vectors[start : start + BLOCK], dtype=np.float32)
        yield torch.arange(start, start + len(block)), torch.from_numpy(block)


def _read_safetensors(path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        vectors = file.get_slice("vectors")
        ids = None
        # The file has keys(), but no iteration.
        if "ids" in file.keys():  # noqa: SIM118
            ids = file.get_tensor("ids").long()
        for start in range(0, vectors.get_shape()[0], BLOCK):
            block = vectors[start : start + BLOCK].float()
            block_ids = torch.arange(start, start + len(block))
            if ids is not None:
                block_ids = ids[start : start + BLOCK]
            yield block_ids, block


def _read_parquet(path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(path).iter_batches(BLOCK, columns=["id", "vector"]):
        ids = torch.from_numpy(
            batch["id"].to_numpy(zero_copy_only=False).astype(np.int64)
        )
        flat = np.array(
            batch["vector"].flatten().to_numpy(zero_copy_only=False), dtype=np.float32
        )
        if len(ids) and len(flat) % len(ids):
            raise CheckpointError(
                f"'{path}': the lists of column 'vector' are not of one length"
            )
        yield ids, torch.from_numpy(flat).view(len(ids), -1)


def publish_weights(path: str, file: Path) -> dict[str, tuple[int, ...]]:
    """Writes the weights of a checkpoint to one safetensors file, under the names of the unsharded model's state dict.

    They are read into the mapped file, so they need not fit in memory.

    Args:
        path: checkpoint without damage.
        file: file to write; it appears complete or not at all.

    Returns:
        The shape of each tensor.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the file cannot be written.
    """
    saved = read_checkpoint(path)
    metadata: Mapping[str, Any] = saved.index.state_dict_metadata
    names = dict(_weight_names(saved.manifest, metadata))
    shapes = {}
    for name, saved_name in names.items():
        tensor = metadata[saved_name]
        shapes[name] = Shape(tuple(tensor.size), tensor.properties.dtype)
    part = file.with_name(f"{file.name}.part")
    try:
        tensors = mapped_tensors(part, shapes)
        load_tensors(saved, {names[name]: tensors[name] for name in names}, None)
        sync_to_disk(part)
        part.replace(file)
    except OSError as error:
        raise CheckpointError(
            f"'{file}' cannot be written: {error.strerror or error}"
        ) from None
    finally:
        part.unlink(missing_ok=True)
    return {name: shape.size for name, shape in shapes.items()}


def _weight_names(
    saved: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yields each weight's name in the model's state dict, and its name in the checkpoint."""
    for table, path in saved["paths"].items():
        yield path, f"tables.{table}.weight"
    for name in tensors:
        if name.startswith("dense.") and "@" not in name:
            yield name.removeprefix("dense."), name
