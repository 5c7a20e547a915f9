"""How fast files become batches: 26 categorical, 13 float, one list column and a label, from a log made for the run.

    python benchmarks/loader.py [--only ROW ...] [--turns 3] [--quick]

The log has 1,048,576 rows in 4 parquet files with row groups of 65,536. Rows a second are those of whole epochs, from
opening the files to the last row, batches of 4,096.

`row-wise`: our loader as it comes, shuffled, which reads in threads, against a map-style Dataset under torch's
DataLoader, plain_rows.py run as a process with no worker and with two, of which the faster counts in each turn, from
its second batch on.
`parquet-plain` and `parquet-shuffled`: our loader in one thread, which builds whole batches, against what pyarrow alone
decodes from the same files.
`memory`: peak of a process that reads the log once, with the loader's threads.
"""

import functools
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import torch
from harness import (
    ROOT,
    command_line,
    in_turn,
    last_json,
    peak_mb,
    rates,
    row,
)
from plain_rows import make
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.schema import BatchSchema

IDS = [f"c{number}" for number in range(26)] + ["history"]
FLOATS = [f"d{number}" for number in range(13)]
BATCH = 4096


def table(name, features):
    return EmbeddingBagConfig(
        name=name, embedding_dim=16, num_embeddings=1_000_000, feature_names=features
    )


SCHEMA = BatchSchema.from_tables([table("ids", IDS)], dense=FLOATS)


def loader(source, schema=SCHEMA, **options):
    config = LoaderConfig(
        **{"batch_size": BATCH, "negatives": 0, "label": "label"} | options
    )
    return ChunkLoader(source, schema, config=config)


def count(options):
    """Rows of the log."""
    return 2**17 if options.quick else 2**20


@functools.cache
def _log(rows):
    folder = tempfile.TemporaryDirectory()
    make(Path(folder.name), rows)
    return folder


def log(options):
    """The folder with the log, which lasts as long as this process."""
    return Path(_log(count(options)).name)


def decoded(folder):
    for path in sorted(folder.glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, use_threads=False)


def read(rows):
    return sum(len(batch) for batch in rows)


def one_thread(folder, *, shuffle):
    options = {"shuffle": shuffle, "read_ahead": 0}
    return read(loader(ParquetSource(folder), **options))


def row_wise(folder, options):
    """Returns the baseline's rows a second."""
    script = Path(__file__).with_name("plain_rows.py")
    seconds = 0.5 if options.quick else 2
    command = [sys.executable, script, folder, "--seconds", seconds, "--workers"]
    both = (last_json([*command, workers])["rows_per_s"] for workers in (0, 2))
    return float(max(both))


def speeds(options):
    rows, folder = count(options), log(options)
    sides = {
        "pyarrow": lambda: read(decoded(folder)),
        "plain": lambda: one_thread(folder, shuffle=False),
        "shuffled": lambda: one_thread(folder, shuffle=True),
        "ours": lambda: read(loader(ParquetSource(folder))),
    }
    times = in_turn(sides, options.turns)
    speed = {name: rates(rows, seconds) for name, seconds in times.items()}
    speed["slow"] = [row_wise(folder, options) for _ in range(options.turns)]
    for name, ours, baseline in (
        ("row-wise", "ours", "slow"),
        ("parquet-plain", "plain", "pyarrow"),
        ("parquet-shuffled", "shuffled", "pyarrow"),
    ):
        theirs = speed[baseline]
        yield row(name, speed[ours], "rows/s", baseline=theirs, better="more")


def used(folder):
    """MB of this process: before and at the peak of an epoch."""
    torch.set_num_threads(1)
    before = peak_mb()
    read(loader(ParquetSource(folder)))
    return {"before": before, "peak": peak_mb()}


def memory(options):
    rows, folder = count(options), log(options)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    child = "import json, pathlib, sys, loader\nprint(json.dumps(loader.used(pathlib.Path(sys.argv[1]))))"
    command = [sys.executable, "-c", child, folder]
    figures = last_json(command, PYTHONPATH=str(ROOT / "benchmarks"))
    before_mb, log_mb = round(figures["before"]), round(size)
    more = {"before_mb": before_mb, "rows": rows, "log_mb": log_mb}
    yield row("memory", figures["peak"], "MB", **more)


ROWS = {"speeds": speeds, "memory": memory}


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(__doc__, ROWS, packages="pyarrow numpy")
