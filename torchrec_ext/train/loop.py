"""train(): the loop, readable aloud."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer
from tqdm import tqdm

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.train.pipelines import make_pipeline, unpipelined

Record = dict[str, Any]


class Loader(Protocol):
    """Batches of one epoch, as many on every rank."""

    def __iter__(self) -> Iterator[TowerBatch]: ...

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop.

    Args:
        epochs: passes over the data.
        log_every: steps between two records of loss and throughput, besides one at each epoch's end; a record is the only place
            where the loop waits for the device.
        eval_every: epochs between two evaluations; the last epoch is always evaluated.
        seed: of the dense layers, the tables and dropout; added to the loader's, of the order of samples and the negatives.
    """

    epochs: int = 10
    log_every: int = 50
    eval_every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "log_every", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")


class TrainingDivergedError(ValueError):
    """The loss is no longer a number; the message names step, epoch and ranks. Raised on every rank."""


def train(
    model: nn.Module,
    optimizer: KeyedOptimizer,
    loader: Loader,
    runtime: Runtime,
    config: TrainConfig | None = None,
    *,
    evaluate: Callable[[], Record] | None = None,
    log: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Trains ``model`` on TorchRec's pipeline for ``config.epochs`` passes over ``loader``.

    Args:
        model: from :func:`hybrid_parallel`; its forward returns (loss, output with a ``loss`` and ``weights``).
        optimizer: likewise.
        loader: batches; every rank's loader must have as many.
        runtime: this process's place in the job.
        config: the loop.
        evaluate: called on every rank after an epoch; the figures it returns are logged.
        log: called on rank 0 with each record.

    Returns:
        The records, the same on every rank but for throughput: ``kind`` (``train`` or ``eval``), ``epoch``, ``step``, and
        ``loss``, ``rows`` and ``rows_per_s`` over all ranks since the record before, or the figures.

    Raises:
        TrainingDivergedError: the loss is not finite.
    """
    config = config or TrainConfig()
    pipeline = make_pipeline(model, optimizer, runtime.device)
    history: list[Record] = []
    progress = _Progress(total=config.epochs * len(loader), visible=runtime.is_main)

    def keep(record: Record) -> None:
        history.append(record)
        if runtime.is_main:
            progress.show(record)
            if log is not None:
                log(record)

    step = 0
    for epoch in range(config.epochs):
        loader.set_epoch(epoch)
        model.train()
        window = _Window(runtime)
        for output in _outputs(pipeline, iter(loader)):
            step += 1
            window.add(output.loss, output.weights)
            progress.advance()
            if step == 1 and runtime.is_main:
                _warn_unpipelined(unpipelined(pipeline, model))
            if step % config.log_every == 0 or step % len(loader) == 0:
                keep(window.record(epoch, step))
        if evaluate is not None and ((epoch + 1) % config.eval_every == 0 or epoch + 1 == config.epochs):
            pipeline.detach()
            model.eval()
            keep({"kind": "eval", "epoch": epoch, "step": step, **evaluate()})
    pipeline.detach()
    progress.close()
    return history


def _outputs(pipeline: Any, batches: Iterator[TowerBatch]) -> Iterator[Any]:
    while True:
        try:
            yield pipeline.progress(batches)
        except StopIteration:
            return


def _warn_unpipelined(paths: list[str]) -> None:
    if paths:
        print(
            f"not pipelined: {', '.join(paths)}: their input dist does not overlap with the step before; "
            "pass them an attribute of the batch unchanged",
            file=sys.stderr,
        )


class _Window:
    """Loss and rows since the last record, summed on the device so that no step waits for it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._reset()

    def _reset(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._runtime.device)
        self._start = time.perf_counter()

    def add(self, loss: Tensor, weights: Tensor) -> None:
        self._sums += torch.stack([loss.double(), loss.new_ones((), dtype=torch.float64), (weights > 0).sum().double()])

    def record(self, epoch: int, step: int) -> Record:
        """The mean loss over ranks and steps, and rows of all ranks per second of this one."""
        ranks = [torch.zeros_like(self._sums) for _ in range(self._runtime.world_size)]
        dist.all_gather(ranks, self._sums)
        by_rank = torch.stack(ranks).cpu()
        seconds = time.perf_counter() - self._start
        losses = (by_rank[:, 0] / by_rank[:, 1]).tolist()
        _check_finite(losses, epoch, step)
        self._reset()
        return {
            "kind": "train",
            "epoch": epoch,
            "step": step,
            "loss": sum(losses) / len(losses),
            "rows": int(by_rank[:, 2].sum()),
            "rows_per_s": float(by_rank[:, 2].sum()) / seconds,
        }


def _check_finite(losses: list[float], epoch: int, step: int) -> None:
    bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        raise TrainingDivergedError(
            f"the loss is {losses[bad[0]]} on rank(s) {bad} at step {step} of epoch {epoch}; "
            "lower optimizer.tables_lr or optimizer.dense_lr, or look for extreme values in the data of the steps before"
        )


class _Progress:
    """A bar on a terminal; elsewhere a line per record, since a log file keeps every redraw of a bar."""

    def __init__(self, total: int, visible: bool) -> None:
        self._terminal = sys.stderr.isatty()
        self._visible = visible
        self._total = total
        self._bar = tqdm(total=total, unit="step", disable=not (visible and self._terminal))

    def advance(self) -> None:
        self._bar.update()

    def show(self, record: Record) -> None:
        figures = ", ".join(f"{name} {_readable(name, value)}" for name, value in record.items() if isinstance(value, float))
        if self._terminal:
            self._bar.set_postfix_str(figures)
        elif self._visible:
            print(f"epoch {record['epoch'] + 1}, step {record['step']} of {self._total}: {figures}", flush=True)

    def close(self) -> None:
        self._bar.close()


def _readable(name: str, value: float) -> str:
    return f"{value:,.0f}" if name.endswith("_per_s") else f"{value:.4f}"
