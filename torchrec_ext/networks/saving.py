"""A member of a stack as a run of its own, so that its checkpoint is that of a network trained alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.networks.optimizer import Moved, StackedOptimizer
from torchrec_ext.networks.stack import Stack
from torchrec_ext.train.checkpoint.run_checkpoints import Position
from torchrec_ext.train.early_stop import EarlyStopWatch


@dataclass
class MemberWindow:
    """(3,) float64: the loss, the steps and the rows since the last record."""

    sums: Tensor


@dataclass
class MemberRun:
    """What :class:`RunCheckpoints` saves and puts back of one member.

    Args:
        model: the network, whose weights are views of the stack's.
        optimizer: its part of the stack's, see :func:`optimizer_of`.
        loader: of its batches.
        watch: of its early stop.
        window: of its next record.
        at: where it stands.
        runtime: of one rank.
    """

    model: nn.Module
    optimizer: KeyedOptimizer
    loader: Any
    watch: EarlyStopWatch
    window: MemberWindow
    at: Position
    runtime: Runtime

    def settle(self) -> None:
        """Nothing lags behind in a stack."""


def is_over(at: Position, epochs: int) -> bool:
    """Whether a member that stands there, of a run of so many epochs, has left the stack: after its last epoch or an early stop."""
    return at.ended and (at.epoch + 1 >= epochs or any(record["kind"] == "stop" for record in at.history))


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Within it torch draws on the CPU from where ``generator`` stands, which stands where that ended after it."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator.get_state())
        yield
        generator.set_state(torch.get_rng_state())


def optimizer_of(stack: Stack, optimizer: StackedOptimizer, member: str) -> KeyedOptimizer:
    """One member's part of the stack's optimizers, under the names that it has alone; writing its state writes the stack's.

    Args:
        stack: of the member.
        optimizer: after a step, or :meth:`StackedOptimizer.begin`.
        member: its name.
    """
    network, own_names = stack.networks[member], dict(zip(stack.dense, stack.own_names(member), strict=True))
    params: dict[str, Tensor] = {}
    state: dict[Tensor, dict[str, Tensor]] = {}
    for _, moved, held in optimizer.entries():
        if member not in moved.members:
            continue
        for name, parts in _parts(stack, moved, held, moved.members.index(member)).items():
            key = own_names.get(name) or "{}.embedding_bags.{}.weight".format(*name.rsplit(".", 1))
            params[key] = network.get_parameter(key)
            state[params[key]] = parts
    return KeyedOptimizer(params, state, [])


def _parts(stack: Stack, moved: Moved, held: dict[str, Tensor], place: int) -> dict[str, dict[str, Tensor]]:
    """By name of a weight the state of the member at ``place`` of those that are moved together."""
    count = len(moved.members)
    own = {slot: value.chunk(count)[place] if value.dim() else value for slot, value in held.items()}
    if moved.is_table:
        return {moved.name: own}
    names = [moved.name]
    if moved.parameter.numel() == count * stack.flat.shape[1]:
        names = list(stack.dense)  # all of them side by side
    shapes = [stack.dense[name].shape[1:] for name in names]
    sizes = [shape.numel() for shape in shapes]
    split = {slot: torch.split(value.reshape(-1), sizes) if value.dim() else [value] * len(names) for slot, value in own.items()}
    return {
        name: {slot: parts[at].view(shape) if parts[at].dim() else parts[at] for slot, parts in split.items()}
        for at, (name, shape) in enumerate(zip(names, shapes, strict=True))
    }
