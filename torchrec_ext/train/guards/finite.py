"""FiniteLoss: checks each step's loss; a loss that is not finite ends the run on all ranks, with one explanation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import get_unwrapped_module
from typing_extensions import Self

from torchrec_ext.batch import DrawnStep, TowerBatch
from torchrec_ext.capture.policy import TrainingDivergedError
from torchrec_ext.distributed.runtime import Runtime, gather_objects
from torchrec_ext.distributed.sync import EveryStep
from torchrec_ext.distributed.tables import local_shards
from torchrec_ext.observe.host_copy import HostCopy
from torchrec_ext.schema.validation import first_few
from torchrec_ext.train.guards.amp import Context

# Rows of a table to check at once, so that a large one needs no mask of its size.
_BLOCK_ROWS = 65536
_DATA_REMEDY = "mend the column, or fill its missing values in preprocessing"
_RATES_REMEDY = (
    "lower optimizer.tables_lr or optimizer.dense_lr, set optimizer.clip_norm, or look for extreme values in the steps "
    "before"
)
_NOTHING_WRITTEN = "nothing was written by this step"
_OVERFLOW = "labels and dense columns are finite, so the forward overflowed"


class RunStoppedError(ValueError):
    """A signal has ended the run; the message says what is saved. Raised on every rank after the same step."""

    @classmethod
    def at(cls, place: str, *, saved: bool) -> Self:
        """Returns the error of a run that ended at ``place``, such as ``after step 3 of epoch 1``."""
        outcome = "; nothing was saved, since the run has no checkpoints"
        if saved:
            outcome = ", which is saved; go on with the same --run_dir"
        return cls(f"stopped by a signal {place}{outcome}")


@dataclass
class _CheckedStep:
    """A step under check; ``worst``, the ranks' greatest answers, may still be on its way to the host."""

    step: int
    batch: TowerBatch | DrawnStep
    loss: Tensor
    worst: HostCopy | list[float]

    def answers(self) -> list[float]:
        """Returns :attr:`worst` once it has arrived."""
        if isinstance(self.worst, HostCopy):
            return self.worst.read().tolist()
        return self.worst


