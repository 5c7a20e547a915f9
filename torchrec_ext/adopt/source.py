"""AdoptedSource: a user's model, loss and batches as a captured step needs them.

CapturedUpdate: the captured steps of such a model.

GivenBatch, DrawnBatch: a batch that the user's loop made, and one that is made of :class:`Rows` inside the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchrec_ext.adopt.checks import StateTensor
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.graph import ForwardGraph, changed_between_calls
from torchrec_ext.adopt.lag import Lag
from torchrec_ext.adopt.rows.rows import Rows
from torchrec_ext.capture.captured import CapturedStep, Reader, StepInputs, StepSource
from torchrec_ext.capture.executors import StepEngine
from torchrec_ext.capture.memory import StepMemory
from torchrec_ext.observe.user_lines import module_line


class GroupSettings(Mapping[str, Any]):
    """A group of an optimizer's settings by its index: load_state_dict puts other dicts in their place."""

    def __init__(self, optimizer: Optimizer, index: int) -> None:
        self._optimizer = optimizer
        self._index = index

    def __getitem__(self, name: str) -> Any:
        return self._optimizer.param_groups[self._index][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizer.param_groups[self._index])

    def __len__(self) -> int:
        return len(self._optimizer.param_groups[self._index])


class TensorKind(NamedTuple):
    """Shape and dtype of a tensor of a batch."""

    shape: torch.Size
    dtype: torch.dtype


Shapes = tuple[TensorKind, ...]  # of the tensors of a batch


def _shapes(leaves: Sequence[Any]) -> Shapes:
    return tuple(
        TensorKind(leaf.shape, leaf.dtype)
        for leaf in leaves
        if isinstance(leaf, Tensor)
    )


