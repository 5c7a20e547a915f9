"""Manifest of a bundle: its files with their digests, and a certificate of its checks.

``content`` contains no ranks, plans or times, so the same weights get the same ``digest`` wherever they are exported.
``certificate`` holds the measurements, with versions and time, under a seal of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_ext.sealed import files_below, json_digest, measure_file, read_plain


class BundleError(ValueError):
    """A bundle cannot be written or must not be used: the message names the file, the problem and the remedy."""


FORMAT = 5
BUNDLE_MANIFEST = "manifest.json"
# It may list millions of rows that training never read.
_MOST_BYTES = 64 * 2**20
_LONGEST_POINTER = 4096
_OF_A_RUN = "bundle"  # folder of the bundle in a run's folder
ANEW = "export the bundle again, or copy the whole folder anew"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A bundle's manifest: its content under a digest, and its certificate under a seal.

    Args:
        content: ``files`` with the size and SHA-256 of each, and what the files are: graphs, columns, tables, items.
        certificate: ``parity`` with the trained model, ``versions``, ``created``, and the exporter's ``details``.
    """

    content: Mapping[str, Any]
    certificate: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of the content: the bundle's name in answers."""
        return json_digest(self.content, compact=True)

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
            "seal": json_digest(self.certificate, compact=True),
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
        if not {"seal", "certificate"} & values.keys():
            raise BundleError(
                f"{path}: is of neither a bundle nor a store; give the folder that an export or an embedding made"
            )
        if values.get("format") != FORMAT:
            raise BundleError(
                f"{path}: format {values.get('format')!r}, this package reads {FORMAT}; export the bundle again, or "
                "install the version of torchrec_ext that wrote it"
            )
        for key, seal in (("content", "digest"), ("certificate", "seal")):
            part = values.get(key)
            if not isinstance(part, dict) or json_digest(
                part, compact=True
            ) != values.get(seal):
                raise BundleError(
                    f"{path}: its {key} does not have its {seal}: it was changed or damaged; {ANEW}"
                )
        return cls(content=values["content"], certificate=values["certificate"])


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
    for name in sorted(listed.keys() | paths.keys()):
        path = folder / name
        if name not in paths:
            raise BundleError(
                f"{path}: the manifest lists it, and it is missing; {ANEW}"
            )
        if name not in listed:
            raise BundleError(
                f"{path}: is not in the manifest, so it is not part of this bundle; remove it, or {ANEW}"
            )
        size = path.stat().st_size
        if size != listed[name]["bytes"]:
            raise BundleError(
                f"{path}: {size:,} bytes, the manifest lists {listed[name]['bytes']:,}: it is cut or changed; {ANEW}"
            )
    # Last, because reading every file takes a second for each GB, and the checks above
    # no time.
    for name, path in paths.items():
        if digests and measure_file(path)["sha256"] != listed[name]["sha256"]:
            raise BundleError(
                f"{path}: does not have the SHA-256 in the manifest: it was changed or damaged; {ANEW}"
            )


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
        ValueError: ``pointer`` leads to no folder.
    """
    target = pointer
    if pointer.is_file():
        with pointer.open("rb") as file:
            text = file.read(_LONGEST_POINTER).decode(errors="replace").strip()
        if text:
            target = pointer.parent / text
    # Unlike Path.is_dir(), returns False for an invalid name.
    if not os.path.isdir(target):
        what = f"it names {str(target)[:100]!r}, which is not a folder"
        if target == pointer:
            what = "there is no such file or folder"
        raise ValueError(
            f"bundle {str(pointer)!r}: {what}; give a bundle's folder, a link to one, or a text file with its path"
        )
    of_a_run = target / _OF_A_RUN
    # Resolved, so that a link that moves later does not change the open bundle's
    # folder.
    if (
        not (target / BUNDLE_MANIFEST).exists()
        and (of_a_run / BUNDLE_MANIFEST).is_file()
    ):
        return of_a_run.resolve()
    return target.resolve()


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
