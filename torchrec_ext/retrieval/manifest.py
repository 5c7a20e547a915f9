"""Manifest of a bundle: its files with their digests, and a certificate of its checks.

``content`` contains no ranks, plans or times, so the same weights get the same ``digest`` wherever they are exported.
``certificate`` holds the measurements, with versions and time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_ext.sealed import (
    difference,
    files_below,
    json_digest,
    measure_file,
    read_plain,
)


class BundleError(ValueError):
    """A bundle cannot be written or must not be used: the message names the file, the problem and the remedy."""


FORMAT = 6
BUNDLE_MANIFEST = "manifest.json"
# It may list millions of rows that training never read.
_MOST_BYTES = 64 * 2**20
_LONGEST_POINTER = 4096
_OF_A_RUN = "bundle"  # folder of the bundle in a run's folder
ANEW = "export the bundle again, or copy the whole folder anew"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A bundle's manifest: its content under a digest, and its certificate.

    Args:
        content: ``files`` with the size and SHA-256 of each, and what the files are: graphs, columns, tables, items.
        certificate: ``parity`` with the trained model, ``versions``, ``created``, and the exporter's ``details``.
    """

    content: Mapping[str, Any]
    certificate: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of the content: the bundle's name in answers."""
        return json_digest(self.content)

    @property
    def parity(self) -> Mapping[str, Any]:
        """Number of audited pairs, greatest difference of a logit from the trained model's, and allowed difference."""
        parity: Mapping[str, Any] = self.certificate["parity"]
        return parity

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON values of the file."""
        return {
            "format": FORMAT,
            "digest": self.digest,
            "content": dict(self.content),
            "certificate": dict(self.certificate),
        }

    @classmethod
    def open(cls, folder: Path) -> Manifest:
        """Reads the manifest of a bundle's folder.

        Raises:
            BundleError: the manifest is missing, of another format, or changed.
        """
        path = folder / BUNDLE_MANIFEST
        values = _read_json(path)
        # Checkpoints have a manifest.json too.
        if "certificate" not in values:
            raise BundleError(
                f"{path}: is of neither a bundle nor a store; give the folder that an export or an embedding made"
            )
        if values.get("format") != FORMAT:
            raise BundleError(
                f"{path}: format {values.get('format')!r}, this package reads {FORMAT}; export the bundle again, or "
                "install the version of torchrec_ext that wrote it"
            )
        manifest = cls(
            content=values.get("content", {}), certificate=values["certificate"]
        )
        if manifest.digest != values.get("digest"):
            raise BundleError(
                f"{path}: its content does not have its digest: it was changed or damaged; {ANEW}"
            )
        return manifest


def write_manifest(
    folder: Path, content: Mapping[str, Any], certificate: Mapping[str, Any]
) -> Manifest:
    """Writes a bundle's manifest; measures the folder's files, unless ``content`` lists them."""
    if "files" not in content:
        content = {"files": file_digests(folder), **content}
    manifest = Manifest(content=content, certificate=certificate)
    text = json.dumps(manifest.as_json(), indent=1, allow_nan=False)
    (folder / BUNDLE_MANIFEST).write_text(text + "\n")
    return manifest


def _read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a plain file.

    Raises:
        BundleError: the file is missing, too large, or holds something else.
    """
    try:
        values = json.loads(read_plain(path, _MOST_BYTES))
    except OSError as error:
        raise BundleError(
            f"{path}: cannot be read ({error.strerror}); is '{path.parent}' a bundle or a store?"
        ) from None
    except (ValueError, RecursionError) as error:
        raise BundleError(
            f"{path}: is not a JSON file ({str(error)[:60]}); {ANEW}"
        ) from None
    if not isinstance(values, dict):
        raise BundleError(f"{path}: holds no JSON object; {ANEW}")
    return values


def file_digests(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns size and SHA-256 of every file except the manifest, by path."""
    return {name: measure_file(path) for name, path in _files(folder).items()}


def check_files(
    folder: Path, listed: Mapping[str, Mapping[str, Any]], *, digests: bool
) -> None:
    """Refuses a folder if its files differ from the manifest's list.

    Args:
        folder: folder of the bundle.
        listed: the manifest's entry of each file, by path.
        digests: whether to read every file and compare its SHA-256 too.

    Raises:
        BundleError: naming the file.
    """
    paths = _files(folder)
    for name in sorted(listed.keys() ^ paths.keys()):
        why = "is missing" if name in listed else "is no part of this bundle"
        raise BundleError(f"{folder / name}: {why}, by the manifest; {ANEW}")
    # The size first, because reading a file takes a second for each GB.
    for name, path in paths.items():
        size = {**listed[name], "bytes": path.stat().st_size}
        what: str | None = difference(size, listed[name])
        if what is None and digests:
            what = difference(measure_file(path), listed[name])
        if what is not None:
            raise BundleError(f"{path}: {what}; {ANEW}")


def _files(folder: Path) -> dict[str, Path]:
    """Returns every file of a bundle except the manifest, by relative path."""
    try:
        files = files_below(folder)
    except OSError as error:
        raise BundleError(
            f"{error.filename}: is a link or not a plain file, and a bundle holds neither; {ANEW}"
        ) from None
    files.pop(BUNDLE_MANIFEST, None)
    return files


def bundle_folder(pointer: Path) -> Path:
    """Returns the bundle's folder for a folder, a link to one, a text file with its path, or a run's folder.

    Raises:
        ValueError: ``pointer`` leads to no bundle.
    """
    target = pointer
    if pointer.is_file():
        with pointer.open("rb") as file:
            text = file.read(_LONGEST_POINTER).decode(errors="replace").strip()
        # A file that is being written may be empty for a moment, and names no folder.
        if text:
            target = pointer.parent / text
    for folder in (target, target / _OF_A_RUN):
        # Unlike Path.is_file(), returns False for an invalid name.
        if os.path.isfile(folder / BUNDLE_MANIFEST):
            # So that a link that moves later does not change the open bundle's folder.
            return folder.resolve()
    raise ValueError(
        f"bundle {str(pointer)!r}: there is none in {str(target)[:100]!r}; give a bundle's or a run's folder, a link "
        "to it, or a text file with its path"
    )


def fingerprint(pointer: Path) -> tuple[object, ...]:
    """Tells one bundle or store behind a pointer from another by its manifest's inode, size and time; never raises."""
    try:
        folder = bundle_folder(pointer)
        # Whoever changes another file in place changes nothing that is served, because
        # a load would refuse it.
        status = (folder / BUNDLE_MANIFEST).stat()
    except (OSError, ValueError) as error:
        return (type(error).__name__,)
    return str(folder), status.st_ino, status.st_size, status.st_mtime_ns
