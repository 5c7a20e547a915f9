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
from torch import Tensor, nn
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

    def __init__(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        self._optimizer = optimizer
        self._index = index

    def __getitem__(self, name: str) -> Any:
        return self._optimizer.param_groups[self._index][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizer.param_groups[self._index])

    def __len__(self) -> int:
        return len(self._optimizer.param_groups[self._index])


class GivenBatch(NamedTuple):
    """A batch that the user's loop made."""

    values: tuple[Any, ...]

    def args(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function."""
        return self.values

    def example(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function."""
        return self.values


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

    def assemble(self, tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> tuple[Any, ...]:
        """Makes a batch of the tensors, and of the indices and draws of a step."""
        draws = parts[1] if len(parts) > 1 else None
        return self.rows.assemble(parts[0], draws, dict(zip(self.names, tensors, strict=True)))


class DrawnBatch(NamedTuple):
    """A batch that is not made yet: indices (B,) of its rows, and what was drawn for them, (B, n) or None."""

    resident: RowsOnDevice
    indices: Tensor
    draws: Tensor | None

    def parts(self) -> list[Tensor]:
        """Returns the tensors of which the batch is made."""
        return [tensor for tensor in (self.indices, self.draws) if tensor is not None]

    def args(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function."""
        device = self.resident.tensors[0].device
        batch = self.resident.assemble(self.resident.tensors, [tensor.to(device) for tensor in self.parts()])
        return pytree.tree_map_only(Tensor, Tensor.contiguous, batch)  # type: ignore[no-any-return]

    def example(self) -> tuple[Any, ...]:
        """Returns the arguments of the user's function of some batch of the same size."""
        shapes = tuple(tensor.shape for tensor in self.parts())
        if shapes not in self.resident.examples:
            self.resident.examples[shapes] = self.args()
        return self.resident.examples[shapes]


AnyBatch = GivenBatch | DrawnBatch


class GraphCall(NamedTuple):
    """One call of a graph: the batch, what Dynamo found for the graph's inputs, and the rows of dynamic ids."""

    graph: ForwardGraph
    batch: AnyBatch
    tensors: Sequence[Tensor]
    rows: Sequence[Tensor] = ()

    def outer(self) -> list[Tensor]:
        """Returns all inputs except the batch's and updated parameters."""
        return [self.tensors[index].detach() for index in self.graph.outer]


def graph_inputs(graph: ForwardGraph, batch: AnyBatch, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the inputs of a graph; Dynamo found those of some batch if this one is made inside the step."""
    inputs = list(tensors)
    if isinstance(batch, DrawnBatch):
        leaves = pytree.tree_leaves(batch.args())
        for index, leaf in graph.of_batch.items():
            inputs[index] = leaves[leaf]
    return inputs


class _Key(NamedTuple):
    """The conditions that a captured step is made for: a graph of Dynamo's, and on a GPU the places of its inputs."""

    graph: int
    shapes: tuple[tuple[int, ...], ...]
    addresses: tuple[int, ...]

    def difference(self, other: Any) -> str:
        """Says what differs between two calls."""
        return changed_between_calls()


class _Values(NamedTuple):
    """The inputs of a graph by their index, how often ids among them repeat each value, and rows of dynamic ids."""

    graph: ForwardGraph
    tensors: dict[int, Tensor]
    repeated: RepeatedRows
    rows: Sequence[Tensor]


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
        graph, batch, tensors, rows = item
        outer = graph.outer
        of_batch = graph.of_batch
        outer_tensors = [tensors[index].detach() for index in outer]
        drawn_batch = batch if isinstance(batch, DrawnBatch) else None
        parts = drawn_batch.parts() if drawn_batch else [tensors[index].detach() for index in of_batch]
        # Dynamic ids are looked up before the step, which takes their rows.
        given = [*parts, *rows]
        columns = drawn_batch.resident.tensors if drawn_batch else []
        on_gpu = self.memory.device.type == "cuda"
        # A CUDA graph reads the addresses of its capture: what is not of the batch must be where it was.
        addresses = tuple(tensor.data_ptr() for tensor in outer_tensors) if on_gpu else ()
        # Dynamo has one graph for each shape of a batch, but for those that are made inside the step.
        shapes = tuple(tuple(tensor.shape) for tensor in parts) if drawn_batch else ()
        key = _Key(graph.number, shapes, addresses)

        def make(resident: Sequence[Tensor], tensors: Sequence[Tensor]) -> _Values:
            outer_values = resident[: len(outer)] if on_gpu else tensors[len(given) :]
            step_rows = tensors[len(parts) : len(given)]
            inputs = dict(zip(outer, outer_values, strict=True))
            if drawn_batch is None:
                inputs |= dict(zip(of_batch, tensors, strict=False))
                return _Values(graph, inputs, RepeatedRows((), {}), step_rows)
            args = drawn_batch.resident.assemble(resident[len(resident) - len(columns) :], tensors[: len(parts)])
            leaves = pytree.tree_leaves(args)
            columns_of = drawn_batch.resident.rows
            repeats = {
                id(leaf): columns_of.repeats[name]
                for name, leaf in zip(columns_of.names, leaves, strict=False)
                if name in columns_of.repeats and leaf.dim() and len(leaf) == len(parts[0]) * columns_of.repeats[name]
            }
            inputs |= {index: leaves[leaf] for index, leaf in of_batch.items()}
            return _Values(graph, inputs, RepeatedRows(args, repeats), step_rows)

        first = parts[0] if parts else None
        count = len(first) if first is not None and first.dim() else 0
        step_tensors, resident = (given, [*outer_tensors, *columns]) if on_gpu else ([*given, *outer_tensors], columns)
        return StepInputs(key, key, count, step_tensors, make, resident)

    def forward(self, tensors: dict[str, Tensor], batch: Any) -> tuple[Tensor, Any]:
        """Returns the loss, (), and the outputs of the graph, on ``tensors`` in place of the model's."""
        loss, outputs = self.run(tensors, batch)
        return loss, [output.detach() if isinstance(output, Tensor) else output for output in outputs]

    def train(self, step: CapturedStep, inputs: StepInputs) -> tuple[Tensor, Any]:
        """Makes a captured step; returns the loss, (), and the outputs of the graph."""
        return step(inputs)

    def run(self, tensors: dict[str, Tensor], values: _Values) -> tuple[Tensor, list[Any]]:
        """Runs a graph on ``tensors`` in place of the model's; returns its loss and its outputs."""
        graph = values.graph
        weights = {parameter.name: parameter.weight for parameter in self.memory.parameters} | tensors
        inputs = values.tensors | {index: weights[name] for name, index in graph.parameters.items()}
        with values.repeated:
            in_order = [inputs[index] for index in range(len(inputs))]
            return graph.run(in_order, self.reading, values.repeated, values.rows)

    def look_ups(self, inputs: StepInputs) -> dict[str, int]:
        """Counts the rows that a step reads of each table, without values."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        copies = [[mode.from_tensor(tensor) for tensor in each] for each in (inputs.resident, inputs.tensors)]
        with torch._guards.tracing(None), mode:
            return super().look_ups(dataclasses.replace(inputs, resident=copies[0], tensors=copies[1]))

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
                self._note(leaf, [self._made_of(leaf.view(-1, count, leaf.shape[1])[:, 0], count)])

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
        known_matrix, version, columns = self._repeated_columns.get(id(matrix), (matrix, 0, []))
        if not columns:
            return []
        is_changed = known_matrix._version != version or any(c.rows._version != c.version for c in columns)
        return [] if is_changed else columns

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``func``, but for a layer on repeated rows."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and len(args) > 1 and args[1].dim() == 2:
            columns = self._columns(args[0])
            plain = not torch.is_autocast_enabled(args[0].device.type)  # which rounds each product
            if plain and sum(column.saved for column in columns) >= _SAVED:
                return self._linear(columns, *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if func is torch.cat and args and all(isinstance(each, Tensor) and each.dim() == 2 for each in args[0]):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            pieces = [self._columns(each) for each in args[0]]
            if dim in (1, -1) and any(pieces):
                pairs = zip(args[0], pieces, strict=True)
                self._note(result, [c for each, of_one in pairs for c in of_one or [self._made_of(each)]])
        return result

    def _linear(self, columns: list[_Columns], weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the layer's output (B, m), each repeated row multiplied once; the bias is added once."""
        blocks = torch.split(weight, [column.rows.shape[1] for column in columns], 1)
        total = bias
        for repeats in sorted({column.repeats for column in columns}, reverse=True):
            pairs = [pair for pair in zip(columns, blocks, strict=True) if pair[0].repeats == repeats]
            rows, block = (torch.cat(each, 1) for each in ([c.rows for c, _ in pairs], [b for _, b in pairs]))
            product = torch.nn.functional.linear(rows, block)
            product = product if repeats == 1 else product.repeat_interleave(repeats, 0)
            total = product if total is None else product + total
        assert total is not None
        return total
