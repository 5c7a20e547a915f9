"""From a raw log to trained weights by the commands; and vocabularies of strings, against SQL written by hand.

    python benchmarks/chain.py [--only ROW ...] [--turns 3] [--quick]

`fit-transform`: a vocabulary by count and value for each of five string columns and a parquet file of their ids, on all
cores, against SQL that one would write for DuckDB. The SQL leaves the rows in the order of its joins and writes no page
checksums; ours keeps the order and writes them.

`ranks`: an epoch of `rec.train` with the recipe `stream` on 2 ranks against 1, one thread each, over a log of 26 such
columns, 13 numbers, a list and a label, as `rec.data.preprocess` wrote it. The ranks hold all tables and average their
weights every 128 steps; the AUC of both stands beside. The ceiling is two such
processes that never talk. The seconds are those of the epoch's steps.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import torch
from harness import (
    BIN,
    command_line,
    in_turn,
    output,
    rates,
    row,
)

from torchrec_ext.data.preprocess import (
    Categorify,
    FillMissing,
    HashBucket,
    Lists,
    Normalize,
    Preprocessor,
)
from torchrec_ext.data.preprocess.rows import connected
from torchx_apps.jobs.preprocessing import run_preprocess
from torchx_apps.recipes.preprocess import Prepare, PreprocessJob

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


def make(path, rows, seed=0.5, *, wide=False):
    """Writes rows whose label depends on the first number and the fourth text; ``wide``: all columns of a click log."""
    connection = duckdb.connect()
    connection.execute(f"SELECT setseed({seed})")
    texts, (ids, numbers) = list(TEXTS.values()), (26, 13) if wide else (5, 1)
    columns = [f"{texts[number % 5]} AS c{number}" for number in range(ids)]
    columns += [f"CAST(random() AS FLOAT) AS d{number}" for number in range(numbers)]
    columns += [f"[{texts[1]}, {texts[1]}, {texts[1]}] AS history"] if wide else []
    made = f"SELECT {', '.join(columns)}, random() AS luck FROM range({rows})"
    chance = "1 / (1 + exp(2.5 - d0 - (hash(c3) % 100) / 50.0))"
    label = f"SELECT * EXCLUDE luck, CAST(luck < {chance} AS FLOAT) AS label"
    connection.execute(
        f"COPY ({label} FROM ({made})) TO '{path}' (ROW_GROUP_SIZE 65536)"
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


APART = {
    "plan.sharding": "data_parallel",
    "sync.mode": "local_sgd",
    "sync.every": "128",
}


def steps_and_files(folder, con):
    """What a recipe of `rec.data.preprocess` builds: the steps of all columns; the last file is for testing."""
    ids = [f"c{number}" for number in range(26)]
    steps = [Categorify(column=name, min_count=2, max_size=100_000) for name in ids]
    for name in (f"d{number}" for number in range(13)):
        steps += [Normalize(column=name), FillMissing(column=name, value=0)]
    steps += [
        Lists(column="history", max_length=20),
        HashBucket(column="history", buckets=100_000),
    ]
    *train, test = sorted(folder.iterdir())
    return Prepare(
        preprocessor=Preprocessor(steps, keep=["label"]),
        splits={"train": train, "test": test},
        label="label",
    )


def preprocessed(folder, quick):
    """Writes a raw log and preprocesses it; returns the folder and its rows for training."""
    raw, out, rows = folder / "raw", folder / "rows", 2**14 if quick else 2**20
    raw.mkdir()
    for number in range(9):
        make(raw / f"part-{number}.parquet", rows, number / 10, wide=True)
    job = {"name": "clicks", "build": steps_and_files, "config": raw, "out": str(out)}
    run_preprocess(PreprocessJob(**job, memory="1500MB"))
    return out, 8 * rows


def training(rows, run_dir, ranks=1, **chosen):
    """What a user types to train for an epoch."""
    settings = {"data.name": rows, "train.epochs": 1, "train.log_every": 10}
    settings |= {"export": "never"} | chosen
    words = [f"--{key}={value}" for key, value in settings.items()]
    recipe = ["--recipe", "stream"]
    where = ["--run_dir", str(run_dir)]
    if ranks == 1:
        return [sys.executable, "-m", "torchx_apps.train", *recipe, *where, *words]
    job = ["rec.train.hybrid", *recipe, "-j", f"1x{ranks}", "--", *where]
    return [str(BIN / "torchx"), "run", "-s", "local_cwd", *job, *words]


def epoch(run_dir):
    """Seconds of the steps of a run."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    return sum(record["rows"] / record["rows_per_s"] for record in records)


def trained(*commands):
    """Runs commands at the same time, one thread each."""
    with ThreadPoolExecutor() as pool:
        run = functools.partial(output, OMP_NUM_THREADS="1")
        list(pool.map(run, commands))


def ranks(options):
    captured = {"train.compile": "off" if options.quick else "require"}
    jobs = {
        "1 rank": captured,
        "ranks": {"ranks": 2, **captured, **APART},
    }
    seconds = {which: [] for which in (*jobs, "apart")}
    aucs = {}
    with tempfile.TemporaryDirectory() as name:
        log, count = preprocessed(Path(name), options.quick)
        for turn in range(options.turns):
            for which, settings in jobs.items():
                run_dir = Path(name) / f"{turn}-{which}"
                trained(training(log, run_dir, **settings))
                seconds[which].append(epoch(run_dir))
                summary = json.loads((run_dir / "summary.json").read_text())
                aucs[which] = round(summary["test"]["auc"], 4)
            folders = [Path(name) / f"{turn}-apart-{number}" for number in range(2)]
            trained(*(training(log, folder, **captured) for folder in folders))
            each = statistics.mean(epoch(folder) for folder in folders)
            seconds["apart"].append(each / 2)
    speed = {which: rates(count, each) for which, each in seconds.items()}
    alone = speed.pop("1 rank")
    pairs = zip(speed.pop("apart"), alone, strict=True)
    ceiling = statistics.median(both / one for both, one in pairs)
    more = {"auc": aucs["ranks"], "auc_of_1_rank": aucs["1 rank"]}
    more |= {"rows": count, "ceiling": ceiling, "better": "more"}
    yield row("ranks", speed["ranks"], "rows/s", baseline=alone, **more)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = {"preprocess": preprocess, "ranks": ranks}
    command_line(__doc__, rows, packages="pyarrow numpy duckdb")
