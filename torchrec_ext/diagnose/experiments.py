"""Experiments: a training step as it is and changed, in turn, every variant in every round.

The order is reversed every other round. An experiment that cannot be made is left out, and it is noted why.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset

from torchrec_ext.diagnose.batches import BatchSource, called_with, joined_batches, loader_with, quarter_of, row_count
from torchrec_ext.diagnose.facts import Between, Facts, LineFacts, LoaderFacts, Round, spread
from torchrec_ext.diagnose.small_tables import SmallTables
from torchrec_ext.observe.clock import ThreadClock, busy_elsewhere
from torchrec_ext.observe.counting import (
    Counted,
    Forwards,
    OpsOfLine,
    Products,
    Samples,
    calls_of_autograd,
    compiled_graphs,
    count_ops,
    device_spans,
    device_use,
    roofline,
    sum_products,
)
from torchrec_ext.observe.state_copy import StateCopy
from torchrec_ext.observe.user_lines import described

MOST_ROUNDS, FEWEST_ROUNDS = 15, 4
_LONGER = 3  # times so many rounds where they are spread too far for a verdict, and there is time
_STEADY = 0.25  # spread of iterations at which no further rounds are made
_ITERATIONS = 4  # of the loop in a round, at least
_STEPS = 2, 64  # of a turn, at least and at most
TURN_S = 0.05  # seconds of a turn of short steps, of which one wait for a core must not be the half
_POOL = 4  # batches that the variants share
_SMALL_TABLE = 5  # a table is small with so many rows for each id that a step reads, and is made so for the experiment
_TRIAL = 10.0  # times the step that a first trial may take, before the variant is given up
_WORKER_S = 3.0
SAMPLE_S = 1.5  # seconds of the loop in which it is sampled at which lines it is
_LINES = 20  # that are kept of these
_IDLE = 0.3  # cores that others may keep busy where more threads are tried
Step = Callable[..., object]


def steps_of_turn(seconds: float) -> int:
    """Returns how many steps of so many seconds are timed at once."""
    least, most = _STEPS
    return max(least, min(most, round(TURN_S / max(seconds, 1e-6))))


class Variant(NamedTuple):
    """An experiment: it runs steps on the pool of batches, and returns seconds of one step's batch by name."""

    name: str
    run: Callable[[], Round]


