"""load_vectors(): loads pretrained vectors into this rank's shards of a table, by id, block by block.

publish_weights(): writes the weights of a checkpoint of any size to one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
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


def read_vectors(
    path: Path, values: pa.Array | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Reads a file block by block: yields rows of a table (n,) int64, and vectors (n, D) float32.

    Args:
        path: parquet file with a column ``id`` and ``vector`` of lists.
        values: (V,) the id of each row; those of the file that are none of them get row -1. By default an id is the
            number of a row.

    Raises:
        CheckpointError: the file is missing or damaged, or lacks a part.
    """
    try:
        for batch in pq.ParquetFile(path).iter_batches(BLOCK, columns=["id", "vector"]):
            if batch["vector"].null_count:
                raise ValueError("a vector is null")
            # A list of another length than the first is refused by the cast.
            width = len(batch["vector"][0])
            vectors = batch["vector"].cast(pa.list_(pa.float32(), width)).flatten()
            ids = batch["id"]
            if values is not None:
                ids = pc.index_in(ids.cast(values.type), values, skip_nulls=True)
            yield (
                torch.tensor(ids.cast(pa.int64()).fill_null(-1).to_numpy()),
                torch.tensor(vectors.to_numpy()).view(-1, width),
            )
    except Exception as error:
        # Arrow and torch have errors of their own for a damaged file.
        first = f"{error}".partition("\n")[0]
        raise CheckpointError(
            f"'{path}' holds no vectors: {first[:100]}; give parquet with columns id and vector"
        ) from None


def load_vectors(
    model: nn.Module, table: str, path: Path, values: pa.Array | None = None
) -> int:
    """Loads the vectors of a file into a table; rows without a vector are unchanged.

    Args:
        model: model from :func:`hybrid_parallel`, or unsharded; each rank reads the file and writes its own shards.
        table: name of the table.
        path: file of vectors, see :func:`read_vectors`.
        values: (V,) the id of each row, of text or whole numbers; vectors of other ids are left out. By default ids are
            numbers of rows.

    Returns:
        The number of vectors that were loaded.

    Raises:
        CheckpointError: an id is not a row of the table, or a vector has another width or is not finite; blocks before
            it have been written.
    """
    shards = [shard for shard in local_shards(model) if shard.config.name == table]
    count = 0
    with torch.no_grad():
        for ids, vectors in read_vectors(path, values):
            if values is not None:
                vectors = vectors[ids >= 0]
                ids = ids[ids >= 0]
            # A rank without a shard reads the file too, and checks what it can.
            wrong = _wrong(table, shards, ids, vectors)
            if wrong:
                raise CheckpointError(f"'{path}': {wrong}")
            count += len(ids)
            for shard in shards:
                local = (ids >= shard.row) & (ids < shard.row + len(shard.tensor))
                shard.tensor[(ids[local] - shard.row).to(shard.tensor.device)] = (
                    vectors[
                        local, shard.column : shard.column + shard.tensor.shape[1]
                    ].to(shard.tensor)
                )
    return count


def _wrong(table: str, shards: Any, ids: Tensor, vectors: Tensor) -> str:
    """Says what is wrong with a block of vectors; empty if nothing is."""
    bad = ids[(~torch.isfinite(vectors)).any(1)]
    if len(bad):
        return f"the vector of row {int(bad[0])} of the table is not finite; leave it out, or mend it"
    if not shards:
        return ""
    config = shards[0].config
    if vectors.shape[1] != config.embedding_dim:
        return f"vectors are {vectors.shape[1]} wide, and table '{table}' has embedding_dim={config.embedding_dim}"
    outside = ids[(ids < 0) | (ids >= config.num_embeddings)]
    if len(outside):
        return f"id {int(outside[0])} is no row of table '{table}', which has {config.num_embeddings:,}"
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
    names = {
        weight: f"tables.{table}.weight"
        for table, weight in saved.manifest["paths"].items()
    }
    for name in metadata:
        if name.startswith("dense.") and "@" not in name:
            names[name.removeprefix("dense.")] = name
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
