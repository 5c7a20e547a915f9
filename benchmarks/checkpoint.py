"""What saving costs: the step that starts a save, the disk, memory; what publishing and building a large table take.

    python benchmarks/checkpoint.py [--gb 4] [--folder DIR] [--repeats 3] [--gate]

A table of `--gb` GiB (SGD, so that all of it is weights), row_wise over 2 ranks with one thread each.

- `step`: the step in which a save begins, less the copy of this rank's shard, against a step without; the copy is timed
  by itself.
- `write`: bytes a second from the end of the copy to the manifest, digests of all files included, against `dd
  conv=fsync` of as many bytes into the same folder, in turn.
- `memory`: peak resident memory of a rank while it saves, beyond what it has, in copies of its shard.
- `publish`: peak resident memory beyond what the process has while one file is written from the checkpoint.
- `build`: peak resident memory per rank beyond what it has while a table of half the size is declared on the meta
  device and sharded over 2 ranks, against the table's size.
- `gradient-gate`: see checkpoint_gate.py.

Last line: one JSON object.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from checkpoint_gate import gate_row
from hybrid_ranks import Row, on_ranks, row
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.checkpoint.vectors import publish_weights

DIM, BATCH = 64, 4096
GIB = 2**30


class Bags(nn.Module):
    """One table and a layer over its bags."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="item", feature_names=["item"], num_embeddings=rows, embedding_dim=DIM)
        self.bags = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        self.layer = nn.Linear(DIM, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """(), something to call backward on."""
        return self.layer(self.bags(ids).to_dict()["item"]).square().mean()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def built(runtime: Runtime, rows: int) -> tuple[object, object, int]:
    before = forget_peak()
    optimizers = OptimizerConfig(tables="sgd", tables_lr=0.01)
    model = Bags(rows)
    plan = plan_sharding(model, runtime, PlanConfig(sharding="row_wise"), optimizer=optimizers)
    parallel, optimizer = hybrid_parallel(model, runtime, plan=plan, optimizer=optimizers)
    return parallel, optimizer, peak() - before


def saving(runtime: Runtime, rows: int, folder: str, repeats: int) -> dict[str, float]:
    """Seconds of steps, of the copy and of the writing; bytes of memory."""
    parallel, optimizer, _ = built(runtime, rows)
    generator = torch.Generator().manual_seed(runtime.rank)

    def step() -> float:
        ids = torch.randint(rows, (BATCH,), generator=generator)
        batch = KeyedJaggedTensor.from_lengths_sync(["item"], ids, torch.ones(BATCH, dtype=torch.int64))
        start = time.perf_counter()
        optimizer.zero_grad()
        parallel(batch).backward()
        optimizer.step()
        return time.perf_counter() - start

    def copy(checkpointer: Checkpointer) -> float:
        start = time.perf_counter()
        checkpointer._copied(model_state(parallel, optimizer).everything())
        return time.perf_counter() - start

    for _ in range(10):
        step()
    checkpointer = Checkpointer(folder, runtime, keep=1)
    before = forget_peak()
    checkpointer.save(0, model_state(parallel, optimizer))
    checkpointer.wait()
    memory = peak() - before
    steps, copies, starts, writes = [], [], [], []
    for number in range(1, repeats + 1):
        steps.append(statistics.median(step() for _ in range(20)))
        copies.append(copy(checkpointer))
        start = time.perf_counter()
        state = model_state(parallel, optimizer)
        checkpointer.save(number, state)
        step()
        starts.append(time.perf_counter() - start)
        checkpointer.wait()
        start = time.perf_counter()
        checkpointer.save(number, state)
        begun = time.perf_counter()
        checkpointer.wait()
        writes.append(time.perf_counter() - begun)
    checkpointer.close()
    names = ("step", "copy", "start", "write")
    return {
        name: statistics.median(found) for name, found in zip(names, (steps, copies, starts, writes), strict=True)
    } | {"memory": memory}


def dd(folder: str, size: int) -> float:
    """Seconds in which dd writes and syncs as many bytes."""
    file = f"{folder}/dd"
    start = time.perf_counter()
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={file}", "bs=4M", f"count={size // 2**22}", "conv=fsync", "status=none"], check=True
    )
    seconds = time.perf_counter() - start
    os.unlink(file)
    return seconds


def saves(folder: str, size: int, repeats: int) -> list[Row]:
    rows = size // (4 * DIM)
    disk = [dd(folder, size)]
    ranks = on_ranks(saving, 2, rows, folder, repeats)
    disk += [dd(folder, size) for _ in range(2)]
    slow = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    rate, plain = size / slow["write"] / 2**20, size / statistics.median(disk) / 2**20
    started = slow["start"] - slow["copy"]
    return [
        row(
            "step",
            slow["step"] * 1e3,
            started * 1e3,
            "ms, lower is better",
            started / slow["step"],
            1.3,
            copy_ms=slow["copy"] * 1e3,
        ),
        row("write", plain, rate, "MiB/s", rate / plain, 0.7),
        row(
            "memory", size / 2 / 2**20, slow["memory"] / 2**20, "MiB, lower is better", slow["memory"] / (size / 2), 1.1
        ),
    ]


def published(_: Runtime, path: str, file: str) -> int:
    before = forget_peak()
    publish_weights(path, Path(file))
    return peak() - before


def publishes(folder: str, size: int) -> Row:
    path = next(str(found.parent) for found in Path(folder).glob("step-*/manifest.json"))
    extra = on_ranks(published, 1, path, f"{folder}/model.safetensors")[0]
    assert os.path.getsize(f"{folder}/model.safetensors") > size
    return row("publish", size / 2**20, extra / 2**20, "MiB, lower is better", extra / size, 500 * 2**20 / size)


def building(runtime: Runtime, rows: int) -> int:
    return built(runtime, rows)[2]


def builds(size: int) -> Row:
    extra = max(on_ranks(building, 2, size // (4 * DIM)))
    return row("build", size / 2**20, extra / 2**20, "MiB, lower is better", extra / size, 0.7)


def on_disk(size: int, folder: Path | None, repeats: int) -> list[Row]:
    rows = [builds(size // 2)]
    place = tempfile.mkdtemp(dir=folder)
    try:
        rows += saves(place, size, repeats)
        rows.append(publishes(place, size))
    finally:
        shutil.rmtree(place)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="GiB of the table")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; the system's temporary folder where not given"
    )
    parser.add_argument("--repeats", type=int, default=3, help="saves, of which the median counts")
    parser.add_argument("--gate", action="store_true", help="the row gradient-gate alone, which writes nothing")
    options = parser.parse_args()
    rows = [gate_row(max(options.repeats, 5))]
    if not options.gate:
        rows += on_disk(int(options.gb * GIB), options.folder, options.repeats)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchrec")}
    print(
        json.dumps(
            {"benchmark": "checkpoint", "versions": versions, "cores": len(os.sched_getaffinity(0)), "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
