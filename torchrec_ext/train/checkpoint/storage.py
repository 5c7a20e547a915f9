"""Readers and writers of a checkpoint's tensors, in a folder or behind an fsspec address; reading runs no code."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch

# torch has no public name
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as Files
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchrec_ext.sealed import MeasuredStream, yield_to_others


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read, or does not belong here: the message names the file and what to do."""


def cause(error: BaseException) -> str:
    """Returns the first failed rank's error in one line."""
    # torch wraps the errors of a step of saving or loading by rank, each with its
    # traceback.
    failures = list(getattr(error, "failures", {}).values())
    if failures:
        error = failures[0][0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


def is_url(folder: str) -> bool:
    """Returns whether a folder is an address for fsspec."""
    return "://" in folder


class _Place(NamedTuple):
    """Bytes of a chunk, with the attributes that torch's reader asks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def index_as_json(index: Metadata) -> dict[str, Any]:
    """Returns dtype, size and chunks of each tensor of torch's index."""
    tensors: dict[str, Any] = {}
    for name, tensor in index.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), "a state has tensors alone"
        chunks = []
        for chunk in tensor.chunks:
            place = index.storage_data[MetadataIndex(name, chunk.offsets)]
            where = [place.relative_path, place.offset, place.length]
            chunks.append([list(chunk.offsets), list(chunk.sizes), *where])
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = [dtype, list(tensor.size), chunks]
    return tensors


def index_from_json(tensors: Mapping[str, Any], where: str) -> Metadata:
    """Returns torch's index of :func:`index_as_json`.

    Args:
        tensors: JSON values of any form.
        where: path of their file, for messages.

    Raises:
        CheckpointError: they are no index.
    """
    metadata: dict[str, Any] = {}
    places = {}
    try:
        for name, (dtype, size, chunks) in tensors.items():
            properties = TensorProperties(dtype=_DTYPES[dtype])
            found = []
            for offsets, sizes, file, start, length in chunks:
                chunk = ChunkStorageMetadata(_size(offsets), _size(sizes))
                if "/" in file or _size([start, length]) != (start, length):
                    raise ValueError(file)
                found.append(chunk)
                index = MetadataIndex(name, chunk.offsets)
                places[index] = _Place(file, start, length)
            metadata[name] = TensorStorageMetadata(properties, _size(size), found)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"{where} has no index of tensors: one of them has another form; do not load it"
        ) from None
    return Metadata(metadata, storage_data=places)


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def _size(numbers: Any) -> torch.Size:
    size = torch.Size(numbers)
    if any(number < 0 for number in size):
        raise ValueError(numbers)
    return size


class Reader(FsspecReader):
    """torch's reader of the tensors in a folder that ``index`` lists: torch's own file of it is a pickle."""

    def __init__(self, folder: str, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Returns the given index."""
        return self._index


class _Measured(Files):
    """torch's file system over fsspec: measures size and SHA-256 of each file while writing it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[Any, None, None]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            measured = MeasuredStream(stream)
            yield measured
            self.digests[_name_of(path)] = measured.measured

    def rename(
        self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]
    ) -> None:
        super().rename(path, new_path)
        self.digests[_name_of(new_path)] = self.digests.pop(_name_of(path))


def _name_of(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).rpartition("/")[2]


# Name of the entry among a rank's results that holds the digests of its files.
_DIGESTS = MetadataIndex("digests of a rank's files")


class Writer(FsspecWriter):
    """torch's writer: one file per rank, synced before it is closed; rank 0 seals when all ranks have written.

    The digests of a rank's files travel with its results, which torch gathers on rank 0.

    Args:
        folder: path or address.
        seal: called on rank 0, when all are written, with size and SHA-256 of each file by name, and the index.
    """

    fs: Any

    def __init__(
        self,
        folder: str,
        seal: Callable[[dict[str, Any], Metadata], None],
    ) -> None:
        super().__init__(folder)
        self.fs = _Measured()
        self.fs.init_path(folder)  # the same as in torch's own FsspecWriter
        self._seal = seal

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Lowers the priority of this thread: torch saves in one of its own, beside the training."""
        yield_to_others()
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        """Writes this rank's file, and adds the digests to torch's results."""
        written = super().write_data(plan, planner).wait()
        results: Future[list[WriteResult]] = Future()
        results.set_result([*written, WriteResult(_DIGESTS, 0, dict(self.fs.digests))])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Seals, on rank 0. torch's own file of the index, for other tools, is written last of its files."""
        digests: dict[str, Any] = {}
        written = []
        for result in chain.from_iterable(results):
            if result.index == _DIGESTS:
                digests |= result.storage_data
            else:
                written.append(result)
        # By torch too, but 2.11 completes a copy of the index.
        metadata.storage_data = {each.index: each.storage_data for each in written}
        super().finish(metadata, [written])
        self._seal({**digests, **self.fs.digests}, metadata)
