"""load_vectors(): loads pretrained vectors into this rank's shards of a table, by id, block by block.

publish_weights(): writes the weights of a checkpoint of any size to one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
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
        path: parquet file with a column ``id`` of integers and ``vector`` of lists.

    Raises:
        CheckpointError: the file is missing or damaged, or lacks a part.
    """
    try:
        for batch in pq.ParquetFile(path).iter_batches(BLOCK, columns=["id", "vector"]):
            # A list of another length than the first is refused by the cast.
            width = len(batch["vector"][0])
            vectors = batch["vector"].cast(pa.list_(pa.float32(), width)).flatten()
            ids = batch["id"].cast(pa.int64()).fill_null(-1).to_numpy()
            yield (
                torch.from_numpy(ids.copy()),
                torch.from_numpy(vectors.to_numpy().copy()).view(len(ids), -1),
            )
    except Exception as error:
        # Arrow and torch have errors of their own for a damaged file.
        first = f"{error}".partition("\n")[0]
        raise CheckpointError(
            f"'{path}' holds no vectors: {first[:100]}; give parquet with columns id and vector"
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
