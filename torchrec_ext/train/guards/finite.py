"""FiniteLoss: checks each step's loss; one that is not finite ends the run on all ranks, with one explanation."""

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

from torchrec_ext.batch import DrawnStep, TowerBatch
from torchrec_ext.distributed.optim.hybrid import GradientNotFiniteError
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import EveryStep
from torchrec_ext.distributed.tables import local_shards
from torchrec_ext.train.guards.amp import Context
from torchrec_ext.train.guards.gradient_gate import GradientGate, holding

BLOCK_ROWS = 65536
_DATA = "mend the column, or fill its missing values in preprocessing"
_RATES = (
    "lower optimizer.tables_lr or optimizer.dense_lr, set optimizer.clip_norm, or look for extreme values in the steps "
    "before"
)
_AFTER_GRADIENT = "no dense layer and no data_parallel table was changed by this step, sharded tables were"
_NOTHING = "nothing was written by this step"
_OVERFLOW = "labels and dense columns are finite, so the forward overflowed"


class TrainingDivergedError(ValueError):
    """A loss or gradient is not finite; the message names step, epoch, ranks and cause. Raised on every rank.

    Args:
        message: text of the error.
        step: number of the step, counted from 1 over the whole run.
    """

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


class RunStoppedError(ValueError):
    """A signal has ended the run; the message says what is saved. Raised on every rank after the same step."""


@dataclass
class _Seen:
    """A step whose loss was checked; ``worst`` over ranks is still on its way to the host where it is a tensor."""

    step: int
    batch: TowerBatch | DrawnStep
    loss: Tensor
    worst: Tensor | list[float]
    arrived: torch.cuda.Event | None


