"""LookUps: look-ups in an index, compiled if eager ones have taken as long as a compiler takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from torchrec_ext.ids.index import IdIndex, Layout, buckets_of, value_in_either

# About as long as inductor takes for both functions; from its cache it takes a tenth of
# a second.
COMPILE_S = 8.0
COMPILE_MORE_S = 3.0  # in a process that has compiled its training step
_MOST_TIMED = 8  # numbers of ids: bags of any length have many, of which none returns
_MOST_COMPILED = 4


class LookUps:
    """Looks ids up; a compiled look-up is for one number of ids, and an index of one size.

    Two functions are compiled, because inductor would compute the buckets anew for each of the ten places in them.
    """

    def __init__(self) -> None:
        # Look-ups are compiled when eager ones have taken so many times as long as a
        # compiler.
        self._patience = 1.0
        self._eager_s: dict[tuple[int, int], float] = {}
        self._compiled: dict[
            tuple[int, int], Callable[[Tensor, Tensor, Layout], Tensor]
        ] = {}

    def compile_now(self) -> None:
        """Compiles each number of ids when it comes for the second time."""
        self._patience = 0.0

    def find(self, index: IdIndex, ids: Tensor, layout: Layout) -> Tensor:
        """Returns the value of each id as :meth:`IdIndex.find` does, to the bit."""
        key = (len(ids), len(index.lines))
        if key in self._compiled:
            return self._compiled[key](index.lines, ids, layout)
        start = time.perf_counter()
        values = index.find(ids, layout)
        seconds = self._eager_s.get(key)
        # By number of ids, because compiled code is for one number.
        self._eager_s[key] = (seconds or 0.0) + time.perf_counter() - start
        is_due = (
            seconds is not None and self._eager_s[key] > self._patience * compile_s()
        )
        if is_due and len(ids) and len(self._compiled) < _MOST_COMPILED:
            self._compile(key, index.lines, ids, layout)
        elif len(self._eager_s) > _MOST_TIMED:
            self._eager_s = {}
        return values

    def _compile(
        self, key: tuple[int, int], lines: Tensor, ids: Tensor, layout: Layout
    ) -> None:
        from torchrec_ext.capture.errors import CannotCaptureError
        from torchrec_ext.capture.executors import engine_for, inductor

        # An index that has grown has another size for good.
        self._compiled = {
            other: find for other, find in self._compiled.items() if other[1] == key[1]
        }
        if lines.device.type != "cpu":
            self._patience = float("inf")
            return
        start = time.perf_counter()
        try:
            _, progress = engine_for(lines.device)
            _say(
                progress.replace("the training step", f"look-ups of {len(ids):,} ids")
                + " ..."
            )
            hashing = inductor(_HASHED, [], [ids, layout.first, layout.size])
            probing = inductor(
                _PROBED, [], [lines, ids, *hashing([ids, layout.first, layout.size])]
            )
        except CannotCaptureError as error:
            self._patience = float("inf")
            _say(f"look-ups stay eager: {error}")
            return
        _say(f"... {time.perf_counter() - start:.1f} s")

        def find(lines: Tensor, ids: Tensor, layout: Layout) -> Tensor:
            return probing([lines, ids, *hashing([ids, layout.first, layout.size])])[0]

        self._compiled[key] = find


def compile_s() -> float:
    """Returns about the seconds that a compilation takes in this process."""
    return COMPILE_MORE_S if "torch._inductor.compile_fx" in sys.modules else COMPILE_S


# No functions with annotations: inductor's cache refuses those of a module in which
# they are strings.
_HASHED = lambda ids, first, size: list(buckets_of(ids, Layout(first, first, size)))  # noqa: E731
_PROBED = lambda lines, ids, one, two: [value_in_either(lines, ids, one, two)]  # noqa: E731


def _say(text: str) -> None:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        print(f"ids: {text}", flush=True)
