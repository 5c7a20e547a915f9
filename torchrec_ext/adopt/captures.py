"""Captures: the captured steps of a user's model, one for each graph that Dynamo traced.

ForwardTrace: makes a captured step of a batch, through the graph of the user's forward and loss.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from torchrec_ext.adopt.checks import (
    HOOK_ON_GRADIENT,
    STATES,
    Rules,
    StateTensor,
    check_model,
    update_rules,
)
from torchrec_ext.adopt.errors import (
    BadIdError,
    CannotAdopt,
    EndOfCaptureError,
    HalfStepError,
    TensorChangedError,
)
from torchrec_ext.adopt.graph import (
    GRAPHS,
    ForwardGraph,
    OneGraphTooMany,
    changed_between_calls,
    traced_forward,
)
from torchrec_ext.adopt.lag import Lag, catch_up
from torchrec_ext.adopt.source import (
    AnyBatch,
    CapturedUpdate,
    GivenBatch,
    GraphCall,
    GroupSettings,
    Shapes,
)
from torchrec_ext.adopt.user_step import UserStep
from torchrec_ext.adopt.verify import StepComparison, Verification
from torchrec_ext.capture.captured import CapturedStep, RareShapeError, StepInputs
from torchrec_ext.capture.memory import StepMemory, UpdatedParameter
from torchrec_ext.observe.user_lines import first_line, module_line

Trace = Callable[[AnyBatch], tuple[Tensor, Any]]  # makes the captured step of a batch
_Check = Callable[[Sequence[Tensor]], None]
MOST_SHAPES = 4  # of batches to capture; each is traced and compiled

# How an L2 term of the loss is written so that a table is moved row by row, by the kind
# of optimizer.
_WITHOUT_CLOSED_FORM = (
    "which has no closed form for rows that are not read; the decay of AdamW has one"
)
_PENALTIES = {
    "sgd": "which weight_decay of SGD, twice the factor of the square, does row by row",
    "adam": _WITHOUT_CLOSED_FORM,
    "adagrad": _WITHOUT_CLOSED_FORM,
}


class TooManyShapesError(RareShapeError):
    """A batch stays eager for good, because as many shapes as may be are captured; the message names both."""


class Captures:
    """Captures a step for each graph of the user's forward, and runs it.

    Args:
        user_step: the user's model, optimizers and eager step.
        verification: decides which steps are compared with the eager one.
        patience: eager steps of a further shape of batch before it is captured too.

    Attributes:
        current: the captured steps that ran last; None before.
        draws_random: whether the forward draws random numbers.
        too_many_shapes: why batches of some shapes stay eager; empty if none do.
        after_eager: whether the step before was eager, so that there are gradients to drop.
        seconds: seconds of all captures.
    """

    def __init__(
        self, user_step: UserStep, verification: Verification, patience: int
    ) -> None:
        self._user_step = user_step
        self._verification = verification
        self._patience = patience
        # By the parameters that are updated, and those row by row.
        self._updates: dict[Any, CapturedUpdate] = {}
        self._checks: dict[int, _Check] = {}  # of each graph, by its number
        self._graph_count = 0
        self.current: CapturedUpdate | None = None
        self.draws_random = False
        self.too_many_shapes = ""
        self._shapes: list[Shapes] = []  # of captured batches
        self._refused: Counter[Shapes] = Counter()
        self._has_waited = False
        self.after_eager = True
        self.seconds = 0.0

    def check_shapes(self, batch: AnyBatch) -> None:
        """Lets a batch be captured if few shapes are so far, and its own came often; each trace of a shape costs.

        Raises:
            RareShapeError: it stays eager for now.
            TooManyShapesError: it stays eager for good.
        """
        shapes = batch.shapes()
        self._has_waited = False
        if shapes in self._shapes:
            return
        if self._shapes:
            self._refused[shapes] += 1
            if self._refused[shapes] <= self._patience:
                raise RareShapeError("a batch of a shape that came seldom so far")
            if len(self._shapes) == MOST_SHAPES:
                self.too_many_shapes = _more_shapes(self._shapes, shapes)
                raise TooManyShapesError(self.too_many_shapes)
            self._has_waited = True
        self._shapes.append(shapes)

    def graph(
        self,
        module: GraphModule,
        examples: list[Tensor],
        batch: AnyBatch,
    ) -> ForwardGraph:
        """Returns a graph of Dynamo's, for :meth:`call`.

        Args:
            module: the graph.
            examples: Dynamo's examples of the inputs.
            batch: the batch of the call.

        Raises:
            OneGraphTooMany: there are :data:`GRAPHS` already.
            CannotAdopt: it has no captured form.
        """
        self.settle()
        self._graph_count += 1
        if self._graph_count > GRAPHS:
            raise OneGraphTooMany(changed_between_calls())
        model = self._user_step.model
        check_model(model)
        rules = update_rules(model, self._user_step.optimizers)
        parameters = {
            name: parameter
            for name, (_, _, parameter, _) in rules.items()
            if parameter.requires_grad
        }
        leaves = pytree.tree_leaves(batch.example())
        graph = ForwardGraph(module, examples, model, leaves, parameters)
        self._checks[graph.number] = _check_of(graph, parameters, self._user_step)
        return graph

    def update_of(self, graphs: Sequence[ForwardGraph]) -> CapturedUpdate:
        """Returns the captured steps of all graphs that update the same parameters in the same way.

        Raises:
            CannotAdopt: a parameter has no captured form.
        """
        user_step = self._user_step
        rules = update_rules(user_step.model, user_step.optimizers)
        reached: set[str] = set()
        tables: set[str] = set()
        for graph in graphs:
            reached |= graph.reached
            tables.update(graph.look_ups)
        if not reached:
            raise CannotAdopt(
                "the loss does not depend on a parameter that an optimizer moves"
            )
        dense_tables = _dense_tables(graphs, rules) | user_step.dense_tables
        row_tables = tables - dense_tables.keys()
        parameters, state = _updated_parameters(rules, reached, row_tables, user_step)
        # Two forwards that update the same parameters share their memory, and the rows
        # that are behind.
        key = tuple((each.name, each.table) for each in parameters)
        if key not in self._updates:
            memory = StepMemory(parameters, {})
            source = user_step.source(memory)
            engine = user_step.engine(source)
            step = CapturedStep(
                source, engine, autocast=user_step.autocast, patience=self._patience
            )
            self._updates[key] = CapturedUpdate(
                source, step, engine, state, dense_tables
            )
        return self._updates[key]

    def run(self, update: CapturedUpdate, call: Any) -> list[Any]:
        """Makes the step of a graph, and returns the graph's outputs.

        Raises:
            CannotCaptureError: it cannot be captured; nothing was trained.
            StepComparison: the step was made, and is to be compared with the eager one.
            HalfStepError: the step failed half way.
        """
        if self.current is not update:
            # Both memories hold the same tensors, and each counts the steps of its own.
            self.settle()
            update.source.memory.reload()
        inputs = update.source.inputs(call)
        self._prepare(update, inputs)
        self.current = update
        snapshot = self._verification.snapshot(
            update, inputs.key, call, after_eager=self.after_eager
        )
        if snapshot is not None:
            # Op by op, the step draws the same random numbers as the eager one.
            update.engine.plain = self.draws_random
        # .grad is None after a captured step: no gradient of an eager one stays.
        if self.after_eager:
            for optimizer in self._user_step.optimizers:
                optimizer.zero_grad()
        try:
            loss, outputs = update.source.train(update.step, inputs)
        except Exception as error:
            # Weights may be half written, and without copies they are lost.
            if snapshot is None:
                raise HalfStepError from error
            snapshot.restore()
            raise EndOfCaptureError(
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        finally:
            update.engine.plain = False
        if snapshot is not None:
            raise StepComparison(update, inputs.key, call, snapshot, loss, outputs)
        return list(outputs)

    def _prepare(self, update: CapturedUpdate, inputs: StepInputs) -> None:
        if inputs.key in update.unverified:
            return
        start = time.perf_counter()
        is_first = not update.step.shapes
        is_another = not self.is_empty
        update.step.prepare(inputs, is_patient=not self._has_waited)
        seconds = time.perf_counter() - start
        self._verification.begin(update, inputs.key, is_first=is_first)
        text = f"... {seconds:.1f} s"
        # No line before it says that it compiles, as for the first one.
        if is_another:
            text = f"compiled one more step in {seconds:.1f} s: {inputs.rows} rows of other shapes, or another forward"
        if is_first:
            update.lag = _lag_of(update, self._user_step)
            text = "; ".join(filter(None, (text, update.step.describe())))
        self.seconds += seconds
        self._user_step.say(text)

    def end_step(self) -> None:
        """Ends a captured step: marks rows that are behind."""
        assert self.current is not None
        self.current.lag.begin()
        self.after_eager = False

    def settle(self) -> None:
        """Updates rows that no step has read lately."""
        if self.current is not None:
            self.current.lag.settle()

    def settling_seconds(self) -> float:
        """Returns the seconds of updating all rows for readers, since the capture."""
        return sum(
            update.lag.seconds for update in self._updates.values() if update.unverified
        )

    def call_traced(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that Dynamo guards: meanwhile tables have the class that they had in its trace."""
        with self._tables_marked(is_marked=False):
            return call(*args)

    @contextmanager
    def _tables_marked(self, *, is_marked: bool) -> Iterator[None]:
        """Marks the tables whose rows are behind, or makes them plain parameters, within the block."""
        current = self.current
        if current is not None:
            current.lag.mark(is_marked=is_marked)
        try:
            yield
        finally:
            if current is not None:
                current.lag.mark(is_marked=not is_marked)

    def call(
        self, graph: ForwardGraph, batch: AnyBatch, tensors: Sequence[Tensor]
    ) -> GraphCall:
        """Returns a call of a graph.

        Raises:
            TensorChangedError: a tensor is not the one of the capture.
            CannotAdopt: a parameter has a hook by now.
        """
        self._checks[graph.number](tensors)
        return GraphCall(graph, batch, tensors)

    def take_turn(self) -> None:
        """Lets other steps over the same tensors update their rows, and reads how many steps were made."""
        current = self.current
        # While rows are behind, nobody else has read or written these tensors.
        if current is not None and current.lag.active:
            return
        catch_up(list(self._user_step.model.parameters()))
        if current is None:
            return
        catch_up([each.tensor for each in current.state])
        current.source.memory.reload()

    def load_state(self, optimizer: Optimizer) -> None:
        """Copies a loaded state into the memory of the steps, which stays at its addresses.

        Raises:
            KeyError: the state has other tensors.
        """
        with torch.no_grad():
            for update in self._updates.values():
                for number, parameter, key, tensor in update.state:
                    if self._user_step.optimizers[number] is optimizer:
                        # The optimizer goes on with the capture's tensor in place of
                        # the loaded one.
                        state = optimizer.state[parameter]
                        tensor.copy_(torch.as_tensor(state[key]))
                        state[key] = tensor

    @property
    def is_empty(self) -> bool:
        """Whether no step is captured."""
        return not any(update.step.shapes for update in self._updates.values())


