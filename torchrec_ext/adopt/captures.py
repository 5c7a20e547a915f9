"""Captures: the captured steps of a user's model, one for each graph that Dynamo traced of the whole step."""

from __future__ import annotations

import operator
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
    check_model,
    has_gradient_hook,
    loss_and_output,
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
    MOST_STATES,
    OtherMemory,
    StepGraph,
    changed_between_calls,
    untraceable,
)
from torchrec_ext.adopt.lag import catch_up
from torchrec_ext.adopt.reads import StepReads, constant_masks, the_loss
from torchrec_ext.adopt.updates import (
    CapturedUpdate,
    lag_of,
    updated_parameters,
)
from torchrec_ext.adopt.user_step import UserStep
from torchrec_ext.adopt.verify import StepComparison, Verification
from torchrec_ext.capture import executors
from torchrec_ext.capture.compiled import (
    TRACERS,
    CompiledCall,
    replayed,
    without_gradients,
)
from torchrec_ext.capture.errors import RareShapeError
from torchrec_ext.capture.memory import RowTable, StepMemory
from torchrec_ext.capture.policy import MOST_GRAPHS
from torchrec_ext.capture.step import parts_of, trained
from torchrec_ext.distributed.row_rule import row_by_row
from torchrec_ext.drawn import DrawnStep, Resident
from torchrec_ext.observe.user_lines import first_line, module_line

_TRIES = 6  # memories that a graph is traced with, before it stays eager
# Shapes of batches that are counted: lists of any length have others for ever.
_MOST_RARE = 256


Shapes = tuple[tuple[torch.Size, torch.dtype], ...]  # of the tensors of a batch


class TooManyShapesError(RareShapeError):
    """A batch stays eager for good, because as many shapes as may be are captured; the message names both."""


