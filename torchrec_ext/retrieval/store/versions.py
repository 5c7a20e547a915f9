"""Versions of a folder: each is complete or absent, and one is current. Writers replace it under its readers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrec_ext.sealed import (
    difference,
    files_below,
    json_digest,
    lock_folder,
    measure_file,
    read_plain,
    sealed_json,
    sync_to_disk,
    write_whole,
)

MANIFEST = "manifest.json"
_FORMAT = 1
_POINTER = "CURRENT"
_NAME = re.compile(r"v(\d{8})")
ATTEMPTS = 20  # to open the current version while writers replace and remove it
_MOST_BYTES = 2**20  # limit of a manifest; it lists a dozen files


class StoreError(ValueError):
    """A store is damaged, cannot be written, or changed under its reader: the message names the file and the remedy."""


def versions(folder: Path) -> list[str]:
    """Returns the names of the complete versions, oldest first."""
    return sorted(
        path.parent.name
        for path in folder.glob(f"*/{MANIFEST}")
        if _NAME.fullmatch(path.parent.name)
    )


def current(folder: Path) -> str:
    """Returns the name of the current version.

    Raises:
        StoreError: no version was ever written there.
    """
    try:
        name = (
            read_plain(folder / _POINTER, _MOST_BYTES).decode(errors="replace").strip()
        )
    except OSError:
        raise StoreError(
            f"'{folder}' holds no embedding store: it has no file {_POINTER}; write one with write_store"
        ) from None
    if not _NAME.fullmatch(name):
        raise StoreError(
            f"'{folder / _POINTER}' is damaged: it names {name[:40]!r}; write the store again"
        )
    return name


def read_store_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a version.

    Raises:
        StoreError: the manifest is missing, damaged, or of a newer format.
    """
    path = folder / MANIFEST
    try:
        content: dict[str, Any] = json.loads(read_plain(path, _MOST_BYTES))
        sha = content.pop("digest")
        form = int(content["format"])
    except FileNotFoundError:
        raise StoreError(
            f"'{path}' is missing: this version was removed or never finished; open the store again"
        ) from None
    except (
        OSError,
        ValueError,
        AttributeError,
        KeyError,
        TypeError,
        RecursionError,
    ) as error:
        raise StoreError(
            f"'{path}' is damaged ({error}); write the store again"
        ) from None
    # Before the digest, because a newer format may compute it otherwise.
    if form > _FORMAT:
        raise StoreError(
            f"'{path}' is of format {form}, this version reads up to {_FORMAT}: update torchrec-ext"
        )
    if sha != json_digest(content):
        raise StoreError(
            f"'{path}' is damaged: its content does not fit its digest; write the store again"
        )
    return {**content, "digest": sha}


def check_version_files(
    folder: Path, files: dict[str, dict[str, Any]], *, verify: bool
) -> None:
    """Checks the files' sizes against the manifest, and with ``verify`` their content too.

    Raises:
        StoreError: a file is missing, cut off or changed.
    """
    for name, entry in files.items():
        path = folder / name
        try:
            measured = {**entry, "bytes": path.stat().st_size}
            if verify and measured == entry:
                measured = measure_file(path)
        except OSError as error:
            raise StoreError(
                f"'{path}' cannot be read: {error.strerror or error}; write the store again"
            ) from None
        if wrong := difference(measured, entry):
            raise StoreError(f"'{path}' {wrong}; write the store again")


@contextlib.contextmanager
def new_version(folder: Path) -> Iterator[Path]:
    """Yields a folder for the next version; call :func:`publish_version` to make it the current one.

    The folder is removed if the block raises.

    Raises:
        StoreError: another process is writing, or the disk refuses.
    """
    with _lock(folder):
        # Also numbers of versions without a manifest, so that a new version never meets
        # the rest of an old one.
        numbers = [
            int(name[1:]) for name in os.listdir(folder) if _NAME.fullmatch(name)
        ]
        last = max(numbers, default=0)
        # The lock is ours, so a partial folder is left over from a writer that crashed.
        for leftover in folder.glob("*.partial"):
            shutil.rmtree(leftover)
        path = folder / f"v{last + 1:08d}.partial"
        try:
            path.mkdir()
            yield path
        except OSError as error:
            free = shutil.disk_usage(folder).free
            raise StoreError(
                f"'{path}' cannot be written: {error.strerror or error} ({free / 2**20:,.0f} MiB are free there); the "
                "version before it stays the current one. Free some space and write again"
            ) from error
        finally:
            shutil.rmtree(path, ignore_errors=True)


def publish_version(
    path: Path, content: dict[str, Any], digests: dict[str, str]
) -> Path:
    """Publishes the files in ``path`` as the current version and returns its folder.

    Args:
        path: folder from :func:`new_version`.
        content: values of the manifest, without files and format.
        digests: SHA-256 by file name, if already computed; the other files are read.
    """
    files = {}
    for name, file in files_below(path).items():
        if name in digests:
            files[name] = {"bytes": file.stat().st_size, "sha256": digests[name]}
        else:
            files[name] = measure_file(file)
        sync_to_disk(file)
    # The order survives a crash at any point: first the files, then the manifest, then
    # the folder's final name, and last the pointer, so that it never names an
    # incomplete version.
    write_whole(
        path / MANIFEST,
        sealed_json({"format": _FORMAT, **content, "files": files}, "digest"),
    )
    final = path.with_suffix("")
    path.rename(final)
    write_whole(path.parent / _POINTER, f"{final.name}\n".encode())
    return final


def prune_store(folder: Path | str, keep: int = 2) -> list[str]:
    """Removes all but the newest ``keep`` versions and the current one; returns the removed names.

    Readers keep a version that they have open.

    Raises:
        ValueError: ``keep`` below 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: must be 1 or more, the current version stays")
    folder = Path(folder)
    with _lock(folder):
        old_versions = [
            name for name in versions(folder)[:-keep] if name != current(folder)
        ]
        for name in old_versions:
            # Without a manifest the version no longer counts, even if the removal is
            # interrupted.
            (folder / name / MANIFEST).unlink()
            shutil.rmtree(folder / name)
    return old_versions


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    lock = lock_folder(
        str(folder),
        ".lock",
        StoreError,
        shown=f"'{folder}'",
        busy="wait for it, or write elsewhere",
        otherwise="write elsewhere",
    )
    with lock:
        yield
