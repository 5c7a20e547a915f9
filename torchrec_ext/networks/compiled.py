"""CompiledStep: look-ups, forward, backward and optimizers of a whole stack as one compiled function.

StackSteps: runs each step of a stack kernel by kernel or compiled, as ``train.compile`` says.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, compress, islice
from typing import Any

import torch
from torch import Tensor

from torchrec_ext.capture.captured import MOST_GRAPHS
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.executors import Run, StepExecutor, engine_for
from torchrec_ext.capture.memory import state_tensors
from torchrec_ext.capture.policy import WATCHED, CapturePolicy, Compile
from torchrec_ext.capture.update_rules import UPDATES, stepped
from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.networks.graph import Inputs, trace, weighted_rows
from torchrec_ext.networks.optimizer import StackedOptimizer, clip_factors
from torchrec_ext.networks.skeleton import StackedSteps, StackError, are_one, tensors_of
from torchrec_ext.networks.stack import (
    Losses,
    Stack,
    StepBatches,
    stacked_fields,
    table_weights,
)
from torchrec_ext.observe.user_lines import first_line


@dataclass(frozen=True)
class _Entry:
    """One entry of the optimizer: ``rows`` and ``columns`` of the ``index``-th weight, with its state."""

    index: int
    rows: slice
    columns: slice
    members: int
    is_table: bool
    state: list[Tensor]
    steps: list[Tensor]
    group: dict[str, Any]

    @property
    def choice(self) -> Choice:
        """The rule and its numbers."""
        return self.group["choice"]  # type: ignore[no-any-return]

    def of(self, weight: Tensor) -> Tensor:
        """Returns the entry's rows and columns of a weight, or of its gradient."""
        if self.is_table:
            return weight[self.rows]
        return weight[self.rows, self.columns]

    def flat(self, state: Tensor) -> Tensor:
        """Returns the state in the shape of :meth:`of`."""
        if self.is_table:
            return state
        return state.view(self.members, -1)


def _entries(
    stack: Stack, optimizer: StackedOptimizer, tables: Sequence[str]
) -> list[_Entry]:
    """Returns the optimizer's entries; the weights are those of ``tables`` and, after them, the matrix of the layers.

    Raises:
        StackError: an optimizer without a compiled form, or that has no state yet.
    """
    entries = []
    for group, entry, state in optimizer.entries():
        choice: Choice = group["choice"]
        if choice.kind not in UPDATES:
            raise StackError(
                f"'{entry.name}' is moved by {choice.kind}, which has no compiled form; those with one: {list(UPDATES)}"
            )
        if not state and choice.kind != "sgd":
            raise StackError(
                "the optimizer has no state yet: train one step before the compiled ones"
            )
        members = len(entry.members)
        index = len(tables)
        rows = 1
        columns = slice(None)
        if entry.is_table:
            index = tables.index(entry.name)
            rows = len(entry.parameter) // members
        elif entry.parameter.numel() < members * stack.dense.matrix.shape[1]:
            # An entry of one dense weight has its columns alone, one of all dense
            # weights the whole rows.
            columns = stack.dense.columns[entry.name]
        first = rows * stack.members.index(entry.members[0])
        entries.append(
            _Entry(
                index,
                slice(first, first + rows * members),
                columns,
                members,
                entry.is_table,
                *state_tensors(state),
                group,
            )
        )
    return entries


