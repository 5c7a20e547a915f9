"""The built-in preprocessing recipes: functions that return a PreprocessJob, each a line in PREPROCESS_RECIPES."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec_ext.schema.validation import DataError

if TYPE_CHECKING:
    from torchrec_ext.data.preprocess import Preprocessor, Step
    from torchrec_ext.data.preprocess.engines import Engine
    from torchrec_ext.data.preprocess.files import Source


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Steps and sources: the return value of a recipe's ``build``.

    Args:
        preprocessor: the preprocessing steps.
        splits: files or tables by name of the split; the steps are fitted on the first split.
        events: rows of which histories are made; each split's rows where not given.
        label: numeric column of the sources, 0 to 1, whose mean by day is drawn; where the preprocessor keeps it, the
            recipe ``stream`` learns it.
        time: column of the sources with a timestamp or seconds since 1970, for that picture.
        weight: column of the result with a weight for each row, for the recipe ``stream``.
        user: column of the result with the users' ids, and ``item`` with the items': the recipe ``stream`` then ranks
            the catalogue.
        item: see ``user``.
        user_features: further columns of the result that are the user's; a name that begins with ``user_`` need not be
            listed. All that is neither the user's nor the item's is context, which is known before the item is.
        item_features: further columns of the result that are the item's; as ``user_features``, with ``item_``.
    """

    preprocessor: Preprocessor
    splits: Mapping[str, Source]
    events: Source | None = None
    label: str | None = None
    time: str | None = None
    weight: str | None = None
    user: str | None = None
    item: str | None = None
    user_features: tuple[str, ...] = ()
    item_features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        written = [name for step in self.preprocessor.steps for name in step.writes]
        for role in ("weight", "user", "item", "user_features", "item_features"):
            known = [*written, *self.preprocessor.keep] if role == "weight" else written
            named = getattr(self, role) or ()
            for name in (named,) if isinstance(named, str) else named:
                if name not in known:
                    raise ValueError(
                        f"Prepared.{role}: the result has no column {name!r}; its columns are {', '.join(known)}"
                    )
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
        name: name of the recipe.
        build: function that makes steps and sources from ``config`` and an engine.
        config: frozen dataclass that ``build`` reads, whose fields ``--set config.KEY=VALUE`` changes; None where it
            needs none.
        out: folder for the result; a new one in ``runs/`` where not given.
        engine: ``duckdb``, ``spark`` or a Spark master URL.
        threads: number of DuckDB's threads; all cores where not given.
        memory: memory that DuckDB may use before it writes to disk, such as 4GB; 80 % of the machine's where not given.
        overwrite: replace an earlier result in ``out``.
        pictures: draw pictures of the columns, with matplotlib.
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
    """Settings of the recipe ``ml_100k``.

    Args:
        folder: folder with inter.parquet, users.parquet and items.parquet, or with ml-100k.zip; where not given the set
            is looked for, and downloaded, as in training.
        history_length: greatest number of earlier items in a row.
        test_share: share of the ratings, the latest ones, that is kept for testing.
        min_count: least count of an item or user in training; rarer ones are unknown.
        zone: time zone of the time features.
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
    """Joins the three files, splits them by time and names the steps; a rating of 4 or 5 has label 1."""
    from torchrec_ext.data.preprocess import (
        Categorify,
        FillMissing,
        HashBucket,
        History,
        Lists,
        Normalize,
        Preprocessor,
        TimeFeatures,
    )
    from torchrec_ext.data.preprocess.engines import ROW
    from torchrec_ext.data.preprocess.numeric import quantiles_of

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
        user="user_id",
        item="item_id",
        user_features=("history", "gender", "occupation", "zip_code", "age"),
        item_features=("genres", "release_year"),
    )


def _movielens(config: MovieLensConfig) -> Path:
    """Returns the folder with parquet files, or the publisher's zip."""
    from torchrec_ext.data.datasets.catalog import DatasetUnavailable, data_folder, find_ml_100k

    if config.folder:
        folder = Path(config.folder)
        zipped = folder / "ml-100k.zip"
        return zipped if zipped.exists() and not (folder / "inter.parquet").exists() else folder
    try:
        return find_ml_100k(data_folder("ml-100k", None))
    except DatasetUnavailable as error:
        raise DataError(f"recipe ml_100k: {error}, or name that folder: --set config.folder=DIR") from None


def _movielens_tables(path: Path, engine: Engine) -> list[Any]:
    """Returns ratings, users and items as tables of the engine."""
    import pyarrow as pa

    from torchrec_ext.data.datasets.catalog import ml_100k_tables
    from torchrec_ext.data.preprocess.engines import ROW
    from torchrec_ext.data.preprocess.files import scan

    if path.suffix != ".zip":
        return [engine.read(scan(path / f"{name}.parquet")) for name in ("inter", "users", "items")]
    chunks = ml_100k_tables(path)
    tables = [pa.table({name: pa.array(column.values) for name, column in chunk.items()}) for chunk in chunks]
    return [engine.register(table.append_column(ROW, pa.array(range(len(table)), pa.int64()))) for table in tables]


@dataclass(frozen=True, kw_only=True)
class ClicksConfig:
    """Settings of the recipe ``clicks``.

    Args:
        folder: folder of the log's parquet files; the last file is kept for testing where there are several.
        categorical: number of the columns c0, c1, ...
        dense: number of the columns d0, d1, ...
        min_count: least count of a value in training; rarer values are unknown.
        max_size: greatest number of a column's values that get an id.
        history_length: number of elements of ``history`` that are kept, the most recent ones.
        history_buckets: number of ids that these elements are hashed to.
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
    """Names the steps and the files, of which the last is for testing."""
    from torchrec_ext.data.files.find import find_files
    from torchrec_ext.data.preprocess import Categorify, FillMissing, HashBucket, Lists, Normalize, Preprocessor

    if not config.folder:
        raise DataError(
            "recipe clicks needs a log: --set config.folder=DIR with parquet files of c0.., d0.., history, label"
        )
    files = [file.name for file in find_files(config.folder, (".parquet",))]
    ids: list[Step] = [
        Categorify(column=f"c{number}", min_count=config.min_count, max_size=config.max_size)
        for number in range(config.categorical)
    ]
    numbers: list[Step] = [
        step
        for number in range(config.dense)
        for step in (FillMissing(column=f"d{number}", statistic="mean"), Normalize(column=f"d{number}"))
    ]
    lists: list[Step] = [
        Lists(column="history", max_length=config.history_length),
        HashBucket(column="history", buckets=config.history_buckets),
    ]
    splits: dict[str, Source] = {"train": files[:-1], "test": files[-1:]} if len(files) > 1 else {"train": files}
    return Prepared(preprocessor=Preprocessor([*ids, *numbers, *lists], keep=("label",)), splits=splits, label="label")


# By the name that `--recipe` of rec.data.preprocess takes.
PREPROCESS_RECIPES: dict[str, Callable[[], PreprocessJob]] = {"clicks": clicks, "ml_100k": ml_100k}
