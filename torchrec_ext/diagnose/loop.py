"""TrainingLoop: a user's own loop under experiments: its batches, its step by spans, and rounds of all variants.

The order of a round is reversed every other time. An experiment that cannot be made is left out, and it is noted why.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchrec_ext.diagnose.batches import BatchSource, called_with, joined_batches
from torchrec_ext.diagnose.findings import Round, spread
from torchrec_ext.observe.reached import named_modules
from torchrec_ext.observe.samples import Samples
from torchrec_ext.observe.user_lines import described

TURN_S = 0.05  # seconds of a turn of short steps, of which one wait for a core must not be the half
MOST_ROUNDS, FEWEST_ROUNDS = 15, 4
_ITERATIONS = 4  # of the loop in a round, at least
_STEPS = 2, 64  # of a turn, at least and at most
_POOL = 4  # batches that the variants share
_LONGER = 3  # times so many rounds where they are spread too far for a verdict, and there is time
_STEADY = 0.25  # spread of iterations at which no further rounds are made
StepFunction = Callable[..., object]
T = TypeVar("T")


class Variant(NamedTuple):
    """An experiment: it runs steps, and returns seconds of one step's batch by name."""

    name: str
    run: Callable[[], Round]


def steps_of_turn(seconds: float) -> int:
    """Returns how many steps of so many seconds are timed at once."""
    least, most = _STEPS
    return max(least, min(most, round(TURN_S / max(seconds, 1e-6))))


class StepClock:
    """Seconds of this thread; on a GPU up to the end of its kernels.

    Args:
        host: clock of this thread.
        gpu: device of the steps; None for a CPU.
    """

    def __init__(self, host: Callable[[], float], *, gpu: torch.device | None) -> None:
        self.host = host
        self._gpu = gpu
        self._thread = threading.get_ident()

    def __call__(self) -> float:
        """Returns seconds since some moment."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        return self.host()

    def in_any_thread(self) -> float:
        """Returns seconds as they are of this thread; other threads have the wall clock."""
        if threading.get_ident() == self._thread:
            return self()
        return time.perf_counter()


class TrainingLoop:
    """A user's training loop under experiments.

    Args:
        fn: step function.
        batches: batches that it takes.
        modules: modules of the step.
        clock: clock of this thread.
        restore: puts back what a step changes, between two experiments.

    Attributes:
        source: batches without an end.
        pool: last batches of the source.
        iterations: iterations of a round.
        turn_steps: steps of a turn.
        not_measured: reason for each experiment that is missing.
        notes: what else a reader must know, one sentence each.
    """

    def __init__(
        self,
        fn: StepFunction,
        batches: Iterable[Any],
        modules: Sequence[nn.Module],
        clock: Callable[[], float],
        restore: Callable[[], object] = lambda: None,
    ) -> None:
        self.modules = modules
        self.restore = restore
        weights = chain.from_iterable(root.parameters() for root in modules)
        gpu = next((each.device for each in weights if each.is_cuda), None)
        self.cuda = gpu is not None
        self.clock = StepClock(clock, gpu=gpu)
        self.source = BatchSource(batches)
        self.compiled = any(
            type(module).__name__ == "OptimizedModule"
            for _, module in named_modules(modules)
        )
        self.pool: list[Any] = []
        self._optimizer_s = 0.0
        self._begins: list[float] = []
        self.iterations = _ITERATIONS
        self.turn_steps = _STEPS[0]
        self.not_measured: dict[str, str] = {}
        self.notes: list[str] = []
        if hasattr(batches, "__next__"):
            self.notes.append(
                "batches is an iterator: those that experiments took are gone, unless iter() begins it anew"
            )
        self._step = called_with(fn, self.source.first)

    # ---------------------------------------------------------------- the loop as it is

    def call(self, batch: Any) -> object:
        """Runs the step on a batch."""
        return self._step(batch)

    def iterate(self) -> dict[str, float]:
        """Runs the user's own loop once, a batch and a step on it, and returns the seconds of its parts."""
        batch, data, sleep = self.source.take(self.clock)
        # Changed steps run on these, so that their seconds hold no loader.
        self.pool = [*self.pool, batch][-_POOL:]
        self._optimizer_s = 0.0
        # One that raised in an experiment has not ended.
        self._begins = []
        begin = self.clock()
        self.call(batch)
        step = self.clock() - begin
        return {
            "data": data,
            "sleep": sleep,
            "step": step,
            "model": step - self._optimizer_s,
            "optimizer": self._optimizer_s,
        }

    def run(self) -> Round:
        """Runs the iterations of a round, and returns the mean seconds of their parts."""
        if self.iterations > 1:
            # What the step keeps for later was put back: it makes that anew once, and
            # not in a timed iteration.
            self.iterate()
        parts = [self.iterate() for _ in range(self.iterations)]
        # As in a loop that accumulates gradients.
        if not all(part["optimizer"] for part in parts):
            self.not_measured["captured"] = (
                "not every iteration takes an optimizer's step, as an adopted one does"
            )
        return {
            name: statistics.fmean([each[name] for each in parts]) for name in parts[0]
        }

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

    # ------------------------------------------------------------------- steps in a row

    def several(self, count: int) -> list[Any]:
        """Returns so many batches for changed steps, again from the first if there are fewer."""
        return [self.pool[index % len(self.pool)] for index in range(count)]

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

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Times every optimizer's step meanwhile."""

        def begin(*_: Any) -> None:
            self._begins.append(self.clock.in_any_thread())

        def end(*_: Any) -> None:
            began = self._begins.pop()
            # An optimizer may step others inside of its own step.
            if not self._begins:
                self._optimizer_s += self.clock.in_any_thread() - began

        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(begin).remove)
            stack.callback(register_optimizer_step_post_hook(end).remove)
            yield


