"""How fast files become batches: 26 categorical, 13 float, one list column and a label, from a log made for the run.

    python benchmarks/loader.py [--only ROW ...] [--turns 3] [--quick]

The log has 1,048,576 rows in 4 parquet files with row groups of 65,536. Rows a second are those of whole epochs, from
opening the files to the last row, in one thread, batches of 4,096.

`row-wise`: our loader, shuffled, against a map-style Dataset under torch's DataLoader, plain_rows.py run as a process
with no worker and with two, of which the faster counts. It counts from its second batch on, and is measured once.
`parquet-plain` and `parquet-shuffled`: our loader, which builds whole batches, against what pyarrow alone decodes from
the same files.
`wait-share`: share of the time of `train()` in which it waits for its next batch, by epoch, over 1,024 steps of a
two-tower network on one thread, with the loader's threads as by default. `memory`: peak of a process
that reads the log once, with the loader's threads.
"""

import functools
import itertools
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
import torch
from harness import (
    ROOT,
    command_line,
    in_turn,
    last_json,
    one_rank,
    peak_mb,
    rates,
    row,
)
from plain_rows import make
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.data.files.sources import ParquetSource
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.models.tower_model import two_tower
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train.loop import TrainConfig, train

IDS = [f"c{number}" for number in range(26)] + ["history"]
FLOATS = [f"d{number}" for number in range(13)]
BATCH = 4096
GROWTH_MB = 0.1


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
    options = {"shuffle": shuffle, "prefetch": 0, "read_ahead": 0}
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
    }
    times = in_turn(sides, options.turns)
    speed = {name: rates(rows, seconds) for name, seconds in times.items()}
    speed["slow"] = [row_wise(folder, options)] * options.turns
    for name, ours, baseline in (
        ("row-wise", "shuffled", "slow"),
        ("parquet-plain", "plain", "pyarrow"),
        ("parquet-shuffled", "shuffled", "pyarrow"),
    ):
        theirs = speed[baseline]
        yield row(name, speed[ours], "rows/s", baseline=theirs, better="more")


class Timed:
    """Loader that sums the seconds in which its caller waits for the next batch, by epoch.

    ``starts``: when each epoch began; ``waits``: the seconds waited in it.
    """

    def __init__(self, batches):
        self._batches = batches
        self.starts = []
        self.waits = []

    def __len__(self):
        return len(self._batches)

    def set_epoch(self, epoch):
        """Chooses the order of the next epoch."""
        self._batches.set_epoch(epoch)

    def __iter__(self):
        self.starts.append(time.perf_counter())
        self.waits.append(0.0)
        batches, start = iter(self._batches), self.starts[-1]
        for batch in batches:
            self.waits[-1] += time.perf_counter() - start
            yield batch
            start = time.perf_counter()
        self.waits[-1] += time.perf_counter() - start


def wait_share(options):
    epochs = 2 if options.quick else 5  # the first of which warms up
    folder = log(options)
    with one_rank() as runtime:
        model = two_tower(
            [table("user", IDS[:13])],
            [table("item", IDS[13:])],
            user_dense=FLOATS,
            tower_widths=(256, 64),
            top_widths=(64,),
            device=torch.device("meta"),
        )
        timed = Timed(loader(ParquetSource(folder), model.schema()))
        optimizers = OptimizerConfig(tables="sgd", tables_lr=0.01)
        parallel, optimizer = hybrid_parallel(model, runtime, optimizer=optimizers)
        config = TrainConfig(epochs=epochs)
        train(parallel, optimizer, timed, runtime, config, log=lambda _: None)
    took = [
        end - start
        for start, end in itertools.pairwise([*timed.starts, time.perf_counter()])
    ][1:]
    shares = [
        waited / seconds for waited, seconds in zip(timed.waits[1:], took, strict=True)
    ]
    yield row("wait-share", shares, "share")


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


ROWS = {"speeds": speeds, "wait-share": wait_share, "memory": memory}


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line(__doc__, ROWS, packages="pyarrow numpy")
