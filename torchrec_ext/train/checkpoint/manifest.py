"""The manifest of a checkpoint: what belongs to it and the digest of each file, so that no damage and no mixture is ever loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from torchrec_ext.durable import open_plain
from torchrec_ext.train.checkpoint.storage import CheckpointError

NAME = "manifest.json"
FORMAT = 1
_BLOCK = 2**22


def digest(files: AbstractFileSystem, path: str) -> dict[str, Any]:
    """Size and SHA-256 of one file."""
    sha, size = hashlib.sha256(), 0
    local = isinstance(files, LocalFileSystem)
    with open_plain(url_to_fs(path)[1]) if local else files.open(path, "rb") as stream:  # a path, or file:// and a path
        while block := stream.read(_BLOCK):
            sha.update(block)
            size += len(block)
    return {"bytes": size, "sha256": sha.hexdigest()}


def sealed(content: Mapping[str, Any]) -> bytes:
    """A manifest's bytes, with a digest of its own content."""
    whole = {"format": FORMAT, **content}
    return (json.dumps({**whole, "sha256": _of(whole)}, indent=1) + "\n").encode()


def digest_of(content: Mapping[str, Any]) -> str:
    """The digest that a manifest of ``content`` is sealed with, by which a later checkpoint names its parent."""
    return _of({"format": FORMAT, **content})


def opened(data: bytes, where: str) -> dict[str, Any]:
    """The content of a manifest.

    Args:
        data: its bytes.
        where: its path, for messages.

    Raises:
        CheckpointError: it is damaged, or of a newer format.
    """
    try:
        whole = json.loads(data)
        sha = whole.pop("sha256")
        version = whole["format"]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{where} is damaged: it is not a manifest") from None
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(f"{where} is of format {version}, this version reads up to {FORMAT}: update torchrec-ext")
    if sha != _of(whole) or data != sealed(whole):
        raise CheckpointError(f"{where} is damaged: its content does not fit its digest")
    return whole  # type: ignore[no-any-return]


def damage(files: AbstractFileSystem, folder: str, listed: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> str | None:
    """What is wrong with the first damaged one of ``names``, which the manifest lists; None where all are as they were written."""
    for name in names:
        path, wanted = f"{folder}/{name}", listed[name]
        try:
            found = digest(files, path)
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
        if found["bytes"] != wanted["bytes"]:
            return f"{path} has {found['bytes']:,} bytes and was written with {wanted['bytes']:,}"
        if found["sha256"] != wanted["sha256"]:
            return f"{path} is damaged: its content does not fit its digest"
    return None


def _of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
