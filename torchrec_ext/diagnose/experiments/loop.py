"""TrainingLoop: a user's own loop under experiments: its batches and its step, run, timed by spans, and changed.

A span is a stretch of a step, such as its backward, by two clocks: see :class:`Moment`.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchrec_ext.diagnose.experiments.batches import (
    BatchSource,
    called_with,
    joined_batches,
)
from torchrec_ext.diagnose.facts import Round
from torchrec_ext.observe.clock import ThreadClock
from torchrec_ext.observe.ops import calls_of_autograd
from torchrec_ext.observe.reached import named_modules
from torchrec_ext.observe.state_copy import StateCopy

TURN_S = 0.05  # seconds of a turn of short steps, of which one wait for a core must not be the half
_ITERATIONS = 4  # of the loop in a round, at least
_STEPS = 2, 64  # of a turn, at least and at most
_POOL = 4  # batches that the variants share
StepFunction = Callable[..., object]


def steps_of_turn(seconds: float) -> int:
    """Returns how many steps of so many seconds are timed at once."""
    least, most = _STEPS
    return max(least, min(most, round(TURN_S / max(seconds, 1e-6))))


class Moment(NamedTuple):
    """A moment: of the wall clock, which all processes of a host share, and of this thread's own clock."""

    wall: float
    own_s: float


class Span(NamedTuple):
    """A stretch of a step, such as its backward."""

    name: str
    begin: Moment
    end: Moment

    @property
    def seconds(self) -> float:
        """Seconds of the thread's own clock."""
        return self.end.own_s - self.begin.own_s


class StepClock:
    """Seconds of this thread; on a GPU up to the end of its kernels.

    Args:
        host: clock of this thread, which :attr:`host` may replace for a while.
        cuda: whether steps run on a GPU.
    """

    def __init__(self, host: Callable[[], float], *, cuda: bool) -> None:
        self.host = host
        self._cuda = cuda
        self._thread = threading.get_ident()

    def __call__(self) -> float:
        """Returns seconds since some moment."""
        if self._cuda:
            torch.cuda.synchronize()
        return self.host()

    def moment(self) -> Moment:
        """Returns the present moment; other threads have the wall clock as their own."""
        seconds = (
            self() if threading.get_ident() == self._thread else time.perf_counter()
        )
        return Moment(time.perf_counter(), seconds)


