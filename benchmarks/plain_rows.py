"""A click log in parquet read as most users do it: a map-style Dataset, and torch's DataLoader that collates rows.

    python benchmarks/plain_rows.py FOLDER [--workers 0] [--seconds 10]

`make()` writes the log that benchmarks/loader.py reads. Needs torch, numpy, pyarrow, and imports nothing of
torchrec_ext. Last line: one JSON object with rows a second, counted after the first batch.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset

CATEGORICAL, DENSE, FILES, GROUP = 26, 13, 4, 65_536


def make(folder, rows):
    """Writes 26 categorical columns, 13 float, one list of 0 to 20 ids and a label into four files."""
    rng, count = np.random.default_rng(0), rows // FILES
    for number in range(FILES):
        lengths = rng.integers(0, 21, count)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        columns = {
            f"c{column}": rng.integers(0, 10 ** rng.integers(2, 7), count)
            for column in range(CATEGORICAL)
        }
        columns |= {
            f"d{column}": rng.normal(size=count).astype(np.float32)
            for column in range(DENSE)
        }
        ids = pa.array(rng.integers(0, 200_000, int(offsets[-1])))
        columns["history"] = pa.ListArray.from_arrays(pa.array(offsets), ids)
        columns["label"] = (rng.random(count) < 0.03).astype(np.float32)
        pq.write_table(
            pa.table(columns), folder / f"part-{number}.parquet", row_group_size=GROUP
        )


class Clicks(Dataset[Any]):
    """The rows of the first file, one at a time."""

    def __init__(self, folder):
        table = pq.read_table(min(folder.glob("*.parquet")))
        ids, dense = (
            [table[f"{kind}{column}"].to_numpy() for column in range(count)]
            for kind, count in (("c", CATEGORICAL), ("d", DENSE))
        )
        self.categorical, self.dense = np.stack(ids, 1), np.stack(dense, 1)
        lists = table["history"].combine_chunks()
        self.history = np.split(lists.values.to_numpy(), lists.offsets.to_numpy()[1:-1])
        self.label = table["label"].to_numpy()

    def __len__(self):
        return len(self.label)

    def __getitem__(self, row):
        ids = torch.as_tensor(self.history[row])
        return (
            torch.from_numpy(self.categorical[row]),
            torch.from_numpy(self.dense[row]),
            ids,
            self.label[row],
        )


def collate(rows):
    """Joins rows to a batch."""
    categorical, dense, history, label = zip(*rows, strict=True)
    lengths = torch.tensor([len(ids) for ids in history])
    return (
        torch.stack(categorical),
        torch.stack(dense),
        torch.cat(history),
        lengths,
        torch.tensor(label),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, start = 0, 0.0
    batches = DataLoader(
        Clicks(options.folder),
        batch_size=4096,
        shuffle=True,
        num_workers=options.workers,
        collate_fn=collate,
    )
    for batch in batches:
        if not start:
            start = time.perf_counter()
            continue
        rows += len(batch[-1])
        if time.perf_counter() - start > options.seconds:
            break
    print(json.dumps({"rows_per_s": round(rows / (time.perf_counter() - start))}))


if __name__ == "__main__":
    main()