class Captures:
    """Captures a step for each state of the user's Python, and runs it.

    Args:
        user_step: the user's model, optimizers and eager step.
        verification: decides which steps are compared with the eager one.
        patience: eager steps of a further shape of batch, or of a further graph, before it is captured too.

    Attributes:
        current: the captured steps that ran last; None before.
        look_ups: rows that an eager step read of each table, by the id of its weight.
        draws_random: whether its forward drew random numbers.
        too_many_shapes: why batches of some shapes stay eager; empty if none do.
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
        self._graph_count = 0
        self._graphs: dict[int, tuple[CapturedUpdate, StepGraph]] = {}
        self.current: CapturedUpdate | None = None
        self.look_ups: Mapping[int, int] = {}
        self.draws_random = False
        # The line that reads a late table otherwise, by its name, as a trace showed.
        self._matrices: dict[str, str] = {}
        self.too_many_shapes = ""
        self._shapes: list[Shapes] = []  # of captured batches
        self._refused: Counter[Shapes] = Counter()
        self._has_waited = False
        self.seconds = 0.0

    # --- which step

    def __call__(self, batch: DrawnStep) -> tuple[Tensor, Any]:
        """Makes the captured step of a batch; returns loss and output.

        Raises:
            CannotCaptureError: there is none; nothing was trained.
            StepComparison: the step was made, and is to be compared with the eager one.
            HalfStepError: the step failed half way.
        """
        self._batch = batch
        self._has_waited = False
        updates = [self.current] if self.current is not None else []
        updates += [each for each in self._updates.values() if each is not self.current]
        with self._tables_marked(is_marked=False), self._user_step.autocast():
            for update in updates:
                call = update.calls.get(batch.source)
                code = call.holds(batch.tensors) if call is not None else None
                if code is not None:
                    return code(*batch.tensors)  # type: ignore[no-any-return]
            # Guards hold for one shape of each tensor, so only other shapes come here.
            self._check_shapes(batch)
            return self._traced(batch)

    def _traced(self, batch: DrawnStep) -> tuple[Tensor, Any]:
        """Has Dynamo trace the step of a batch, with the memory that it needs."""
        self.settle()
        self._graph_count += 1
        if self._graph_count > MOST_STATES:
            raise EndOfCaptureError(changed_between_calls())
        check_model(self._user_step.model)
        rules = update_rules(self._user_step.model, self._user_step.optimizers)
        every = {name for name, (_, _, each, _) in rules.items() if each.requires_grad}
        names = {name for name in every if self._is_moved(rules[name])}
        if self.current is not None:
            names = every & self.current.weights.keys()
        unreached: set[str] = set()
        for _ in range(_TRIES):
            try:
                self._tracing = self._update_of(rules, names)
                self._tracing.allowed = unreached
                return self._try(self._tracing, batch)
            except OtherMemory as other:
                self._matrices |= other.matrices
                unreached |= other.unreached
                names = (names | other.read) - unreached
        raise CannotAdopt("the parameters that the loss depends on change in each step")

    def _is_moved(self, rule: tuple[int, int, nn.Parameter, Any]) -> bool:
        number, _, parameter, choice = rule
        state = self._user_step.optimizers[number].state.get(parameter, {})
        return set(STATES[choice.kind]) <= set(state)

    def _try(self, update: CapturedUpdate, batch: DrawnStep) -> tuple[Tensor, Any]:
        resident = batch.source
        if resident not in update.calls:
            step = _step_of(update, self._user_step, resident)
            update.calls[resident] = CompiledCall(step, weakly(self._take_graph))
        try:
            return update.calls[resident](*batch.tensors)  # type: ignore[no-any-return]
        except Exception as error:
            if not type(error).__module__.startswith(TRACERS):
                raise
            inner = getattr(error, "inner_exception", None)
            if inner is not None:
                raise CannotAdopt(
                    f"{type(inner).__name__}: {first_line(inner)}"
                ) from error
            raise untraceable(error) from None

    def _update_of(self, rules: Rules, names: Collection[str]) -> CapturedUpdate:
        """Returns the captured steps that update some parameters."""
        if not names:
            raise CannotAdopt(
                "the loss does not depend on a parameter that an optimizer moves"
            )
        user_step = self._user_step
        dense_tables = {
            name: line for name, line in self._matrices.items() if name in names
        }
        tables = {
            name
            for name in names
            if id(rules[name][2]) in self.look_ups and name not in dense_tables
        }
        # A memory for which there was no graph may be of a state that is no longer there.
        for key, each in list(self._updates.items()):
            if not each.runs and not each.waiting:
                del self._updates[key]
        key = frozenset(names), frozenset(tables)
        if key not in self._updates:
            parameters, state, unmoved = updated_parameters(
                rules, names, tables, user_step
            )
            memory = StepMemory(parameters, {})
            weights = {each.name: rules[each.name][2] for each in parameters}
            counts = {name: self.look_ups[id(rules[name][2])] for name in tables}
            memory.choose(counts, row_by_row)
            self._updates[key] = CapturedUpdate(
                memory,
                weights,
                state,
                dense_tables,
                lag_of(memory, weights, state),
                unmoved,
                constant_masks(user_step.model),
            )
        return self._updates[key]

    def _check_shapes(self, batch: DrawnStep) -> None:
        """Lets a batch be captured if few shapes are so far, and its own came often; each trace of a shape costs.

        Raises:
            RareShapeError: it stays eager for now.
            TooManyShapesError: it stays eager for good.
        """
        shapes = _shapes_of(batch)
        if shapes in self._shapes:
            return
        if self._shapes:
            self._refused[shapes] += 1
            is_rare = self._refused[shapes] <= self._patience
            if is_rare and len(self._refused) <= _MOST_RARE:
                raise RareShapeError("a batch of a shape that came seldom so far")
            if is_rare or len(self._shapes) == MOST_GRAPHS:
                self._refused.clear()
                kinds = ", ".join(f"{tuple(shape)}" for shape, _ in shapes)
                # The first one's, which is noted once.
                self.too_many_shapes = self.too_many_shapes or (
                    f"batches of more than {MOST_GRAPHS} shapes, others stay eager, as this one of {kinds:.80}; pad "
                    "tensors to a few lengths, of one dtype each"
                )
                raise TooManyShapesError(self.too_many_shapes)
            self._has_waited = True
        self._shapes.append(shapes)

    # --- one graph

    def _take_graph(
        self, module: GraphModule, examples: list[Tensor]
    ) -> Callable[..., Sequence[Any]]:
        """Receives a graph of Dynamo's, and returns the function to call in its place."""
        update = self._tracing
        user_step = self._user_step
        rules = update_rules(user_step.model, user_step.optimizers)
        parameters = {
            name: parameter
            for name, (_, _, parameter, _) in rules.items()
            if parameter.requires_grad and name not in update.allowed
        }
        memory = [*update.memory.tensors().values(), update.memory.zero]
        resident = self._batch.source
        if resident is not None:
            memory += resident.tensors
            # Of torch 2.14 no mode sees x[...] = y, after which rows repeat no more.
            targets = {node.target for node in module.graph.nodes}
            if user_step.shares_rows and operator.setitem in targets:
                user_step.shares_rows = False
                raise OtherMemory
        graph = StepGraph(
            module,
            examples,
            model=user_step.model,
            batch=pytree.tree_leaves(self._batch.tensors),
            trained=parameters,
            updated=set(update.weights),
            late=update.memory.row_tables,
            memory=memory,
        )
        if update.unmoved:
            raise CannotAdopt(
                f"{module_line(user_step.model, min(update.unmoved))} has not been moved by an eager step yet"
            )
        without_gradients(module)
        # By its number: Dynamo's cache would keep the memory for ever.
        self._graphs[graph.number] = update, graph
        return weakly(self._call_graph, graph.number)

    def _call_graph(self, number: int, *tensors: Tensor) -> Sequence[Any]:
        update, graph = self._graphs[number]
        self._check(update, graph, tensors)
        # On a GPU this would wait for its work. Of a batch that is made inside the step
        # these tensors are another one's.
        is_given = self._batch.source is None
        if is_given and update.memory.device.type == "cpu":
            # The step draws its random numbers after them.
            draws = self.draws_random
            with torch.random.fork_rng([]) if draws else nullcontext():
                bad = graph.bad_id(tensors)
            if bad:
                raise BadIdError(bad)
        return self._run(update, graph, tensors)

    def _check(
        self, update: CapturedUpdate, graph: StepGraph, tensors: Sequence[Tensor]
    ) -> None:
        """Compares the parameters: Dynamo does not compare which ones a graph is given."""
        of_memory = {each.name: each.weight for each in update.memory.parameters}
        for name, index in graph.parameters.items():
            parameter = update.weights[name]
            if (
                tensors[index] is not parameter
                or parameter.data_ptr() != of_memory[name].data_ptr()
            ):
                raise TensorChangedError(f"'{name}'")
            if has_gradient_hook(parameter):
                raise CannotAdopt(
                    f"{module_line(self._user_step.model, name)} {HOOK_ON_GRADIENT}"
                )
        for known in update.masks:
            is_read = any(tensor is known.positions for tensor in tensors)
            if is_read and known.has_changed():
                raise TensorChangedError(f"a mask of shape {tuple(known.mask.shape)}")

    def _run(
        self, update: CapturedUpdate, graph: StepGraph, tensors: Sequence[Tensor]
    ) -> list[Any]:
        """Makes the step of a graph, and returns the graph's outputs."""
        if self.current is not update:
            # Both memories hold the same tensors, and each counts the steps of its own.
            self.settle()
            update.memory.reload()
        run = self._prepared(update, graph, tensors)
        self.current = update
        snapshot = self._verification.snapshot(update, graph, tensors)
        if snapshot is not None and self.draws_random:
            # Op by op, the step draws the same random numbers as the eager one.
            run = graph.module
        # .grad is None after a captured step: no gradient of a backward of the user's own stays.
        if any(each.grad is not None for each in update.weights.values()):
            for optimizer in self._user_step.optimizers:
                optimizer.zero_grad()
        try:
            update.memory.begin()
            outputs = list(run(*tensors))
        except Exception as error:
            # Weights may be half written, and without copies they are lost.
            if snapshot is None:
                raise HalfStepError from error
            snapshot.restore()
            raise EndOfCaptureError(
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        if snapshot is not None:
            raise StepComparison(update, graph, tensors, snapshot, outputs)
        return outputs

    def _prepared(
        self, update: CapturedUpdate, graph: StepGraph, tensors: Sequence[Tensor]
    ) -> Callable[..., Sequence[Any]]:
        """Returns the compiled graph.

        Raises:
            RareShapeError: it was called too seldom so far.
            CannotCaptureError: it cannot be compiled.
        """
        number = graph.number
        if number in update.runs:
            return update.runs[number]
        if len(update.runs) == MOST_GRAPHS:
            raise CannotAdopt(
                f"steps differ in more than {MOST_GRAPHS} ways: {changed_between_calls()}"
            )
        is_first = not update.runs
        is_another = not self.is_empty
        if is_another and not self._has_waited:
            update.waiting[number] += 1
            if update.waiting[number] <= self._patience:
                raise RareShapeError("a batch of a kind that came seldom so far")
        start = time.perf_counter()
        device = update.memory.device
        if device.type == "cuda":
            update.runs[number] = replayed(
                graph.module, tensors, graph.of_batch, graph.outer
            )
        else:
            update.runs[number] = executors.compile_graph(graph.module, list(tensors))
        seconds = time.perf_counter() - start
        self._verification.begin(update, number, is_first=is_first)
        text = f"... {seconds:.1f} s"
        # No line before it says that it compiles, as for the first one.
        if is_another:
            text = f"compiled one more step in {seconds:.1f} s: rows of other shapes, or another forward"
        if is_first:
            text = "; ".join(filter(None, (text, update.memory.describe())))
        self.seconds += seconds
        self._user_step.say(text)
        return update.runs[number]

    # --- around steps

    def end_step(self) -> None:
        """Ends a captured step: marks rows that are behind."""
        assert self.current is not None
        self.current.lag.begin()

    def settle(self) -> None:
        """Updates rows that no step has read lately."""
        if self.current is not None:
            self.current.lag.settle()

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
        current.memory.reload()

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
        return not any(update.runs for update in self._updates.values())


def _step_of(
    update: CapturedUpdate,
    user_step: UserStep,
    resident: Resident | None,
) -> Callable[..., Any]:
    """Returns the step as a function of a batch, or of the rows of one that is made inside."""
    memory, loss, clip_norm = update.memory, user_step.loss, user_step.clip_norm
    count, zero = memory.count, memory.zero
    is_exact = user_step.autocast_dtype() is None
    masks = update.masks
    parts = []
    # The parameter itself: Dynamo finds it in the user's module too, and it must be one input of the graph.
    for parameter, part in zip(
        memory.parameters, parts_of(memory, memory.tensors()), strict=True
    ):
        parts.append(part._replace(weight=update.weights[parameter.name]))

    def run(
        tables: Sequence[RowTable | None], batch: Any, repeats: Any
    ) -> tuple[Tensor, Any]:
        late = []
        for part, table in zip(parts, tables, strict=False):
            if table is not None:
                late.append((part.weight, table))
        with StepReads(late, repeats=repeats, is_exact=is_exact, masks=masks):
            value, output = loss_and_output(loss(*batch))
        return the_loss(value), output

    if resident is None:

        def forward(tables: Any, *batch: Any) -> tuple[Tensor, Any]:
            return run(tables, batch, ())

    else:

        def forward(tables: Any, *rows: Any) -> tuple[Tensor, Any]:
            batch = resident.assemble(resident.tensors, rows)
            if not user_step.shares_rows:
                return run(tables, batch, ())
            return run(tables, batch, resident.repeats(batch, rows[0].shape[0]))

    def step(*batch: Any) -> tuple[Tensor, Any]:
        value, output = trained(
            forward, batch, parts, count, clip_norm=clip_norm, zero=zero
        )
        return value, pytree.tree_map_only(Tensor, Tensor.detach, output)

    return step


def _shapes_of(batch: DrawnStep) -> Shapes:
    return tuple(
        (leaf.shape, leaf.dtype)
        for leaf in pytree.tree_leaves(batch.tensors)
        if isinstance(leaf, Tensor)
    )


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Returns a call of a method that does not keep its object alive, as Dynamo's cache would for ever."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        # A hook may be called while the last of its object goes.
        return None if bound is None else bound(*first, *args)

    return call
