"""Variants: a training step changed, each change an experiment of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor

from torchrec_ext.diagnose.batches import row_count
from torchrec_ext.diagnose.findings import Round
from torchrec_ext.diagnose.loop import TrainingLoop, Variant

IDLE = 0.3  # cores that others may keep busy where more threads are tried


def variants(
    loop: TrainingLoop,
    tables: Sequence[Tensor],
    busy: float | None,
) -> Iterator[Variant]:
    """Yields the experiments while others keep ``busy`` cores busy.

    Args:
        loop: the user's loop.
        tables: weights of the step's large tables.
        busy: cores that others keep busy; None if unknown.
    """
    missing = loop.not_measured

    def steps() -> float:
        return loop.timed(loop.steps())

    def still_tables() -> Round:
        with _without_gradients(tables):
            return {"still_tables": steps()}

    # First, since it decides most, and later variants are left out where there is no
    # time.
    if tables and not loop.compiled:
        yield Variant("still_tables", still_tables)
    yield Variant("op", lambda: _prices(loop))
    yield Variant("ready", lambda: {"ready": steps()})
    if loop.compiled:
        why = "the step is compiled, and would be compiled again for it"
        missing.update(dict.fromkeys(("quadruple", "bf16", "still_tables"), why))
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


@contextmanager
def _without_gradients(weights: Sequence[Tensor]) -> Iterator[None]:
    """Drops the gradients of weights meanwhile, before an optimizer sees them: it then leaves their rows alone."""

    def drop(weight: Tensor) -> None:
        weight.grad = None

    with ExitStack() as stack:
        for weight in weights:
            hook = weight.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
            stack.callback(hook.remove)
        yield


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
    """Returns the seconds of bringing a value to Python, and of a tiny op."""
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

    def seconds_of(call: Callable[[], object]) -> float:
        # One call before it has memory ready.
        call()
        start = loop.clock.host()
        call()
        return loop.clock.host() - start

    return {
        "sync": seconds_of(sync) / 100,
        "op": seconds_of(recorded) / 124,
    }
