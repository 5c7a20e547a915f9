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
        self._has_gradients = False
        self._pending: HostCopy | None = None  # loss of the step before, of a GPU

    def begin_step(self) -> None:
        """Counts a step, which may make its forward more than once."""
        self.number += 1

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
        if not loss.requires_grad:
            raise CannotAdopt(
                "the loss does not depend on a parameter that requires a gradient; return the loss itself"
            )
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
        """Raises if the loss is not finite; on a GPU checks the previous step's loss to avoid a sync."""
        step = self.number
        value = HostCopy(loss.detach())
        if loss.is_cuda:
            earlier = self._pending
            self._pending = value
            if earlier is None:
                return
            # By now the step before has written its update.
            value = earlier
            step = step - 1
            has_updated = True
        number = float(value.read())
        if math.isfinite(number):
            return
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
