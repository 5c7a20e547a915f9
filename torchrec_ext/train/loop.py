"""train(): the training loop.

Settings that exclude each other are refused before the first step. So are loaders of unequal lengths, on all ranks:
otherwise the job would hang in the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from torchrec_ext.batch import Fresh, TowerBatch
from torchrec_ext.capture.policy import TrainingDivergedError as TrainingDivergedError
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.runtime import Runtime, gather_objects
from torchrec_ext.distributed.sync import EveryStep, SyncConfig, synchronised
from torchrec_ext.distributed.sync import UnevenStepsError as UnevenStepsError
from torchrec_ext.drawn import DrawnStep
from torchrec_ext.schema.validation import listed
from torchrec_ext.train.checkpoint.run import Position, RunCheckpoints
from torchrec_ext.train.config import Record
from torchrec_ext.train.config import TrainConfig as TrainConfig
from torchrec_ext.train.early_stop import EarlyStopWatch
from torchrec_ext.train.guards import Guard, RunStoppedError, Watchdog
from torchrec_ext.train.report.progress import Progress, Window
from torchrec_ext.train.step.choose import Steps, StepsConfig
from torchrec_ext.train.step.fresh_rows import FreshRows
from torchrec_ext.train.step.pipeline import make_pipeline
from torchrec_ext.train.step.precision import (
    LossScaling,
    forward_context,
    training_forward,
)
from torchrec_ext.train.step.schedule import rates, scheduler


def scaling(
    config: TrainConfig, sync: SyncConfig, optimizer: HybridOptimizer, runtime: Runtime
) -> LossScaling | None:
    """Returns the scaling of the loss for float16, else None."""
    if config.amp != "fp16":
        return None
    if sync.takes_local_steps:
        raise ValueError(
            f"train.amp=fp16 with sync.mode={sync.mode}: ranks must agree to leave out a step whose gradients "
            "overflow; set sync.mode=every_step, or train.amp=bf16"
        )
    return LossScaling(optimizer, runtime.device)


def check_even(loader: Sized, runtime: Runtime) -> None:
    """Checks that the ranks' loaders have one length; all ranks call it.

    Raises:
        UnevenStepsError: the lengths differ; the same message on every rank.
    """
    lengths = gather_objects(len(loader), runtime.world_size)
    if len(set(lengths)) > 1:
        by_rank = ", ".join(
            f"rank {rank}: {length}" for rank, length in enumerate(lengths)
        )
        raise UnevenStepsError(
            f"loader: ranks have unequal numbers of batches in an epoch, {by_rank}; pad the last "
            "batches with rows of weight 0, or drop them"
        )


def exactly(loader: Loader, *, after: int = 0) -> Iterator[TowerBatch]:
    """Yields an epoch's batches, and checks that they are ``len(loader)`` in all; the first is number ``after`` + 1.

    Raises:
        UnevenStepsError: their number is not ``len(loader)``, which the other ranks rely on. The error ends this rank
            at once, and thereby the others, which would wait for it.
    """
    number = after
    for number, batch in enumerate(loader, after + 1):
        if number > len(loader):
            break
        yield batch
    if number != len(loader):
        actual = "more"
        if number < len(loader):
            actual = f"only {number}"
        raise UnevenStepsError(
            f"loader: len(loader) is {len(loader)}, but it gave {actual} batches: other ranks count on its length"
        )


def check_output(output: Any, names: Sequence[str]) -> None:
    """Checks that a model's output has some fields.

    Raises:
        ValueError: it lacks one of ``names``.
    """
    missing = [name for name in names if not hasattr(output, name)]
    if missing:
        raise ValueError(
            f"the model's output, a {type(output).__name__}, has no {listed(missing)}; forward returns (loss, output), "
            "a NamedTuple with loss, weights, logits and labels"
        )


class StepObserver(Protocol):
    """Looks at the output of each step, such as predictions made before the step trains its rows.

    If it has sums since the last record, equal on all ranks, its ``state_dict()`` returns them for JSON, and after a
    resume its ``load_state_dict()`` gets them.
    """

    def see(self, output: Any) -> None:
        """Takes the model's output; the next step may overwrite its tensors."""

    def figures(self) -> Record:
        """Returns figures of the steps since the last call, for the record of them."""


