"""StepTimes: a step of towers on several ranks beside one process, compared before the first step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.towers.exchange import together
from torchrec_ext.adopt.towers.local import LocalTowers
from torchrec_ext.adopt.towers.split import TowerSplit
from torchrec_ext.distributed.runtime import gather_objects

_ROUNDS = 3


@dataclass(frozen=True)
class StepTimes:
    """Medians of the milliseconds of a step on the example, without the optimizer.

    Args:
        one_process: of the step in one process, on the fastest rank.
        step: of the step on all ranks, on the slowest.
        phases: of the phases of a step by rank, see :class:`LocalTowers`.
    """

    one_process: float
    step: float
    phases: Sequence[Mapping[str, float]]

    def describe(self, split: TowerSplit) -> str:
        """Describes the time of a step on each rank, compared with one process."""
        phases = self.phases
        loads = [each["towers"] for each in phases]
        # The rank that comes last waits for nobody.
        exchange = min(each["exchange"] for each in phases)
        lines = [
            f"adopt_towers: {self.step:.2f} ms a step on {len(phases)} rank(s), {self.one_process:.2f} ms in one "
            f"process, without the optimizer: {self.one_process / self.step:.2f}x at {split.rows} rows"
        ]
        for rank, each in enumerate(phases):
            names = (
                ", ".join(tower.path for tower in split.towers if tower.rank == rank)
                or "no tower"
            )
            lines.append(
                f"  rank {rank}: {names} {each['towers']:.2f} ms, its rows of the rest {each['top']:.2f} ms"
            )
        lines.append(
            f"  exchange {exchange:.2f} ms, {exchange / self.step:.0%} of a step"
        )
        if len(phases) > 1:
            least = min((load for load in loads if load > 0), default=1.0)
            ratio = " : ".join(f"{load / least:.2f}" for load in loads)
            slowest = loads.index(max(loads))
            lines.append(
                f"  the ranks' towers are as {ratio}: a step is as long as that of rank {slowest}"
            )
        computed = [tower.path for tower in split.towers if tower.computed]
        if computed:
            lines.append(
                f"  {', '.join(computed)}: read what forward computes from the batch, so forward runs up to there on "
                "the whole batch first"
            )
        if split.draws_random:
            lines.append(
                "  the loss draws random numbers: each rank draws its own, not those of one process"
            )
        if len(phases) > 1 and self.one_process < self.step:
            lines.append(
                "  slower than one process: the exchange costs more than the towers save; try larger batches"
            )
        return "\n".join(lines)


def compare_with_one_process(local: LocalTowers, example: Sequence[Any]) -> StepTimes:
    """Compares gradients and times of a step with those of one process. Collective.

    Raises:
        CannotAdopt: a gradient is another one.
    """
    split = local.split
    gradients = together(split.runtime, lambda: _plain_gradients(split, example))
    _forget(split)
    local.gradients(example)
    together(split.runtime, lambda: _refuse_differences(split, gradients))
    one_process = []
    step = []
    phases = []
    # In turns, so that whatever else the machine does slows both.
    for _ in range(_ROUNDS):
        _forget(split)
        dist.barrier()
        start = time.perf_counter()
        split.loss(*example)[0].backward()  # type: ignore[no-untyped-call]
        one_process.append(time.perf_counter() - start)
        _forget(split)
        dist.barrier()
        start = time.perf_counter()
        local.gradients(example)
        step.append(time.perf_counter() - start)
        phases.append(dict(local.seconds))
    medians = {}
    for name in phases[0]:
        medians[name] = 1e3 * statistics.median(each[name] for each in phases)
    own = 1e3 * statistics.median(one_process), 1e3 * statistics.median(step), medians
    every = gather_objects(own, split.runtime.world_size)
    one_process_ms, step_ms, phases_ms = zip(*every, strict=True)
    return StepTimes(min(one_process_ms), max(step_ms), phases_ms)


def _plain_gradients(
    split: TowerSplit, example: Sequence[Any]
) -> dict[str, Tensor | None]:
    """Returns the gradients of one process by the names of the parameters."""
    _forget(split)
    split.loss(*example)[0].backward()  # type: ignore[no-untyped-call]
    top = set(map(id, split.top))
    gradients = {}
    for name, parameter in split.model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse and id(parameter) in top:
            raise CannotAdopt(
                f"parameter '{name}' outside of the towers has a sparse gradient: give its table sparse=False, or "
                "move it into a tower"
            )
        if parameter.requires_grad:
            gradients[name] = gradient
    return gradients


def _forget(split: TowerSplit) -> None:
    for parameter in (*split.model.parameters(), *split.top):
        parameter.grad = None


def _refuse_differences(split: TowerSplit, plain: Mapping[str, Tensor | None]) -> None:
    """Refuses gradients of this rank's parameters that are not those of one process."""
    parameters = dict(split.model.named_parameters())
    local = set(map(id, split.top))
    for tower in split.local:
        local.update(map(id, tower.module.parameters()))
    greatest = max(
        (float(_dense(each).abs().max()) for each in plain.values()), default=0.0
    )
    for name, gradient in plain.items():
        parameter = parameters[name]
        if id(parameter) not in local:
            continue
        ours = _dense(parameter.grad)
        theirs = _dense(gradient)
        # Of outputs, which are in 16 bits under autocast.
        rounding = torch.finfo(split.dtype).eps
        share = max(torch.finfo(parameter.dtype).eps ** 0.5, 8 * rounding)
        # Where a gradient is nothing but rounding, the greatest of all says how much
        # that is.
        allowed = share * (float(theirs.abs().max()) + greatest / 10)
        alike = (parameter.grad is None) == (gradient is None)
        if not alike or bool(((ours - theirs).abs() > allowed).any()):
            raise CannotAdopt(
                f"the gradient of '{name}' is not that of one process: what is above the towers mixes "
                "rows, or differs by rank; leave its sub-network out of towers="
            )


def _dense(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(1)
    return gradient.to_dense() if gradient.is_sparse else gradient
