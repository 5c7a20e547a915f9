"""The network, the rows and the captured steps of benchmarks/small_model.py."""

import contextlib
import io
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrec_ext.batch import DrawnStep
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import EveryStep, SyncConfig, synchronised
from torchrec_ext.models.ncf import ContextualNCF
from torchrec_ext.train.guards.finite import FiniteLoss
from torchrec_ext.train.report.progress import Window
from torchrec_ext.train.step.captured import CapturedStep, inductor
from torchrec_ext.train.step.choose import Steps, StepsConfig
from torchrec_ext.train.step.pipeline import make_pipeline

NEGATIVES, BATCH = 4, 256


class Shape(NamedTuple):
    """Users, items, positives and dense columns of context."""

    users: int
    items: int
    rows: int
    context: int = 21


SHAPES = {"small": Shape(654, 1_127, 83_731), "full": Shape(250_000, 61_261, 3_647_614)}


def positives(shape: str | Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, items (from 1) and context of every positive."""
    users, items, rows, context = SHAPES[shape] if isinstance(shape, str) else shape
    rng = np.random.default_rng(0)
    user = rng.integers(0, users, rows)
    item = np.minimum((items * rng.random(rows) ** 2.5).astype(np.int64), items - 1) + 1
    return user, item, (rng.random((rows, context), dtype=np.float32) < 0.3).astype(np.float32)


@contextlib.contextmanager
def one_rank() -> Iterator[Runtime]:
    """A process group of one."""
    quiet()
    with Runtime.start("cpu", threads=1) as runtime:
        yield runtime


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    for name in ("torch", "torchrec", "fbgemm_gpu"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Captured:
    """Contextual NCF under hybrid_parallel, its rows in memory, its steps captured.

    Args:
        shape: of the data.
        runtime: this process's place.
        rows: of each table in place of the shape's.
        rule: which tables are moved row by row, in place of the measured rule.
        sync: how ranks are kept alike; without, this rank has all rows.
        shared: towers whose input the rows of a positive and its negatives share.
    """

    def __init__(
        self,
        shape: str,
        runtime: Runtime,
        *,
        rows: int | None = None,
        rule: Callable[[int, int], bool] | None = None,
        sync: SyncConfig | None = None,
        shared: Sequence[str] = ("user",),
    ) -> None:
        own = SHAPES[shape] if rows is None else Shape(rows, rows, 100_000)
        user, item, context = positives(own)
        columns = {f"c{at}": Column(np.ascontiguousarray(context[:, at])) for at in range(own.context)}
        torch.manual_seed(0)
        model = ContextualNCF(
            own.users, own.items + 1, context_dense=list(columns), shared=shared, device=torch.device("meta")
        )
        self.loader = ChunkLoader(
            Chunk({"user_id": Column(user), "item_id": Column(item), **columns}),
            model.schema(),
            config=LoaderConfig(batch_size=BATCH * (runtime.world_size if sync else 1), negatives=NEGATIVES),
            items=Chunk({"item_id": Column(np.arange(own.items + 1))}),
            negatives=UniformNegatives(own.items, user, item),
            device="cpu",
            rank=runtime.rank if sync else 0,
            world_size=runtime.world_size if sync else 1,
        )
        optimizer = OptimizerConfig(tables="adam", tables_lr=1e-3, dense_lr=1e-3)
        self.model, self.optimizer = hybrid_parallel(model, runtime, optimizer=optimizer)
        self.runtime, self.said = runtime, ""
        self.ranks: EveryStep = synchronised(self.model, self.optimizer, sync or SyncConfig())
        self.forward = FiniteLoss(self.model, runtime, len(self.loader), ranks=self.ranks)
        self._window = Window(runtime)
        self._ready: Iterator[Any] = iter(())
        if rule is None:
            pipeline = make_pipeline(self.model, self.optimizer, runtime.device, forward=self.forward)
            steps = Steps(
                self.model,
                self.optimizer,
                runtime,
                pipeline,
                self.forward,
                self.ranks,
                StepsConfig(compile="require", total=1 << 40),
            )
            self._outputs = self._epochs(steps)
        else:
            self._outputs = self._by_rule(rule)

    def _epochs(self, steps: Steps) -> Iterator[Any]:
        for epoch in itertools.count():
            self.loader.set_epoch(epoch)
            yield from steps.outputs(self.loader, iter)

    def _by_rule(self, rule: Callable[[int, int], bool]) -> Iterator[Any]:
        self.eager()()
        step = CapturedStep(self.model, self.optimizer, inductor, rule=rule)
        for epoch in itertools.count():
            self.loader.set_epoch(epoch)
            for item in self.loader.steps():
                if isinstance(item, DrawnStep):
                    yield step(item)[1]

    def step(self) -> int:
        """One step; its instances."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said) if not self.said else contextlib.nullcontext():
            output = next(self._outputs)
        self.said = self.said or said.getvalue().replace("\n", " ")
        self._window.add(output.loss, output.weights)
        return len(output.labels)

    def eager(self) -> Callable[[], int]:
        """A step of the sharded model on one of 50 batches, op by op."""
        given = [item.batch() for item in itertools.islice(self.loader.steps(), 50) if isinstance(item, DrawnStep)]
        turn = itertools.cycle(given)

        def step() -> int:
            batch = next(turn)
            self.optimizer.zero_grad()
            loss, _ = self.model(batch)
            loss.backward()
            self.optimizer.step()
            return len(batch)

        return step

    def uncompiled(self) -> Callable[[], int]:
        """A step as ``train.compile=off`` runs it, on one of 50 batches."""
        given = [item.batch() for item in itertools.islice(self.loader.steps(), 50) if isinstance(item, DrawnStep)]
        pipeline = make_pipeline(self.model, self.optimizer, self.runtime.device, forward=self.forward)
        off = StepsConfig(compile="off", total=1 << 40)
        steps = Steps(self.model, self.optimizer, self.runtime, pipeline, self.forward, self.ranks, off)
        outputs = steps.outputs(itertools.cycle(given), iter)
        return lambda: len(next(outputs).labels)

    def plain_batches(self, count: int) -> list[tuple[torch.Tensor, ...]]:
        """User, item, context and labels of batches, each row by itself."""
        found = []
        for item in itertools.islice(self.loader.steps(), count):
            assert isinstance(item, DrawnStep)
            batch = item.batch()
            if batch.shared is None:
                found.append(
                    (batch.bags("user_id").values(), batch.bags("item_id").values(), batch.dense, batch.labels)
                )
            else:
                index = batch.shared.index
                found.append(
                    (
                        batch.shared.sparse.values()[index],
                        batch.sparse.values(),
                        batch.shared.dense[index],
                        batch.labels,
                    )
                )
        return found
