"""Vocabularies and ids of five string columns: our preprocessor against SQL that one would write by hand for DuckDB.

    python benchmarks/preprocess.py [--only ROW ...] [--turns 3] [--quick]

`fit-transform` makes, in both, a vocabulary by count and value for each column and a parquet file with row groups of
65,536 rows, from as many rows as the row's name says, on all cores. The SQL leaves the rows in whatever order its joins
give and writes no page checksums; ours keeps the order and writes them. Both take turns, each in a connection of its
own; the ratio asked for is 1 / 1.5. `online` is what one request of a fitted preprocessor takes, in milliseconds, at
most 1 for each of its rows. Last line: one JSON object.
"""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
from harness import Options, Row, command_line, in_turn, row

from torchrec_ext.data.preprocess import Categorify, FittedPreprocessor, Preprocessor
from torchrec_ext.data.preprocess.rows import connected

MIN_COUNT = 2
LIMIT = 1.5  # times the SQL by hand
# Texts of the lengths and the skew of a click log: user, item, city, device, a hash.
TEXTS = {
    "c0": "'u' || CAST(floor(pow(random(), 2) * 2000000) AS BIGINT)",
    "c1": "'item_' || CAST(floor(pow(random(), 3) * 500000) AS BIGINT)",
    "c2": "'city ' || CAST(floor(pow(random(), 3) * 20000) AS BIGINT)",
    "c3": "'dev' || CAST(floor(random() * 500) AS BIGINT)",
    "c4": "md5(CAST(CAST(floor(pow(random(), 4) * 1000000) AS BIGINT) AS VARCHAR))",
}


COLUMNS = list(TEXTS)


def make(path: Path, rows: int) -> None:
    connection = duckdb.connect()
    connection.execute("SELECT setseed(0.5)")
    texts = ", ".join(f"{text} AS {name}" for name, text in TEXTS.items())
    made = f"SELECT {texts}, CAST(random() < 0.03 AS FLOAT) AS label FROM range({rows})"
    connection.execute(f"COPY ({made}) TO '{path}' (ROW_GROUP_SIZE 65536)")


def by_hand(source: Path, out: Path, threads: int) -> None:
    """What the user writes today."""
    connection = duckdb.connect()
    connection.execute(f"SET threads={threads}")
    for name in COLUMNS:
        counts = f"SELECT {name} AS value, count(*) AS n FROM '{source}' WHERE {name} IS NOT NULL GROUP BY 1"
        connection.execute(
            f"CREATE TABLE v_{name} AS SELECT value, row_number() OVER (ORDER BY n DESC, value) AS id FROM ({counts} "
            f"HAVING count(*) >= {MIN_COUNT})"
        )
    ids = ", ".join(f"coalesce(v_{name}.id, 0) AS {name}" for name in COLUMNS)
    joins = " ".join(
        f"LEFT JOIN v_{name} ON t.{name} = v_{name}.value" for name in COLUMNS
    )
    connection.execute(
        f"COPY (SELECT {ids}, label FROM '{source}' AS t {joins}) TO '{out}' (ROW_GROUP_SIZE 65536)"
    )
    connection.close()


def ours(source: Path, out: Path, threads: int) -> FittedPreprocessor:
    with connected(threads=threads) as con:
        steps = [Categorify(column=name, min_count=MIN_COUNT) for name in COLUMNS]
        fitted = Preprocessor(steps, keep=["label"]).fit(source, con=con)
        fitted.transform(source, out, con=con, overwrite=True)
    return fitted


def check(hand: Path, mine: Path) -> None:
    """Both wrote the same ids as often."""
    for name in COLUMNS:
        counts = [
            np.bincount(pq.read_table(path, columns=[name])[name].to_numpy())
            for path in (hand, mine)
        ]
        assert np.array_equal(*counts), name


@functools.cache
def fitted_on(
    rows: int, turns: int
) -> tuple[dict[str, list[float]], FittedPreprocessor]:
    """Seconds of both sides by turn, and the preprocessor that was fitted last."""
    cores, fitted = len(os.sched_getaffinity(0)), []
    with tempfile.TemporaryDirectory() as folder:
        source, hand, mine = (
            Path(folder) / name for name in ("rows.parquet", "hand.parquet", "ours")
        )
        make(source, rows)
        sides = {
            "by hand": lambda: by_hand(source, hand, cores),
            "ours": lambda: fitted.append(ours(source, mine, cores)),
        }
        times = in_turn(sides, turns)
        check(hand, mine)
    return times, fitted[-1]


def size(options: Options) -> int:
    """Rows of the data."""
    return 100_000 if options.quick else 4_000_000


def fit_transform(options: Options) -> Iterator[Row]:
    times, _ = fitted_on(size(options), options.turns)
    yield row(
        f"fit-transform, {size(options):,} rows",
        times["ours"],
        "s",
        baseline=times["by hand"],
        required=1 / LIMIT,
    )


def online(options: Options) -> Iterator[Row]:
    _, fitted = fitted_on(size(options), options.turns)
    for count in (1, 64):
        rows: dict[str, list[Any]] = {
            name: [f"u{number}" for number in range(count)] for name in COLUMNS
        }
        request = functools.partial(fitted.online, rows)
        times = in_turn(
            {"online": request}, options.turns, 20 if options.quick else 200
        )["online"]
        name = f"online, a request of {count} row{'s' if count > 1 else ''}"
        yield row(name, [1e3 * seconds for seconds in times], "ms", required=count)


ROWS = {"fit-transform": fit_transform, "online": online}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    command_line(__doc__, ROWS, turns=3, packages="duckdb pyarrow numpy")
