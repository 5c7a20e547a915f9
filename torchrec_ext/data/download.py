"""A publisher's file onto this machine: with a progress bar, a checksum, and nothing half-written left behind."""

from __future__ import annotations

import fcntl
import hashlib
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from torchrec_ext.schema import DataError


@dataclass(frozen=True, kw_only=True)
class Download:
    """A publisher's file: where it is, how many bytes it has, and its sha256."""

    url: str
    size: int
    sha256: str


def fetch(source: Download, target: Path, *, licence: str, progress: bool) -> str | None:
    """Downloads and verifies a file; what is at ``target`` afterwards is whole.

    Args:
        source: what to download.
        target: where it is put, by an atomic rename.
        licence: a line to show before.
        progress: show it, and a bar.

    Returns:
        None, or why the publisher could not be reached.

    Raises:
        DataError: the file that arrived is not the one that was published.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock"):
            if target.exists():
                return None
            if progress:
                print(licence, file=sys.stderr)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                part = Path(folder) / target.name
                _copy(source, part, progress)
                verify(part, source)
                part.replace(target)
    except OSError as error:  # urllib's errors are OSErrors too
        return f"{source.url}: {getattr(error, 'reason', None) or error}"
    return None


def verify(path: Path, source: Download) -> None:
    """Raises DataError where ``path`` is not the published file."""
    found = sha256(path)
    if found != source.sha256:
        raise DataError(
            f"{path}: {path.stat().st_size:,} bytes with sha256 {found}, the publisher's file has {source.size:,} bytes with "
            f"sha256 {source.sha256}; delete it and get it again from {source.url}"
        )


def _copy(source: Download, part: Path, progress: bool) -> None:
    with (
        urllib.request.urlopen(source.url, timeout=20) as stream,
        part.open("wb") as out,
        tqdm(total=source.size, unit="B", unit_scale=True, desc=part.name, disable=not progress) as bar,
    ):
        while block := stream.read(1 << 16):
            out.write(block)
            bar.update(len(block))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of this host at a time; where the file system has no locks two may download, and either's file is whole."""
    with path.open("w") as stream:
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def sha256(path: Path) -> str:
    """The file's sha256 as hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
