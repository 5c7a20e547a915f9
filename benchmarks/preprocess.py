"""Vocabularies and ids of five string columns: our preprocessor against SQL that one would write by hand for DuckDB.

    python benchmarks/preprocess.py [--rows 20000000] [--repeats 5] [--threads 0] [--folder DIR] [--requests 200]

`fit-transform` makes, in both, a vocabulary by count and value for each column and a parquet file with row groups of
65,536 rows. The SQL leaves the rows in whatever order its joins give and writes no page checksums; ours keeps the order
and writes them. Both take turns, each in a connection of its own; the ratio is baseline / ours, the median of the
turns' ratios, and `required` is 1 / 1.5. `online` is what one request takes; its `required` is 1 ms per row, and its
ratio says how often it would fit into that. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq

from torchrec_ext.data.preprocess import Categorify, FittedPreprocessor, Preprocessor
from torchrec_ext.data.preprocess.engines import DuckDB

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
    joins = " ".join(f"LEFT JOIN v_{name} ON t.{name} = v_{name}.value" for name in COLUMNS)
    connection.execute(f"COPY (SELECT {ids}, label FROM '{source}' AS t {joins}) TO '{out}' (ROW_GROUP_SIZE 65536)")
    connection.close()


def ours(source: Path, out: Path, threads: int) -> FittedPreprocessor:
    with DuckDB(threads=threads) as engine:
        steps = [Categorify(column=name, min_count=MIN_COUNT) for name in COLUMNS]
        fitted = Preprocessor(steps, keep=["label"]).fit(source, engine=engine)
        fitted.transform(source, out, engine=engine, overwrite=True)
    return fitted


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def check(hand: Path, mine: Path) -> None:
    """Both wrote the same ids as often."""
    for name in COLUMNS:
        counts = [np.bincount(pq.read_table(path, columns=[name])[name].to_numpy()) for path in (hand, mine)]
        assert np.array_equal(*counts), name


def online(fitted: FittedPreprocessor, size: int, requests: int) -> float:
    """Milliseconds of one request."""
    rows: dict[str, list[Any]] = {name: [f"u{k}" for k in range(size)] for name in COLUMNS}
    fitted.online(rows)
    return seconds(lambda: [fitted.online(rows) for _ in range(requests)]) / requests * 1e3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="of both; 0 for all cores")
    parser.add_argument("--folder", type=Path, help="where to put the data; a temporary folder where not given")
    parser.add_argument("--requests", type=int, default=200)
    return parser.parse_args()


def main() -> None:
    options = parse()
    warnings.simplefilter("ignore")
    threads = options.threads or len(os.sched_getaffinity(0))
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        source = folder / "rows.parquet"
        make(source, options.rows)
        turns = []
        for turn in range(options.repeats):
            hand = seconds(lambda: by_hand(source, folder / "hand.parquet", threads))
            fitted = None

            def work() -> None:
                nonlocal fitted
                fitted = ours(source, folder / "ours", threads)

            mine = seconds(work)
            turns.append((hand, mine))
            print(f"turn {turn}: by hand {hand:.2f} s, ours {mine:.2f} s, {mine / hand:.2f} times", flush=True)
        check(folder / "hand.parquet", folder / "ours")
        assert fitted is not None
        single, several = (online(fitted, size, options.requests) for size in (1, 64))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    hand, mine = (statistics.median(turn[side] for turn in turns) for side in (0, 1))
    ratio = statistics.median(hand / mine for hand, mine in turns)
    report(options.rows, threads, (hand, mine, ratio), (single, several))


def row(name: str, baseline: float | None, ours: float, unit: str, ratio: float, required: float) -> dict[str, Any]:
    keys = ("name", "baseline", "ours", "unit", "ratio", "required", "ceiling")
    rounded = None if baseline is None else round(baseline, 3)
    return dict(zip(keys, (name, rounded, round(ours, 3), unit, round(ratio, 2), required, None), strict=True))


def report(size: int, threads: int, figures: tuple[float, float, float], requests: tuple[float, float]) -> None:
    hand, mine, ratio = figures
    rows = [
        row(f"fit-transform, {size:,} rows", hand, mine, "s", ratio, round(1 / LIMIT, 2)),
        row("online, a request of 1 row", None, requests[0], "ms", 1 / requests[0], 1.0),
        row("online, a request of 64 rows", None, requests[1], "ms", 64 / requests[1], 64.0),
    ]
    versions = {name: importlib.metadata.version(name) for name in ("duckdb", "ibis-framework", "pyarrow", "numpy")}
    print(json.dumps({"benchmark": "preprocess", "versions": versions, "cores": threads, "rows": rows}))


if __name__ == "__main__":
    main()
