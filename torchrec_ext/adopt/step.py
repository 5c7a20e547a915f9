"""adopt(): a user's own nn.Module, optimizers and loss, unchanged, trained by a captured step where that pays.

AdoptedStep: called with a batch in place of zero_grad, loss, backward and step. Its first steps are these four, eager
and equal to the bit, see :class:`UserStep`. Then TorchDynamo traces forward and loss, and the step is captured as one
function of tensors, see :class:`Captures`, on the memory of the model and of the optimizers' state. Before every step
Dynamo compares all that the trace depended on. :class:`Changes` finds what Dynamo does not see: hooks of optimizers,
their settings and state.

A captured step updates some rows later, see :class:`Lag`. Some steps are compared with the eager one for as long as the
training lasts, see :class:`Verification`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchrec_ext.adopt.captures import Captures, TooManyShapesError, weakly
from torchrec_ext.adopt.checks import Changes, ForwardWatch
from torchrec_ext.adopt.errors import (
    BadIdError,
    CannotAdopt,
    EndOfCaptureError,
    HalfStepError,
    TensorChangedError,
)
from torchrec_ext.adopt.graph import LossFunction
from torchrec_ext.adopt.lag import catch_up
from torchrec_ext.adopt.rows.rows import Rows, RowsOnDevice
from torchrec_ext.adopt.user_step import UserStep
from torchrec_ext.adopt.verify import StepComparison, Verification
from torchrec_ext.capture.errors import CannotCaptureError, RareShapeError
from torchrec_ext.capture.executors import engine_for
from torchrec_ext.capture.policy import (
    CapturePolicy,
    Compile,
    milliseconds,
    two_digits,
)
from torchrec_ext.drawn import DrawnStep
from torchrec_ext.observe.user_lines import first_line

# Seconds that a capture takes: so much, and so much more for each torch call of the
# forward. Most of it is inductor's. Those of a GPU are not measured.
CAPTURE_S = {"cpu": 8.0, "cuda": 10.0}
CAPTURE_S_PER_CALL = {"cpu": 0.4, "cuda": 0.2}
RESTARTS = 3  # captures that are given up because the model was changed, before steps stay eager
_PACE = 64  # steps after which the time for readers of whole tables, and of the step, is looked at again


def adopt(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss: LossFunction,
    *,
    clip_norm: float = 0.0,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    compile: Compile = "auto",  # noqa: A002
) -> AdoptedStep:
    """Returns a step that trains ``model`` like the user's own loop, captured if it pays.

    Args:
        model: the user's module; it, its state_dict, the optimizer's state and schedulers stay the user's.
        optimizer: optimizers of the model's parameters: Adam, AdamW, Adagrad or SGD.
        loss: takes a batch and returns the loss, (), or a tuple of the loss and a tree of tensors.
        clip_norm: limit of the gradients' norm, as of ``torch.nn.utils.clip_grad_norm_``; 0 for none.
        autocast: makes the context of the forward, such as ``lambda: torch.autocast("cpu", torch.bfloat16)``.
        compile: ``auto`` captures once eager steps have taken as long as a capture does, and says why where it cannot;
            ``require`` captures the third step, or raises; ``off`` leaves all steps eager.

    Raises:
        CannotAdopt: an argument is not what it must be; with ``compile="require"``, also whatever cannot be captured.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        >>> step = adopt(model, optimizer, lambda x, y: nn.functional.mse_loss(model(x), y))
        >>> loss, _ = step(torch.ones(4, 2), torch.zeros(4, 1))  # instead of zero_grad, loss, backward, step
        >>> step.describe()
        'eager so far (1 step)'
    """
    is_several = isinstance(optimizer, list | tuple)
    optimizers: Any = optimizer if is_several else [optimizer]
    if not isinstance(model, nn.Module):
        raise CannotAdopt(f"model is a {type(model).__name__}: must be an nn.Module")
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise CannotAdopt(
                f"optimizer is a {type(each).__name__}: must be a torch.optim.Optimizer"
            )
    if not optimizers:
        raise CannotAdopt("optimizer=[]: give a torch.optim.Optimizer or several")
    is_number = isinstance(clip_norm, numbers.Real)
    if not is_number or not 0 <= clip_norm < math.inf:
        raise CannotAdopt(f"clip_norm={clip_norm!r}: must be a number of 0 or more")
    # torch.autocast is a context, and called it is a decorator.
    if not callable(autocast) or isinstance(autocast, AbstractContextManager):
        raise CannotAdopt(
            f"autocast is a {type(autocast).__name__}: must make a context: autocast=lambda: torch.autocast(...)"
        )
    if compile not in get_args(Compile):
        raise CannotAdopt(f"compile={compile!r}: must be 'auto', 'off' or 'require'")
    user_step = UserStep(model, optimizers, loss, autocast, float(clip_norm))

    return AdoptedStep(user_step, compile_=compile)


class AdoptedStep:
    """The training step of a user's model; made by :func:`adopt`.

    ``loss, output = step(*batch)`` trains on one batch. Both are detached from the graph. After each step, eager or
    captured, ``.grad`` is None.

    Attributes:
        optimizers: the user's optimizers.
        after_step: functions called after each step, such as those of :class:`~torchrec_ext.distributed.LocalSGD`.
    """

    def __init__(
        self,
        user_step: UserStep,
        *,
        compile_: Compile,
    ) -> None:
        self._user_step = user_step
        self.optimizers = tuple(user_step.optimizers)
        self.after_step: list[Callable[[], None]] = []
        self._policy = CapturePolicy(compile_, user_step.say)
        if compile_ == "off":
            self._policy.reason = "compile='off'"
        self._restarts = 0
        self._broken = ""
        # Another step over the same model may have left rows behind.
        catch_up(list(user_step.model.parameters()))
        self._resident: RowsOnDevice | None = None
        self._begin()
        if not self._policy.reason:
            self._check()
        # Weakly, and gone with the step: optimizers often outlive it.
        for optimizer in self.optimizers:
            for hook in (
                optimizer.register_state_dict_pre_hook(weakly(self._begin_save)),
                optimizer.register_load_state_dict_pre_hook(weakly(self._begin_load)),
                optimizer.register_load_state_dict_post_hook(weakly(self._take_over)),
            ):
                weakref.finalize(self, hook.remove).atexit = False

    def _begin(self) -> None:
        self._policy.restart()
        self._verification = Verification(self._user_step, self._policy)
        self._captures = Captures(
            self._user_step, self._verification, self._policy.patience
        )
        self._watch = StepWatch(self._user_step, self._captures, self._policy)
        self._is_capturing = False

    def _check(self) -> None:
        try:
            self._user_step.check()
        except CannotCaptureError as error:
            self._stay_eager(error)

    def __call__(self, *batch: Any) -> tuple[Tensor, Any]:
        """Trains on one batch, and returns the loss, (), and what the user's function returned beside it.

        Raises:
            TrainingDivergedError: the loss is not finite; of a GPU's steps one of the last 64, or of the last seconds.
            CannotAdopt: with ``compile="require"``, the step cannot be captured.
            IndexError: an id is outside of its table; nothing was written, and the next step goes on.
            RuntimeError: a captured step before has failed half way.
        """
        return self._train(DrawnStep(batch, None, lambda: batch))

    def epoch(self, rows: Rows) -> Iterator[Tensor]:
        """Trains on the batches of an epoch, which a captured step makes inside, and yields their losses, ().

        Raises:
            CannotAdopt: ``rows`` is something else; otherwise see :meth:`__call__`.
        """
        if not isinstance(rows, Rows):
            raise CannotAdopt(
                f"epoch() takes Rows, not a {type(rows).__name__}; call the step with other batches"
            )
        if self._resident is None or self._resident.rows is not rows:
            self._resident = RowsOnDevice(rows, self._user_step.device)
        for batch in rows.steps(self._resident):
            yield self._train(batch)[0]
        self._user_step.look_at_all()

    def _train(self, batch: DrawnStep) -> tuple[Tensor, Any]:
        if self._broken:
            raise RuntimeError(self._broken)
        self._user_step.number += 1
        result = self._any_step(batch)
        self._user_step.drop_gradients()
        for call in self.after_step:
            call()
        return result

    def _any_step(self, batch: DrawnStep) -> tuple[Tensor, Any]:
        # The second eager step is observed, so it comes before a capture.
        if (
            not self._policy.reason
            and not self._is_capturing
            and len(self._policy.eager_seconds) >= 2
            and self._watch.is_over
        ):
            self._begin_capture()
        if self._policy.reason:
            return self._user_step.eager(batch)
        if self._is_capturing:
            return self._captured(batch)
        result = self._watch.step(batch)
        if self._watch.problem:
            self._stay_eager(CannotAdopt(self._watch.problem))
        return result

    def settle(self) -> None:
        """Updates rows that no step has read lately: model and optimizers are then as after eager steps.

        Nobody needs to call it: whoever reads a weight or state that is behind causes it.

        Raises:
            TrainingDivergedError: a loss so far is not finite.
        """
        self._captures.settle()
        self._user_step.look_at_all()

    def describe(self) -> str:
        """Describes whether steps are eager or captured and why, and how each table is updated."""
        current = self._captures.current
        if self._policy.reason:
            return f"eager: {self._policy.reason}"
        if current is None:
            steps = self._user_step.number
            plural = "" if steps == 1 else "s"
            return f"eager so far ({steps} step{plural})"
        return "; ".join(
            filter(
                None,
                (
                    current.describe(self._policy.since),
                    self._captures.too_many_shapes,
                ),
            )
        )

    @property
    def capture_s(self) -> float:
        """Seconds that all captures have taken."""
        return self._captures.seconds

    def _begin_capture(self) -> None:
        """Begins to make captured steps, or leaves all steps eager if there are none."""
        try:
            _, progress = engine_for(self._user_step.device)
            self._changes = Changes(self.optimizers)
            self._user_step.say(f"{progress} ...")
            if torch.is_anomaly_enabled():
                self._policy.note(
                    "torch.autograd.set_detect_anomaly is on: captured steps do not look for NaN in gradients"
                )
            self._is_capturing = True
        except CannotCaptureError as error:
            self._stay_eager(error)
        self._policy.since = self._user_step.number

    def _captured(self, batch: DrawnStep) -> tuple[Tensor, Any]:
        """Makes a captured step, or the eager one if there is none for this batch."""
        change = self._changes.ending()
        if change:
            return self._anew(change, batch, is_last=True)
        current = self._captures.current
        if current is not None:
            change = self._changes.of_state(current.state, is_behind=current.lag.active)
        if change:
            return self._anew(change, batch)
        # Called after the except clauses: an error of an eager step would else be chained
        # to what is only control flow, which prints the batch and all weights.
        instead: Callable[[], tuple[Tensor, Any]]
        try:
            self._captures.take_turn()
            start = self._watch.now()
            loss, output = self._captures(batch)
        except StepComparison as captured:
            # With its frames it would keep this one, and copies of all weights.
            captured.__traceback__ = None
            instead = partial(self._compared, captured, batch)
        except TensorChangedError as error:
            instead = partial(self._anew, str(error), batch)
        except CannotCaptureError as error:
            error.__traceback__ = None
            instead = partial(self._instead, error, batch)
        except BadIdError as error:
            instead = partial(self._refuse_ids, str(error), batch)
        except HalfStepError as error:
            raise self._broken_by(error.__cause__, batch) from error.__cause__
        else:
            return self._after_captured(loss, output, start)
        return instead()

    def _after_captured(
        self, loss: Tensor, output: Any, start: float
    ) -> tuple[Tensor, Any]:
        self._captures.end_step()
        self._user_step.look(loss, has_updated=True)
        self._watch.end_step(start)
        if self._watch.problem:
            self._stay_eager(CannotAdopt(self._watch.problem))
        return loss, output

    def _refuse_ids(self, problem: str, batch: DrawnStep) -> NoReturn:
        """Raises the user's own error of an id outside of its table, with the table and the id as its cause."""
        error = self._user_step.forward_error(batch)
        if error is None:
            raise IndexError(problem)
        raise error from IndexError(problem)

    def _compared(
        self, captured: StepComparison, batch: DrawnStep
    ) -> tuple[Tensor, Any]:
        """Makes the eager step in place of a captured one, and gives the capture up if the two differ."""
        eager, difference = self._verification.compare(captured, batch)
        if difference:
            text = f"a captured step differs from the eager one on the same batch in {difference}"
            self._stay_eager(CannotAdopt(text))
        return eager

    def _anew(
        self, changed: str, batch: DrawnStep, *, is_last: bool = False
    ) -> tuple[Tensor, Any]:
        """Gives up the captured steps, because somebody changed what they have fixed, and makes an eager one."""
        self.settle()
        self._restarts += 1
        if is_last or self._restarts > RESTARTS:
            self._stay_eager(
                CannotAdopt(f"{changed} has changed at step {self._user_step.number:,}")
            )
            return self._user_step.eager(batch)
        self._user_step.say(
            f"{changed} has changed: eager steps again, until a capture pays"
        )
        self._begin()
        self._check()
        result = self._user_step.eager(batch)
        # It stands for the first step of the watch, so that the next one is observed.
        self._policy.eager_seconds.append(0.0)
        return result

    def _instead(
        self, error: CannotCaptureError, batch: DrawnStep
    ) -> tuple[Tensor, Any]:
        """Makes the eager step on a batch for which there is no captured one."""
        self.settle()
        is_rare = isinstance(error, RareShapeError)
        if isinstance(error, TooManyShapesError):
            self._policy.note(str(error))
            is_rare = self._policy.compile != "require"
        if self._policy.compile == "require" and not is_rare:
            # What the loss itself raises cannot be traced: it is the user's own error.
            own = self._user_step.forward_error(batch)
            if own is not None:
                raise own
        # Before the first capture an error is of the step, and later of one kind of
        # batch.
        if isinstance(error, EndOfCaptureError) or (
            not is_rare
            and (self._captures.is_empty or self._policy.compile == "require")
        ):
            self._stay_eager(error)
        elif not is_rare:
            self._policy.note(f"batches of one kind stay eager: {error}")
        return self._user_step.eager(batch)

    def _broken_by(self, error: BaseException | None, batch: DrawnStep) -> Exception:
        """Returns the error of a captured step that failed half way; no step follows it."""
        assert isinstance(error, Exception)
        self._broken = (
            f"the captured step {self._user_step.number:,} has failed half way ({first_line(error)}): load the last "
            "checkpoint of the model and of the optimizer, and call adopt() again"
        )
        return self._user_step.forward_error(batch) or RuntimeError(self._broken)

    def _begin_save(self, _: Optimizer) -> None:
        self.settle()

    def _begin_load(self, *_: Any) -> None:
        self._captures.settle()
        self._user_step.forget_losses()

    def _take_over(self, optimizer: Optimizer) -> None:
        """Copies a loaded state into the memory of the captured steps."""
        # Captured steps read the addresses of before, and load_state_dict makes other
        # tensors.
        try:
            if not self._policy.reason:
                self._captures.load_state(optimizer)
        except KeyError:
            # Another state, as of an optimizer without a step.
            self._begin()

    def _stay_eager(self, error: CannotCaptureError) -> None:
        """Leaves all further steps eager, and says why; raises if a capture is required."""
        self.settle()
        self._captures.current = None
        self._is_capturing = False
        if self._policy.compile == "require":
            raise CannotAdopt(f"compile='require': {error}") from None
        self._policy.reason = str(error)
        self._policy.note(f"the step stays eager: {error}")


