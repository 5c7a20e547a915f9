"""The built-in preprocessing recipes: functions that return a PreprocessJob, each a line in PREPROCESS_RECIPES."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec_ext.data.config import Roles
from torchrec_ext.schema.validation import DataError, check_least, listed

if TYPE_CHECKING:
    from torchrec_ext.data.preprocess import FittedPreprocessor, Preprocessor, Step
    from torchrec_ext.data.preprocess.rows import Connection, Source


@dataclass(frozen=True, kw_only=True)
class Prepare(Roles):
    """Steps, sources and the roles of columns: the return value of a recipe's ``build``.

    Args:
        preprocessor: the preprocessing steps; or those that an earlier day was fitted with, for ids that stand for the
            same values: ``FittedPreprocessor.load("ready/monday/preprocessor")``.
        splits: files or relations by name of the split; the steps are fitted on ``train``, or on the first one if there
            is none.
        events: rows of which histories are made; each split's rows where not given.

    The others are those of :class:`torchrec_ext.data.config.Roles`.
    """

    preprocessor: Preprocessor | FittedPreprocessor
    splits: Mapping[str, Source]
    events: Source | None = None

    def __post_init__(self) -> None:
        outputs: list[str] = []
        for step in self.preprocessor.steps:
            outputs += step.writes
        # A weight is no feature, and may be kept as it is.
        self._check_columns("weight", [*outputs, *self.preprocessor.keep])
        if self.label and self.label not in self.preprocessor.keep:
            raise ValueError(
                f"Prepare.label: {self.label!r} is not kept; keep it: Preprocessor(keep=[{self.label!r}])"
            )
        for role in ("user", "item", "user_features", "item_features"):
            self._check_columns(role, outputs)
        for name in self.tasks:
            if name not in self.preprocessor.keep or name == self.label:
                raise ValueError(
                    f"Prepare.tasks: {name!r} must be a column of Preprocessor(keep=[...]) beside the label "
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
        # Whoever names the test first must not fit on it.
        if "train" in self.splits:
            ordered = {"train": self.splits["train"], **self.splits}
            object.__setattr__(self, "splits", ordered)

    def _check_columns(self, role: str, columns: Sequence[str]) -> None:
        value = getattr(self, role) or ()
        for name in (value,) if isinstance(value, str) else value:
            if name not in columns:
                raise ValueError(
                    f"Prepare.{role}: no step writes {name!r}; the steps write {listed(columns)}"
                )

    @property
    def first_source(self) -> Source:
        """The source of ``train``, or else of the first split, on which the steps are fitted."""
        return next(iter(self.splits.values()))


@dataclass(frozen=True, kw_only=True)
class PreprocessJob:
    """All settings and functions of one preprocessing run.

    Args:
        name: name of the recipe.
        build: function that makes steps and sources from ``config`` and a connection of DuckDB.
        config: frozen dataclass that ``build`` reads, whose fields ``--config.KEY VALUE`` changes; None where it
            needs none.
        out: folder for the result; a new one in ``runs/`` where not given.
        threads: number of DuckDB's threads; all cores where not given.
        memory: memory that DuckDB may use before it writes to disk, such as 4GB; 80 % of the machine's where not given.
        overwrite: replace an earlier result in ``out``.
    """

    name: str
    build: Callable[[Any, Any], Prepare]
    config: Any = None
    out: str | None = None
    threads: int | None = None
    memory: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class MovieLensConfig:
    """Settings of the recipe ``ml_100k``.

    Args:
        folder: the publisher's unpacked folder, with u.data, u.user and u.item; ``$TORCHREC_EXT_DATA/ml-100k`` where
            not given.
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


def build_ml_100k(config: MovieLensConfig, con: Connection) -> Prepare:
    """Joins the three files, splits them by time and names the steps; a rating of 4 or 5 has label 1."""
    from torchrec_ext.data.prepared import data_folder
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

    path = Path(config.folder) if config.folder else data_folder("ml-100k", None)
    ratings, users, items = _movielens(path or Path("ml-100k"), con)
    con.execute(
        "CREATE TABLE ratings_of_users AS SELECT r.* EXCLUDE (place), u.* EXCLUDE (user_id), i.* EXCLUDE (item_id), "
        'i.movie_title AS title, i."class" AS genres, CAST(r.rating >= 4 AS FLOAT) AS label '
        f"FROM (SELECT *, row_number() OVER () AS place FROM {ratings}) r "
        f"JOIN {users} u USING (user_id) JOIN {items} i USING (item_id) ORDER BY r.place"
    )
    rows = con.sql("SELECT * FROM ratings_of_users")
    what = f"{path}: ratings of a user or an item that its file does not describe"
    _note_left_out(_count(con, ratings), _count(con, "ratings_of_users"), what)
    (cut,) = _cuts(con, "ratings_of_users", [1 - config.test_share])
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
        Normalize(column="age"),
        FillMissing(column="age", value=0),
        TimeFeatures(column="timestamp", zone=config.zone),
    ]
    return Prepare(
        preprocessor=Preprocessor(steps, keep=("label", "timestamp")),
        splits={
            "train": rows.filter(f"timestamp <= {cut}"),
            "test": rows.filter(f"timestamp > {cut}"),
        },
        events=rows,
        label="label",
        user="user_id",
        item="item_id",
        user_features=("history", "gender", "occupation", "zip_code", "age"),
        item_features=("genres", "release_year"),
    )


