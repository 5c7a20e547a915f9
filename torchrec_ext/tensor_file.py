"""TensorWriter: a safetensors file written block by block, whatever size its tensors have.

safetensors' own writer takes whole tensors; its format is a header of JSON and the bytes one after the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor
from typing_extensions import Self

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


class TensorWriter:
    """Writes a file atomically: complete, or not at all.

    Args:
        file: path of the file.
        tensors: shapes and types of its tensors, by name.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """

    def __init__(self, file: Path, tensors: Mapping[str, Shape]) -> None:
        self._file = file
        self._part = file.with_name(file.name + ".part")
        self._tensors = tensors
        self._starts: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._stream: IO[bytes] = self._part.open("wb")
        try:
            self._write_header()
        except OSError:
            self._drop()
            raise
        return self

    def write(self, name: str, row: int, block: Tensor) -> None:
        """Writes whole rows of a tensor from ``row`` onwards, or all of a tensor without rows."""
        shape = self._tensors[name]
        self._stream.seek(self._starts[name] + row * shape.row_bytes)
        self._stream.write(_raw(block.to(shape.dtype)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._drop()
            return
        try:
            self._stream.flush()
            # On disk before it is renamed: after a crash the file is the old one or
            # whole.
            os.fsync(self._stream.fileno())
            self._stream.close()
            os.replace(self._part, self._file)
        except OSError:
            self._drop()
            raise

    def _drop(self) -> None:
        self._stream.close()
        self._part.unlink(missing_ok=True)

    def _write_header(self) -> None:
        entries: dict[str, Any] = {}
        end = 0
        for name, shape in self._tensors.items():
            begin = end
            end += shape.bytes
            entries[name] = {
                "dtype": _NAMES[shape.dtype],
                "shape": list(shape.size),
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries).encode()
        # safetensors aligns the data to 8 bytes.
        text += b" " * (-len(text) % 8)
        self._stream.write(len(text).to_bytes(8, "little") + text)
        start = 8 + len(text)
        # Blocks may come in any order, so the file has its full size from the start.
        self._stream.truncate(start + end)
        self._starts = {
            name: start + entry["data_offsets"][0] for name, entry in entries.items()
        }


def _raw(block: Tensor) -> Any:
    # As bytes, because numpy has no bfloat16.
    return block.contiguous().reshape(-1).view(torch.uint8).numpy().data
