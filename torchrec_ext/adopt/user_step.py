"""UserStep: a training step by the user's own code."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from torchrec_ext.adopt.checks import (
    ForwardWatch,
    check_model,
    device_of,
    loss_and_output,
    optimized_parameters,
    update_rules,
)
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.graph import LossFunction
from torchrec_ext.capture.executors import engine_for
from torchrec_ext.capture.policy import TrainingDivergedError
from torchrec_ext.drawn import DrawnStep
from torchrec_ext.observe.host_copy import HostCopy

# Losses of a GPU that are copied to the host together, or those of so many seconds: a
# copy for each would be a third of the host's work for a small step.
_LOSSES = 32
_LOOK_S = 1.0


class UserStep:
    """The whole step on one process: zero_grad, loss, backward, the limit on the norm, and the optimizers' steps.

    Args:
        model: the user's model.
        optimizers: the user's optimizers.
        loss: the user's function from a batch to the loss.
        autocast: makes the context of the forward.
        clip_norm: limit of the gradients' norm; 0 for none.

    Attributes:
        device: device of the model.
        number: number of the current step, from 1.
        shares_rows: whether a captured step reads a row once that a batch repeats.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        loss: LossFunction,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        clip_norm: float = 0.0,
    ) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        self.loss = loss
        self.autocast = autocast
        self.clip_norm = clip_norm
        # check() refuses a model on several devices.
        self.device = device_of(model)
        self.number = 0
        self.shares_rows = True
        self._has_gradients = False
        # Losses of a GPU that nobody has looked at, and the number of the first; those
        # before them are on their way to the host.
        self._losses: list[Tensor] = []
        self._first = 1
        self._pending: tuple[int, HostCopy] | None = None
        self._looked = time.perf_counter()

    def check(self) -> None:
        """Raises CannotCaptureError if the step has no captured form, as far as that is known before a step."""
        check_model(self.model)
        update_rules(self.model, self.optimizers)
        engine_for(self.device)
        if self.autocast_dtype() == torch.float16:
            raise CannotAdopt(
                "autocast computes in float16, whose gradients need a GradScaler; take torch.bfloat16, which needs none"
            )

    def eager(
        self, batch: DrawnStep, watch: ForwardWatch | None = None
    ) -> tuple[Tensor, Any]:
        """Makes the user's own step; ``watch`` surrounds its forward."""
        self._has_gradients = True
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with watch or nullcontext(), self.autocast():
            loss, output = loss_and_output(self.loss(*batch.batch()))
        # Before the backward, so that no weight is written after a loss that is not
        # finite.
        self.look(loss, has_updated=False)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.clip_norm:
            parameters = optimized_parameters(self.optimizers)
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach(), pytree.tree_map_only(Tensor, Tensor.detach, output)

    def drop_gradients(self) -> None:
        """Leaves .grad None after an eager step too: who reads it finds out in the first step, not at a capture."""
        if self._has_gradients:
            self._has_gradients = False
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    def look(self, loss: Tensor, *, has_updated: bool) -> None:
        """Raises if the loss is not finite; those of a GPU stay there, and are looked at together."""
        if not loss.is_cuda:
            self._refuse(float(loss.detach()), self.number, has_updated=has_updated)
            return
        if not self._losses:
            self._first = self.number
        self._losses.append(loss.detach())
        waited_s = time.perf_counter() - self._looked
        if len(self._losses) == _LOSSES or waited_s > _LOOK_S:
            # By now these have arrived, and no step waits for its own.
            self._look_at_pending()
            self._send()

    def look_at_all(self) -> None:
        """Raises if a loss so far is not finite; whoever reads the model's state waits for a GPU anyway."""
        self._look_at_pending()
        self._send()
        self._look_at_pending()

    def forget_losses(self) -> None:
        """Leaves losses of a GPU that nobody has looked at, since other weights are loaded."""
        self._losses = []
        self._pending = None

    def _send(self) -> None:
        """Begins to copy the losses of a GPU to the host."""
        self._looked = time.perf_counter()
        if self._losses:
            losses = torch.stack([loss.float() for loss in self._losses])
            self._pending = self._first, HostCopy(losses)
            self._losses = []

    def _look_at_pending(self) -> None:
        if self._pending is None:
            return
        first, losses = self._pending
        self._pending = None
        for number, loss in enumerate(losses.read().tolist(), first):
            # By now the step has written its update.
            self._refuse(loss, number, has_updated=True)

    def _refuse(self, number: float, step: int, *, has_updated: bool) -> None:
        """Raises if the loss of a step is not finite."""
        if math.isfinite(number):
            return
        # Of steps that the same weights made, or whoever loads others would see it again.
        self.forget_losses()
        state = (
            "the update of this step was written"
            if has_updated
            else "nothing was written by this step"
        )
        for name, parameter in self.model.named_parameters():
            if not bool(parameter.isfinite().all()):
                state += f", and '{name}' is not finite"
                break
        raise TrainingDivergedError(
            f"the loss is {number} at step {step:,}: {state}; look for values in the batch that are not finite, lower "
            "the learning rate, or set clip_norm",
            step,
        )

    def say(self, text: str) -> None:
        """Prints a line on rank 0."""
        # Under local SGD each rank adopts a model of its own, and all would say the
        # same.
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            print(f"adopt: {text}", flush=True)

    def forward_error(self, batch: DrawnStep) -> Exception | None:
        """Returns the error of the user's own forward on a batch: it says more than that of a captured step."""
        try:
            with torch.no_grad():
                self.loss(*batch.batch())
        except Exception as error:
            return error
        return None

    def now(self) -> float:
        """Returns the time in seconds, after all work on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def autocast_dtype(self) -> torch.dtype | None:
        """Returns the dtype of the forward under autocast, or None without autocast."""
        kind = self.device.type
        with self.autocast():
            return (
                torch.get_autocast_dtype(kind)
                if torch.is_autocast_enabled(kind)
                else None
            )
