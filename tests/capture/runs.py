"""Runs of a small model, eager and captured, as tests compare them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from tests.contracts import gather_state
from tests.examples import META, batches, small_model
from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture import policy
from torchrec_ext.capture.executors import StepExecutor
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.loop import TrainConfig, train
from torchrec_ext.train.step import choose as steps


class Given:
    """A loader of given batches."""

    def __init__(self, given: Sequence[TowerBatch]) -> None:
        self._batches = given

    def __iter__(self) -> Iterator[TowerBatch]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        pass


class Few(Given):
    """Batches of several sizes."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__([next(batches(1, size, seed=size)) for size in sizes])


class Ended(NamedTuple):
    """How a run ended: the error, if any, the weights, what was said, and how often it captured a step."""

    error: str
    state: dict[str, Tensor]
    said: str
    captures: int


def ended(
    runtime: Runtime,
    loader: Given,
    engine: StepExecutor,
    compile_: Any,
    model: nn.Module | None = None,
    *,
    epochs: int = 1,
    patience: int = 0,
    tables: Any = "adam",
) -> Ended:
    """Trains; two steps are watched, the third is captured."""
    policy.PAYS_S, policy.WATCHED, policy.PATIENCE = {"cpu": 0.0}, 2, patience
    captures = 0

    def counting(step: Any, memory: Any, inputs: Any) -> Any:
        nonlocal captures
        captures += 1
        return engine(step, memory, inputs)

    steps.engine_for = lambda _: (counting, "capturing")
    sharded, optimizer = hybrid_parallel(
        model or small_model(META),
        runtime,
        optimizer=OptimizerConfig(tables=tables, tables_lr=0.01),
    )
    said, error = io.StringIO(), ""
    with contextlib.redirect_stdout(said):
        try:
            config = TrainConfig(epochs=epochs, compile=compile_)
            train(sharded, optimizer, loader, runtime, config)  # type: ignore[arg-type]
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
    return Ended(error, gather_state(sharded) or {}, said.getvalue(), captures)