class Loader(Protocol):
    """An iterable of the batches of one epoch, equally many on every rank."""

    def __iter__(self) -> Iterator[TowerBatch]: ...

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass."""


def train(
    model: nn.Module,
    optimizer: HybridOptimizer,
    loader: Loader,
    runtime: Runtime,
    config: TrainConfig | None = None,
    *,
    evaluate: Callable[[], Record] | None = None,
    log: Callable[[Record], None] | None = None,
    sync: SyncConfig | None = None,
    checkpoints: RunCheckpoints | None = None,
    stop: Callable[[], bool] | None = None,
    watchdog: Watchdog | None = None,
    observer: StepObserver | None = None,
) -> list[Record]:
    """Trains ``model`` on TorchRec's pipeline for ``config.epochs`` passes over ``loader``.

    If an early stop watches a figure, the model ends with the weights of its best evaluation, see
    :class:`EarlyStop`.

    Args:
        model: model from :func:`hybrid_parallel`; its forward returns (loss, output with a ``loss`` and ``weights``).
        optimizer: optimizer from :func:`hybrid_parallel`.
        loader: batches; equally many on every rank. On one rank its length may be ``ENDLESS`` until it has ended.
        runtime: rank and device of this process.
        config: settings of the loop.
        evaluate: called on every rank after an epoch; the figures it returns are logged.
        log: called on rank 0 with each record.
        sync: how often ranks exchange what; by default the gradients in every step. All ranks are equal in an
            evaluation, at the end of an epoch, and on return.
        checkpoints: saves the run, and restores its position; the loader must then be able to resume.
        watchdog: watchdog, told of each step.
        stop: called on every rank after each step; if it returns True on one rank, the run is saved and ends on all.
        observer: sees the output of each step, and adds figures to the records of kind ``train``.

    Returns:
        The records, the same on every rank but for throughput; of a resumed run those since then, of an endless one
        none. Each has ``kind``, ``epoch``, counted from 1, and ``step``. ``train``: ``loss``, ``rows`` and
        ``rows_per_s`` over all ranks since the record before; ``data_wait``, the share of that time spent waiting for
        batches, on the rank that waited longest; ``ranks_wait``, the share in collectives, see :meth:`Window.take`;
        the learning rates if a schedule changes them; and the figures of dynamic ids, see
        :meth:`DynamicIdLoader.figures`. ``eval``: the figures, and ``best`` if it is the best so far by the early
        stop's metric. ``stop``, the last one after an early stop: its ``metric``, ``best``, ``best_epoch``,
        ``best_step`` and a ``message``. Before a diverged run ends, ``log`` gets one of kind ``error`` with its
        ``message``. Two kinds are logged but not returned: ``steps`` says whether steps were ``captured``, with the
        milliseconds of a step, and ``restore`` that the weights are those of the best evaluation.

    Raises:
        TrainingDivergedError: the loss is not finite, on every rank alike.
        RunStoppedError: ``stop`` returned True.
        UnevenStepsError: the ranks' loaders have different lengths, on every rank alike; or one gives another number.
        ValueError: another optimizer, a warm-up longer than the run, or an early stop by a figure not evaluated.
    """
    config = config or TrainConfig()
    sync = sync or SyncConfig()
    if not isinstance(optimizer, HybridOptimizer):
        raise ValueError(
            f"optimizer: a {type(optimizer).__name__}; train() takes the one that hybrid_parallel() returns"
        )
    stop_early = config.early_stop
    if stop_early.metric and evaluate is None:
        raise ValueError(
            f"train.early_stop.metric={stop_early.metric!r}, but nothing is evaluated: give the data a split "
            "'validation', or pass evaluate"
        )
    saves = checkpoints is not None and checkpoints.saves
    if stop_early.metric and stop_early.restore and not saves:
        raise ValueError(
            f"train.early_stop.metric={stop_early.metric!r}: the best weights are restored from a checkpoint, but none "
            "is saved; pass checkpoints, or set train.early_stop.restore=false"
        )
    check_even(loader, runtime)
    with synchronised(model, optimizer, sync) as ranks:
        run = TrainingRun(
            model,
            optimizer,
            loader,
            runtime,
            config,
            sync=sync,
            ranks=ranks,
            checkpoints=checkpoints,
            observer=observer,
            watchdog=watchdog,
            log=log,
            stop=stop,
        )
        while run.at.epoch < config.epochs and not run.over:
            run.train_epoch()
            run.end_epoch(evaluate)
        run.restore_best()
        run.close()
    return run.records.history


@dataclass
class _Records:
    """The records of a run: kept in a history, unless the run is endless, shown, and logged."""

    at: Position
    progress: Progress
    log: Callable[[Record], None]
    history: list[Record] = field(default_factory=list)

    def stamped(self, kind: str, **figures: Any) -> Record:
        """Returns a record of this moment."""
        now = {"kind": kind, "epoch": self.at.epoch + 1, "step": self.at.step}
        return now | figures

    def keep(self, record: Record) -> None:
        """Adds a record to the history."""
        self.at.records += 1
        if self.progress.is_bounded:
            self.history.append(record)
        self.progress.show(record)
        self.log(record)

    def tell(self, record: Record) -> None:
        """Shows and logs the message of a record that is no part of the history."""
        self.progress.say(record["message"])
        self.log(record)


class TrainingRun:
    """The state of one call of :func:`train`: its collaborators and its position."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: HybridOptimizer,
        loader: Loader,
        runtime: Runtime,
        config: TrainConfig,
        *,
        sync: SyncConfig,
        ranks: EveryStep,
        checkpoints: RunCheckpoints | None,
        observer: StepObserver | None,
        watchdog: Watchdog | None,
        log: Callable[[Record], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        # With checkpoints, one that can resume.
        self.loader: Any = loader
        self.runtime = runtime
        self.config = config
        self.ranks = ranks
        self.checkpoints = checkpoints
        self.observer: Any = observer
        self.watchdog = watchdog
        self._fresh_rows: FreshRows | None = None
        total = config.epochs * len(loader)
        self.schedule = None
        if config.schedule.changes:
            self.schedule = scheduler(optimizer, config.schedule, total)
        self.watch = EarlyStopWatch(config.early_stop, runtime)
        self.window = Window(runtime)
        self.over = False
        self.at = Position()
        # Before the forward, the pipeline and Steps are made: they begin at the
        # restored position.
        if checkpoints is not None:
            self.at = checkpoints.restore(self)
        # Records are the same on all ranks, so one of them logs.
        if log is None or not runtime.is_main:
            log = lambda _: None  # noqa: E731
        progress = Progress(total=total, visible=runtime.is_main, done=self.at.step)
        self.records = _Records(self.at, progress, log)
        self.guard = Guard(runtime, len(loader), self.at.step, stop)
        self.steps = _steps_of(self, sync, total - self.at.step)
        self._resume()

    def _resume(self) -> None:
        if self.schedule is not None and self.at.step:
            # The rate depends only on the number of steps, so the steps so far need not
            # be repeated.
            self.schedule.last_epoch = self.at.step - 1
            self.schedule.step()
        # This checkpoint was written after an evaluation: the next epoch begins, unless
        # the early stop ended the run.
        if self.at.ended:
            self.over = self.watch.stops() is not None
            self.at.begin(self.at.epoch + 1)

    def train_epoch(self) -> None:
        """Trains the rest of the epoch; returns at once if the run was saved just before the evaluation."""
        if self.at.done and self.at.done == len(self.loader):
            return
        if not self.at.done:
            self.loader.set_epoch(self.at.epoch)
            self.window.restart()
        self.model.train()
        # An evaluation, a save or a refresh of negatives is over, so the time limit
        # runs again.
        if self.watchdog is not None:
            self.watchdog.beat()
        try:
            for output in self.steps.outputs(self.loader, self._batches):
                self._after_step(output)
            self.ranks.settle()
            # A loader without a known length has ended only now.
            if int(self.window.sums[1]):
                self._record_window()
        except TrainingDivergedError as explained:
            step = explained.step
            last_good = self.checkpoints and self.checkpoints.last_good()
            if last_good:
                explained = TrainingDivergedError(
                    f"{explained}; the last good checkpoint is {last_good}", step
                )
            epoch = self.guard.epoch(step)
            record = self.records.stamped("error", message=str(explained))
            self.records.keep(record | {"epoch": epoch, "step": step})
            raise explained from None
        # An evaluation runs the model outside the pipeline.
        self.steps.pipeline.detach()

    def _batches(self, loader: Any) -> Iterator[Any]:
        """Yields the rest of an epoch's batches, and counts the seconds of waiting for each."""
        batches = exactly(loader, after=self.at.done)
        while (batch := self.window.fetch(batches)) is not None:
            if not isinstance(batch, (TowerBatch, DrawnStep)):
                raise ValueError(
                    f"train(): the loader gives a {type(batch).__name__}, must be TowerBatches of a TowerModel's "
                    "schema; step other models by TrainPipelineSparseDist"
                )
            if isinstance(batch, TowerBatch) and batch.fresh is not None:
                self._begin_rows(batch.fresh)
            yield batch

    def _begin_rows(self, notes: tuple[Fresh, ...]) -> None:
        """Begins the rows anew that dynamic ids have given to other ids; all steps before are complete, see Steps."""
        stop = self.config.early_stop
        if stop.metric and stop.restore:
            raise ValueError(
                f"train.early_stop.metric={stop.metric} with dynamic ids: other ids have the best epoch's rows by the "
                "last step; set train.early_stop.restore=false"
            )
        if self._fresh_rows is None:
            self._fresh_rows = FreshRows(self.model, self.optimizer)
        self._fresh_rows(notes)

    def _after_step(self, output: Any) -> None:
        self.at.step += 1
        self.at.done += 1
        step = self.at.step
        records = self.records
        records.progress.advance()
        check_output(output, ("loss", "weights"))
        self.window.add(output.loss, output.weights)
        if self.observer is not None:
            self.observer.see(output)
        self.guard.see(output.loss)
        if step % self.config.log_every == 0 or self.at.done == len(self.loader):
            self._record_window()
        # After the record, whose rates are those of the step just made.
        if self.schedule:
            self.schedule.step()
        # After the last step of an epoch end_epoch() saves, together with the
        # evaluation.
        if self.checkpoints is not None and self.at.done < len(self.loader):
            self.checkpoints.after_step(self)
        if self.guard.stop_asked:
            self._stop()
        if self.watchdog is not None:
            self.watchdog.beat()

    def _record_window(self) -> None:
        # A record waits for the device and meets the other ranks anyway.
        self.guard.meet()
        record = self.records.stamped("train", **self.window.take())
        for source in (self.loader, self.observer):
            # Those of dynamic ids, and of predictions before a step; collective.
            if hasattr(source, "figures"):
                record |= source.figures()
        if self.schedule:
            record |= rates(self.optimizer)
        self.records.keep(record)

    def end_epoch(self, evaluate: Callable[[], Record] | None) -> None:
        """Saves, evaluates if the epoch is due for it, and decides whether the run is over."""
        epoch = self.at.epoch + 1
        best = False
        self.pause()
        last = epoch == self.config.epochs
        if evaluate is not None and (epoch % self.config.eval_every == 0 or last):
            if self.checkpoints is not None:
                self.checkpoints.before_evaluation(self, last=last)
            self.model.eval()
            record = self.records.stamped("eval", **evaluate())
            best = self.watch.see(record)
            if best:
                record["best"] = True
            self.records.keep(record)
            stop = self.watch.stops()
            if stop is not None and not last:
                self.over = True
                self.records.keep(self.records.stamped(**stop))
        self.at.ended = True
        if self.checkpoints is not None:
            self.checkpoints.after_epoch(self, last=last or self.over, best=best)
        self.at.begin(self.at.epoch + 1)

    def restore_best(self) -> None:
        """Restores the weights of the best evaluation if an early stop asks for it; all ranks call it."""
        self.pause()
        best = self.watch.better_than(self.at.step)
        if best is None or self.checkpoints is None:
            return
        name = self.watch.told(best)
        message = f"restored {name}"
        if not self.checkpoints.load_weights(self.model, best["best_step"]):
            message = f"{name} was the best, but its checkpoint is gone: the weights are those of the last step"
        self.records.tell(
            {
                "kind": "restore",
                "epoch": best["best_epoch"],
                "step": best["best_step"],
                "message": message,
            }
        )

    def pause(self) -> None:
        """Lifts the time limit of a step for an evaluation, a save or a refresh of negatives."""
        if self.watchdog is not None:
            self.watchdog.pause()

    def settle(self) -> None:
        """Checks all steps so far, updates stale rows and makes ranks equal, ready for a checkpoint."""
        self.pause()
        self.guard.meet()
        self.ranks.settle()
        self.steps.settle()

    @contextmanager
    def outside_pipeline(self) -> Iterator[None]:
        """Settles, and lets the block call the model, between two steps or while the pipeline fetches a batch."""
        self.settle()
        self.steps.pipeline.detach()
        try:
            yield
        finally:
            self.steps.pipeline.attach()

    def _stop(self) -> None:
        """Saves, unless this step is saved already, and ends the run on all ranks after the same step."""
        where = f"after {self.guard.where(self.at.step)}"
        if self.checkpoints is None:
            raise RunStoppedError.at(where, saved=False)
        self.checkpoints.save(self)
        self.close()
        raise RunStoppedError.at(where, saved=True)

    def close(self) -> None:
        """Waits until everything is written."""
        self.records.progress.close()
        if self.checkpoints is not None:
            self.checkpoints.close()


def _steps_of(run: TrainingRun, sync: SyncConfig, total: int) -> Steps:
    """Returns the steps of a run, ``total`` of them, with the pipeline and the scaling of its settings."""
    config = run.config
    scaler = scaling(config, sync, run.optimizer, run.runtime)
    context = forward_context(config.amp, run.runtime.device)
    pipeline = make_pipeline(
        run.model,
        scaler or run.optimizer,
        run.runtime.device,
        forward=training_forward(run.model, context, scaler),
    )
    steps_config = StepsConfig(
        compile=config.compile,
        total=total,
        made=run.at.step,
        context=context,
        scaling=scaler,
        take_time=run.pause,
        # Whether this process captures its steps is no part of the run's history.
        tell=lambda figures: run.records.tell(run.records.stamped("steps", **figures)),
    )
    return Steps(
        run.model, run.optimizer, run.runtime, pipeline, run.ranks, steps_config
    )
