"""train(): the loop, readable aloud."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.hybrid_optimizer import GradientNotFiniteError
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import UnevenStepsError as UnevenStepsError
from torchrec_ext.distributed.sync import synchronised
from torchrec_ext.distributed.sync_config import SyncConfig
from torchrec_ext.train.early_stop import EarlyStop, EarlyStopWatch
from torchrec_ext.train.even_steps import check_even, exactly
from torchrec_ext.train.finite import FiniteLoss
from torchrec_ext.train.finite import TrainingDivergedError as TrainingDivergedError
from torchrec_ext.train.pipelines import make_pipeline, unpipelined
from torchrec_ext.train.progress import Progress, Window
from torchrec_ext.train.schedule import Schedule, rates, scheduler
from torchrec_ext.train.timeline import Timeline
from torchrec_ext.train.tracing import StepTrace, check_fits

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
        tables_schedule: how the tables' learning rates change over the run.
        dense_schedule: how the dense layers' do.
        early_stop: after which evaluations the run ends before its last epoch.
        trace_steps: steps, after the first five, that the timeline of all ranks shows; 0 for none.
    """

    epochs: int = 10
    log_every: int = 50
    eval_every: int = 1
    seed: int = 0
    tables_schedule: Schedule = field(default_factory=Schedule)
    dense_schedule: Schedule = field(default_factory=Schedule)
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    trace_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "log_every", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        if self.trace_steps < 0:
            raise ValueError(f"trace_steps={self.trace_steps}: must be 0 or more")


def train(
    model: nn.Module,
    optimizer: KeyedOptimizer,
    loader: Loader,
    runtime: Runtime,
    config: TrainConfig | None = None,
    *,
    evaluate: Callable[[], Record] | None = None,
    log: Callable[[Record], None] | None = None,
    sync: SyncConfig | None = None,
    timeline: Callable[[Timeline], None] | None = None,
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
        sync: how often ranks exchange what; the gradients in every step where not given. Evaluations, which stand at the end of an
            epoch, and the caller find all ranks equal.
        timeline: called on rank 0 with that of ``config.trace_steps``.

    Returns:
        The records, the same on every rank but for throughput. Each has ``kind``, ``epoch`` and ``step``. ``train``: ``loss``,
        ``rows`` and ``rows_per_s`` over all ranks since the record before, and the learning rates where a schedule changes them.
        ``eval``: the figures, and ``best`` where it is the best so far of an early stop's metric. ``stop``, the last one after an
        early stop: its ``metric``, ``best``, ``best_epoch``, ``best_step`` and a ``message``. ``timeline``: what ran at the same
        time, see :func:`overlap`. Before a diverged run ends, ``log`` gets one of kind ``error`` with its ``message``.

    Raises:
        TrainingDivergedError: the loss or a gradient is not finite, on every rank alike.
        UnevenStepsError: the ranks' loaders are not of one length, on every rank alike; or one breaks its word.
        ValueError: a warm-up or a timeline longer than the run, or an early stop by a figure that is not evaluated.
    """
    config = config or TrainConfig()
    if config.early_stop.metric and evaluate is None:
        raise ValueError(f"train.early_stop.metric={config.early_stop.metric!r}, but nothing is evaluated: pass evaluate")
    check_even(loader, runtime)
    steps = config.epochs * len(loader)
    changing = config.tables_schedule.changes or config.dense_schedule.changes
    schedule = scheduler(optimizer, config.tables_schedule, config.dense_schedule, steps) if changing else None
    watch = EarlyStopWatch(config.early_stop, runtime)
    check_fits(config.trace_steps, steps)
    trace = StepTrace(model, runtime, config.trace_steps, timeline) if config.trace_steps else None
    history: list[Record] = []
    progress = Progress(total=steps, visible=runtime.is_main)

    def keep(record: Record) -> None:
        history.append(record)
        if runtime.is_main:
            progress.show(record)
            if log is not None:
                log(record)

    step = 0
    sync = sync or SyncConfig()
    with synchronised(model, optimizer, sync) as ranks:
        forward = FiniteLoss(model, runtime, len(loader), ranks=ranks)
        ranks.checks.append(forward.settle)
        pipeline = make_pipeline(model, optimizer, runtime.device, forward=forward, sync=sync)
        for epoch in range(config.epochs):
            loader.set_epoch(epoch)
            model.train()
            window = Window(runtime)
            try:
                for output in _outputs(pipeline, exactly(loader)):
                    step += 1
                    window.add(output.loss, output.weights)
                    progress.advance()
                    if trace is not None and (overlap := trace.step()) is not None:
                        keep({"kind": "timeline", "epoch": epoch, "step": step, **overlap})
                    if step == 1 and runtime.is_main:
                        _warn_unpipelined(unpipelined(pipeline, model))
                    if step % config.log_every == 0 or step % len(loader) == 0:
                        forward.settle()
                        keep({**window.record(epoch, step), **(rates(optimizer) if schedule else {})})
                    if schedule:
                        schedule.step()
                ranks.settle()
            except (GradientNotFiniteError, TrainingDivergedError) as error:
                told = forward.explained(error)
                keep({"kind": "error", "epoch": forward.epoch(told.step), "step": told.step, "message": str(told)})
                raise told from None
            pipeline.detach()  # an evaluation, or a loader that asks the model for hard negatives, runs it outside the pipeline
            if evaluate is not None and ((epoch + 1) % config.eval_every == 0 or epoch + 1 == config.epochs):
                model.eval()
                record = {"kind": "eval", "epoch": epoch, "step": step, **evaluate()}
                keep({**record, "best": True} if watch.see(record) else record)
                if (stop := watch.stops()) and epoch + 1 < config.epochs:
                    keep({"epoch": epoch, "step": step, **stop})
                    break
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
