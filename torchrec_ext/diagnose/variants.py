"""Variants: a training step changed, each change an experiment of its own; SmallTables: one of these changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchrec_ext.diagnose.batches import row_count
from torchrec_ext.diagnose.findings import Round
from torchrec_ext.diagnose.loop import TrainingLoop, Variant
from torchrec_ext.diagnose.ops import ids_in
from torchrec_ext.observe.reached import named_modules
from torchrec_ext.observe.state_copy import StateCopy

IDLE = 0.3  # cores that others may keep busy where more threads are tried


def variants(
    loop: TrainingLoop,
    small: SmallTables | None,
    busy: float | None,
) -> Iterator[Variant]:
    """Yields the experiments while others keep ``busy`` cores busy.

    Args:
        loop: the user's loop.
        small: small tables in place of the step's large ones, if it has some.
        busy: cores that others keep busy; None if unknown.
    """
    missing = loop.not_measured

    def steps() -> float:
        return loop.timed(loop.steps())

    # First, since it decides most, and later variants are left out where there is no
    # time.
    if small is not None and not loop.compiled:
        yield Variant("small_tables", lambda: {"small_tables": _inside(small, steps)})
    yield Variant("op", lambda: _prices(loop))
    yield Variant("ready", lambda: {"ready": steps()})
    if loop.compiled:
        why = "the step is compiled, and would be compiled again for it"
        names = ("quadruple", "bf16", "small_tables")
        missing.update(dict.fromkeys(names, why))
        yield from _threads(loop, busy)
        return
    if row_count(loop.pool[0]):
        yield Variant("quadruple", lambda: {"quadruple": loop.timed(loop.joined(4))})
    else:
        missing["quadruple"] = (
            "the batch is not made of tensors with one number of rows"
        )
    yield from _threads(loop, busy)
    yield Variant("bf16", lambda: _bf16(loop))


def _inside(small: SmallTables, measure: Callable[[], float]) -> float:
    with small:
        return measure()


def _threads(loop: TrainingLoop, busy: float | None) -> Iterator[Variant]:
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    if threads > 1:
        yield Variant("one_thread", lambda: {"one_thread": _on(loop, 1)})
    why = ""
    if threads >= cores:
        why = f"{threads} thread(s) on {cores} core(s) are all of them"
    elif busy is None or busy > IDLE:
        number = "nobody knows how many" if busy is None else f"{busy:.1f}"
        why = (
            f"others keep {number} of {cores} cores busy, and threads that wait for a core make a step many times "
            "slower; ask again on an idle machine"
        )
    if why:
        loop.not_measured["all_threads"] = why
    else:
        yield Variant("all_threads", lambda: {"all_threads": _on(loop, cores)})


def _on(loop: TrainingLoop, threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return loop.timed(loop.steps())
    finally:
        torch.set_num_threads(before)


def _bf16(loop: TrainingLoop) -> Round:
    device = "cuda" if loop.cuda else "cpu"

    def inside() -> Any:
        # Autocast keeps the weights' casts until it ends, so each step has its own, as
        # in a loop.
        return torch.autocast(device, torch.bfloat16)

    return {"bf16": loop.timed(loop.steps(), inside)}


def _prices(loop: TrainingLoop) -> Round:
    """Returns the seconds of bringing a value to Python, and of a tiny op, with autograd and without."""
    value = torch.zeros(())
    source = torch.ones(8, requires_grad=True)

    def sync() -> None:
        for _ in range(100):
            value.item()

    def recorded() -> None:  # 62 ops of forward and as many of backward
        product = source
        for _ in range(61):
            product = product * 1.001
        torch.autograd.grad(product.sum(), source)

    @torch.no_grad()
    def bare() -> None:
        for _ in range(124):
            source.mul_(1.001)

    def seconds_of(call: Callable[[], object]) -> float:
        # One call before it has memory ready.
        call()
        start = loop.clock.host()
        call()
        return loop.clock.host() - start

    return {
        "sync": seconds_of(sync) / 100,
        "op": seconds_of(recorded) / 124,
        "bare": seconds_of(bare) / 124,
    }


class SmallTables:
    """Tables of a few rows in place of large ones, while this context is open: ids are taken modulo their number.

    The step then runs as if an optimizer moved only the rows that are read. The user's parameters and their state are
    not touched: others stand in their place in modules and optimizers.

    Args:
        state: knows all modules and optimizers.
        tables: modules of tables, with the ids that a step reads of each.
        rows_for_each: rows of a small table for each id that a step reads.
    """

    def __init__(
        self, state: StateCopy, tables: Sequence[tuple[Any, int]], rows_for_each: int
    ) -> None:
        self._state = state
        self._tables = tables
        self._small: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._states: dict[tuple[int, int], dict[str, Any]] = {}
        self._rows_for_each = rows_for_each
        self._stack = ExitStack()

    def __enter__(self) -> SmallTables:
        if not self._small:
            self._make()
        with ExitStack() as stack:
            for _, module in named_modules(self._state.modules):
                for name, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) in self._small:
                        module._parameters[name] = self._small[id(parameter)][1]
                        stack.callback(module._parameters.__setitem__, name, parameter)
            for module, _ in self._tables:
                hook = module.register_forward_pre_hook(_modulo, with_kwargs=True)
                stack.callback(hook.remove)
            for optimizer in self._state.optimizers:
                self._swap(optimizer, stack)
            # Only now: an error on the way puts back what was swapped so far.
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _make(self) -> None:
        for module, reads in self._tables:
            weight = module.weight
            # torch refuses a padding row outside of the table.
            rows = min(
                len(weight),
                max(1 + (module.padding_idx or 0), self._rows_for_each * reads),
            )
            if id(weight) in self._small:
                # Two modules share the weight: its small table has room for the ids of
                # both.
                rows = max(rows, len(self._small[id(weight)][1]))
            # The weight is held too, so that its id is not used again.
            self._small[id(weight)] = (
                weight,
                nn.Parameter(weight.detach()[:rows].clone()),
            )

    def _swap(self, optimizer: Optimizer, stack: ExitStack) -> None:
        for group in optimizer.param_groups:
            params = group["params"]
            for index, parameter in enumerate(params):
                if id(parameter) not in self._small:
                    continue
                small = self._small[id(parameter)][1]
                key = id(optimizer), id(parameter)
                if key not in self._states:
                    state = optimizer.state.get(parameter, {})
                    self._states[key] = {
                        name: _first_rows(value, parameter, small)
                        for name, value in state.items()
                    }
                if self._states[key]:
                    optimizer.state[small] = self._states[key]
                params[index] = small
                stack.callback(optimizer.state.pop, small, None)
                stack.callback(params.__setitem__, index, parameter)


def _first_rows(value: Any, parameter: Tensor, small: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    # A count of steps has no rows.
    if value.shape[:1] == parameter.shape[:1]:
        value = value[: len(small)]
    return value.clone()


def _modulo(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = ids_in(args, kwargs) % len(module.weight)
    if args:
        return (ids, *args[1:]), kwargs
    return args, {**kwargs, "input": ids}
