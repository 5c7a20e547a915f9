"""Verification: compares captured steps with eager ones on the same batch: the first ones, and some later.

step_difference(): names what differs by more than rounding.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from torchrec_ext.adopt.checks import STATES, update_rules
from torchrec_ext.adopt.graph import StepGraph
from torchrec_ext.adopt.updates import CapturedUpdate
from torchrec_ext.adopt.user_step import UserStep
from torchrec_ext.capture.memory import StepMemory, UpdatedParameter
from torchrec_ext.capture.policy import CapturePolicy
from torchrec_ext.drawn import DrawnStep
from torchrec_ext.observe.ops import tensors_in
from torchrec_ext.observe.state_copy import copied, random_state, set_random_state

FIRST = 3  # captured steps that are compared after the first capture; 0 for no comparison at all
# Share of the time since the capture that goes to comparing later steps, and as much to those that follow a reader:
# whoever evaluates or saves may have changed what no guard sees. By time, because a comparison copies all weights.
_CHECKED = 0.01


class Verification:
    """Compares some captured steps with eager ones on the same batch and weights.

    Args:
        user_step: the eager step.
        policy: receives the times of eager steps if no others are known.
    """

    def __init__(self, user_step: UserStep, policy: CapturePolicy) -> None:
        self._user_step = user_step
        self._policy = policy
        self._began = time.perf_counter()
        self._updates = 0  # of all rows, for readers, as of the last step
        self._is_after_read = False
        # of comparisons, by whether they followed a reader
        self._seconds = {False: 0.0, True: 0.0}

    def begin(self, update: CapturedUpdate, key: Any, *, is_first: bool) -> None:
        """Plans the comparisons that follow the capture of a graph."""
        update.unverified[key] = FIRST if is_first else min(FIRST, 1)
        self._began = time.perf_counter()

    def snapshot(
        self, update: CapturedUpdate, graph: StepGraph, tensors: Sequence[Tensor]
    ) -> Snapshot | None:
        """Returns copies to take the next captured step back, or None if it is not compared."""
        self._is_after_read = update.lag.count != self._updates
        self._updates = update.lag.count
        due_s = _CHECKED * (time.perf_counter() - self._began)
        is_due = FIRST and self._seconds[self._is_after_read] < due_s
        if not (update.unverified[graph.number] or is_due):
            return None
        # What the step may write besides the memory, such as buffers.
        return Snapshot(
            update.memory, [tensors[index].detach() for index in graph.outer]
        )

    def compare(
        self, captured: StepComparison, batch: DrawnStep
    ) -> tuple[tuple[Tensor, Any], str]:
        """Takes a captured step back and makes the eager one, which stays.

        Returns:
            Loss and output of the eager step, and what differs by more than rounding; empty if nothing does.
        """
        began = time.perf_counter()
        user_step = self._user_step
        update = captured.update
        memory = update.memory
        outer = captured.snapshot.outer
        memory.settle()
        after = contents(memory, outer)
        captured.snapshot.restore()
        # Not before the captured step, whose own way of updating rows is so compared
        # too.
        memory.settle()
        update.lag.release()
        before = contents(memory, outer)
        captured.snapshot.restore_random()
        start = user_step.now()
        eager = user_step.eager(batch)
        # Nothing but the two slow first steps was eager before.
        if self._policy.compile == "require":
            self._policy.eager_seconds.append(user_step.now() - start)
        results = (captured.outputs[captured.graph.loss], captured.outputs), eager
        # In 16 bits each op rounds, and a compiled kernel rounds less often.
        factor = 1.0 if user_step.autocast_dtype() is None else 300.0
        far = step_difference(memory, outer, before, after, *results, factor)
        if far:
            noise = self._response_to_rounding(captured, before)
            far = step_difference(
                memory, outer, before, after, *results, factor, noise=noise
            )
        names = {each.name for each in memory.parameters}
        for name, (_, _, parameter, _) in update_rules(
            user_step.model, user_step.optimizers
        ).items():
            if name not in names and parameter.grad is not None:
                far = far or f"'{name}', which has a gradient now and had none before"
        if not far and update.unverified[captured.graph.number]:
            update.unverified[captured.graph.number] -= 1
        elif not far:
            self._seconds[self._is_after_read] += time.perf_counter() - began
        return eager, far

    @torch.no_grad()
    def _response_to_rounding(
        self, captured: StepComparison, before: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """Returns how far rounding of the weights moves the gradient of each parameter, and of ``loss`` the loss.

        The ops of the captured step run one by one.
        """
        memory = captured.update.memory
        outer = captured.snapshot.outer
        device = memory.device
        now = contents(memory, outer)
        random = random_state(device)
        draw = torch.Generator(device).manual_seed(0)
        first: dict[str, Tensor] = {}
        noise: dict[str, float] = {}
        try:
            for run in range(1 + _SHIFTS):
                write_back(memory, outer, before)
                for parameter in memory.parameters if run else ():
                    # By the last bit of a float32, up or down or not at all.
                    shift = torch.randint(
                        -1, 2, parameter.weight.shape, generator=draw, device=device
                    )
                    parameter.weight.mul_(1 + 2.0**-23 * shift)
                begun = contents(memory, outer)
                captured.snapshot.restore_random()
                memory.begin()
                graph = captured.graph
                loss = graph.module(*captured.tensors)[graph.loss]
                memory.settle()
                after = _written(memory, outer)
                found = {"loss": loss}
                for each in memory.parameters:
                    found[each.name] = _pull(each, begun, after)
                first = first or found
                for name, value in found.items():
                    noise[name] = max(
                        noise.get(name, 0.0), _most(_minus(value, first[name]))
                    )
        finally:
            memory.settle()
            write_back(memory, outer, now)
            set_random_state(device, random)
        return noise


@dataclass(eq=False)
class StepComparison(Exception):  # noqa: N818 - no error: it ends a call of Dynamo's
    """Ends a call of Dynamo's after the captured step, because the eager one does what the user's Python does.

    Args:
        update: the captured steps.
        graph: the graph.
        tensors: its inputs.
        snapshot: takes the step back.
        outputs: outputs of the graph.
    """

    update: CapturedUpdate
    graph: StepGraph
    tensors: Sequence[Tensor]
    snapshot: Snapshot
    outputs: Sequence[Any]


class Snapshot:
    """Copies of all that a captured step may write, from before it.

    Args:
        memory: the step's memory.
        outer: see :func:`contents`.
    """

    def __init__(self, memory: StepMemory, outer: Sequence[Tensor]) -> None:
        self.outer = outer
        self._memory = memory
        self._contents = contents(memory, outer)
        self._unsettled = memory.unsettled
        self._random = random_state(memory.device)

    def restore(self) -> None:
        """Takes the step back; the random numbers stay."""
        write_back(self._memory, self.outer, self._contents)
        self._memory.unsettled = self._unsettled

    def restore_random(self) -> None:
        """Sets torch's random numbers to those that the step drew."""
        set_random_state(self._memory.device, self._random)


