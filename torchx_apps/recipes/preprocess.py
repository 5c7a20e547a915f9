"""The built-in preprocessing recipes: functions that return a PreprocessJob, each a line in PREPROCESS_RECIPES."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec_ext.schema.validation import DataError, check_least, listed

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
            recipes ``stream`` and ``bst`` learn it.
        tasks: further such columns that the preprocessor keeps, such as the conversion beside the click, which the
            recipe ``multi_task`` learns together with the label.
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
    tasks: tuple[str, ...] = ()
    time: str | None = None
    weight: str | None = None
    user: str | None = None
    item: str | None = None
    user_features: tuple[str, ...] = ()
    item_features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        outputs: list[str] = []
        for step in self.preprocessor.steps:
            outputs += step.writes
        # A weight is no feature, and may be kept as it is.
        self._check_columns("weight", [*outputs, *self.preprocessor.keep])
        for role in ("user", "item", "user_features", "item_features"):
            self._check_columns(role, outputs)
        for name in self.tasks:
            if name not in self.preprocessor.keep or name == self.label:
                raise ValueError(
                    f"Prepared.tasks: {name!r} must be a column of Preprocessor(keep=[...]) beside the label "
                    f"{self.label!r}; the kept columns are {listed(self.preprocessor.keep) or 'none'}"
                )
        if not self.splits:
            raise ValueError(
                "splits: there is none; name at least one source, such as {'train': 'log/*.parquet'}"
            )
        for name in self.splits:
            if name == "preprocessor" or not re.fullmatch(r"[\w-][\w.-]*", name):
                raise ValueError(
                    f"splits has the name {name!r}: must be letters, digits, - and _, and not 'preprocessor'"
                )

    def _check_columns(self, role: str, columns: Sequence[str]) -> None:
        value = getattr(self, role) or ()
        for name in (value,) if isinstance(value, str) else value:
            if name not in columns:
                raise ValueError(
                    f"Prepared.{role}: the result has no column {name!r}; its columns are {listed(columns)}"
                )

    @property
    def first_source(self) -> Source:
        """The source of the first split, on which the steps are fitted."""
        return next(iter(self.splits.values()))


@dataclass(frozen=True, kw_only=True)
class PreprocessJob:
    """All settings and functions of one preprocessing run.

    Args:
        name: name of the recipe.
        build: function that makes steps and sources from ``config`` and an engine.
        config: frozen dataclass that ``build`` reads, whose fields ``--config.KEY VALUE`` changes; None where it
            needs none.
        out: folder for the result; a new one in ``runs/`` where not given.
        engine: ``duckdb``, ``spark`` or a Spark master URL.
        threads: number of DuckDB's threads; all cores where not given.
        memory: memory that DuckDB may use before it writes to disk, such as 4GB; 80 % of the machine's where not given.
        overwrite: replace an earlier result in ``out``.
        pictures: draw pictures of the columns, with matplotlib.
    """

    name: str
    build: Callable[[Any, Any], Prepared]
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
            raise ValueError(
                f"config.test_share={self.test_share}: must be between 0 and 1"
            )


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
    from torchrec_ext.data.preprocess.engines import count_rows
    from torchrec_ext.data.preprocess.numeric import quantiles_of

    path = _movielens(config)
    ratings, users, items = _movielens_tables(path, engine)
    # The rows of the join have the numbers of the ratings.
    rows = ratings.join(_without_numbers(users), "user_id").join(
        _without_numbers(items), "item_id"
    )
    rows = engine.stage(
        rows.mutate(label=(rows.rating >= 4).cast("float32"), genres=rows["class"])
    )
    what = f"{path}: ratings of a user or an item that its file does not describe"
    _note_left_out(count_rows(ratings, engine), rows, what, engine)
    times = rows.select(x=rows.timestamp.cast("float64"))
    (cut,) = quantiles_of(
        "the split by time", times, [1 - config.test_share], str(path), engine
    )
    steps: list[Step] = [
        History(
            user="user_id",
            item="item_id",
            time="timestamp",
            length=config.history_length,
        ),
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
        splits={
            "train": rows.filter(rows.timestamp <= int(cut)),
            "test": rows.filter(rows.timestamp > int(cut)),
        },
        events=rows,
        label="label",
        time="timestamp",
        user="user_id",
        item="item_id",
        user_features=("history", "gender", "occupation", "zip_code", "age"),
        item_features=("genres", "release_year"),
    )


def _without_numbers(table: Any) -> Any:
    from torchrec_ext.data.preprocess.engines import ROW

    return table.drop(ROW) if ROW in table.columns else table


def _movielens(config: MovieLensConfig) -> Path:
    """Returns the folder with parquet files, or the publisher's zip."""
    from torchrec_ext.data.datasets.catalog import (
        DatasetUnavailable,
        data_folder,
        find_ml_100k,
    )

    if config.folder:
        folder = Path(config.folder)
        zipped = folder / "ml-100k.zip"
        if zipped.exists() and not (folder / "inter.parquet").exists():
            return zipped
        return folder
    try:
        return find_ml_100k(data_folder("ml-100k", None))
    except DatasetUnavailable as error:
        raise DataError(
            f"recipe ml_100k: {error}, or name that folder: --config.folder DIR"
        ) from None