def _more_shapes(captured: Sequence[Shapes], shapes: Shapes) -> str:
    """Says which tensor of a batch has more shapes than are captured."""
    last = captured[-1]
    place = 0
    while place < min(len(last), len(shapes)) and last[place] == shapes[place]:
        place += 1
    if len(last) != len(shapes) or place == len(last):
        return f"more than {MOST_SHAPES} kinds of batches: give all the same tensors"
    if last[place].shape == shapes[place].shape:
        kinds = f"{shapes[place].dtype} here and {last[place].dtype} in another"
        return f"more than {MOST_SHAPES} kinds of batches: tensor {place} is {kinds}; give one dtype"
    here = tuple(shapes[place].shape)
    others = ", ".join(str(tuple(each[place].shape)) for each in captured)
    return (
        f"batches of more than {MOST_SHAPES} shapes, others stay eager: tensor {place} is {here} here, {others} in "
        "captured ones; pad it to a few lengths"
    )


def _check_of(
    graph: ForwardGraph, parameters: Mapping[str, nn.Parameter], user_step: UserStep
) -> _Check:
    """Returns a check for the parameters of the capture: Dynamo does not compare which ones a graph is given."""
    places = [
        (index, name, parameters[name], parameters[name].data_ptr())
        for name, index in graph.parameters.items()
    ]

    def check(tensors: Sequence[Tensor]) -> None:
        for index, name, parameter, address in places:
            if tensors[index] is not parameter or parameter.data_ptr() != address:
                raise TensorChangedError(f"'{name}'")
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise CannotAdopt(
                    f"{module_line(user_step.model, name)} {HOOK_ON_GRADIENT}"
                )
        for index, (line, value) in graph.masks.items():
            if not torch.equal(tensors[index], value):
                raise TensorChangedError(f"the mask of {line}")

    return check


