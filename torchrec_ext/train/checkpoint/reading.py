"""A checkpoint's own account of itself, and what is wrong with it."""

from __future__ import annotations

from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from torch.distributed.checkpoint.metadata import Metadata

from torchrec_ext.train.checkpoint import manifest
from torchrec_ext.train.checkpoint.storage import CheckpointError, read_metadata
from torchrec_ext.train.checkpoint.together import Together


def read_manifest(path: str) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: there is none, or it is damaged or of a newer format.
    """
    return manifest.opened(_bytes(f"{path}/{manifest.NAME}", f"; is '{path}' a checkpoint?"), f"{path}/{manifest.NAME}")


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


def _bytes(where: str, hint: str = "") -> bytes:
    try:
        with fsspec.open(where, "rb") as stream:
            return stream.read()  # type: ignore[no-any-return]
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}{hint}") from None