class Experiments:
    """The experiments on one step function.

    Args:
        fn: step function.
        batches: batches that it takes.
        state: copy of what it changes, which also knows its modules and optimizers; whoever made it puts it back.
        clock: clock of this thread.
        budget_s: seconds of the wall clock that the rounds may take.
        recipe: the step and the loader are a recipe's of this package.
        modules: modules of the step, where ``state`` does not know them.
    """

    def __init__(
        self,
        fn: Step,
        batches: Iterable[Any],
        state: StateCopy,
        clock: ThreadClock,
        budget_s: float,
        *,
        recipe: bool = False,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        self.start, self.state, self._budget = time.perf_counter(), state, budget_s
        self.not_measured: dict[str, str] = {}
        self.notes = [*filter(None, [clock.note]), *dict.fromkeys(state.notes)]
        self.source = BatchSource(batches)
        self.notes += self.source.notes
        self._modules = [*state.modules, *modules]
        self._pool: list[Any] = []
        self._cuda = any(each.is_cuda for module in state.modules for each in module.parameters())
        self._recipe = recipe
        self._compiled = any(
            type(each).__name__ == "OptimizedModule" for module in state.modules for each in module.modules()
        )
        if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
            self.notes.append("there is no C++ compiler here, which adopt and torch.compile need: install g++")
        self._thread_clock, self._clock = clock, self._synchronised if self._cuda else clock
        self._call = called_with(fn, self.source.first)
        self._spans: Counter[str] = Counter()
        self._iterations, self._steps_of_turn = _ITERATIONS, _STEPS[0]
        self._small: SmallTables | None = None
        self._modes: Sequence[str] = ()
        self._lines: Sequence[LineFacts] = ()
        self._sampled_s = 0.0
        self._still = 0  # numbers in rows of tables with sparse gradients that a step does not move
        self.saved_files: set[str] = set()
        self._graphs = 0

    def _synchronised(self) -> float:
        torch.cuda.synchronize()
        return self._thread_clock()

    def facts(self, between: Mapping[str, tuple[Callable[[], object], int]]) -> Facts:
        """Makes all experiments."""
        busy = busy_elsewhere()
        machine = (0.0, 0.0) if self._cuda else roofline()
        counted = Counted()
        rounds: Sequence[Round]
        if self._warm_up():
            counted = self._count_ops()
            rounds = self._rounds(busy)
            if rounds and not self._cuda:
                counted.scale_to(statistics.median([each["step"] for each in rounds]))
            self._sample_lines(counted)
        else:
            rounds = self._data_alone()
        worker = self._worker(rounds)
        runs = self._between(between)
        tables = [each for each, _ in counted.tables.values()]
        products = self._products(counted)
        kernels, device_busy = self._on_device(rounds)
        flops, traffic = machine if self._cuda else map(max, machine, roofline())
        rows_of_tables = {p.shape[0] for module in self._modules for p in module.parameters() if p.dim() > 1}
        parameters = {id(p): p for o in self.state.optimizers for group in o.param_groups for p in group["params"]}
        return Facts(
            rounds=rounds,
            worker=worker,
            rows=row_count(self._pool[0]) if self._pool else 0,
            ops=counted.ops,
            bare_ops=counted.bare,
            op_lines=counted.lines.most_common(5),
            syncs=sum(counted.syncs.values()),
            sync_lines=counted.syncs.most_common(5),
            sync_ops=sum(ops.feeding for ops in counted.by_line.values()),
            op_s=0.0 if self._cuda else counted.seconds,
            work_s=0.0 if self._cuda else counted.work,
            op_kinds=sorted(counted.kinds.items(), key=lambda each: -each[1])[:5],
            lines=self._lines,
            sampled_s=self._sampled_s,
            whole_tables=() if self._cuda else list(counted.whole_tables(rows_of_tables)),
            all_items=() if self._cuda else list(counted.all_items()),
            double_s=0.0 if self._cuda else sum(counted.double.values()),
            double_line=max(counted.double, key=counted.double.__getitem__, default=""),
            modes=self._modes,
            product_s=products.seconds,
            product_flops=products.flops,
            layers=products.layers,
            tables=tables,
            towers=self._towers(rounds),
            parameters=sum(p.size().numel() for p in parameters.values()) - self._still,  # ShardedTensor has no numel()
            optimizers=[type(each).__name__ for each in self.state.optimizers],
            loader=self._loader(),
            kernels=kernels,
            device_busy=device_busy,
            threads=torch.get_num_threads(),
            cores=len(os.sched_getaffinity(0)),
            busy=self._busy,
            flops_per_s=max(flops, products.rate),
            bytes_per_s=traffic,
            between=runs,
            recompiles=self._graphs,
            recipe=self._recipe,
            seconds=time.perf_counter() - self.start,
            not_measured=self.not_measured,
            notes=self.notes,
        )

    # ------------------------------------------------------------------------------------------------ the step as it is

    def _warm_up(self) -> bool:
        """Runs the first steps; False where the step cannot be run."""
        self._busy: float | None = None
        self._note_unreached()
        try:
            for _ in range(3):
                self._iterate()
        except StopIteration:
            self._pool_ended()
            return True
        except Exception as error:
            self.not_measured["step"] = f"the step raised {described(error)}"
            return False
        return True

    def _note_unreached(self) -> None:
        if not self.state.optimizers and not self._recipe:
            self.notes.append(
                "no optimizer can be reached from the step, so what it changes is not put back; pass model= and "
                "optimizer="
            )

    def _pool_ended(self) -> None:
        self.not_measured.setdefault("data", "the iterator ended: give an iterable that can be begun anew")

    def _iterate(self) -> dict[str, float]:
        """Runs the user's own loop once: a batch, and a step on it."""
        try:
            batch, data, sleep = self.source.take(self._clock)
            self._pool = [*self._pool[1 - _POOL :], batch] if len(self._pool) >= _POOL else [*self._pool, batch]
        except StopIteration:
            if not self._pool:
                raise
            self._pool_ended()
            batch, data, sleep = self._pool[0], 0.0, 0.0
        self._spans.clear()
        start = self._begin()
        self._call(batch)
        step = self._ended("step", start)
        spans = {name: self._spans[name] for name in ("backward", "optimizer")}
        return {"data": data, "sleep": sleep, "step": step, "forward": step - sum(spans.values()), **spans}

    def _loop(self) -> Round:
        if self._iterations > 1:
            self._iterate()  # makes anew what the step keeps for later, which was put back
        with garbage_seconds(self._clock) as collecting:
            made = [self._iterate() for _ in range(self._iterations)]
        means = {name: statistics.fmean([each[name] for each in made]) for name in made[0]}
        return {**means, "gc": collecting[0] / self._iterations}

    def _data_alone(self) -> Sequence[Round]:
        """Times the loader where the step cannot be run."""
        rounds: list[Round] = []
        end = time.perf_counter() + min(5.0, self._budget)
        while len(rounds) < FEWEST_ROUNDS or (len(rounds) < MOST_ROUNDS and time.perf_counter() < end):
            ahead = self.source.is_ahead
            try:
                batch, data, sleep = self.source.take(self._clock)
            except StopIteration:
                self._pool_ended()
                break
            except Exception as error:
                self.not_measured["data"] = f"the loader raised {described(error)}"
                break
            self._pool = [batch]
            if not ahead:
                rounds.append({"data": data, "sleep": sleep})
        return rounds

    # ------------------------------------------------------------------------------------------------------- the rounds

    def _rounds(self, busy: Callable[[], float | None]) -> Sequence[Round]:
        start = time.perf_counter()
        with self._spanning():
            loop = Variant("loop", self._loop)
            first = self._attempt(loop)
            if not first:
                return []
            self._choose_iterations(first, start)
            self._busy = busy()
            variants = [loop, *self._variants(first["step"])]
            if sum(self._tried(variants, start)) == 0:
                return [first]
            rounds: list[Round] = []
            while not self._enough(rounds) and "loop" not in self.not_measured:
                if len(rounds) >= FEWEST_ROUNDS and time.perf_counter() - start > self._budget:
                    break
                if rounds and time.perf_counter() - start > 3 * self._budget:
                    break
                made: dict[str, float] = {}
                for variant in variants if len(rounds) % 2 == 0 else variants[::-1]:
                    if variant.name not in self.not_measured:
                        made |= self._attempt(variant)
                if "loop" not in self.not_measured:
                    rounds.append(made)
        self._busy = busy() if self._busy is None else self._busy
        return rounds or [first]

    @staticmethod
    def _enough(rounds: Sequence[Round]) -> bool:
        """Whether these are as many rounds as are made where there is time: more where they are spread far."""
        if len(rounds) < MOST_ROUNDS:
            return False
        return (
            len(rounds) >= _LONGER * MOST_ROUNDS or spread([each["data"] + each["step"] for each in rounds]) < _STEADY
        )

    def _choose_iterations(self, first: Round, start: float) -> None:
        seconds = first["data"] + first["step"]
        workers = getattr(self.source.given, "num_workers", 0)
        self._iterations, self._steps_of_turn = max(_ITERATIONS, steps_of_turn(seconds)), steps_of_turn(first["step"])
        if workers:  # what they made ahead must be used up before a wait for them shows
            ahead = 3 * workers * (self.source.given.prefetch_factor or 2)  # type: ignore[attr-defined]
            self._iterations = max(self._iterations, ahead)
        elif seconds > 0.5 or time.perf_counter() - start > 1.0:  # the latter on a machine that others use
            self._iterations = self._steps_of_turn = 1
        elif self.source.kind == "iterator":  # all that is taken of it is kept
            self._iterations = _ITERATIONS

    def _tried(self, variants: Sequence[Variant], start: float) -> list[float]:
        """Runs each variant once, and gives up those that a round has no time for."""
        spent: list[float] = []
        for variant in variants:
            before = time.perf_counter()
            if spent and (before - start > self._budget / 2 or sum(spent) * FEWEST_ROUNDS > self._budget):
                self.not_measured[variant.name] = (
                    f"a round takes {sum(spent):.1f} s already, and budget_s={self._budget:g} holds {FEWEST_ROUNDS}; "
                    "give more"
                )
                continue
            self._attempt(variant)
            if variant.name not in self.not_measured:
                spent.append(time.perf_counter() - before)
        return spent

    def _attempt(self, variant: Variant) -> Round:
        """Runs a variant, and puts back what its steps changed, so that the next one starts where it did."""
        try:
            return variant.run()
        except Exception as error:
            self.not_measured[variant.name] = described(error)
            return {}
        finally:
            self.state.restore_step()

    def _variants(self, step: float) -> Iterator[Variant]:
        pool = self._pool
        if self._small is not None and not self._compiled:  # first, since it decides most
            yield Variant("small_tables", self._with_small_tables)
        yield Variant("op", self._yardsticks)
        if self._modes:
            yield Variant("quiet", lambda: {"quiet": self._quietly(lambda: self._timed(self._steps()))})
        yield Variant("ready", lambda: {"ready": self._timed(self._steps())})
        if self._compiled:
            for name in ("quadruple", "quarter", "double", "bf16", "small_tables"):
                self.not_measured[name] = "the step is compiled, and would be compiled again for it"
            yield from self._threads(step)
            return
        if row_count(pool[0]):
            yield Variant("quadruple", lambda: {"quadruple": self._timed(self._joined(4))})
            yield Variant("quarter", lambda: {"quarter": self._timed(list(map(quarter_of, self._steps(least=2))))})
        else:
            for name in ("quadruple", "quarter", "double"):
                self.not_measured[name] = (
                    "batches of a recipe are not joined: set loader.batch_size and diagnose again"
                    if self._recipe
                    else "the batch is not made of tensors with one number of rows"
                )
        yield from self._threads(step)
        yield Variant("bf16", self._bf16)
        if row_count(pool[0]):
            yield Variant("double", lambda: {"double": self._timed(self._joined(2))})

    def _several(self, count: int) -> list[Any]:
        """Returns so many batches of the pool, again from the first where it has fewer."""
        return [self._pool[index % len(self._pool)] for index in range(count)]

    def _joined(self, times: int) -> list[Any]:
        """Returns the batches of a turn, each of the rows of so many of the loader's."""
        return [joined_batches(self._several(times))] * max(1, self._steps_of_turn // times)

    def _timed(self, batches: Sequence[Any], inside: Callable[[], Any] = nullcontext) -> float:
        """Returns the mean seconds of a step on each of these, inside of a context of its own.

        One before them has memory and threads ready.
        """
        if self._iterations > 1:
            with inside():
                self._call(batches[0])
        start = self._clock()
        for batch in batches:
            with inside():
                self._call(batch)
        return (self._clock() - start) / len(batches)

    def _steps(self, least: int = 1) -> list[Any]:
        return self._several(max(least, self._steps_of_turn))

    def _threads(self, step: float) -> Iterator[Variant]:
        threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        if threads > 1:
            yield Variant("one_thread", lambda: {"one_thread": self._on(1)})
        if threads >= cores:
            self.not_measured["all_threads"] = f"{threads} thread(s) on {cores} core(s) are all of them"
        elif self._busy is None or self._busy > _IDLE:
            which = "nobody knows how many" if self._busy is None else f"{self._busy:.1f}"
            self.not_measured["all_threads"] = (
                f"others keep {which} of {cores} cores busy, and threads that wait for a core make a step many times "
                "slower; ask again on an idle machine"
            )
        else:
            yield Variant("all_threads", lambda: {"all_threads": self._on(cores, at_most=_TRIAL * step)})

    def _on(self, threads: int, at_most: float = float("inf")) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            first = self._timed(self._several(1))  # wakes the threads
            if first > at_most:
                raise RuntimeError(f"{threads} threads took {first * 1e3:.3g} ms for a step, and were not tried again")
            return self._timed(self._steps())
        finally:
            torch.set_num_threads(before)

    def _bf16(self) -> Round:
        def inside() -> Any:  # which keeps the weights' casts until it ends
            return torch.autocast("cuda" if self._cuda else "cpu", torch.bfloat16)

        return {"bf16": self._timed(self._steps(), inside)}

    def _with_small_tables(self) -> Round:
        assert self._small is not None
        with self._small:
            return {"small_tables": self._timed(self._steps())}

    def _yardsticks(self) -> Round:
        return self._quietly(self._prices) if self._modes else self._prices()

    def _prices(self) -> Round:
        """Returns the seconds of bringing a value to Python, and of a tiny op, with autograd and without."""
        value, source = torch.zeros(()), torch.ones(8, requires_grad=True)

        def read() -> None:
            for _ in range(100):
                value.item()

        def recorded() -> None:  # 62 ops of forward and as many of backward
            made = source
            for _ in range(61):
                made = made * 1.001
            torch.autograd.grad(made.sum(), source)

        @torch.no_grad()
        def bare() -> None:
            for _ in range(124):
                source.mul_(1.001)

        calls = {"sync": (read, 100), "op": (recorded, 124), "bare": (bare, 124)}
        return {name: self._seconds_of(call) / count for name, (call, count) in calls.items()}

    def _seconds_of(self, call: Callable[[], object]) -> float:
        """Returns the seconds of a call; one before it has memory ready."""
        call()
        start = self._thread_clock()
        call()
        return self._thread_clock() - start

    def _quietly(self, measure: Callable[[], Any]) -> Any:
        """Measures without anomaly mode, and in a thread of its own: a profiler watches the thread that began it.

        A step that switches anomaly mode on by itself does not do so meanwhile.
        """
        clocks = self._clock, self._thread_clock

        def measured() -> Any:
            with ThreadClock() as clock:
                self._clock = self._thread_clock = clock
                return measure()

        with torch.autograd.set_detect_anomaly(False), ThreadPoolExecutor(1) as thread, ExitStack() as stack:
            stack.callback(setattr, torch, "set_anomaly_enabled", torch.set_anomaly_enabled)
            setattr(torch, "set_anomaly_enabled", lambda *_: None)  # noqa: B010
            try:
                return thread.submit(measured).result()
            finally:
                self._clock, self._thread_clock = clocks

    def _begin(self) -> Any:
        """Returns the moment at which a span begins."""
        return self._clock()

    def _ended(self, name: str, start: Any) -> float:
        """Adds up a span that ends now, and returns its seconds."""
        seconds: float = self._clock() - start
        self._spans[name] += seconds  # type: ignore[assignment]
        return seconds

    @contextmanager
    def _spanning(self) -> Iterator[None]:
        """Times every backward and every optimizer's step meanwhile."""
        begun: list[Any] = []

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                start = self._begin()
                try:
                    return function(*args, **kwargs)
                finally:
                    self._ended("backward", start)

            return call

        def end(*_: Any) -> None:
            if begun:
                self._ended("optimizer", begun.pop())

        with calls_of_autograd(timed), ExitStack() as stack:
            for handle in (
                register_optimizer_step_pre_hook(lambda *_: begun.append(self._begin())),
                register_optimizer_step_post_hook(end),
            ):
                stack.callback(handle.remove)
            graphs = compiled_graphs()
            yield
            self._graphs = compiled_graphs() - graphs if self._graphs == 0 else self._graphs

    # ------------------------------------------------------------------------------------------- what is counted once

    def _count_ops(self) -> Counted:
        try:
            counted = count_ops(lambda: self._call(self._pool[0]), self.state.modules)
        except Exception as error:
            self.not_measured["ops"] = described(error)
            return Counted()
        finally:
            self.state.restore_step()
        self._still = sum(
            max(0, facts.rows - facts.read) * facts.dim for facts, module in counted.tables.values() if module.sparse
        )
        trained = {id(p) for o in self.state.optimizers for group in o.param_groups for p in group["params"]}
        large = {
            id(module): (facts, module)
            for facts, module in counted.tables.values()
            if facts.rows > _SMALL_TABLE * facts.read and id(module.weight) in trained and not module.sparse
        }
        counted.tables = large
        self._modes = sorted(counted.modes)
        if large:
            reads = [(module, facts.read) for facts, module in large.values()]
            self._small = SmallTables(self.state, reads, _SMALL_TABLE)
        return counted

    def _sample_lines(self, counted: Counted) -> None:
        """Looks up at which of the user's lines the loop is, for a second."""
        if self._cuda or self._compiled:
            self.not_measured["lines"] = "sampled only for eager steps on a CPU, whose ops are timed"
        elif SAMPLE_S and "step" not in self.not_measured and "loop" not in self.not_measured:
            self._attempt(Variant("lines", lambda: self._sampled(counted)))

    def _sampled(self, counted: Counted) -> Round:
        iterations, end = 0, time.perf_counter() + SAMPLE_S
        of_iterator = self.source.kind == "iterator"  # all that is taken of it is kept
        with Samples() as samples:
            while time.perf_counter() < end or not iterations:
                if of_iterator:
                    self._call(self._pool[0])
                else:
                    self._iterate()
                iterations += 1
        self.saved_files = samples.saved
        self._sampled_s = sum(samples.seconds.values()) / iterations
        lines = []
        for (phase, line), seconds in samples.seconds.items():
            ops = counted.by_line.get(line, OpsOfLine())
            if line.text:
                lines.append(
                    LineFacts(
                        name=line.name,
                        text=line.text,
                        phase=phase,
                        seconds=seconds / iterations,
                        ops=ops.ops,
                        op_s=ops.seconds,
                        sync_ops=ops.feeding,
                    )
                )
        self._lines = sorted(lines, key=lambda each: -each.seconds)[:_LINES]
        return {}

    def _towers(self, rounds: Sequence[Round]) -> Sequence[tuple[str, float]]:
        """Returns sub-networks that do not read each other, with their shares of the forward."""
        if self._cuda or self._compiled or not rounds or "forward" not in rounds[0]:
            return ()
        made: list[dict[str, float]] = []
        try:
            for batch in self._several(_POOL):
                forwards = Forwards(self._modules, self._clock)
                with forwards.watching():
                    self._call(batch)
                made.append(forwards.apart())
        except Exception as error:
            self.not_measured["towers"] = described(error)
            return ()
        whole = statistics.median([each.get("ready", each["step"]) * each["forward"] / each["step"] for each in rounds])
        names = [name for name in made[0] if all(name in each for each in made)]
        return [(name, min(1.0, min(each[name] for each in made) / whole)) for name in names] if whole else ()

    def _on_device(self, rounds: Sequence[Round]) -> tuple[int, float | None]:
        """Returns the kernels of a step on a CUDA device, and the share of time in which the device ran one."""
        if not self._cuda or not rounds or "step" in self.not_measured:
            return 0, None
        batches = self._steps(least=4)
        try:
            spans = device_spans(lambda: [self._call(batch) for batch in batches])
        except Exception as error:
            self.not_measured["device"] = described(error)
            return 0, None
        if not spans:
            self.not_measured["device"] = "torch.profiler saw no kernel; it needs permission for the GPU's counters"
            return 0, None
        return round(len(spans) / len(batches)), device_use(spans)

    def _loader(self) -> LoaderFacts:
        try:
            return self.source.facts(self._thread_clock)
        except Exception as error:
            self.not_measured["rows"] = described(error)
            return LoaderFacts(kind=self.source.kind)

    def _worker(self, rounds: Sequence[Round]) -> Sequence[tuple[float, float]]:
        """Times a real worker by turns with the loader as it is, by the wall clock: both wait for cores."""
        why_not = self._no_worker(rounds)
        if not why_not:
            try:
                return self._worker_turns(self.source.given)  # type: ignore[arg-type]
            except Exception as error:
                why_not = described(error)
            finally:
                self.state.restore_step()
        self.not_measured["worker"] = why_not
        return ()

    def _no_worker(self, rounds: Sequence[Round]) -> str:
        """Returns why no worker is tried; empty where one is."""
        loader = self.source.given
        if self._recipe:
            return "this package's loader has no worker processes: a thread builds batches ahead"
        if not isinstance(loader, DataLoader):
            return "batches come from no DataLoader"
        if loader.num_workers or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            return "only for a Dataset with rows and no workers yet"
        if "step" in self.not_measured or not rounds:
            return "the step does not run"
        if statistics.median([each["data"] / (each["data"] + each["step"]) for each in rounds]) < 0.1:
            return "the loader takes under a tenth of the time"
        return ""

    def _worker_turns(self, loader: DataLoader[Any]) -> Sequence[tuple[float, float]]:
        with_worker = iter(loader_with(loader, num_workers=1, prefetch_factor=2))
        as_it_is = iter(loader_with(loader))
        turns: list[tuple[float, float]] = []
        end = time.perf_counter() + _WORKER_S
        try:
            for _ in range(3):
                self._call(next(with_worker))
            while time.perf_counter() < end or len(turns) < 2:
                turns.append((self._wall(as_it_is, ahead=0), self._wall(with_worker, ahead=4)))
        except StopIteration:
            if not turns:
                raise RuntimeError("an epoch is too short to time a worker") from None
        finally:
            del with_worker
        return turns

    def _wall(self, batches: Iterator[Any], ahead: int) -> float:
        for _ in range(ahead):  # what the worker made while it was not asked
            self._call(next(batches))
        start, count = time.perf_counter(), 0
        while time.perf_counter() < start + _WORKER_S / 12 or count < 3:
            self._call(next(batches))
            count += 1
        return (time.perf_counter() - start) / count

    def _products(self, counted: Counted) -> Products:
        if self._cuda:
            self.not_measured["products"] = "timed on a CPU alone"
            return Products()
        return sum_products(counted.products)

    def _between(self, between: Mapping[str, tuple[Callable[[], object], int]]) -> Sequence[Between]:
        made = []
        for name, (function, steps) in between.items():
            start = self._clock()
            try:
                function()
            except Exception as error:
                self.not_measured[name] = described(error)
                continue
            made.append(Between(name=name, seconds=self._clock() - start, steps=steps))
        return made


@contextmanager
def garbage_seconds(clock: Callable[[], float]) -> Iterator[list[float]]:
    """Adds up the seconds of Python's garbage collections of this thread in the one entry of a list."""
    spent = [0.0]
    thread = threading.get_ident()

    def collect(phase: str, _: object) -> None:
        if threading.get_ident() == thread:
            spent[0] += -clock() if phase == "start" else clock()

    gc.callbacks.append(collect)
    try:
        yield spent
    finally:
        gc.callbacks.remove(collect)
