"""load_dataset(): sets of interactions by name, found on disk, downloaded from their publisher, or generated.

fetch(): downloads a publisher's file with a progress bar and a checksum, and leaves nothing half-written behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import tempfile
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.datasets import synthetic
from torchrec_ext.data.datasets.config import GENERATED, NAMES, PLANTED, generated_sizes
from torchrec_ext.data.datasets.config import DataConfig as DataConfig
from torchrec_ext.data.datasets.folder import from_folder, is_folder_of_interactions
from torchrec_ext.data.datasets.interactions import InteractionData
from torchrec_ext.data.datasets.movielens import (
    LICENCE,
    LICENCE_1M,
    Protocol,
    Tables,
    from_parquet,
    from_zip,
    movielens_100k,
    recbole,
    tfrs,
)
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
# n_interactions of items.parquet counts the test items too.
NCF_COLUMNS = {"users": ("gender", "age", "occupation"), "items": ("year", "genres")}
# RecBole's conversion of the same ratings.
ML_100K_PARQUET = {
    "inter.parquet": "51d977cd785c2175934bb577bd896e34c0143e7fd111f9c11eea3a0efdea4a22",
    "users.parquet": "f03e172aa69658a0e13d1b4464460f7ab1d7a8f29a59e3ac2354b5bd4f42eada",
    "items.parquet": "962a090e6fa43f5da7dfde9cfe1ba1d697dfc5ad02e17f5dfea74da91732665b",
}


def load_dataset(
    name: str = "ml-100k", *, progress: bool = True, **settings: Any
) -> InteractionData:
    """Loads a set by name; ``settings`` are those of :class:`DataConfig`, and :func:`load_config` has the steps."""
    return load_config(DataConfig(name=name, **settings), progress=progress)


def load_config(config: DataConfig, *, progress: bool = True) -> InteractionData:
    """Loads the set named by ``config``.

    A real set is looked for in ``<folder>/<name>/`` (parquet files, or the publisher's zip), then in the user's cache,
    then it is downloaded there. Several processes may call this at once: one of them downloads.

    Args:
        config: settings that name the set.
        progress: show the download and the licence on stderr.

    Raises:
        DatasetUnavailable: the set is not on this machine and cannot be downloaded.
        DataError: a file is damaged.
    """
    if config.name == "ml-100k":
        try:
            path = find_ml_100k(
                data_folder(config.name, config.folder),
                offline=config.offline,
                progress=progress,
            )
        except DatasetUnavailable as error:
            # Added here, because preprocessing looks for the same file and has no
            # data.name.
            raise DatasetUnavailable(f"{error}, or set data.name=planted") from None
        if path.is_dir():
            _warn_if_other(path)
        return _ml_100k(config, ml_100k_tables(path))
    if config.name not in GENERATED:
        return _from_folder(config)
    generate = synthetic.planted if config.name == PLANTED else synthetic.checkerboard
    return generate(
        history_length=config.history_length,
        seed=config.seed,
        **generated_sizes(config),
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


def _ml_100k(config: DataConfig, tables: Tables) -> InteractionData:
    if config.split == "last_item":
        return movielens_100k(tables, config.history_length)
    if config.split == "tfrs":
        protocol = tfrs(tables, config.history_length, validation=config.validation)
    else:
        protocol = _recbole(config, tables[0])
    tables = (protocol.ratings, *tables[1:])
    return movielens_100k(
        tables,
        config.history_length,
        split=protocol.split,
        evaluation=protocol.evaluation,
    )


def _recbole(config: DataConfig, ratings: Chunk) -> Protocol:
    folder = data_folder(config.name, config.folder)
    if folder is None or not (folder / "recbole_split.parquet").exists():
        place = f"neither data.folder nor {FOLDER_VARIABLE} is given"
        if folder is not None:
            place = f"{folder} has none"
        raise DatasetUnavailable(
            "data.split=recbole needs recbole_split.parquet (user_id, item_id, split: train, valid or test), and "
            f"{place}; write what RecBole 1.2.1 makes of ml-100k by its defaults there"
        )
    return recbole(ratings, folder / "recbole_split.parquet", config.history_length)


def _from_folder(config: DataConfig) -> InteractionData:
    folder = data_folder(config.name, config.folder)
    if folder is None or not is_folder_of_interactions(folder):
        recbole_files = [] if folder is None else sorted(folder.glob("*.inter"))
        if recbole_files:
            raise DataError(
                f"{recbole_files[0]}: is RecBole's; write it as parquet, as in docs/from/recbole.md"
            )
        place = folder or "data.folder, which is not set"
        if config.name not in NAMES:
            raise DataError(
                f"data.name={config.name!r}: no such set in {place}; choose {', '.join(NAMES)}, or a folder with "
                "inter.parquet or train.parquet (docs/recipes.md)"
            )
        raise DatasetUnavailable(
            f"set '{config.name}' is not on this machine (looked in {place}); put ml-1m.train.rating, "
            "ml-1m.test.rating and ml-1m.test.negative of the NCF paper there, or set data.name=planted"
        )
    details: dict[str, Any] = {}
    if config.name == "ml-1m-ncf":
        details = {"columns": NCF_COLUMNS, "licence": LICENCE_1M}
    return from_folder(
        folder,
        name=config.name,
        history_length=config.history_length,
        validation=config.validation,
        seed=config.seed,
        context=config.context,
        **details,
    )


def find_ml_100k(
    folder: Path | None, *, offline: bool = False, progress: bool = True
) -> Path:
    """Finds MovieLens 100K, a folder with its parquet files or the publisher's zip; downloads it if it is nowhere.

    Args:
        folder: folder that is looked into first.
        offline: never download.
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
    reason: str | None = "data.offline is set"
    if not offline:
        reason = fetch(ML_100K, target, licence=LICENCE, progress=progress)
    if reason:
        raise DatasetUnavailable(
            f"set 'ml-100k' was not downloaded ({reason}): put {ML_100K.url} into {folder or target.parent}"
        )
    return target


def ml_100k_tables(path: Path) -> Tables:
    """Reads (ratings, users, items) from a path returned by :func:`find_ml_100k`."""
    return from_zip(path) if path.suffix == ".zip" else from_parquet(path)


def _warn_if_other(folder: Path) -> None:
    """Warns of files with other bytes: the same table written anew, or a part of it, which may change figures."""
    for name, expected in ML_100K_PARQUET.items():
        path = folder / name
        if path.exists() and (digest := sha256(path)) != expected:
            warnings.warn(
                f"{path}: sha256 is {digest}, the known file has {expected}; figures may differ from published ones",
                stacklevel=3,
            )