class FiniteLoss:
    """Calls the model for a pipeline and checks each loss.

    The ranks agree by one small all-reduce per step. On the CPU the answer is there at once: nothing is written by the
    bad step. Where a gate checks the gradients too, the one all-reduce is the gate's, after the first half of the
    backward, in which nothing moves; else it comes before the backward. On CUDA the answer is read one step late, so
    that the host never waits for the device: by then the step has been written, and the message says so; a gradient
    that is no number shows as the loss after it.

    Where ranks exchange nothing in a step (:class:`LocalSGD` without sharded tables) they do not for this either: a
    rank whose loss is not finite goes on without writing (the optimizer refuses its gradient) until they meet next, in
    :meth:`settle`.

    Args:
        model: module whose forward returns (loss, output).
        runtime: rank and device of this process.
        steps_per_epoch: number of steps, by which messages name the epoch of a step.
        late: read the answer one step late; on CUDA where not given.
        ranks: how the ranks are kept equal; in every step where not given.
        stop: returns whether this rank was asked to stop; the answers travel with the losses, for :attr:`stop_asked`.
        context: makes the context of the forward, see :func:`forward_context`.
        leave_out: tells the optimizer that the next step moves nothing; with it, a step with a bad loss, or one that
            the gate refuses, is left out on all ranks, and the run goes on. Every step then waits for its answer, on
            CUDA too.
        gate: checks the gradients of each step before they reach a table; without it the optimizer alone does.

    Attributes:
        left_out: why the last step was left out; empty where it was not.
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
        leave_out: Callable[[], None] | None = None,
        gate: GradientGate | None = None,
    ) -> None:
        self._model, self._runtime, self._steps_per_epoch = model, runtime, steps_per_epoch
        self._stop, self.stop_asked, self._context, self._gate = stop, False, context, gate
        self._ranks, self._leave_out, self.left_out = ranks or EveryStep(), leave_out, ""
        self._late = (leave_out is None and runtime.device.type == "cuda") if late is None else late
        self._pending: _Seen | None = None
        self._at_gate: _Seen | None = None  # a step whose loss the ranks compare at the gate
        self._own: _Seen | None = None  # the first bad step of this rank, that the others do not know of yet
        self.step = 0

    def __call__(self, batch: TowerBatch) -> tuple[Tensor, Any]:
        """Returns the model's loss and output.

        Raises:
            TrainingDivergedError: the loss of this step or, where read late, of the step before is not finite on some
                rank.
        """
        with self._context(), holding(self._gate):
            loss, output = self._model(batch)
        self.left_out = ""
        if self._waits_for_gate(loss):
            self.step += 1
            self._at_gate = _Seen(self.step, batch, loss.detach(), self._local(loss.detach()), None)
            return loss, output
        self.look(loss, batch)
        # A backward from here reaches no table and no layer: those in it move, even by a gradient of 0.
        return torch.zeros_like(loss, requires_grad=True) if self.left_out else loss, output

    def _waits_for_gate(self, loss: Tensor) -> bool:
        """Whether ranks compare the loss together with the gradients: a backward follows, and ends at the gate."""
        return self._gate is not None and self._together and not self._late and loss.requires_grad

    def before_tables(self) -> None:
        """Runs the second half of the backward, in which tables are moved; all ranks call it after the first half.

        Raises:
            TrainingDivergedError: the loss is not finite on some rank.
            GradientNotFiniteError: a gradient is not finite on some rank.
        """
        if self._gate is None or self.left_out:
            return
        seen, self._at_gate = self._at_gate, None
        answers = [*([0.0, 0.0] if seen is None else seen.worst), float(self._gate.refuses())]
        if self._runtime.world_size > 1:
            worst = torch.tensor(answers, device=self._runtime.device)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            answers = worst.tolist()
        if seen is not None:
            seen.worst = answers[:2]
            if answers[0]:
                self._gate.drop()
            self._check(seen)
            if self.left_out:
                return
        if not answers[2]:
            self._gate.open()
            return
        bad = self._gate.explain()
        if self._leave_out is None:
            raise GradientNotFiniteError(bad, in_time=True)
        self.left_out = f"{bad} at {self.where(self.step)}; {_NOTHING}; {_RATES}"
        self._leave_out()

    def look(self, loss: Tensor, batch: TowerBatch | DrawnStep, *, written: bool = False) -> None:
        """Checks the loss of a step; a step that is ``written`` already is read one step late on every device.

        Raises:
            TrainingDivergedError: see :meth:`__call__`.
        """
        self._late = self._late or written
        self.step += 1
        loss = loss.detach()
        before, self._pending = self._pending, self._seen(batch, loss, self._worst(loss))
        if not self._late:
            before, self._pending = self._pending, None
        self._check(before)

    def settle(self) -> None:
        """Checks the losses not read yet, so that every step so far is known to be good; all ranks call it."""
        self._check(self._pending)
        self._pending = None
        if self._ranks.silent:
            worst = self._answers(torch.tensor(float(self._own is not None), device=self._runtime.device))
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            bad, asked = worst.tolist()
            self.stop_asked = self.stop_asked or bool(asked)
            if bad:
                self._raise(self._own)

    @property
    def _together(self) -> bool:
        """Whether the ranks compare their answers in this step."""
        return self._runtime.world_size > 1 and not self._ranks.silent

    def _worst(self, loss: Tensor) -> Tensor | list[float]:
        """The answers for a loss, the greatest of all ranks where they exchange them in each step."""
        if loss.device.type == "cpu":  # of a small network ten ops are a share of its step
            answers = self._local(loss)
            if not self._together:
                return answers
            worst = torch.tensor(answers)
        else:
            worst = self._answers((~torch.isfinite(loss)).any().float())
        if self._together:
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst

    def _local(self, loss: Tensor) -> list[float]:
        """This rank's :meth:`_answers` for a loss, on the host."""
        asked = self._stop is not None and self._stop()
        finite = math.isfinite(loss.item()) if loss.numel() == 1 else bool(torch.isfinite(loss).all())
        return [float(self._ranks.fault or not finite), float(asked)]

    def _answers(self, bad: Tensor) -> Tensor:
        """(2,): whether this rank's loss, or a gradient of the step before, is not finite; whether a stop was asked."""
        asked = self._stop is not None and self._stop()
        return torch.stack([torch.ones_like(bad) if self._ranks.fault else bad, torch.full_like(bad, float(asked))])

    def _seen(self, batch: TowerBatch | DrawnStep, loss: Tensor, worst: Tensor | list[float]) -> _Seen:
        arrived = None
        if isinstance(worst, Tensor) and worst.device.type == "cuda":
            worst = worst.to("cpu", non_blocking=True)  # into page-locked memory
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return _Seen(self.step, batch, loss, worst, arrived)

    def _check(self, seen: _Seen | None) -> None:
        if seen is None:
            return
        if seen.arrived is not None:
            seen.arrived.synchronize()
        bad, asked = seen.worst.tolist() if isinstance(seen.worst, Tensor) else seen.worst
        # Where ranks go their own ways, this is the answer of one: the others hear it in settle().
        self.stop_asked = self.stop_asked or (bool(asked) and not self._ranks.silent)
        if bad:
            self._pending = None
            if self._leave_out is not None:
                self.left_out, _ = self._explain(seen)
                self._leave_out()
                return
            if not self._ranks.silent:
                self._raise(seen)
            self._own = self._own or seen

    def _raise(self, seen: _Seen | None) -> None:
        """Raises the same error on every rank; all call it, with the step that they check."""
        message, step = self._explain(seen)
        raise TrainingDivergedError(message, step)

    def explained(self, error: GradientNotFiniteError | TrainingDivergedError) -> TrainingDivergedError:
        """Returns the error of a step, with its number where it lacks one."""
        if isinstance(error, TrainingDivergedError):
            return error
        step = error.step or self.step
        written = _NOTHING if error.in_time else _AFTER_GRADIENT
        return TrainingDivergedError(f"{error} at {self.where(step)}; {written}; {_RATES}", step)

    def where(self, step: int) -> str:
        """Returns how a message names a step."""
        return f"step {step} of epoch {self.epoch(step)}"

    def epoch(self, step: int) -> int:
        """Returns the epoch of a step, counted from 1."""
        return 1 + (step - 1) // self._steps_per_epoch

    def _explain(self, seen: _Seen | None) -> tuple[str, int]:
        """Returns the cause and the step, the same on every rank; all call it."""
        bad = None if seen is None or torch.isfinite(seen.loss).all() else str(seen.loss.sum().item())
        columns = list(_bad_columns(seen.batch, self._model)) if seen and bad else []
        # On a device that is read late, the weights have taken up the bad step and no longer tell its cause.
        weights = [] if self._late else list(_bad_weights(self._model))
        local = (bad, columns, weights, seen.step if seen else self.step)
        ranks: list[Any] = [local]
        if self._runtime.world_size > 1:
            ranks = [None] * self._runtime.world_size
            dist.all_gather_object(ranks, local)
        lost = [rank for rank, (loss, *_) in enumerate(ranks) if loss is not None]
        if not lost:  # it was a gradient
            self._ranks.meet()
        in_data = [f"{text} on rank {rank}" for rank, (_, texts, *_) in enumerate(ranks) for text in texts]
        causes = in_data or list(dict.fromkeys(text for _, _, texts, _ in ranks for text in texts)) or [_OVERFLOW]
        more = f" and {len(causes) - 3} more" if len(causes) > 3 else ""
        written = "the update of this step was written" if self._late else _NOTHING
        step = min(ranks[rank][3] for rank in lost)
        message = (
            f"the loss is {ranks[lost[0]][0]} on rank(s) {lost} at {self.where(step)}: {'; '.join(causes[:3])}{more}; "
            f"{written}; {_DATA if in_data else _RATES}"
        )
        return message, step