def enough(rounds: Sequence[Round]) -> bool:
    """Whether enough rounds were run: 15, and up to 45 while they vary."""
    if len(rounds) < MOST_ROUNDS:
        return False
    return (
        len(rounds) >= _LONGER * MOST_ROUNDS
        or spread([each["data"] + each["step"] for each in rounds]) < _STEADY
    )


def attempt(loop: TrainingLoop, name: str, run: Callable[[], T], otherwise: T) -> T:
    """Runs an experiment, and puts the state back for the next one; returns ``otherwise`` if it raised."""
    try:
        return run()
    except Exception as error:
        loop.not_measured[name] = described(error)
        return otherwise
    finally:
        loop.restore()


def warm_up(loop: TrainingLoop) -> bool:
    """Runs the first steps; False if the step cannot be run."""
    try:
        for _ in range(3):
            loop.iterate()
    except Exception as error:
        loop.not_measured["step"] = f"the step raised {described(error)}"
        return False
    return True


def in_rounds(
    loop: TrainingLoop,
    variants_of: Callable[[], Iterable[Variant]],
    budget_s: float,
) -> Sequence[Round]:
    """Runs the loop and its variants in turn, all of them in every round.

    Args:
        loop: the user's loop.
        variants_of: returns the changes to a step.
        budget_s: seconds of the wall clock for the rounds, of which there are four at least.
    """
    start = time.perf_counter()
    missing = loop.not_measured
    nothing: Round = {}

    def ran(variant: Variant) -> Round:
        return attempt(loop, variant.name, variant.run, nothing)

    with loop.watching():
        # The loop is a variant too: it stands in each round beside the changes that it
        # is compared with.
        as_it_is = Variant("loop", loop.run)
        first = ran(as_it_is)
        if not first:
            return []
        loop.choose_iterations(first, time.perf_counter() - start)
        variants = [as_it_is]
        start = time.perf_counter()
        for variant in variants_of():
            elapsed_s = time.perf_counter() - start
            # Those that decide most stand first, and each is run once before it is timed.
            if elapsed_s * FEWEST_ROUNDS > budget_s:
                missing[variant.name] = (
                    f"the others take {elapsed_s:.1f} s, and budget_s={budget_s:g} holds {FEWEST_ROUNDS} rounds; give "
                    f"about budget_s={2 * FEWEST_ROUNDS * elapsed_s:.0f}"
                )
            else:
                ran(variant)
                variants.append(variant)
        rounds: list[Round] = []
        while not enough(rounds) and "loop" not in missing:
            is_over = time.perf_counter() - start > budget_s
            # With fewer rounds there is no verdict.
            if is_over and len(rounds) >= FEWEST_ROUNDS:
                break
            seconds: dict[str, float] = {}
            # In reversed order in every other round: a machine that becomes slower or faster during a round would
            # favour the same variants otherwise.
            direction = -1 if len(rounds) % 2 else 1
            for variant in variants[::direction]:
                if variant.name not in missing:
                    seconds |= ran(variant)
            if "loop" not in missing:
                rounds.append(seconds)
    return rounds or [first]


def sampled(once: Callable[[], object], seconds: float) -> tuple[Samples, int]:
    """Calls a function for so many seconds, and returns at which lines it was, and the number of calls."""
    samples = Samples()
    iterations = 0
    end = time.perf_counter() + seconds
    with samples:
        while time.perf_counter() < end or not iterations:
            once()
            iterations += 1
    return samples, iterations
