"""trained(): one training step as one function of a batch: rows, the loss, its gradients, the limit, the update.

Everybody's captured step is this function: a user's loop, the package's sharded models and stacks of networks. It reads
rows of tables, calls a forward, takes ``autograd.grad`` inside, limits the norm and updates weights and state in place.
What makes it fast is a door, which takes the function and returns the one to call in its place:

- :class:`CompiledCall`: torch.compile, whose guards compare all that a user's Python has read, before each step;
  adopted steps put one CUDA graph behind it on a GPU;
- the executors of :mod:`executors`, which trace a function of tensors without guards, for models whose tables share one
  storage: :class:`CapturedStep` calls them;
- none: op by op.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_ext.capture.memory import Clock, RowTable, StepMemory
from torchrec_ext.capture.update_rules import RowClock
from torchrec_ext.distributed.optim.config import Choice


class StepPart(NamedTuple):
    """A parameter inside one step; the step writes its tensors.

    Args:
        weight: its values; a leaf of the loss, unless rows of it are read.
        state: its optimizer's state, in the order of the rule.
        choice: the update rule and its numbers.
        clock: count and learning rate of the step; a stack of networks has a rate for each, of any shape that
            multiplies the weight.
        rows: the clock of its rows, if only those that are read are updated.
        is_table: whether it is a table, (rows, D).
        is_limited: whether the limit on the norm of all gradients counts and scales its own.
    """

    weight: Tensor
    state: list[Tensor]
    choice: Choice
    clock: Clock
    rows: RowClock | None = None
    is_table: bool = False
    is_limited: bool = True


# Takes a table, or None for a layer, of each part, then the batch; returns the loss, (), and any tree of outputs.
Forward = Callable[..., tuple[Tensor, Any]]


def trained(
    forward: Forward,
    batch: Sequence[Any],
    parts: Sequence[StepPart],
    count: Tensor,
    *,
    clip_norm: float = 0.0,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    zero: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Makes one training step, and returns the loss, (), and the output of the forward.

    Parts on which the loss does not depend are not updated.

    Args:
        forward: see :data:`Forward`; it reads rows of a table through :meth:`RowTable.read`.
        batch: the forward's other arguments.
        parts: the parameters to update.
        count: the number of steps so far, (), which the step raises by one; the clocks read it.
        clip_norm: limit of the gradients' norm; 0 for none.
        autocast: makes the context of the forward.
        zero: see :class:`RowTable`; the weights of tables then need a gradient elsewhere, and none here.
    """
    with torch.no_grad():
        # Inside of the step, so that a replay counts too.
        count.add_(1)
    tables: list[RowTable | None] = []
    for part in parts:
        table = None
        if part.rows is not None:
            weight = part.weight if zero is None else part.weight.detach()
            table = RowTable(
                weight, part.state, part.rows, part.choice, part.clock, zero
            )
        tables.append(table)
    with torch.enable_grad():
        with autocast():
            loss, output = forward(tables, *batch)
        # After the forward, because a table has a leaf for each of its look-ups.
        leaves = []
        ends = [0]
        for part, table in zip(parts, tables, strict=True):
            leaves += [part.weight] if table is None else table.leaves()
            ends.append(len(leaves))
        # One call for all leaves: the graph is walked once. It stays for what a user's forward keeps, which Dynamo
        # would not let out otherwise.
        flat = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    grads: list[list[Tensor | None]] = []
    for start, end in itertools.pairwise(ends):
        grads.append(list(flat[start:end]))
    with torch.no_grad():
        if clip_norm:
            grads = _limited(grads, parts, tables, clip_norm)
        _update(grads, parts, tables)
    return loss.detach(), output


def _limited(
    grads: Sequence[list[Tensor | None]],
    parts: Sequence[StepPart],
    tables: Sequence[RowTable | None],
    clip_norm: float,
) -> list[list[Tensor | None]]:
    """Limits the norm of all gradients that count, as ``torch.nn.utils.clip_grad_norm_`` does."""
    squares = []
    for part, table, of_one in zip(parts, tables, grads, strict=True):
        if not part.is_limited:
            continue
        if table is not None and of_one:
            # A row that was looked up twice has one gradient in the norm: the sum of both.
            sums, represents = table.gradients(of_one)
            squares.append((sums * represents).square().sum())
        elif table is None and of_one[0] is not None:
            squares.append(of_one[0].square().sum())
    # As where TorchRec shards all tables, and the model has nothing else.
    if not squares:
        return list(grads)
    # torch's clip_grad_norm_ adds the same 1e-6.
    factor = (clip_norm / (torch.stack(squares).sum().sqrt() + 1e-6)).clamp(max=1.0)
    limited = []
    for part, of_one in zip(parts, grads, strict=True):
        if part.is_limited:
            of_one = [None if grad is None else grad * factor for grad in of_one]
        limited.append(of_one)
    return limited


def _update(
    grads: Sequence[list[Tensor | None]],
    parts: Sequence[StepPart],
    tables: Sequence[RowTable | None],
) -> None:
    """Updates all parts on which the loss depends."""
    for part, table, of_one in zip(parts, tables, grads, strict=True):
        if table is not None:
            table.move(of_one)
            continue
        (grad,) = of_one
        if grad is None:
            continue
        new = part.clock.stepped(part.weight, grad, part.state, part.choice)
        for target, values in zip([part.weight, *part.state], new, strict=True):
            target.copy_(values)


def parts_of(memory: StepMemory, tensors: Mapping[str, Tensor]) -> list[StepPart]:
    """Returns the parts of a memory for one step on ``tensors``, the stand-ins of :meth:`StepMemory.tensors`."""
    parts = []
    for parameter in memory.parameters:
        name = parameter.name
        weight = tensors[name]
        rows = None
        if name in memory.row_tables:
            rows = RowClock(*(tensors[f"{name}/{each}"] for each in RowClock._fields))
        else:
            weight = weight.detach().requires_grad_()
        part = StepPart(
            weight,
            [tensors[f"{name}/{index}"] for index in range(len(parameter.state))],
            parameter.choice,
            memory.clock(parameter.group, tensors),
            rows,
            parameter.table,
            not parameter.sharded,
        )
        parts.append(part)
    return parts
