"""mapped_tensors(): a safetensors file of any size, whose tensors are written by filling them.

safetensors' own writer takes whole tensors; its format is a header of JSON and the bytes one after the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor

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


class Shape(NamedTuple):
    """The shape and type of a tensor in a file."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; of the whole tensor if it has no rows."""
        return int(torch.Size(self.size[1:]).numel()) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return int(torch.Size(self.size).numel()) * self.dtype.itemsize


def mapped_tensors(file: Path, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Makes a file of its full size, and returns its tensors by name, whose memory is the file's.

    Args:
        file: path of the file; the caller syncs it once the tensors are filled.
        shapes: shapes and types of its tensors, by name.

    Raises:
        OSError: the file cannot be made, or the disk has no room for it.
    """
    # The widest types first, so that each tensor begins at a multiple of its type.
    names = sorted(shapes, key=lambda name: -shapes[name].dtype.itemsize)
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        size, dtype = shapes[name]
        begin = end
        end += shapes[name].bytes
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(size),
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries).encode()
    # safetensors aligns the data to 8 bytes.
    header += b" " * (-len(header) % 8)
    start = 8 + len(header)
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.flush()
        # A disk that fills up behind a mapping would end the process.
        os.posix_fallocate(stream.fileno(), 0, start + end)
    whole = torch.from_file(str(file), shared=True, size=start + end, dtype=torch.uint8)
    tensors = {}
    for name in names:
        begin, stop = entries[name]["data_offsets"]
        size, dtype = shapes[name]
        tensors[name] = whole[start + begin : start + stop].view(dtype).view(size)
    return tensors
