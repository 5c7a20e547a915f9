"""How fast files become batches: 26 categorical, 13 float, one list column and a label, on one core.

    python benchmarks/loader.py --folder DIR [--make ROWS] [--baseline row_loader.py] [--rows 1000000] [--repeats 5]
    [--batch 4096]
        [--merlin PYTHON] [--large]

`row-wise` is a map-style Dataset under torch's DataLoader, the baseline script run as a process. `parquet-plain` and
`parquet-shuffled` are what pyarrow alone decodes from the same files with one thread against our loader that builds
whole batches in one thread too; `arrow-ipc` is our figure for the same rows in Arrow IPC against our figure for
parquet, both shuffled. All take turns, and a ratio is the median of the turns' ratios. `wait-share` and `memory` use
the loader's threads as by default.

`merlin-flat` and `merlin-list` are merlin-dataloader 23.8.0 on the CPU, without the list column and with it, against
our loader with one thread that reads ahead, as merlin has. PYTHON is the interpreter of an environment with
numpy==1.26.4, dask==2023.9.2, distributed==2023.9.2, pyarrow<16, pandas<2.1, betterproto<2, pynvml<11.5,
tensorflow-metadata, numba, npy-append-array and torch, and then, with --no-deps, merlin-dataloader==23.8.0 and
merlin-core==23.8.0. `memory-large-groups` is the peak where a row group has 1,048,576 rows. Last line: one JSON object.
"""

import argparse
import dataclasses
import gc
import importlib.metadata
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.files.sources import ArrowSource, ParquetSource, Source
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.schema import BatchSchema

ROOT = Path(__file__).resolve().parent.parent
IDS = [f"c{at}" for at in range(26)] + ["history"]
FLOATS = [f"d{at}" for at in range(13)]
TABLE = EmbeddingBagConfig(name="ids", embedding_dim=16, num_embeddings=1_000_000, feature_names=IDS)
SCHEMA = BatchSchema.from_tables([TABLE], dense=FLOATS)
FLAT = BatchSchema.from_tables([dataclasses.replace(TABLE, feature_names=IDS[:-1])], dense=FLOATS)
ONE_THREAD = {"prefetch": 0, "read_ahead": 0}
LARGE = 1 << 20  # rows of a large row group


def loader(source: Source, schema: BatchSchema = SCHEMA, **options: Any) -> ChunkLoader:
    return ChunkLoader(
        source, schema, config=LoaderConfig(**{"batch_size": 4096, "negatives": 0, "label": "label"} | options)
    )