class GivenBatch(NamedTuple):
    """A batch that the user's loop made."""

    values: tuple[Any, ...]

    def args(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function."""
        return self.values

    def example(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function."""
        return self.values

    def shapes(self) -> Shapes:
        """Returns the shapes of its tensors."""
        return _shapes(pytree.tree_leaves(self.values))


class RowsOnDevice:
    """The tensors of :class:`Rows` on a device.

    Attributes:
        examples: one batch of each size: Dynamo looks at it in place of those that are made inside the step.
    """

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self.rows = rows
        self.names = list(rows.tensors)
        self.tensors = [tensor.to(device) for tensor in rows.tensors.values()]
        self.examples: dict[Any, tuple[Any, ...]] = {}

    def assemble(
        self, tensors: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        """Makes a batch of the tensors, and of the indices and draws of a step."""
        draws = parts[1] if len(parts) > 1 else None
        return self.rows.assemble(
            parts[0], draws, dict(zip(self.names, tensors, strict=True))
        )


class DrawnBatch(NamedTuple):
    """A batch that is not made yet: indices (B,) of its rows, and what was drawn for them, (B, n) or None."""

    resident: RowsOnDevice
    indices: Tensor
    draws: Tensor | None

    def parts(self) -> list[Tensor]:
        """Returns the tensors of which the batch is made."""
        return [self.indices] if self.draws is None else [self.indices, self.draws]

    def shapes(self) -> Shapes:
        """Returns the shapes of the tensors of which it is made."""
        return _shapes(self.parts())

    def args(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function."""
        device = self.resident.tensors[0].device
        parts = [tensor.to(device) for tensor in self.parts()]
        batch = self.resident.assemble(self.resident.tensors, parts)
        # In memory as a DataLoader's batch: repeated rows are views until here.
        return pytree.tree_map_only(Tensor, Tensor.contiguous, batch)  # type: ignore[no-any-return]

    def example(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function of some batch of the same size."""
        shapes = tuple(tensor.shape for tensor in self.parts())
        # Dynamo looks at shapes and types alone, so that one batch of a size is enough.
        if shapes not in self.resident.examples:
            self.resident.examples[shapes] = self.args()
        return self.resident.examples[shapes]


AnyBatch = GivenBatch | DrawnBatch


class GraphCall(NamedTuple):
    """One call of a graph: the batch, and what Dynamo found for the graph's inputs."""

    graph: ForwardGraph
    batch: AnyBatch
    tensors: Sequence[Tensor]

    def outer(self) -> list[Tensor]:
        """Returns all inputs except the batch's and updated parameters."""
        return [self.tensors[index].detach() for index in self.graph.outer]


class _Key(NamedTuple):
    """The conditions that a captured step is made for: a graph of Dynamo's, and on a GPU the places of its inputs."""

    graph: int
    shapes: tuple[tuple[int, ...], ...]
    addresses: tuple[int, ...]

    def difference(self, other: Any) -> str:
        """Says what differs between two calls."""
        return changed_between_calls()


class _Values(NamedTuple):
    """The inputs of a graph by their index, and how often ids among them repeat each value."""

    graph: ForwardGraph
    tensors: dict[int, Tensor]
    repeated: RepeatedRows


class AdoptedSource(StepSource):
    """A user's model as the :class:`StepSource` of a captured step.

    Args:
        model: the user's model.
        memory: parameters that are moved.
        clip_norm: limit of the gradients' norm; 0 for none.
    """

    def __init__(self, model: nn.Module, memory: StepMemory, clip_norm: float) -> None:
        self.reading: Mapping[str, Reader] = {}
        self.memory = memory
        self.clip_norm = clip_norm
        self._model = model

    def inputs(self, item: GraphCall | StepInputs) -> StepInputs:
        """Returns the tensors of a call."""
        if isinstance(item, StepInputs):
            return item
        graph, batch, tensors = item
        outer = graph.outer
        of_batch = graph.of_batch
        drawn_batch = None
        columns: list[Tensor] = []
        shapes: tuple[tuple[int, ...], ...] = ()
        if isinstance(batch, DrawnBatch):
            drawn_batch = batch
            parts = batch.parts()
            columns = batch.resident.tensors
            # Dynamo has one graph for each shape of a batch, but for those that are
            # made inside the step.
            shapes = tuple(tuple(tensor.shape) for tensor in parts)
        else:
            parts = [tensors[index].detach() for index in of_batch]
        step_tensors = list(parts)
        width = len(parts)
        outer_tensors = item.outer()
        on_gpu = self.memory.device.type == "cuda"
        if on_gpu:
            # A CUDA graph reads the addresses of its capture: what is not of the batch
            # must be where it was.
            addresses = tuple(tensor.data_ptr() for tensor in outer_tensors)
            resident = outer_tensors + columns
        else:
            addresses = ()
            resident = columns
            step_tensors += outer_tensors
        key = _Key(graph.number, shapes, addresses)

        def make(resident: Sequence[Tensor], tensors: Sequence[Tensor]) -> _Values:
            outer_values = resident[: len(outer)] if on_gpu else tensors[width:]
            inputs = dict(zip(outer, outer_values, strict=True))
            if drawn_batch is None:
                inputs |= dict(zip(of_batch, tensors, strict=False))
                return _Values(graph, inputs, RepeatedRows((), {}))
            # On a GPU the columns stand behind the outer tensors.
            columns_now = resident[len(resident) - len(columns) :]
            args = drawn_batch.resident.assemble(columns_now, tensors[: len(parts)])
            leaves = pytree.tree_leaves(args)
            repeats = _repeats(drawn_batch.resident.rows, leaves, len(parts[0]))
            inputs |= {index: leaves[leaf] for index, leaf in of_batch.items()}
            return _Values(graph, inputs, RepeatedRows(args, repeats))

        count = len(parts[0]) if parts and parts[0].dim() else 0
        return StepInputs(key, key, count, step_tensors, make, resident)

    def forward(self, tensors: dict[str, Tensor], batch: Any) -> tuple[Tensor, Any]:
        """Returns the loss, (), and the outputs of the graph, on ``tensors`` in place of the model's."""
        loss, outputs = self.run(tensors, batch)
        # They go to the user, who gets no graph behind them.
        return loss, pytree.tree_map_only(Tensor, Tensor.detach, outputs)

    def train(self, step: CapturedStep, inputs: StepInputs) -> tuple[Tensor, Any]:
        """Makes a captured step; returns the loss, (), and the outputs of the graph."""
        return step(inputs)

    def run(
        self, tensors: dict[str, Tensor], values: _Values
    ) -> tuple[Tensor, list[Any]]:
        """Runs a graph on ``tensors`` in place of the model's; returns its loss and its outputs."""
        graph = values.graph
        weights = {
            parameter.name: parameter.weight for parameter in self.memory.parameters
        } | tensors
        inputs = values.tensors | {
            index: weights[name] for name, index in graph.parameters.items()
        }
        in_order = [inputs[index] for index in range(len(inputs))]
        with values.repeated:
            return graph.run(in_order, self.reading, values.repeated)

    def look_ups(self, inputs: StepInputs) -> dict[str, int]:
        """Counts the rows that a step reads of each table, without values."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        resident = list(map(mode.from_tensor, inputs.resident))
        tensors = list(map(mode.from_tensor, inputs.tensors))
        with torch._guards.tracing(None), mode:
            return super().look_ups(
                dataclasses.replace(inputs, resident=resident, tensors=tensors)
            )

    def no_gradient(self, names: Sequence[str]) -> None:
        """Refuses a capture if a parameter that eager steps updated gets no gradient.

        Raises:
            CannotAdopt: there is such a parameter.
        """
        if names:
            raise CannotAdopt(
                f"{module_line(self._model, names[0])} had a gradient in an eager step and has none in the captured "
                "one; let the same parameters take part in every step"
            )


def _repeats(rows: Rows, leaves: Sequence[Any], size: int) -> dict[int, int]:
    """Returns how often the leaves of a batch of ``size`` rows repeat each value, by their ids; others are left out."""
    repeats = {}
    for name, leaf in zip(rows.names, leaves, strict=False):
        count = rows.repeats.get(name)
        # Concatenated, a row's values repeat along the first dimension; stacked, they
        # have one of their own.
        if count is not None and leaf.dim() and len(leaf) == size * count:
            repeats[id(leaf)] = count
    return repeats


@dataclass
class CapturedUpdate:
    """The captured steps that update the same parameters in the same way.

    Args:
        source: model, memory and inputs.
        step: the steps, one for each graph.
        engine: the executor, which can also run them op by op.
        state: the optimizers' state.
        dense_tables: why a table is updated as a dense layer, by its name.
        lag: weights and state that are updated later.
        unverified: number of further steps of a graph to compare with eager ones, by its key.
    """

    source: AdoptedSource
    step: CapturedStep
    engine: StepEngine
    state: list[StateTensor]
    dense_tables: dict[str, str]
    lag: Lag = field(init=False)
    unverified: dict[Any, int] = field(default_factory=dict)

    def describe(self, since: int) -> str:
        """Describes how each table is updated, from the step with the number ``since`` on."""
        ways = [f"captured since step {since:,}", self.step.describe()]
        for name, why in self.dense_tables.items():
            ways.append(f"as a dense layer: {name} ({why})")
        return "; ".join(filter(None, ways))


class _Columns(NamedTuple):
    """Columns of a matrix (B, n) in which every row of ``rows`` stands ``repeats`` times, one after the other."""

    rows: Tensor
    repeats: int
    version: int  # of ``rows``: whoever writes there in place ends it

    @property
    def saved(self) -> float:
        """Columns for which a layer need not multiply every row."""
        return self.rows.shape[1] * (1 - 1 / self.repeats)


_SAVED = 8.0  # columns: below it a second product costs more than it saves


class RepeatedRows(TorchFunctionMode):
    """Multiplies rows that stand several times in a batch by a layer's weights once, and repeats the products.

    A matrix of such rows, be it a column of the batch, what is looked up by one, or a concatenation with others, is
    followed as far as the layer that reads it.

    Args:
        batch: arguments of the user's function.
        repeats: how often tensors of the batch repeat each value along their first dimension, by their ids.
    """

    def __init__(self, batch: Any, repeats: Mapping[int, int]) -> None:
        super().__init__()
        self._repeats = repeats
        # The matrix itself is kept, so that no later tensor gets its id.
        self._repeated_columns: dict[int, tuple[Tensor, int, list[_Columns]]] = {}
        for leaf in pytree.tree_leaves(batch):
            if id(leaf) in repeats and leaf.dim() == 2 and leaf.is_floating_point():
                count = repeats[id(leaf)]
                rows = leaf.view(-1, count, leaf.shape[1])[:, 0]
                self._note(leaf, [self._made_of(rows, count)])

    def repeats_of(self, ids: Tensor) -> int:
        """Returns how often ids repeat each value along their first dimension."""
        return self._repeats.get(id(ids), 1)

    def repeat(self, rows: Tensor, count: int) -> Tensor:
        """Returns a tensor in which every row stands ``count`` times."""
        result = rows.repeat_interleave(count, 0)
        if rows.dim() == 2:
            self._note(result, [self._made_of(rows, count)])
        return result

    @staticmethod
    def _made_of(rows: Tensor, repeats: int = 1) -> _Columns:
        return _Columns(rows, repeats, rows._version)

    def _note(self, matrix: Tensor, columns: list[_Columns]) -> None:
        self._repeated_columns[id(matrix)] = matrix, matrix._version, columns

    def _columns(self, matrix: Any) -> list[_Columns]:
        """Returns the columns of a matrix with repeated rows; empty without any, or after a write."""
        if id(matrix) not in self._repeated_columns:
            return []
        known_matrix, version, columns = self._repeated_columns[id(matrix)]
        if known_matrix._version != version or any(
            c.rows._version != c.version for c in columns
        ):
            return []
        return columns

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls ``func``, but for a layer on repeated rows."""
        kwargs = kwargs or {}
        if func is F.linear and len(args) > 1 and args[1].dim() == 2:
            columns = self._columns(args[0])
            # Under autocast each product is rounded, so that their sum is another one.
            is_exact = not torch.is_autocast_enabled(args[0].device.type)
            if is_exact and sum(column.saved for column in columns) >= _SAVED:
                return self._linear(columns, *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if func is torch.cat and args:
            self._note_concatenation(result, *args, **kwargs)
        return result

    def _note_concatenation(
        self, result: Any, tensors: Sequence[Any], dim: int = 0, **_: Any
    ) -> None:
        """Follows repeated columns into a matrix of several matrices beside each other."""
        if dim not in (1, -1) or not all(
            isinstance(each, Tensor) and each.dim() == 2 for each in tensors
        ):
            return
        columns: list[_Columns] = []
        for each in tensors:
            columns += self._columns(each) or [self._made_of(each)]
        if any(column.repeats > 1 for column in columns):
            self._note(result, columns)

    def _linear(
        self, columns: list[_Columns], weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Returns the layer's output (B, m), each repeated row multiplied once; the bias is added once."""
        blocks = torch.split(weight, [column.rows.shape[1] for column in columns], 1)
        total = bias
        # Columns that repeat alike are one product.
        for repeats in sorted({column.repeats for column in columns}, reverse=True):
            rows = []
            weights = []
            for column, block in zip(columns, blocks, strict=True):
                if column.repeats == repeats:
                    rows.append(column.rows)
                    weights.append(block)
            product = F.linear(torch.cat(rows, 1), torch.cat(weights, 1))
            if repeats > 1:
                product = product.repeat_interleave(repeats, 0)
            total = product if total is None else product + total
        assert total is not None
        return total
