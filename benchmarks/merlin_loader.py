"""How fast merlin-dataloader turns a click log into batches on the CPU: a child of benchmarks/loader.py.

    python benchmarks/merlin_loader.py FOLDER [--list] [--rows 1000000] [--batch 4096] [--cpu_seconds]

Needs merlin-dataloader==23.8.0 and torch, and imports nothing of torchrec_ext, since its numpy, dask and pyarrow are
older ones: benchmarks/loader.py says which. One thread beside the caller's reads ahead, as merlin-dataloader does by
itself. Last line: one JSON object.
"""

import argparse
import importlib.metadata
import json
import os
import time
import warnings
from pathlib import Path

import dask
import merlin.io
import torch
from merlin.dataloader.torch import Loader

SCALARS = [f"c{at}" for at in range(26)] + [f"d{at}" for at in range(13)] + ["label"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--list", action="store_true", help="read the list column too")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--cpu_seconds", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dask.config.set({"dataframe.convert-string": False})  # it would take lists for texts
    files = sorted(str(path) for path in options.folder.glob("*.parquet"))
    data = merlin.io.Dataset(files, engine="parquet", cpu=True, part_size="100MB")
    data.schema = data.schema.select_by_name(SCALARS + ["history"] * options.list)
    clock = time.process_time if options.cpu_seconds else time.perf_counter
    size, start = 0, 0.0
    for inputs, _ in Loader(data, batch_size=options.batch, shuffle=True, device="cpu"):
        if not start:  # the first batch waits for the first chunk
            start = clock()
            continue
        size += len(inputs["c0"])
        if size >= options.rows:
            break
    taken = clock() - start
    names = ("merlin-dataloader", "merlin-core", "numpy", "dask", "pyarrow", "torch")
    versions = {name: importlib.metadata.version(name) for name in names}
    print(json.dumps({"rows_per_s": round(size / taken), "columns": len(inputs), "versions": versions}), flush=True)
    os._exit(0)  # merlin's own thread may wait for ever to hand over a chunk that nobody takes


if __name__ == "__main__":
    main()