def rate(batches: Iterator[Any], rows: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Rows per second, from the second element on: the first of a shuffled stream waits for the whole buffer."""
    size, start = 0, 0.0
    for batch in batches:
        if not start:
            start = clock()
            continue
        size += len(batch)
        if size >= rows:
            break
    return size / (clock() - start)


def decoded(folder: Path) -> Iterator[pa.Table]:
    for path in sorted(folder.glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, use_threads=False)


def row_wise(script: Path, folder: Path, batch: int) -> float:
    best = 0.0
    for workers in (0, 2):
        command = [sys.executable, script, folder, "--batch", str(batch), "--workers", str(workers)]
        output = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
        best = max(best, json.loads(output.splitlines()[-1])["rows_per_s"])
    return best


def to_arrow(folder: Path, target: Path, rows: int) -> ArrowSource:
    tables = decoded(folder)
    first = next(tables)
    with pa.ipc.new_file(target / "rows.arrow", first.schema) as writer:
        writer.write_table(first)
        written = len(first)
        for table in tables:
            writer.write_table(table)
            written += len(table)
            if written > 2 * rows:
                break
    return ArrowSource(target)


def speeds(options: argparse.Namespace, source: Source, ipc: Source) -> dict[str, list[float]]:
    runs: dict[str, Callable[[], Iterator[Any]]] = {
        "pyarrow": lambda: decoded(options.folder),
        "plain": lambda: iter(loader(source, shuffle=False, batch_size=options.batch, **ONE_THREAD)),
        "shuffled": lambda: iter(loader(source, batch_size=options.batch, **ONE_THREAD)),
        "ipc": lambda: iter(loader(ipc, batch_size=options.batch, **ONE_THREAD)),
        "threads": lambda: iter(loader(source, batch_size=options.batch)),
    }
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats):
        for name, run in runs.items():
            clock = time.process_time if options.cpu_seconds and name != "threads" else time.perf_counter
            found[name].append(rate(run(), options.rows, clock))
    return found


def against_merlin(options: argparse.Namespace, source: Source) -> list[dict[str, object]]:
    clock = time.process_time if options.cpu_seconds else time.perf_counter
    script, rows = Path(__file__).with_name("merlin_loader.py"), []
    for name, extra, schema, required in (("merlin-flat", [], FLAT, 1.0), ("merlin-list", ["--list"], SCHEMA, 4.0)):
        found: dict[str, list[float]] = {"merlin": [], "ours": []}
        rows_each = 3 * options.rows  # many of merlin's chunks, since it has read one that is not counted
        command = [
            options.merlin,
            script,
            options.folder,
            "--rows",
            str(rows_each),
            "--batch",
            str(options.batch),
            *extra,
        ]
        command += ["--cpu_seconds"] * options.cpu_seconds
        for _ in range(options.repeats):
            made = subprocess.run([str(part) for part in command], capture_output=True, text=True)
            if made.returncode:
                print(f"{name}: not run, {options.merlin} said: {made.stderr.strip().splitlines()[-1]}")
                return rows
            found["merlin"].append(json.loads(made.stdout.splitlines()[-1])["rows_per_s"])
            batches = iter(loader(source, schema, batch_size=options.batch, prefetch=0, read_ahead=1))
            found["ours"].append(rate(batches, rows_each, clock))
        rows.append(medians(found, name, "ours", "merlin", required))
    return rows


def wait_share(source: Source, batch: int, steps: int = 60) -> tuple[float, float]:
    """(share of the time that a small training loop waits for its batch, seconds per step)."""
    tables = EmbeddingBagCollection(tables=[TABLE])
    sizes = [16 * len(IDS) + len(FLOATS), 256, 64, 1]
    layers = [part for pair in itertools.pairwise(sizes) for part in (torch.nn.Linear(*pair), torch.nn.ReLU())]
    head = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    batches, waited, begun = iter(loader(source, batch_size=batch)), 0.0, 0.0
    for step in range(steps):
        start = time.perf_counter()
        data: TowerBatch = next(batches)
        if step == 5:
            begun, waited = start, 0.0
        waited += time.perf_counter() - start
        with torch.no_grad():  # the lookup alone: a dense gradient of a million rows would hide any wait
            bags = tables(data.sparse).values()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            head(torch.cat([bags, data.dense], 1)).squeeze(1), data.labels
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    took = time.perf_counter() - begun
    return waited / took, took / (steps - 5)


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def memory(folder: Path, rows: int) -> dict[str, float]:
    """Returns MB: before and at the peak of a pass over ``rows`` rows, and growth over 20 epochs and 20 new loaders."""
    before, source = resident(), ParquetSource(folder)
    rate(iter(loader(source)), rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    if source.groups[0].rows == LARGE:
        return {"before": before, "peak": peak}
    with tempfile.TemporaryDirectory() as name:
        with pq.ParquetFile(source.files[0].path) as file:
            table = file.read_row_groups([0, 1])
        pq.write_table(table, Path(name) / "a.parquet", row_group_size=16_384)
        del table
        one, marks = loader(ParquetSource(name)), []
        for epoch in range(25):
            one.set_epoch(epoch)
            sum(len(batch) for batch in one)
            marks.append(settled())
        for _ in range(25):
            next(iter(loader(ParquetSource(name))))
            marks.append(settled())
    return {"before": before, "peak": peak, "epochs": marks[24] - marks[4], "loaders": marks[49] - marks[29]}


def with_large_groups(folder: Path, target: Path, groups: int = 4) -> None:
    """The first rows of the log once more, in row groups of a million rows."""
    tables = decoded(folder)
    first = next(tables)
    held, size = [first], len(first)
    with pq.ParquetWriter(target / "large.parquet", first.schema) as writer:
        for _ in range(groups):
            while size < LARGE:
                held.append(next(tables))
                size += len(held[-1])
            joined = pa.concat_tables(held)
            writer.write_table(joined.slice(0, LARGE), row_group_size=LARGE)
            held, size = [joined.slice(LARGE)], size - LARGE


def memory_of(folder: Path, rows: int) -> dict[str, float]:
    """:func:`memory` in a process of its own."""
    command = [sys.executable, __file__, "--memory", "--folder", folder, "--rows", str(rows)]
    output = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
    return {name: float(value) for name, value in json.loads(output.splitlines()[-1]).items()}


def settled() -> float:
    gc.collect()
    pa.default_memory_pool().release_unused()
    return resident()


def row(
    name: str, baseline: float | None, ours: float, unit: str, ratio: float | None, required: float
) -> dict[str, object]:
    kept = None if ratio is None else round(ratio, 2)
    return {
        "name": name,
        "baseline": baseline,
        "ours": ours,
        "unit": unit,
        "ratio": kept,
        "required": required,
        "ceiling": None,
    }


def medians(found: dict[str, list[float]], name: str, ours: str, baseline: str, required: float) -> dict[str, object]:
    ratios = [mine / other for mine, other in zip(found[ours], found[baseline], strict=True)]
    print(f"{name}: ratios of the turns {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    rows = [round(statistics.median(found[which])) for which in (baseline, ours)]
    return row(name, rows[0], rows[1], "rows/s", statistics.median(ratios), required)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="the click log, as the baseline script writes it")
    parser.add_argument(
        "--make", type=int, help="let the baseline script write so many rows first (10,000,000 are 2 GB)"
    )
    parser.add_argument("--baseline", type=Path, default=ROOT.parent / "shared" / "baselines" / "row_loader.py")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows per measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument(
        "--cpu_seconds", action="store_true", help="per second of CPU where one thread works: others use the machine"
    )
    parser.add_argument(
        "--merlin", type=Path, metavar="PYTHON", help="the interpreter of an environment with merlin-dataloader"
    )
    parser.add_argument(
        "--large", action="store_true", help="also the memory for row groups of a million rows: writes 700 MB"
    )
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    if options.memory:
        print(json.dumps(memory(options.folder, options.rows)))
        return
    if options.make:
        subprocess.run(
            [sys.executable, options.baseline, options.folder, "--make", str(options.make), "--seconds", "1"],
            check=True,
        )
    source = ParquetSource(options.folder)
    with tempfile.TemporaryDirectory(dir=options.folder) as target:
        found = speeds(options, source, to_arrow(options.folder, Path(target), options.rows))
    rows = [
        medians(found, "parquet-plain", "plain", "pyarrow", 0.8),
        medians(found, "parquet-shuffled", "shuffled", "pyarrow", 0.5),
        medians(found, "arrow-ipc", "ipc", "shuffled", 1.5),
    ]
    if options.baseline.exists():
        slow = row_wise(options.baseline, options.folder, options.batch)
        ours = statistics.median(found["shuffled"])
        rows.insert(0, row("row-wise", slow, round(ours), "rows/s", ours / slow, 10))
    else:
        print(f"row-wise: not run, there is no {options.baseline}")
    if options.merlin:
        rows += against_merlin(options, source)
    else:
        print("merlin-flat, merlin-list: not run, merlin-dataloader needs an environment of its own: --merlin PYTHON")
    share, step = wait_share(source, options.batch)
    print(f"wait-share: of steps of {step * 1e3:.1f} ms; with threads {statistics.median(found['threads']):.0f} rows/s")
    rows.append(row("wait-share", None, round(share, 4), "share", None, 0.05))
    used = memory_of(options.folder, 3 * options.rows)
    print(f"memory: {used}")
    rows.append(row("memory", round(used["before"]), round(used["peak"]), "MB", 1000 / used["peak"], 1000))
    rows.append(row("memory-growth-20-epochs", None, round(used["epochs"], 1), "MB", None, 0))
    rows.append(row("memory-growth-20-loaders", None, round(used["loaders"], 1), "MB", None, 0))
    if options.large:
        with tempfile.TemporaryDirectory(dir=options.folder) as target:
            with_large_groups(options.folder, Path(target))
            large = memory_of(Path(target), 3 * options.rows)
        rows.append(
            row("memory-large-groups", round(large["before"]), round(large["peak"]), "MB", 1000 / large["peak"], 1000)
        )
    versions = {
        name: importlib.metadata.version(name) for name in ("torch", "torchrec", "pyarrow", "numpy", "torchrec-ext")
    }
    cores = len(os.sched_getaffinity(0))
    clock = "CPU seconds" if options.cpu_seconds else "seconds"
    print(json.dumps({"benchmark": "loader", "clock": clock, "versions": versions, "cores": cores, "rows": rows}))


if __name__ == "__main__":
    main()