# In the order of u.item's flags.
_GENRES = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir Horror Musical "
    "Mystery Romance Sci-Fi Thriller War Western"
)


def _movielens(folder: Path, con: Connection) -> tuple[str, str, str]:
    """Returns ratings, users and items in SQL, of the publisher's unpacked files.

    Raises:
        DataError: a file is missing, or has another form.
    """
    from torchrec_ext.data.preprocess import read_csv

    if not (folder / "u.data").exists():
        raise DataError(
            f"{folder}: has no u.data; unpack MovieLens 100K of grouplens.org, and name the "
            "folder: --config.folder ml-100k"
        )

    def csv(file: str, delimiter: str, numbers: str, texts: str, more: str = "") -> str:
        types = dict.fromkeys(numbers.split(), "BIGINT")
        types |= dict.fromkeys(texts.split(), "VARCHAR")
        types |= dict.fromkeys(more.split(), "BIGINT")
        return read_csv(
            con,
            folder / file,
            types,
            names=list(types),
            delimiter=delimiter,
            quote="",
            encoding="latin-1",
        )

    genres = _GENRES.split()
    flags = [f"flag{number}" for number in range(len(genres))]
    films = csv(
        "u.item", "|", "item_id", "movie_title released video url", " ".join(flags)
    )
    named = []
    for flag, genre in zip(flags, genres, strict=True):
        text = genre.replace("'", "''")
        named.append(f"CASE WHEN {flag} = 1 THEN '{text}' END")
    return (
        csv("u.data", "\t", "user_id item_id rating timestamp", ""),
        csv("u.user", "|", "user_id age", "gender occupation zip_code"),
        "(SELECT item_id, movie_title, regexp_extract(movie_title, '\\((\\d{4})\\)', 1) AS release_year, "
        f"concat_ws(' ', {', '.join(named)}) AS \"class\" FROM {films})",
    )


def _count(con: Connection, view: str) -> int:
    """Returns the number of rows of a table or a view."""
    ((rows,),) = con.sql(f"SELECT count(*) FROM {view}").fetchall()
    return int(rows)


def _cuts(con: Connection, rows: str, shares: Sequence[float]) -> list[int]:
    """Returns, for each share, the first timestamp at or before which so many of the rows are."""
    ((cuts,),) = con.sql(
        f"SELECT quantile_disc(timestamp, {shares}) FROM {rows}"
    ).fetchall()
    return list(cuts)


def _note_left_out(every: int, kept: int, what: str) -> None:
    """Prints how many of ``every`` rows are left out, if any."""
    if every > kept:
        print(f"note: {what} are left out: {every - kept:,} of {every:,}", flush=True)


# The year 5000, in seconds.
_LATEST = 95_617_584_000
BEHAVIOURS = ("pv", "buy", "cart", "fav")
_TAOBAO = ("user_id", "item_id", "category_id", "behavior_type", "timestamp")


