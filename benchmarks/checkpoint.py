"""What saving costs: the step that saves, the steps while it is written, the disk, memory; publishing and building.

    python benchmarks/checkpoint.py [--only ROW ...] [--turns 3] [--quick]

Two towers with a table of items of 1 GiB (SGD, so that all of it is weights), row_wise over 2 ranks with one thread
each, 4,096 rows a rank, in the system's temporary folder.

`step`: the step that saves, the copy of the state included, in milliseconds, and `steps while writing`: a step while
the checkpoint is written. Both are steps of `train()` with checkpoint.steps, as every command runs it, against its
steps in which nothing is written, and `save_costs_ms` is what one save adds to the run in all. `write`: bytes a second
from the end of the copy to the manifest, digests of all files included, as the last save of a run is written, against
`dd conv=fsync` of as many bytes into the same folder, in turn. `memory`: a rank's shard against the peak of its memory
while it saves, beyond what it has; `publish`: the table against the peak while one file is written from the
checkpoint; `build`: a table of .5 GiB against a rank's peak while it is declared on the meta device and sharded.
Last line: one JSON object.
"""

import functools
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from harness import LIMIT_S, Options, Row, command_line, on_ranks, rates, row, slowest
from torchrec import EmbeddingBagConfig

from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.run import CheckpointConfig, RunCheckpoints
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.checkpoint.vectors import publish_weights
from torchrec_ext.train.config import TrainConfig
from torchrec_ext.train.loop import train

DIM, BATCH, USERS = 64, 4096, 10_000
GIB = 2**30
EVERY = 100  # steps between two saves


def table(name: str, rows: int) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, feature_names=[name], num_embeddings=rows, embedding_dim=DIM
    )


def towers(rows: int) -> TowerModel:
    return two_tower(
        [table("user_id", USERS)],
        [table("item_id", rows)],
        tower_widths=(64, 32),
        top_widths=(32,),
        device=torch.device("meta"),
    )


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def memory_beyond(work: Callable[[], object]) -> int:
    """Bytes of the peak of this process's memory while it works, beyond what it has before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    work()
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024 - before


class Built:
    """The model of ``rows`` items, sharded over the ranks, and its optimizer."""

    def __init__(self, runtime: Runtime, rows: int) -> None:
        optimizers = OptimizerConfig(tables="sgd", tables_lr=0.01)
        model = towers(rows)
        self.schema = model.schema()
        plan = plan_sharding(
            model, runtime, PlanConfig(sharding="row_wise"), optimizer=optimizers
        )
        self.model, self.optimizer = hybrid_parallel(
            model, runtime, plan=plan, optimizer=optimizers
        )


def building(runtime: Runtime, rows: int) -> int:
    return memory_beyond(lambda: Built(runtime, rows))


def loader(built: Built, runtime: Runtime, rows: int, steps: int) -> ChunkLoader:
    rng = np.random.default_rng(0)
    count = 2 * BATCH * steps
    columns = {
        "user_id": Column(rng.integers(0, USERS, count)),
        "item_id": Column(rng.integers(0, rows, count)),
        "label": Column((rng.random(count) < 0.3).astype(np.float32)),
    }
    config = LoaderConfig(batch_size=2 * BATCH, negatives=0, label="label")
    return ChunkLoader(
        Chunk(columns),
        built.schema,
        config=config,
        device="cpu",
        rank=runtime.rank,
        world_size=runtime.world_size,
    )


class Watch:
    """The seconds of each step of `train()`, and whether a checkpoint was being written at its end.

    `train()` calls it as ``stop``, once in each step, before it is known whether the step's loss is finite.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self.ends: list[float] = []
        self.writing: list[bool] = []

    def __call__(self) -> bool:
        """Notes the time; the run goes on."""
        self.ends.append(time.perf_counter())
        running = self._checkpointer._running
        self.writing.append(running is not None and not running.future.done())
        return False

    def by_save(self, every: int) -> dict[str, list[float]]:
        """Milliseconds by save, the first left out: a plain step, the one that saves, one while writing, all of it."""
        milliseconds = 1e3 * np.diff(self.ends)
        saves = [
            number
            for number in range(1, len(self.ends))
            if self.writing[number] and not self.writing[number - 1]
        ]
        figures: dict[str, list[float]] = {
            "plain": [],
            "saving": [],
            "writing": [],
            "cost": [],
        }
        for save in saves[1:]:
            after = save + next(
                n
                for n, writes in enumerate([*self.writing[save:], False])
                if not writes
            )
            if after - save >= every:
                raise RuntimeError(
                    f"a checkpoint was written for more than {every} steps; give EVERY more"
                )
            plain = float(np.mean(milliseconds[save - 21 : save - 1]))
            writing = milliseconds[save : after - 1]
            figures["plain"].append(plain)
            figures["saving"].append(float(milliseconds[save - 1]))
            figures["writing"].append(float(writing.mean()))
            figures["cost"].append(
                float(milliseconds[save - 1 : after - 1].sum() - plain * (after - save))
            )
        return figures


