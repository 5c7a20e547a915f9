"""A checkpoint's own account of itself, and what is wrong with it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from torch.distributed.checkpoint.metadata import Metadata

from torchrec_ext.durable import open_plain
from torchrec_ext.train.checkpoint import manifest
from torchrec_ext.train.checkpoint.folder import CheckpointFolder
from torchrec_ext.train.checkpoint.storage import CheckpointError, read_metadata
from torchrec_ext.train.checkpoint.together import Together

_MOST_BYTES = 16 * 2**20  # of a manifest, which lists the files of all ranks: a hundred thousand
_CONTENT = {
    "step": int,
    "world_size": int,
    "tables": dict,
    "paths": dict,
    "layers": list,
    "row_parts": dict,
    "content": dict,
    "files": dict,
}


def read_manifest(path: str) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: there is none, or it is damaged or of a newer format.
    """
    where = f"{path}/{manifest.NAME}"
    saved = manifest.opened(_bytes(where, f"; is '{path}' a checkpoint?", _MOST_BYTES), where)
    lacks = [name for name, kind in _CONTENT.items() if not isinstance(saved.get(name), kind)]
    if lacks:
        raise CheckpointError(f"{where} is no manifest of a checkpoint: it lacks {', '.join(lacks)}")
    return saved


def read_index(path: str) -> Metadata:
    """Where each part of each tensor is.

    Raises:
        CheckpointError: it is missing, damaged, or was made to run code.
    """
    return read_metadata(_bytes(f"{path}/.metadata"), f"{path}/.metadata")


def damage(path: str, together: Together) -> str | None:
    """What is wrong with a checkpoint, or None; the ranks share the reading of its files."""
    try:
        listed = read_manifest(path)["files"]
        found = manifest.damage(url_to_fs(path)[0], path, listed, sorted(listed)[together.rank :: together.ranks])
    except (CheckpointError, KeyError, TypeError, AttributeError) as error:
        found = str(error)
    return next((each for each in together.gathered(found) if each), None)


def newest_good(folder: CheckpointFolder, together: Together, say: Callable[[str], None] = print) -> str | None:
    """The newest checkpoint of a folder without damage, the same on every rank; None where there is none.

    Args:
        folder: of checkpoints.
        together: all ranks call it.
        say: called on rank 0 with a line for each newer one that is damaged.
    """
    for step in together.on_main(folder.steps):
        path = folder.path(step)
        if (wrong := damage(path, together)) is None:
            return path
        if together.rank == 0:
            say(f"checkpoint step {step}: {wrong}; the one before it is used")
    return None


def _bytes(where: str, hint: str = "", most: int | None = None) -> bytes:
    try:
        files, path = url_to_fs(where)
        with open_plain(path) if isinstance(files, LocalFileSystem) else files.open(path, "rb") as stream:
            data: bytes = stream.read(-1 if most is None else most + 1)
        if most is not None and len(data) > most:
            raise OSError(errno.EFBIG, f"it has more than the {most:,} bytes that are read")
        return data
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}{hint}") from None