class StepWatch:
    """Times steps: makes the eager ones before a capture and observes one of them, then says what the capture gained.

    Args:
        user_step: the eager step.
        captures: the captured steps.
        policy: receives the times.

    Attributes:
        problem: a reason against captured steps; empty if nothing was seen.
    """

    def __init__(
        self, user_step: UserStep, captures: Captures, policy: CapturePolicy
    ) -> None:
        self._user_step = user_step
        self._captures = captures
        self._policy = policy
        self._capture_s = _capture_seconds(user_step.device)
        self.problem = ""
        self._last_look = 0  # number of the step at which readers were looked at

    @property
    def is_over(self) -> bool:
        """Whether eager steps have taken as long as a capture does."""
        seconds = self._policy.eager_seconds
        if len(seconds) < self._policy.steps_to_watch:
            return False
        return self._policy.compile == "require" or sum(seconds) >= self._capture_s

    def step(self, batch: DrawnStep) -> tuple[Tensor, Any]:
        """Makes an eager step; the second one is observed, because the first makes the optimizers' state."""
        policy = self._policy
        user_step = self._user_step
        if len(policy.eager_seconds) == 1:
            return self._observed(batch)
        start = user_step.now()
        result = user_step.eager(batch)
        policy.eager_seconds.append(user_step.now() - start)
        # A run may end before the capture, so it says when that will be.
        if (
            policy.compile == "auto"
            and len(policy.eager_seconds) == policy.steps_to_watch
        ):
            first = two_digits(
                user_step.number
                - policy.steps_to_watch
                + self._capture_s / policy.eager_s
            )
            user_step.say(
                f"eager steps take {milliseconds(policy.eager_s)}, optimizer included; graph capture (about "
                f"{self._capture_s:.0f} s) starts near step {first:,}. compile='require' captures at step 3, "
                "compile='off' never"
            )
        return result

    def _observed(self, batch: DrawnStep) -> tuple[Tensor, Any]:
        args = batch.batch()
        repeats = []
        if batch.source is not None:
            repeats = batch.source.repeats(args, len(batch.tensors[0]))
        watch = ForwardWatch(self._user_step.model, args, repeats)
        # Of these very tensors: the watch knows them by their ids.
        step = dataclasses.replace(batch, batch=lambda: args)
        result = self._user_step.eager(step, watch)
        seconds = self._policy.eager_seconds
        # The watch takes time, so this step is not timed.
        seconds.append(seconds[-1])
        self._capture_s = _capture_seconds(self._user_step.device, watch.calls)
        self._captures.look_ups = watch.look_ups
        self._captures.draws_random = watch.random
        self.problem = watch.problem
        return result

    def now(self) -> float:
        """Returns the time in seconds; once the times are reported, no step waits for a GPU to be timed."""
        if self._policy.is_reported:
            return time.perf_counter()
        return self._user_step.now()

    def end_step(self, start: float) -> None:
        """Ends a captured step that began at ``start``."""
        policy = self._policy
        seconds = self.now() - start
        if not policy.is_reported:
            policy.captured_seconds.append(seconds)
            if policy.can_compare:
                self._report()
        elif (
            policy.compile == "auto"
            and self._user_step.number - self._last_look >= _PACE
        ):
            self._check_readers()

    def _report(self) -> None:
        policy = self._policy
        policy.is_reported = True
        if policy.is_slower:
            self.problem = (
                f"a captured step takes {milliseconds(policy.captured_s)}, and an eager one "
                f"{milliseconds(policy.eager_s)}; try torch.set_num_threads(1) before the first step"
            )
        else:
            text = f"captured {policy.describe_captured()}"
            # The first two steps say nothing of later ones.
            if len(policy.eager_seconds) > 2:
                times = policy.eager_s / policy.captured_s
                text += f", eager {milliseconds(policy.eager_s)} ({times:.2g}x)"
            self._user_step.say(
                f"{text}; capturing took {self._captures.seconds:.1f} s"
            )

    def _check_readers(self) -> None:
        """Compares the cost of readers of whole tables with eager steps."""
        current = self._captures.current
        assert current is not None
        policy = self._policy
        number = self._user_step.number
        steps = number - max(self._last_look, policy.since)
        self._last_look = number
        step_s = policy.captured_s + current.lag.since_last_look() / steps
        if step_s == policy.captured_s or step_s < policy.eager_s:
            return
        self.problem = (
            f"{current.lag.cause()}: all rows are updated after each step for it, {milliseconds(step_s)} a step with "
            f"them, eager {1e3 * policy.eager_s:.3g} ms; read them every 100 steps"
        )


def _capture_seconds(device: torch.device, calls: int = 0) -> float:
    """Returns about how long the capture of a forward of so many torch calls takes."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    return CAPTURE_S[kind] + CAPTURE_S_PER_CALL[kind] * calls
