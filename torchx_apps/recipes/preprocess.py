"""The built-in preprocessing recipes: functions that return a PreprocessJob, each a line in PREPROCESS_RECIPES."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from torchrec_ext.data.datasets.catalog import DatasetUnavailable, data_folder, find_ml_100k, ml_100k_tables
from torchrec_ext.data.files.find import find_files
from torchrec_ext.data.preprocess import (
    Categorify,
    FillMissing,
    HashBucket,
    History,
    Lists,
    Normalize,
    Preprocessor,
    Step,
    TimeFeatures,
)
from torchrec_ext.data.preprocess.engines import ROW, Engine
from torchrec_ext.data.preprocess.files import Source, scan
from torchrec_ext.data.preprocess.numeric import quantiles_of
from torchrec_ext.schema import DataError


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a recipe's ``build`` returns.

    Args:
        preprocessor: the steps.
        splits: by name, files or tables; the first one is what is fitted on.
        events: the rows that histories are made of; each split's own rows where not given.
        label: a number column of the sources, for the picture of its mean by day.
        time: a timestamp, or seconds since 1970, in the sources, for the same picture.
    """

    preprocessor: Preprocessor
    splits: Mapping[str, Source]
    events: Source | None = None
    label: str | None = None
    time: str | None = None

    def __post_init__(self) -> None:
        if not self.splits:
            raise ValueError("splits: there is none; name at least one source, such as {'train': 'log/*.parquet'}")
        for name in self.splits:
            if name == "preprocessor" or not re.fullmatch(r"[\w-][\w.-]*", name):
                raise ValueError(
                    f"splits has the name {name!r}: must be letters, digits, - and _, and not 'preprocessor'"
                )


@dataclass(frozen=True, kw_only=True)
class PreprocessJob:
    """All that one preprocessing run needs.

    Args:
        name: of the recipe.
        build: makes steps and sources from ``config`` and an engine.
        config: a frozen dataclass that ``build`` reads, whose fields ``--set config.KEY=VALUE`` changes; None where it
            needs none.
        out: folder for the result; a new one in ``runs/`` where not given.
        engine: ``duckdb``, ``spark`` or a Spark master URL.
        threads: of DuckDB; all cores where not given.
        memory: that DuckDB may use before it goes to disk, such as 4GB; 80 % of the machine's where not given.
        overwrite: replace an earlier result in ``out``.
        pictures: draw them, with matplotlib.
    """

    name: str
    build: Callable[[Any, Engine], Prepared]
    config: Any = None
    out: str | None = None
    engine: str = "duckdb"
    threads: int | None = None
    memory: str | None = None
    overwrite: bool = False
    pictures: bool = True


@dataclass(frozen=True, kw_only=True)
class MovieLensConfig:
    """The recipe ``ml_100k``.

    Args:
        folder: with inter.parquet, users.parquet and items.parquet, or ml-100k.zip; where not given the set is looked
            for, and downloaded, as in training.
        history_length: the most earlier items of a row.
        test_share: the latest share of the ratings, kept for testing.
        min_count: rarer items and users are unknown.
        zone: whose clock the time features read.
    """

    folder: str | None = None
    history_length: int = 50
    test_share: float = 0.1
    min_count: int = 1
    zone: str = "UTC"

    def __post_init__(self) -> None:
        if not 0 < self.test_share < 1:
            raise ValueError(f"config.test_share={self.test_share}: must be between 0 and 1")


def ml_100k() -> PreprocessJob:
    """MovieLens 100K: ratings joined with users and items, split by time, histories, genres, time features."""
    return PreprocessJob(name="ml_100k", build=build_ml_100k, config=MovieLensConfig())