class TrainingLoop:
    """A user's training loop under experiments.

    Args:
        fn: step function.
        batches: batches that it takes.
        state: copy of everything that a step changes; the caller puts it back at the end.
        clock: clock of this thread.
        recipe: the step and the loader are a recipe's of this package.
        modules: modules of the step, if ``state`` does not know them.

    Attributes:
        source: batches without an end.
        modules: modules of the step.
        pool: last batches of the source.
        fixed: batches for changed steps; those of the pool if there are none.
        spans: spans of the last iteration, in the order of their ends.
        iterations: iterations of a round.
        turn_steps: steps of a turn.
        before_step: called with each batch before its step.
        not_measured: reason for each experiment that is missing.
        notes: what else a reader must know, one sentence each.
    """

    def __init__(
        self,
        fn: StepFunction,
        batches: Iterable[Any],
        state: StateCopy,
        clock: ThreadClock,
        *,
        recipe: bool = False,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        self.state = state
        self.recipe = recipe
        self.cuda = any(
            each.is_cuda
            for each in chain.from_iterable(root.parameters() for root in state.modules)
        )
        self.clock = StepClock(clock, cuda=self.cuda)
        self.source = BatchSource(batches)
        self.modules = [*state.modules, *modules]
        self.compiled = any(
            type(module).__name__ == "OptimizedModule"
            for _, module in named_modules(state.modules)
        )
        self.pool: list[Any] = []
        self.fixed: Sequence[Any] = ()
        self.spans: list[Span] = []
        self.iterations = _ITERATIONS
        self.turn_steps = _STEPS[0]
        self.before_step: Callable[[Any], object] = lambda batch: None
        self.not_measured: dict[str, str] = {}
        self.notes = [*dict.fromkeys(state.notes), *self.source.notes]
        if clock.note:
            self.notes.insert(0, clock.note)
        if not shutil.which(os.environ.get("CXX", "g++")) and not shutil.which(
            "clang++"
        ):
            self.notes.append(
                "there is no C++ compiler here, which adopt and torch.compile need: install g++"
            )
        self._step = called_with(fn, self.source.first)

    # ---------------------------------------------------------------- the loop as it is

    def call(self, batch: Any) -> object:
        """Runs the step on a batch."""
        self.before_step(batch)
        return self._step(batch)

    def iterate(self) -> dict[str, float]:
        """Runs the user's own loop once, a batch and a step on it, and returns the seconds of its parts."""
        try:
            batch, data, sleep = self.source.take(self.clock)
            # Changed steps run on these, so that their seconds hold no loader.
            self.pool = [*self.pool, batch][-_POOL:]
        except StopIteration:
            if not self.pool:
                raise
            self.note_end()
            batch = self.pool[0]
            data = 0.0
            sleep = 0.0
        self.spans.clear()
        begin = self.clock.moment()
        self.call(batch)
        step = self._end("step", begin)
        seconds = {"backward": 0.0, "optimizer": 0.0}
        for span in self.spans[:-1]:
            seconds[span.name] += span.seconds
        # All that is neither of the two counts as forward: so the parts add up to the
        # step.
        forward = step - (seconds["backward"] + seconds["optimizer"])
        return {
            "data": data,
            "sleep": sleep,
            "step": step,
            "forward": forward,
            **seconds,
        }

    def run(self) -> Round:
        """Runs the iterations of a round, and returns the mean seconds of their parts."""
        if self.iterations > 1:
            # What the step keeps for later was put back: it makes that anew once, and
            # not in a timed iteration.
            self.iterate()
        with garbage_seconds(self.clock) as collecting:
            parts = [self.iterate() for _ in range(self.iterations)]
        means = {
            name: statistics.fmean([each[name] for each in parts]) for name in parts[0]
        }
        return {**means, "gc": collecting[0] / self.iterations}

    def note_end(self) -> None:
        """Notes the final end of an iterator."""
        self.not_measured.setdefault(
            "data", "the iterator ended: give an iterable that can be begun anew"
        )

    def choose_iterations(self, first: Round, elapsed_s: float) -> None:
        """Chooses the iterations of a round and the steps of a turn; the first ones took ``elapsed_s``."""
        seconds = first["data"] + first["step"]
        loader: Any = self.source.batches
        workers = getattr(loader, "num_workers", 0)
        self.iterations = max(_ITERATIONS, steps_of_turn(seconds))
        self.turn_steps = steps_of_turn(first["step"])
        if workers:
            # What the workers made ahead must be used up before a wait for them shows.
            self.iterations = max(
                self.iterations, 3 * workers * (loader.prefetch_factor or 2)
            )
        elif seconds > 0.5 or elapsed_s > 1.0:
            # The latter where others use the machine, and a first iteration waits for
            # cores.
            self.iterations = self.turn_steps = 1
        elif self.source.kind == "iterator":
            # All that is taken of an iterator is kept in memory, to be handed back.
            self.iterations = _ITERATIONS

    # ------------------------------------------------------------------- steps in a row

    def several(self, count: int) -> list[Any]:
        """Returns so many batches for changed steps, again from the first if there are fewer."""
        batches = self.fixed or self.pool
        return [batches[index % len(batches)] for index in range(count)]

    def steps(self, least: int = 1) -> list[Any]:
        """Returns the batches of a turn."""
        return self.several(max(least, self.turn_steps))

    def joined(self, times: int) -> list[Any]:
        """Returns the batches of a turn, each of the rows of so many of the loader's."""
        return [joined_batches(self.several(times))] * max(1, self.turn_steps // times)

    def timed(
        self, batches: Sequence[Any], inside: Callable[[], Any] = nullcontext
    ) -> float:
        """Returns the mean seconds of a step on each of these, inside of a context of its own.

        One before them has memory and threads ready.
        """
        if self.iterations > 1:
            with inside():
                self.call(batches[0])
        start = self.clock()
        for batch in batches:
            with inside():
                self.call(batch)
        return (self.clock() - start) / len(batches)

    # ---------------------------------------------------------------------------- spans

    def _end(self, name: str, begin: Moment) -> float:
        """Notes a span up to now, and returns its seconds."""
        span = Span(name, begin, self.clock.moment())
        self.spans.append(span)
        return span.seconds

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes a span for every backward and every optimizer's step meanwhile."""
        moments: list[Moment] = []

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                begin = self.clock.moment()
                try:
                    return function(*args, **kwargs)
                finally:
                    self._end("backward", begin)

            return call

        def begin(*_: Any) -> None:
            moments.append(self.clock.moment())

        def end(*_: Any) -> None:
            # A stack, because an optimizer may step others inside of its own step.
            if moments:
                self._end("optimizer", moments.pop())

        with calls_of_autograd(timed), ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(begin).remove)
            stack.callback(register_optimizer_step_post_hook(end).remove)
            yield


@contextmanager
def garbage_seconds(clock: Callable[[], float]) -> Iterator[list[float]]:
    """Adds up the seconds of Python's garbage collections of this thread in the one entry of a list."""
    spent = [0.0]
    thread = threading.get_ident()

    def collect(phase: str, _: object) -> None:
        if threading.get_ident() != thread:
            return
        if phase == "start":
            spent[0] -= clock()
        else:
            spent[0] += clock()

    gc.callbacks.append(collect)
    try:
        yield spent
    finally:
        gc.callbacks.remove(collect)
