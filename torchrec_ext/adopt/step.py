"""adopt(): a user's own nn.Module, optimizers and loss, unchanged, trained by a captured step where that pays.

AdoptedStep: called with a batch in place of zero_grad, loss, backward and step. Its first steps are these four, eager
and equal to the bit. Then forward, backward and optimizers are captured as one function of tensors, see
:class:`CapturedStep`, on the memory of the model and of the optimizers' state. No module is replaced: while the step is
traced, nn.Embedding and nn.EmbeddingBag objects read rows of the step's memory, and afterwards they are as before.

A captured step leaves rows that nobody reads for later. Until they are caught up, weights and state that lag belong to
a class of their own, which catches them up before anybody reads or writes them; so nobody can forget it.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from torchrec_ext.adopt.checks import (
    STATES,
    ForwardObserver,
    PythonState,
    check_model,
    contents,
    fixed_settings,
    loss_and_output,
    module_line,
    step_difference,
    tensor_leaves,
    update_rules,
    write_back,
)
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.rows import Rows
from torchrec_ext.adopt.source import (
    AdoptedSource,
    AnyBatch,
    DrawnBatch,
    ForwardWatch,
    GivenBatch,
    GroupSettings,
    Loss,
    RowsOnDevice,
    Table,
    looked_up_tables,
    random_state,
    set_random_state,
    unusable,
)
from torchrec_ext.train.config import Compile
from torchrec_ext.train.guards.finite import TrainingDivergedError
from torchrec_ext.train.step.captured import (
    CapturedStep,
    RareShapeError,
    Run,
    StepInputs,
    as_it_is,
    compile_graph,
    cuda_graph,
    engine_for,
    first_line,
    traced,
    unaliased,
)
from torchrec_ext.train.step.choose import PATIENCE, WATCHED, median_step, two_digits
from torchrec_ext.train.step.lowering import CannotCaptureError
from torchrec_ext.train.step.memory import StepMemory, UpdatedParameter

# Seconds that a capture took here: so much, and so much more for each torch call of the forward.
CAPTURE_S, CAPTURE_S_PER_CALL = 8.0, 0.4
RESTARTS = 3  # captures that are given up because the model was changed, before steps stay eager
SMALL_MS = 5.0  # captured steps up to this may be faster on one thread: .7 ms against 1.7 on two, of 75 k parameters
STATES_OF_PYTHON = 64  # that may come before steps stay eager


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
    for name, of_one in looked_up_tables(model).items() if clip_norm else ():
        if any(table.sparse for table in of_one):
            raise CannotAdopt(
                f"clip_norm={clip_norm:g}: the gradient of {module_line(model, name)} is sparse, and "
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

    # For steps of which ranks make parts: tables that are moved as dense layers, by name, with the reason; and
    # parameters and buffers that this rank neither reads nor moves.
    _as_layers: Mapping[str, str] = {}
    _absent: Set[str] = frozenset()

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
        _catch_up(list(model.parameters()))  # behind another step, perhaps
        self._rows, self._resident = rows, None if rows is None else RowsOnDevice(rows, self._device)
        self._begin()
        if not self._why:
            try:
                check_model(model)
                update_rules(model, self._optimizers)
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
        self._calls, self._random = 0, False  # torch calls of a forward, and whether it draws random numbers
        self._source: AdoptedSource | None = None
        self._captured: CapturedStep | None = None
        self._engine = self._executor()
        self._state: PythonState | None = None
        self._tokens: dict[Any, int] = {}
        self._checked: dict[Any, int] = {}
        self._reported, self._capture_s, self._since, self._stale_grads = False, 0.0, 0, True
        self._visible: list[tuple[int, nn.Parameter, str, Tensor]] = []
        # Weights and states that can lag, known after the first captured step, and those that do.
        self._late: list[Tensor] | None = None
        self._lagging: list[Tensor] = []
        self._loaded = False  # whether a state was loaded that the memory has not read the number of steps of

    def _executor(self) -> StepEngine:
        return StepEngine(self._device)

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
        for call in self.after_step:
            call()
        return result

    def _any_step(self, batch: AnyBatch) -> tuple[Tensor, Any]:
        if self._why:
            return self._eager(batch)
        if self._captured is not None:
            return self._step(self._captured, batch)
        if len(self._eager_seconds) == 1:
            return self._observed(batch)
        if len(self._eager_seconds) >= 2 and self._pays():
            try:
                captured = self._capture()
            except CannotCaptureError as error:
                self._stay_eager(error)
                return self._eager(batch)
            return self._step(captured, batch)
        start = self._now()
        result = self._eager(batch)
        self._eager_seconds.append(self._now() - start)
        if len(self._eager_seconds) == WATCHED and self._compile == "auto":
            self._announce()
        return result

    def settle(self) -> None:
        """Catches up rows that no step has read lately, so that model and optimizers are as after eager steps.

        Nobody needs to call it: whoever reads a lagging weight or state causes it.
        """
        if not self._lagging:
            return
        for tensor in self._lagging:
            tensor.__class__ = _LAGGING.pop(id(tensor))[0]
        self._lagging = []
        self._adopted_source.memory.settle()

    @contextmanager
    def settled(self) -> Iterator[nn.Module]:
        """Gives the model with all rows caught up, for an evaluation or for saving."""
        self.settle()
        yield self._model

    def describe(self) -> str:
        """Returns which way steps go and why, and how each table is moved."""
        if self._why:
            return f"eager: {self._why}"
        if self._captured is None:
            return f"eager so far ({self._steps} step{'s' if self._steps != 1 else ''})"
        dense = [f"as a dense layer: {name} ({why})" for name, why in self._adopted_source.not_tables.items()]
        ways = [f"captured since step {self._since:,}", self._captured.describe(), *dense]
        return "; ".join(way for way in ways if way)

    def figures(self) -> dict[str, float]:
        """Returns ``eager_s`` and ``captured_s``, medians of a step, and ``capture_s``, of all captures, in seconds.

        Those that are not known yet are not there.
        """
        figures = {"capture_s": self._capture_s} if self._capture_s else {}
        for name, seconds in (("eager_s", self._eager_seconds), ("captured_s", self._captured_seconds)):
            if seconds:
                figures[name] = median_step(seconds)
        return figures

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
        first = two_digits(expected / seconds)
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

    def _eager(self, batch: AnyBatch, watch: AbstractContextManager[Any] | None = None) -> tuple[Tensor, Any]:
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
        """Checks a loss; on a GPU that of the step before, so that nobody waits for the device."""
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
        """Makes an eager step and looks at what it does."""
        args = batch.args()
        watch = ForwardWatch(self._model, self._loss, args)
        loss, output = self._eager(GivenBatch(args), watch)
        watch.problems += unusable(output, list(tensor_leaves(args)))
        # Time is not taken of this step.
        self._eager_seconds.append(self._eager_seconds[-1])
        self._calls, self._state, self._random = watch.observer.calls, watch.state, watch.random
        try:
            if watch.problems:
                raise CannotAdopt(watch.problems[0])
            self._source = self._adopted(watch.tables, watch.observer)
            self._settings = fixed_settings(self._optimizers)
        except CannotCaptureError as error:
            self._stay_eager(error)
        return loss, output

    def _adopted(self, tables: Mapping[str, list[Table]], observer: ForwardObserver) -> AdoptedSource:
        """Returns what the captured step is made of, after an eager step that has made the optimizers' state."""
        moved, not_tables = [], {**observer.matrices, **self._as_layers}
        self._visible = []
        for name, (number, index, parameter, choice) in update_rules(self._model, self._optimizers).items():
            if not parameter.requires_grad or parameter.grad is None:
                continue
            if name in tables and choice.weight_decay:
                not_tables.setdefault(name, "AdamW's weight_decay moves all its rows in every step")
            optimizer = self._optimizers[number]
            state = optimizer.state.get(parameter, {})
            names = STATES[choice.kind]
            self._visible += [(number, parameter, key, state[key]) for key in (*names, "step") if key in state]
            moved.append(
                UpdatedParameter(
                    name,
                    name in tables and name not in not_tables,
                    False,
                    parameter.detach(),
                    [state[key].detach() for key in names],
                    [state["step"].detach()] if "step" in state else [],
                    GroupSettings(optimizer, index),
                    choice,
                )
            )
        tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        names_moved = {each.name for each in moved}
        left_out = names_moved | self._absent
        fixed = {name: tensor.detach() for name, tensor in tensors.items() if name not in left_out}
        memory = StepMemory(moved, fixed, clips=bool(self._clip_norm))
        taken = {name: modules for name, modules in tables.items() if name in memory.tables}
        return self._source_of(memory, taken, not_tables, list(observer.outside.values()))

    def _source_of(
        self,
        memory: StepMemory,
        tables: Mapping[str, list[Table]],
        not_tables: Mapping[str, str],
        outside: list[Tensor],
    ) -> AdoptedSource:
        return AdoptedSource(self._model, self._loss, memory, tables, not_tables, outside, self._clip_norm)

    def _capture(self) -> CapturedStep:
        _, doing = engine_for(self._device)
        if changed := self._changed():
            raise CannotAdopt(f"{changed} changes from step to step")
        self._adopted_source.memory.reload()
        self._say(f"{doing} ...")
        self._captured = CapturedStep(
            self._adopted_source,
            self._engine,
            autocast=self._autocast,
            patience=self._patience if self._compile == "auto" else 0,
        )
        self._since = self._steps
        return self._captured

    def _step(self, captured: CapturedStep, batch: AnyBatch) -> tuple[Tensor, Any]:
        """Makes a captured step, or the eager one where there is none for this batch."""
        source = self._adopted_source
        if changed := self._changed():
            return self._anew(changed, batch)
        if self._loaded:
            try:
                source.memory.reload()
            except CannotCaptureError as error:
                self._stay_eager(error)
                return self._eager(batch)
            self._loaded = False
        try:
            given = source.inputs((batch, self._python()))
            self._prepare(captured, given)
            before = self._before() if self._checked[given.key] else None
            start = self._now() if not self._reported else 0.0
            loss, output = self._run(captured, given, batch, before)
        except CannotCaptureError as error:
            return self._instead(captured, error, batch)
        finally:
            self._engine.plain = False
        if before is not None:
            return self._verified(given, batch, before, (loss, output))
        self._lag()
        self._look(loss, written=True)
        if not self._reported:
            self._captured_seconds.append(self._now() - start)
            if len(self._captured_seconds) > WATCHED:
                self._report()
        return loss, output

    def _prepare(self, captured: CapturedStep, given: StepInputs) -> None:
        """Captures the step for a batch of a shape that has none yet."""
        if given.key in self._checked:
            return
        start, first = time.perf_counter(), not captured.shapes
        captured.prepare(given)
        seconds = time.perf_counter() - start
        self._checked[given.key] = self._verify if first else min(self._verify, 1)
        self._capture_s += seconds
        self._say(f"... {seconds:.1f} s{f'; {captured.describe()}' if first and captured.describe() else ''}")

    def _run(
        self,
        captured: CapturedStep,
        given: StepInputs,
        batch: AnyBatch,
        before: tuple[Tensor, dict[str, Tensor]] | None,
    ) -> tuple[Tensor, Any]:
        if self._stale_grads:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            self._stale_grads = False
        try:
            return captured(given)
        except Exception as error:
            if before is not None:
                write_back(self._adopted_source.memory, before[1])
                raise _EndOfCaptureError(f"{type(error).__name__}: {first_line(error)}") from error
            self._broken = (
                f"the captured step {self._steps:,} has failed half way ({first_line(error)}): load the last "
                "checkpoint of the model and of the optimizer, and call adopt() again"
            )
            with torch.no_grad():
                self._loss(*batch.args())  # whose error is the user's, and says more
            raise RuntimeError(self._broken) from error

    def _changed(self) -> str:
        """Names what a captured step has fixed and somebody has changed; empty where nothing was."""
        if fixed_settings(self._optimizers) != self._settings:
            return "a setting of the optimizer other than lr (OneCycleLR: give cycle_momentum=False)"
        return self._adopted_source.changed()

    def _python(self) -> int:
        """Returns the number of the state that the Python values are in that forward reads."""
        assert self._state is not None
        token = self._state.token()
        number = self._tokens.get(token)
        if number is None:
            number = self._tokens[token] = len(self._tokens)
            if number >= STATES_OF_PYTHON:
                first = next(iter(self._tokens))
                raise _EndOfCaptureError(
                    f"{self._state.changed(first)} changes from step to step; give it to the step as a tensor"
                )
        return number

    def _anew(self, changed: str, batch: AnyBatch) -> tuple[Tensor, Any]:
        """Gives up the captured step, since somebody changed what it has fixed, and makes an eager one."""
        self.settle()
        self._restarts += 1
        since = self._restarts
        if since > RESTARTS or "optimizer" in changed:
            self._stay_eager(CannotAdopt(f"{changed} has changed at step {self._steps:,}"))
            return self._eager(batch)
        self._say(f"{changed} has changed: eager steps again, until a capture pays")
        self._begin()
        try:
            check_model(self._model)
            update_rules(self._model, self._optimizers)
        except CannotCaptureError as error:
            self._stay_eager(error)
        result = self._eager(batch)
        self._eager_seconds.append(0.0)
        return result

    def _instead(self, captured: CapturedStep, error: CannotCaptureError, batch: AnyBatch) -> tuple[Tensor, Any]:
        """Makes the eager step on a batch for which there is no captured one."""
        self.settle()
        rare = isinstance(error, RareShapeError)
        if isinstance(error, _EndOfCaptureError) or (not rare and not captured.shapes):
            self._stay_eager(error)
        elif not rare:
            if self._compile == "require":
                self._stay_eager(error)
            self._note(f"batches of one kind stay eager: {error}")
        result = self._eager(batch)
        self._stale_grads = True
        if not self._why:
            try:
                captured.reload()
            except CannotCaptureError as apart:
                self._stay_eager(apart)
        return result

    def _before(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Prepares a captured step that is compared with the eager one: random numbers and memory before it."""
        self.settle()
        self._engine.plain = self._random
        return random_state(self._device), contents(self._adopted_source.memory)

    def _verified(
        self, given: StepInputs, batch: AnyBatch, before: tuple[Tensor, dict[str, Tensor]], result: Any
    ) -> tuple[Tensor, Any]:
        """Takes a captured step back, makes the eager one, and compares the two; the eager one stays."""
        memory = self._adopted_source.memory
        memory.settle()
        captured = contents(memory)
        write_back(memory, before[1])
        set_random_state(self._device, before[0])
        start = self._now()
        eager = self._eager(batch)
        if self._compile == "require":  # where nothing but the two slow first steps was eager
            self._eager_seconds.append(self._now() - start)
        self._stale_grads = True
        far = step_difference(memory, before[1], captured, result, eager, 300.0 if self._in_autocast() else 1.0)
        moved = {each.name for each in memory.moved}
        for name in update_rules(self._model, self._optimizers):
            if name not in moved and self._adopted_source.parameters[name].grad is not None:
                far = far or f"'{name}', which has a gradient now and had none before"
        if far:
            self._stay_eager(CannotAdopt(f"a captured step differs from the eager one on the same batch in {far}"))
            return eager
        memory.reload()
        self._checked[given.key] -= 1
        return eager

    @property
    def _adopted_source(self) -> AdoptedSource:
        assert self._source is not None
        return self._source

    def _in_autocast(self) -> bool:
        with self._autocast():
            return self._computes_in_16_bits

    def _lag(self) -> None:
        """Has whoever reads a weight or state that lags catch it up first."""
        if self._lagging:
            return
        if self._late is None:
            parameters, rows = self._adopted_source.parameters, set(self._adopted_source.memory.row_tables)
            names = {id(parameter): name for name, parameter in parameters.items()}
            self._late = [parameter for name, parameter in parameters.items() if name in rows]
            self._late += [tensor for _, p, key, tensor in self._visible if key == "step" or names[id(p)] in rows]
        for tensor in self._late:
            _LAGGING[id(tensor)] = type(tensor), self
            tensor.__class__ = _LaggingParameter if isinstance(tensor, nn.Parameter) else _LaggingTensor
        self._lagging = self._late

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Copies a state that was loaded into the memory of the step, which stays at its addresses."""
        if self._source is None or self._why:
            return
        try:
            with torch.no_grad():
                for number, parameter, key, tensor in self._visible:
                    if self._optimizers[number] is optimizer:
                        state = optimizer.state[parameter]
                        tensor.copy_(torch.as_tensor(state[key]))
                        state[key] = tensor
            self._loaded = True
        except KeyError:
            self._begin()  # another state, as of an optimizer without a step

    def _report(self) -> None:
        """Says what the capture gained, and goes back to eager steps where it gained nothing."""
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

    def _stay_eager(self, error: CannotCaptureError) -> None:
        """Leaves all further steps eager, and says why; or raises where a capture is required."""
        self.settle()
        self._captured = None
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


class StepEngine:
    """The executor of a device, that can also run a step op by op, with the random numbers that eager steps draw.

    Attributes:
        plain: whether the next steps run op by op.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.plain = device, False

    def __call__(self, step: Callable[..., list[Tensor]], memory: list[Tensor], inputs: list[Tensor]) -> Run:
        """Captures the step."""
        if self._device.type == "cuda":
            fast, slow = cuda_graph(step, memory, inputs), as_it_is(step, memory, inputs)
        else:
            graph, examples = self.trace(step, [*memory, *inputs])
            compiled = self.compile(graph, examples)
            fast, slow = _on(compiled, memory), _on(graph, memory)
        return lambda later: slow(later) if self.plain else fast(later)

    def trace(self, step: Callable[..., list[Tensor]], tensors: list[Tensor]) -> tuple[GraphModule, list[Tensor]]:
        """Returns the ops of a step, and tensors without values of the shapes of those that it is called with."""
        examples = unaliased(tensors)
        return _without_mkldnn(lambda: traced(step, examples)), examples

    def compile(self, graph: GraphModule, examples: list[Tensor]) -> Callable[..., list[Tensor]]:
        """Compiles ops for a CPU."""
        return compile_graph(graph, examples)


def _without_mkldnn(call: Callable[[], GraphModule]) -> GraphModule:
    """Traces without mkldnn, of whose LSTM there is no graph that runs."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return call()
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _on(step: Callable[..., list[Tensor]], memory: list[Tensor]) -> Run:
    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(step(*memory, *inputs))

    return run


class _EndOfCaptureError(CannotAdopt):
    """No batch can be captured any more, as after a first captured step that failed, and was taken back."""


_LAGGING: dict[int, tuple[type, AdoptedStep]] = {}  # tensors that lag, by id: their class, and the step to settle


def _catch_up(tree: Any) -> None:
    for tensor in tensor_leaves(tree):
        if id(tensor) in _LAGGING:
            _LAGGING[id(tensor)][1].settle()


def _caught_up_first(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    _catch_up((args, kwargs))
    return func(*args, **(kwargs or {}))


class _LaggingTensor(Tensor):
    """A tensor of an optimizer's state that lags until somebody looks at it; then it is a plain tensor again."""

    __torch_function__: Any = classmethod(_caught_up_first)

    def __deepcopy__(self, memo: Any) -> Any:
        _catch_up(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _catch_up(self)
        return self.__reduce_ex__(protocol)


class _LaggingParameter(nn.Parameter):
    """A weight that lags until somebody looks at it; then it is a plain parameter again."""

    __torch_function__: Any = classmethod(_caught_up_first)
    __deepcopy__ = _LaggingTensor.__deepcopy__
    __reduce_ex__ = _LaggingTensor.__reduce_ex__
