"""find_ml_100k(): MovieLens 100K on this machine, or downloaded from its publisher.

fetch(): downloads a publisher's file with a progress bar and a checksum, and leaves nothing half-written behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from torchrec_ext.data.movielens import LICENCE, Tables, from_parquet, from_zip
from torchrec_ext.schema import DataError


@dataclass(frozen=True, kw_only=True)
class Download:
    """A publisher's file: its address, its size in bytes, and its sha256."""

    url: str
    size: int
    sha256: str


def fetch(
    source: Download, target: Path, *, licence: str, progress: bool
) -> str | None:
    """Downloads and verifies a file; it is whole once it is at ``target``.

    Args:
        source: file to download.
        target: path of the file on this machine; an atomic rename puts it there.
        licence: line to show before the download.
        progress: show the licence and a progress bar.

    Returns:
        None, or why the publisher could not be reached.

    Raises:
        DataError: the file that arrived is not the one that was published.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock"):
            # Another process may have downloaded it while this one waited for the lock.
            if target.exists():
                return None
            # On the same file system as the target, so that the file can be renamed.
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                unfinished = Path(folder) / target.name
                _copy(source, unfinished, licence, progress)
                verify(unfinished, source)
                unfinished.replace(target)
    # urllib's errors are OSErrors, too. Some wrap their cause, an OSError of the socket
    # or a text.
    except OSError as error:
        cause = getattr(error, "reason", None) or error
        return getattr(cause, "strerror", None) or str(cause)
    return None


def verify(path: Path, source: Download) -> None:
    """Raises DataError unless ``path`` is the published file."""
    digest = sha256(path)
    if digest != source.sha256:
        raise DataError(
            f"{path}: {path.stat().st_size:,} bytes with sha256 {digest}, the publisher's file has {source.size:,} "
            f"bytes with sha256 {source.sha256}; delete it and get it again from {source.url}"
        )


def _copy(source: Download, target: Path, licence: str, progress: bool) -> None:
    with (
        urllib.request.urlopen(source.url, timeout=20) as stream,
        target.open("wb") as out,
        tqdm(
            total=source.size,
            unit="B",
            unit_scale=True,
            desc=target.name,
            disable=not progress,
        ) as bar,
    ):
        if progress:
            # Only now: without a connection there is nothing to license.
            bar.write(licence, file=sys.stderr)
        while block := stream.read(1 << 16):
            out.write(block)
            bar.update(len(block))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process of this host in at a time; without file locks two may download, and either's file is whole."""
    with path.open("w") as stream:
        # Some network file systems have no locks. See the docstring for what may happen
        # then.
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def sha256(path: Path) -> str:
    """Returns the file's sha256 as hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


FOLDER_VARIABLE = "TORCHREC_EXT_DATA"


class DatasetUnavailable(DataError):  # noqa: N818  a state of affairs, like FileNotFound
    """A set is neither on disk nor downloadable; the message names the missing file and its place."""


# The size and the sum are those of TensorFlow Datasets' checksum file.
ML_100K = Download(
    url="https://files.grouplens.org/datasets/movielens/ml-100k.zip",
    size=4_924_029,
    sha256="50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
)


def data_folder(name: str, folder: str | None) -> Path | None:
    """Returns the path of the set in ``folder``, else in ``$TORCHREC_EXT_DATA``; None if neither is given."""
    root = folder or os.environ.get(FOLDER_VARIABLE)
    return Path(root) / name if root else None


def cache_folder() -> Path:
    """Returns ``$XDG_CACHE_HOME/torchrec_ext``, or ``~/.cache/torchrec_ext``."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "torchrec_ext"
    )


def find_ml_100k(folder: Path | None, *, progress: bool = True) -> Path:
    """Finds MovieLens 100K, a folder with its parquet files or the publisher's zip; downloads it if it is nowhere.

    Args:
        folder: folder that is looked into first.
        progress: show the download and the licence on stderr.

    Raises:
        DatasetUnavailable: the set is not on this machine and cannot be downloaded.
        DataError: the zip is damaged.
    """
    if folder and (folder / "inter.parquet").exists():
        return folder
    target = cache_folder() / "ml-100k" / "ml-100k.zip"
    places = [folder / target.name, target] if folder else [target]
    for path in places:
        if path.exists():
            verify(path, ML_100K)
            return path
    reason = fetch(ML_100K, target, licence=LICENCE, progress=progress)
    if reason:
        raise DatasetUnavailable(
            f"set 'ml-100k' was not downloaded ({reason}): put {ML_100K.url} into {folder or target.parent}"
        )
    return target


def ml_100k_tables(path: Path) -> Tables:
    """Reads (ratings, users, items) from a path returned by :func:`find_ml_100k`."""
    return from_zip(path) if path.suffix == ".zip" else from_parquet(path)