def _movielens_tables(path: Path, engine: Engine) -> list[Any]:
    """Returns ratings, users and items as tables of the engine."""
    import pyarrow as pa

    from torchrec_ext.data.datasets.catalog import ml_100k_tables
    from torchrec_ext.data.preprocess.engines import ROW
    from torchrec_ext.data.preprocess.files import scan

    if path.suffix != ".zip":
        return [
            engine.read(scan(path / f"{name}.parquet"))
            for name in ("inter", "users", "items")
        ]
    tables = []
    for chunk in ml_100k_tables(path):
        table = pa.table(
            {name: pa.array(column.values) for name, column in chunk.items()}
        )
        numbers = pa.array(range(len(table)), pa.int64())
        tables.append(engine.register(table.append_column(ROW, numbers)))
    return tables


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
    """Names the steps and the files; the last file is for testing."""
    from torchrec_ext.data.files.find import find_files
    from torchrec_ext.data.preprocess import (
        Categorify,
        FillMissing,
        HashBucket,
        Lists,
        Normalize,
        Preprocessor,
    )

    if not config.folder:
        raise DataError(
            "recipe clicks needs a log: --config.folder DIR with parquet files of c0.., d0.., history, label"
        )
    files = [file.name for file in find_files(config.folder, (".parquet",))]
    steps: list[Step] = []
    for number in range(config.categorical):
        steps.append(
            Categorify(
                column=f"c{number}",
                min_count=config.min_count,
                max_size=config.max_size,
            )
        )
    for number in range(config.dense):
        steps.append(FillMissing(column=f"d{number}", statistic="mean"))
        steps.append(Normalize(column=f"d{number}"))
    steps.append(Lists(column="history", max_length=config.history_length))
    steps.append(HashBucket(column="history", buckets=config.history_buckets))
    splits: dict[str, Source] = {"train": files}
    if len(files) > 1:
        splits = {"train": files[:-1], "test": files[-1:]}
    return Prepared(
        preprocessor=Preprocessor(steps, keep=("label",)), splits=splits, label="label"
    )


BEHAVIOURS = ("pv", "buy", "cart", "fav")
_TAOBAO = ("user_id", "item_id", "category_id", "behavior_type", "timestamp")


@dataclass(frozen=True, kw_only=True)
class TaobaoConfig:
    """Settings of the recipe ``taobao``.

    Args:
        path: the log: a csv file with or without a header, a parquet file, or a folder of parquet files, with the
            columns user_id, item_id, category_id, behavior_type (pv, buy, cart or fav) and timestamp, in seconds.
        history_length: S, greatest number of clicks before a row.
        negatives: rows with label 0 drawn for each click: the same user at the same time with the item of a click drawn
            from the training rows, so that items are drawn by their popularity; a draw that is the clicked item is left
            out. With 0 the rows are the clicks, and the label is the conversion.
        validation_share: share of the clicks, the latest before those for testing, that is kept for validation.
        test_share: share of the clicks, the latest ones, that is kept for testing.
        min_count: least count of an item, category or user in training; rarer ones are unknown.
        zone: time zone of the time features.
    """

    path: str | None = None
    history_length: int = 20
    negatives: int = 1
    validation_share: float = 0.1
    test_share: float = 0.1
    min_count: int = 1
    zone: str = "Asia/Shanghai"

    def __post_init__(self) -> None:
        check_least("config.negatives", self.negatives, 0)
        for name in ("validation_share", "test_share"):
            if not 0 < getattr(self, name) < 0.5:
                raise ValueError(
                    f"config.{name}={getattr(self, name)}: must be above 0 and below 0.5"
                )


def taobao() -> PreprocessJob:
    """A log in the form of Taobao's UserBehavior: clicks with drawn negatives, conversions, sessions with time gaps."""
    return PreprocessJob(name="taobao", build=build_taobao, config=TaobaoConfig())


