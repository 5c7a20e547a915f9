"""Readers and writers of a checkpoint's tensors, in a folder or behind an fsspec address; reading runs no code."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter

# torch has no public name
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as Files
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchrec_ext.sealed import MeasuredStream, yield_to_others

# The names in a `.metadata` of tensors. Any other name was put there to run code.
_ALLOWED_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    },
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
}


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


# Opcodes of pickle that no index has: some reserve any amount of memory, others call
# more than `_ALLOWED_NAMES`.
_REFUSED_OPCODES = {
    pickle.BYTEARRAY8,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
    pickle.PERSID,
    pickle.BINPERSID,
    pickle.INST,
    pickle.OBJ,
}
_REFUSED_OPCODES |= {pickle.EXT1, pickle.EXT2, pickle.EXT4}


class _Unpickler(pickle._Unpickler):
    """Pickle's Python unpickler: the C one reserves gigabytes for its memo if a number in the file says so."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in _REFUSED_OPCODES
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED_NAMES.get(module, ()):
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no checkpoint needs"
            )
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Refuses pickle's BUILD on a class, because it could alter the class for the entire process."""
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError(f"it changes {self.stack[-2].__name__} itself")  # type: ignore[attr-defined]
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def read_metadata(data: bytes, where: str) -> Metadata:
    """Reads the index in a ``.metadata`` file without running its code, as torch itself would.

    Args:
        data: bytes of the file.
        where: path of the file, for messages.

    Raises:
        CheckpointError: it is damaged, or was made to run code.
    """
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:
        # A damaged pickle raises almost anything.
        raise CheckpointError(
            f"{where} is not the index of a checkpoint: {error}; do not load it"
        ) from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(
            f"{where} is not the index of a checkpoint: it holds a {type(metadata).__name__}; do not load it"
        )
    if not _is_valid(metadata):
        raise CheckpointError(
            f"{where} is not the index of a checkpoint: a part of it is of another kind; do not load it"
        )
    return metadata


def _is_valid(metadata: Metadata) -> bool:
    """Returns whether every tensor of an index has a shape, a dtype, and chunks in files next to it."""
    try:
        # The file may hold anything, so nothing here relies on the types that torch
        # declares.
        tensors: dict[Any, Any] = metadata.state_dict_metadata
        chunks: dict[Any, Any] = metadata.storage_data
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(
                tensor, TensorStorageMetadata
            ):
                return False
            if not isinstance(tensor.properties.dtype, torch.dtype):
                return False
            sizes: list[Any] = [tensor.size]
            for chunk in tensor.chunks:
                sizes += [chunk.offsets, chunk.sizes]
            for size in sizes:
                if not isinstance(size, torch.Size) or any(
                    number < 0 for number in size
                ):
                    return False
        for index, chunk in chunks.items():
            if not isinstance(index, MetadataIndex) or index.fqn not in tensors:
                return False
            if not isinstance(chunk.relative_path, str) or "/" in chunk.relative_path:
                return False
            if not (chunk.offset >= 0 and chunk.length >= 0):
                return False
        return True
    except (AttributeError, TypeError, ValueError):
        return False


class _Reader(FsspecReader):
    """torch's reader, whose own ``read_metadata`` would run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            metadata = read_metadata(stream.read(), str(path))
        # The same as in torch's own read_metadata, whose last lines this replaces.
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def is_url(folder: str) -> bool:
    """Returns whether a folder is an address for fsspec."""
    return "://" in folder


def reader(folder: str) -> StorageReader:
    """Returns a reader of the tensors in ``folder``."""
    return _Reader(folder)


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
            with MeasuredStream(stream) as measured:
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


class _Writer(FsspecWriter):
    """torch's writer: rank 0 makes room before any rank writes, and seals when all have written.

    The digests of a rank's files travel with its results, which torch gathers on rank 0.
    """

    fs: Any

    def __init__(
        self,
        folder: str,
        make_room: Callable[[int], None],
        seal: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(folder)
        self.fs = _Measured()
        self.fs.init_path(folder)  # the same as in torch's own FsspecWriter
        self._make_room = make_room
        self._seal = seal

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        # Torch saves in a thread of its own, beside the training.
        yield_to_others()
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        size = 0
        for plan in plans:
            for item in plan.items:
                size += item.tensor_storage_size() or 0
        self._make_room(size)
        return super().prepare_global_plan(plans)

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner).wait()
        results: Future[list[WriteResult]] = Future()
        results.set_result([*written, WriteResult(_DIGESTS, 0, dict(self.fs.digests))])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        digests: dict[str, Any] = {}
        written = []
        for of_rank in results:
            for result in of_rank:
                if result.index == _DIGESTS:
                    digests |= result.storage_data
            written.append([each for each in of_rank if each.index != _DIGESTS])
        super().finish(metadata, written)
        # Torch's index is written last of its files, by this rank.
        self._seal({**digests, **self.fs.digests})


def writer(
    folder: str,
    make_room: Callable[[int], None],
    seal: Callable[[dict[str, Any]], None],
) -> StorageWriter:
    """Returns a writer of tensors to ``folder``: one file per rank, synced before it is closed.

    Args:
        folder: path or address.
        make_room: called on rank 0, with the bytes of all ranks, before any is written.
        seal: called on rank 0, with size and SHA-256 of each file by name, when all are written.
    """
    return _Writer(folder, make_room, seal)
