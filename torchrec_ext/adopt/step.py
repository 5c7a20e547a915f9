"""adopt(): a user's own nn.Module, optimizers and loss, unchanged, trained by a captured step where that pays.

AdoptedStep: called with a batch in place of zero_grad, loss, backward and step. Its first steps are these four, eager
and equal to the bit. Then TorchDynamo traces forward and loss, and the step is captured as one function of tensors, see
:class:`CapturedStep`, on the memory of the model and of the optimizers' state. Before every step Dynamo compares all
that the trace depended on. What Dynamo does not see is checked here: parameters, hooks of optimizers, their state.

A captured step updates some rows later, see :class:`Lag`. Some steps are compared with the eager one for as long as the
training lasts.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from torchrec_ext.adopt.checks import (
    GLOBAL_HOOKS,
    HOOK_ON_GRADIENT,
    STATES,
    ForwardWatch,
    Rules,
    check_model,
    contents,
    fixed_settings,
    hook_of_optimizers,
    loss_and_output,
    response_to_rounding,
    step_difference,
    update_rules,
    write_back,
)
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.graph import (
    GRAPHS,
    ForwardGraph,
    Loss,
    OneGraphTooMany,
    changed_between_calls,
    traced_forward,
)
from torchrec_ext.adopt.lag import Lag, catch_up
from torchrec_ext.adopt.rows import Rows
from torchrec_ext.adopt.source import (
    AdoptedSource,
    AnyBatch,
    DrawnBatch,
    GivenBatch,
    GraphCall,
    GroupSettings,
    RowsOnDevice,
)
from torchrec_ext.capture.captured import CapturedStep, RareShapeError, StepInputs
from torchrec_ext.capture.executors import StepEngine, engine_for
from torchrec_ext.capture.lowering import CannotCaptureError
from torchrec_ext.capture.memory import StepMemory, UpdatedParameter
from torchrec_ext.capture.policy import PATIENCE, WATCHED, Compile, TrainingDivergedError, median_step, two_digits
from torchrec_ext.observe.state_copy import random_state, set_random_state
from torchrec_ext.observe.user_lines import first_line, module_line

# Seconds that a capture took here: so much, and so much more for each torch call of the forward.
CAPTURE_S, CAPTURE_S_PER_CALL = 8.0, 0.4
RESTARTS = 3  # captures that are given up because the model was changed, before steps stay eager
SMALL_MS = 5.0  # captured steps up to this may be faster on one thread: .7 ms against 1.7 on two, of 75 k parameters
_PACE = 64  # steps after which the time for readers of whole tables is looked at again
_CHECKED = 0.01  # of the time since the capture goes to comparing steps with eager ones; as much after pauses
_PAUSE_S = 0.1  # between two steps
# How an L2 term of the loss is written so that a table is moved row by row, by the kind of optimizer.
_WITHOUT_CLOSED_FORM = "which has no closed form for rows that are not read; the decay of AdamW has one"
_PENALTIES = {
    "sgd": "which weight_decay of SGD, twice the factor of the square, does row by row",
    "adam": _WITHOUT_CLOSED_FORM,
    "adagrad": _WITHOUT_CLOSED_FORM,
}


def adopt(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss: Loss,
    *,
    rows: Rows | None = None,
    clip_norm: float = 0.0,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    compile: Compile = "auto",  # noqa: A002
    verify: int = 3,
    patience: int = PATIENCE,
) -> AdoptedStep:
    """Returns a step that trains ``model`` as the user's own loop does, and faster where that pays.

    Args:
        model: the user's module; it, its state_dict, the optimizer's state and schedulers stay the user's.
        optimizer: optimizers of the model's parameters: Adam, AdamW, Adagrad or SGD.
        loss: takes a batch and returns the loss, (), or a tuple of the loss and a tree of tensors.
        rows: the :class:`Rows` whose batches :meth:`AdoptedStep.epoch` trains on, made inside the step.
        clip_norm: limit of the gradients' norm, as of torch.nn.utils.clip_grad_norm_; 0 for none.
        autocast: makes the context of the forward, such as ``lambda: torch.autocast("cpu", torch.bfloat16)``.
        compile: ``auto`` captures once eager steps have taken as long as a capture does, and says why where it cannot;
            ``require`` captures the third step, or raises; ``off`` leaves all steps eager.
        verify: number of captured steps that are compared with the eager ones on the same batch and weights.
        patience: eager steps of another shape than the first, such as an epoch's last batch, before it is captured too.

    Raises:
        CannotAdopt: an argument is not what it must be; with ``compile="require"``, also whatever cannot be captured.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        >>> step = adopt(model, optimizer, lambda x, y: nn.functional.mse_loss(model(x), y))
        >>> loss, _ = step(torch.ones(4, 2), torch.zeros(4, 1))  # instead of zero_grad, loss, backward, step
        >>> step.describe()
        'eager so far (1 step)'
    """
    if not isinstance(model, nn.Module):
        raise CannotAdopt(f"model is a {type(model).__name__}; give an nn.Module, several in an nn.ModuleList")
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise CannotAdopt(f"optimizer is a {type(each).__name__}; give a torch.optim.Optimizer or several")
    if not optimizers:
        raise CannotAdopt("there is no optimizer; give a torch.optim.Optimizer or several")
    if not callable(loss):
        raise CannotAdopt(f"loss is a {type(loss).__name__}; give a function from a batch to the loss")
    if not (isinstance(clip_norm, int | float) and math.isfinite(clip_norm) and clip_norm >= 0):
        raise CannotAdopt(f"clip_norm={clip_norm!r}: must be a number of 0 or more")
    if compile not in ("auto", "off", "require"):
        raise CannotAdopt(f"compile={compile!r}: must be 'auto', 'off' or 'require'")
    for name, count in (("verify", verify), ("patience", patience)):
        if not isinstance(count, int) or count < 0:
            raise CannotAdopt(f"{name}={count!r}: must be a number of steps, 0 or more")
    for name, module in model.named_modules() if clip_norm else ():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            path = f"{name}.weight".lstrip(".")
            raise CannotAdopt(
                f"clip_norm={clip_norm:g}: the gradient of {module_line(model, path)} is sparse, and "
                "torch.nn.utils.clip_grad_norm_ limits dense ones alone; make the table with sparse=False"
            )
    return AdoptedStep(
        model,
        optimizers,
        loss,
        rows=rows,
        clip_norm=clip_norm,
        autocast=autocast,
        compile_=compile,
        verify=verify,
        patience=patience,
    )


class AdoptedStep:
    """The training step of a user's model; made by :func:`adopt`.

    ``loss, output = step(*batch)`` trains on one batch. Both are detached from the graph, and after a captured step
    ``.grad`` is None.

    Attributes:
        optimizers: the user's optimizers.
        after_step: functions called after each step, such as those of :class:`~torchrec_ext.distributed.LocalSGD`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loss: Loss,
        *,
        rows: Rows | None,
        clip_norm: float,
        autocast: Callable[[], AbstractContextManager[Any]],
        compile_: Compile,
        verify: int,
        patience: int,
    ) -> None:
        self._model, self._optimizers, self._loss = model, list(optimizers), loss
        self.optimizers, self.after_step = tuple(self._optimizers), list[Callable[[], None]]()
        self._clip_norm, self._autocast, self._compile = float(clip_norm), autocast, compile_
        self._verify, self._patience = verify, patience
        self._why = "compile='off'" if compile_ == "off" else ""  # steps stay eager; empty while that is open
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._steps, self._restarts, self._notes, self._broken = 0, 0, set[str](), ""
        self._pending: Tensor | None = None
        self._swept = dict[str, str]()  # tables that somebody reads after each step, by name, with the reason
        catch_up(list(model.parameters()))  # behind another step, perhaps
        self._rows, self._resident = rows, None if rows is None else RowsOnDevice(rows, self._device)
        self._begin()
        if not self._why:
            try:
                self._check()
                engine_for(self._device)
                self._check_autocast()
            except CannotCaptureError as error:
                self._stay_eager(error)
        for optimizer in self._optimizers:
            optimizer.register_state_dict_pre_hook(lambda _: self.settle())
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle())
            optimizer.register_load_state_dict_post_hook(self._take_over)

    def _begin(self) -> None:
        """Begins to watch eager steps, before the first step and after a change of the model."""
        self._eager_seconds: list[float] = []
        self._captured_seconds: list[float] = []
        # Torch calls of a forward, whether it draws random numbers, and whether it selects by masks.
        self._calls, self._random, self._selects = 0, False, False
        self._traced: Callable[..., tuple[Tensor, Any]] | None = None
        self._parts: dict[Any, _Captured] = {}  # by the parameters that a step moves, and those moved row by row
        self._graphs: dict[int, tuple[ForwardGraph, Callable[[Sequence[Tensor]], None], _Captured]] = {}
        self._current: _Captured | None = None
        self._number_of_graphs = 0
        self._known_state: list[int] = []
        self._began = self._last = time.perf_counter()
        self._checks_s = [0.0, 0.0]  # of steps that were compared, and of those after a pause
        self._paused, self._paced_before = False, (0.0, 0)
        self._too_many, self._was_eager = 0, True
        self._reported, self._capture_s, self._since, self._stale_grads = False, 0.0, 0, True

    def _check(self) -> None:
        check_model(self._model)
        update_rules(self._model, self._optimizers)

    def __call__(self, *batch: Any) -> tuple[Tensor, Any]:
        """Trains on one batch, and returns the loss, (), and what the user's function returned beside it.

        Raises:
            TrainingDivergedError: the loss is not finite.
            CannotAdopt: with ``compile="require"``, the step cannot be captured.
            RuntimeError: a captured step before has failed half way, as on an id out of range.
        """
        return self._train(GivenBatch(batch))

    def epoch(self, rows: Rows | None = None) -> Iterator[Tensor]:
        """Trains on the batches of an epoch, which a captured step makes inside, and yields their losses, ().

        Args:
            rows: the :class:`Rows`; those that :func:`adopt` was given where not given here.

        Raises:
            CannotAdopt: there are none; otherwise see :meth:`__call__`.
        """
        rows = self._rows if rows is None else rows
        if rows is None:
            raise CannotAdopt("epoch() has no rows; give adopt(..., rows=Rows.of(dataset, batch_size))")
        if self._resident is None or self._resident.rows is not rows:
            self._resident = RowsOnDevice(rows, self._device)
        for step in rows.steps():
            yield self._train(DrawnBatch(self._resident, step.indices, step.draws))[0]

    def _train(self, batch: AnyBatch) -> tuple[Tensor, Any]:
        if self._broken:
            raise RuntimeError(self._broken)
        self._steps += 1
        result = self._any_step(batch)
        self._last = time.perf_counter()
        for call in self.after_step:
            call()
        return result

    def _any_step(self, batch: AnyBatch) -> tuple[Tensor, Any]:
        if self._why:
            return self._eager(batch)
        if self._traced is not None:
            return self._step(batch)
        if len(self._eager_seconds) == 1:
            return self._observed(batch)
        if len(self._eager_seconds) >= 2 and self._pays():
            try:
                self._begin_capture()
            except CannotCaptureError as error:
                self._stay_eager(error)
                return self._eager(batch)
            return self._step(batch)
        start = self._now()
        result = self._eager(batch)
        self._eager_seconds.append(self._now() - start)
        if len(self._eager_seconds) == WATCHED and self._compile == "auto":
            self._announce()
        return result

    def settle(self) -> None:
        """Updates rows that no step has read lately, so that model and optimizers are as after eager steps.

        Nobody needs to call it: whoever reads a weight or state that is behind causes it.
        """
        if self._current is not None:
            self._current.lag.settle()

    @contextmanager
    def settled(self) -> Iterator[nn.Module]:
        """Gives the model with all rows updated, for an evaluation or for saving."""
        self.settle()
        yield self._model

    def describe(self) -> str:
        """Returns which way steps go and why, and how each table is moved."""
        if self._why:
            return f"eager: {self._why}"
        if self._current is None:
            return f"eager so far ({self._steps} step{'s' if self._steps != 1 else ''})"
        dense = [f"as a dense layer: {name} ({why})" for name, why in self._current.not_tables.items()]
        ways = [f"captured since step {self._since:,}", self._current.step.describe(), *dense]
        return "; ".join(way for way in ways if way)

    def figures(self) -> dict[str, float]:
        """Returns ``eager_s`` and ``captured_s``, medians of a step, and ``capture_s``, of all captures, in seconds.

        Those that are not known yet are not there. ``captured_s`` includes what updating all rows takes when somebody
        reads a table.
        """
        figures = {"capture_s": self._capture_s} if self._capture_s else {}
        if self._eager_seconds:
            figures["eager_s"] = median_step(self._eager_seconds)
        if self._captured_seconds:
            figures["captured_s"] = median_step(self._captured_seconds) + self._settling_s
        return figures

    @property
    def _settling_s(self) -> float:
        """Seconds a step of updating all rows for readers, since the capture."""
        steps = max(self._steps - self._since, 1)
        return sum(captured.lag.seconds for captured in self._parts.values() if captured.unverified) / steps

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _pays(self) -> bool:
        if self._compile == "require":
            return True
        return len(self._eager_seconds) >= WATCHED and sum(self._eager_seconds) >= self._expected_capture_s

    @property
    def _expected_capture_s(self) -> float:
        return CAPTURE_S + CAPTURE_S_PER_CALL * self._calls

    def _announce(self) -> None:
        """Says when a capture will start, so that a run that ends before it is no surprise."""
        seconds = median_step(self._eager_seconds)
        expected = self._expected_capture_s
        first = two_digits(self._steps - len(self._eager_seconds) + expected / seconds)
        self._say(
            f"eager steps take {1e3 * seconds:.3g} ms; graph capture (about {expected:.0f} s) starts near step "
            f"{first:,}. compile='require' captures at step 3, compile='off' never"
        )

    def _check_autocast(self) -> None:
        with self._autocast():
            if self._computes_in_16_bits and torch.get_autocast_dtype(self._device.type) == torch.float16:
                raise CannotAdopt(
                    "autocast computes in float16, whose gradients need a GradScaler; take torch.bfloat16, which "
                    "needs none"
                )

    @property
    def _computes_in_16_bits(self) -> bool:
        return torch.is_autocast_enabled(self._device.type)

    def _eager(self, batch: AnyBatch, watch: ForwardWatch | None = None) -> tuple[Tensor, Any]:
        """Makes the user's own step; ``watch`` surrounds its forward."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        with watch or nullcontext(), self._autocast():
            loss, output = loss_and_output(self._loss(*batch.args()))
        self._moved_by(loss)
        return loss.detach(), pytree.tree_map_only(Tensor, Tensor.detach, output)

    def _moved_by(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise CannotAdopt(
                "the loss does not depend on a parameter that requires a gradient; return the loss itself"
            )
        self._look(loss, written=False)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._clip_norm:
            moved = [p for each in self._optimizers for group in each.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(moved, self._clip_norm)
        for optimizer in self._optimizers:
            optimizer.step()

    def _look(self, loss: Tensor, *, written: bool) -> None:
        """Raises if the loss is not finite; on a GPU checks the previous step's loss to avoid a sync."""
        step = self._steps
        seen = self._pending if loss.is_cuda else loss.detach()
        if loss.is_cuda:
            step, written, self._pending = step - 1, True, loss.detach()
        if seen is None or math.isfinite(value := float(seen)):
            return
        state = "the update of this step was written" if written else "nothing was written by this step"
        raise TrainingDivergedError(
            f"the loss is {value} at step {step:,}: {state}; look for values in the batch that are not finite, lower "
            "the learning rate, or set clip_norm",
            step,
        )

    def _observed(self, batch: AnyBatch) -> tuple[Tensor, Any]:
        """Makes an eager step, and notes what it does that no graph shows."""
        args = batch.args()
        watch = ForwardWatch(self._model, args)
        loss, output = self._eager(GivenBatch(args), watch)
        # Time is not taken of this step.
        self._eager_seconds.append(self._eager_seconds[-1])
        self._calls, self._random, self._selects = watch.calls, watch.random, watch.selects
        if watch.problem:
            self._stay_eager(CannotAdopt(watch.problem))
        return loss, output

    def _begin_capture(self) -> None:
        _, doing = engine_for(self._device)
        self._settings = fixed_settings(self._optimizers)
        self._say(f"{doing} ...")
        if torch.is_anomaly_enabled():
            self._note(
                "torch.autograd.set_detect_anomaly is on, in which eager steps take several times as long; captured "
                "steps do not look for NaN in gradients, and stop at a loss that is not finite"
            )
        self._traced = traced_forward(self._loss, weakly(self._take_graph), masks=self._selects)
        self._since = self._steps

    def _step(self, batch: AnyBatch) -> tuple[Tensor, Any]:
        """Makes a captured step, or the eager one if there is none for this batch."""
        if change := self._ended():
            self._stay_eager(CannotAdopt(f"{change} has changed at step {self._steps:,}"))
            return self._eager(batch)
        if change := self._changed():
            return self._anew(change, batch)
        try:
            self._take_turn()
            start = self._now() if not self._reported else 0.0
            loss, output = self._called(batch)
        except _Compared as captured:
            return self._verified(captured, batch)
        except _ExchangedError as error:
            return self._anew(str(error), batch)
        except CannotCaptureError as error:
            return self._instead(error, batch)
        assert self._current is not None
        self._current.lag.begin()
        self._too_many, self._was_eager = 0, False
        self._look(loss, written=True)
        if not self._reported:
            self._captured_seconds.append(self._now() - start)
            if len(self._captured_seconds) > WATCHED:
                self._report()
        elif not self._steps % _PACE:
            self._check_pace()
        return loss, output

    def _called(self, batch: AnyBatch) -> tuple[Tensor, Any]:
        """Has Dynamo compare what the step depends on, and call the graph's step."""
        assert self._traced is not None
        self._batch = batch
        lag = self._unmarked()
        try:
            with self._autocast():
                return self._traced(*batch.example())
        finally:
            if lag is not None:
                lag.remark()

    def _unmarked(self) -> Lag | None:
        """Has tables that are behind be of the class that they had in the trace, which Dynamo compares."""
        lag = None if self._current is None else self._current.lag
        if lag is not None:
            lag.unmark()
        return lag

    def _take_graph(self, module: GraphModule, examples: list[Tensor]) -> Callable[..., Sequence[Any]]:
        """Receives a graph of Dynamo's, and returns what is called in its place."""
        graph, check = self._graph_of(module, examples)
        captured = self._captured_for([graph], update_rules(self._model, self._optimizers))
        self._graphs[graph.number] = graph, check, captured
        return weakly(self._call_graph, graph.number)

    def _call_graph(self, number: int, *tensors: Tensor) -> Sequence[Any]:
        graph, check, captured = self._graphs[number]
        check(tensors)
        return self._run(captured, GraphCall(graph, self._batch, tensors))

    def _graph_of(
        self, module: GraphModule, examples: list[Tensor], with_gradient: Collection[int] = ()
    ) -> tuple[ForwardGraph, Callable[[Sequence[Tensor]], None]]:
        """Returns a graph of Dynamo's, and a check of the tensors that it is called with.

        Raises:
            OneGraphTooMany: there are :data:`GRAPHS` already.
            CannotAdopt: it has no captured form.
        """
        self.settle()
        self._number_of_graphs += 1
        if self._number_of_graphs > GRAPHS:
            raise OneGraphTooMany(changed_between_calls())
        check_model(self._model)
        rules = update_rules(self._model, self._optimizers)
        moved = {name: parameter for name, (_, _, parameter, _) in rules.items() if parameter.requires_grad}
        leaves = pytree.tree_leaves(self._batch.example())
        graph = ForwardGraph(module, examples, self._model, leaves, moved, with_gradient)
        return graph, self._check_of(graph, moved)

    def _check_of(self, graph: ForwardGraph, moved: Mapping[str, nn.Parameter]) -> Callable[[Sequence[Tensor]], None]:
        """Returns a check that a graph is called with the parameters of its capture: Dynamo does not compare which."""
        places = [(index, name, moved[name], moved[name].data_ptr()) for name, index in graph.parameters.items()]

        def check(tensors: Sequence[Tensor]) -> None:
            for index, name, parameter, address in places:
                if tensors[index] is not parameter or parameter.data_ptr() != address:
                    raise _ExchangedError(f"'{name}'")
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    raise CannotAdopt(f"{module_line(self._model, name)} {HOOK_ON_GRADIENT}")
            for index, (line, value) in graph.masks.items():
                if not torch.equal(tensors[index], value):
                    raise _ExchangedError(f"the mask of {line}")

        return check

    def _captured_for(self, graphs: Sequence[ForwardGraph], rules: Rules) -> _Captured:
        """Returns the captured step of all graphs that move the same parameters in the same way."""
        reached = {name for graph in graphs for name in graph.reached}
        if not reached:
            raise CannotAdopt("the loss does not depend on a parameter that an optimizer moves")
        looked_up = {name for graph in graphs for name in graph.look_ups}
        not_tables = dict[str, str]()
        for graph in graphs:
            for name, line in graph.matrices.items():
                term = f" is an L2 term over all rows, {_PENALTIES[rules[name][3].kind]}"
                not_tables[name] = line + term * (name in graph.penalties)
        not_tables |= self._as_layers()
        moved, state = [], []
        for name, (number, index, parameter, choice) in rules.items():
            if name not in reached:
                continue
            optimizer = self._optimizers[number]
            values = optimizer.state.get(parameter, {})
            keys = STATES[choice.kind]
            if any(key not in values for key in keys):
                raise CannotAdopt(f"{module_line(self._model, name)} has not been moved by an eager step yet")
            state += [(number, parameter, key, values[key]) for key in (*keys, "step") if key in values]
            moved.append(
                UpdatedParameter(
                    name,
                    name in looked_up and name not in not_tables,
                    False,
                    parameter.detach(),
                    [values[key].detach() for key in keys],
                    [values["step"].detach()] if "step" in values else [],
                    GroupSettings(optimizer, index),
                    choice,
                )
            )
        key = tuple((each.name, each.table) for each in moved)
        if key not in self._parts:
            memory = StepMemory(moved, {}, clips=self._clips_whole_tables)
            source = self._source_of(memory)
            patience = self._patience if self._compile == "auto" else 0
            engine = self._executor(source)
            step = CapturedStep(source, engine, autocast=self._autocast, patience=patience)
            self._parts[key] = _Captured(source, step, engine, state, not_tables)
        return self._parts[key]

    @property
    def _clips_whole_tables(self) -> bool:
        """Whether tables are moved whole because the norm of gradients is limited."""
        return False

    def _as_layers(self) -> dict[str, str]:
        """Names tables that are moved as dense layers, each with the reason."""
        return self._swept

    def _source_of(self, memory: StepMemory) -> AdoptedSource:
        return AdoptedSource(self._model, memory, self._clip_norm)

    def _executor(self, source: AdoptedSource) -> StepEngine:
        return StepEngine(self._device)

    def _run(self, captured: _Captured, call: Any) -> list[Any]:
        """Makes the step of a graph, and returns the graph's outputs.

        Raises:
            CannotCaptureError: it cannot be captured; nothing was trained.
            _Compared: the step was made, and is to be compared with the eager one.
        """
        if self._current is not captured:
            self.settle()
            captured.source.memory.reload()
        given = captured.source.inputs(call)
        self._prepare(captured, given)
        self._current = captured
        before = None
        if captured.unverified[given.key] or self._check_is_due(captured):
            memory = captured.source.memory
            before = _Before(contents(memory, call.outer()), memory.unsettled, random_state(self._device))
            captured.engine.plain = self._random
        self._zero_grads()
        try:
            loss, outputs = self._trained(captured, given)
        except Exception as error:
            if isinstance(error, EndOfStepError):
                raise
            if before is not None:
                write_back(captured.source.memory, call.outer(), before.contents)
                raise _EndOfCaptureError(f"{type(error).__name__}: {first_line(error)}") from error
            raise self._broken_by(error) from error
        finally:
            captured.engine.plain = False
        if before is not None:
            raise _Compared(given.key, call, before, loss, outputs)
        return list(outputs)

    def _trained(self, captured: _Captured, given: StepInputs) -> tuple[Tensor, Any]:
        return captured.step(given)

    def _broken_by(self, error: Exception) -> Exception:
        """Returns the error of a captured step that failed half way, after which no step follows."""
        self._broken = (
            f"the captured step {self._steps:,} has failed half way ({first_line(error)}): load the last "
            "checkpoint of the model and of the optimizer, and call adopt() again"
        )
        try:
            with torch.no_grad():
                self._loss(*self._batch.args())
        except Exception as users:  # which says more
            return users
        return RuntimeError(self._broken)

    def _zero_grads(self) -> None:
        if self._stale_grads:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            self._stale_grads = False

    def _prepare(self, captured: _Captured, given: StepInputs) -> None:
        """Compiles the step of a graph that has none yet."""
        if given.key in captured.unverified:
            return
        start, first = time.perf_counter(), not captured.step.shapes
        captured.step.prepare(given)
        seconds = time.perf_counter() - start
        captured.unverified[given.key] = self._verify if first else min(self._verify, 1)
        if first:
            rows = set(captured.step.row_tables)
            tables = {name: parameter for name, parameter in self._model.named_parameters() if name in rows}
            row_tables = {id(parameter) for parameter in tables.values()}
            late = [tensor for _, p, key, tensor in captured.state if key == "step" or id(p) in row_tables]
            captured.lag = Lag(captured.source.memory, tables, late)
        self._capture_s += seconds
        self._began = time.perf_counter()
        self._say(f"... {seconds:.1f} s{f'; {captured.step.describe()}' if first and captured.step.describe() else ''}")

    def _ended(self) -> str:
        """Names a change after which steps stay eager, and that Dynamo does not see; empty if there is none."""
        if fixed_settings(self._optimizers) != self._settings:
            return "a setting of the optimizer other than lr (OneCycleLR: give cycle_momentum=False)"
        if hook := hook_of_optimizers(self._optimizers):
            return f"a hook of the optimizer ({hook})"
        if any(GLOBAL_HOOKS):
            return "a hook on all modules"
        return ""

    def _changed(self) -> str:
        """Names a change after which the step is captured anew, and Dynamo does not see it; empty if there is none."""
        current = self._current
        if current is None or (current.lag.active and self._state_ids() == self._known_state):
            return ""
        for number, parameter, key, tensor in current.state:
            if self._optimizers[number].state.get(parameter, {}).get(key) is not tensor:
                return f"the optimizer's state '{key}'"
        self._known_state = self._state_ids()
        return ""

    def _state_ids(self) -> list[int]:
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        return [id(value) for state in states for value in state.values()]

    def _take_turn(self) -> None:
        """Lets other steps over the same tensors update their rows, and reads how many steps were made."""
        current = self._current
        if current is not None and current.lag.active:
            return
        catch_up(list(self._model.parameters()))
        if current is None:
            return
        catch_up([tensor for *_, tensor in current.state])
        current.source.memory.reload()

    def _check_is_due(self, captured: _Captured) -> bool:
        """Whether this step is compared with the eager one: some always are, and the first after a pause."""
        now = time.perf_counter()
        self._paused = not (captured.lag.active or self._was_eager) or now - self._last > _PAUSE_S
        return bool(self._verify) and self._checks_s[self._paused] < _CHECKED * (now - self._began)

    def _verified(self, captured: _Compared, batch: AnyBatch) -> tuple[Tensor, Any]:
        """Takes a captured step back, makes the eager one, and compares the two; the eager one stays."""
        began = time.perf_counter()
        current = self._current
        assert current is not None
        memory, outer = current.source.memory, captured.call.outer()
        memory.settle()
        after = contents(memory, outer)
        write_back(memory, outer, captured.before.contents)
        memory.unsettled = captured.before.unsettled
        # Not before the captured step, whose own way of updating rows is so compared too.
        memory.settle()
        current.lag.release()
        before = contents(memory, outer)
        set_random_state(self._device, captured.before.random)
        start = self._now()
        eager = self._eager(batch)
        if self._compile == "require":  # where nothing but the two slow first steps was eager
            self._eager_seconds.append(self._now() - start)
        self._stale_grads = self._was_eager = True
        results = (captured.loss, captured.outputs), eager
        factor = 300.0 if self._in_autocast() else 1.0
        far = step_difference(memory, outer, before, after, *results, factor)
        # Of towers apart a call is another: its step cannot be made again without the other ranks.
        if far and isinstance(captured.call, GraphCall):
            noise = self._response_to_rounding(captured, before)
            far = step_difference(memory, outer, before, after, *results, factor, noise=noise)
        moved = {each.name for each in memory.moved}
        for name, (_, _, parameter, _) in update_rules(self._model, self._optimizers).items():
            if name not in moved and parameter.grad is not None:
                far = far or f"'{name}', which has a gradient now and had none before"
        if far:
            self._stay_eager(CannotAdopt(f"a captured step differs from the eager one on the same batch in {far}"))
            return eager
        if current.unverified[captured.key]:
            current.unverified[captured.key] -= 1
        else:
            self._checks_s[self._paused] += time.perf_counter() - began
        return eager

    def _response_to_rounding(self, captured: _Compared, before: Mapping[str, Tensor]) -> dict[str, float]:
        """Returns how far rounding moves the gradients of the step that is compared, from its ops run one by one."""
        current, random = self._current, random_state(self._device)
        assert current is not None
        given = current.source.inputs(captured.call)

        def step() -> Tensor:
            set_random_state(self._device, captured.before.random)
            return current.step(given)[0]

        current.engine.plain = True
        try:
            return response_to_rounding(current.source.memory, captured.call.outer(), before, step)
        finally:
            current.engine.plain = False
            set_random_state(self._device, random)

    def _anew(self, changed: str, batch: AnyBatch) -> tuple[Tensor, Any]:
        """Gives up the captured steps, because somebody changed what they have fixed, and makes an eager one."""
        self.settle()
        self._restarts += 1
        if self._restarts > RESTARTS:
            self._stay_eager(CannotAdopt(f"{changed} has changed at step {self._steps:,}"))
            return self._eager(batch)
        self._say(f"{changed} has changed: eager steps again, until a capture pays")
        self._begin()
        try:
            self._check()
        except CannotCaptureError as error:
            self._stay_eager(error)
        result = self._eager(batch)
        self._eager_seconds.append(0.0)
        return result

    def _instead(self, error: CannotCaptureError, batch: AnyBatch) -> tuple[Tensor, Any]:
        """Makes the eager step on a batch for which there is no captured one."""
        self.settle()
        rare = isinstance(error, RareShapeError)
        self._too_many += isinstance(error, OneGraphTooMany)
        nothing_captured = not any(captured.step.shapes for captured in self._parts.values())
        ended = isinstance(error, _EndOfCaptureError) or self._too_many > GRAPHS
        if ended or (not rare and (nothing_captured or self._compile == "require")):
            self._stay_eager(error)
        elif not rare:
            self._note(f"batches of one kind stay eager: {error}")
        result = self._eager(batch)
        self._stale_grads = self._was_eager = True
        return result

    def _in_autocast(self) -> bool:
        with self._autocast():
            return self._computes_in_16_bits

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Copies a state that was loaded into the memory of the step, which stays at its addresses."""
        if self._why:
            return
        try:
            with torch.no_grad():
                for captured in self._parts.values():
                    for number, parameter, key, tensor in captured.state:
                        if self._optimizers[number] is optimizer:
                            state = optimizer.state[parameter]
                            tensor.copy_(torch.as_tensor(state[key]))
                            state[key] = tensor
        except KeyError:
            self._begin()  # another state, as of an optimizer without a step

    def _report(self) -> None:
        """Says what the capture gained, and goes back to eager steps if it gained nothing."""
        self._reported = True
        eager, captured = median_step(self._eager_seconds) * 1e3, median_step(self._captured_seconds) * 1e3
        threads = torch.get_num_threads() if self._device.type == "cpu" else 1
        fewer = ""
        if threads > 1 and captured < SMALL_MS:
            fewer = f"; {threads} threads meet after every kernel, try torch.set_num_threads(1) before the first step"
        if captured >= eager and self._compile == "auto":
            took = f"a captured step takes {captured:.3g} ms, and an eager one {eager:.3g} ms"
            self._stay_eager(CannotAdopt(took + fewer))
            return
        if len(self._eager_seconds) <= 2:  # the first two, which say nothing of later ones
            self._say(
                f"captured since step {self._since:,}: {captured:.3g} ms a step; capturing took {self._capture_s:.1f} s"
                f"{fewer}"
            )
            return
        paid = (
            f", paid after {two_digits(1e3 * self._capture_s / (eager - captured)):,} steps" if eager > captured else ""
        )
        self._say(
            f"captured since step {self._since:,}: {captured:.3g} ms a step, eager {eager:.3g} ms "
            f"({eager / captured:.1f}x); capturing took {self._capture_s:.1f} s{paid}{fewer}"
        )

    def _check_pace(self) -> None:
        """Moves tables whole if somebody reads them after most steps, and goes back to eager steps if that is no gain.

        Updating all rows is then most of a step, and takes longer than to move the table as a dense layer.
        """
        assert self._current is not None
        lag = self._current.lag
        seconds, count = self._paced_before
        self._paced_before = lag.seconds, lag.count
        settling, reads = (lag.seconds - seconds) / _PACE, lag.count - count
        eager, captured = median_step(self._eager_seconds), median_step(self._captured_seconds)
        rows = self._current.step.row_tables
        often = bool(rows) and reads > _PACE // 2 and settling > captured
        if not settling or not (often or captured + settling >= eager):
            return
        who = lag.holder()
        cause = f"the memory of '{who}' is held by a kept .data, state_dict or numpy array" if who else lag.reader
        text = (
            f"{cause}: all rows are updated after each step for it, {1e3 * (captured + settling):.3g} ms a step with "
            f"them, eager {1e3 * eager:.3g} ms"
        )
        if often:
            self._swept |= dict.fromkeys(rows, f"all of it is read after each step, {cause}")
            self._say(f"{text}; tables are moved whole from the next capture on")
            self.settle()
            self._begin()
        elif self._compile == "auto":
            self._stay_eager(CannotAdopt(text))
        else:
            self._note(text)

    def _stay_eager(self, error: CannotCaptureError) -> None:
        """Leaves all further steps eager, and says why; raises if a capture is required."""
        self.settle()
        self._current, self._traced = None, None
        self._why = str(error)
        if self._compile == "require":
            self._why = ""
            raise CannotAdopt(f"compile='require': {error}") from None
        self._note(f"the step stays eager: {error}")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            self._say(text)

    def _say(self, text: str) -> None:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            print(f"adopt: {text}", flush=True)


class EndOfStepError(Exception):
    """A captured step was aborted on all ranks, or failed here; see ``__cause__``."""


@dataclass
class _Captured:
    """The captured steps that move the same parameters in the same way.

    Args:
        source: model, memory and inputs.
        step: the steps, one for each graph.
        engine: the executor, which can also run them op by op.
        state: the optimizers' state: number of the optimizer, parameter, name and tensor.
        not_tables: why a table is moved as a dense layer, by its name.
        lag: weights and state that are updated later.
        unverified: how many further steps of a graph are compared with eager ones, by its key.
    """

    source: AdoptedSource
    step: CapturedStep
    engine: StepEngine
    state: list[tuple[int, nn.Parameter, str, Tensor]]
    not_tables: dict[str, str]
    lag: Lag = field(init=False)
    unverified: dict[Any, int] = field(default_factory=dict)


class _Before(NamedTuple):
    """What a step that is compared with the eager one has found.

    Args:
        contents: of the memory, see :func:`contents`.
        unsettled: steps since all rows were updated.
        random: state of torch's random numbers.
    """

    contents: dict[str, Tensor]
    unsettled: int
    random: Tensor


class _Compared(Exception):  # noqa: N818
    """Ends a call of Dynamo's after the captured step: the eager one does in Python what the user's code does.

    Args:
        key: key of the graph.
        call: the call.
        before: what the step has found.
        loss: loss of the captured step, ().
        outputs: outputs of the graph.
    """

    def __init__(self, key: Any, call: GraphCall, before: _Before, loss: Tensor, outputs: Sequence[Any]) -> None:
        super().__init__()
        self.key, self.call, self.before, self.loss, self.outputs = key, call, before, loss, outputs


class _ExchangedError(Exception):
    """A parameter is another, or elsewhere, than when the step was captured."""


class _EndOfCaptureError(CannotAdopt):
    """No batch can be captured any more, as after a first captured step that failed, and was taken back."""


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Returns a call of a method that does not keep its object alive, as Dynamo's cache would for ever."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        assert bound is not None
        return bound(*first, *args)

    return call