class _Answers:
    """Two numbers of each rank on a step: 1 if its loss is not finite; 1 if a stop was requested."""

    def __init__(
        self, runtime: Runtime, ranks: EveryStep, stop: Callable[[], bool]
    ) -> None:
        self._runtime = runtime
        self._ranks = ranks
        self._stop = stop

    def own(self, bad: bool) -> list[float]:
        """Returns this rank's answers."""
        return [float(bad), float(self._stop())]

    def of_loss(self, loss: Tensor) -> list[float]:
        """Returns this rank's answers about a loss; waits for the loss."""
        # Python's check of one number is cheaper than an op of torch.
        if loss.numel() == 1:
            return self.own(not math.isfinite(loss.item()))
        return self.own(not torch.isfinite(loss).all())

    @property
    def are_compared(self) -> bool:
        """Whether the ranks compare their answers in this step."""
        return self._runtime.world_size > 1 and not self._ranks.silent

    def greatest(self, answers: list[float]) -> list[float]:
        """Returns the greatest of each answer over the ranks; all ranks call it."""
        if self._runtime.world_size == 1:
            return answers
        worst = torch.tensor(answers, device=self._runtime.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.tolist()

    def worst(self, loss: Tensor) -> HostCopy | list[float]:
        """Returns the answers about a loss: the greatest of all ranks, or this rank's if they are not compared."""
        # Plain Python, because ten tensor ops are a noticeable share of a small
        # network's step.
        if loss.device.type == "cpu":
            answers = self.of_loss(loss)
            if self.are_compared:
                answers = self.greatest(answers)
            return answers
        # By tensors, because a Python number would wait for the device.
        bad = (~torch.isfinite(loss)).any().float()
        worst = torch.stack([bad, torch.full_like(bad, float(self._stop()))])
        if self.are_compared:
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        return HostCopy(worst)


class FiniteLoss:
    """Calls the model for a pipeline and checks each loss.

    The ranks agree by one small all-reduce per step. On the CPU the answer is there at once, before the backward, and a
    bad step writes nothing. On CUDA the answer is read one step late, so that the host never waits for
    the device. By then the step has been written, and the message says so; a NaN gradient shows as the next step's
    loss.

    If ranks exchange nothing in a step (:class:`LocalSGD` without sharded tables), they do not compare losses either. A
    rank with a bad loss goes on until the ranks next meet in :meth:`settle`, before their weights are averaged.

    Args:
        model: module whose forward returns (loss, output).
        runtime: rank and device of this process.
        steps_per_epoch: number of steps in an epoch, for the epoch numbers in messages.
        late: read the answer one step late; by default on CUDA only.
        ranks: how the ranks are kept equal; by default in every step.
        stop: returns whether this rank was asked to stop; the answers travel with the losses, for :attr:`stop_asked`.
        context: makes the context of the forward, see :func:`forward_context`.

    Attributes:
        answers: what this rank answers about a loss, for a step that exchanges it with its gradients.
        stop_asked: whether some rank was asked to stop, known on all ranks after the same step.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        steps_per_epoch: int,
        *,
        late: bool | None = None,
        ranks: EveryStep | None = None,
        stop: Callable[[], bool] | None = None,
        context: Context = nullcontext,
    ) -> None:
        self._model = model
        self._runtime = runtime
        self._steps_per_epoch = steps_per_epoch
        self._ranks = ranks or EveryStep()
        self.answers = _Answers(runtime, self._ranks, stop or (lambda: False))
        self.stop_asked = False
        self._context = context
        self._late = runtime.device.type == "cuda" if late is None else late
        self._pending: _CheckedStep | None = None
        # The first bad step of this rank, not yet reported to others.
        self._own_bad_step: _CheckedStep | None = None
        self.step = 0

    def __call__(self, batch: TowerBatch) -> tuple[Tensor, Any]:
        """Returns the model's loss and output.

        Raises:
            TrainingDivergedError: the loss of this step, or of the step before if read late, is not finite on some
                rank.
        """
        with self._context():
            loss, output = self._model(batch)
        self.look(loss, batch)
        return loss, output

    def look(
        self,
        loss: Tensor,
        batch: TowerBatch | DrawnStep,
        *,
        written: bool = False,
        worst: list[float] | None = None,
    ) -> None:
        """Checks the loss of a step; reads it one step late if the step is already ``written``, on every device.

        Args:
            loss: loss of the step, ().
            batch: batch of the step.
            written: whether the step's update is written.
            worst: the greatest of all ranks' ``answers.of_loss``, if the step has exchanged them itself.

        Raises:
            TrainingDivergedError: see :meth:`__call__`.
        """
        # A captured step has written its update before anybody can look at its loss, so
        # waiting would gain nothing.
        self._late = self._late or written
        self.step += 1
        loss = loss.detach()
        worst_of_ranks = worst or self.answers.worst(loss)
        latest = _CheckedStep(self.step, batch, loss, worst_of_ranks)
        if not self._late:
            self._check(latest)
            return
        earlier = self._pending
        self._pending = latest
        self._check(earlier)

    def settle(self) -> None:
        """Checks the losses not read yet, so that every step so far is verified; all ranks call it."""
        self._check(self._pending)
        self._pending = None
        # Ranks that compared no losses since they last met do it now.
        if self._ranks.silent:
            answers = self.answers.own(self._own_bad_step is not None)
            bad, stop_requested = self.answers.greatest(answers)
            self.stop_asked = self.stop_asked or bool(stop_requested)
            if bad:
                raise self._explain(self._own_bad_step)

    def _check(self, checked: _CheckedStep | None) -> None:
        if checked is None:
            return
        bad, stop_requested = checked.answers()
        # If ranks do not compare in this step, the answer is this rank's own: the
        # others receive it in settle().
        self.stop_asked = self.stop_asked or (
            bool(stop_requested) and not self._ranks.silent
        )
        if bad:
            self._pending = None
            if not self._ranks.silent:
                raise self._explain(checked)
            self._own_bad_step = self._own_bad_step or checked

    def where(self, step: int) -> str:
        """Returns the name of a step for messages."""
        return f"step {step} of epoch {self.epoch(step)}"

    def epoch(self, step: int) -> int:
        """Returns the epoch of a step, counted from 1."""
        return 1 + (step - 1) // self._steps_per_epoch

    def _explain(self, checked: _CheckedStep | None) -> TrainingDivergedError:
        """Returns the same error on every rank; all ranks call it, each with the step it checks."""
        bad_loss = None
        columns: list[str] = []
        step = self.step
        if checked is not None:
            step = checked.step
            if not torch.isfinite(checked.loss).all():
                bad_loss = str(checked.loss.sum().item())
                columns = list(_bad_columns(checked.batch, self._model))
        weights: list[str] = []
        # If losses are read late, the bad step has already changed the weights, so they
        # no longer show the cause.
        if not self._late:
            weights = list(_bad_weights(self._model))
        ranks = gather_objects(
            (bad_loss, columns, weights, step), self._runtime.world_size
        )
        bad_ranks = [rank for rank, (loss, *_) in enumerate(ranks) if loss is not None]
        # Bad data explains bad weights, but not the other way round, so data is named
        # first.
        data_causes: list[str] = []
        # Replicated weights are bad on every rank alike, and are named once.
        weight_causes: dict[str, None] = {}
        for rank, (_, columns, weights, _) in enumerate(ranks):
            data_causes += [f"{text} on rank {rank}" for text in columns]
            weight_causes |= dict.fromkeys(weights)
        causes = data_causes
        remedy = _DATA_REMEDY
        if not data_causes:
            causes = list(weight_causes) or [_OVERFLOW]
            remedy = _RATES_REMEDY
        effect = _NOTHING_WRITTEN
        if self._late:
            effect = "the update of this step was written"
        # Under local steps ranks go bad at different steps, and the first one counts.
        step = min(ranks[rank][3] for rank in bad_ranks)
        message = (
            f"the loss is {ranks[bad_ranks[0]][0]} on rank(s) {bad_ranks} at {self.where(step)}: "
            f"{first_few(causes, separator='; ')}; {effect}; {remedy}"
        )
        return TrainingDivergedError(message, step)


def _bad_columns(batch: TowerBatch | DrawnStep, model: nn.Module) -> Iterator[str]:
    """Describes the labels, weights and dense columns of a batch with values that are not finite."""
    if isinstance(batch, DrawnStep):
        batch = batch.batch()
    for name, values in (
        ("label", batch.labels),
        ("weight", batch.weights),
        ("log_q", batch.log_q),
    ):
        if values is not None:
            yield from _describe_bad(f"the {name}", values)
    parts = [("row_dense", batch.dense)]
    if batch.shared is not None:
        parts.append(("shared_dense", batch.shared.dense))
    for names, matrix in parts:
        for name, column in zip(
            _dense_names(model, names, matrix.shape[1]), matrix.T, strict=True
        ):
            yield from _describe_bad(f"the dense column '{name}'", column)


def _dense_names(model: nn.Module, attribute: str, width: int) -> list[str]:
    """Returns the names of dense columns from the model's schema; their indices without a schema."""
    schema = getattr(get_unwrapped_module(model), "schema", None)
    if callable(schema):
        names = list(getattr(schema(), attribute, ()))
        # Names of another number would name the wrong columns.
        if len(names) == width:
            return names
    return list(map(str, range(width)))


def _describe_bad(name: str, values: Tensor) -> Iterator[str]:
    rows = (~torch.isfinite(values)).nonzero().reshape(-1)
    if len(rows):
        more = ""
        if len(rows) > 1:
            more = f" and {len(rows) - 1} more"
        yield f"{name} is {values[rows[0]].item()} in row {int(rows[0])}{more} of the batch"


def _bad_weights(model: nn.Module) -> Iterator[str]:
    """Describes this rank's table shards and dense parameters with values that are not finite."""
    tables = set()
    for shard in local_shards(model):
        tables.add(shard.fqn)
        for start in range(0, shard.tensor.shape[0], _BLOCK_ROWS):
            is_bad = (~torch.isfinite(shard.tensor[start : start + _BLOCK_ROWS])).any(
                dim=1
            )
            rows = is_bad.nonzero().reshape(-1)
            if len(rows):
                yield f"table '{shard.config.name}' is not finite in row {shard.row + start + int(rows[0])}"
                break
    for name, parameter in model.named_parameters():
        if name not in tables and not torch.isfinite(parameter).all():
            yield f"the weights {name} are not finite"