def build_ml_100k(config: MovieLensConfig, engine: Engine) -> Prepared:
    """Joins the three files; a rating of 4 or 5 is a 1."""
    path = _movielens(config)
    ratings, users, items = _movielens_tables(path, engine)
    users, items = (table.drop(ROW) if ROW in table.columns else table for table in (users, items))
    rows = ratings.join(users, "user_id").join(items, "item_id")
    rows = engine.stage(rows.mutate(label=(rows.rating >= 4).cast("float32"), genres=rows["class"]))
    times = rows.select(x=rows.timestamp.cast("float64"))
    (cut,) = quantiles_of("the split by time", times, [1 - config.test_share], str(path), engine)
    steps: list[Step] = [
        History(user="user_id", item="item_id", time="timestamp", length=config.history_length),
        Categorify(column="item_id", also=("history",), min_count=config.min_count),
        Categorify(column="user_id", min_count=config.min_count),
        Categorify(column="gender"),
        Categorify(column="occupation"),
        Categorify(column="release_year"),
        HashBucket(column="zip_code", buckets=100),
        Lists(column="genres", separator=" "),
        Categorify(column="genres"),
        FillMissing(column="age", statistic="median"),
        Normalize(column="age"),
        TimeFeatures(column="timestamp", zone=config.zone),
    ]
    return Prepared(
        preprocessor=Preprocessor(steps, keep=("label", "timestamp")),
        splits={"train": rows.filter(rows.timestamp <= int(cut)), "test": rows.filter(rows.timestamp > int(cut))},
        events=rows,
        label="label",
        time="timestamp",
    )


def _movielens(config: MovieLensConfig) -> Path:
    """A folder with parquet files, or the publisher's zip."""
    if config.folder:
        given = Path(config.folder)
        return (
            given / "ml-100k.zip"
            if (given / "ml-100k.zip").exists() and not (given / "inter.parquet").exists()
            else given
        )
    try:
        return find_ml_100k(data_folder("ml-100k", None))
    except DatasetUnavailable as error:
        raise DataError(f"recipe ml_100k: {error}, or name that folder: --set config.folder=DIR") from None


def _movielens_tables(path: Path, engine: Engine) -> list[Any]:
    """Ratings, users and items as tables of the engine."""
    if path.suffix != ".zip":
        return [engine.read(scan(path / f"{name}.parquet")) for name in ("inter", "users", "items")]
    chunks = ml_100k_tables(path)
    held = [pa.table({name: pa.array(column.values) for name, column in chunk.items()}) for chunk in chunks]
    return [engine.register(table.append_column(ROW, pa.array(range(len(table)), pa.int64()))) for table in held]


@dataclass(frozen=True, kw_only=True)
class ClicksConfig:
    """The recipe ``clicks``.

    Args:
        folder: of the log's parquet files; the last one is kept for testing where there are several.
        categorical: how many columns c0, c1, ...
        dense: how many columns d0, d1, ...
        min_count: rarer values are unknown.
        max_size: the most values of a column that get an id.
        history_length: the most recent elements of ``history`` that are kept.
        history_buckets: ids that these are hashed to.
    """

    folder: str | None = None
    categorical: int = 26
    dense: int = 13
    min_count: int = 2
    max_size: int = 1_000_000
    history_length: int = 20
    history_buckets: int = 100_000


def clicks() -> PreprocessJob:
    """A click log: c0 to c25 by frequency, d0 to d12 normalised, a hashed history, a label."""
    return PreprocessJob(name="clicks", build=build_clicks, config=ClicksConfig())


def build_clicks(config: ClicksConfig, engine: Engine) -> Prepared:
    """The files as they are."""
    if not config.folder:
        raise DataError(
            "recipe clicks needs a log: --set config.folder=DIR with parquet files of c0.., d0.., history, label"
        )
    files = [file.name for file in find_files(config.folder, (".parquet",))]
    ids: list[Step] = [
        Categorify(column=f"c{at}", min_count=config.min_count, max_size=config.max_size)
        for at in range(config.categorical)
    ]
    numbers: list[Step] = [
        step
        for at in range(config.dense)
        for step in (FillMissing(column=f"d{at}", statistic="mean"), Normalize(column=f"d{at}"))
    ]
    lists: list[Step] = [
        Lists(column="history", max_length=config.history_length),
        HashBucket(column="history", buckets=config.history_buckets),
    ]
    splits: dict[str, Source] = {"train": files[:-1], "test": files[-1:]} if len(files) > 1 else {"train": files}
    return Prepared(preprocessor=Preprocessor([*ids, *numbers, *lists], keep=("label",)), splits=splits, label="label")


# By the name that `--recipe` of rec.data.preprocess takes.
PREPROCESS_RECIPES: dict[str, Callable[[], PreprocessJob]] = {"clicks": clicks, "ml_100k": ml_100k}
