"""CompiledStep: look-ups, forward, backward and Adam of a whole stack as one function, compiled by torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.networks.graph import Inputs, trace
from torchrec_ext.networks.optimizer import StackedOptimizer, StackedWeights
from torchrec_ext.networks.skeleton import StackError
from torchrec_ext.networks.stack import Losses, Stack

_STATE = ("exp_avg", "exp_avg_sq", "step")


class CompiledStep:
    """Steps of a stack by one compiled function for each shape of batch: 10 to 30 s to compile, then faster than kernel by kernel.

    It works on the stack's weights and the optimizer's own moments, which stay what they are to everybody else, so
    :meth:`Stack.backward` and :meth:`StackedOptimizer.step` may be called between compiled steps.

    Args:
        stack: with features of one id each.
        optimizer: of Adam alone, without decay, limits of the norm or exceptions for single layers; after its first
            step, which makes its moments.
        backend: of torch.compile; ``aot_eager`` to look for a fault without compiling.

    Raises:
        StackError: an optimizer that is not compiled, or that has made no step.

    Example::

        stack.backward(batches)
        optimizer.step()
        step = CompiledStep(stack, optimizer)
        losses = step(next_batches)
    """

    def __init__(self, stack: Stack, optimizer: StackedOptimizer, *, backend: str = "inductor") -> None:
        self._stack, self._optimizer, self._backend = stack, optimizer, backend
        self._entries = optimizer.entries()
        self._memory = [own.weight(table).detach() for own in stack.tables.values() for table in own.tables] + [
            stack.flat
        ]
        self._names = [f"{path}.{table.name}" for path, own in stack.tables.items() for table in own.tables]
        self._check()
        self._rates = [torch.zeros((), device=stack.flat.device) for _ in self._entries]
        self._functions: dict[tuple[object, ...], Callable[..., list[Tensor]]] = {}

    def __call__(self, batches: Sequence[TowerBatch]) -> Losses:
        """One step of all members on their batches.

        Raises:
            StackError: a feature with another number of ids than one in some row.
        """
        inputs = self._stack.inputs(batches, look_up=False)
        looked = [own.ids() for own in self._stack.tables.values()]
        ids = [rows for own in looked if own is not None for rows in own]
        if None in looked:
            raise StackError(
                "a compiled step needs features of one id in each row; train a stack that reads lists step by step"
            )
        key = inputs.shapes()
        if key not in self._functions:
            self._functions[key] = torch.compile(
                self._function(inputs._replace(pooled=self._pooled(ids))),
                fullgraph=True,
                dynamic=False,
                backend=self._backend,
            )
        self._optimizer.next_rates()
        for rate, (group, _, _) in zip(self._rates, self._entries, strict=True):
            rate.fill_(group["lr"])
        states = [state[name] for _, _, state in self._entries for name in _STATE]
        with torch.no_grad():
            loss, logits = self._functions[key](*self._memory, *states, *self._rates, *ids, *inputs.rest())
        return Losses(loss, logits)

    def _pooled(self, ids: Sequence[Tensor]) -> list[list[Tensor]]:
        """What the look-ups give, in shape; a trace needs no values."""
        rest, members = iter(ids), len(self._stack.members)
        return [
            [
                torch.empty(members, len(next(rest)) // members, table.embedding_dim, device=ids[0].device)
                for table in own.tables
                for _ in table.feature_names
            ]
            for own in self._stack.tables.values()
        ]

    def _check(self) -> None:
        if self._optimizer.clips():
            raise StackError(
                "clip_norm: a compiled step has no limit of the gradient's norm; set optimizer.clip_norm=0"
            )
        for group, moved, _ in self._entries:
            choice = group["choice"]
            if choice.kind != "adam" or choice.weight_decay or choice.l2:
                raise StackError(
                    f"'{moved.name}' is moved by {choice.kind} with weight_decay={choice.weight_decay} and "
                    f"l2={choice.l2}: only "
                    "adam without either is compiled"
                )
            if not moved.is_table and moved.name != next(iter(self._stack.dense)):
                raise StackError(
                    f"'{moved.name}' has settings of its own: a compiled step moves all dense layers alike"
                )
        if not all(state for _, _, state in self._entries):
            raise StackError("the optimizer has no moments yet: train one step before the compiled ones")

    def _at(self, moved: StackedWeights) -> tuple[int, slice]:
        """Which of the weights an entry moves, and which of their rows."""
        at = self._names.index(moved.name) if moved.is_table else len(self._names)
        rows = len(self._memory[at]) // len(self._stack.members)
        first = self._stack.members.index(moved.members[0])
        return at, slice(rows * first, rows * (first + len(moved.members)))

    def _function(self, inputs: Inputs) -> Callable[..., list[Tensor]]:
        graph = trace(self._stack.skeleton, inputs)  # type: ignore[arg-type]
        tables = [table for own in self._stack.tables.values() for table in own.tables]
        looks = [(at, table.embedding_dim) for at, table in enumerate(tables) for _ in table.feature_names]
        moved = [(*self._at(entry), group["betas"], group["eps"]) for group, entry, _ in self._entries]
        shapes, members, memory = (
            [value.shape for value in self._stack.dense.values()],
            len(self._stack.members),
            len(self._memory),
        )
        sizes = [shape.numel() // members for shape in shapes]

        def step(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors)
            weights = [next(rest) for _ in range(memory)]
            states = [[next(rest) for _ in _STATE] for _ in moved]
            rates, ids = [next(rest) for _ in moved], [next(rest) for _ in looks]
            dense = [
                part.view(shape) for part, shape in zip(torch.split(weights[-1], sizes, dim=1), shapes, strict=True)
            ]
            pooled = [
                weights[at].index_select(0, rows).view(members, -1, width)
                for (at, width), rows in zip(looks, ids, strict=True)
            ]
            loss, logits, *found = graph(*dense, *pooled, *rest)
            grads = [torch.zeros_like(weight) for weight in weights[:-1]]
            for (at, width), rows, grad in zip(looks, ids, found[len(dense) :], strict=True):
                grads[at] = grads[at].index_add(0, rows, grad.reshape(-1, width))
            grads.append(torch.cat([grad.reshape(members, -1) for grad in found[: len(dense)]], dim=1))
            for (at, part, betas, eps), state, rate in zip(moved, states, rates, strict=True):
                weights[at][part] = _adam(weights[at][part], grads[at][part], state, rate, betas, eps)
            return [loss, logits]

        return step


def _adam(
    weight: Tensor, grad: Tensor, state: Sequence[Any], rate: Tensor, betas: tuple[float, float], eps: float
) -> Tensor:
    """The weight after a step of torch.optim.Adam; the state is changed."""
    first, second, steps = state
    steps.add_(1)
    first.lerp_(grad, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    scale = rate / (1 - betas[0] ** steps)
    moved: Tensor = weight - scale * first / ((second / (1 - betas[1] ** steps)).sqrt() + eps)
    return moved
