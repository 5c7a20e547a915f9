"""CapturedStep: forward, backward and optimizers of a training step as one captured function of tensors.

It works on the memory of a model and of its optimizer, see :class:`StepMemory`. A :class:`StepSource` provides both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding
from torch.utils import _pytree as pytree

from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.executors import StepExecutor
from torchrec_ext.capture.memory import RowRule, RowTable, StepMemory
from torchrec_ext.capture.step import parts_of, trained
from torchrec_ext.distributed.row_rule import row_by_row
from torchrec_ext.observe.user_lines import first_line, raising_line, with_text

MOST_GRAPHS = 4  # sizes of batches to capture; each costs a compilation


class RareShapeError(CannotCaptureError):
    """A batch has a rare shape, and no step is captured for it yet."""


@dataclass(frozen=True)
class StepInputs:
    """One step's batch as tensors.

    Args:
        key: identifies the captured step: the shapes of the tensors, and everything else that a capture fixes.
        size: the key without the lengths of lists: equal for two batches if one only has longer lists.
        rows: number of rows of the batch.
        tensors: tensors of the batch, which change from step to step.
        make: builds the batch from the resident tensors and from the batch's tensors or their stand-ins.
        resident: tensors with fixed addresses.
    """

    key: Hashable
    size: Hashable
    rows: int
    tensors: Sequence[Tensor]
    make: Callable[[Sequence[Tensor], Sequence[Tensor]], Any]
    resident: Sequence[Tensor] = ()


class StepSource(Protocol):
    """A model for captured steps: its memory, its forward, and its batches as tensors.

    Attributes:
        memory: parameters to update, with their optimizer's state.
        reading: the tables by name; ``forward`` reads their rows through these. Set before each forward.
        clip_norm: limit of the gradients' norm, see :class:`HybridOptimizer`; 0 for none.
    """

    memory: StepMemory
    reading: Mapping[str, Reader]
    clip_norm: float

    def inputs(self, item: Any) -> StepInputs:
        """Returns the tensors of an item, the argument of a step."""

    def forward(self, tensors: dict[str, Tensor], batch: Any) -> tuple[Tensor, Any]:
        """Returns the loss, (), and the output; ``tensors`` replace the model's own of the same names."""

    @torch.no_grad()
    def look_ups(self, inputs: StepInputs) -> dict[str, int]:
        """Counts the rows of each table read by a step on a batch."""
        counting = {
            name: _Counting(parameter.weight)
            for name, parameter in self.memory.tables.items()
        }
        device = self.memory.device
        # Random numbers and buffers, such as those of a batch norm, stay as they are:
        # this is no step.
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            fixed = {name: tensor.clone() for name, tensor in self.memory.fixed.items()}
            self.reading = counting
            tensors = [tensor.to(device) for tensor in inputs.tensors]
            self.forward(fixed, inputs.make(inputs.resident, tensors))
        return {name: table.count for name, table in counting.items()}

    def begin(self, item: Any) -> None:
        """Prepares the memory for a step on an item."""
        return


class Reader(Protocol):
    """A table inside one step."""

    def read(self, ids: Tensor) -> Tensor:
        """Returns the vectors (n, D) of the ids (n,)."""