def training(
    built: Built, runtime: Runtime, folder: str, rows: int, every: int, turns: int
) -> dict[str, list[float]]:
    """Milliseconds of the steps of a run that saves every so many steps."""
    config = CheckpointConfig(epochs=0, steps=every, keep=1)
    batches = loader(built, runtime, rows, every * (turns + 2))
    checkpointer = Checkpointer(folder, runtime, keep=1)
    watch, checkpoints = Watch(checkpointer), RunCheckpoints(checkpointer, config)
    train(
        built.model,
        built.optimizer,
        batches,
        runtime,
        TrainConfig(epochs=1),
        checkpoints=checkpoints,
        stop=watch,
    )
    return watch.by_save(every)


def dd(folder: str, size: int) -> None:
    """Has dd write and sync as many bytes."""
    line = [
        "dd",
        "if=/dev/zero",
        f"of={folder}/dd",
        "bs=4M",
        f"count={size // 2**22}",
        "conv=fsync",
        "status=none",
    ]
    subprocess.run(line, check=True, timeout=LIMIT_S)


def seconds(work: Callable[[], object]) -> float:
    os.sync()  # what was deleted or written before is not this side's
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def saving(
    runtime: Runtime, rows: int, folder: str, every: int, turns: int
) -> dict[str, list[float]]:
    """Milliseconds of steps by save; seconds of the copy, the writing and of dd by turn; bytes of memory."""
    built = Built(runtime, rows)
    checkpointer = Checkpointer(f"{folder}/alone", runtime, keep=1)

    def save(step: int) -> None:
        checkpointer.save(step, model_state(built.model, built.optimizer))

    def first() -> None:
        save(0)
        checkpointer.wait()

    figures: dict[str, list[float]] = {
        "memory": [memory_beyond(first)],
        "copy": [],
        "write": [],
        "dd": [],
    }
    for turn in range(1, turns + 1):
        figures["dd"].append(
            seconds(lambda: dd(folder, 4 * rows * DIM) if runtime.is_main else None)
        )
        dist.barrier()
        if runtime.is_main:
            os.unlink(f"{folder}/dd")
        figures["copy"].append(seconds(functools.partial(save, turn)))
        start = time.perf_counter()
        checkpointer.wait()
        figures["write"].append(time.perf_counter() - start)
    checkpointer.close()
    if runtime.is_main:
        shutil.rmtree(f"{folder}/alone")
    return figures | training(built, runtime, f"{folder}/run", rows, every, turns)


def published(_: Runtime, path: str, file: str) -> int:
    return memory_beyond(lambda: publish_weights(path, Path(file)))


def mib(count: float) -> float:
    return count / 2**20


def named(size: int) -> str:
    return f"{size / GIB:.4g} GiB"


def saves(options: Options) -> Iterator[Row]:
    size = GIB // 16 if options.quick else GIB
    rows = size // (4 * DIM)
    with tempfile.TemporaryDirectory() as folder:
        ranks = on_ranks(
            saving, 2, rows, folder, 40 if options.quick else EVERY, options.turns
        )
        slow = slowest(ranks)
        path = next(
            str(file.parent) for file in Path(folder).glob("run/step-*/manifest.json")
        )
        file = f"{folder}/model.safetensors"
        extra = on_ranks(published, 1, path, file)[0]
        assert os.path.getsize(file) > size
    plain = slow["plain"]
    copy_ms, costs_ms = (
        round(scale * statistics.median(slow[name]), 1)
        for name, scale in (("copy", 1e3), ("cost", 1))
    )
    yield row(
        "step",
        slow["saving"],
        "ms",
        baseline=plain,
        table=named(size),
        copy_ms=copy_ms,
        save_costs_ms=costs_ms,
    )
    yield row(
        "steps while writing", slow["writing"], "ms", baseline=plain, table=named(size)
    )
    yield row(
        "write",
        rates(mib(size), slow["write"]),
        "MiB/s",
        baseline=rates(mib(size), slow["dd"]),
        better="more",
        required=0.7,
        machine="disk",
        table=named(size),
    )
    memory = max(rank["memory"][0] for rank in ranks)
    yield row(
        "memory",
        mib(memory),
        "MiB",
        baseline=mib(size / 2),
        required=1 / 1.1,
        table=named(size),
    )
    yield row(
        "publish",
        mib(extra),
        "MiB",
        baseline=mib(size),
        required=mib(size) / 500,
        table=named(size),
    )


def builds(options: Options) -> Iterator[Row]:
    size = GIB // 32 if options.quick else GIB // 2
    extra = max(on_ranks(building, 2, size // (4 * DIM)))
    yield row(
        "build",
        mib(extra),
        "MiB",
        baseline=mib(size),
        required=1 / 0.7,
        table=named(size),
    )


ROWS = {"saves": saves, "build": builds}


if __name__ == "__main__":
    command_line(__doc__, ROWS, turns=3)