def build_taobao(config: TaobaoConfig, engine: Engine) -> Prepared:
    """Makes a row of each click and of its drawn negatives, splits them by time and names the steps.

    A click is converted if the same user bought the item at that time or later, before the end of the click's split.
    """
    from torchrec_ext.data.preprocess import (
        Categorify,
        History,
        Preprocessor,
        TimeFeatures,
    )
    from torchrec_ext.data.preprocess.history import GAPS
    from torchrec_ext.data.preprocess.numeric import quantiles_of

    log = _taobao_log(config, engine)
    clicks = log.filter(log.behavior_type == "pv")
    times = clicks.select(x=clicks.timestamp.cast("float64"))
    shares = [1 - config.test_share - config.validation_share, 1 - config.test_share]
    first, second = map(
        int, quantiles_of("the split by time", times, shares, str(config.path), engine)
    )
    bounds = {
        "train": (None, first),
        "validation": (first, second),
        "test": (second, None),
    }
    rows = {}
    for split, (after, upto) in bounds.items():
        rows[split] = _taobao_rows(
            log, clicks, after, upto, first, config.negatives, engine
        )
    steps: list[Step] = [
        History(
            user="user_id",
            item="item_id",
            time="timestamp",
            length=config.history_length,
            also=("category_id",),
            gaps=GAPS,
        ),
        Categorify(column="item_id", also=("history",), min_count=config.min_count),
        Categorify(
            column="category_id",
            also=("history_category_id",),
            min_count=config.min_count,
        ),
        Categorify(column="user_id", min_count=config.min_count),
        TimeFeatures(column="timestamp", zone=config.zone),
    ]
    labels = ("click", "conversion") if config.negatives else ("conversion",)
    return Prepared(
        preprocessor=Preprocessor(steps, keep=labels),
        splits=rows,
        events=_without_numbers(clicks),
        label=labels[0],
        tasks=labels[1:],
        time="timestamp",
        user="user_id",
        item="item_id",
        user_features=("history", "history_category_id", "history_gap"),
        item_features=("category_id",),
    )


def _taobao_rows(
    log: Any,
    clicks: Any,
    after: int | None,
    upto: int | None,
    trained: int,
    negatives: int,
    engine: Engine,
) -> Any:
    """Returns the rows of the clicks after one second and up to another, those drawn for them, in the order of time."""
    import ibis

    from torchrec_ext.data.preprocess.categorical import hashed_id_expression
    from torchrec_ext.data.preprocess.engines import ROW, count_rows

    def within(table: Any) -> Any:
        if after is not None:
            table = table.filter(table.timestamp > after)
        if upto is not None:
            table = table.filter(table.timestamp <= upto)
        return table

    order = ["timestamp", "user_id", "item_id", "category_id"]

    def row_number(table: Any) -> Any:
        # By all columns: rows of one second would have their numbers by chance.
        return ibis.row_number().over(
            ibis.window(order_by=[table[name] for name in order])
        )

    columns = within(clicks).select(*order)
    numbered = columns.mutate(number=row_number(columns))
    buys = within(log.filter(log.behavior_type == "buy"))
    buys = buys.group_by(buyer=buys.user_id, bought=buys.item_id).aggregate(
        last=buys.timestamp.max()
    )
    joined = numbered.left_join(
        buys, [numbered.user_id == buys.buyer, numbered.item_id == buys.bought]
    )
    converted = (joined["last"] >= joined.timestamp).fill_null(False).cast("float32")
    parts = [
        joined.select(
            *order,
            number=joined.number,
            draw=ibis.literal(0, "int64"),
            conversion=converted,
        )
    ]
    # Negatives are items of training clicks, drawn by their popularity, which alone
    # then tells nothing.
    pool = clicks.filter(clicks.timestamp <= trained).select(*order)
    pool = pool.select(
        drawn_item=pool.item_id,
        drawn_category=pool.category_id,
        index=row_number(pool),
    )
    size = count_rows(pool, engine) if negatives else 0
    for draw in range(1, negatives + 1):
        index = (
            hashed_id_expression(
                numbered.number.cast("string"), size, f"{upto} {draw} ", engine
            )
            - 1
        )
        requests = numbered.mutate(wanted=index)
        negative_rows = requests.inner_join(pool, [requests.wanted == pool["index"]])
        negative_rows = negative_rows.filter(
            negative_rows.drawn_item != negative_rows.item_id
        )
        parts.append(
            negative_rows.select(
                timestamp=negative_rows.timestamp,
                user_id=negative_rows.user_id,
                item_id=negative_rows.drawn_item,
                category_id=negative_rows.drawn_category,
                number=negative_rows.number,
                draw=ibis.literal(draw, "int64"),
                conversion=ibis.literal(0.0, "float32"),
            )
        )
    rows = ibis.union(*parts) if len(parts) > 1 else parts[0]
    rows = rows.mutate(
        click=(rows.draw == 0).cast("float32"),
        **{ROW: rows.number * (negatives + 1) + rows.draw},
    )
    return engine.stage(rows.drop("number", "draw"))