def _dense_tables(graphs: Sequence[ForwardGraph], rules: Rules) -> dict[str, str]:
    """Returns why graphs update tables as dense layers, by the tables' names."""
    reasons = {}
    for graph in graphs:
        for name, line in graph.matrices.items():
            reasons[name] = line
            if name in graph.penalties:
                penalty = _PENALTIES[rules[name][3].kind]
                reasons[name] = f"{line} is an L2 term over all rows, {penalty}"
    return reasons


def _updated_parameters(
    rules: Rules, names: Collection[str], tables: Collection[str], user_step: UserStep
) -> tuple[list[UpdatedParameter], list[StateTensor]]:
    """Returns the parameters that a step updates, and the optimizers' state of these.

    Args:
        rules: how optimizers move each parameter.
        names: the parameters' names.
        tables: those that are updated row by row.
        user_step: the optimizers.

    Raises:
        CannotAdopt: no eager step has made the state of a parameter.
    """
    parameters = []
    state = []
    # One for all parameters of a group, which share a rate.
    groups: dict[tuple[int, int], GroupSettings] = {}
    for name, (number, index, parameter, choice) in rules.items():
        if name not in names:
            continue
        optimizer = user_step.optimizers[number]
        values = optimizer.state.get(parameter, {})
        keys = STATES[choice.kind]
        if not values.keys() >= set(keys):
            raise CannotAdopt(
                f"{module_line(user_step.model, name)} has not been moved by an eager step yet"
            )
        tensors = []
        for key in keys:
            state.append(StateTensor(number, parameter, key, values[key]))
            tensors.append(values[key].detach())
        steps = []
        # SGD counts no steps.
        if "step" in values:
            state.append(StateTensor(number, parameter, "step", values["step"]))
            steps.append(values["step"].detach())
        group = groups.setdefault((number, index), GroupSettings(optimizer, index))
        weight = parameter.detach()
        parameters.append(
            UpdatedParameter(
                name, name in tables, False, weight, tensors, steps, group, choice
            )
        )
    return parameters, state