@dataclass(frozen=True, kw_only=True)
class TaobaoConfig:
    """Settings of the recipe ``taobao``.

    Args:
        path: the log: the publisher's csv file, without a header; or a parquet file, or a folder of such, with the
            columns user_id, item_id, category_id, behavior_type (pv, buy, cart or fav) and timestamp, a time or
            seconds since 1970, whose ids may be texts.
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


def build_taobao(config: TaobaoConfig, con: Connection) -> Prepare:
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

    _make_taobao_log(config, con)
    con.execute("CREATE TABLE clicks AS FROM log WHERE behavior_type = 'pv'")
    shares = [1 - config.test_share - config.validation_share, 1 - config.test_share]
    first, second = _cuts(con, "clicks", shares)
    bounds = {
        "train": f"timestamp <= {first}",
        "validation": f"timestamp > {first} AND timestamp <= {second}",
        "test": f"timestamp > {second}",
    }
    pool = _count(con, f"clicks WHERE {bounds['train']}")
    # Mixed into the draws of each split.
    ends = {"train": first, "validation": second, "test": None}
    rows = {}
    for split, within in bounds.items():
        con.execute(
            f"CREATE TABLE clicks_{split} AS "
            + _taobao_rows(within, ends[split], first, pool, config.negatives)
        )
        rows[split] = con.sql(f"SELECT * EXCLUDE (number, draw) FROM clicks_{split}")
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
    return Prepare(
        preprocessor=Preprocessor(steps, keep=labels),
        splits=rows,
        events=con.sql("SELECT * FROM clicks"),
        label=labels[0],
        tasks=labels[1:],
        user="user_id",
        item="item_id",
        user_features=("history", "history_category_id", "history_gap"),
        item_features=("category_id",),
    )


def _taobao_rows(
    within: str, end: int | None, trained: int, pool: int, negatives: int
) -> str:
    """Returns SQL for the rows of the clicks within a time, and those drawn for them, in the order of time.

    Args:
        within: condition of the split.
        end: last second of the split, which is mixed into its draws.
        trained: last second of the training clicks.
        pool: number of these.
        negatives: number of rows to draw for each click.
    """
    # By all columns: rows of one second would have their numbers by chance.
    number = "row_number() OVER (ORDER BY timestamp, user_id, item_id, category_id) - 1"
    columns = "timestamp, user_id, item_id, category_id"
    parts = [
        f"SELECT {columns}, number, 0 AS draw, "
        "coalesce(CAST(bought.last >= timestamp AS FLOAT), 0) AS conversion "
        "FROM numbered LEFT JOIN bought USING (user_id, item_id)"
    ]
    # Negatives are items of training clicks, drawn by their popularity, which alone
    # then tells nothing.
    for draw in range(1, negatives + 1):
        digits = f"substr(md5('{end} {draw} ' || number), 1, 15)"
        place = f"CAST('0x' || {digits} AS BIGINT) % {pool}"
        parts.append(
            f"SELECT timestamp, user_id, pool.item_id, pool.category_id, number, {draw} AS draw, "
            f"CAST(0 AS FLOAT) AS conversion FROM (SELECT *, {place} AS place FROM numbered) n "
            "JOIN pool USING (place) WHERE pool.item_id <> n.item_id"
        )
    return (
        f"WITH numbered AS (SELECT {columns}, {number} AS number FROM clicks WHERE {within}), "
        f"bought AS (SELECT user_id, item_id, max(timestamp) AS last FROM log "
        f"WHERE behavior_type = 'buy' AND {within} GROUP BY ALL), "
        f"pool AS (SELECT item_id, category_id, {number} AS place FROM clicks WHERE timestamp <= {trained}) "
        "SELECT *, CAST(draw = 0 AS FLOAT) AS click "
        f"FROM ({' UNION ALL '.join(parts)}) ORDER BY number, draw"
    )


def _make_taobao_log(config: TaobaoConfig, con: Connection) -> None:
    """Makes the table ``log``, its times in seconds.

    Raises:
        DataError: there is no log, it lacks a column, or a behaviour is none of the four.
    """
    from torchrec_ext.data.preprocess import read_csv
    from torchrec_ext.data.preprocess.rows import open_source

    if not config.path:
        raise DataError(
            f"recipe taobao needs a log: --config.path UserBehavior.csv, or parquet, with {', '.join(_TAOBAO)}"
        )
    path = Path(config.path)
    seconds = "timestamp"
    if path.suffix in (".csv", ".txt"):
        types = dict.fromkeys(_TAOBAO, "BIGINT") | {"behavior_type": "VARCHAR"}
        log = read_csv(con, path, types, names=_TAOBAO)
    else:
        opened = open_source(config.path, _TAOBAO, con)
        log = opened.view
        if opened.raw["timestamp"].startswith("timestamp"):
            seconds = "CAST(floor(epoch(timestamp)) AS BIGINT)"
    con.execute(
        f"CREATE TABLE log AS SELECT * REPLACE ({seconds} AS timestamp) FROM {log}"
    )
    kinds = [
        kind for (kind,) in con.sql("SELECT DISTINCT behavior_type FROM log").fetchall()
    ]
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
    ((latest,),) = con.sql("SELECT max(timestamp) FROM log").fetchall()
    if not isinstance(latest, int) or latest > _LATEST:
        raise DataError(
            f"{path}: column 'timestamp' has {latest!r}; must be seconds since 1970, or a time: timestamp // 1000 of "
            "milliseconds"
        )
    every = _count(con, "log")
    con.execute("DELETE FROM log WHERE timestamp IS NULL OR user_id IS NULL")
    _note_left_out(
        every, _count(con, "log"), f"{path}: rows without user_id or timestamp"
    )


# By the name that `--recipe` of rec.data.preprocess takes.
PREPROCESS_RECIPES: dict[str, Callable[[], PreprocessJob]] = {
    "ml_100k": ml_100k,
    "taobao": taobao,
}
