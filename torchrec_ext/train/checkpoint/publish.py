"""publish(): the weights of a checkpoint as one file, table by table and block by block, whatever size they have."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_ext.train.checkpoint.parts import LoadPlanner, Part, Parts
from torchrec_ext.train.checkpoint.reading import read_index, read_manifest
from torchrec_ext.train.checkpoint.storage import CheckpointError, reader

# safetensors' own writer takes whole tensors; its format is a header of JSON and the bytes one after the other.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
    part = file.with_name(file.name + ".part")
    try:
        with part.open("wb") as stream:
            places = _header(stream, held)
            for name, own in names.items():
                for row, block in _blocks(path, own, held[name]):
                    stream.seek(places[name] + row * _row_bytes(held[name]))
                    stream.write(_raw(block))
                    if progress is not None:
                        progress(block.numel() * block.element_size())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(f"'{file}' cannot be written: {error.strerror or error}") from None
    return {name: tuple(each.size) for name, each in held.items()}


def _published(saved: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name in the model's state dict, name in the checkpoint)."""
    for table, path in saved["paths"].items():
        yield path, f"tables.{table}.weight"
    for name, held in tensors.items():
        if name.startswith("dense.") and "@" not in name and isinstance(held, TensorStorageMetadata):
            yield name.removeprefix("dense."), name


def _header(stream: IO[bytes], held: Mapping[str, Any]) -> dict[str, int]:
    """Writes the header, and returns where each tensor begins."""
    entries: dict[str, Any] = {}
    end = 0
    for name, each in held.items():
        begin, end = end, end + _bytes(each.size, each.properties.dtype)
        entries[name] = {"dtype": _NAMES[each.properties.dtype], "shape": list(each.size), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    start = 8 + len(text)
    stream.truncate(start + end)
    return {name: start + entry["data_offsets"][0] for name, entry in entries.items()}


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


def _raw(block: Tensor) -> Any:
    return block.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _row_bytes(held: Any) -> int:
    return _bytes(held.size[1:], held.properties.dtype) if len(held.size) else 0


def _bytes(size: Sequence[int], dtype: torch.dtype) -> int:
    return int(torch.Size(size).numel() * dtype.itemsize)
