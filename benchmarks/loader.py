"""How fast files become batches: 26 categorical, 13 float, one list column and a label, from a log made for the run.

    python benchmarks/loader.py [--only ROW ...] [--turns 3] [--quick]

The log has 1,048,576 rows in 4 parquet files with row groups of 65,536. Rows a second are those of whole epochs, from
opening the files to the last row, in one thread, batches of 4,096.

`row-wise`: our loader, shuffled, against a map-style Dataset under torch's DataLoader, row_loader.py run as a process
with no worker and with two, of which the faster counts. It counts from its second batch on, and is measured once.
`parquet-plain` and `parquet-shuffled`: our loader, which builds whole batches, against what pyarrow alone decodes from
the same files.
`wait-share`: share of the time of `train()` in which it waits for its next batch, by epoch, over 1,024 steps of a
two-tower network on one thread, with the loader's threads as by default. `memory`: peak of a process that reads the log
once, with the loader's threads. `memory-growth-20-epochs` and `-loaders`: what 20 further epochs, and 20 further
loaders, allocate and do not free, in a process where Python, numpy, torch and arrow all allocate by malloc, which
counts; a batch is more than 1 MB. `resident_mb` beside it is what the process grew by, with all that allocators keep.
Last line: one JSON object.
"""

import contextlib
import ctypes
import functools
import gc
import io
import itertools
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness import (
    ROOT,
    Options,
    Row,
    command_line,
    in_turn,
    last_json,
    peak_mb,
    rates,
    row,
)
from row_loader import make
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.files.sources import ParquetSource, Source
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import two_tower
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train.config import TrainConfig
from torchrec_ext.train.loop import train

IDS = [f"c{number}" for number in range(26)] + ["history"]
FLOATS = [f"d{number}" for number in range(13)]
BATCH = 4096
GROWTH_MB = 0.1


def table(name: str, features: list[str]) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, embedding_dim=16, num_embeddings=1_000_000, feature_names=features
    )


SCHEMA = BatchSchema.from_tables([table("ids", IDS)], dense=FLOATS)


def loader(source: Source, schema: BatchSchema = SCHEMA, **options: Any) -> ChunkLoader:
    config = LoaderConfig(
        **{"batch_size": BATCH, "negatives": 0, "label": "label"} | options
    )
    return ChunkLoader(source, schema, config=config)


def count(options: Options) -> int:
    """Rows of the log."""
    return 2**17 if options.quick else 2**20


@functools.cache
def _log(rows: int) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    make(Path(folder.name), rows)
    return folder


def log(options: Options) -> Path:
    """The folder with the log, which lasts as long as this process."""
    return Path(_log(count(options)).name)


def decoded(folder: Path) -> Iterator[pa.Table]:
    for path in sorted(folder.glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, use_threads=False)


def read(rows: Iterable[Any]) -> int:
    return sum(len(batch) for batch in rows)


def one_thread(
    kind: Callable[[Path], Source], folder: Path, *, shuffle: bool = True
) -> int:
    return read(loader(kind(folder), shuffle=shuffle, prefetch=0, read_ahead=0))


def row_wise(folder: Path, options: Options) -> float:
    """Returns the baseline's rows a second."""
    script = Path(__file__).with_name("row_loader.py")
    seconds = 0.5 if options.quick else 2
    command = [
        sys.executable,
        script,
        folder,
        "--batch",
        BATCH,
        "--seconds",
        seconds,
        "--workers",
    ]
    return float(
        max(last_json([*command, workers])["rows_per_s"] for workers in (0, 2))
    )


def speeds(options: Options) -> Iterator[Row]:
    rows, folder = count(options), log(options)
    sides: dict[str, Callable[[], object]] = {
        "pyarrow": lambda: read(decoded(folder)),
        "plain": functools.partial(one_thread, ParquetSource, folder, shuffle=False),
        "shuffled": functools.partial(one_thread, ParquetSource, folder),
    }
    times = in_turn(sides, options.turns)
    slow = row_wise(folder, options)
    speed = {name: rates(rows, seconds) for name, seconds in times.items()}

    def made(name: str, ours: str, baseline: list[float], required: float) -> Row:
        return row(
            name,
            speed[ours],
            "rows/s",
            baseline=baseline,
            better="more",
            required=required,
        )

    yield made("row-wise", "shuffled", [slow] * options.turns, 10)
    yield made("parquet-plain", "plain", speed["pyarrow"], 0.8)
    yield made("parquet-shuffled", "shuffled", speed["pyarrow"], 0.5)


