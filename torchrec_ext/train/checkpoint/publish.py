"""publish(): the weights of a checkpoint as one file, table by table and block by block, whatever size they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_ext.tensor_file import Shape, TensorWriter
from torchrec_ext.train.checkpoint.parts import LoadPlanner, Part, Parts
from torchrec_ext.train.checkpoint.reading import read_index, read_manifest
from torchrec_ext.train.checkpoint.storage import CheckpointError, reader


def publish(path: str, file: Path, *, progress: Callable[[int], None] | None = None) -> dict[str, tuple[int, ...]]:
    """Writes the weights of a checkpoint to one safetensors file, under the names of the unsharded model's state dict.

    One saved block (32 MiB) is in memory at a time.

    Args:
        path: of a checkpoint without damage.
        file: to be written; there as a whole or not at all.
        progress: called with the bytes of each block that was written.

    Returns:
        The shape of each tensor.

    Raises:
        CheckpointError: it cannot be read, or the file not be written.
    """
    saved, index = read_manifest(path), read_index(path)
    names = dict(_published(saved, index.state_dict_metadata))
    held: dict[str, Any] = {name: index.state_dict_metadata[own] for name, own in names.items()}
    try:
        with TensorWriter(file, {name: Shape(tuple(each.size), each.properties.dtype) for name, each in held.items()}) as out:
            for name, own in names.items():
                for row, block in _blocks(path, own, held[name]):
                    out.write(name, row, block)
                    if progress is not None:
                        progress(block.numel() * block.element_size())
    except OSError as error:
        raise CheckpointError(f"'{file}' cannot be written: {error.strerror or error}") from None
    return {name: tuple(each.size) for name, each in held.items()}


def _published(saved: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name in the model's state dict, name in the checkpoint)."""
    for table, path in saved["paths"].items():
        yield path, f"tables.{table}.weight"
    for name, held in tensors.items():
        if name.startswith("dense.") and "@" not in name and isinstance(held, TensorStorageMetadata):
            yield name.removeprefix("dense."), name


def _blocks(path: str, name: str, held: Any) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of a tensor, cut where the saved blocks are."""
    size = tuple(held.size)
    starts = sorted({chunk.offsets[0] for chunk in held.chunks}) if size else [0]
    for start, stop in zip(starts, [*starts[1:], size[0] if size else 0], strict=True):
        block = torch.empty((stop - start, *size[1:]) if size else (), dtype=held.properties.dtype)
        into: Any = Parts(size, [Part(block, (start, *[0] * (len(size) - 1)))]) if len(size) > 1 else block
        whole = block if len(size) <= 1 else into
        dcp.load({name: whole}, storage_reader=reader(path), planner=LoadPlanner(), no_dist=True)
        yield start, block