def _lag_of(update: CapturedUpdate, user_step: UserStep) -> Lag:
    """Returns the tables that a step updates row by row, with all that is updated as late as they."""
    names = set(update.step.row_tables)
    tables = {
        name: parameter
        for name, parameter in user_step.model.named_parameters()
        if name in names
    }
    table_ids = set(map(id, tables.values()))
    late = []
    for each in update.state:
        # The memory counts the steps; the optimizers' own counts are written when
        # rows are updated.
        if each.name == "step" or id(each.parameter) in table_ids:
            late.append(each.tensor)
    return Lag(update.source.memory, tables, late)


class ForwardTrace:
    """Makes a captured step of a batch: Dynamo compares what the step depends on, and calls the graph's step.

    Args:
        captures: the captured steps.
        user_step: the user's loss function and context of the forward.
        selects: whether the forward selects by masks.
    """

    def __init__(
        self, captures: Captures, user_step: UserStep, *, selects: bool
    ) -> None:
        self._captures = captures
        self._autocast = user_step.autocast
        self._graphs: dict[int, tuple[ForwardGraph, CapturedUpdate]] = {}
        self._traced = traced_forward(
            user_step.loss, weakly(self._take_graph), masks=selects
        )

    def __call__(self, batch: AnyBatch) -> tuple[Tensor, Any]:
        """Trains on one batch; returns loss and output."""
        self._batch = batch
        with self._autocast():
            return self._captures.call_traced(self._traced, *batch.example())  # type: ignore[no-any-return]

    def _take_graph(
        self, module: GraphModule, examples: list[Tensor]
    ) -> Callable[..., Sequence[Any]]:
        """Receives a graph of Dynamo's, and returns the function to call in its place."""
        graph = self._captures.graph(module, examples, self._batch)
        self._graphs[graph.number] = graph, self._captures.update_of([graph])
        return weakly(self._call_graph, graph.number)

    def _call_graph(self, number: int, *tensors: Tensor) -> Sequence[Any]:
        graph, update = self._graphs[number]
        # On a GPU this would wait for its work. Of a batch that is made inside the step
        # these tensors are another one's.
        if (
            isinstance(self._batch, GivenBatch)
            and update.source.memory.device.type == "cpu"
        ):
            bad = graph.bad_id(tensors)
            if bad:
                raise BadIdError(bad)
        call = self._captures.call(graph, self._batch, tensors)
        return self._captures.run(update, call)


# takes the captured steps, and whether the forward selects by masks
TraceFactory = Callable[[Captures, bool], Trace]


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Returns a call of a method that does not keep its object alive, as Dynamo's cache would for ever."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        assert bound is not None
        return bound(*first, *args)

    return call
