"""Data sets by name: found on disk, downloaded from their publisher with a checksum, or generated."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from torchrec_ext.data import synthetic
from torchrec_ext.data.download import Download, fetch, sha256, verify
from torchrec_ext.data.interactions import InteractionData
from torchrec_ext.data.movielens import LICENCE, Tables, from_parquet, from_zip, movielens_100k
from torchrec_ext.schema import DataError

NAMES = ("ml-100k", "planted", "checkerboard")
FOLDER_VARIABLE = "TORCHREC_EXT_DATA"


class DatasetUnavailable(DataError):  # noqa: N818  a state of affairs, like FileNotFound
    """A set is neither on disk nor to be had from its publisher; the message says which file to put where."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which set to load.

    Args:
        name: ``ml-100k``, or generated data: ``planted``, ``checkerboard``.
        history_length: how many earlier items of the user a row holds at most.
        folder: where real sets lie, each in a folder of its own name; ``$TORCHREC_EXT_DATA`` where not given.
        offline: never download.
        users: how many users to generate; the generator's own default where not given. For generated sets only.
        items: how many items to generate.
        seed: of the generator.
    """

    name: str = "ml-100k"
    history_length: int = 50
    folder: str | None = None
    offline: bool = False
    users: int | None = None
    items: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"data.name={self.name!r}: there is no such set; choose one of {', '.join(NAMES)}")
        if self.history_length < 0:
            raise ValueError(f"data.history_length={self.history_length}: must be 0 or more")
        for field in ("users", "items"):
            value = getattr(self, field)
            if value is not None and self.name == "ml-100k":
                raise ValueError(f"data.{field}={value}: ml-100k has its own; leave it out, or choose data.name=planted")
            if value is not None and value < 1:
                raise ValueError(f"data.{field}={value}: must be 1 or more")


# The size and the sum are those of TensorFlow Datasets' checksum file.
ML_100K = Download(
    url="https://files.grouplens.org/datasets/movielens/ml-100k.zip",
    size=4_924_029,
    sha256="50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
)
# RecBole's conversion of the same ratings.
ML_100K_PARQUET = {
    "inter.parquet": "51d977cd785c2175934bb577bd896e34c0143e7fd111f9c11eea3a0efdea4a22",
    "users.parquet": "f03e172aa69658a0e13d1b4464460f7ab1d7a8f29a59e3ac2354b5bd4f42eada",
    "items.parquet": "962a090e6fa43f5da7dfde9cfe1ba1d697dfc5ad02e17f5dfea74da91732665b",
}


def load(
    name: str = "ml-100k",
    *,
    history_length: int = 50,
    folder: str | None = None,
    offline: bool = False,
    users: int | None = None,
    items: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> InteractionData:
    """Loads a set by name: see :class:`DataConfig` for the arguments and :func:`load_config` for what it does."""
    config = DataConfig(
        name=name, history_length=history_length, folder=folder, offline=offline, users=users, items=items, seed=seed
    )
    return load_config(config, progress=progress)


def load_config(config: DataConfig, *, progress: bool = True) -> InteractionData:
    """Loads the set that ``config`` names.

    A real set is looked for in ``<folder>/<name>/`` (parquet files, or the publisher's zip), then in the user's cache, then it is
    downloaded there. Several processes may call this at once: one of them downloads.

    Args:
        config: which set.
        progress: show the download and the licence on stderr.

    Raises:
        DatasetUnavailable: the set is not on this machine and cannot be downloaded.
        DataError: a file is damaged.
    """
    if config.name == "ml-100k":
        return movielens_100k(_ml_100k_tables(config, progress), config.history_length)
    options = {key: value for key, value in (("users", config.users), ("items", config.items)) if value is not None}
    generate = synthetic.planted if config.name == "planted" else synthetic.checkerboard
    return generate(history_length=config.history_length, seed=config.seed, **options)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/torchrec_ext``, or ``~/.cache/torchrec_ext``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrec_ext"


def _ml_100k_tables(config: DataConfig, progress: bool) -> Tables:
    root = config.folder or os.environ.get(FOLDER_VARIABLE)
    folder = Path(root) / config.name if root else None
    if folder and (folder / "inter.parquet").exists():
        _warn_if_other(folder)
        return from_parquet(folder)
    for place in filter(None, (folder, cache_folder() / config.name)):
        if (place / "ml-100k.zip").exists():
            verify(place / "ml-100k.zip", ML_100K)
            return from_zip(place / "ml-100k.zip")
    target = cache_folder() / config.name / "ml-100k.zip"
    reason = "data.offline is set" if config.offline else fetch(ML_100K, target, licence=LICENCE, progress=progress)
    if reason:
        raise DatasetUnavailable(_where_to_put_it(config, folder, target, reason))
    return from_zip(target)


def _where_to_put_it(config: DataConfig, folder: Path | None, target: Path, reason: str) -> str:
    looked = f"{folder} and {target.parent}" if folder else f"{target.parent} ({FOLDER_VARIABLE} is not set)"
    return (
        f"set '{config.name}' is not on this machine and was not downloaded: {reason}. Looked in {looked}. Either put "
        f"{ML_100K.url} ({ML_100K.size:,} bytes) at {target}, or set {FOLDER_VARIABLE} to a folder that has it as "
        f"{config.name}/ml-100k.zip or as {config.name}/{{{','.join(ML_100K_PARQUET)}}}, or use generated data: data.name=planted"
    )


def _warn_if_other(folder: Path) -> None:
    """Other bytes may be the same table written again, or a part of it: that is the owner's right, but figures may differ."""
    for name, known in ML_100K_PARQUET.items():
        path = folder / name
        if path.exists() and (found := sha256(path)) != known:
            warnings.warn(
                f"{path}: sha256 is {found}, the known file has {known}; figures may differ from published ones", stacklevel=4
            )
