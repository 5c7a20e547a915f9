"""TrainingLoop: a user's own loop under experiments: its batches, its step by spans, and rounds of all variants.

The order of a round is reversed every other time. An experiment that cannot be made is left out, and it is noted why.
"""

from __future__ import annotations

import gc
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
# With fewer rounds there is no verdict, so the first four may take longer than the
# budget.
_OVERTIME = 3
StepFunction = Callable[..., object]


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
        self.cuda = any(
            each.is_cuda
            for each in chain.from_iterable(root.parameters() for root in modules)
        )
        self.clock = StepClock(clock, cuda=self.cuda)
        self.source = BatchSource(batches)
        self.compiled = any(
            type(module).__name__ == "OptimizedModule"
            for _, module in named_modules(modules)
        )
        self.pool: list[Any] = []
        self._parts: dict[str, float] = {}
        self.iterations = _ITERATIONS
        self.turn_steps = _STEPS[0]
        self.not_measured: dict[str, str] = {}
        self.notes = list(self.source.notes)
        self._step = called_with(fn, self.source.first)

    # ---------------------------------------------------------------- the loop as it is

    def call(self, batch: Any) -> object:
        """Runs the step on a batch."""
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
        self._parts = {"backward": 0.0, "optimizer": 0.0}
        begin = self.clock()
        self.call(batch)
        step = self.clock() - begin
        seconds = self._parts
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

    def _add(self, name: str, begin: float) -> None:
        """Adds the seconds of a stretch of the step up to now."""
        self._parts[name] = (
            self._parts.get(name, 0.0) + self.clock.in_any_thread() - begin
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Times every backward and every optimizer's step meanwhile."""
        begins: list[float] = []

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                begin = self.clock.in_any_thread()
                try:
                    return function(*args, **kwargs)
                finally:
                    self._add("backward", begin)

            return call

        def begin(*_: Any) -> None:
            begins.append(self.clock.in_any_thread())

        def end(*_: Any) -> None:
            # A stack, because an optimizer may step others inside of its own step.
            if begins:
                self._add("optimizer", begins.pop())

        with calls_of_autograd(timed), ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(begin).remove)
            stack.callback(register_optimizer_step_post_hook(end).remove)
            yield


@contextmanager
def calls_of_autograd(
    wrapper: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """Wraps torch.autograd.backward and grad meanwhile."""
    with ExitStack() as stack:
        for name in ("backward", "grad"):
            function = getattr(torch.autograd, name)
            setattr(torch.autograd, name, wrapper(function))
            stack.callback(setattr, torch.autograd, name, function)
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


def enough(rounds: Sequence[Round]) -> bool:
    """Whether enough rounds were run: 15, and up to 45 while they vary."""
    if len(rounds) < MOST_ROUNDS:
        return False
    return (
        len(rounds) >= _LONGER * MOST_ROUNDS
        or spread([each["data"] + each["step"] for each in rounds]) < _STEADY
    )


def attempt(loop: TrainingLoop, variant: Variant) -> Round:
    """Runs a variant, and puts the state back for the next one."""
    try:
        return variant.run()
    except Exception as error:
        loop.not_measured[variant.name] = described(error)
        return {}
    finally:
        loop.restore()


def warm_up(loop: TrainingLoop) -> bool:
    """Runs the first steps; False if the step cannot be run."""
    try:
        for _ in range(3):
            loop.iterate()
    except StopIteration:
        loop.note_end()
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
        budget_s: seconds of the wall clock for the rounds; the first four may take three times as long.
    """
    start = time.perf_counter()
    missing = loop.not_measured
    with loop.watching():
        # The loop is a variant too: it stands in each round beside the changes that it
        # is compared with.
        as_it_is = Variant("loop", loop.run)
        first = attempt(loop, as_it_is)
        if not first:
            return []
        loop.choose_iterations(first, time.perf_counter() - start)
        variants = [as_it_is, *variants_of()]
        if not _try_each(loop, variants, budget_s, start):
            return [first]
        rounds: list[Round] = []
        while not enough(rounds) and "loop" not in missing:
            elapsed_s = time.perf_counter() - start
            overtime = _OVERTIME if len(rounds) < FEWEST_ROUNDS else 1
            if rounds and elapsed_s > overtime * budget_s:
                break
            seconds: dict[str, float] = {}
            # In reversed order in every other round: a machine that becomes slower or faster during a round would
            # favour the same variants otherwise.
            direction = -1 if len(rounds) % 2 else 1
            for variant in variants[::direction]:
                if variant.name not in missing:
                    seconds |= attempt(loop, variant)
            if "loop" not in missing:
                rounds.append(seconds)
    return rounds or [first]


def _try_each(
    loop: TrainingLoop, variants: Sequence[Variant], budget_s: float, start: float
) -> float:
    """Runs each variant once, gives up those beyond the budget, and returns the seconds of a round."""
    round_s = 0.0
    num_tried = 0
    for variant in variants:
        before = time.perf_counter()
        has_no_time = before - start > budget_s / 2
        if round_s and (has_no_time or round_s * FEWEST_ROUNDS > budget_s):
            # The variants that were tried stand for the others.
            needed_s = FEWEST_ROUNDS * round_s * len(variants) / max(1, num_tried)
            loop.not_measured[variant.name] = (
                f"a round takes {round_s:.1f} s already, and budget_s={budget_s:g} holds {FEWEST_ROUNDS}; "
                f"give about budget_s={max(needed_s, 2 * budget_s):.0f}"
            )
            continue
        attempt(loop, variant)
        if variant.name not in loop.not_measured:
            round_s += time.perf_counter() - before
            num_tried += 1
    return round_s


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