class CompiledStep:
    """Trains a stack by one compiled function for each shape of batch: 10 to 30 s to compile, then faster.

    It works in place on the stack's weights and the optimizer's own state. So you may call :meth:`Stack.backward` and
    :meth:`StackedOptimizer.step` between compiled steps. If some member's loss is not finite, a step writes nothing.

    Args:
        stack: networks whose features have at most one id in each row.
        optimizer: moves the stack; it has made a step, or :meth:`StackedOptimizer.begin`, which makes its state.
        engine: compiles the step; by default the one of the stack's device.

    Raises:
        StackError: an optimizer without a compiled form, or that has no state yet.
        CannotCaptureError: nothing compiles on this machine.

    Example::

        stack.backward(batches)
        optimizer.step()
        step = CompiledStep(stack, optimizer)
        losses = step(next_batches)
    """

    def __init__(
        self,
        stack: Stack,
        optimizer: StackedOptimizer,
        *,
        engine: StepExecutor | None = None,
    ) -> None:
        self._stack = stack
        self._optimizer = optimizer
        tables = table_weights(stack)
        self._names = list(tables)
        # Detached, because the function computes gradients itself; writing them writes
        # the stack's.
        self._weights = [weight.detach() for weight in tables.values()]
        self._weights.append(stack.dense.matrix)
        self._entries = _entries(stack, optimizer, self._names)
        self._rates = [torch.zeros((), device=stack.device) for _ in self._entries]
        self._limits = stack.dense.matrix.new_tensor(optimizer.limits)
        self._engine = engine or engine_for(stack.device)[0]
        self._functions: dict[tuple[object, ...], Run] = {}

    def __call__(
        self, batches: StepBatches, *, peers: Tensor | None = None, weight: float = 1.0
    ) -> Losses:
        """Moves all members by one step on their batches.

        Args:
            batches: see :meth:`Stack.backward`.
            peers: see there.
            weight: see there.

        Raises:
            StackError: a feature has several ids in some row.
            CannotCaptureError: the step cannot be compiled. Nothing was written or drawn in either case.
        """
        return self.run(self.read(batches, peers), batches, peers, weight)

    def read(
        self, batches: StepBatches, peers: Tensor | None = None
    ) -> tuple[object, ...]:
        """Finds the rows of a step; returns its shape, the key of a compiled function. See :meth:`__call__`."""
        peers_shape = None
        if peers is not None:
            peers_shape = peers.shape
        # The compiled function makes such batches, and finds their rows, by itself.
        if isinstance(batches, StackedSteps):
            return (*batches.layout, peers_shape)
        self._stack.read(batches)
        fields = [(name, value.shape) for name, value in tensors_of(batches[0]).items()]
        # A function without empty bags multiplies by no mask, so it is another one.
        padded = [live is not None for _, live in self._rows()]
        return (are_one(batches), *fields, *padded, peers_shape)

    def run(
        self,
        shape: tuple[object, ...],
        batches: StepBatches,
        peers: Tensor | None = None,
        weight: float = 1.0,
    ) -> Losses:
        """Moves all members by one step on batches of ``shape``, as returned by :meth:`read`."""
        self.compile(shape, batches, peers, weight)
        inputs = self._inputs(batches, peers, weight)
        self._optimizer.begin_step()
        # Rates are tensors that the function reads: a schedule changes them without
        # another compilation.
        for rate, entry in zip(self._rates, self._entries, strict=True):
            rate.fill_(entry.group["lr"])
        losses = Losses(*self._functions[shape](inputs))
        if losses.finite():
            self._optimizer.end_step()
        return losses

    def compile(
        self,
        shape: tuple[object, ...],
        batches: StepBatches,
        peers: Tensor | None = None,
        weight: float = 1.0,
    ) -> None:
        """Compiles the function for a shape unless there is one; arguments and errors as of :meth:`run`."""
        if shape in self._functions:
            return
        # Each shape costs a compilation: loaders that vary their batches would compile
        # without end.
        if len(self._functions) == MOST_GRAPHS:
            raise CannotCaptureError(
                f"batches of more than {MOST_GRAPHS} shapes; give them one loader.batch_size"
            )
        # The example draws noise; the generators go back, as the step itself draws it
        # again.
        generators = self._stack.generators.values()
        before = [generator.get_state() for generator in generators]
        inputs = self._stack.inputs(batches, peers, weight)
        example_inputs = self._inputs(batches, peers, weight)
        for generator, generator_state in zip(generators, before, strict=True):
            generator.set_state(generator_state)
        try:
            memory = [*self._weights]
            for entry in self._entries:
                memory += [*entry.state, *entry.steps]
            memory += [*self._rates, self._limits]
            steps = None
            if isinstance(batches, StackedSteps):
                steps = batches
                memory += steps.source.tensors
                memory += self._stack.maker(steps).constants.values()
            step = self._function(inputs, steps)
            self._functions[shape] = self._engine(step, memory, example_inputs)
        except CannotCaptureError:
            raise
        except Exception as error:
            raise CannotCaptureError(
                f"{type(error).__name__}: {first_line(error)}"
            ) from error

    @property
    def shapes(self) -> set[tuple[object, ...]]:
        """The compiled shapes of batches."""
        return set(self._functions)

    def _rows(self) -> list[tuple[Tensor, Tensor | None]]:
        rows: list[tuple[Tensor, Tensor | None]] = []
        for stacked in self._stack.tables.values():
            rows += stacked.one_each()
        return rows

    def _inputs(
        self, batches: StepBatches, peers: Tensor | None, weight: float
    ) -> list[Tensor]:
        noise, stale = self._stack.drawn(batches, peers, weight)
        if isinstance(batches, StackedSteps):
            return [*batches.tensors, *noise, *stale]
        row_ids = []
        filled = []
        for ids, live in self._rows():
            row_ids.append(ids)
            if live is not None:
                filled.append(live)
        fields = stacked_fields(self._stack.members, batches)
        return [*row_ids, *filled, *fields.values(), *noise, *stale]

    def _function(
        self, inputs: Inputs, stacked_steps: StackedSteps | None
    ) -> Callable[..., list[Tensor]]:
        stack = self._stack
        graph = trace(stack.skeleton, inputs)  # type: ignore[arg-type]
        tables = chain.from_iterable(
            stacked.tables for stacked in stack.tables.values()
        )
        lookups: list[tuple[int, int]] = []
        for index, table in enumerate(tables):
            lookups += [(index, table.embedding_dim)] * len(table.feature_names)
        shapes = [value.shape for value in stack.dense.weights.values()]
        members = len(stack.members)
        sizes = [shape.numel() // members for shape in shapes]
        stack_weights = self._weights
        entries = self._entries
        padded = [live is not None for _, live in self._rows()]
        limited = None
        if self._optimizer.clips:
            limited = [name in self._optimizer.limited_tables for name in self._names]

        def step(*tensors: Tensor) -> list[Tensor]:
            # The order is that of `memory` in compile(), and after it that of
            # _inputs().
            rest = iter(tensors)

            def take(items: Sized) -> list[Tensor]:
                return list(islice(rest, len(items)))

            weights = take(stack_weights)
            states = [(take(entry.state), take(entry.steps)) for entry in entries]
            rates = take(entries)
            limits = next(rest)
            live: list[Tensor | None] = [None] * len(lookups)
            if stacked_steps:
                resident = take(stacked_steps.source.tensors)
                names = stack.maker(stacked_steps).constants
                constants = dict(zip(names, take(names), strict=True))
                looked_up, fields = stack.made(
                    stacked_steps, resident, take(stacked_steps.tensors)
                )
                fields |= constants
                ids = list(chain.from_iterable(looked_up))
            else:
                ids = take(lookups)
                for number, gaps in enumerate(padded):
                    if gaps:
                        live[number] = next(rest)
                fields = dict(zip(inputs.fields, take(inputs.fields), strict=True))
            columns = torch.split(weights[-1], sizes, dim=1)
            dense = [
                values.view(shape)
                for values, shape in zip(columns, shapes, strict=True)
            ]
            pooled = []
            for (index, width), rows, filled in zip(lookups, ids, live, strict=True):
                looked_up_rows = _live(weights[index].index_select(0, rows), filled)
                pooled.append(looked_up_rows.view(members, -1, width))
            batch = [fields[name] for name in inputs.fields]
            loss, logits, *gradients = graph(*dense, *pooled, *batch, *rest)
            grads = [torch.zeros_like(weight) for weight in weights[:-1]]
            # Several ids, and several features, may share a row of a table: their
            # gradients add up.
            for (index, width), rows, filled, grad in zip(
                lookups, ids, live, gradients[len(dense) :], strict=True
            ):
                grads[index] = grads[index].index_add(
                    0, rows, _live(grad.reshape(-1, width), filled)
                )
            grads.append(
                torch.cat(
                    [grad.reshape(members, -1) for grad in gradients[: len(dense)]],
                    dim=1,
                )
            )
            if limited is not None:
                grads = _limited(grads, [*limited, True], limits)
            finite = torch.isfinite(loss).all()
            for entry, (state, steps), rate in zip(entries, states, rates, strict=True):
                weight = entry.of(weights[entry.index])
                flat_state = [entry.flat(tensor) for tensor in state]
                # A rule without a count of steps does not read the number; any tensor
                # does.
                step_number = rate
                if steps:
                    step_number = steps[0] + 1
                grad = entry.of(grads[entry.index])
                updated, new = stepped(
                    weight,
                    grad,
                    flat_state,
                    step_number,
                    rate,
                    entry.choice,
                    table=entry.is_table,
                )
                # A loss that is not finite leaves all members, states and counts of
                # steps as they are.
                for target, value in zip(
                    [weight, *flat_state], [updated, *new], strict=True
                ):
                    target.copy_(torch.where(finite, value, target))
                for count in steps:
                    count.add_(finite)
            return [loss, logits, weighted_rows(fields, members).clone()]

        return step


def _live(rows: Tensor, filled: Tensor | None) -> Tensor:
    """Returns the rows (n, D), zeros for empty bags; ``filled`` (n, 1) is 0 for these, or None if there are none."""
    if filled is None:
        return rows
    return rows * filled


def _limited(
    grads: Sequence[Tensor], inside: Sequence[bool], limits: Tensor
) -> list[Tensor]:
    """Returns the gradients, those ``inside`` scaled to at most each member's limit of their norm, (K,)."""
    by_member = [grad.view(len(limits), -1) for grad in grads]
    factors = clip_factors(list(compress(by_member, inside)), limits)
    scaled = []
    for grad, flat, limited in zip(grads, by_member, inside, strict=True):
        if limited:
            grad = (flat * factors).view(grad.shape)
        scaled.append(grad)
    return scaled


class StackSteps:
    """Trains a stack on one set of batches after the other, kernel by kernel or compiled.

    ``compile="auto"``: the first steps go kernel by kernel; if the rest of the run would take longer than
    :data:`~torchrec_ext.capture.policy.PAYS_S` the step is compiled, and stays so if that is faster. ``require``: all
    steps after the first are compiled. Under ``auto`` a rare shape of batch, such as that of an epoch's last one, goes
    kernel by kernel until it has come :data:`~torchrec_ext.capture.policy.PATIENCE` times.

    Args:
        stack: networks that are trained.
        optimizer: moves the stack.
        compile: ``auto``, ``off`` or ``require``, as in a :class:`TrainConfig`.
        done: steps that the run has made.
        total: steps of the whole run.
        say: receives the lines that say which way steps go.
    """

    def __init__(
        self,
        stack: Stack,
        optimizer: StackedOptimizer,
        *,
        compile: Compile = "off",  # noqa: A002 -- the setting's name
        done: int = 0,
        total: int = 0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._stack = stack
        self._optimizer = optimizer
        self._policy = CapturePolicy(compile, say)
        self._policy.is_reported = compile == "off"  # there is nothing to report
        self._say = say
        self._step_count = done
        self._total = total
        self._step: CompiledStep | None = None
        self._shape_counts: Counter[object] = Counter()

    def __call__(
        self, batches: StepBatches, *, peers: Tensor | None = None, weight: float = 1.0
    ) -> Losses:
        """Makes one step; writes nothing if one of the losses is not finite.

        Args:
            batches: see :meth:`Stack.backward`.
            peers: see there.
            weight: see there.

        Raises:
            StackError: ``compile=require``, and the step cannot be compiled; nothing was written.
        """
        policy = self._policy
        if (
            not policy.is_decided
            and policy.compile == "auto"
            and len(policy.eager_seconds) == WATCHED
        ):
            self._decide()
        start = time.perf_counter()
        losses = self._compiled(batches, peers, weight)
        if losses is None:
            losses = self._stack.backward(batches, peers=peers, weight=weight)
            # Both halves of the step are timed, without a compilation between them.
            seconds = time.perf_counter() - start
            if policy.compile == "require" and not policy.is_decided:
                self._begin(batches, peers, weight)
            if losses.finite():
                start = time.perf_counter()
                self._optimizer.step()
                self._step_count += 1
            if not policy.is_reported and not policy.captured_seconds:
                policy.eager_seconds.append(seconds + time.perf_counter() - start)
        elif losses.finite():
            self._step_count += 1
            if not policy.is_reported:
                policy.captured_seconds.append(time.perf_counter() - start)
                self._compare()
        return losses

    def finish(self) -> None:
        """Reports after the last step how steps ran, if there were too few to report it before."""
        policy = self._policy
        if policy.is_reported:
            return
        policy.is_decided = policy.is_reported = True
        if self._step is not None:
            count = len(policy.captured_seconds)
            self._say(
                f"stack: compiled since step {policy.since:,}; {count:,} steps are too few to time"
            )
        elif policy.eager_seconds:
            self._say(
                f"stack: eager: {len(policy.eager_seconds):,} steps are too few to look at"
            )

    def _decide(self) -> None:
        self._policy.is_decided = True
        remaining_steps = self._total - self._step_count
        if too_few := self._policy.too_few_left(
            remaining_steps, self._stack.device.type
        ):
            self._stay_eager(f"compiling {too_few}")
            return
        try:
            self._step = self._new_step()
            self._policy.since = self._step_count + 1
        except (StackError, CannotCaptureError) as error:
            self._stay_eager(str(error))

    def _begin(self, batches: StepBatches, peers: Tensor | None, weight: float) -> None:
        """Compiles before the first step has written anything: a refusal leaves the members as they were."""
        self._policy.is_decided = True
        try:
            if not self._optimizer.begun:
                self._optimizer.begin()
            self._step = self._new_step()
            # the present step goes kernel by kernel, and is not counted yet
            self._policy.since = self._step_count + 2
            self._step.compile(self._step.read(batches, peers), batches, peers, weight)
        except (StackError, CannotCaptureError) as error:
            raise StackError(
                f"train.compile=require: the step of the stack cannot be compiled: {error}"
            ) from None

    def _new_step(self) -> CompiledStep:
        engine, doing = engine_for(self._stack.device)
        step = CompiledStep(self._stack, self._optimizer, engine=engine)
        self._say(f"{doing} ...")
        return step

    def _compiled(
        self, batches: StepBatches, peers: Tensor | None, weight: float
    ) -> Losses | None:
        """Runs a compiled step; returns None, without draws and writes, if this step goes kernel by kernel."""
        if self._step is None:
            return None
        try:
            shape = self._step.read(batches, peers)
            if self._waits(shape, self._step.shapes):
                return None
            return self._step.run(shape, batches, peers, weight)
        except (StackError, CannotCaptureError) as error:
            if self._policy.compile == "require":
                raise StackError(
                    f"train.compile=require: the step of the stack cannot be compiled: {error}"
                ) from None
            self._step = None
            self._stay_eager(str(error))
            return None

    def _waits(
        self, shape: tuple[object, ...], compiled_shapes: Collection[object]
    ) -> bool:
        """Whether a shape is too rare for a compilation of its own."""
        patience = self._policy.patience
        # The first shape is compiled at once: it is that of most steps.
        if not patience or not compiled_shapes or shape in compiled_shapes:
            return False
        self._shape_counts[shape] += 1
        return (
            self._shape_counts[shape] <= patience or len(compiled_shapes) >= MOST_GRAPHS
        )

    def _compare(self) -> None:
        """After enough compiled steps reports their time, and returns to eager ones if these are faster."""
        policy = self._policy
        if not policy.can_compare:
            return
        if policy.is_slower:
            self._step = None
            self._stay_eager(f"a compiled step takes {1e3 * policy.captured_s:.3g} ms")
            return
        policy.is_reported = True
        before = ""
        if len(policy.eager_seconds) >= WATCHED:
            before = f", eager {1e3 * policy.eager_s:.3g} ms"
        self._say(f"stack: compiled {policy.describe_captured()}{before}")

    def _stay_eager(self, why: str) -> None:
        self._policy.reason = why
        self._policy.is_reported = True
        self._say(f"stack: {self._policy.describe_eager()}")
