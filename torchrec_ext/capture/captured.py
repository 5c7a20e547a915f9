"""CapturedStep: forward, backward and optimizers of a training step as one captured function of tensors.

It works on the memory of a model from :func:`hybrid_parallel` and of its optimizer, see :class:`StepMemory`. Of this
folder it, :mod:`sharded` and :mod:`lowering` alone need TorchRec.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture.errors import CannotCaptureError, RareShapeError
from torchrec_ext.capture.executors import StepExecutor
from torchrec_ext.capture.lowering import Packer, lowered, static_bags
from torchrec_ext.capture.memory import Read, RowRule, RowTable, StepMemory
from torchrec_ext.capture.policy import MOST_GRAPHS
from torchrec_ext.capture.sharded import moved_parameters
from torchrec_ext.capture.step import parts_of, trained
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.row_rule import row_by_row
from torchrec_ext.drawn import DrawnStep
from torchrec_ext.observe.state_copy import copies_of_global_generators
from torchrec_ext.observe.user_lines import first_line, raising_line, with_text


@dataclass(frozen=True)
class StepInputs:
    """One step's batch as tensors.

    Args:
        key: identifies the captured step: the shapes of the tensors, and everything else that a capture fixes.
        size: the key without the lengths of lists: equal for two batches if one only has longer lists.
        tensors: tensors of the batch, which change from step to step.
        make: builds the batch from the resident tensors and from the batch's tensors or their stand-ins.
        resident: tensors with fixed addresses.
    """

    key: Hashable
    size: Hashable
    tensors: Sequence[Tensor]
    make: Callable[[Sequence[Tensor], Sequence[Tensor]], Any]
    resident: Sequence[Tensor] = ()


class CapturedStep:
    """One rank's training step, captured once for each shape of a batch.

    Lists of ids are padded, see :class:`Packer`. If a batch's lists outgrow a captured step, a new one replaces it.

    Args:
        model: model from :func:`hybrid_parallel`, each table on this rank alone or on every rank.
        optimizer: the model's optimizer, after its first step, which creates its state.
        engine: executor that makes the step faster.
        autocast: makes the context of the forward.
        rule: decides which tables to update row by row.
        take_time: called before a capture, because it may take minutes.
        patience: number of times that a further shape, such as that of an epoch's last batch, is refused before it is
            captured, because a capture takes longer than a few eager steps.

    Attributes:
        captures: number of captures so far.

    Raises:
        CannotCaptureError: the model or the optimizer has no captured form.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: HybridOptimizer,
        engine: StepExecutor,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        rule: RowRule = row_by_row,
        take_time: Callable[[], None] = lambda: None,
        patience: int = 0,
    ) -> None:
        # By name of a table, what the forward reads its rows by; of one step.
        self._reading: Mapping[str, Read] = {}
        self._model = lowered(
            model, static_bags(lambda name, ids: self._reading[name](ids))
        )
        fixed = dict(self._model.named_buffers())
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                fixed[name] = parameter.detach()
        self._memory = StepMemory(moved_parameters(model, optimizer), fixed)
        self._packer = Packer()
        self._clip_norm = optimizer.clip_norm
        self._engine = engine
        self._autocast = autocast
        self._rule = rule
        self._take_time = take_time
        self._patience = patience
        self._refused: Counter[Hashable] = Counter()
        self._failed: dict[Hashable, str] = {}
        self._calls: dict[Hashable, _Call] = {}
        self.captures = 0

    def reload(self) -> None:
        """Reads the optimizer's number of steps again, after eager steps in between.

        Raises:
            CannotCaptureError: the parameters have made different numbers of steps.
        """
        self._memory.reload()

    def settle(self) -> None:
        """Completes deferred updates: model and optimizer then equal those after the same number of eager steps."""
        self._memory.settle()

    def __call__(self, item: TowerBatch | DrawnStep) -> tuple[Tensor, Any]:
        """Trains on one batch; returns the loss, (), and the model's output.

        Raises:
            RareShapeError: the shape is too rare so far, see ``patience``; nothing was trained.
            CannotCaptureError: the engine cannot run the model, or there are too many shapes; nothing was trained.
        """
        if isinstance(item, TowerBatch):
            # Rows of new ids begin anew just before they are read: nothing of their past
            # is left to catch up.
            for note in item.fresh or ():
                self._memory.mark_rows_current(note.table, note.rows)
        step_inputs = self._inputs(item)
        # From the host, where the loader makes them, to the device of the memory.
        inputs = [
            tensor.to(self._memory.device, non_blocking=True)
            for tensor in step_inputs.tensors
        ]
        call = self._calls.get(step_inputs.key) or self._capture_once(
            step_inputs, inputs
        )
        self._memory.begin()
        loss, *output = call.run(inputs)
        return loss, pytree.tree_unflatten(output, call.spec)

    def _inputs(self, item: TowerBatch | DrawnStep) -> StepInputs:
        """Returns the tensors of a batch, or of a drawn step: the latter becomes a batch inside the captured step."""
        if isinstance(item, DrawnStep):
            assert item.source is not None
            key = tuple(tensor.shape for tensor in item.tensors)
            return StepInputs(
                key,
                key,
                item.tensors,
                item.source.assemble,
                item.source.tensors,
            )
        layout, tensors = self._packer.pack(item)
        return StepInputs(
            layout,
            layout.sizes,
            tensors,
            lambda _, parts: layout.batch(list(parts)),
        )

    @torch.no_grad()
    def _look_ups(self, inputs: StepInputs, tensors: Sequence[Tensor]) -> Counter[str]:
        """Counts the rows of each table read by a step on a batch.

        Raises:
            CannotCaptureError: the forward counts or draws in Python, where a captured step does not.
        """
        memory = self._memory
        counts = Counter[str]()

        def read(name: str, ids: Tensor) -> Tensor:
            counts[name] += len(ids)
            return memory.tables[name].weight.index_select(0, ids)

        # Random numbers and buffers, such as those of a batch norm, stay as they are:
        # this is no step.
        fixed = {name: tensor.clone() for name, tensor in memory.fixed.items()}
        self._reading = {name: partial(read, name) for name in memory.tables}
        batch = (inputs.make(inputs.resident, tensors),)
        before = [(each, _numbers(each)) for each in self._model.modules()]
        state = _draws_of_python()
        copies = copies_of_global_generators()
        try:
            functional_call(self._model, fixed, batch)
            changed = [] if _draws_of_python() == state else ["random"]
        finally:
            for put_back in copies:
                put_back()
        for module, numbers in before:
            changed += dict(_numbers(module).items() - numbers.items())
            vars(module).update(numbers)
        if changed:
            raise CannotCaptureError(
                f"forward changes '{min(changed)}', which a captured step would read as it is now: count in a buffer, "
                "draw by torch"
            )
        return counts

    def _capture_once(
        self,
        step_inputs: StepInputs,
        inputs: Sequence[Tensor],
    ) -> _Call:
        """Captures the step for batches of this shape, unless that has failed before."""
        key = step_inputs.key
        # Capacities only grow, so a layout with shorter lists never returns.
        outgrown = [
            captured_key
            for captured_key, call in self._calls.items()
            if call.size == step_inputs.size
        ]
        if key in self._failed:
            raise CannotCaptureError(self._failed[key])
        is_rare = self._refused[key] < self._patience
        if self._calls and not outgrown and is_rare:
            self._refused[key] += 1
            raise RareShapeError("a batch of a shape that came seldom so far")
        try:
            if not outgrown and len(self._calls) == MOST_GRAPHS:
                raise CannotCaptureError(
                    f"batches of more than {MOST_GRAPHS} shapes; give them one batch_size and one form"
                )
            call = self._capture(step_inputs, inputs)
        except CannotCaptureError as error:
            self._failed[key] = str(error)
            raise
        except Exception as error:
            # Perhaps the user's own: the caller then runs the eager step on the same
            # batch, which raises it there.
            self._failed[key] = (
                f"{type(error).__name__} at {with_text(raising_line(error))}: {first_line(error)}"
            )
            raise CannotCaptureError(self._failed[key]) from error
        for captured_key in outgrown:
            del self._calls[captured_key]
        self._calls[key] = call
        self.captures += 1
        return call

    def _capture(self, step_inputs: StepInputs, inputs: Sequence[Tensor]) -> _Call:
        self._take_time()
        resident = step_inputs.resident
        make = step_inputs.make
        # Chosen once: later shapes update each table in the same way.
        if not self._calls:
            self._memory.choose(self._look_ups(step_inputs, inputs), self._rule)
        memory = self._memory.tensors()
        resident_end = len(memory) + len(resident)

        def step(*tensors: Tensor) -> list[Tensor]:
            # The memory comes first, then the resident tensors, then the batch's.
            loss, output = self._trained(
                dict(zip(memory, tensors, strict=False)),
                lambda: make(
                    tensors[len(memory) : resident_end], tensors[resident_end:]
                ),
            )
            outputs, call.spec = pytree.tree_flatten(output)
            return [loss, *outputs]

        call = _Call(step_inputs.size)
        call.run = self._engine(step, [*memory.values(), *resident], list(inputs))
        return call

    @property
    def shapes(self) -> int:
        """The number of captured shapes of batches."""
        return len(self._calls)

    def describe(self) -> str:
        """Describes in a line how each table is updated."""
        return self._memory.describe()

    def _trained(
        self, tensors: dict[str, Tensor], make: Callable[[], Any]
    ) -> tuple[Tensor, Any]:
        """Trains one step on ``tensors``; returns the loss and the model's output."""
        memory = self._memory
        # The function is traced once and replayed, so it may only use tensors that it is called with.
        parts = parts_of(memory, tensors)
        model_tensors = {name: tensors[name] for name in memory.fixed}
        for parameter, part in zip(memory.parameters, parts, strict=True):
            if not parameter.table:
                model_tensors[parameter.name] = part.weight

        def forward(tables: Sequence[RowTable | None]) -> tuple[Tensor, Any]:
            reading: dict[str, Read] = {}
            for parameter, part, table in zip(
                memory.parameters, parts, tables, strict=True
            ):
                if parameter.table:
                    whole = partial(F.embedding, weight=part.weight)
                    reading[parameter.name] = table.read if table else whole
            self._reading = reading
            return functional_call(self._model, model_tensors, (make(),))  # type: ignore[no-any-return]

        return trained(
            forward,
            (),
            parts,
            tensors["step"],
            clip_norm=self._clip_norm,
            autocast=self._autocast,
        )


def _numbers(module: nn.Module) -> dict[str, float]:
    """Returns a module's own numbers, such as a count of steps that its forward anneals by."""
    own = vars(module).items()
    return {name: value for name, value in own if isinstance(value, int | float)}


def _draws_of_python() -> object:
    """Returns the state of the generators that are not torch's."""
    return random.getstate(), str(np.random.get_state())


@dataclass
class _Call:
    """The captured step for one shape of batch, with the tree of its outputs; see :class:`StepInputs`."""

    size: Hashable
    run: Callable[[Sequence[Tensor]], list[Tensor]] = field(init=False)
    spec: Any = field(init=False)