def _written(memory: StepMemory, outer: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns all tensors that a step may write, by name."""
    # Steps read the rates, and do not write them.
    result = {
        name: tensor
        for name, tensor in memory.tensors().items()
        if not name.startswith("rate ")
    }
    for index, tensor in enumerate(outer):
        result[f"outer {index}"] = tensor
    for parameter in memory.parameters:
        for index, tensor in enumerate(parameter.steps):
            result[f"{parameter.name}/step {index}"] = tensor
    return result


def contents(memory: StepMemory, outer: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns copies of all that a step may write, by name; on the host if a GPU has too little memory for them.

    Args:
        memory: the step's memory.
        outer: tensors that the step reads and that are neither the batch's nor in the memory, such as buffers.
    """
    written = _written(memory, outer)
    copies = copied(list(written.values()), memory.device)
    return dict(zip(written, copies, strict=True))


@torch.no_grad()
def write_back(
    memory: StepMemory, outer: Sequence[Tensor], before: Mapping[str, Tensor]
) -> None:
    """Writes what :func:`contents` returned before."""
    for name, tensor in _written(memory, outer).items():
        tensor.copy_(before[name])


# of a tensor's greatest gradient, and of the model's greatest: rounding is below
_NEAR, _FLOOR = (1e-4, 1e-5)
_ROUNDING = 2.0**-22  # of a float32 weight that is moved
# Where an input of a ReLU is nothing but rounding, its gradient is all or nothing, and
# one shift may miss that.
_SHIFTS = 8


def step_difference(
    memory: StepMemory,
    outer: Sequence[Tensor],
    before: Mapping[str, Tensor],
    captured: Mapping[str, Tensor],
    *results: Any,
    noise: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """Names a difference of more than rounding between a captured step and the eager one in the memory.

    ``noise`` says how far rounding of the weights moves the gradient of a parameter, and of ``loss`` the loss: within
    ten times that they do not differ.

    A gradient that is nothing but rounding, as of a bias before batch normalisation, is a step of Adam's full size in
    any direction: weights are compared where their gradient counts.
    """
    (loss, output), (eager_loss, eager_output), factor = results
    near = _NEAR * factor
    floor = _FLOOR * factor
    most = near * max(abs(float(eager_loss)), 1e-3) + 10 * noise.get("loss", 0.0)
    if abs(float(loss - eager_loss)) > most:
        return f"the loss, {float(loss):.7g}, not {float(eager_loss):.7g}"
    eager = _written(memory, outer)
    pulls = {
        parameter.name: _pull(parameter, before, eager)
        for parameter in memory.parameters
    }
    greatest = max(map(_most, pulls.values()), default=0.0)
    for parameter in memory.parameters:
        pull = pulls[parameter.name]
        other = _pull(parameter, before, captured)
        if not pull.numel():
            continue
        name = parameter.name
        weight = eager[name]
        # Without state it is seen by how far the weight moves, which is rounded as the
        # weight is.
        rounding = 0.0 if STATES[parameter.choice.kind] else _ROUNDING * _most(weight)
        rounding += 10 * noise.get(name, 0.0)
        if _most(pull - other) > near * _most(pull) + floor * greatest + rounding:
            return f"the gradient of '{name}'"
        counts = pull.abs() > 100 * max(floor * greatest, noise.get(name, 0.0))
        step = _most(_minus(weight, before[name]))
        # A gradient that is rounding makes a step of full size in any direction, and no
        # longer one.
        share = torch.where(counts, 0.05, 2.5)
        far = _minus(weight, captured[name]).to(share.device) / share
        if _most(far) > step + 2e-5 * _most(weight):
            return f"the weights of '{name}'"
    for index, buffer in enumerate(outer):
        other = captured[f"outer {index}"].float().to(buffer.device)
        if not torch.allclose(
            buffer.float(), other, rtol=10 * near, atol=near, equal_nan=True
        ):
            return f"a buffer of shape {tuple(buffer.shape)}"
    outputs = tensors_in(output)
    for tensor in tensors_in(eager_output):
        if not any(_alike(tensor, other, 10 * near) for other in outputs):
            return f"an output of {tuple(tensor.shape)} {tensor.dtype} beside the loss"
    return ""


def _minus(tensor: Tensor, copy: Tensor) -> Tensor:
    """Subtracts a copy, where it is: on the device, or on the host."""
    return tensor.to(copy.device) - copy


def _most(tensor: Tensor) -> float:
    """Returns the greatest absolute number of a tensor; 0 if it has none."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _alike(tensor: Tensor, other: Tensor, near: float) -> bool:
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    # An integer may be the rank of a score, which rounding changes.
    if not tensor.is_floating_point():
        return True
    # Not the opposite comparison, by which NaN would be a difference.
    return not _most(tensor - other) > near * max(_most(tensor.float()), 1e-3)


def _pull(
    parameter: UpdatedParameter,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
) -> Tensor:
    """Estimates a gradient by the change of the first moment, or of the weight under SGD."""
    name = parameter.name
    if STATES[parameter.choice.kind]:
        name = f"{name}/0"
    change = _minus(after[name], before[name])
    # Adagrad adds the square.
    return change.sqrt() if parameter.choice.kind == "adagrad" else change