def _taobao_log(config: TaobaoConfig, engine: Engine) -> Any:
    """Returns the log as a table of the engine.

    Raises:
        DataError: there is no log, it lacks a column, or a behaviour is none of the four.
    """
    from torchrec_ext.data.preprocess.columns import missing_column
    from torchrec_ext.data.preprocess.files import scan

    if not config.path:
        raise DataError(
            f"recipe taobao needs a log: --config.path UserBehavior.csv, or parquet, with {', '.join(_TAOBAO)}"
        )
    path = Path(config.path)
    log = (
        _taobao_csv(path, engine)
        if path.suffix in (".csv", ".txt")
        else engine.read(scan(config.path))
    )
    for name in _TAOBAO:
        if name not in log.columns:
            raise missing_column(str(path), name, log.columns)
    counts = engine.collect(log.group_by("behavior_type").aggregate(rows=log.count()))
    kinds = counts["behavior_type"].to_pylist()
    other = sorted(str(kind) for kind in kinds if kind not in BEHAVIOURS)
    if other or "pv" not in kinds:
        what = (
            f"the value {other[0]!r}"
            if other
            else "no 'pv', of which the rows are made"
        )
        raise DataError(
            f"{path}: column 'behavior_type' has {what}; must be one of {', '.join(BEHAVIOURS)}"
        )
    complete = log.select(*_TAOBAO).filter(
        log.timestamp.notnull() & log.user_id.notnull()
    )
    staged = engine.stage(complete)
    every = sum(counts["rows"].to_pylist())
    _note_left_out(every, staged, f"{path}: rows without user_id or timestamp", engine)
    return staged


def _note_left_out(every: int, kept: Any, what: str, engine: Engine) -> None:
    """Prints how many of ``every`` rows are not in the table ``kept``, if any."""
    from torchrec_ext.data.preprocess.engines import count_rows

    left_out = every - count_rows(kept, engine)
    if left_out:
        print(f"note: {what} are left out: {left_out:,} of {every:,}", flush=True)


def _taobao_csv(path: Path, engine: Any) -> Any:
    """Reads a csv file by DuckDB; an id column is numeric if its first row is a number."""
    if engine.name != "duckdb":
        raise DataError(
            f"{path}: the engine {engine.name} reads parquet here; write it as parquet, or use duckdb"
        )
    if not path.is_file():
        raise DataError(
            f"{path}: there is no such file; give the log: --config.path FILE"
        )
    with path.open() as file:
        lines = [file.readline().strip(), file.readline().strip()]
    lines = [line for line in lines if line]
    header = bool(lines) and "user_id" in lines[0].split(",")
    names = lines[0].split(",") if header else list(_TAOBAO)
    # Without a header the second line is a row as good as the first.
    row = lines[-1].split(",") if lines[header:] else []
    if len(row) != len(names):
        raise DataError(
            f"{path}: its first row {','.join(row)[:80]!r} has {len(row)} values, must be {len(names)}: "
            f"{', '.join(names)}; give commas between them, and a header where the order is another"
        )
    kinds = {}
    for name, value in zip(names, row, strict=True):
        # 18 digits always fit int64.
        is_number = name == "timestamp" or re.fullmatch(r"-?\d{1,18}", value)
        kinds[name] = "int64" if is_number else "string"
    table = engine.ibis.read_csv(str(path), columns=kinds, header=header, delim=",")
    try:
        # DuckDB reads rows when they are asked for, so a wrong one would be met in a
        # later step.
        engine.collect(table.aggregate(n=table.timestamp.max()))
    except Exception as error:
        # DuckDB's message names line, column and value.
        raise DataError(
            f"{path}: {str(error).splitlines()[0]}; write every row like the first one"
        ) from error
    return table


# By the name that `--recipe` of rec.data.preprocess takes.
PREPROCESS_RECIPES: dict[str, Callable[[], PreprocessJob]] = {
    "clicks": clicks,
    "ml_100k": ml_100k,
    "taobao": taobao,
}
