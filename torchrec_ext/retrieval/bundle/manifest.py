"""Manifest of a bundle: its files with their digests, and a certificate of its checks.

``content`` contains no ranks, plans or times, so the same weights get the same ``digest`` wherever they are exported.
``certificate`` holds the measurements, with versions and time, under a seal of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_ext.sealed import files_below, json_digest, measure_file, read_plain


class BundleError(ValueError):
    """A bundle cannot be written or must not be used: the message names the file, the problem and the remedy."""


_FORMAT = 1
BUNDLE_MANIFEST = "manifest.json"
_MOST_BYTES = 64 * 2**20  # limit of an architecture file; it may list millions of rows
# limit of a manifest: fifty thousand files; in memory it takes thirty times as much
_MOST_OF_MANIFEST = 8 * 2**20
_ANEW = "export the bundle again, or copy the whole folder anew"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A bundle's manifest: its content under a digest, and its certificate under a seal.

    Args:
        content: ``files`` with the size and SHA-256 of each, ``towers`` with the digest of each, ``query`` and
            ``candidate`` by name, ``metric``, ``store``, ``index``, ``coverage``, ``audit``.
        certificate: ``parity`` with the training model, ``calibrated`` if a logit is trained as log-odds,
            ``versions``, ``created``, and the exporter's details.
    """

    content: Mapping[str, Any]
    certificate: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of the content: the bundle's name in answers."""
        return json_digest(self.content, compact=True)

    @property
    def metric(self) -> str:
        """``dot``, ``cosine``, or ``top_nn`` for any other interaction."""
        return str(self.content["metric"])

    @property
    def parity(self) -> Mapping[str, Any]:
        """Number of audited pairs, greatest difference of a logit from the trained model's, and allowed difference."""
        parity: Mapping[str, Any] = self.certificate["parity"]
        return parity

    @property
    def recall(self) -> float:
        """Recall of the index against exact search with the loss's own metric."""
        return float(self.content["index"]["recall"])

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON values of the file."""
        return {
            "format": _FORMAT,
            "digest": self.digest,
            "content": dict(self.content),
            "seal": json_digest(self.certificate, compact=True),
            "certificate": dict(self.certificate),
        }

    def save(self, folder: Path) -> None:
        """Writes the manifest to a bundle's folder."""
        (folder / BUNDLE_MANIFEST).write_text(
            json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n"
        )

    @classmethod
    def open(cls, folder: Path) -> Manifest:
        """Reads the manifest of a bundle's folder.

        Raises:
            BundleError: the manifest is missing, of another format, or changed.
        """
        path = folder / BUNDLE_MANIFEST
        values = read_json(
            path,
            most=_MOST_OF_MANIFEST,
            hint=f"; is '{folder}' a bundle? One is made of a run by: torchx run rec.serve.export --run RUN",
        )
        # Checkpoints and stores have a manifest.json too.
        if not {"seal", "certificate"} & values.keys():
            raise BundleError(
                f"{path}: belongs to something other than a bundle, such as a checkpoint or a store; give the folder "
                "that an export made"
            )
        if values.get("format") != _FORMAT:
            raise BundleError(
                f"{path}: format {values.get('format')!r}, this package reads {_FORMAT}; export the bundle again, or "
                "install the version of torchrec_ext that wrote it"
            )
        for key, seal in (("content", "digest"), ("certificate", "seal")):
            if not isinstance(values.get(key), dict) or json_digest(
                values[key], compact=True
            ) != values.get(seal):
                raise BundleError(
                    f"{path}: its {key} does not have its {seal}: it was changed or damaged; {_ANEW}"
                )
        return cls(content=values["content"], certificate=values["certificate"])


def read_json(path: Path, hint: str = "", *, most: int = _MOST_BYTES) -> dict[str, Any]:
    """Reads the JSON object in a plain file of at most ``most`` bytes.

    Raises:
        BundleError: the file is missing, too large, or holds something else.
    """
    try:
        values = json.loads(read_plain(path, most))
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror}){hint}") from None
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: is not a JSON file ({error}); {_ANEW}") from None
    if not isinstance(values, dict):
        raise BundleError(f"{path}: holds no JSON object; {_ANEW}")
    return values


def file_digests(
    folder: Path, *, entries: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """Returns size and SHA-256 of every file except the manifest, by path; reuses ``entries``."""
    files = {}
    for name, path in _files(folder).items():
        files[name] = (entries or {}).get(name) or measure_file(path)
    return files


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
    for name in sorted(listed):
        if name not in paths:
            # A renamed file is missing under its old name and unlisted under its new
            # one: name both.
            unlisted = min(set(paths) - set(listed), default=None)
            hint = ""
            if unlisted is not None:
                hint = f" ('{unlisted}' is there, and is not in the manifest: was it renamed?)"
            raise BundleError(
                f"{folder / name}: the manifest lists it, and it is missing{hint}; {_ANEW}"
            )
    for name, path in paths.items():
        if name not in listed:
            raise BundleError(
                f"{path}: is not in the manifest, so it is not part of this bundle; remove it, or {_ANEW}"
            )
        size = path.stat().st_size
        if size != listed[name]["bytes"]:
            raise BundleError(
                f"{path}: {size:,} bytes, the manifest lists {listed[name]['bytes']:,}: it is cut or changed; {_ANEW}"
            )
    # Last, because reading every file takes a second for each GB, and the checks above
    # no time.
    for name, path in paths.items():
        if digests and measure_file(path)["sha256"] != listed[name]["sha256"]:
            raise BundleError(
                f"{path}: does not have the SHA-256 in the manifest: it was changed or damaged; {_ANEW}"
            )


def _files(folder: Path) -> dict[str, Path]:
    """Returns every file of a bundle except the manifest, by relative path."""
    try:
        files = files_below(folder)
    except OSError as error:
        raise BundleError(
            f"{error.filename}: is a link or not a plain file, and a bundle holds neither; {_ANEW}"
        ) from None
    files.pop(BUNDLE_MANIFEST, None)
    return files