class Timed:
    """Loader that sums the seconds in which its caller waits for the next batch, by epoch.

    ``starts``: when each epoch began; ``waits``: the seconds waited in it.
    """

    def __init__(self, batches: ChunkLoader) -> None:
        self._batches = batches
        self.starts: list[float] = []
        self.waits: list[float] = []

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next epoch."""
        self._batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[TowerBatch]:
        self.starts.append(time.perf_counter())
        self.waits.append(0.0)
        batches, start = iter(self._batches), self.starts[-1]
        for batch in batches:
            self.waits[-1] += time.perf_counter() - start
            yield batch
            start = time.perf_counter()
        self.waits[-1] += time.perf_counter() - start


def wait_share(options: Options) -> Iterator[Row]:
    epochs = 2 if options.quick else 5  # the first of which warms up
    folder = log(options)
    with Runtime.start("cpu", threads=1) as runtime:
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
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            train(
                parallel,
                optimizer,
                timed,
                runtime,
                TrainConfig(epochs=epochs),
                log=lambda _: None,
            )
    took = [
        end - start
        for start, end in itertools.pairwise([*timed.starts, time.perf_counter()])
    ][1:]
    shares = [
        waited / seconds for waited, seconds in zip(timed.waits[1:], took, strict=True)
    ]
    steps = len(timed) * (epochs - 1)
    step_ms = round(1e3 * sum(took) / steps, 2)
    yield row(
        "wait-share", shares, "share", required=0.05, steps=steps, step_ms=step_ms
    )


def resident() -> float:
    return (
        int(Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        / 1e6
    )


class Heap(ctypes.Structure):
    """glibc's mallinfo2: bytes that malloc has handed out and not got back are ``uordblks`` and ``hblkhd``."""

    _fields_ = [
        *(
            (name, ctypes.c_size_t)
            for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")
        ),
        *(
            (name, ctypes.c_size_t)
            for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
        ),
    ]


@functools.cache
def mallinfo2() -> Callable[[], Heap]:
    function = ctypes.CDLL(None).mallinfo2
    function.restype = Heap
    return function


def allocated() -> float:
    """MB that this process has allocated and not freed; all that Python, numpy, torch and arrow hold under MALLOC."""
    gc.collect()
    heap = mallinfo2()()
    return (heap.uordblks + heap.hblkhd) / 1e6


# one allocator, which counts
MALLOC = {"PYTHONMALLOC": "malloc", "ARROW_DEFAULT_MEMORY_POOL": "system"}


def used(folder: Path) -> dict[str, float]:
    """MB of this process: before and at the peak of an epoch."""
    torch.set_num_threads(1)
    before = resident()
    read(loader(ParquetSource(folder)))
    return {"before": before, "peak": peak_mb()}


def grown(folder: Path) -> dict[str, list[float]]:
    """MB allocated and MB resident that 20 epochs, and 20 loaders, add to this process after the first five."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        with pq.ParquetFile(min(folder.glob("*.parquet"))) as file:
            pq.write_table(
                file.read_row_group(0), Path(name) / "a.parquet", row_group_size=8_192
            )
        one = loader(ParquetSource(name))

        def epoch(number: int) -> None:
            one.set_epoch(number)
            read(one)

        def new_loader(_: int) -> None:
            next(iter(loader(ParquetSource(name))))

        return {"epochs": growth(epoch), "loaders": growth(new_loader)}


def growth(repeated: Callable[[int], None]) -> list[float]:
    """MB allocated and MB resident that 20 calls add after the first five."""
    marks = []
    for number in range(25):
        repeated(number)
        marks.append((allocated(), resident()))
    return [last - first for first, last in zip(marks[4], marks[-1], strict=True)]


def memory(options: Options) -> Iterator[Row]:
    rows, folder = count(options), log(options)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6

    def in_process(function: str, **environment: str) -> Any:
        child = f"import json, pathlib, loader; print(json.dumps(loader.{function}(pathlib.Path({str(folder)!r}))))"
        return last_json(
            [sys.executable, "-c", child],
            PYTHONPATH=str(ROOT / "benchmarks"),
            **environment,
        )

    figures, added = in_process("used"), in_process("grown", **MALLOC)
    log_of = {"rows": rows, "log_mb": round(size)}
    yield row(
        "memory",
        figures["peak"],
        "MB",
        required=1000,
        before_mb=round(figures["before"]),
        **log_of,
    )
    for what, (ours, resident_mb) in added.items():
        more = {"resident_mb": round(resident_mb, 2), "rows": 2**16}
        yield row(f"memory-growth-20-{what}", ours, "MB", required=GROWTH_MB, **more)


ROWS = {"speeds": speeds, "wait-share": wait_share, "memory": memory}


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    for name in ("torch", "torchrec", "fbgemm_gpu"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    command_line(__doc__, ROWS, turns=3, packages="pyarrow numpy")


if __name__ == "__main__":
    main()
