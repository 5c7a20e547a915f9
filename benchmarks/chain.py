"""Vocabularies of strings, against SQL written by hand.

    python benchmarks/chain.py [--turns 3] [--quick]

`fit-transform`: a vocabulary by count and value for each of five string columns and a parquet file of their ids, on all
cores, against SQL that one would write for DuckDB. The SQL leaves the rows in the order of its joins and writes no page
checksums; ours keeps the order and writes them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
from harness import command_line, in_turn, row

from torchrec_ext.data.preprocess import Categorify, Preprocessor
from torchrec_ext.data.preprocess.rows import connected

MIN_COUNT = 2
# Texts of the lengths and the skew of a click log: user, item, city, device, a hash.
TEXTS = {
    "c0": "'u' || CAST(floor(pow(random(), 2) * 2000000) AS BIGINT)",
    "c1": "'item_' || CAST(floor(pow(random(), 3) * 500000) AS BIGINT)",
    "c2": "'city ' || CAST(floor(pow(random(), 3) * 20000) AS BIGINT)",
    "c3": "'dev' || CAST(floor(random() * 500) AS BIGINT)",
    "c4": "md5(CAST(CAST(floor(pow(random(), 4) * 1000000) AS BIGINT) AS VARCHAR))",
}


COLUMNS = list(TEXTS)


def make(path, rows):
    """Writes rows of texts whose label is drawn."""
    connection = duckdb.connect()
    connection.execute("SELECT setseed(0.5)")
    columns = [f"{text} AS {name}" for name, text in TEXTS.items()]
    columns.append("CAST(random() < 0.3 AS FLOAT) AS label")
    connection.execute(
        f"COPY (SELECT {', '.join(columns)} FROM range({rows})) TO '{path}' (ROW_GROUP_SIZE 65536)"
    )


def by_hand(source, out, threads):
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


def ours(source, out, threads):
    with connected(threads=threads) as con:
        steps = [Categorify(column=name, min_count=MIN_COUNT) for name in COLUMNS]
        fitted = Preprocessor(steps, keep=["label"]).fit(source, con=con)
        fitted.transform(source, out, con=con, overwrite=True)
    return fitted


def check(hand, mine):
    """Both wrote the same ids as often."""
    for name in COLUMNS:
        counts = [
            np.bincount(pq.read_table(path, columns=[name])[name].to_numpy())
            for path in (hand, mine)
        ]
        assert np.array_equal(*counts), name


def preprocess(options):
    count = 100_000 if options.quick else 4_000_000
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, hand, mine = (
            folder / each for each in ("rows.parquet", "hand.parquet", "ours")
        )
        make(source, count)
        sides = {
            "by hand": lambda: by_hand(source, hand, cores),
            "ours": lambda: ours(source, mine, cores),
        }
        times = in_turn(sides, options.turns)
        check(hand, mine)
    name, baseline = f"fit-transform, {count:,} rows", times["by hand"]
    yield row(name, times["ours"], "s", baseline=baseline)


if __name__ == "__main__":
    command_line(__doc__, {"preprocess": preprocess}, packages="pyarrow numpy duckdb")