def _bad_columns(batch: TowerBatch | DrawnStep, model: nn.Module) -> Iterator[str]:
    """Yields the labels, weights and dense columns of a batch that are not finite."""
    batch = batch.batch() if isinstance(batch, DrawnStep) else batch
    for name, values in (("label", batch.labels), ("weight", batch.weights), ("log_q", batch.log_q)):
        if values is not None:
            yield from _bad(f"the {name}", values)
    parts = [("row_dense", batch.dense)] + ([("shared_dense", batch.shared.dense)] if batch.shared is not None else [])
    for names, matrix in parts:
        for name, column in zip(_dense_names(model, names, matrix.shape[1]), matrix.T, strict=True):
            yield from _bad(f"the dense column '{name}'", column)


def _dense_names(model: nn.Module, attribute: str, width: int) -> list[str]:
    """The names of dense columns where the model has a schema; else their indices."""
    schema = getattr(get_unwrapped_module(model), "schema", None)
    names = list(getattr(schema(), attribute, ())) if callable(schema) else []
    return names if len(names) == width else [str(number) for number in range(width)]


def _bad(name: str, values: Tensor) -> Iterator[str]:
    rows = (~torch.isfinite(values)).nonzero().reshape(-1)
    if len(rows):
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        yield f"{name} is {values[rows[0]].item()} in row {int(rows[0])}{more} of the batch"


def _bad_weights(model: nn.Module) -> Iterator[str]:
    """Yields the tables, as far as this rank holds them, and dense parameters that are not finite."""
    tables = set()
    for shard in local_shards(model):
        tables.add(shard.fqn)
        for start in range(0, shard.tensor.shape[0], BLOCK_ROWS):
            rows = (~torch.isfinite(shard.tensor[start : start + BLOCK_ROWS])).any(dim=1).nonzero().reshape(-1)
            if len(rows):
                yield f"table '{shard.config.name}' is not finite in row {shard.row + start + int(rows[0])}"
                break
    for name, parameter in model.named_parameters():
        if name not in tables and not torch.isfinite(parameter).all():
            yield f"the weights {name} are not finite"