class CapturedStep:
    """One rank's training step, captured once for each shape of a batch.

    Args:
        source: model, memory and inputs.
        engine: executor that makes the step faster.
        autocast: makes the context of the forward.
        rule: decides which tables to update row by row.
        take_time: called before a capture, because it may take minutes.
        patience: number of times that a further shape, such as that of an epoch's last batch, is refused before it is
            captured, because a capture takes longer than a few eager steps.

    Attributes:
        captures: number of captures so far.
    """

    def __init__(
        self,
        source: StepSource,
        engine: StepExecutor,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        rule: RowRule = row_by_row,
        take_time: Callable[[], None] = lambda: None,
        patience: int = 0,
    ) -> None:
        self._source = source
        self._memory = source.memory
        self._clip_norm = source.clip_norm
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

    def __call__(self, item: Any) -> tuple[Tensor, Any]:
        """Trains on one batch; returns the loss, (), and the model's output.

        Raises:
            RareShapeError: the shape is too rare so far, see ``patience``; nothing was trained.
            CannotCaptureError: the engine cannot run the model, or there are too many shapes; nothing was trained.
        """
        self._source.begin(item)
        step_inputs = self._source.inputs(item)
        inputs = self._on_device(step_inputs)
        call = self._calls.get(step_inputs.key) or self._capture_once(
            step_inputs, inputs
        )
        self._memory.begin()
        loss, *output = call.run(inputs)
        return loss, pytree.tree_unflatten(output, call.spec)

    def prepare(self, item: Any, *, is_patient: bool = True) -> None:
        """Captures the step for batches like this one, unless there is one; trains nothing, raises like a call.

        Args:
            item: argument of a step.
            is_patient: whether a further shape is refused for some time, see ``patience``.
        """
        step_inputs = self._source.inputs(item)
        if step_inputs.key not in self._calls:
            self._capture_once(
                step_inputs, self._on_device(step_inputs), is_patient=is_patient
            )

    def _on_device(self, step_inputs: StepInputs) -> list[Tensor]:
        """Copies the batch's tensors from the host, where the loader makes them, to the device of the memory."""
        return [
            tensor.to(self._memory.device, non_blocking=True)
            for tensor in step_inputs.tensors
        ]

    def _capture_once(
        self,
        step_inputs: StepInputs,
        inputs: Sequence[Tensor],
        *,
        is_patient: bool = True,
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
        is_rare = is_patient and self._refused[key] < self._patience
        if self._calls and not outgrown and is_rare:
            self._refused[key] += 1
            raise RareShapeError("a batch of a shape that came seldom so far")
        try:
            if not outgrown:
                self._check_number(step_inputs)
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

    def _check_number(self, step_inputs: StepInputs) -> None:
        if len(self._calls) == MOST_GRAPHS:
            rows = {call.rows for call in self._calls.values()}
            sizes = ", ".join(map(str, sorted({*rows, step_inputs.rows})))
            raise CannotCaptureError(
                f"batches of more than {MOST_GRAPHS} shapes, of {sizes} rows; give them one batch_size and one form"
            )

    def _capture(self, step_inputs: StepInputs, inputs: Sequence[Tensor]) -> _Call:
        self._take_time()
        resident = step_inputs.resident
        make = step_inputs.make
        # Chosen once: later shapes update each table in the same way.
        if not self._calls:
            self._memory.choose(self._source.look_ups(step_inputs), self._rule)
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

        call = _Call(step_inputs.size, step_inputs.rows)
        call.run = self._engine(step, [*memory.values(), *resident], list(inputs))
        return call

    @property
    def row_tables(self) -> list[str]:
        """Names of the tables updated row by row; available after the first step."""
        return self._memory.row_tables

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
            reading: dict[str, Reader] = {}
            for parameter, part, table in zip(
                memory.parameters, parts, tables, strict=True
            ):
                if parameter.table:
                    reading[parameter.name] = table or Whole(part.weight)
            self._source.reading = reading
            return self._source.forward(model_tensors, make())

        return trained(
            forward,
            (),
            parts,
            tensors["step"],
            clip_norm=self._clip_norm,
            autocast=self._autocast,
        )


@dataclass
class Whole:
    """A table whose gradient is a matrix as large as itself."""

    weight: Tensor

    def read(self, ids: Tensor) -> Tensor:
        """Returns the vectors (n, D) of the ids (n,)."""
        return embedding(ids, self.weight)


@dataclass
class _Call:
    """The captured step for one shape of batch, with the tree of its outputs; see :class:`StepInputs`."""

    size: Hashable
    rows: int
    run: Callable[[Sequence[Tensor]], list[Tensor]] = field(init=False)
    spec: Any = field(init=False)


@dataclass
class _Counting:
    """A table with a counter of look-ups."""

    weight: Tensor
    count: int = 0

    def read(self, ids: Tensor) -> Tensor:
        self.count += len(ids)
        return self.weight.index_select(0, ids)
