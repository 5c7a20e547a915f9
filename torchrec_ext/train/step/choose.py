"""Steps: chooses TorchRec's pipeline, a plain step where ranks do not meet, or a captured step if that pays off."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture import policy as capture_policy
from torchrec_ext.capture.captured import CapturedStep
from torchrec_ext.capture.errors import CannotCaptureError, RareShapeError
from torchrec_ext.capture.executors import Run, StepExecutor, engine_for
from torchrec_ext.capture.policy import (
    WATCHED,
    CapturePolicy,
    Compile,
    milliseconds,
)
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import EveryStep
from torchrec_ext.drawn import DrawnStep
from torchrec_ext.train.step.plain import PlainStep
from torchrec_ext.train.step.precision import Context, LossScaling

_Step = DrawnStep | TowerBatch
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class StepsConfig:
    """Settings of :class:`Steps`: how it chooses, and its callbacks.

    Args:
        compile: ``auto``, ``off`` or ``require``, as in a :class:`TrainConfig`.
        total: number of remaining steps of the run.
        made: number of steps of the run before them.
        context: makes the context of a captured step's forward, the same as in the pipeline.
        scaling: scales the loss, the same as in the pipeline's forward and optimizer; such steps are not captured.
        take_time: called before work that may take minutes.
        tell: receives the choice, once and after each change: ``captured``, the medians ``eager_ms`` and
            ``captured_ms``, and a ``message``.
    """

    compile: Compile
    total: int
    made: int = 0
    context: Context = nullcontext
    scaling: LossScaling | None = None
    take_time: Callable[[], None] = lambda: None
    tell: Callable[[dict[str, Any]], None] = lambda _: None


class Steps:
    """Trains on one batch after the other, by eager or captured steps.

    On a CPU, where every rank holds all tables, eager steps are :class:`PlainStep`'s: all of one rank, those between
    the exchanges of local SGD, and those of ranks that average few gradients. All others are the pipeline's. With
    ``compile="auto"`` the first steps are eager. If the rest of the run would take longer than
    :data:`~torchrec_ext.capture.policy.PAYS_S` and the step can be captured, the rest is captured. A rank trains
    captured steps only if no other waits for it: on one rank, or between the exchanges of local SGD.

    Args:
        model: model from :func:`hybrid_parallel`.
        optimizer: the model's optimizer.
        runtime: rank and device of this process.
        pipeline: runs steps that are neither captured nor plain.
        ranks: how the ranks are kept equal.
        config: settings of the choice.

    Raises:
        CannotCaptureError: ``compile`` is ``require``, and it is clear before the first step that none can be captured.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: HybridOptimizer,
        runtime: Runtime,
        pipeline: TrainPipelineSparseDist[TowerBatch, Any],
        ranks: EveryStep,
        config: StepsConfig,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._runtime = runtime
        self._config = config
        self.pipeline = pipeline
        self._ranks = ranks
        self._policy = CapturePolicy(config.compile, self._say)
        self._made = config.made
        if config.compile == "off":
            self._policy.reason = "train.compile=off"
        self._step: CapturedStep | None = None
        self._plain: PlainStep | None = None
        # On a GPU the pipeline overlaps copies with kernels, which a plain step does not.
        if runtime.device.type == "cpu":
            # The pipeline does the same, only slower.
            with suppress(CannotCaptureError):
                self._plain = PlainStep(
                    model,
                    optimizer,
                    context=config.context,
                    scaling=config.scaling,
                    together=runtime.world_size > 1 and not ranks.takes_local_steps,
                )
        ranks.checks.append(self.settle)
        if config.compile == "require":
            # fails here, before the first step, if this machine cannot capture at all
            self._attempt(self._engine)

    def outputs(
        self,
        loader: Iterable[_Step],
        watch: Callable[[Iterable[_Step]], Iterator[_Step]],
    ) -> Iterator[Any]:
        """Trains on the batches of an epoch, and yields the model's output for each; then settles the model.

        Args:
            loader: batches; its ``steps()`` if it has such a method and steps may be captured.
            watch: passes the batches on and checks their number.
        """
        for output in self._outputs(loader, watch):
            self._made += 1
            yield output

    def _outputs(
        self,
        loader: Iterable[_Step],
        watch: Callable[[Iterable[_Step]], Iterator[_Step]],
    ) -> Iterator[Any]:
        policy = self._policy
        if policy.compile != "off" and callable(getattr(loader, "steps", None)):
            # On a GPU the host's draws take longer than the step; without Triton they
            # would be some hundred kernels of it.
            on_gpu = self._runtime.device.type != "cpu"
            # A run that stays eager draws for many steps at once, on the host.
            stays_eager = policy.is_decided and self._step is None
            inside = on_gpu and capture_policy.HAS_TRITON and not stays_eager
            loader = _DrawnSteps(loader, inside=inside)
        items = watch(loader)
        while not policy.is_decided:
            watched = islice(items, policy.steps_to_watch - len(policy.eager_seconds))
            yield from self._timed(self._eager(watched), policy.eager_seconds)
            if len(policy.eager_seconds) < policy.steps_to_watch:
                return  # the epoch is over
            self._decide()
        if self._step is None:
            yield from self._timed(self._eager(items), policy.eager_seconds)
        else:
            # That of a loader with dynamic ids, whose look-ups are part of each step.
            compile_look_ups = getattr(loader, "compile_look_ups", None)
            if callable(compile_look_ups):
                compile_look_ups(self._compiled)
            yield from self._timed(
                self._run(self._step, items), policy.captured_seconds
            )
        self.settle()

    def _compiled(
        self,
        look_up: Callable[..., list[torch.Tensor]],
        memory: list[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> Run | None:
        """Compiles look-ups of ids for the CPU; says once why they stay eager, and returns None."""
        self._config.take_time()
        try:
            # Without a compiler its message says so, on a machine with a GPU too.
            engine, _ = engine_for(torch.device("cpu"))
            return engine(look_up, memory, inputs)
        except CannotCaptureError as error:
            self._policy.note(f"note: look-ups of ids are not compiled: {error}")
            return None

    def settle(self) -> None:
        """Completes deferred updates: model and optimizer then equal those after the same number of eager steps."""
        if self._step is not None:
            self._step.settle()

    def _eager(self, items: Iterable[_Step]) -> Iterator[Any]:
        batches = map(_batch_of, items)
        if self._plain is None:
            yield from self._piped(batches)
            return
        self._plain.begin()
        waits = self._runtime.world_size > 1 and self._ranks.takes_local_steps
        for batch in batches:
            if not waits or self._ranks.silent:
                yield self._plain(batch)
            else:
                # One at a time: the pipeline must hold no batch when the plain steps
                # begin.
                yield from self._piped(iter([batch]))

    def _piped(self, batches: Iterator[TowerBatch]) -> Iterator[Any]:
        is_over = False
        while not is_over:
            run = _UpToFresh(batches)
            # The pipeline raises it once it has run empty.
            with suppress(StopIteration):
                while True:
                    yield self.pipeline.progress(run)
            is_over = run.is_over

    def _timed(self, outputs: Iterator[Any], seconds: list[float]) -> Iterator[Any]:
        """Passes the outputs on, and times them until the choice is made and reported."""
        policy = self._policy
        while not (policy.is_decided and policy.is_reported):
            start = time.perf_counter()
            no_output = object()
            output: Any = next(outputs, no_output)
            if output is no_output:
                return
            seconds.append(time.perf_counter() - start)
            yield output
            # One more, because the first captured step includes the capture.
            if policy.is_decided and len(seconds) > WATCHED:
                self._report()
        yield from outputs

    def _report(self) -> None:
        """Reports whether steps are captured and why, with the time of a step."""
        policy = self._policy
        policy.is_reported = True
        figures: dict[str, Any] = {
            "captured": False,
            "eager_ms": policy.eager_s * 1e3,
            "message": policy.describe_eager(),
        }
        if self._step is not None:
            eager = milliseconds(policy.eager_s)
            figures["captured"] = True
            figures["captured_ms"] = policy.captured_s * 1e3
            figures["message"] = f"captured {policy.describe_captured()}, eager {eager}"
        self._config.tell(figures)

    def _decide(self) -> None:
        policy = self._policy
        policy.is_decided = True
        remaining_steps = self._config.total - len(policy.eager_seconds)
        too_few = policy.too_few_left(remaining_steps, self._runtime.device.type)
        ranks = self._runtime.world_size
        if ranks > 1 and not self._ranks.silent:
            policy.reason = (
                f"{ranks} ranks wait for each other in every step; for captured steps launch one rank (-j 1x1), "
                "or set sync.mode=local_sgd and plan.sharding=data_parallel"
            )
            if policy.compile == "require":
                self._refuse(CannotCaptureError(policy.reason))
        elif too_few:
            policy.reason = f"capturing {too_few}"
        else:
            self._step = self._attempt(self._capture)
        if self._step is None:
            self._report()

    def _capture(self) -> CapturedStep:
        engine, progress = self._engine()
        step = CapturedStep(
            self._model,
            self._optimizer,
            engine,
            autocast=self._config.context,
            take_time=self._config.take_time,
            patience=self._policy.patience,
        )
        self._say(f"{progress} ...")
        return step

    def _engine(self) -> tuple[StepExecutor, str]:
        if self._config.scaling is not None:
            raise CannotCaptureError(
                "train.amp=fp16 leaves out steps whose gradients overflow; bf16 needs no such look at them"
            )
        return engine_for(self._runtime.device)

    def _attempt(self, make: Callable[[], Made]) -> Made | None:
        try:
            return make()
        except CannotCaptureError as error:
            self._refuse(error)
            return None

    def _run(self, step: CapturedStep, items: Iterator[_Step]) -> Iterator[Any]:
        for item in items:
            start = time.perf_counter()
            captures_before = step.captures
            try:
                _, output = step(item)
            except CannotCaptureError as error:
                yield from self._run_eager_instead(step, item, error)
                if self._step is None or not step.shapes:
                    self._step = None
                    self._report()
                    yield from self._eager(items)
                    return
                continue
            except Exception as error:
                self._raise_model_error(item, error)
                raise
            if step.captures > captures_before:
                self._policy.since = self._policy.since or self._made + 1
                # How tables are moved is the same for further shapes of a batch.
                ways = "" if captures_before else f"; {step.describe()}"
                self._say(f"... {time.perf_counter() - start:.1f} s{ways}")
            # A captured step updates by its own kernels, so nobody else calls these.
            for call in self._optimizer.after_step:
                call()
            yield output

    def _run_eager_instead(
        self, step: CapturedStep, item: _Step, error: CannotCaptureError
    ) -> list[Any]:
        """Trains the eager step on a batch without a captured one; an error of the eager step is the user's.

        If steps must be captured, only the model's forward runs, because the run ends here in any case.
        """
        step.settle()
        rare = isinstance(error, RareShapeError)
        if self._policy.compile == "require" and not rare:
            self._raise_model_error(item, error)
            self._refuse(error)
        outputs = list(self._eager([item]))
        try:
            step.reload()  # before anything reads the number of steps
        except CannotCaptureError as mismatch:
            # The eager step updated only some parameters, for example because one had
            # no gradient.
            self._step = None
            error = mismatch
            rare = False
        if not rare:
            self._refuse(error)
        return outputs

    def _raise_model_error(self, item: _Step, error: Exception) -> None:
        """Raises the error of the model's own forward, if any, after a captured step has failed on a batch."""
        self.pipeline.detach()
        try:
            with torch.no_grad(), self._config.context():
                self._model(_batch_of(item).to(self._runtime.device))
        except Exception as model_error:
            raise model_error from error

    def _refuse(self, error: CannotCaptureError) -> None:
        """Says once why steps are not captured, or ends the run if they must be."""
        if self._policy.compile == "require":
            raise CannotCaptureError(
                f"train.compile=require: the training step cannot be captured: {error}"
            ) from None
        self._policy.reason = str(error)
        self._policy.note(
            f"note: the training step is not captured: {error}; training goes on without"
        )

    def _say(self, text: str) -> None:
        if self._runtime.is_main:
            print(text, flush=True)


def _batch_of(item: _Step) -> TowerBatch:
    if isinstance(item, DrawnStep):
        return item.batch()  # type: ignore[no-any-return]
    return item


class _DrawnSteps:
    """Iterates over a loader's steps, before they are made into batches."""

    def __init__(self, loader: Any, *, inside: bool) -> None:
        self._loader = loader
        self._inside = inside

    def __iter__(self) -> Iterator[_Step]:
        return self._loader.steps(inside=self._inside)  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self._loader)


class _UpToFresh:
    """Iterates up to a batch of dynamic ids, after which the pipeline runs empty.

    Rows of a batch ahead would begin anew before this one is written, and be saved so. The pipeline itself must fetch
    each batch, because it does so on a stream of its own.
    """

    def __init__(self, batches: Iterator[TowerBatch]) -> None:
        self._batches = batches
        self._stops = False
        self.is_over = False

    def __iter__(self) -> Iterator[TowerBatch]:
        return self

    def __next__(self) -> TowerBatch:
        if self._stops:
            raise StopIteration
        batch = next(self._batches, None)
        self._stops = batch is None or batch.fresh is not None
        if batch is None:
            self.is_over = True
            raise StopIteration
        return batch
